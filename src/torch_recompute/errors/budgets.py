"""Texts for budgets of memory, and for the planning that they ask for."""

from __future__ import annotations

from ._say import size


def over_budget(budget: int, smallest: int, where: str, fixed: int) -> str:
    """Text for a budget that no choice fits into."""
    return (
        f"budget={size(budget)} is too small: no choice of what to recompute stays below {size(smallest, up=True)} "
        f"({smallest} bytes).\n"
        f"  With that choice the peak is {where}, where {size(fixed)} are not for a plan to change: parameters, "
        "gradients, optimizer state and what lies between the planned modules.\n"
        f'  Pass budget="{size(smallest, up=True).replace(" ", "")}" or more, or a smaller batch; the choice that needs '
        "the least is in the .solution of this error, and its bytes in .smallest."
    )
