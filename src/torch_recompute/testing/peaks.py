"""A limit for the peak of a test, and the words for a test that is above it."""

from __future__ import annotations

from .. import errors
from ..memory import Measurement
from ..plan.budget import read_budget


def read_limit(*args: object, **kwargs: object) -> int:
    """The bytes that a marker's arguments mean.

    Args:
        *args: One of them: "200MiB", "1.5GB", or an int, which is bytes.
        **kwargs: None.

    Raises:
        ArgumentError: There is none, or more, or it is no number of bytes: a share of something, or "fit".
    """
    if len(args) != 1 or kwargs:
        raise errors.ArgumentError(errors.not_one_limit(args, kwargs))
    found = read_budget(args[0]).bytes
    if found is None:
        raise errors.ArgumentError(errors.not_one_limit(args, kwargs))
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
    op = "" if at is None else at.op
    parts = {name: count for name, count in reading.by_category.items() if count}
    raise AssertionError(errors.above_limit(reading.peak_bytes, limit, parts, str(reading.device), op))
