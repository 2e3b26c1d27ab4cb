"""The classes of errors, and the texts that several rooms raise; every other text is beside its `raise`.

One base class, `RecomputeError`, so that a caller can catch all of ours; each class also derives from the built-in or
PyTorch class that existing code catches in the same place. A text says what was passed, what was expected, why, and
what to write; `tests/project/test_messages.py` raises each of them through the public API, and
`tests/project/messages.txt` has them word for word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from torch.utils.checkpoint import CheckpointError


class RecomputeError(RuntimeError):
    """Base of every error that torch-recompute raises."""


class ArgumentError(RecomputeError, TypeError, ValueError):
    """A function was called with something that it cannot use."""


class BudgetError(ArgumentError):
    """No choice fits into the memory budget.

    Attributes:
        smallest: The least budget, in bytes, for which some choice fits.
        solution: What reaches it.
    """

    def __init__(self, text: str, smallest: int = 0, solution: object = None) -> None:  # which pickle sets
        super().__init__(text)
        self.smallest = smallest
        self.solution = solution


class MismatchError(RecomputeError, CheckpointError):
    """The replay of a region did not do what its forward did. Also a `torch.utils.checkpoint.CheckpointError`."""


class ChangedError(RecomputeError):
    """Something that a replay needs has been changed since the forward and cannot be put back.

    What is watched: the tensors among the region's arguments, in its closure, defaults and partials, in globals that
    the function itself names, in lists, tuples and dicts among these; parameters, buffers and tensor attributes of
    modules, the length of large containers there; direct attributes of other objects that the function is bound to;
    carried values, and outputs of saved calls. Not watched are objects that are no plain data (`module.cache.keys`) and
    globals of functions that the function calls. If they are changed between forward and backward, the replay computes
    with the new values and no error is raised; pass them to the region as arguments. `audit` finds what the rest of the
    model's forward changes of them, and `check="values"` the rest.
    """


class SaveError(RecomputeError, AssertionError):
    """A value cannot be carried from forward to replay."""


class NotRecomputingError(RecomputeError, AssertionError):
    """`get_recompute_data` was called outside of a replay."""


class StoreError(RecomputeError):
    """A store did not give back what it was given."""


# What follows the text of a replay that did something else than its forward.
REASONS = (
    "  The function must do the same work each time it is called with the same arguments. Common reasons that it does "
    "not: a choice made from values that are not deterministic (routing: wrap it in replay(fn) or no_recompute(fn)), "
    "random numbers from a generator that PyTorch does not know (state=[...]), a global or attribute changed "
    "between forward and backward."
)
WHY = f'{REASONS}\n  To see the first place where they differ: recompute(fn, check="values").'


UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def kind(value: object) -> str:
    """The name of its type; a simulated tensor stands for the real one."""
    return type(value).__name__.replace("FakeTensor", "Tensor")


def say(value: object) -> str:
    """Describes a value: a tensor by its shape, a container by what is in it, others by their beginning."""
    if getattr(value, "shape", None) is None and isinstance(value, (tuple, list, Mapping)):
        return f"{kind(value)}: {_inside(value)}"
    text = _inside(value)
    return text if text == kind(value) or hasattr(value, "shape") else f"{kind(value)}: {text}"


def _inside(value: Any, deep: int = 2) -> str:
    """A value as it is said inside of another; of tensors no value is shown."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"{kind(value)} of shape {tuple(shape)}"
    if isinstance(value, (tuple, list, Mapping)) and (deep == 0 or len(value) > MANY):  # pyright: ignore[reportUnknownArgumentType]
        return f"{kind(value)} of {len(value)}"  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, Mapping):
        named = cast("Mapping[Any, Any]", value)
        return "{" + ", ".join(f"{key!r}: {_inside(one, deep - 1)}" for key, one in named.items()) + "}"
    if isinstance(value, (tuple, list)):
        parts = [_inside(one, deep - 1) for one in cast("Sequence[Any]", value)]
        inside = ", ".join(parts) + "," * (isinstance(value, tuple) and len(parts) == 1)
        return f"({inside})" if isinstance(value, tuple) else f"[{inside}]"
    text = repr(value)
    return kind(value) if "tensor(" in text or " object at 0x" in text else text[:80]


MANY = 12  # parts of a container that are described one by one


