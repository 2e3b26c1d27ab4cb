"""The costs of a training step, as plain data: a model's segments (layers), the options for each, and other memory.

A step runs its segments in order and their backwards in the opposite order. What a segment saves is alive from its
forward to its backward, so at any moment of either only the segments *before* it count. With `S` for the bytes saved by
the segments before segment `i`, and option `o` chosen for it:

    while its forward runs            S + segment.forward_bytes  + o.forward_bytes   <= budget
    while its backward runs           S + segment.backward_bytes + o.backward_bytes  <= budget
    at any other point                S(point.after) + point.bytes                   <= budget
    between forward and backward      S(all)         + costs.turn_bytes              <= budget

An option over several segments counts in the forward of its first and in the backward of its last; at a point between
them all that it saves counts. All bytes are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..plan.choice import VALUES_UNUSED, Choice
from ..simulation.devices import ITSELF, NO_WORK, Host, Work


@dataclass(frozen=True)
class Option:
    """One way to treat a segment, or several segments in a row as one.

    Attributes:
        regions: With paths below the segment ("" for all of it); none where nothing is recomputed.
        saved_bytes: Alive from the end of its forward to the start of its backward.
        forward_bytes: The most that its forward adds at any time, with what it saves.
        backward_bytes: The most that is alive in its backward beyond the level before its forward.
        seconds: What it adds to the step: its replay, and waiting for a store.
        flops: FLOPs of its replay.
        span: How many segments in a row, of one kind, it covers.
        host_bytes: What it keeps in host memory from its forward to its backward.
        work: What its replays give device and host to do; with `Kind.work` that makes the seconds, but for the waiting.
    """

    regions: tuple[Choice, ...]
    saved_bytes: int
    forward_bytes: int
    backward_bytes: int
    seconds: float
    flops: int = 0
    span: int = 1
    host_bytes: int = 0
    work: Work = NO_WORK

    @property
    def store(self) -> str:
        """The store of its regions (`Choice.store`)."""
        return self.regions[0].store if self.regions else ""

    @property
    def offload(self) -> bool:
        """Returns whether its regions are none: what they save is in the store, and not recomputed."""
        return any(choice.offload for choice in self.regions)

    @property
    def is_full(self) -> bool:
        """Returns whether it recomputes all of one segment, and keeps no call for its values."""
        (region, *others) = self.regions or (Choice(()),)
        plain = self.span == 1 and not (others or region.tiles or region.store or region.nested)
        return plain and region.paths == ("",) and all(kept.calls == VALUES_UNUSED for kept in region.kept)

    @property
    def nested(self) -> bool:
        """Returns whether each segment of a span is a region of its own in the replay of them all (`Choice.nested`)."""
        return any(choice.nested for choice in self.regions)


@dataclass(frozen=True)
class Node:
    """One operation of a forward, for the bound.

    Attributes:
        seconds: Of the device, to run it again; infinite for one that must not be (random numbers, collectives).
        bytes: Of the storage that it makes; 0 for a view of its only input, or an in-place operation.
        inputs: Indices of nodes in the same graph that it reads; -1 is the segment's input.
        needed: Whether backward needs its result.
        operations: How many operations it is for the host.
    """

    seconds: float
    bytes: int
    inputs: tuple[int, ...]
    needed: bool = False
    operations: float = 0


@dataclass(frozen=True)
class Graph:
    """The operations of a segment's forward, in the order in which they ran.

    Attributes:
        nodes: The operations.
        output: Index of the node whose result is the next segment's input.
        input_bytes: Of the segment's input, the output of the segment before.
        input_needed: Whether backward needs the input itself.
        backward_bytes: The most that one operation of its backward reads and makes, besides what was alive before its
            forward; 0 if unknown.
    """

    nodes: tuple[Node, ...]
    output: int
    input_bytes: int
    input_needed: bool = False
    backward_bytes: int = 0


@dataclass(frozen=True)
class Kind:
    """Segments that are the same except for their weights.

    Attributes:
        options: The ways to treat one, none of which another equals or beats in everything, but for a region around
            all of it; the first is "no region".
        graph: Its operations; None if unknown, and then the bound counts nothing for it.
        work: Of one in a step without recomputation.
    """

    options: tuple[Option, ...]
    graph: Graph | None = None
    work: Work = NO_WORK


@dataclass(frozen=True)
class Segment:
    """One planned module in the order of the step.

    Attributes:
        path: Its path in the model.
        kind: Key of `Costs.kinds`.
        forward_bytes: What else is alive while its forward runs: parameters, gradients, the rest of the model.
        backward_bytes: What else is alive while its backward runs.
    """

    path: str
    kind: str
    forward_bytes: int
    backward_bytes: int


@dataclass(frozen=True)
class Point:
    """A moment that belongs to no segment: the loss, the optimizer's step, a part of the model that is not planned.

    Attributes:
        after: How many segments have their saved bytes alive then, counted from the first.
        bytes: What else is alive then.
        where: In words.
    """

    after: int
    bytes: int
    where: str = ""


@dataclass(frozen=True)
class HostMemory:
    """Host memory that a step may use: the most bytes (None for no limit), and bytes per second that go there."""

    bytes: int | None
    to_host: float


@dataclass(frozen=True)
class FixedChoices:
    """Choices that all plans of a step hold besides those for its segments.

    Attributes:
        choices: The choices.
        seconds: What they add to the step.
        flops: FLOPs of their replays.
        words: What is to be said of them.
    """

    choices: tuple[Choice, ...] = ()
    seconds: float = 0.0
    flops: int = 0
    words: tuple[str, ...] = ()


NOTHING = FixedChoices()


@dataclass(frozen=True)
class Costs:
    """Everything a solver needs to know.

    Attributes:
        kinds: By name.
        segments: In the order of their forwards.
        points: In any order.
        step_seconds: Of the step without recomputation in segments.
        turn_bytes: What is alive when forward ends and backward begins, besides what the segments saved.
        host_memory: Host memory that may be used; None for none.
        host: What launches the operations.
        parts: The work of the parts of the step without recomputation in segments (`simulation/devices.py`).
    """

    kinds: Mapping[str, Kind]
    segments: tuple[Segment, ...]
    points: tuple[Point, ...] = ()
    step_seconds: float = 0.0
    turn_bytes: int = 0
    host_memory: HostMemory | None = None
    host: Host = ITSELF
    parts: tuple[Work, ...] = ()


@dataclass(frozen=True)
class Solution:
    """A solver's choice.

    Attributes:
        options: One per segment; those after the first of a span repeat the span's option.
        peak_bytes: The most bytes alive at any time of the step.
        seconds: What the replays add to the step.
        solver: Which solver it was, and why, in words.
    """

    options: tuple[Option, ...]
    peak_bytes: int
    seconds: float
    solver: str = field(default="", compare=False)


class PeakMoment(NamedTuple):
    """A moment of a step: the bytes alive then, those of them that no choice changes, and where it is, in words."""

    bytes: int
    fixed: int
    where: str


def without(costs: Costs, out: Callable[[Option], bool]) -> Costs:
    """The costs without some options."""
    kinds = costs.kinds.items()
    left = {name: replace(kind, options=tuple(o for o in kind.options if not out(o))) for name, kind in kinds}
    return replace(costs, kinds=left)


def begins(options: Sequence[Option]) -> list[int]:
    """The segments at which an option begins, of one option per segment."""
    found: list[int] = []
    index = 0
    while index < len(options):
        found.append(index)
        index += options[index].span
    return found


def peak(costs: Costs, options: Sequence[Option]) -> PeakMoment:
    """Finds when the most bytes are alive, with one option per segment."""
    saved, levels = 0, list[int]()  # saved by what has begun, at the point before each segment
    moments: list[PeakMoment] = []
    for start in begins(options):
        option, first, last = options[start], costs.segments[start], costs.segments[start + options[start].span - 1]
        forward, backward = saved + option.forward_bytes, saved + option.backward_bytes
        moments += [
            PeakMoment(forward + first.forward_bytes, first.forward_bytes, f"in the forward of {first.path}"),
            PeakMoment(backward + last.backward_bytes, last.backward_bytes, f"in the backward of {last.path}"),
        ]
        levels += [saved] + [saved + option.saved_bytes] * (option.span - 1)
        saved += option.saved_bytes
    levels.append(saved)
    for point in (*costs.points, Point(len(costs.segments), costs.turn_bytes, "between forward and backward")):
        moments.append(PeakMoment(levels[point.after] + point.bytes, point.bytes, point.where))
    return max(moments, key=lambda moment: moment.bytes)


def highest_points(points: Sequence[Point]) -> tuple[Point, ...]:
    """The highest of the points at each place."""
    places = dict.fromkeys(point.after for point in points)
    return tuple(max((p for p in points if p.after == after), key=lambda p: p.bytes) for after in places)


def simplicity(option: Option) -> tuple[object, ...]:
    """Sorts options: few regions first, then nothing moved elsewhere, fewer kept calls, fewer layers at once."""
    kept = sum(len(choice.keep) for choice in option.regions)
    said = [(" ".join(choice.paths), choice.keep) for choice in option.regions]
    return len(option.regions), bool(option.store), kept, option.span, option.nested, said, option.store, option.offload


def complaints(costs: Costs) -> Iterator[str]:
    """Yields each rule for costs that is broken, in words; what is read from a file is asked for them."""
    wrong = "are not whole and at least 0"
    if not costs.segments:
        yield "they have no segment, so there is nothing to choose"
    for name, kind in costs.kinds.items():
        if all(option.span != 1 for option in kind.options):
            yield f"kind {name!r} has no option that takes a single segment, so it may not fill a run"
        for option in kind.options:
            yield from (f"an option of kind {name!r} {why}: {option}" for why in _of_option(option))
        if kind.graph is not None:
            yield from (f"the graph of kind {name!r} {why}" for why in _of_graph(kind.graph))
    for segment in costs.segments:
        if segment.kind not in costs.kinds:
            known = ", ".join(sorted(costs.kinds))
            yield f"segment {segment.path!r} is of kind {segment.kind!r}, but there are {known or 'no kinds'}"
        if not _are_bytes(segment.forward_bytes, segment.backward_bytes):
            yield f"the bytes of segment {segment.path!r} {wrong}: {segment}"
    for point in costs.points:
        if not 0 <= point.after <= len(costs.segments):
            yield f"a point comes after {point.after} of {len(costs.segments)} segments: {point}"
        if not _are_bytes(point.bytes):
            yield f"the bytes of a point {wrong}: {point}"
    if not _are_bytes(costs.turn_bytes):
        yield f"turn_bytes {wrong}: {costs.turn_bytes!r}"
    host = costs.host_memory
    if host is not None and not (host.to_host > 0 and (host.bytes is None or _are_bytes(host.bytes))):
        yield f"host memory has no whole number of bytes or no speed above 0: {host}"


def _of_option(option: Option) -> Iterator[str]:
    if not _are_bytes(option.saved_bytes, option.forward_bytes, option.backward_bytes, option.flops):
        yield "has bytes or FLOPs that are not whole and at least 0"
    elif option.saved_bytes > min(option.forward_bytes, option.backward_bytes):
        yield "saves more than lives in its forward or its backward, which contain what it saves"
    if not 0 <= option.seconds < math.inf:
        yield "has seconds that are negative or no number"
    if not _are_bytes(option.host_bytes):
        yield "has bytes in host memory that are not whole and at least 0"
    if option.span < 1:
        yield "takes no segment"
    elif option.span > 1 and any(path for choice in option.regions for path in choice.paths):
        yield "takes several segments, but has a region around a part of one"


def _of_graph(graph: Graph) -> Iterator[str]:
    if not 0 <= graph.output < len(graph.nodes):
        yield f"has no operation {graph.output}, which is said to make its output"
    if not _are_bytes(graph.backward_bytes):
        yield f"has backward_bytes that are not whole and at least 0: {graph.backward_bytes!r}"
    for index, node in enumerate(graph.nodes):
        if not all(-1 <= read < index for read in node.inputs):
            yield f"has an operation {index} that reads one that does not come before it: {node.inputs}"
        if not _are_bytes(node.bytes) or not node.seconds >= 0:
            yield f"has an operation {index} with bytes or seconds that are negative or no number: {node}"


def _are_bytes(*values: object) -> bool:
    return all(isinstance(value, int) and value >= 0 for value in values)


def launched_by(costs: Costs, host: Host) -> Costs:
    """The costs where another host launches the operations."""
    own = costs.host

    def option_of(option: Option, kind: Kind) -> Option:
        plain = kind.work.times(option.span)
        more = host.added(plain, option.work) - own.added(plain, option.work)
        return replace(option, seconds=option.seconds + more)

    kinds = {
        name: replace(kind, options=tuple(option_of(option, kind) for option in kind.options))
        for name, kind in costs.kinds.items()
    }
    seconds = sum(host.seconds(part) - own.seconds(part) for part in costs.parts)
    return replace(costs, kinds=kinds, step_seconds=costs.step_seconds + seconds, host=host)


def for_all(option: Option, times: int) -> Option:
    """The option, paid for in each of some microbatches."""
    return replace(option, seconds=option.seconds * times, flops=option.flops * times, work=option.work.times(times))


def kinds_for_all(kinds: Mapping[str, Kind], times: int) -> dict[str, Kind]:
    """The kinds, with options paid for in each of some microbatches."""
    return {
        name: Kind(
            tuple(for_all(option, times) for option in kind.options), paid(kind.graph, times), kind.work.times(times)
        )
        for name, kind in kinds.items()
    }


def paid(graph: Graph | None, times: float) -> Graph | None:
    """The graph, if there is one, whose operations take so many times as long."""
    nodes = () if graph is None else graph.nodes
    paid_for = (replace(n, seconds=n.seconds * times, operations=n.operations * times) for n in nodes)
    return graph and replace(graph, nodes=tuple(paid_for))
