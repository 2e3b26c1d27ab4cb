"""Which segments are chosen together.

Problem. Equal layers have more nearly equal mixtures of options than an exact search can tell apart in a second: in a
transformer most results cost about the same per byte to make again.

Idea. In the middle of a long run of segments of one kind a move takes a whole block, with one option throughout. Blocks
are halves of what is left, (n + 1) // 2 and so on down to one, so that two options can be mixed in every proportion
while the number of blocks grows with the logarithm of the layers. The ends of the run, where the peak is decided and
the odd bytes are filled, go one by one. What is left out are a few of thousands of mixtures with the same price per
byte. Which segments are tied depends on the costs alone, never on the budget, so the best of what is left still never
costs more with a larger budget.

Where a few kinds take turns (every second layer has experts, every sixth attends to everything), a block holds whole
turns, with one option for each kind: the pairs that lie closest to the best price for what they save.

Rejected: a search cut off after some time (which budget is unlucky is chance: a larger one may cost more), and counts
per option instead of an order (exact only where all that else lives is the same at every layer, and gradients grow).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .labels import spread
from .problem import Group, Problem

if TYPE_CHECKING:
    import numpy as np

    Ints = np.ndarray[Any, np.dtype[np.int64]]

# Segments at either end of a run that go one by one, and how long a run must be to have blocks at all.
LOOSE = 8
LONG = 48
# The most segments in the unit that blocks are made of: a turn of kinds, or what options over several segments fill.
UNIT = 12
# Pairs of options for a turn.
PAIRS = 64


def blocks(problem: Problem) -> dict[int, int]:
    """Where blocks begin, and how many segments each takes."""
    kinds = [segment.kind for segment in problem.costs.segments]
    found: dict[int, int] = {}
    index = 0
    while index < len(kinds):
        period, run = _turns(kinds, index)
        if run > LONG:
            unit = math.lcm(*(group.span for group in problem.groups(index))) if period == 1 else period
            unit = unit if unit <= UNIT else 1
            stop = index + run - LOOSE
            left = (run - 2 * LOOSE) // unit
            while left:
                taken = (left + 1) // 2
                stop -= taken * unit
                found[stop] = taken * unit
                left -= taken
        index += run
    return found


def _turns(kinds: list[str], index: int) -> tuple[int, int]:
    """The shortest period with which kinds take turns for long from a place, and for how long; else 1, 1."""
    for period in range(1, UNIT + 1):
        stop = index + period
        while stop < len(kinds) and kinds[stop] == kinds[stop - period]:
            stop += 1
        if stop - index > LONG:
            return period, stop - index
    return 1, 1


def pairs(groups: Mapping[str, Group], counts: Mapping[str, int]) -> dict[str, Ints]:
    """For each kind of a turn the positions of its options, one row per pair.

    Args:
        groups: The options of each kind.
        counts: How often each kind comes in a turn.
    """
    import numpy as np

    picked: dict[str, Ints] = {}
    saved = ticks = np.zeros(1, dtype=np.int64)
    for kind, group in groups.items():
        rows, own = (part.ravel() for part in np.indices((len(saved), len(group.options))))
        saved = saved[rows] + counts[kind] * np.array(group.saved, dtype=np.int64)[own]
        ticks = ticks[rows] + counts[kind] * np.array(group.ticks, dtype=np.int64)[own]
        order = np.lexsort((ticks, saved))
        falls = np.concatenate(([True], ticks[order][1:] < np.minimum.accumulate(ticks[order])[:-1]))
        order = order[falls]
        order = order[spread(saved[order], ticks[order], _above_best_price(saved[order], ticks[order]), PAIRS)]
        picked = {before: which[rows[order]] for before, which in picked.items()} | {kind: own[order]}
        saved, ticks = saved[order], ticks[order]
    return picked


def _above_best_price(saved: Ints, ticks: Ints) -> Any:
    """How much each costs above the best of all, at the price that favours it."""
    import numpy as np

    slopes = np.unique((ticks[:-1] - ticks[1:]) / (saved[1:] - saved[:-1])) if len(saved) > 1 else np.zeros(1)
    costs = ticks + saved * slopes[:, None]
    return (costs - costs.min(1, keepdims=True)).min(0)
