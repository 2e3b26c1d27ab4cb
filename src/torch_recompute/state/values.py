"""Values decided in forward and carried to the replay, and the record that carries them.

Some results must not be computed again: which experts a router chose, a mask, a size read back from the device, a
branch taken. `save_for_recompute` / `get_recompute_data` are RoundPipe's words for it, with two faults mended: data
belongs to one call of one region (not to a layer, so microbatches, nested regions and threads cannot mix), and
`get_recompute_data` always returns a tuple. `replay(fn)` says the same in one word.

What is carried lies on the tape of the region's call (`tape.py`).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from .. import _torch, errors
from .._torch import is_parameter, tracing, version_of
from .._torch.devices import capturing
from . import Ambient, advanced
from .observer import here
from .tape import Entry, inside, thread

P = ParamSpec("P")
R = TypeVar("R")


class Values:
    """A pytree of values without grad, kept as it was: containers rebuilt, tensors watched for in-place changes.

    Tensors are held and returned detached: one that is changed in place later has a history that may lead back to here.
    """

    __slots__ = ("_leaves", "_spec", "_versions", "place")

    def __init__(self, tree: Any, place: int = 0) -> None:
        self.place = place  # of the tape, where they were saved
        leaves, self._spec = _torch.tree_flatten(tree)
        self._leaves = list(map(_without_history, leaves))
        self._versions = [version_of(x) if isinstance(x, torch.Tensor) else 0 for x in self._leaves]

    def get(self, region: str) -> Any:
        """Returns the values again, in fresh containers."""
        for leaf, version in zip(self._leaves, self._versions, strict=True):
            if isinstance(leaf, torch.Tensor) and version_of(leaf) != version:
                raise errors.ChangedError(
                    f"a tensor that {region} saved for its replay has been changed in place since (version {version} "
                    f"then, {version_of(leaf)} now).\n"
                    "  Save a copy: save_for_recompute(tensor.clone()), or return one from the function given to "
                    "replay."
                )
        return _torch.tree_unflatten(list(map(_without_history, self._leaves)), self._spec)


def _without_history(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) and not is_parameter(leaf) else leaf


def _first_with_grad(tree: Any) -> str:
    """Names the first tensor that requires grad; "" where none does."""
    for i, leaf in enumerate(_torch.tree_leaves(tree)):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            return f"tensor {i} ({tuple(leaf.shape)}, {leaf.dtype}, grad_fn={errors.kind(leaf.grad_fn)})"
    return ""


def _check_in_graph(tree: Any, what: str) -> None:
    """Raises if a value was decided on the host: a captured graph would repeat it in every launch."""
    for leaf in _torch.tree_leaves(tree):
        on_cpu = isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu"
        if on_cpu or isinstance(leaf, (bool, int, float)):
            raise errors.SaveError(
                f"{what} carries {'a tensor on the CPU' if on_cpu else repr(leaf)} from its forward to its replay "
                "while a CUDA graph is captured. Every launch of the graph would use this one: what is decided on the "
                "host is decided once, when the graph is captured.\n"
                "  Carry a tensor on the device (a mask, indices) instead, or decide before the capture and pass the "
                "decision as an argument of the region."
            )


@tracing.as_it_is
def save_for_recompute(*data: Any, key: Hashable = None) -> None:
    """Carries `data` from the forward of the enclosing region to its replay.

    Outside of a region, without grad, and while recomputing it does nothing. The data belongs to this one call of
    the region.

    Args:
        *data: Any pytrees. Tensors in them must not require grad; they are kept by reference, on their device.
        key: Tells several saves in one region apart. Any hashable value.

    Raises:
        SaveError: A tensor in `data` requires grad, or the region has already saved under this key; or a CUDA graph
            is captured and the data holds a number or a tensor on the CPU.

    The idea and the name are RoundPipe's (arXiv 2604.27085).
    """
    _end_graph()
    run = thread.run
    if run is None and not torch.compiler.is_compiling():
        thread.plain_calls += 1
    if run is None or run.replaying:
        return
    if found := _first_with_grad(data):
        raise errors.SaveError(
            f"save_for_recompute in {run.name}: {found} requires grad. A saved value is a constant in the replay, so "
            "its gradient would be lost.\n"
            "  Save what was decided (indices, counts, masks), not what is differentiated; keep a differentiable "
            "result with no_recompute(fn)."
        )
    if capturing():
        _check_in_graph(data, run.name)
    values = run.tape.values
    if key in values:
        under = "without a key" if key is None else f"under key={key!r}"
        raise errors.SaveError(
            f"save_for_recompute was called twice {under} in one call of {run.name}; the second would overwrite the "
            "first.\n"
            '  Give each its own key:  save_for_recompute(indices, key="router")  ...  '
            'get_recompute_data(key="router")\n'
            "  or wrap the choice in one word:  indices = replay(choose)(scores)"
        )
    values[key] = Values(data, run.place())


@tracing.as_it_is
def doing_recompute() -> bool:
    """Whether the code that calls this is being replayed for backward."""
    _end_graph()
    run = thread.run
    return run is not None and run.replaying


is_recomputing = doing_recompute


@tracing.as_it_is
def get_recompute_data(key: Hashable = None) -> tuple[Any, ...]:
    """Returns what `save_for_recompute` saved in the forward of this call of the region; may be read many times.

    Args:
        key: The key it was saved under.

    Returns:
        The saved `*data`; the empty tuple where the forward saved nothing without a key.

    Raises:
        NotRecomputingError: Not called from a replay. (Also an `AssertionError`, which RoundPipe raises here.)
        SaveError: The forward saved nothing under `key`.
    """
    _end_graph()
    run = thread.run
    if run is None or not run.replaying:
        raise errors.NotRecomputingError(
            "get_recompute_data() was called while nothing is being recomputed: there is no data to return.\n"
            "  Ask first:  if doing_recompute(): (indices,) = get_recompute_data()\n"
            "              else: indices = choose(scores); save_for_recompute(indices)\n"
            "  or say it in one word:  indices = replay(choose)(scores)"
        )
    values = run.tape.values
    if key in values:
        run.go_on_at(values[key].place)
        return values[key].get(run.name)
    if key is None:
        return ()
    saved = ", ".join(map(repr, values)) or "nothing"
    raise errors.SaveError(
        f"get_recompute_data(key={key!r}): the forward of {run.name} saved nothing under this key; it saved {saved}.\n"
        "  Call save_for_recompute(..., key=...) in the forward of the same region."
    )


class ReplayedValue(Entry):
    """The result of one `replay` call."""

    __slots__ = ("_after", "_values")

    def __init__(self, name: str, values: Values, after: Sequence[tuple[Ambient, Any]]) -> None:
        self.name, self._values, self._after = name, values, after

    def result(self, region: str) -> Any:
        """Returns the result of the choice; random numbers that it drew are skipped."""
        for ambient, value in self._after:
            ambient.restore(value)
        return self._values.get(region)


def kept_in_graph(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls `fn` while `torch.compile` traces: inside a region, so that the graph does not repeat its work."""
    if thread.traced:
        return tracing.call(lambda *args: fn(*args, **kwargs), args, tracing.SAVED)
    if thread.untraced:
        tracing.end_graph()
    return fn(*args, **kwargs)


