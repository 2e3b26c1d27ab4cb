"""What models of libraries bring along: a checkpointing switch of their own, and caches of keys and values.

Problem. A trainer calls `model.gradient_checkpointing_enable()` (`activation_checkpointing_enable` in newer versions of
transformers, `enable_gradient_checkpointing` in diffusers, `set_grad_checkpointing` in timm) when its arguments say so,
whatever was done to the model before; TRL turns it off around generation and on again. The library's checkpoint would
then be inside each region of a plan: everything is replayed twice over, and some models do not survive it. And the
trainer asks the model whether it is checkpointing, to choose DDP's settings, and would be told no.

Idea. The instance gets these methods again, for as long as the plan is there. Enabling is agreed to, since the plan
does it; disabling makes the regions plain calls until the next enabling; the question is answered by the flag that the
library looks at. Settings that would choose what is recomputed are refused: the plan has chosen.

Problem. A layer of a Hugging Face model appends its keys and values to a cache that it is given, and reads the whole
back. When it is run again in backward, it would append a second time. The library's own checkpointing throws the cache
away, with a warning, and fails where it was filled before (the mask is made for it).

Idea. When a region begins, a snapshot is taken of the cache: references, no copies. The replay is given a cache made
from the snapshot, so it reads what the forward read, and what it writes is forgotten. Keys of an earlier call keep
their gradient: the graph is that of the forward, and the replay only rebuilds values. A cache keeps keys and values of
every layer alive; so in training, where most configurations fill one that nobody reads, a model that is called without
a word on it is told `use_cache=False`, as the library's own checkpointing does.

Invariants. Nothing is imported from these libraries: they are known by the names of methods and classes, so `apply` can
look at every model (and this file is part of `plan/`, below `integrations/`, which call `apply`). All that is put on a
model can be pickled and copied with it, and `take_out` leaves the model's attributes as they were. The forward works on
the caller's cache; one that is written in place is found by the versions of its tensors, and refused.

Rejected: the library's own function slot (`_gradient_checkpointing_func`), which a trainer fills again, which is not
looked at in `eval()`, and which only whole layers have. Refusing models whose switch is on: a trainer may turn it on
afterwards, and nobody would look then.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import nn

from .. import errors
from ..values import replay
from .wrappers import ForwardWrapper

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


class Disabled(Protocol):
    """What a switch turns off: a region that is a plain call while it rests."""

    disabled: bool


class State:
    """Whether the regions of a plan are regions now.

    Attributes:
        regions: The regions.
        roots: The modules whose flag says it.
    """

    def __init__(self, regions: Sequence[Disabled]) -> None:
        self.regions = list(regions)
        self.roots: list[nn.Module] = []

    def turn(self, on: bool) -> None:
        """Makes the regions regions, or plain calls."""
        for region in self.regions:
            region.disabled = not on
        for root in self.roots:
            root.__dict__[FLAG] = on and bool(self.regions)


def _plan_has_chosen(settings: Mapping[str, object]) -> str:
    """Text for checkpointing settings that a plan leaves no room for."""
    said = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    return (
        f"checkpointing was turned on with {said}, but this model has a plan, which says what is recomputed; the "
        "setting would have no effect.\n"
        '  Leave it out and say it in the plan ("block:3" or labels, for less than all layers), or take the plan out: '
        "handle.remove()"
    )


class Enable:
    """What stands for the method that turns a library's checkpointing on."""

    def __init__(self, state: State) -> None:
        self._state = state

    def __call__(
        self,
        gradient_checkpointing_kwargs: Any = None,
        every_n_layers: int = 1,
        offload: bool = False,
        *,
        activation_checkpointing_kwargs: Any = None,
        gradient_checkpointing_func: Any = None,
    ) -> None:
        """Makes the plan's regions regions again."""
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
            raise errors.ArgumentError(_plan_has_chosen(chosen))
        self._state.turn(True)


class Disable:
    """What stands for the method that turns a library's checkpointing off."""

    def __init__(self, state: State) -> None:
        self._state = state

    def __call__(self) -> None:
        """Makes the plan's regions plain calls, until they are enabled again."""
        self._state.turn(False)


class Set:
    """What stands for the private method that the public ones end in."""

    def __init__(self, state: State) -> None:
        self._state = state

    def __call__(self, enable: bool = True, gradient_checkpointing_func: Any = None, every_n_layers: int = 1) -> None:
        """Turns the plan's regions on or off."""
        if enable:
            Enable(self._state)(every_n_layers=every_n_layers, gradient_checkpointing_func=gradient_checkpointing_func)
        else:
            Disable(self._state)()


class SetTimm:
    """What stands for timm's one method for on and off."""

    def __init__(self, state: State) -> None:
        self._state = state

    def __call__(self, enable: bool = True) -> None:
        """Turns the plan's regions on or off."""
        self._state.turn(enable)


METHODS = {**dict.fromkeys(ENABLE, Enable), **dict.fromkeys(DISABLE, Disable), SET: Set, TIMM_SET: SetTimm}


def roots(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that have a switch with a flag that others read."""
    if any(callable(getattr(type(model), name, None)) for name in (*ENABLE, SET)):
        yield model
        return
    for child in model.children():
        yield from roots(child)


class CheckpointingSwitch:
    """The switches of a model, while a plan is in it.

    Args:
        model: The model.
        regions: The plan's regions.
    """

    def __init__(self, model: nn.Module, regions: Sequence[Disabled]) -> None:
        self._model = model
        self._state = State(regions)
        self._before: list[tuple[nn.Module, str, tuple[Any, ...]]] = []

    def put(self) -> None:
        """Takes the places of the model's own switches, which are off from now on."""
        for module in self._model.modules():
            for flag in (FLAG, TIMM_FLAG):
                if getattr(module, flag, False) is True:  # turned on before the plan came
                    self._set(module, flag, False)
            for name, kind in METHODS.items():
                if callable(getattr(type(module), name, None)):
                    self._set(module, name, kind(self._state))
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


LIBRARY = "transformers"


def is_cache(value: object) -> bool:
    """Whether this is one of the library's caches, or a class derived from one."""
    return any(
        cls.__name__.endswith("Cache") and cls.__module__.partition(".")[0] == LIBRARY for cls in type(value).__mro__
    )


class CacheSnapshot:
    """What a cache held at one moment.

    Args:
        cache: The cache.
    """

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
        """Refuses a cache that was written in place since.

        Raises:
            ArgumentError: It was.
        """
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
    """What stands as `forward` inside of a region: the module's own, given the caches that the forward was given."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        forward = self.plain
        if self.idle or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        if getattr(self.module, "gradient_checkpointing", False) is True and self.module.training:
            raise errors.ArgumentError(errors.other_checkpointing_inside(self.path))
        if not any(map(is_cache, args)) and not any(map(is_cache, kwargs.values())):
            return forward(*args, **kwargs)
        first: list[bool] = []

        def note() -> list[CacheSnapshot]:
            first.append(True)
            return [CacheSnapshot(value) for value in (*args, *kwargs.values()) if is_cache(value)]

        notes = replay(note)()
        if first:
            result = forward(*args, **kwargs)
            for one in notes:
                one.check(self.path)
            return result
        for one in notes:
            one.check(self.path)
        caches = iter(notes)
        args = tuple(next(caches).cache() if is_cache(value) else value for value in args)
        kwargs = {name: next(caches).cache() if is_cache(value) else value for name, value in kwargs.items()}
        return forward(*args, **kwargs)


class NoCacheInTraining(ForwardWrapper):
    """What stands as `forward` on a whole model: in training, no cache unless the caller says something about it."""

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
