"""Labels: partial choices for the end of a model, and how they grow towards its start.

A label is (need, seconds, FLOPs), see `problem.py`. One that is no better than another in any of them is dropped; that
alone is the exact dynamic program. Two things that it lacks are left to its callers: for one budget `search.py` throws
away what cannot become the best, and for all budgets `curve.py` thins what is too many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ..cost import Option
from .problem import Problem

if TYPE_CHECKING:
    import numpy as np

    from .columns import Column, Columns

    Floats = np.ndarray[Any, np.dtype[np.float64]]
    Ints = np.ndarray[Any, np.dtype[np.int64]]
    Bools = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class Labels:
    """Partial choices for the end of a model, in columns. A good set has rising needs and falling costs.

    Attributes:
        need, ticks, flops: Of each.
        move: Position of its first move, among all that may begin here.
        parent: Position of the label after that move, among those of its place.
    """

    need: Ints
    ticks: Ints
    flops: Ints
    move: Ints
    parent: Ints

    def __len__(self) -> int:
        return len(self.need)

    @staticmethod
    def last(problem: Problem) -> Labels:
        """The end of the model."""
        import numpy as np

        nothing = np.zeros(1, dtype=np.int64)
        return Labels(np.array([problem.needs[-1]], dtype=np.int64), nothing, nothing, nothing, nothing)

    def taken(self, which: Ints) -> Labels:
        """Some of them."""
        return Labels(*(getattr(self, field.name)[which] for field in fields(self)))


def extended(
    problem: Problem,
    columns: Columns,
    places: list[Labels | None],
    index: int,
    pairs: Callable[[int, Column], Bools] | None = None,
) -> Labels | None:
    """All labels that begin with a move at a place; None if there are none.

    Args:
        problem: Whose.
        columns: Its moves.
        places: The labels of all places behind.
        index: The place.
        pairs: Which moves (rows) may stand before which labels (columns), for a place and a column; all by default.
    """
    import numpy as np

    parts: list[tuple[Ints, ...]] = []
    offset = 0
    for column in columns.at(index):
        after = places[index + column.span]
        if after is not None:
            every = np.ones((len(column.moves), len(after)), dtype=bool)
            move, parent = np.nonzero(every if pairs is None else pairs(index, column))
            need = np.maximum(column.own[move], column.saved[move] + after.need[parent])
            parts.append(
                (
                    np.maximum(need, problem.points[index]),
                    column.ticks[move] + after.ticks[parent],
                    column.flops[move] + after.flops[parent],
                    move + offset,
                    parent,
                )
            )
        offset += len(column.moves)
    # None of the moves may stand before any of the labels, or there are no labels behind.
    if not any(len(parent) for *_, parent in parts):
        return None
    return Labels(*(np.concatenate(rows) for rows in zip(*parts, strict=True)))


def undominated(labels: Labels | None) -> Labels | None:
    """Those that no other is at least as good as, the earlier move first among equals."""
    import numpy as np

    if labels is None:
        return None
    # Ranks stand for (ticks, flops), so that one comparison does.
    order = np.lexsort((labels.flops, labels.ticks))
    ticks, flops = labels.ticks[order], labels.flops[order]
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.concatenate(([0], np.cumsum((np.diff(ticks) != 0) | (np.diff(flops) != 0))))
    order = np.lexsort((labels.move, rank, labels.need))
    lowest = np.minimum.accumulate(rank[order])
    better = np.concatenate(([True], rank[order][1:] < lowest[:-1]))
    return labels.taken(order[better])


def spread(need: Ints, ticks: Ints, gap: Floats, most: int) -> Ints:
    """Positions along a falling curve: the smallest gap in each of so many stretches of equal length, and both ends."""
    import numpy as np

    if len(need) <= most:
        return np.arange(len(need))
    cost, size = ticks.astype(np.float64), need.astype(np.float64)
    along = (size - size[0]) / (size[-1] - size[0]) + (cost[0] - cost) / (cost[0] - cost[-1])
    stretch = np.minimum((along / 2 * (most - 2)).astype(np.int64), most - 3)
    order = np.lexsort((gap, stretch))
    best = order[np.unique(stretch[order], return_index=True)[1]]
    return np.unique(np.concatenate(([0], best, [len(need) - 1])))


def followed(columns: Columns, places: list[Labels | None], at: int) -> list[Option]:
    """The choice that a label at the start stands for, one option per start of a span."""
    index, chosen = 0, list[Option]()
    while index < len(places) - 1:
        labels = places[index]
        assert labels is not None
        moves = [move for column in columns.at(index) for move in column.moves]
        move, at = moves[int(labels.move[at])], int(labels.parent[at])
        chosen.extend(move)
        index += sum(option.span for option in move)
    return chosen
