"""Texts for budgets of memory, and for the planning that they ask for."""

from __future__ import annotations

from collections.abc import Sequence

from ._say import size


def over_budget(budget: int, smallest: int, where: str, fixed: int) -> str:
    """Text for a budget that no choice fits into."""
    exact = "" if smallest < 2**10 else f" ({smallest} bytes)"
    return (
        f"budget={size(budget)} is too small: no choice of what to recompute needs less than "
        f"{size(smallest, up=True)}{exact}.\n"
        f"  With that choice the peak is {where}, where {size(fixed)} are not for a plan to change: parameters, "
        "gradients, optimizer state and what lies between the planned modules.\n"
        f'  Pass budget="{size(smallest, up=True).replace(" ", "")}" or more, or a smaller batch. The choice that '
        "needs the least is .solution of this error, and its bytes are .smallest."
    )


def bad_budget(budget: object) -> str:
    """Text for something that is no budget."""
    return (
        f"budget={budget!r} is not a budget.\n"
        '  Write bytes (24 * 2**30), a text with a unit ("24GiB", "24GB", "800MiB"), a share of the activation memory '
        'between 0 and 1 (0.4, "40%"), or "fit" for what the device has free.'
    )


def unknown_unit(budget: str, unit: str) -> str:
    """Text for a budget in a unit that is none, or that could be two."""
    two = (
        f"; {unit!r} could be {unit.upper()}B or {unit.upper()}iB, which differ" if unit in ("k", "m", "g", "t") else ""
    )
    return (
        f"budget={budget!r}: {unit!r} is not a unit of memory{two}.\n"
        "  Write B, KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024)."
    )


def unknown_solver(solver: object, known: Sequence[str]) -> str:
    """Text for a solver that does not exist."""
    return f"solver={solver!r} is not a solver.\n  Write one of {', '.join(known)}; auto is the one to use."


def needs_highs() -> str:
    """Text for a solver that is not installed."""
    return 'solver="highs" needs the package highspy, which is not installed.\n  Write: pip install highspy'


def needs_numpy() -> str:
    """Text for planning without numpy."""
    return "planning for a memory budget needs the package numpy, which is not installed.\n  Write: pip install numpy"


def bad_costs(why: str) -> str:
    """Text for costs that cannot be."""
    return f"these costs cannot be: {why}.\n  Costs are made by profiling a model; by hand, see plan/cost.py."
