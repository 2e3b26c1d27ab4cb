"""Costs made by hand and by hypothesis, and what is the best choice for them by trying all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from hypothesis import strategies as st

from torch_recompute.plan.cost import Costs, Kind, Option, Point, Segment


def choices(costs: Costs) -> Iterator[tuple[Option, ...]]:
    """All choices, each with one option per start of a span."""

    def from_(index: int) -> Iterator[tuple[Option, ...]]:
        if index == len(costs.segments):
            yield ()
            return
        kind = costs.segments[index].kind
        for option in costs.kinds[kind].options:
            taken = costs.segments[index : index + option.span]
            if len(taken) == option.span and all(segment.kind == kind for segment in taken):
                yield from ((option, *rest) for rest in from_(index + option.span))

    yield from from_(0)


def peak(costs: Costs, chosen: tuple[Option, ...]) -> int:
    """The constraints of `cost.py`, word for word."""
    starts = list(itertools.accumulate((option.span for option in chosen), initial=0))
    saved = list(itertools.accumulate((option.saved_bytes for option in chosen), initial=0))
    levels = [saved[-1] + costs.turn_bytes]
    for start, before, option in zip(starts, saved, chosen, strict=False):
        last = start + option.span - 1
        levels.append(before + costs.segments[start].forward_bytes + option.forward_bytes)
        levels.append(before + costs.segments[last].backward_bytes + option.backward_bytes)
    # A span that has begun counts in full.
    begun = {after: sum(start < after for start in starts[:-1]) for after in range(len(costs.segments) + 1)}
    return max(*levels, *(saved[begun[point.after]] + point.bytes for point in costs.points))


def best(costs: Costs, budget: float = math.inf) -> tuple[float, int, int] | None:
    """Seconds, FLOPs and peak of the best choice; None where none fits."""
    figures = [
        (math.fsum(o.seconds for o in chosen), sum(o.flops for o in chosen), peak(costs, chosen))
        for chosen in choices(costs)
    ]
    return min((figure for figure in figures if figure[2] <= budget), default=None)


@st.composite
def options(draw: st.DrawFn, number: int, span: int = 1) -> Option:
    saved = draw(st.integers(0, 20))
    return Option(
        keep=None if number == 0 else tuple(f"call{i}" for i in range(draw(st.integers(0, 2)))),
        saved_bytes=saved,
        forward_bytes=saved + draw(st.integers(0, 10)),
        backward_bytes=saved + draw(st.integers(0, 20)),
        seconds=0.0 if number == 0 else draw(st.integers(0, 40)) / 8,
        flops=draw(st.integers(0, 3)),
        span=span,
    )


@st.composite
def some_costs(draw: st.DrawFn, most: int = 6) -> Costs:
    """A few segments of up to three kinds, some equal, some options over two or three segments."""
    kinds: dict[str, Kind] = {}
    for name in "abc"[: draw(st.integers(1, 3))]:
        single = [draw(options(number)) for number in range(draw(st.integers(1, 4)))]
        spans = [draw(options(9, span)) for span in draw(st.lists(st.integers(2, 3), max_size=2))]
        kinds[name] = Kind((*single, *spans))
    names = draw(st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=most))
    even = draw(st.booleans())
    grow = draw(st.integers(-3, 3))
    base = st.just(10) if even else st.integers(0, 20)
    segments = tuple(
        Segment(f"layers.{i}", name, draw(base), max(0, draw(base) + grow * i)) for i, name in enumerate(names)
    )
    point = st.builds(Point, after=st.integers(0, len(segments)), bytes=st.integers(0, 40))
    return Costs(kinds, segments, tuple(draw(st.lists(point, max_size=2))), 10.0, draw(st.integers(0, 20)))
