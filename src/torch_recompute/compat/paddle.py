"""PaddlePaddle's `recompute` and `recompute_sequential` (`paddle.distributed.fleet`) on this engine.

    from torch_recompute.compat.paddle import recompute, recompute_sequential

The calls are those of Paddle's functions, for PyTorch tensors and modules: `recompute(function, *args)` runs the
function at once, where `torch_recompute.recompute(function)` wraps it. There is one engine, which calls no backward
inside backward: `use_reentrant=True`, Paddle's default, runs on it and warns once.

Paddle offloads by position, so `offload_indices` becomes a store that offloads the tensors of these arguments. (With
copies made before the call, and back inside the region, autograd would see the copies and keep the caller's tensors.)
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .. import _torch, errors
from .._torch import tracing
from .._torch.tensors import apart
from ..region import STAYS, no_effect
from ..state import Ambient, NumpyRng, PythonRng
from ..state.values import name_of
from ..stores import OnHost
from ._calling import as_region, check_callable, check_switch, take_reentrant
from .torch_utils import in_segments

__all__ = ["recompute", "recompute_sequential"]


def recompute(
    function: Callable[..., Any],
    *args: Any,
    preserve_rng_state: bool = True,
    preserve_external_rng_state: bool | None = None,
    use_reentrant: bool | None = None,
    offload_indices: Sequence[int] = (),
    **kwargs: Any,
) -> Any:
    """Calls `function(*args, **kwargs)` as a region: Paddle's `recompute`.

    Args:
        function: The function to call, and to call again in backward.
        *args: Its positional arguments, of any kind.
        preserve_rng_state: Whether the replay draws the random numbers of the forward.
        preserve_external_rng_state: Whether that holds for `random` and NumPy as well; by default if it does for
            PyTorch's generators, as in Paddle.
        use_reentrant: True, False and None are the same engine; True warns once per process.
        offload_indices: Positional arguments that wait in host memory, counted from 0: all tensors in them.
            The others stay where they are, inside of another region too, and all do inside `torch.compile`.
        **kwargs: Keyword arguments of `function`.

    Raises:
        ArgumentError: One of these is none of the above; there is no positional argument of that number, or no
            tensor in it.
    """
    check_callable("recompute", function)
    may_be_none = {"preserve_external_rng_state": preserve_external_rng_state, "use_reentrant": use_reentrant}
    for option, value in {"preserve_rng_state": preserve_rng_state, **may_be_none}.items():
        if value is not None or option not in may_be_none:
            check_switch("recompute", option, value, f"Write {option}=False, or leave it out.")
    take_reentrant(use_reentrant)
    if isinstance(offload_indices, str) or not isinstance(offload_indices, Sequence):
        raise errors.ArgumentError(
            f"recompute: offload_indices is {errors.say(offload_indices)}, where a list of numbers is expected.\n"
            "  Write offload_indices=[0] for the first positional argument."
        )
    external = preserve_rng_state if preserve_external_rng_state is None else preserve_external_rng_state
    state, store = _external if external else tuple, None
    if offload_indices and torch.compiler.is_compiling():
        tracing.say(no_effect(name_of(function), f"offload_indices={list(offload_indices)}", STAYS))
    elif offload_indices:
        store = _store(name_of(function), args, kwargs, offload_indices)
    return as_region(function, args, kwargs, inputs=store, state=state, rng=preserve_rng_state)


def _external() -> Sequence[Ambient]:
    return (PythonRng(), NumpyRng()) if "numpy" in sys.modules else (PythonRng(),)


def recompute_sequential(
    ctx: Mapping[str, Any], functions: Sequence[Callable[[Any], Any]] | torch.nn.Sequential, *args: Any, **kwargs: Any
) -> Any:
    """Runs `functions` one after the other in regions of equal length, the last one left as it is: Paddle's.

    Args:
        ctx: "segments": how many parts to make, by default 1; the last holds the remainder too and is not
            recomputed, so with 1 nothing is. "preserve_rng_state": as for `recompute`.
        functions: An `nn.Sequential`, or modules or functions of one argument.
        *args: The argument of the first function.
        **kwargs: Options of `recompute`, for each of the regions.

    Raises:
        ArgumentError: `ctx` has other keys, there is more or less than one argument, a keyword is not an option of
            `recompute` or would have no effect, or there are not as many functions as segments.
    """
    if not isinstance(ctx, Mapping) or not ctx.keys() <= {"segments", "preserve_rng_state"}:
        raise errors.ArgumentError(
            f"recompute_sequential(ctx, functions, *args): ctx is {errors.say(ctx)}, where a dict is expected, with no "
            "other keys "
            'than "segments" and "preserve_rng_state".\n'
            '  Write {"segments": 2}. Where inputs are kept is said by offload_indices=[0].'
        )
    others = sorted(kwargs.keys() - {"preserve_external_rng_state", "use_reentrant", "offload_indices"})
    if len(args) != 1 or others:
        wrong = f"the functions are called with one argument, but got {len(args)}"
        if others:
            wrong = f"the functions are not called with keywords, but got {', '.join(others)}"
        raise errors.ArgumentError(
            f"recompute_sequential(ctx, functions, *args): {wrong}.\n"
            "  Put several values into a tuple that the functions take and return."
        )
    segments, offloaded = ctx.get("segments", 1), kwargs.get("offload_indices")
    if segments == 1 and offloaded:
        why = "of one segment, which is also the last, nothing is recomputed"
        raise errors.ArgumentError(errors.no_effect("offload_indices", offloaded, why, 'Write {"segments": 2}'))
    options = {key: ctx[key] for key in ("preserve_rng_state",) if key in ctx}
    region = functools.partial(recompute, **options, **kwargs)
    return in_segments("recompute_sequential", functions, segments, args[0], region)


def _store(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], indices: Sequence[int]) -> _Chosen:
    """Returns the store for `offload_indices`."""
    ids: set[int] = set()
    for index in indices:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(args):
            has = f"the positional arguments of {name} have numbers 0 to {len(args) - 1}"
            if len(args) < 2:
                has = f"the one positional argument of {name} has number 0"
            if not args:
                has = f"{name} was called without positional arguments"
            write = "Pass the tensor by position" if kwargs else "Write numbers of positional arguments"
            raise errors.ArgumentError(
                f"offload_indices holds {index!r}, but {has}.\n  {write}, or leave offload_indices out."
            )
        tensors = [tensor for tensor in _torch.tensors_in(args[index]) if not _torch.is_parameter(tensor)]
        if not tensors:
            raise errors.ArgumentError(
                f"offload_indices holds {index}, but argument {index} of {name} is {errors.say(args[index])}, in which "
                "there is no tensor to offload.\n"
                "  Leave the number out. Numbers count all positional arguments, not only tensors; parameters stay "
                "where they are."
            )
        ids.update(map(id, tensors))
    named = [*enumerate(args), *((repr(key), value) for key, value in kwargs.items())]
    labels = {id(tensor): f"argument {key}" for key, value in named for tensor in _torch.tensors_in(value)}
    return _Chosen(name, ids, labels)


class _Chosen:
    """A store of one call: host memory for some tensors; the others stay, and are watched as without a store."""

    def __init__(self, region: str, ids: set[int], labels: dict[int, str]) -> None:
        self._region, self._ids, self._labels = region, ids, labels
        self._host = OnHost()

    def put(self, tensor: torch.Tensor) -> tuple[Any, int | None, str]:
        if id(tensor) in self._ids:
            return self._host.put(tensor), None, ""
        label = self._labels.get(id(tensor), "a closure variable")
        return apart(tensor), _torch.version_of(tensor), label

    def get(self, handle: tuple[Any, int | None, str]) -> torch.Tensor:
        held, version, label = handle
        if version is None:
            return self._host.get(held)
        now = _torch.version_of(held)
        if now != version:
            raise errors.ChangedError(errors.changed_input(self._region, label, version, now))
        return held