def listed(names: Iterable[str]) -> str:
    """Names in quotes, one after the other; "nothing" if there are none."""
    return ", ".join(map(repr, names)) or "nothing"


def size(count: int, up: bool = False) -> str:
    """Bytes in units people read, to two places; upwards, so that the text read back is no less."""
    for unit, name in UNITS:
        if count >= unit:
            hundredths = -(-count * 100 // unit) if up else round(count * 100 / unit)
            return f"{hundredths // 100}.{hundredths % 100:02} {name}"
    return f"{count} bytes"


def unit_of(most: int) -> tuple[int, str]:
    """The unit in which a number of bytes is read, and smaller ones beside it: its bytes and its name."""
    return next((unit for unit in UNITS if most >= unit[0]), (1, "bytes"))


def brief(count: int, of: int | None = None) -> str:
    """Bytes in short, as "46.4 MiB"; or a part of others in the unit of the whole, as "46.0 of 64.6 MiB"."""
    whole = count if of is None else of
    unit, name = unit_of(whole)
    places = 0 if unit == 1 else 1 if whole >= 10 * unit else 2
    part = f"{count / unit:,.{places}f}"
    return f"{part} {name}" if of is None else f"{part} of {of / unit:,.{places}f} {name}"


def not_callable(what: str, value: object, at_once: bool = False) -> str:
    """Text for a `fn` that cannot be called, or runs later; `at_once` if it is passed together with its arguments."""
    if what == "checkpoint" or at_once:
        return (
            f"{what}(function, *args) needs a callable, but got {say(value)}\n"
            "  Pass the function itself, then its arguments:\n"
            f"      y = {what}(layer, x)     # not {what}(layer(x))"
        )
    if callable(value):
        return (
            f"{value.__qualname__} is a generator or a coroutine: its body runs after the region is over, and nothing "
            "of it would be recomputed.\n  Let it return its results in a list, or wrap what it calls in recompute."
        )
    return (
        f"{what}(fn) needs a callable, but got {say(value)}\n"
        f"  It returns a callable; pass the function itself, and the arguments to the result:\n"
        f"      y = {what}(layer)(x)     # not {what}(layer(x))"
    )


def not_a_store(option: str, value: object) -> str:
    """Text for an `inputs=` or `store=` that is no store."""
    if isinstance(value, type):
        return (
            f"{option}={value.__name__} is a class; a store is an object of one.\n  Write {option}={value.__name__}()."
        )
    return (
        f"{option}={value!r:.80} is not a store: {kind(value)} has no put(tensor) and get(handle).\n"
        f"  Write {option}=torch_recompute.OnHost(), or an object with these two methods."
    )


def not_a_size(option: str, value: object, least: int = 1) -> str:
    """Text for a size that is none."""
    return f"{option} is {value}; expected a whole number of at least {least}. Write for example {option} {least}."


def goes_with(option: str, other: str) -> str:
    """Text for an option that means something only with another one."""
    return f"{option} goes with {other} and says nothing without it. Add {other}, or leave {option} out."


def no_effect(field: str, value: object, why: str, write: str) -> str:
    """Text for a field that nothing would look at."""
    return f"{field}={value!r} would have no effect: {why}.\n  {write}, or leave {field} out."


def changed_saved(region: str, was: int, now: int) -> str:
    """Text for a saved tensor that was changed in place; the first words are autograd's own."""
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
        f"saved in {region} is at version {now}; expected version {was} instead.\n"
        "  Use the out-of-place form of the operation that changes it."
    )


def changed_input(region: str, label: str, was: int, now: int) -> str:
    """Text for a region's input that was changed in place."""
    return (
        f"{label} of {region} has been changed in place since the forward (version {was} then, {now} now), so the "
        "region cannot be run again: one of the variables needed for gradient computation has been modified by an "
        "inplace operation.\n"
        "  Change a copy instead (x = x + y, not x += y), or pass the region a copy: region(x.clone())."
    )


def missed_call(region: str, call: str) -> str:
    """Text for a replay that did not reach a saved call of its forward."""
    return f"the replay of {region} did not reach the saved call {call}, which its forward made.\n{WHY}"


def not_a_member(what: str) -> str:
    """Text for a group that this process is not in."""
    return (
        f"{what} was given a process group that this process is not in.\n"
        '  Each rank passes the group it belongs to, for example device_mesh.get_group("tp").'
    )
