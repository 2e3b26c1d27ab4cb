"""Models of libraries: the checkpointing switch that they bring along, and their caches of keys and values.

A trainer calls `model.gradient_checkpointing_enable()` (or its like in newer transformers, diffusers, timm) when its
arguments say so; TRL turns it off around generation and on again. The library's checkpoint would then be inside each
region of a plan. So the instance gets these methods again for as long as the plan is there: enabling is agreed to,
since the plan does it; disabling makes the regions plain calls; the flag that trainers ask for says which. Settings
that would choose what is recomputed are refused.

A layer of a Hugging Face model appends its keys and values to a cache, and would append them twice if it is run again.
So a region takes a snapshot of the cache (references, no copies), and the replay is given a cache made from it. As a
cache keeps keys and values alive, a model that is trained without saying so gets `use_cache=False`.

Invariants. Nothing is imported from these libraries: they are known by the names of methods and classes. All that is
put on a model can be pickled and copied with it, and `take_out` leaves the model's attributes as they were. A cache
that is written in place is found by the versions of its tensors, and refused.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from .. import errors
from ..state.tape import thread
from ..state.values import replay
from .wrappers import ForwardWrapper, Region

ENABLE = ("activation_checkpointing_enable", "gradient_checkpointing_enable", "enable_gradient_checkpointing")
DISABLE = ("activation_checkpointing_disable", "gradient_checkpointing_disable", "disable_gradient_checkpointing")
SET = "_set_gradient_checkpointing"
FLAG, FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"
TIMM_SET, TIMM_FLAG = "set_grad_checkpointing", "grad_checkpointing"
# How the recomputation is done, not what is recomputed; none of it changes a gradient here.
MEANS = ("use_reentrant", "preserve_rng_state", "determinism_check", "debug", "early_stop")


def call(function: Callable[..., Any], *args: Any, use_reentrant: bool | None = None, **kwargs: Any) -> Any:
    """The plain call, for the slot that a model's own loop takes its checkpoint function from."""
    return function(*args, **kwargs)


class State:
    """Says whether the regions of a plan are regions now.

    Attributes:
        regions: The regions.
        roots: The modules whose flag says it.
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        self.regions = list(regions)
        self.roots: list[nn.Module] = []

    def turn(self, on: bool = True) -> None:
        """Makes the regions regions, or plain calls."""
        for region in self.regions:
            region.disabled = not on
        for root in self.roots:
            root.__dict__[FLAG] = on and bool(self.regions)

    def off(self) -> None:
        """Makes the regions plain calls."""
        self.turn(False)

    def enable(
        self,
        gradient_checkpointing_kwargs: Any = None,
        every_n_layers: int = 1,
        offload: bool = False,
        *,
        activation_checkpointing_kwargs: Any = None,
        gradient_checkpointing_func: Any = None,
    ) -> None:
        """Makes the regions regions again, whatever the library's own settings say about how."""
        settings: dict[str, Any] = {**(activation_checkpointing_kwargs or {})}
        if isinstance(gradient_checkpointing_kwargs, dict):
            settings.update(gradient_checkpointing_kwargs)
        elif gradient_checkpointing_kwargs is not None:  # diffusers' first argument
            settings["gradient_checkpointing_func"] = gradient_checkpointing_kwargs
        chosen = {name: value for name, value in settings.items() if name not in MEANS}
        chosen.update({"every_n_layers": every_n_layers} if every_n_layers != 1 else {})
        chosen.update({"offload": offload} if offload else {})
        if gradient_checkpointing_func is not None:
            chosen["gradient_checkpointing_func"] = gradient_checkpointing_func
        if chosen:
            said = ", ".join(f"{name}={value!r}" for name, value in chosen.items())
            raise errors.ArgumentError(
                f"checkpointing was turned on with {said}, but this model has a plan, which says what is recomputed; "
                "the setting would have no effect.\n"
                '  Leave it out and say it in the plan ("block:3" or labels, for less than all layers), or take the '
                "plan out: handle.remove()"
            )
        self.turn()

    def set(self, enable: bool = True, gradient_checkpointing_func: Any = None, every_n_layers: int = 1) -> None:
        """Turns the regions on or off: the private method that the public ones of a library end in."""
        if enable:
            self.enable(every_n_layers=every_n_layers, gradient_checkpointing_func=gradient_checkpointing_func)
        else:
            self.off()


