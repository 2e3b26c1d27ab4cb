"""A `Costs` made ready for arithmetic: whole numbers, and what each choice needs at each place.

Problem. Solvers compare sums of thousands of floats; two orders of adding the same terms differ in the last bit, and
then a "better" choice is noise: plans would change from machine to machine, and a larger budget could cost more.

Idea. Seconds become whole ticks of a power of two, fine enough that the sum over the model just fits 61 bits: adding
is exact and ties are ties. And the constraints are read from the end. Let `need` at a place be the bytes that must
still be free above what the segments before it have saved. For an option chosen there,

    need before = max(own, saved + need after)      own = what its forward and its backward take

so the end of the chain is a pair (need, seconds) that knows nothing of the budget, and a budget allows it if the
need at the very start is no larger. The peak of the step *is* that need.

Rejected: to carry the bytes saved so far from the front, which asks for the budget at every step, must carry the
peak as a third number, and answers for one budget only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..cost import Costs, Option, Segment, Solution
from ..cost_rules import check

_BITS = 61
LARGEST = 2.0**_BITS


@dataclass(frozen=True)
class Group:
    """The options of a kind that take the same number of segments, as columns.

    Attributes:
        span: How many segments each takes.
        options: The options, the simplest first.
        saved, forward, backward: Bytes, as in `Option`.
        ticks, flops: Whole numbers that add up without overflow.
    """

    span: int
    options: tuple[Option, ...]
    saved: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    ticks: tuple[int, ...]
    flops: tuple[int, ...]


@dataclass(frozen=True)
class Moment:
    """A moment of a step.

    Attributes:
        bytes: All that live then.
        fixed: Those that no choice changes.
        where: In words.
    """

    bytes: int
    fixed: int
    where: str


class Problem:
    """What solvers work on.

    Raises:
        ArgumentError: The costs cannot be.

    Attributes:
        costs: Where it comes from.
        points: Bytes at the points after so many segments; 0 where there is none. The turn is the last.
        exponent: Ticks per second, as a power of two.
    """

    def __init__(self, costs: Costs) -> None:
        check(costs)
        self.costs = costs
        segments = costs.segments
        self.points = [0] * (len(segments) + 1)
        for point in costs.points:
            self.points[point.after] = max(self.points[point.after], point.bytes)
        self.points[-1] = max(self.points[-1], costs.turn_bytes)
        options = [option for kind in costs.kinds.values() for option in kind.options]
        self.exponent = _exponent(len(segments) * max((option.seconds for option in options), default=0.0))
        self._shift = max(
            0, (len(segments) * max((option.flops for option in options), default=0)).bit_length() - _BITS
        )
        self._groups = {name: self._grouped(kind.options) for name, kind in costs.kinds.items()}

    def __len__(self) -> int:
        return len(self.costs.segments)

    def _grouped(self, options: Iterable[Option]) -> tuple[Group, ...]:
        by_span: dict[int, list[Option]] = {}
        for option in sorted(options, key=simplicity):
            by_span.setdefault(option.span, []).append(option)
        return tuple(
            Group(
                span,
                tuple(same),
                tuple(option.saved_bytes for option in same),
                tuple(option.forward_bytes for option in same),
                tuple(option.backward_bytes for option in same),
                tuple(self.ticks(option.seconds) for option in same),
                tuple(self.flops(option) for option in same),
            )
            for span, same in sorted(by_span.items())
        )

    def ticks(self, seconds: float) -> int:
        """Seconds as a whole number."""
        return round(math.ldexp(seconds, self.exponent))

    def seconds(self, ticks: float) -> float:
        """Ticks as seconds."""
        return math.ldexp(float(ticks), -self.exponent)

    def flops(self, option: Option) -> int:
        """The FLOPs of an option, in a unit in which those of the whole do not overflow."""
        return option.flops >> self._shift

    def groups(self, index: int) -> list[Group]:
        """The options that may start at a segment."""
        kind = self.costs.segments[index].kind
        return [group for group in self._groups[kind] if group.span <= self._runs[index]]

    def single(self, kind: str) -> Group:
        """The options of a kind that take one segment."""
        return self._groups[kind][0]

    def run(self, index: int) -> int:
        """How many segments of the same kind begin at one, itself included."""
        return self._runs[index]

    @cached_property
    def _runs(self) -> list[int]:
        runs: list[int] = []
        after: Segment | None = None
        for segment in reversed(self.costs.segments):
            runs.append(runs[-1] + 1 if after is not None and after.kind == segment.kind else 1)
            after = segment
        return runs[::-1]

    def bases(self, index: int, span: int) -> tuple[int, int, int]:
        """What lives in the forward, in the backward, and at the points inside of an option's segments.

        The last counts on top of what the option saved, all of which is taken to be alive there.
        """
        segments = self.costs.segments
        inside = max(self.points[index + 1 : index + span], default=0)
        return segments[index].forward_bytes, segments[index + span - 1].backward_bytes, inside

    def own(self, index: int, option: Option) -> int:
        """What an option takes by itself above what was saved before it."""
        forward, backward, inside = self.bases(index, option.span)
        return max(forward + option.forward_bytes, backward + option.backward_bytes, inside + option.saved_bytes)

    @cached_property
    def needs(self) -> list[int]:
        """The least need before each segment, and after the last."""
        needs = [0] * len(self) + [self.points[-1]]
        for index in reversed(range(len(self))):
            least = min(self._least_of(index, group, needs[index + group.span]) for group in self.groups(index))
            needs[index] = max(least, self.points[index])
        return needs

    def _least_of(self, index: int, group: Group, after: int) -> int:
        forward, backward, inside = self.bases(index, group.span)
        after = max(after, inside)
        columns = zip(group.forward, group.backward, group.saved, strict=True)
        return min(max(forward + f, backward + b, after + s) for f, b, s in columns)

    def least(self, start: int, stop: int) -> tuple[Option, ...]:
        """The options from one place to another that lead to the least need before them."""
        best: dict[int, tuple[int, tuple[Option, ...]]] = {stop: (self.needs[stop], ())}
        for index in reversed(range(start, stop)):
            ways = [
                (
                    max(self.own(index, option), option.saved_bytes + after[0]),
                    option.seconds,
                    number,
                    (option, *after[1]),
                )
                for group in self.groups(index)
                if (after := best.get(index + group.span)) is not None
                for number, option in enumerate(group.options)
            ]
            if ways:
                need, _, _, options = min(ways, key=lambda way: way[:3])
                best[index] = max(need, self.points[index]), options
        return best[start][1]

    def peak(self, chosen: Sequence[Option]) -> Moment:
        """When the most bytes are alive, with one option per start of a span; the first such moment."""
        segments = self.costs.segments
        index, saved = 0, 0
        moments: list[Moment] = []
        for option in chosen:
            after = index + option.span
            first, last = segments[index], segments[after - 1]
            inside = max(range(index + 1, after), key=self.points.__getitem__, default=index)
            moments.append(self._point(index, saved))
            moments.append(
                Moment(
                    saved + first.forward_bytes + option.forward_bytes,
                    first.forward_bytes,
                    f"in the forward of {first.path}",
                )
            )
            if inside > index:
                moments.append(self._point(inside, saved + option.saved_bytes))
            moments.append(
                Moment(
                    saved + last.backward_bytes + option.backward_bytes,
                    last.backward_bytes,
                    f"in the backward of {last.path}",
                )
            )
            saved += option.saved_bytes
            index = after
        return max((*moments, self._point(index, saved)), key=lambda moment: moment.bytes)

    def _point(self, after: int, saved: int) -> Moment:
        fixed = self.points[after]
        said = [point.where for point in self.costs.points if (point.after, point.bytes) == (after, fixed)]
        return Moment(saved + fixed, fixed, (said or ["between forward and backward"])[0])

    def within(self, ticks: float, least: float) -> str:
        """How far a cost can be from the best, if that is no less than `least`: in words, as a share of the step."""
        distance = self.seconds(max(0.0, ticks - least))
        share = 100 * distance / (self.costs.step_seconds + self.seconds(ticks)) if distance else 0.0
        return f"within {math.ceil(share * 1e6) / 1e6:.6f} % of the best step"

    def solution(self, chosen: Sequence[Option], solver: str) -> Solution:
        """The answer, its peak counted anew from the exact bytes."""
        options = tuple(option for option in chosen for _ in range(option.span))
        return Solution(options, self.peak(chosen).bytes, math.fsum(option.seconds for option in chosen), solver)


def simplicity(option: Option) -> tuple[object, ...]:
    """Sorts options: few regions first, then nothing moved elsewhere, fewer kept calls, fewer layers at once."""
    kept = sum(len(keep) for _, keep in option.regions)
    return len(option.regions), bool(option.store), kept, option.span, option.nested, option.regions, option.store


def _exponent(total: float) -> int:
    return _BITS - math.frexp(total)[1] - 1 if total > 0 else 0


def starts(options: Sequence[Option]) -> list[Option]:
    """One option per start of a span, of one per segment."""
    chosen: list[Option] = []
    index = 0
    while index < len(options):
        chosen.append(options[index])
        index += options[index].span
    return chosen
