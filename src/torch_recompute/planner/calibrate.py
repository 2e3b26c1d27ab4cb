"""From one simulated step to `Costs`: what lives besides the segments, at every point.

Idea. The simulation's timeline says how many bytes were alive after each operation, and in which module. What the
segments before had saved is known, since their options are; so is what the running segment's own option takes. What is
left is everybody else's: parameters, gradients so far, the optimizer's state, embeddings, the loss. So the rest of the
model needs no description, and whatever is strange about it is in the figures.

The costs reproduce the simulation they were taken from exactly, for the options that it ran with. For other options
they assume that the rest stays the same. Where it does not, by the few bytes of a tensor that two segments share, the
plan that was chosen is simulated in its turn, and the costs are taken again from that (`planner.py`). What two segments
both save (a skip connection) counts twice; what is left for everybody else then comes out too small, never below 0, so
that such a model is planned with too little rather than too much room.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ..memory.operations import Calls
from ..plan.cost import Costs, Kind, Option, Point, Segment, begins, highest_points
from ..plan.roles import inside
from ..simulation import Moment, Simulation


def calibrate(
    simulation: Simulation,
    paths: Sequence[str],
    kinds: Sequence[str],
    options: Sequence[Option],
    ways: Mapping[str, Kind],
    step_seconds: float,
    known: Costs | None = None,
) -> Costs:
    """The costs of a step, taken from a simulation of it.

    Args:
        simulation: The step, with some option chosen for each segment.
        paths: The segments, in the order of their forwards.
        kinds: The kind of each.
        options: The option that each had; those after the first of a span repeat the span's.
        ways: The kinds.
        step_seconds: Of the step without recomputation.
        known: Costs from another simulation. Segments that were recomputed together are seen only as one; what lives
            besides, from one to the next, and between them, is taken from there.
    """
    first = [start for start in begins(options) for _ in range(options[start].span)]
    own = (option.saved_bytes if first[i] == i else 0 for i, option in enumerate(options))
    saved = [*itertools.accumulate(own, initial=0)]
    forward, backward = [0] * len(paths), [0] * len(paths)
    points: list[Point] = []
    after, turned = 0, False
    for segment, back, moments in _spans(simulation.timeline, paths, first):
        highest = max(moment.live_bytes for moment in moments)
        if segment is None:
            points.append(Point(after, max(0, highest - saved[after]), _where(moments, highest)))
            continue
        option = options[segment]
        stop = segment + option.span
        turned = turned or back
        after = segment if turned else stop
        own = option.backward_bytes if back else option.forward_bytes
        base = max(0, highest - saved[segment] - own)
        rise = _rise(known, segment, stop, back)
        for index in range(segment, stop):
            (backward if back else forward)[index] = max(0, base + rise[index - segment])
    within = [index for index in range(len(paths)) if first[index] != index]
    points += [point for point in known.points if point.after in within] if known is not None else []
    segments = tuple(map(Segment, paths, kinds, forward, backward))
    turn = _turn(simulation.timeline)
    return Costs(ways, segments, highest_points(points), step_seconds, max(0, turn - saved[-1]))


def _rise(known: Costs | None, start: int, stop: int, back: bool) -> list[int]:
    """How much more lives beside each of some segments than beside the one where an option over them stands."""
    if known is None:
        return [0] * (stop - start)
    levels = [segment.backward_bytes if back else segment.forward_bytes for segment in known.segments[start:stop]]
    return [level - levels[-1 if back else 0] for level in levels]


Stretch = tuple[int | None, bool, list[Moment]]


def _spans(timeline: Sequence[Moment], paths: Sequence[str], first: Sequence[int]) -> list[Stretch]:
    """The timeline cut where segments begin and end: of each stretch its segment, whether it is backward, its moments.

    Segments that were recomputed together are one: each goes by the `first` of them.

    Forward takes the segments in order, backward in the opposite order. What lies between the first and the last moment
    of a segment is its own; an optimizer's step is of no segment.
    """
    numbers: dict[str, list[int]] = {}  # one per call
    for path, place in zip(paths, first, strict=True):
        numbers.setdefault(path, []).append(place)
    tops = sorted(numbers, key=len, reverse=True)
    memo: dict[Any, int | None] = {}

    def of(module: str, calls: Calls) -> int | None:
        path = next((path for path in tops if inside(module, path)), None)
        return None if path is None else numbers[path][(dict(calls).get(path, 1) - 1) % len(numbers[path])]

    def at(moment: Moment) -> int | None:
        if moment.phase == "optimizer" or moment.phase == "loss":
            return None
        key = moment.module, moment.calls
        if key not in memo:
            memo[key] = of(*key)
        return memo[key]

    backward = next((i for i, m in enumerate(timeline) if m.phase in ("backward", "replay")), len(timeline))
    ended = next((i for i, m in enumerate(timeline) if m.phase == "optimizer"), len(timeline))
    stretches: list[Stretch] = []
    for start, end, back in ((0, backward, False), (backward, ended, True), (ended, len(timeline), True)):
        part = timeline[start:end]
        last = {at(moment): i for i, moment in enumerate(part)}
        i = 0
        while i < len(part):
            here = at(part[i])
            if here is None:
                j = i + 1
                while j < len(part) and at(part[j]) is None:
                    j += 1
            else:
                j = last[here] + 1
            stretches.append((here, back, list(part[i:j])))
            i = j
    return stretches


def _turn(timeline: Sequence[Moment]) -> int:
    """Bytes alive when backward begins."""
    before = itertools.takewhile(lambda moment: moment.phase in ("forward", "loss"), timeline)
    return max((moment.live_bytes for moment in list(before)[-1:]), default=0)


def _where(moments: Sequence[Moment], highest: int) -> str:
    moment = next(moment for moment in moments if moment.live_bytes == highest)
    return f"{moment.phase} of {moment.module}" if moment.module else moment.phase
