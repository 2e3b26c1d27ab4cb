"""What the label solver may do at each place of the chain, as numpy columns.

Problem. Equal layers have more nearly equal mixtures of options than an exact search can tell apart in a second: in a
transformer most results cost about the same per byte to make again.

Idea. In the middle of a long run of segments of one kind a move takes a whole block, with one option throughout. Blocks
are halves of what is left, (n + 1) // 2 and so on down to one, so that two options can be mixed in every proportion
while the number of blocks grows with the logarithm of the layers. The ends of the run, where the peak is decided and
the odd bytes are filled, go one by one. What is left out are a few of thousands of mixtures with the same price per
byte. Which segments are tied depends on the costs alone, never on the budget, so the best of what is left still never
costs more with a larger budget. One more move per block is the one that needs the least, so the least feasible budget
is not touched.

Rejected: a search cut off after some time (which budget is unlucky is chance: a larger one may cost more), and
counts per option instead of an order (exact only where the rest of the model adds the same to every layer, and
gradients grow).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..cost import Option
from .problem import Group, Problem

if TYPE_CHECKING:
    import numpy as np

    Ints = np.ndarray[Any, np.dtype[np.int64]]

LOOSE = 8
LONG = 48
# Blocks are made of so many segments at the most, where options span several.
UNIT = 12


@dataclass(frozen=True)
class Column:
    """The moves of one length that may begin at a place.

    Attributes:
        span: How many segments each takes.
        moves: The options of each, one after the other.
        saved, ticks, flops: Sums over each.
        own: What each takes above what was saved before it.
    """

    span: int
    moves: Sequence[tuple[Option, ...]]
    saved: Ints
    ticks: Ints
    flops: Ints
    own: Ints


@dataclass(frozen=True)
class _Arrays:
    moves: tuple[tuple[Option, ...], ...]
    saved: Ints
    forward: Ints
    backward: Ints
    ticks: Ints
    flops: Ints


class Columns:
    """The moves of a problem.

    Args:
        problem: Whose.
        tied: Whether the middle of long runs is taken in blocks.
    """

    def __init__(self, problem: Problem, tied: bool = False) -> None:
        self._problem = problem
        self._arrays: dict[int, _Arrays] = {}
        self._blocks = _blocks(problem) if tied else dict[int, int]()
        self.tied = sum(self._blocks.values())
        self._inside = {start + step for start, length in self._blocks.items() for step in range(1, length)}
        self._made: dict[int, list[Column]] = {}

    def at(self, index: int) -> list[Column]:
        """The moves that may begin at a segment."""
        if index not in self._made:
            self._made[index] = self._columns(index)
        return self._made[index]

    def _columns(self, index: int) -> list[Column]:
        if index in self._inside:
            return []
        groups = self._problem.groups(index)
        if index in self._blocks:
            length = self._blocks[index]
            tied = [self._repeated(index, length, group) for group in groups if length % group.span == 0]
            return [*tied, self._least(index, length)]
        columns: list[Column] = []
        for group in groups:
            arrays = self._of(group)
            own = self._own(index, group.span, arrays)
            columns.append(Column(group.span, arrays.moves, arrays.saved, arrays.ticks, arrays.flops, own))
        return columns

    def _repeated(self, index: int, length: int, group: Group) -> Column:
        """A block with one option from start to end."""
        import numpy as np

        arrays, times = self._of(group), length // group.span
        own = np.zeros_like(arrays.saved)
        for step in reversed(range(times)):
            start = index + step * group.span
            own = np.maximum(own + arrays.saved if step < times - 1 else own, self._own(start, group.span, arrays))
            if step:
                own = np.maximum(own, self._problem.points[start])
        moves = tuple(move * times for move in arrays.moves)
        return Column(length, moves, arrays.saved * times, arrays.ticks * times, arrays.flops * times, own)

    def _least(self, index: int, length: int) -> Column:
        """The block that needs the least."""
        import numpy as np

        problem = self._problem
        options = problem.least(index, index + length)
        own = 0
        at = index + length
        for option in reversed(options):
            at -= option.span
            own = max(option.saved_bytes + own, problem.own(at, option), problem.points[at] if at > index else 0)
        figures = (
            sum(option.saved_bytes for option in options),
            sum(problem.ticks(option.seconds) for option in options),
            sum(problem.flops(option) for option in options),
            own,
        )
        return Column(length, (options,), *(np.array([figure], dtype=np.int64) for figure in figures))

    def _own(self, index: int, span: int, arrays: _Arrays) -> Ints:
        import numpy as np

        forward, backward, inside = self._problem.bases(index, span)
        own = np.maximum(arrays.forward + forward, arrays.backward + backward)
        return np.maximum(own, arrays.saved + inside)

    def _of(self, group: Group) -> _Arrays:
        import numpy as np

        key = id(group)
        if key not in self._arrays:
            rows = (group.saved, group.forward, group.backward, group.ticks, group.flops)
            moves = tuple((option,) for option in group.options)
            self._arrays[key] = _Arrays(moves, *(np.array(row, dtype=np.int64) for row in rows))
        return self._arrays[key]


def _blocks(problem: Problem) -> dict[int, int]:
    """Where blocks begin, and how many segments each takes."""
    blocks: dict[int, int] = {}
    index = 0
    while index < len(problem):
        run = problem.run(index)
        if run > LONG:
            unit = math.lcm(*(group.span for group in problem.groups(index)))
            unit = unit if unit <= UNIT else 1
            stop = index + run - LOOSE
            left = (run - 2 * LOOSE) // unit
            while left:
                taken = (left + 1) // 2
                stop -= taken * unit
                blocks[stop] = taken * unit
                left -= taken
        index += run
    return blocks
