"""What a step costs, as plain data: the segments of a model, the ways to treat each, and what else lies in memory.

Problem. A planner must know how many bytes are alive at every point of a step under every choice it may make. Summing
what is saved is not enough: the peak is at the loss, or in the backward of some layer, and moves with the choices.

Idea. A step runs its segments (layers) in order and their backwards in the opposite order. What a segment saves is
alive from its forward to its backward, so at any moment of either the segments *before* it are what weighs, and nothing
of those after it. With `S` for the bytes saved by the segments before segment `i`, and option `o` chosen for it:

    while its forward runs    S + segment.forward_bytes  + o.forward_bytes   <= budget
    while its backward runs   S + segment.backward_bytes + o.backward_bytes  <= budget
    at any point besides      S(point.after) + point.bytes                   <= budget
    at the turn               S(all)         + costs.turn_bytes              <= budget

An option over several segments stands in the forward of its first and in the backward of its last; at a point between
them all that it saves counts. The bytes of a segment are all that lives then and belongs to nobody's option:
parameters, gradients made so far, optimizer state, what the rest of the model keeps. Those of an option count from the
level before the segment's forward, in its backward too, so they contain what it saved itself. All bytes are exact, at
no granularity.

Everything here is data: it is compared, written to JSON, read back, and made by hand in tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Option:
    """One way to treat a segment, or several segments in a row as one.

    Attributes:
        regions: The regions in it, each a path below the segment ("" for all of it) and the calls that are not repeated
            (`Choice.keep`); none where nothing is recomputed. Several paths with spaces between are modules that are
            recomputed together, as a norm and the attention it feeds.
        saved_bytes: Alive from the end of its forward to the start of its backward.
        forward_bytes: The most that its forward adds at any time, with what it saves.
        backward_bytes: The most that lives in its backward beyond the level before its forward.
        seconds: What it adds to the step: its replay, and waiting for a store.
        flops: FLOPs of its replay.
        span: How many segments in a row it takes, all of the same kind; 1 except where layers are grouped. A span
            stands in the forward of its first segment and in the backward of its last.
        store: Where its inputs lie (`Choice.store`).
        nested: Whether each segment of a span is a region of its own in the replay of them all (`Choice.nested`).
        host_bytes: What it keeps in host memory from its forward to its backward.
    """

    regions: tuple[tuple[str, tuple[str, ...]], ...]
    saved_bytes: int
    forward_bytes: int
    backward_bytes: int
    seconds: float
    flops: int = 0
    span: int = 1
    store: str = ""
    nested: bool = False
    host_bytes: int = 0


def paths_of(region: str) -> list[str]:
    """The paths that a region of an option is made of."""
    return region.split(" ")


@dataclass(frozen=True)
class Node:
    """One operation of a forward, for the bound.

    Attributes:
        seconds: What running it again costs; infinite for one that must not be (random numbers, collectives).
        bytes: Of the storage that it makes; 0 for one that is a view of another's, which is then its only input. One
            without bytes and with other inputs (in-place) can be had for free.
        inputs: Indices of nodes in the same graph that it reads; -1 is the segment's input.
        needed: Whether backward needs its result.
    """

    seconds: float
    bytes: int
    inputs: tuple[int, ...]
    needed: bool = False


@dataclass(frozen=True)
class Graph:
    """The operations of a segment's forward, in the order in which they ran.

    Attributes:
        nodes: The operations.
        output: Index of the node whose result the next segment reads as its input.
        input_bytes: Of the segment's input, which is the output of the segment before.
        input_needed: Whether backward needs the input itself.
        backward_bytes: The most that one operation of its backward reads and makes, besides what lived before its
            forward; 0 where that is not known.
    """

    nodes: tuple[Node, ...]
    output: int
    input_bytes: int
    input_needed: bool = False
    backward_bytes: int = 0


@dataclass(frozen=True)
class Kind:
    """Segments that are the same but for their weights.

    Attributes:
        options: The ways to treat one, none of which is at least as bad as another in everything; the first is "no
            region".
        graph: Its operations; None where they are not known, and then the bound counts nothing for it.
    """

    options: tuple[Option, ...]
    graph: Graph | None = None


@dataclass(frozen=True)
class Segment:
    """One planned module in the order of the step.

    Attributes:
        path: Its path in the model.
        kind: Key of `Costs.kinds`.
        forward_bytes: What else lives while its forward runs.
        backward_bytes: What else lives while its backward runs.
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
        bytes: What else lives then.
        where: In words.
    """

    after: int
    bytes: int
    where: str = ""


@dataclass(frozen=True)
class Host:
    """Host memory that a step may use.

    Attributes:
        bytes: The most that may lie there; None for no limit.
        to_host: Bytes per second that leave the device.
    """

    bytes: int | None
    to_host: float


@dataclass(frozen=True)
class Costs:
    """Everything a solver needs to know.

    Attributes:
        kinds: By name.
        segments: In the order of their forwards.
        points: In any order.
        step_seconds: Of the step with no region.
        turn_bytes: What lives when forward ends and backward begins, besides what the segments saved.
        host: What may be kept in host memory; None where nothing may.
    """

    kinds: Mapping[str, Kind]
    segments: tuple[Segment, ...]
    points: tuple[Point, ...] = ()
    step_seconds: float = 0.0
    turn_bytes: int = 0
    host: Host | None = None


@dataclass(frozen=True)
class Solution:
    """What a solver chose.

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
