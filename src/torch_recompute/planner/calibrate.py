"""From the timeline of a simulated step to costs: what lives besides the segments while each of them runs.

The options of the segments say what these take (`cost.py`); all else that was alive in the step is taken from it: with
each segment's forward and backward, at the points between them, and where the forward turns to the backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from ..plan.roles import inside
from ..simulation import Moment
from .cost import Costs, Kind, Option, Point, Segment, begins, highest_points


def calibrate(
    timeline: Sequence[Moment],
    paths: Sequence[str],
    kinds: Sequence[str],
    options: Sequence[Option],
    ways: Mapping[str, Kind],
    step_seconds: float,
    known: Costs | None = None,
) -> Costs:
    """The costs of a step, taken from the timeline of one in which each segment had some option.

    Segments that were recomputed together are seen only as one, and their options repeat that of the first. What lives
    besides, from one to the next, and between them, is taken from costs that are `known` from another simulation.
    """
    first = [start for start in begins(options) for _ in range(options[start].span)]
    own = (option.saved_bytes if first[i] == i else 0 for i, option in enumerate(options))
    saved = [*itertools.accumulate(own, initial=0)]
    forward, backward = [0] * len(paths), [0] * len(paths)
    points: list[Point] = []
    after, turned = 0, False
    for segment, back, moments in _spans(timeline, paths, first):
        highest = max(moments, key=lambda moment: moment.live_bytes)
        if segment is None:
            where = f"{highest.phase} of {highest.module}" if highest.module else highest.phase
            points.append(Point(after, max(0, highest.live_bytes - saved[after]), where))
            continue
        option, stop = options[segment], segment + options[segment].span
        turned = turned or back
        after = segment if turned else stop
        base = highest.live_bytes - saved[segment] - (option.backward_bytes if back else option.forward_bytes)
        rise = [0] * option.span  # how much more lives beside each segment than beside the one that was seen
        if known is not None:
            levels = [s.backward_bytes if back else s.forward_bytes for s in known.segments[segment:stop]]
            rise = [level - levels[-1 if back else 0] for level in levels]
        (backward if back else forward)[segment:stop] = [max(0, max(0, base) + more) for more in rise]
    if known is not None:
        points += [point for point in known.points if point.after < len(paths) and first[point.after] != point.after]
    segments = tuple(map(Segment, paths, kinds, forward, backward))
    before = [*itertools.takewhile(lambda moment: moment.phase in ("forward", "loss"), timeline)]
    turn = before[-1].live_bytes if before else 0
    return Costs(ways, segments, highest_points(points), step_seconds, max(0, turn - saved[-1]))


def _spans(
    timeline: Sequence[Moment], paths: Sequence[str], first: Sequence[int]
) -> list[tuple[int | None, bool, Sequence[Moment]]]:
    """Cuts a timeline where segments begin and end: of each part its segment, whether it is backward, its moments.

    Segments that were recomputed together are one: each goes by the `first` of them. Forward takes the segments in
    order, backward in the opposite order. What is between the first and the last moment of a segment is its own; the
    loss and the optimizer's step are of no segment.
    """
    numbers: dict[str, list[int]] = {}  # one per call
    for path, place in zip(paths, first, strict=True):
        numbers.setdefault(path, []).append(place)
    deepest = sorted(numbers, key=len, reverse=True)
    places: dict[tuple[object, ...], int | None] = {}

    def at(moment: Moment) -> int | None:
        if moment.phase in ("optimizer", "loss"):
            return None
        key = moment.module, moment.calls
        if key not in places:
            path = next((path for path in deepest if inside(moment.module, path)), None)
            call = dict(moment.calls).get(path, 1) - 1 if path else 0
            places[key] = numbers[path][call % len(numbers[path])] if path else None
        return places[key]

    backward = next((i for i, m in enumerate(timeline) if m.phase in ("backward", "replay")), len(timeline))
    ended = next((i for i, m in enumerate(timeline) if m.phase == "optimizer"), len(timeline))
    spans: list[tuple[int | None, bool, Sequence[Moment]]] = []
    for start, end, back in ((0, backward, False), (backward, ended, True), (ended, len(timeline), True)):
        part = timeline[start:end]
        where = [at(moment) for moment in part]
        last = {here: i for i, here in enumerate(where)}
        i = 0
        while i < len(part):
            here, j = where[i], i + 1
            if here is not None:
                j = last[here] + 1
            while here is None and j < len(part) and where[j] is None:
                j += 1
            spans.append((here, back, part[i:j]))
            i = j
    return spans