def _end_graph() -> None:
    """Ends a graph that is traced in a region which cannot be traced whole: its record is of what runs."""
    if thread.untraced and torch.compiler.is_compiling():
        tracing.end_graph()


def name_of(fn: Any) -> str:
    """Names a function or module for errors."""
    # Dynamo of torch 2.11 knows no __qualname__ of a function that is made in what it traces.
    short = isinstance(fn, types.BuiltinFunctionType) or torch.compiler.is_compiling()
    return str(getattr(fn, "__name__" if short else "__qualname__", None) or type(fn).__qualname__)


class Wrapper(functools.partial[Any]):
    """The wrapper of a module, or of a method of one; in a copy of a model it wraps the copy's, also after `pickle`."""

    def __reduce__(self) -> Any:
        return vars(self)["again"], (vars(self)["__wrapped__"],)


def named_as(fn: Callable[..., Any], wrapper: Callable[P, R], again: Callable[[Any], Any]) -> Callable[P, R]:
    """Gives a wrapper the name and the signature of `fn`; not while Dynamo traces, which can set no attribute of it.

    `again` wraps what is in the place of `fn` in a copy of a model.
    """
    if torch.compiler.is_compiling():
        return wrapper
    given: Any = wrapper
    if type(fn) is not types.FunctionType:
        given = Wrapper(wrapper)
        given.__name__, given.again = wrapper.__name__, again
    return functools.wraps(fn, updated=())(given)


@tracing.as_it_is
def replay(fn: Callable[P, R]) -> Callable[P, R]:
    """Wraps a choice: in a region, its result in forward is its result in the replay; `fn` is not called again.

    For routing, masks, sizes and branches: whatever must come out the same, or costs a device sync.

        indices = replay(lambda s: s.topk(2).indices)(scores)   # the scores keep their gradient, outside

    Outside of a region it is the plain call.

    Args:
        fn: Any callable whose result, a pytree, holds no tensor that requires grad.

    Raises:
        SaveError: The result holds a tensor that requires grad: its gradient would be lost; or a CUDA graph is
            captured and the result is decided on the host.
        ArgumentError: `fn` is not callable.
    """
    if not callable(fn):
        raise errors.ArgumentError(errors.not_callable("replay", fn))
    name = f"replay({name_of(fn)})"

    def choose(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return kept_in_graph(fn, args, kwargs)
        run = thread.run
        if run is None:
            thread.plain_calls += 1
            return fn(*args, **kwargs)
        if run.replaying:
            return run.read(ReplayedValue, name).result(run.name)
        before = [ambient.capture() for ambient in run.ambients]
        in_graph = capturing()
        called = fn if here.observers is None else here.observers.around("choice", name, run, fn)
        try:
            with inside(None, (without_graph, without_graph)):
                result = called(*args, **kwargs)
        except RuntimeError as error:
            if in_graph and "captur" in str(error):
                first = str(error).split("\n")[0]
                raise errors.SaveError(
                    f"{name} failed while a CUDA graph is captured: {first}\n"
                    "  Nothing can be read from the device then (.item(), .tolist(), a branch on a tensor), because "
                    "nothing runs. Let it return a tensor on the device (a mask, indices), or decide before the "
                    "capture."
                ) from error
            raise
        if in_graph:
            _check_in_graph(result, name)
        if found := _first_with_grad(result):
            raise errors.SaveError(
                f"replay(fn) in {run.name} returned a tensor that requires grad: {found}. Its result is a constant in "
                "the replay, so its gradient would be lost.\n"
                "  Return indices, masks or sizes only: replay(lambda s: s.topk(2).indices); keep a differentiable "
                "result with no_recompute(fn)."
            )
        run.write(ReplayedValue(name, Values(result), advanced(run.ambients, before)))
        return result

    return named_as(fn, choose, replay)


@_torch.see_through
def without_graph(value: Any) -> Any:
    """A hook for saved tensors that keeps each as it is, apart from its node, to which it might lead back."""
    return value.detach() if isinstance(value, torch.Tensor) else value
