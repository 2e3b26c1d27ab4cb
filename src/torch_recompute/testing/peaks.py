"""A limit for the peak of a test, and the words for a test that is above it."""

from __future__ import annotations

from collections.abc import Mapping

from .. import errors
from ..memory.measurement import Measurement, Reading
from ..plan.budget import read_budget

_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def _not_one_limit(args: object, kwargs: object) -> str:
    """Text for a marker that says no number of bytes."""
    return (
        f"@pytest.mark.peak_below takes one number of bytes, but got {args!r}{f' and {kwargs!r}' if kwargs else ''}.\n"
        '  Write @pytest.mark.peak_below("200MiB"), with KB, MB, GB or KiB, MiB, GiB; or an int, which is bytes.'
    )


def read_limit(*args: object, **kwargs: object) -> int:
    """The bytes that a marker's arguments mean.

    Args:
        *args: One of them: "200MiB", "1.5GB", or an int, which is bytes.
        **kwargs: None.

    Raises:
        ArgumentError: There is none, or more, or it is no number of bytes: a share of something, or "fit".
    """
    if len(args) != 1 or kwargs:
        raise errors.ArgumentError(_not_one_limit(args, kwargs))
    found = read_budget(args[0]).bytes
    if found is None:
        raise errors.ArgumentError(_not_one_limit(args, kwargs))
    return found


def check_peak(memory: Measurement, limit: int) -> None:
    """Fails if a measurement's peak is above a limit.

    Args:
        memory: The measurement.
        limit: The most bytes that are allowed.

    Raises:
        AssertionError: It is; the text says how much each category has of it, and at which operation it was.
    """
    reading = memory.on()
    if reading.peak_bytes <= limit:
        return
    at = max(reading.timeline, key=lambda sample: sample.live_bytes, default=None)
    parts = {name: count for name, count in reading.by_category.items() if count}
    raise AssertionError(_above(reading, limit, parts, "" if at is None else at.op))


def _above(reading: Reading, limit: int, parts: Mapping[str, int], op: str) -> str:
    listed = "".join(f"\n  {name:12} {_size(count):>12}" for name, count in sorted(parts.items(), key=lambda p: -p[1]))
    if max(parts, key=parts.__getitem__) == "activations":
        write = "Most are activations: put recompute(fn) around what makes them, or apply make_plan(model, args, ...)."
    else:
        write = "Most are no activations, which alone recomputation can spare: a smaller model, or a higher limit."
    return (
        f"peak memory is {_size(reading.peak_bytes)} on {reading.device}, and {_size(limit)} are allowed: "
        f"{_size(reading.peak_bytes - limit)} too many, at {op or 'the start'}.{listed}\n  {write}"
    )


def _size(count: int) -> str:
    unit, name = next(((unit, name) for unit, name in _UNITS if count >= unit), (1, "bytes"))
    return f"{count} {name}" if unit == 1 else f"{count / unit:,.2f} {name}"
