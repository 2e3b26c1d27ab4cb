"""The error family, and every text.

One base class, `RecomputeError`, so that a caller can catch all of ours; each class also derives from the built-in or
PyTorch class that existing code catches in the same place. Texts are functions that take plain data, say what was
passed, what was expected, why, and what to write, and are pinned word for word by `tests/test_messages.py`. The
engine raises; nothing here knows it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.checkpoint import CheckpointError

if TYPE_CHECKING:
    import torch


class RecomputeError(RuntimeError):
    """Base of every error that torch-recompute raises."""


class ArgumentError(RecomputeError, TypeError, ValueError):
    """A function was called with something that it cannot use."""


class MismatchError(RecomputeError, CheckpointError):
    """The replay of a region did not do what its forward did. Also a `torch.utils.checkpoint.CheckpointError`."""


class ChangedError(RecomputeError):
    """Something that a replay needs has been changed in place since the forward."""


class SaveError(RecomputeError, AssertionError):
    """A value cannot be carried from forward to replay."""


class NotRecomputingError(RecomputeError, AssertionError):
    """`get_recompute_data` was called outside of a replay."""


class StoreError(RecomputeError):
    """A store did not give back what it was given."""


def _type(value: object) -> str:
    return type(value).__name__


def _what(value: object) -> str:
    shape = getattr(value, "shape", None)
    return f"{_type(value)}: {repr(value)[:80]}" if shape is None else f"{_type(value)} of shape {tuple(shape)}"


def not_callable(what: str, value: object) -> str:
    """Text for a `fn` that cannot be called."""
    if what == "checkpoint":
        return (
            f"checkpoint(function, *args) needs a callable, but got {_what(value)}\n"
            "  Pass the function itself, then its arguments:\n"
            "      y = checkpoint(layer, x)     # not checkpoint(layer(x))"
        )
    return (
        f"{what}(fn) needs a callable, but got {_what(value)}\n"
        f"  It returns a callable; pass the function itself, and the arguments to the result:\n"
        f"      y = {what}(layer)(x)     # not {what}(layer(x))"
    )


def unknown_check(value: object) -> str:
    """Text for an unknown `check=`."""
    return (
        f"check={value!r} is not known. It says what a replay is compared with:\n"
        '      check="metadata"   shape, dtype and device of every saved tensor (the default)\n'
        '      check="values"     stride and contents too: slower, finds what is not deterministic\n'
        '      check="none"       only how many there are'
    )


def not_a_store(option: str, value: object) -> str:
    """Text for an `inputs=` or `store=` that is no store."""
    return (
        f"{option}={value!r:.80} is not a store: {_type(value)} has no put(tensor) and get(handle).\n"
        f"  Write {option}=torch_recompute.OnHost(), or an object with these two methods."
    )


def not_an_ambient(value: object) -> str:
    """Text for an element of `state=` that is no ambient."""
    if hasattr(value, "capture") and hasattr(value, "restore"):
        return f"state= takes a sequence of states, but got {_type(value)} alone; write state=[{_type(value)}(...)]."
    return (
        f"state= holds {value!r:.80}, and {_type(value)} has no capture() and restore(value).\n"
        "  Write state=[torch_recompute.state.NumpyRng()], or objects with these two methods."
    )


def iterator_argument(region: str, label: str, value: object) -> str:
    """Text for an argument that can be used only once."""
    return (
        f"{label} of {region} is a {_type(value)}, which can be consumed only once: the forward would leave nothing "
        "for the replay.\n"
        "  Pass a list instead: list(...)."
    )


def reentrant() -> str:
    """Text for `use_reentrant=True`."""
    return (
        "use_reentrant=True is not supported: it calls backward inside backward, which breaks DDP, "
        "torch.autograd.grad, backward(inputs=...) and gradient hooks, and trains nothing when no input of the region "
        "requires grad. (context_fn, debug and keyword arguments are only supported when use_reentrant=False.)\n"
        "  Write use_reentrant=False, or leave it out: gradients are the same, and it is faster."
    )


def unknown_determinism_check(value: object, known: Sequence[str]) -> str:
    """Text for an unknown `determinism_check=`."""
    return (
        f"determinism_check={value!r} is not known; write one of {', '.join(map(repr, known))}. To compare the "
        'contents of saved tensors as well: recompute(fn, check="values").'
    )


def debug_with_contexts() -> str:
    """Text for `debug=True` together with a `context_fn`."""
    return (
        "debug=True is incompatible with non-default context_fn: both want to see every operation of the region.\n"
        "  Find the mismatch with debug=True and without context_fn, or enter your own logging mode in context_fn."
    )


def suppressed(context: object) -> str:
    """Text for a context of `context_fn` that swallows exceptions."""
    return (
        f"the context {_type(context)} provided by context_fn suppressed an exception raised during the checkpointed "
        "call, so there is no result to return.\n"
        "  Its __exit__ must return False or None."
    )


def bad_segments(segments: object, functions: int) -> str:
    """Text for a number of segments that cannot be made."""
    if not functions:
        return "checkpoint_sequential: there are no functions to run."
    return f"checkpoint_sequential: segments={segments!r}, but {functions} functions make 1 to {functions} segments."


def not_a_flag(value: object) -> str:
    """Text for a `use_reentrant` that is not a bool."""
    return (
        f"use_reentrant is {_what(value)}, where False, or nothing, is expected. (checkpoint_sequential takes "
        "one input: put several into a tuple that the functions take and return.)"
    )


def changed_input(region: str, label: str, was: int, now: int) -> str:
    """Text for a region's input that was changed in place."""
    return (
        f"{label} of {region} has been changed in place since the forward (version {was} then, {now} now), so the "
        "region cannot be run again: one of the variables needed for gradient computation has been modified by an "
        "inplace operation.\n"
        "  Change a copy instead (x = x + y, not x += y), or pass the region a copy: region(x.clone())."
    )


