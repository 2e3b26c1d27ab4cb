"""The exact solver: label dynamic programming from the end of the model, kept narrow by a lower bound.

Problem. The choices of a hundred layers with tens of options each meet one peak at every point of a step. Rounding
bytes to a grid makes plans up to 14 % worse at a thousand layers; without rounding there are too many partial choices.

Idea. A partial choice for the end of the model is a label (need, seconds, flops), see `problem.py`; one that is no
better than another in any of them is dropped. Another is dropped when its seconds and the least that the beginning can
cost (`envelope.py`) exceed the cost of a choice that is already known. A narrow beam finds such a choice first, and one
close to the best; then little survives, and what survives contains the best. If no label had to be dropped for want of
room the answer is exact, and says so; else it says how far from the best it can be at most, by the bound at the start.

Invariants. Whole numbers only decide; the float bound only throws away, with a margin for its rounding. Ties go to fewer
flops, then a smaller peak, then the simpler option.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..cost import Option, Solution
from .columns import Column, Columns
from .envelope import Envelope, prices
from .problem import Problem
from .solver import Solver

if TYPE_CHECKING:
    import numpy as np

    Ints = np.ndarray[Any, np.dtype[np.int64]]

# Labels per place: the beam that looks for a good choice, and what an exact search may hold.
BEAMS = (64, 1024, 16384)
# Of the largest number; rounding of the bound is below a thousandth of that.
MARGIN = 1e-11


@dataclass
class Labels:
    """Partial choices for the end of a model, by rising need.

    Attributes:
        need, ticks, flops: Of each.
        bound: The least that a whole choice with this end costs, and which line of the bound says so.
        line: Which line of the bound says so.
        option: Position of the first option in the list of all that start here.
        parent: Position of the label after that option, in the labels of its place.
    """

    need: Ints
    ticks: Ints
    flops: Ints
    bound: Any
    line: Ints
    option: Ints
    parent: Ints

    def __len__(self) -> int:
        return len(self.need)


@dataclass(frozen=True)
class Search:
    """One pass from the end to the start.

    Attributes:
        chosen: The best choice found; None if nothing was left.
        ticks: Its cost.
        complete: Whether no label was dropped for want of room.
        labels: How many were kept in all.
    """

    chosen: tuple[Option, ...] | None
    ticks: int
    complete: bool
    labels: int


class LabelSolver(Solver):
    """See the module."""

    name = "labels"

    def solve(self, problem: Problem, budget: int) -> Solution:
        """The best choice, exact unless the text of the answer says otherwise."""
        columns = Columns(problem)
        envelope = Envelope(problem, columns, budget, prices(problem))
        limit, chosen, kept = float("inf"), (), 0
        for beam in BEAMS:
            search = _search(problem, columns, envelope, budget, limit, beam)
            kept += search.labels
            if search.chosen is not None and search.ticks <= limit:
                limit, chosen = search.ticks, search.chosen
            if search.complete:
                return problem.solution(chosen, f"labels: exact ({kept} labels)")
        floor = max(0.0, float(envelope.at_end(budget - problem.needs[-1])))
        share = (limit - floor) / limit if limit else 0.0
        return problem.solution(chosen, f"labels: within {share:.2%} of the best ({kept} labels)")


def _search(problem: Problem, columns: Columns, envelope: Envelope, budget: int, limit: float, beam: int) -> Search:
    import numpy as np

    size = len(problem)
    limit += MARGIN * 2.0**61
    last = np.array([problem.needs[-1]], dtype=np.int64)
    nothing = np.zeros(1, dtype=np.int64)
    places: list[Labels | None] = [None] * (size + 1)
    places[size] = _labels(envelope, size, budget, last, nothing, nothing, nothing, nothing)
    complete, kept = True, 0
    for index in reversed(range(size)):
        parts: list[tuple[Ints, ...]] = []
        offset = 0
        for column in columns.at(index):
            after = places[index + column.span]
            if after is not None and len(after) and envelope.least[index] < float("inf"):
                parts.append(_extended(problem, columns, envelope, index, column, after, limit, offset))
            offset += len(column.moves)
        if not parts:
            continue
        need, ticks, flops, option, parent = (np.concatenate(rows) for rows in zip(*parts, strict=True))
        level = budget - envelope.least[index]
        fits = np.flatnonzero(need <= level)
        order = fits[np.lexsort((option[fits], flops[fits], ticks[fits], need[fits]))]
        order = order[_falls(ticks[order], flops[order])]
        labels = _labels(envelope, index, budget, *(row[order] for row in (need, ticks, flops, option, parent)))
        good = np.flatnonzero(labels.bound <= limit)
        if len(good) > beam:
            complete = False
            best = np.argpartition(labels.bound[good], beam - 1)[:beam]
            good = np.sort(good[best])
        places[index] = _taken(labels, good)
        kept += len(good)
    return _best(columns, places, complete, kept)


def _extended(
    problem: Problem,
    columns: Columns,
    envelope: Envelope,
    index: int,
    column: Column,
    after: Labels,
    limit: float,
    offset: int,
) -> tuple[Ints, ...]:
    """All labels that begin with an option of a column, less those that its price alone puts above the limit."""
    import numpy as np

    lines = np.arange(after.line.min(), after.line.max() + 1)
    # How much the bound rises, at the least, by taking an option after a label on a line.
    change = envelope.heights[index][lines] - envelope.heights[index + column.span][lines]
    rise = column.ticks[:, None] + column.saved[:, None] * envelope.slopes[lines] + change
    possible = rise[:, after.line - lines[0]] <= limit - after.bound + MARGIN * 2.0**61
    option, parent = np.nonzero(possible)
    need = np.maximum(column.own[option], column.saved[option] + after.need[parent])
    need = np.maximum(need, problem.points[index])
    return (
        need,
        column.ticks[option] + after.ticks[parent],
        column.flops[option] + after.flops[parent],
        option + offset,
        parent,
    )


def _falls(ticks: Ints, flops: Ints) -> Ints:
    """Positions where (ticks, flops) is below all before."""
    import numpy as np

    order = np.lexsort((flops, ticks))
    rank = np.empty(len(order), dtype=np.int64)
    fresh = np.ones(len(order), dtype=np.int64)
    fresh[1:] = (np.diff(ticks[order]) != 0) | (np.diff(flops[order]) != 0)
    rank[order] = np.cumsum(fresh)
    low = np.minimum.accumulate(rank)
    keep = np.ones(len(order), dtype=bool)
    keep[1:] = rank[1:] < low[:-1]
    return np.flatnonzero(keep)


def _labels(
    envelope: Envelope, index: int, budget: int, need: Ints, ticks: Ints, flops: Ints, option: Ints, parent: Ints
) -> Labels:
    if not len(need):
        return Labels(need, ticks, flops, ticks.astype(float), ticks, option, parent)
    bound, line = envelope.at(index, (budget - need).astype(float))
    return Labels(need, ticks, flops, bound + ticks, line, option, parent)


def _taken(labels: Labels, which: Ints) -> Labels:
    rows = (labels.need, labels.ticks, labels.flops, labels.bound, labels.line, labels.option, labels.parent)
    return Labels(*(row[which] for row in rows))


def _best(columns: Columns, places: list[Labels | None], complete: bool, kept: int) -> Search:
    first = places[0]
    if first is None or not len(first):
        return Search(None, 0, complete, kept)
    # Needs rise and costs fall: the last is the cheapest.
    at, index, chosen = len(first) - 1, 0, list[Option]()
    while index < len(places) - 1:
        labels = places[index]
        assert labels is not None
        moves = [move for column in columns.at(index) for move in column.moves]
        move, at = moves[int(labels.option[at])], int(labels.parent[at])
        chosen.extend(move)
        index += sum(option.span for option in move)
    return Search(tuple(chosen), int(first.ticks[-1]), complete, kept)
