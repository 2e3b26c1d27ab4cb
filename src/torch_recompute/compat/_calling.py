"""What the faces have in common: one call of a function as a region, and checks of what they are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import errors
from ..engine.region_call import Options
from ..region import call, recompute
from ..state import Ambient
from ..stores import Store
from ..values import name_of
from .torch_utils import checkpoint


def check_callable(face: str, function: Any) -> None:
    """Raises if the first argument of a face cannot be called."""
    if not callable(function):
        raise errors.ArgumentError(errors.not_callable(face, function, at_once=True))


def check_switch(face: str, option: str, value: Any, write: str) -> None:
    """Raises if an option that is on or off is neither."""
    if not isinstance(value, bool):
        raise errors.ArgumentError(
            f"{face}: {option} is {errors.say(value)}, where True or False is expected.\n  {write}"
        )


def as_region(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    inputs: Store | None = None,
    state: Callable[[], Sequence[Ambient]] = tuple,
    rng: bool = True,
) -> Any:
    """Calls `function(*args, **kwargs)` as a region, now.

    Args:
        function: What to call, and to call again in backward.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        inputs: Where its inputs wait.
        state: Returns what a replay must find as the forward did.
        rng: Whether that holds for PyTorch's random generators.
    """
    if torch.compiler.is_compiling():
        return checkpoint(function, *args, preserve_rng_state=rng, **kwargs)
    if rng or not torch.is_grad_enabled():
        return recompute(function, inputs=inputs, state=state())(*args, **kwargs)
    return call(Options(name_of(function), inputs, tuple(state()), rng=False), function, args, kwargs)
