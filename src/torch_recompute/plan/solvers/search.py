"""The solver for one budget: labels, kept few by a lower bound.

Problem. The choices of a hundred layers with tens of options each meet one peak at every point of a step. Rounding
bytes to a grid makes plans up to 14 % worse at a thousand layers; without rounding there are too many partial choices.

Idea. A label (`labels.py`) is dropped when its seconds and the least that the beginning of the model can cost
(`envelope.py`) exceed the cost of a choice that is already known. A narrow beam finds such a choice first, and one
close to the best; then little survives, and what survives contains the best. If no label had to be dropped for want
of room the answer is exact, and says so; else it says how far from the best it can be, by the bound on the whole.

Invariants. Whole numbers decide; the float bound only throws away, with a margin for its rounding. Ties go to fewer
FLOPs, then a smaller peak, then the simpler option.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..cost import Option, Solution
from .columns import Column, Columns
from .envelope import Envelope, prices
from .labels import Labels, extended, followed, undominated
from .problem import LARGEST, Problem
from .solver import Solver

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[Any, np.dtype[np.float64]]
    Ints = np.ndarray[Any, np.dtype[np.int64]]
    Bools = np.ndarray[Any, np.dtype[np.bool_]]

# Labels per place: the beams that look for a good choice, and the most that a search holds.
BEAMS = (64, 1024, 2**16)
# In ticks. The bound is made of sums of floats; what they lose by rounding is far less.
MARGIN = 1e-11 * LARGEST


class LabelSolver(Solver):
    """Labels; see the module.

    Args:
        tied: Whether the middle of long runs of equal segments is taken in blocks, see `blocks.py`.
    """

    def __init__(self, tied: bool = False) -> None:
        self._tied = tied
        self.name = "blocks" if tied else "labels"

    def solve(self, problem: Problem, budget: int) -> Solution:
        """The best choice, exact unless its text says otherwise."""
        columns, slopes = Columns(problem, self._tied), prices(problem)
        envelope = Envelope(problem, columns, budget, slopes)
        limit, chosen, kept, complete = math.inf, list[Option](), 0, False
        for beam in BEAMS:
            search = _search(problem, columns, Cut(envelope, budget, limit + MARGIN), beam)
            kept += search.labels
            if search.chosen is not None and search.ticks <= limit:
                limit, chosen = search.ticks, search.chosen
            if complete := search.complete:
                break
        if complete and not columns.tied:
            return problem.solution(chosen, f"{self.name}: exact, {kept} labels")
        if columns.tied:
            envelope = Envelope(problem, Columns(problem), budget, slopes)
        within = problem.within(limit, envelope.whole(budget - problem.needs[-1]))
        how = f"exact where {columns.tied} of {len(problem)} segments go by blocks, " if complete else ""
        return problem.solution(chosen, f"{self.name}: {how}{within}, {kept} labels")


class Cut:
    """Which labels a limit leaves.

    Args:
        envelope: The bound.
        budget: The budget it is for.
        limit: Ticks that a whole choice may cost.
    """

    def __init__(self, envelope: Envelope, budget: int, limit: float) -> None:
        self._envelope, self._budget, self._limit = envelope, budget, limit
        self._lines: dict[int, tuple[Any, Ints]] = {}

    def keep(self, index: int, labels: Labels, beam: int) -> tuple[Labels | None, bool]:
        """The labels that can still become a choice within the limit, so many at most, and whether those are all."""
        import numpy as np

        labels = labels.taken(np.flatnonzero(labels.need <= self._budget - self._envelope.least[index]))
        if not len(labels):
            return None, True
        bound, line = self._envelope.at(index, (self._budget - labels.need).astype(np.float64))
        bound = bound + labels.ticks
        good = np.flatnonzero(bound <= self._limit)
        complete = len(good) <= beam
        if not complete:
            good = np.sort(good[np.argsort(bound[good], kind="stable")[:beam]])
        self._lines[index] = bound[good], line[good]
        return (labels.taken(good) if len(good) else None), complete

    def pairs(self, index: int, column: Column) -> Bools:
        """Which moves may precede which labels, as far as the price of a byte tells."""
        import numpy as np

        bound, line = self._lines[index + column.span]
        lines = np.arange(line.min(), line.max() + 1)
        # The bound rises by at least so much when a move is put before a label whose bound is on that line.
        heights = self._envelope.heights
        change = heights[index][lines] - heights[index + column.span][lines]
        rise = column.ticks[:, None] + column.saved[:, None] * self._envelope.slopes[lines] + change
        return rise[:, line - lines[0]] <= self._limit - bound


@dataclass(frozen=True)
class Search:
    """What one pass from the end to the start found.

    Attributes:
        chosen: The best choice; None if none is within the limit.
        ticks: Its cost.
        complete: Whether no label was dropped for want of room.
        labels: How many were kept in all.
    """

    chosen: list[Option] | None
    ticks: int
    complete: bool
    labels: int


def _search(problem: Problem, columns: Columns, cut: Cut, beam: int) -> Search:
    size = len(problem)
    places: list[Labels | None] = [None] * (size + 1)
    places[size], complete = cut.keep(size, Labels.last(problem), beam)
    kept = 0
    for index in reversed(range(size)):
        labels = undominated(extended(problem, columns, places, index, cut.pairs))
        if labels is not None:
            places[index], all_kept = cut.keep(index, labels, beam)
            complete = complete and all_kept
            kept += len(places[index] or ())
    first = places[0]
    if first is None:
        return Search(None, 0, complete, kept)
    # Needs rise and costs fall: the last is the cheapest.
    return Search(followed(columns, places, len(first) - 1), int(first.ticks[-1]), complete, kept)
