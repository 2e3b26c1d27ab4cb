"""A lower bound on what the beginning of a model costs, for every level that it may have saved.

Problem. A search over exact bytes has millions of states. It is fast only if most of them can be thrown away for being
provably too expensive, and that takes a bound on the seconds of the part that is still open.

Idea. Let `cost(i, s)` be the fewest seconds of the segments before `i` so that they saved at most `s` bytes and
broke no constraint on their way. Its lower convex hull is bounded by straight lines `height - slope * s`, one for
each of a fixed set of slopes (prices of a byte, in ticks), and the heights pass from segment to segment: the line
after an option is the line before it, moved; where the option is only allowed below some level, it is the value at
that level instead. So constraints in the middle of the model are in the bound as well as the one at the end. One
pass, vectors only.

Any set of slopes gives a valid bound, a good one contains the price at which the optimum trades. The candidates are the
prices at which one option of a segment gives way to another.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from .columns import Columns
from .problem import Problem

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[Any, np.dtype[np.float64]]
    Ints = np.ndarray[Any, np.dtype[np.int64]]

SLOPES = 128


class Envelope:
    """The bound for one budget.

    Attributes:
        slopes: Ticks per byte, rising.
        heights: One row per place in the chain, one column per slope.
        least: The least that the segments before a place can have saved; infinite where no way leads there.
    """

    def __init__(self, problem: Problem, columns: Columns, budget: int, slopes: Floats) -> None:
        import numpy as np

        self.slopes = slopes
        size = len(problem)
        self.heights = np.full((size + 1, len(slopes)), np.inf)
        self.heights[0] = 0.0
        self.least = [0.0] + [np.inf] * size
        room = [budget - need for need in problem.needs]
        for index in range(size):
            if self.least[index] == np.inf:
                continue
            row = self._at_least(index)
            for column in columns.at(index):
                after = index + column.span
                # The most that may have been saved before, so that this option and the least that follows still fit.
                caps = np.minimum(budget - column.own, room[after] - column.saved)
                caps = np.minimum(caps, room[index]).astype(np.float64)
                usable = caps >= self.least[index]
                if not usable.any():
                    continue
                caps = caps[usable]
                saved = column.saved[usable].astype(np.float64)
                ticks = column.ticks[usable].astype(np.float64)
                lines = row - caps[:, None] * slopes
                active = lines.argmax(1)
                value = lines[np.arange(len(caps)), active]
                # Where the price at the cap is above a line's, the line's lowest point lies behind the cap.
                lowest = np.where(slopes <= slopes[active][:, None], value[:, None] + caps[:, None] * slopes, row)
                moved = (lowest + (ticks[:, None] + saved[:, None] * slopes)).min(0)
                np.minimum(self.heights[after], moved, out=self.heights[after])
                self.least[after] = min(self.least[after], self.least[index] + float(saved.min()))

    def _at_least(self, index: int) -> Floats:
        """The lines of a place, lifted to where they meet the least that can have been saved."""
        import numpy as np

        row, least = self.heights[index], self.least[index]
        lines = row - least * self.slopes
        active = int(lines.argmax())
        row = np.where(self.slopes >= self.slopes[active], lines[active] + least * self.slopes, row)
        self.heights[index] = row
        return row

    def at(self, index: int, levels: Floats) -> tuple[Floats, Ints]:
        """The bound at some levels, highest first, and which line gives it."""
        import numpy as np

        row = self.heights[index]
        # Lines that are equal but for rounding may come in either order.
        ends = (row - levels[[0, -1], None] * self.slopes).argmax(1)
        first, last = int(ends.min()), int(ends.max())
        lines = row[first : last + 1] - levels[:, None] * self.slopes[first : last + 1]
        active = lines.argmax(1)
        return lines[np.arange(len(levels)), active], active + first

    def whole(self, level: int) -> float:
        """The bound on the whole."""
        return float((self.heights[-1] - level * self.slopes).max())


def prices(problem: Problem) -> Floats:
    """The slopes: the prices of a byte at which one option of a kind gives way to another, thinned if many."""
    import numpy as np

    found: set[float] = set()
    seen: set[str] = set()
    for index, segment in enumerate(problem.costs.segments):
        if segment.kind in seen:
            continue
        seen.add(segment.kind)
        groups = problem.groups(index)
        for sizes in (lambda g: g.saved, lambda g: g.forward, lambda g: g.backward):
            points = [(s / g.span, t / g.span) for g in groups for s, t in zip(sizes(g), g.ticks, strict=True)]
            found.update(_hull(points))
    slopes = np.array(sorted(found | {0.0}))
    if len(slopes) > SLOPES:
        slopes = slopes[np.unique(np.linspace(0, len(slopes) - 1, SLOPES).round().astype(int))]
    return slopes


def _hull(points: list[tuple[float, float]]) -> list[float]:
    """The slopes of the lower left hull, as positive numbers."""
    hull: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if hull and y >= hull[-1][1]:
            continue
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (x - hull[-2][0]) >= (y - hull[-2][1]) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        if hull and hull[-1][0] == x:
            hull.pop()
        hull.append((x, y))
    return [(a[1] - b[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(hull)]
