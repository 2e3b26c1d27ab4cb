"""Budgets as people write them.

A budget is bytes for the peak of the whole step (`25769803776`, `"24GiB"`, `"24 GB"`), a share of the activation memory
(`0.4`, `"40%"`: that much of the way from the least that any plan needs, which is `0`, to what no plan at all needs),
or `"fit"`: what the device has free. `"24G"` is refused: half of its readers take it for 24 GB and half for 24 GiB,
7 % apart.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from .. import errors
from .free import RESERVE

_UNITS = {
    "b": 1,
    "bytes": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}
_TEXT = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+) *([a-z%]*)")


@dataclass(frozen=True)
class Budget:
    """A budget. If both are None: what fits onto the device.

    Attributes:
        bytes: For the peak of the whole step.
        share: Of the activation memory, from 0, the least peak, to below 1.
        said: As it was written.
    """

    bytes: int | None = None
    share: float | None = None
    said: str = field(default="", compare=False, repr=False)


FIT = Budget(said="fit")


class Limit(int):
    """The bytes that a budget means for one model.

    Attributes:
        said: The budget as it was written, with what it means: "0.4 of 18.6 MiB of activations: 46.4 MiB".
    """

    said: str

    def __new__(cls, count: int, said: str = "") -> Limit:
        """A number of bytes, which is written as such unless something else was said."""
        made = super().__new__(cls, count)
        made.said = said or (f"{count:,} bytes" + (f" ({errors.brief(count)})" if count >= 2**10 else ""))
        return made


def read_budget(budget: object) -> Budget:
    """Reads a budget.

    Args:
        budget: Bytes as an int, text such as "24GiB", "800MB", "40%", "0.4" or "fit", or a float from 0 to below 1;
            0 is the least peak.

    Raises:
        ArgumentError: It is none of these.
    """
    if isinstance(budget, Budget):
        return budget
    if isinstance(budget, Limit):
        return Budget(bytes=int(budget), said=budget.said)
    if isinstance(budget, str):
        return _of_text(budget)
    if isinstance(budget, float):
        return _share(budget, budget)
    try:
        count = operator.index(budget)  # type: ignore[arg-type]
    except TypeError:
        count = 0
    if budget == 0 and not isinstance(budget, bool):
        return _share(0.0, budget)
    if isinstance(budget, bool) or count <= 0:
        raise errors.ArgumentError(bad_budget(budget))
    _check_is_bytes(count, budget)
    return Budget(bytes=count, said=Limit(count).said)


def _of_text(text: str) -> Budget:
    if text.strip().lower() == "fit":
        return FIT
    match = _TEXT.fullmatch(text.strip().lower())
    if match is None:
        raise errors.ArgumentError(bad_budget(text))
    number, unit = match.groups()
    if unit == "%":
        return _share(float(number) / 100, text)
    if unit == "" and ("." in number or not int(number)):
        return _share(float(number), text)
    if unit and unit not in _UNITS:
        two = f"; {unit!r} could be {unit.upper()}B or {unit.upper()}iB, which differ" if unit in tuple("kmgt") else ""
        raise errors.ArgumentError(
            f"budget={text!r}: {unit!r} is not a unit of memory{two}.\n"
            "  Write B, KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024)."
        )
    # A fraction of a byte is rounded down: what is promised fits.
    count = math.floor(float(number) * _UNITS[unit]) if "." in number else int(number) * _UNITS.get(unit, 1)
    if count <= 0:
        raise errors.ArgumentError(bad_budget(text))
    if not unit:
        _check_is_bytes(count, text)
    return Budget(bytes=count, said=text.strip() if unit else Limit(count).said)


def _check_is_bytes(count: int, budget: object) -> None:
    """Refuses a number without a unit that no step could take as bytes, and asks which unit is missing."""
    if count < 1000:
        meant = [f'"{count}%"'] * (count < 100) + [f'"{count}MiB"'] * (count >= 100) + [f'"{count}GiB"']
        raise errors.ArgumentError(
            f"budget={budget!r} is {count} bytes, which is less than any step takes; {' or '.join(meant)}?\n"
            "  Write the unit."
        )


def _share(share: float, budget: object) -> Budget:
    if not 0 <= share < 1:
        raise errors.ArgumentError(bad_budget(budget))
    return Budget(share=share, said=str(budget).strip())


def bytes_meant(budget: object, least: Callable[[], int], most: int, free: Callable[[], int] | None) -> Limit:
    """The bytes that a budget means for one model, and the words for it.

    Args:
        budget: See `read_budget`.
        least: Returns the smallest peak of any plan; called only for a share.
        most: The peak without recomputation.
        free: Returns what the device has for this step; None if there is no device.

    Raises:
        ArgumentError: The budget is invalid, or "fit" without a device.
    """
    meant = read_budget(budget)
    if meant.bytes is not None:
        return Limit(meant.bytes, meant.said)
    if meant.share is not None:
        bottom = least()
        count = bottom + math.floor(meant.share * (most - bottom))
        said = f"{meant.said} of {errors.brief(most - bottom)} of activations: {errors.brief(count)}"
        if most <= bottom:
            said = f"{meant.said}, but no plan lowers the peak: its layers keep little beside their inputs then"
        return Limit(count, said)
    if free is None:
        raise errors.ArgumentError(
            'budget="fit" means what the device has free, and a profile knows no device.\n'
            '  Write make_plan(model, args, budget="fit") where the model is, or a number of bytes such as '
            'budget="24GiB".'
        )
    count = free()
    return Limit(count, f"{meant.said} ({errors.brief(count)} for tensors: what is free less {100 * RESERVE:.0f} %)")


def as_budget(count: int) -> str:
    """A budget as it is written: rounded down, so that it is not more than was meant."""
    for unit, name in errors.UNITS:
        if count >= 10 * unit or (count >= unit and (name == "KiB" or count % unit == 0)):
            return f"{count * 100 // unit / 100:.2f}{name}"
    return f"{count}B"


def bad_budget(budget: object) -> str:
    """Text for something that is no budget."""
    return (
        f"budget={budget!r} is not a budget.\n"
        '  Write bytes (24 * 2**30), a text with a unit ("24GiB", "24GB", "800MiB"), a share of the activation memory '
        'from 0, the smallest peak of any plan, to below 1 (0.4, "40%"), or "fit" for what the device has free.'
    )


def no_plan_fits(budget: str, smallest: int, own: int, advice: str) -> str:
    """Text for a budget that no plan fits into."""
    return (
        f"{too_small(budget, smallest, own)}\n"
        f'  Pass budget="{enough(smallest)}" or more, or a smaller batch. That plan is '
        f".solution of this error, and its bytes are .smallest.{more_advice(advice)}"
    )


def too_small(budget: str, smallest: int, own: int) -> str:
    """The sentence that every budget that is too small, here as it was written, begins with."""
    return (
        f"budget={budget} is too small for a step of this model: the plan with the smallest peak needs "
        f"{errors.size(smallest, up=True)} ({smallest} bytes); without a plan the peak is {errors.size(own)}."
    )


def limit_too_small(limit: str, least: int, others: int, write: str) -> str:
    """Text for a limit of elastic regions that a step fits under only alone."""
    return (
        f"{limit} is too small: with elastic regions it is the limit of all that is alive on the device. The plan with "
        f"the smallest peak needs {errors.size(least, up=True)}, and {errors.size(others)} are alive beside this step "
        "(other tensors; on a CPU the whole heap, with Python and libraries).\n"
        f"  Write {write} or more, or a share, which is of this step alone:  auto(..., budget=0.5, elastic=True). That "
        "plan is .solution of this error, and the bytes that are enough are .smallest."
    )


def enough(smallest: int) -> str:
    """The least budget that is enough, as it can be written."""
    return errors.size(smallest, up=True).replace(" ", "")


def more_advice(advice: str) -> str:
    """More advice, on a line of its own."""
    return f"\n  {advice}" if advice else ""
