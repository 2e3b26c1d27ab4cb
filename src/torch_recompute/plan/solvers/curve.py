"""The whole curve of peak against seconds, from one pass.

Idea. The labels of `labels.py`, (need, seconds) of the end of the model, know no budget: those at the start of the
model are the curve itself, each with the choice that reaches it. Where they become too many, a place keeps those
that lie closest to a lower bound, so many per stretch of the curve, and the points say how far from the best they
can be.

The lower bound is that of `envelope.py` seen from the other side, the fewest seconds of the rest by the bytes still
free, which needs no budget either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..cost import Solution
from .columns import Columns
from .envelope import prices
from .labels import Labels, extended, followed, spread, undominated
from .problem import Problem

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[Any, np.dtype[np.float64]]
    Ints = np.ndarray[Any, np.dtype[np.int64]]

WIDTH = 1024


def curve(problem: Problem, columns: Columns, most: int) -> list[Solution]:
    """Up to so many points, the least peak first, each cheaper than those before it."""
    import numpy as np

    slopes = prices(problem)
    floor = _floor(problem, columns, slopes)
    size, exact = len(problem), not columns.tied
    places: list[Labels | None] = [None] * (size + 1)
    places[size] = Labels.last(problem)
    for index in reversed(range(size)):
        labels = undominated(extended(problem, columns, places, index))
        if labels is not None and len(labels) > WIDTH:
            gap = labels.ticks - (floor[index] - labels.need[:, None] * slopes).max(1)
            labels, exact = labels.taken(spread(labels.need, labels.ticks, gap, WIDTH)), False
        places[index] = labels
    first = places[0]
    assert first is not None
    picked = spread(first.need, first.ticks, np.zeros(len(first)), most)
    if not exact:
        floor = _floor(problem, Columns(problem, tied=False), slopes) if columns.tied else floor
    least = (floor[0] - first.need[:, None] * slopes).max(1)
    solutions: list[Solution] = []
    for at in picked:
        within = problem.within(int(first.ticks[at]), float(least[at]))
        said = "curve: exact" if exact else f"curve: {within} for its peak"
        solutions.append(problem.solution(followed(columns, places, int(at)), said))
    return solutions


def _floor(problem: Problem, columns: Columns, slopes: Floats) -> Floats:
    """Lines below the fewest seconds of the rest, by the bytes that are still free: one row per place."""
    import numpy as np

    size = len(problem)
    floor = np.full((size + 1, len(slopes)), np.inf)
    floor[size] = slopes * problem.needs[-1]
    for index in reversed(range(size)):
        for column in columns.at(index):
            after = index + column.span
            row = floor[after]
            if row[0] == np.inf:
                continue
            # The fewest that must be free after the move: for itself, for a point before it, for what follows.
            free = np.maximum(np.maximum(column.own, problem.points[index]) - column.saved, problem.needs[after])
            lines = row - free[:, None].astype(np.float64) * slopes
            active = lines.argmax(1)
            value = lines[np.arange(len(lines)), active]
            at_edge = value[:, None] + free[:, None] * slopes
            lowest = np.where(slopes >= slopes[active][:, None], at_edge, row)
            moved = (lowest + (column.ticks[:, None] + column.saved[:, None] * slopes)).min(0)
            np.minimum(floor[index], moved, out=floor[index])
    return floor
