"""Models that have a checkpointing switch of their own, and a plan that is to stay when a framework flips it.

Problem. A trainer calls `model.gradient_checkpointing_enable()` (`activation_checkpointing_enable` in newer versions of
transformers, `enable_gradient_checkpointing` in diffusers, `set_grad_checkpointing` in timm) when its arguments say so,
whatever was done to the model before; TRL turns it off around generation and on again. The library's checkpoint would
then lie inside each region of a plan: everything is replayed twice over, and some models do not survive it. And the
trainer asks the model whether it is checkpointing, to choose DDP's settings, and would be told no.

Idea. The instance gets these methods anew, for as long as the plan is there. Enabling is agreed to, since the plan is
what does it; disabling makes the regions plain calls until the next enabling; the question is answered by the flag
that the library looks at. Settings that would choose what is recomputed are refused: the plan has chosen.

Invariants. Nothing is imported from these libraries: they are known by the names of their methods, so `apply` can look
at every model. All that is put on a model can be pickled and copied with it, and `take_out` leaves the model's
attributes as they were.

Rejected: the library's own function slot (`_gradient_checkpointing_func`), which a trainer fills anew, which is not
looked at in `eval()`, and which only whole layers have. Refusing models whose switch is on: a trainer may turn it on
afterwards, and nobody would look then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import nn

from .. import errors

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


class Resting(Protocol):
    """What a switch turns off: a region that is a plain call while it rests."""

    resting: bool


class State:
    """Whether the regions of a plan are regions now.

    Attributes:
        regions: The regions.
        roots: The modules whose flag says it.
    """

    def __init__(self, regions: Sequence[Resting]) -> None:
        self.regions = list(regions)
        self.roots: list[nn.Module] = []

    def turn(self, on: bool) -> None:
        """Makes the regions regions, or plain calls."""
        for region in self.regions:
            region.resting = not on
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


class Switch:
    """The switches of a model, while a plan is in it.

    Args:
        model: The model.
        regions: The plan's regions.
    """

    def __init__(self, model: nn.Module, regions: Sequence[Resting]) -> None:
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
