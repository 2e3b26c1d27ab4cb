"""Common parts of the other systems' functions: a call as a region, checks of arguments, random streams."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import errors
from ..engine.region_call import Options
from ..region import call, recompute, trace
from ..state import DEFAULT, Ambient
from ..state.values import name_of
from ..stores import Store


def check_callable(face: str, function: Any) -> None:
    """Raises if the first argument of the function named `face` cannot be called."""
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
        function: Called, and called again in backward.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        inputs: The store of its inputs.
        state: Returns what a replay restores besides the random generators.
        rng: Whether it restores PyTorch's random generators.
    """
    if torch.compiler.is_compiling() and torch.is_grad_enabled():

        def region(*args: Any, **kwargs: Any) -> Any:
            return as_region(function, args, kwargs, inputs=inputs, state=state, rng=rng)

        return trace(Options(name_of(function), inputs, DEFAULT), function, args, kwargs, region=region)
    if rng or not torch.is_grad_enabled():
        return recompute(function, inputs=inputs, state=state())(*args, **kwargs)
    return call(Options(name_of(function), inputs, tuple(state()), rng=False), function, args, kwargs)


class TrackerRng:
    """The named random streams of Megatron-Core or DeepSpeed, for `recompute(fn, state=[TrackerRng(tracker)])`.

    Under tensor parallelism some dropout masks differ between ranks and others agree. Both systems keep a dict of
    generator states by name, one of which `fork(name)` puts into the device's generator for a while. The state is a
    tensor, which a fork replaces and never writes to, or a generator (for CUDA graphs), which it advances.

    Args:
        tracker: An object with Megatron-Core's `get_states()` and `set_states(states)`.
    """

    def __init__(self, tracker: Any) -> None:
        self.tracker = tracker

    def capture(self) -> dict[str, tuple[Any, torch.Tensor | None]]:
        """Returns each stream by its name: the tracker's value, and its state if that is a generator."""
        return {
            name: (stream, stream.get_state() if isinstance(stream, torch.Generator) else None)
            for name, stream in self.tracker.get_states().items()
        }

    def restore(self, value: dict[str, tuple[Any, torch.Tensor | None]]) -> None:
        """Gives the tracker its streams back. A tracker that had none is left alone: it may not be in use."""
        for stream, state in value.values():
            if state is not None:
                stream.set_state(state)
        if value:
            self.tracker.set_states({name: stream for name, (stream, _) in value.items()})


def tracked(module: str) -> tuple[Ambient, ...]:
    """Returns the streams of the tracker of `module`; none if the module has not been imported."""
    loaded = sys.modules.get(module)
    return () if loaded is None else (TrackerRng(loaded.get_cuda_rng_tracker()),)


def take_reentrant(use_reentrant: object, other: bool = False) -> None:
    """Takes `use_reentrant=True` for what it does, and says once per process which engine runs it.

    Args:
        use_reentrant: The option as it was passed.
        other: Whether `context_fn` or `debug` was passed as well, which torch has for False alone.

    Raises:
        ArgumentError: It is not True, False or None, or it is True beside one of these.
    """
    if use_reentrant is not None and not isinstance(use_reentrant, bool):
        raise errors.ArgumentError(
            f"use_reentrant is {errors.say(use_reentrant)}, where True, False, or nothing, is expected. "
            "(checkpoint_sequential takes one input: put several into a tuple that the functions take and return.)"
        )
    if use_reentrant and other:
        raise errors.ArgumentError(
            "use_reentrant=True was passed with context_fn or debug, which are only supported when "
            "use_reentrant=False, as in torch.utils.checkpoint.\n"
            "  Write use_reentrant=False, or leave it out: gradients are the same."
        )
    if use_reentrant and not torch.compiler.is_compiling():
        _say_reentrant()


@functools.cache
def _say_reentrant() -> None:
    warnings.warn(
        "use_reentrant=True runs as use_reentrant=False here: gradients are the same. Unlike the reentrant engine it "
        "calls no backward inside backward, so DDP, torch.autograd.grad and backward(inputs=...) work, and layers none "
        "of whose inputs requires grad are trained. Write use_reentrant=False, or leave it out. (Said once.)",
        UserWarning,
        stacklevel=4,
    )


def no_sharded_inputs(setting: str, write: str) -> str:
    """Returns the text of the error for spreading inputs over ranks through a function that has no group of ranks."""
    return (
        f"{setting} is not understood here: the inputs of a region are spread over the ranks of a group, and this "
        "function is not told the group.\n"
        f"  {write}, or, with ShardedOver from torch_recompute.distributed:  "
        "recompute(function, inputs=ShardedOver(group))(*args)."
    )