def changed_state(region: str, name: str, was: int, now: int) -> str:
    """Text for a weight or buffer that was changed in place."""
    return (
        f"{name}, which {region} reads, has been changed in place since the forward (version {was} then, {now} now): "
        "its replay would compute with other values than its forward.\n"
        "  Change it after backward (optimizer.step() after loss.backward()). If the region itself changes it, say so: "
        "recompute(fn, state=[torch_recompute.state.TensorState(tensor)])."
    )


def changed_saved(region: str, was: int, now: int) -> str:
    """Text for a saved tensor that was changed in place; the first words are autograd's own."""
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
        f"saved in {region} is at version {now}; expected version {was} instead.\n"
        "  Use the out-of-place form of the operation that changes it."
    )


def changed_output(region: str, call: str, was: int, now: int) -> str:
    """Text for a saved call's output that was changed in place before a replay needs it."""
    return (
        f"the output of the saved call {call} in {region} has been changed in place (version {was} when it was "
        f"returned, {now} now), and the replay needs it as it was returned.\n"
        "  Use the out-of-place form (y = y + r, not y += r), or move the change into the saved call."
    )


def changed_value(region: str, was: int, now: int) -> str:
    """Text for a carried value that was changed in place."""
    return (
        f"a tensor that {region} saved for its replay has been changed in place since (version {was} then, {now} "
        "now).\n"
        "  Save a copy: save_for_recompute(tensor.clone()), or return one from the function given to replay."
    )


def store_returned(region: str, store: object, meta: tuple[Any, ...], got: object) -> str:
    """Text for a store that returned something else."""
    shape, dtype, device = meta
    kind = "" if not hasattr(got, "shape") else f" {tuple(getattr(got, 'shape'))} {getattr(got, 'dtype', '')}"  # noqa: B009
    where = f" on {getattr(got, 'device')}" if hasattr(got, "device") else ""  # noqa: B009
    return (
        f"the store {_type(store)} of {region} was given a tensor {tuple(shape)} {dtype} on {device} and returned "
        f"{_type(got)}{kind}{where}.\n"
        "  get(put(tensor)) must return a tensor of the same shape, dtype, device and values."
    )


_REASONS = (
    "  The function must do the same work each time it is called with the same arguments. Common reasons that it does "
    "not: a choice made from values that are not deterministic (routing: wrap it in replay(fn) or no_recompute(fn)), "
    "random numbers from a generator that PyTorch does not know (state=[...]), a global or attribute changed "
    "between forward and backward."
)
_WHY = f'{_REASONS}\n  To see the first place where they differ: recompute(fn, check="values").'


def fewer(region: str, expected: int, got: int, op: str) -> str:
    """Text for a replay that saved too few tensors."""
    return (
        f"the replay of {region} saved fewer tensors than its forward: {got} now, {expected} then. "
        f"(A different number of tensors was saved during the original forward and recomputation.){_needed(op)}\n{_WHY}"
    )


