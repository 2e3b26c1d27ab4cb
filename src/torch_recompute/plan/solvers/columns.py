"""What may be done at each place of the chain, as numpy columns: an option of one segment, or a whole block.

A block (`blocks.py`) is left with one option per kind throughout, or with the options that need the least, so that
blocks never raise the least feasible budget. What a block takes for itself is counted exactly, segment by segment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..cost import Option
from .blocks import blocks, pairs
from .problem import Group, Problem

if TYPE_CHECKING:
    import numpy as np

    Ints = np.ndarray[Any, np.dtype[np.int64]]


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

    def taken(self, which: Ints) -> _Arrays:
        """Some of them."""
        moves = tuple(self.moves[int(at)] for at in which)
        rows = (self.saved, self.forward, self.backward, self.ticks, self.flops)
        return _Arrays(moves, *(row[which] for row in rows))


class Columns:
    """The moves of a problem.

    Args:
        problem: Whose.
        tied: Whether the middle of long runs is taken in blocks.
    """

    def __init__(self, problem: Problem, tied: bool = False) -> None:
        self._problem = problem
        self._arrays: dict[int, _Arrays] = {}
        self._blocks = blocks(problem) if tied else dict[int, int]()
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
            if self._problem.run(index) < length:
                return [self._turns(index, length), self._least(index, length)]
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

    def _turns(self, index: int, length: int) -> Column:
        """A block in which kinds take turns, with one option for each."""
        import numpy as np

        segments = self._problem.costs.segments[index : index + length]
        counts = Counter(segment.kind for segment in segments)
        groups = {kind: self._problem.single(kind) for kind in sorted(counts)}
        picked = pairs(groups, counts)
        arrays = {kind: self._of(group).taken(picked[kind]) for kind, group in groups.items()}
        own = np.zeros(len(picked[segments[0].kind]), dtype=np.int64)
        for step in reversed(range(length)):
            here = arrays[segments[step].kind]
            after = own + here.saved if step < length - 1 else own
            own = np.maximum(after, self._own(index + step, 1, here))
            if step:
                own = np.maximum(own, self._problem.points[index + step])
        moves = [
            tuple(option for segment in segments for option in arrays[segment.kind].moves[row])
            for row in range(len(own))
        ]
        saved, ticks, flops = (
            sum((getattr(arrays[kind], name) * count for kind, count in counts.items()), np.zeros_like(own))
            for name in ("saved", "ticks", "flops")
        )
        return Column(length, moves, saved, ticks, flops, own)

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