# A library's method, and what takes its place.
METHODS = {
    **dict.fromkeys(ENABLE, State.enable),
    **dict.fromkeys(DISABLE, State.off),
    SET: State.set,
    TIMM_SET: State.turn,
}


@contextmanager
def all_layers(model: nn.Module) -> Generator[None]:
    """Sets the probabilities with which a library's models leave layers out at random to 0 (LayerDrop)."""
    holders = {id(one): one for m in model.modules() for one in (m, getattr(m, "config", None))}.values()
    found = [
        (vars(one), name, value)
        for one in holders
        for name, value in (vars(one) if hasattr(one, "__dict__") else {}).items()
        if name.endswith("layerdrop") and isinstance(value, float)
    ]
    for here, name, _ in found:
        here[name] = 0.0
    try:
        yield
    finally:
        for here, name, value in found:
            here[name] = value


def checkpointing(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yields the modules whose library's own checkpointing is on, each with the flag that says so."""
    for module in model.modules():
        yield from ((module, flag) for flag in (FLAG, TIMM_FLAG) if getattr(module, flag, False) is True)


def switched(model: nn.Module, kwargs: Mapping[str, Any]) -> str:
    """The setting that every plan switches in a model that is called with some keywords, in words; "" for none."""
    if any(checkpointing(model)):
        return "turning its own checkpointing off"
    caches = any(getattr(getattr(module, "config", None), "use_cache", False) for module in model.modules())
    return "use_cache=False" if caches and kwargs.get("use_cache") is None else ""


def roots(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that have a switch with a flag that others read."""
    if any(callable(getattr(type(model), name, None)) for name in (*ENABLE, SET)):
        yield model
        return
    for child in model.children():
        yield from roots(child)


class CheckpointingSwitch:
    """The switches of a model, while a plan with these regions is in it."""

    def __init__(self, model: nn.Module, regions: Sequence[Region]) -> None:
        self._model = model
        self._state = State(regions)
        self._before: list[tuple[nn.Module, str, tuple[Any, ...]]] = []

    def put(self) -> None:
        """Takes the places of the model's own switches, which are off from now on."""
        for module, flag in checkpointing(self._model):  # turned on before the plan came
            self._set(module, flag, False)
        for module in self._model.modules():
            for name, kind in METHODS.items():
                if callable(getattr(type(module), name, None)):
                    self._set(module, name, types.MethodType(kind, self._state))
        for root in roots(self._model):
            self._state.roots.append(root)
            self._set(root, FLAG, False)
            self._set(root, FUNCTION, call)
        self._state.turn(True)

    def _set(self, module: nn.Module, name: str, value: Any) -> None:
        here = module.__dict__
        self._before.append((module, name, (here[name],) if name in here else ()))
        here[name] = value

    def take_out(self) -> None:
        """Leaves the model as it was."""
        for module, name, before in reversed(self._before):
            if before:
                module.__dict__[name] = before[0]
            else:
                module.__dict__.pop(name, None)
        self._before = []


def is_cache(value: object) -> bool:
    """Returns whether this is one of the library's caches, or a class derived from one."""
    return any(
        cls.__name__.endswith("Cache") and cls.__module__.partition(".")[0] == "transformers"
        for cls in type(value).__mro__
    )


class CacheSnapshot:
    """The content of a cache at one moment."""

    def __init__(self, cache: object) -> None:
        self._tensors: list[tuple[torch.Tensor, int]] = []
        self._cache = self._copied(cache, self._noted)

    def _noted(self, tensor: torch.Tensor) -> torch.Tensor:
        alias = tensor.detach().requires_grad_(tensor.requires_grad)  # shares memory and version, not the graph
        self._tensors.append((alias, alias._version))
        return alias

    def _copied(self, value: Any, leaf: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        if isinstance(value, torch.Tensor):
            return leaf(value)
        if type(value) in (list, tuple):
            return type(value)(self._copied(v, leaf) for v in value)
        if type(value) is dict:
            return {k: self._copied(v, leaf) for k, v in cast("dict[Any, Any]", value).items()}
        kinds = {cls.__name__ for cls in type(value).__mro__}
        if not (is_cache(value) or any(name.endswith(("CacheLayerMixin", "Layer")) for name in kinds)):
            return value
        made = copy.copy(value)
        made.__dict__.update({name: self._copied(v, leaf) for name, v in vars(value).items()})
        return made

    def check(self, path: str) -> None:
        """Raises ArgumentError for a cache that was written in place since."""
        if any(tensor._version != version for tensor, version in self._tensors):
            raise errors.ArgumentError(
                f"the cache of keys and values that {path or 'the model'} was given with gradients on is written in "
                "place, so what it held when the region ran is gone when it is run again.\n"
                "  Pass use_cache=False, or a DynamicCache, which appends; a static cache is for torch.no_grad()."
            )

    def cache(self) -> Any:
        """A cache as it was then, to be written to."""
        return self._copied(self._cache, lambda tensor: tensor)


class CachesFromSnapshot(ForwardWrapper):
    """The `forward` of a module inside of a region: its own, given the caches that the region's forward was given."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        forward = self.plain
        if self.idle or not torch.is_grad_enabled() or (torch.compiler.is_compiling() and not thread.untraced):
            return forward(*args, **kwargs)
        if getattr(self.module, "gradient_checkpointing", False) is True and self.module.training:
            raise errors.ArgumentError(other_checkpointing_inside(self.path))
        if not any(map(is_cache, args)) and not any(map(is_cache, kwargs.values())):
            return forward(*args, **kwargs)
        taken: list[CacheSnapshot] = []

        def take() -> list[CacheSnapshot]:
            taken[:] = [CacheSnapshot(value) for value in (*args, *kwargs.values()) if is_cache(value)]
            return taken

        snapshots = replay(take)()
        result = forward(*args, **kwargs) if taken else None
        for one in snapshots:
            one.check(self.path)
        if taken:
            return result
        caches = iter(snapshots)
        args = tuple(next(caches).cache() if is_cache(value) else value for value in args)
        kwargs = {name: next(caches).cache() if is_cache(value) else value for name, value in kwargs.items()}
        return forward(*args, **kwargs)


class NoCacheInTraining(ForwardWrapper):
    """The `forward` of a whole model: in training, no cache unless the caller says something about it."""

    def __init__(self, module: nn.Module, path: str) -> None:
        super().__init__(module, path)
        names = list(inspect.signature(module.forward).parameters)
        self._place = names.index("use_cache") if "use_cache" in names else -1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model."""
        if not self.idle and len(args) <= self._place and self.module.training and torch.is_grad_enabled():
            said = [kwargs.get(name) for name in ("use_cache", "past_key_values", "cache_params")]
            if all(value is None for value in said) and not any(map(is_cache, args)):
                kwargs["use_cache"] = False
        return self.plain(*args, **kwargs)


def other_checkpointing_inside(path: str) -> str:
    """Text for another library's checkpoint where a region is."""
    return (
        f"{path or 'the model'} is a region of a plan and also checkpointed by another library; it would be run again "
        "twice over.\n"
        "  Turn that off (gradient_checkpointing, activation_checkpointing_policy, checkpoint_wrapper), or take the "
        "plan out: handle.remove()"
    )
