"""How findings say figures."""

from __future__ import annotations


def mib(count: float) -> str:
    """Bytes in MiB, or exactly where they are few."""
    return f"{count / 2**20:,.2f} MiB" if abs(count) >= 2**20 else f"{int(count):,} bytes"


def budget_word(count: int) -> str:
    """Bytes as a budget is written."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if count >= 10 * unit:
            return f"{count * 100 // unit / 100:.2f}{name}"
    return str(count)


def regions(count: int) -> str:
    """A count of regions."""
    return "1 region" if count == 1 else f"{count} regions"


def times(count: int) -> str:
    """How often."""
    return "once" if count == 1 else f"{count} times"


def gflop(count: float) -> str:
    """FLOPs in GFLOP."""
    return f"{count / 1e9:,.3g} GFLOP"