def more(region: str, expected: int) -> str:
    """Text for a replay that saved too many tensors."""
    return (
        f"the replay of {region} saved more tensors than its forward: {expected} then, and now at least one more. "
        f"(trying to save more tensors during recomputation than during the original forward pass)\n{_WHY}"
    )


def missed_call(region: str, call: str) -> str:
    """Text for a replay that did not reach a saved call of its forward."""
    return f"the replay of {region} did not reach the saved call {call}, which its forward made.\n{_WHY}"


def other_tensor(region: str, position: int, then: str, now: str, op: str) -> str:
    """Text for a replay that saved another tensor."""
    return (
        f"the replay of {region} saved another tensor than its forward at position {position}:\n"
        f"      forward: {then}\n"
        f"      replay:  {now}\n"
        "  (Recomputed values for the following tensors have different metadata than during the forward pass.)"
        f"{_needed(op)}\n{_WHY}"
    )


def other_values(region: str, position: int, then: str, now: str, op: str) -> str:
    """Text for a replay that saved a tensor with other contents."""
    return (
        f"the replay of {region} saved a tensor with other values than its forward at position {position}; those "
        f"before it are the same to the last bit.{_needed(op)}\n"
        f"      forward: {then}\n      replay:  {now}\n{_REASONS}"
    )


def other_calls(region: str, now: str, then: str | None) -> str:
    """Text for a replay that reached a saved call or choice that its forward did not make there."""
    had = "made no more saved calls or choices" if then is None else f"reached {then}(...)"
    return f"the replay of {region} reached {now}(...) where its forward {had}.\n{_WHY}"


def other_inputs(region: str, call: str, position: int, then: str, now: str) -> str:
    """Text for a saved call that a replay reached with other inputs."""
    return (
        f"the replay of {region} reached the saved call {call} with another tensor than its forward as input "
        f"{position}:\n      forward: {then}\n      replay:  {now}\n{_WHY}"
    )


def _needed(op: str) -> str:
    return f" It is needed by {op}." if op else ""


def value_requires_grad(region: str, index: int, tensor: torch.Tensor) -> str:
    """Text for a saved value that requires grad."""
    return (
        f"save_for_recompute in {region}: tensor {index} ({tuple(tensor.shape)}, {tensor.dtype}, "
        f"grad_fn={_type(tensor.grad_fn)}) requires grad. A saved value is a constant in the replay, so its gradient "
        "would be lost.\n"
        "  Save what was decided (indices, counts, masks), not what is differentiated; keep a differentiable result "
        "with no_recompute(fn)."
    )


def choice_requires_grad(region: str, index: int, tensor: torch.Tensor) -> str:
    """Text for a choice that requires grad."""
    return (
        f"replay(fn) in {region} returned a tensor that requires grad: tensor {index} ({tuple(tensor.shape)}, "
        f"{tensor.dtype}, grad_fn={_type(tensor.grad_fn)}). Its result is a constant in the replay, so its gradient "
        "would be lost.\n"
        "  Return indices, masks or sizes only: replay(lambda s: s.topk(2).indices); keep a differentiable result "
        "with no_recompute(fn)."
    )


def saved_twice(region: str, key: Hashable) -> str:
    """Text for a second save under one key."""
    under = "without a key" if key is None else f"under key={key!r}"
    return (
        f"save_for_recompute was called twice {under} in one call of {region}; the second would overwrite the first.\n"
        '  Give each its own key:  save_for_recompute(indices, key="router")  ...  get_recompute_data(key="router")\n'
        "  or wrap the choice in one word:  indices = replay(choose)(scores)"
    )


def not_recomputing() -> str:
    """Text for `get_recompute_data` outside of a replay."""
    return (
        "get_recompute_data() was called while nothing is being recomputed: there is no data to hand out.\n"
        "  Ask first:  if doing_recompute(): (indices,) = get_recompute_data()\n"
        "              else: indices = choose(scores); save_for_recompute(indices)\n"
        "  or say it in one word:  indices = replay(choose)(scores)"
    )


def no_such_key(region: str, key: Hashable, keys: Sequence[Hashable]) -> str:
    """Text for a key that was not saved."""
    saved = ", ".join(repr(k) for k in keys) or "nothing"
    return (
        f"get_recompute_data(key={key!r}): the forward of {region} saved nothing under this key; it saved {saved}.\n"
        "  Call save_for_recompute(..., key=...) in the forward of the same region."
    )
