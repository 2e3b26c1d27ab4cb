"""Texts for replays that find another world than their forward, or do something else in it."""

from __future__ import annotations

from typing import Any

from ._say import kind


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
    tensor = "" if not hasattr(got, "shape") else f" {tuple(getattr(got, 'shape'))} {getattr(got, 'dtype', '')}"  # noqa: B009
    where = f" on {getattr(got, 'device')}" if hasattr(got, "device") else ""  # noqa: B009
    return (
        f"the store {kind(store)} of {region} was given a tensor {tuple(shape)} {dtype} on {device} and returned "
        f"{kind(got)}{tensor}{where}.\n"
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


def unread_kind(call: str, tensor: Any) -> str:
    """Text for a saved call that is said to be unread and returns what cannot be handed out without values."""
    return (
        f"the saved call {call} is said to be unread, and returns a {type(tensor).__name__} "
        f"({str(tensor.layout).removeprefix('torch.')}); a tensor without values can stand in for a plain one only.\n"
        "  Keep its output: no_recompute(fn) without unread=True; in a plan, @product in the place of @unread."
    )


def read_outside(call: str, op: str) -> str:
    """Text for values of an unread call that are asked for where no replay can be run again."""
    return (
        f"{op} needs the values of what {call} returned in a replay, where it is said to be unread and has none; "
        "and no replay can make them, because the tensor was taken out of the one that it belongs to (into an "
        "attribute, a list, another region).\n"
        "  Keep its output: no_recompute(fn) without unread=True; in a plan, @product in the place of @unread."
    )


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


def other_results(region: str, then: str, now: str) -> str:
    """Text for a replay that returned other tensors."""
    return (
        f"the replay of {region} returned other tensors than its forward, and its output was discarded:\n"
        f"      forward: {then}\n      replay:  {now}\n{_WHY}"
    )


def _needed(op: str) -> str:
    return f" It is needed by {op}." if op else ""
