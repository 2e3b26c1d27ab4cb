"""The lower bound: seconds that every schedule of saving and recomputing adds to the step, whatever the planner.

Between the last forward and the first backward, what is saved fits into the budget beside all else that is alive.
Whatever backward needs and is not saved is computed again at least once, from what is saved. So every schedule pays at
least for the cheapest set of operations to run again with so many bytes to save. With a price per byte instead of the
limit that is a minimum cut. Segments of one kind share theirs, and meet only in whether the output of one is there for
the next: a dynamic program over two states per segment. Any price gives a valid bound; the best is found where two cuts
balance, and is the optimum of the linear program of the whole model.

A second moment: in the backward of segment j some operation reads and makes `backward_bytes` at once, so what is kept
of the segments before j fits into what is left. A schedule pays for what is missing at either moment, so for any share
s in (0, 1) of the seconds before j, this holds too:

    (whole model, seconds before j times s, room between forward and backward) + (1 - s) (segments before j, room in j)

Where host memory may be used, what can leave the device within a step counts as room, and no byte is worth more than
the seconds in which it leaves; the second moment is not used then.

A segment takes the longer of the seconds of its device and those of its host (`simulation/devices.py`), which is no sum
over operations. But no schedule takes less than any mean of both sides, so of a kind of segment an operation costs a
share of its seconds on the device and the rest of those of its launch; less what the mean is below the longer side of
the plain segment. The share is the one that makes the bound highest. A segment that runs anything again also pays for
its part of a region, around as many segments as an option of its kind may take; kept calls and the search for them cost
nothing here.

Assumed: all of forward comes before all of backward; what is saved is saved as it is; the operations are those that
were profiled; what else is alive in the backward of a segment is there throughout. A segment without a graph counts
nothing and gives its output for free.

The cut of a segment has two questions per operation: is its result there in backward, and is it run again? "Run again"
implies "there" for it and for all that it reads; "there" without "run again" costs its bytes, "run again" its seconds.
A view (no bytes, one input) is there when its base is, for free.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from ..simulation.devices import Host
from .cost import Costs, Graph, Kind

# More than the rounding of sums of floats; the bound is lowered by it.
ROUNDING = 1e-12
SHARES = (0.25, 0.5, 0.75)
CUTS = 4  # that are tried for the share of device and host, besides those of either alone


class MinCut(NamedTuple):
    """The cheapest cut: the seconds of what is run again (infinite if impossible), and the bytes of what is saved."""

    seconds: float
    bytes: int

    def plus(self, other: MinCut) -> MinCut:
        """Both together."""
        return MinCut(self.seconds + other.seconds, self.bytes + other.bytes)

    def value(self, price: float, weight: float = 1.0) -> float:
        """Weighted seconds plus price times bytes."""
        return weight * self.seconds + price * self.bytes if self.seconds < math.inf else math.inf


_NOTHING, _IMPOSSIBLE = MinCut(0.0, 0), MinCut(math.inf, 0)


def bound(costs: Costs, budget: int) -> float:
    """The fewest seconds that any schedule adds to the step without recomputation; infinite if none fits.

    Args:
        costs: The segments; those with a `Graph` are counted.
        budget: The most bytes that may live at any time of the step.
    """
    turn = (point.bytes for point in costs.points if point.after == len(costs.segments))
    room = budget - max([costs.turn_bytes, *turn])
    if room < 0:
        return math.inf
    if costs.host_memory is not None:
        moved = costs.host_memory.to_host * costs.step_seconds
        room += math.floor(moved if costs.host_memory.bytes is None else min(moved, costs.host_memory.bytes))
        return _least(partial(_cheapest, costs), room, 1 / costs.host_memory.to_host)
    best = _least(partial(_cheapest, costs), room)
    before, left = _tightest(costs, budget)
    if best == math.inf or left < 0:
        return math.inf
    rest = _least(partial(_cheapest, costs, stop=before), left) if before else 0.0
    if rest == 0:
        return best
    both = [_least(partial(_cheapest, costs, before=before, share=s), room) + (1 - s) * rest for s in SHARES]
    return max(best, rest, *both)


def _least(whole: Callable[..., MinCut], room: int, highest: float = math.inf) -> float:
    """The fewest seconds with so much room, from the cheapest cuts at prices of a byte up to `highest`."""
    free = whole(0.0)
    if free.bytes <= room:
        return max(0.0, free.seconds * (1 - ROUNDING))
    tight = whole(1.0, weight=0.0)

    def bounded(price: float, cut: MinCut) -> float:
        value = cut.value(price)
        return value - price * room - ROUNDING * (value + price * room)

    if tight.bytes > room:
        return math.inf if highest == math.inf else max(0.0, bounded(highest, whole(highest)))
    best = 0.0
    while True:
        # The price at which both cost the same. A cut that is cheaper at this price takes the place of one of them.
        price = min((tight.seconds - free.seconds) / (free.bytes - tight.bytes), highest)
        if price <= 0:
            return best
        middle = whole(price)
        best = max(best, bounded(price, middle))
        if price == highest or middle.value(price) >= tight.value(price) * (1 - ROUNDING):
            return best
        if middle.bytes <= room:
            tight = middle
        else:
            free = middle


def _tightest(costs: Costs, budget: int) -> tuple[int, int]:
    """The segment in whose backward most of what those before it save has to go, and the room for it there."""
    kinds = [costs.kinds[segment.kind] for segment in costs.segments]
    saved = [0, *accumulate(kind.options[0].saved_bytes for kind in kinds)]
    besides = [*accumulate((segment.backward_bytes for segment in reversed(costs.segments)), min)][::-1]
    rooms = {
        i: budget - besides[i] - kind.graph.backward_bytes
        for i, kind in enumerate(kinds)
        if kind.graph is not None and kind.graph.backward_bytes
    }
    place = max(rooms, key=lambda i: saved[i] - rooms[i], default=0)
    return place, rooms.get(place, budget)


def _cheapest(
    costs: Costs, price: float, weight: float = 1.0, *, stop: int | None = None, before: int = 0, share: float = 1.0
) -> MinCut:
    """The cheapest cut of the segments up to `stop`; in those before `before` a second counts as a share of one."""
    made: dict[tuple[str, bool, bool, float], MinCut] = {}

    means: dict[tuple[str, float], _Mean] = {}

    def of(index: int, output: bool, input: bool) -> MinCut:
        kind, part = costs.segments[index].kind, share if index < before else 1.0
        key = kind, output, input, part
        if key not in made:
            graph = costs.kinds[kind].graph
            cut = _NOTHING
            if graph is not None:
                if (kind, part) not in means:
                    means[kind, part] = _mean(costs.kinds[kind], graph, costs.host, price, weight * part)
                mean, region, below = means[kind, part]
                cut = cheapest(mean, price, output, input, weight * part, region).plus(MinCut(-below, 0))
            made[key] = MinCut(cut.seconds * part, cut.bytes)
        return made[key]

    # The cheapest for all that follows, by whether it needs the output of this place to be there.
    free, demanded = _NOTHING, _IMPOSSIBLE
    for index in reversed(range(len(costs.segments) if stop is None else stop)):
        free, demanded = (
            min(
                (of(index, output, input).plus(rest) for output, rest in ((False, free), (True, demanded))),
                key=lambda cut: cut.value(price, weight),
            )
            for input in (False, True)
        )
    return min(free, demanded, key=lambda cut: cut.value(price, weight))


class _Mean(NamedTuple):
    """A mean of the sides of a kind: the graph and a region in its seconds, and how far it is below both sides."""

    graph: Graph
    region: float
    below: float


def _mean(kind: Kind, graph: Graph, host: Host, price: float, weight: float) -> _Mean:
    """The mean of device and host that bounds a kind highest.

    The share of the device is found for a segment whose input is there and whose output need not be. All segments of a
    kind have the same, so that the bound holds for several under one region, too.
    """
    device, launches = kind.work.device, host.launches(kind.work)
    longer, region = max(device, launches), host.region / max(option.span for option in kind.options)

    def mean(of_device: float, of_host: float) -> _Mean:
        nodes = (
            node
            if node.seconds == math.inf
            else replace(node, seconds=of_device * node.seconds + of_host * host.replayed * node.operations)
            for node in graph.nodes
        )
        return _Mean(
            replace(graph, nodes=tuple(nodes)), of_host * region, longer - of_device * device - of_host * launches
        )

    def sides(share: float) -> tuple[float, float]:
        """Returns what the cheapest cut costs by the device alone, and by the host alone; saved bytes are in both."""
        one = mean(share, 1 - share)
        again, saved = selection(one.graph, price, False, True, weight, one.region) or ([], [])
        kept = price * sum(graph.nodes[i].bytes for i in saved)
        by_device = device + math.fsum(graph.nodes[i].seconds for i in again)
        operations = math.fsum(graph.nodes[i].operations for i in again)
        by_host = launches + host.replayed * operations + region * bool(again)
        return kept + weight * (by_device - longer), kept + weight * (by_host - longer)

    def best() -> float:
        most = launches + host.replayed * sum(node.operations for node in graph.nodes) + region
        if most <= device or not weight:
            return float(most <= device + sum(node.seconds for node in graph.nodes))
        high, low = sides(1.0), sides(0.0)
        if high[0] >= high[1] or low[1] >= low[0]:
            return float(high[0] >= high[1])
        share = 1.0
        for _ in range(CUTS):  # each where the two cuts around the best share cost the same
            share = (high[1] - low[1]) / ((low[0] - low[1]) + (high[1] - high[0]))
            middle = sides(share)
            if middle in (high, low):
                break
            high, low = (middle, low) if middle[0] < middle[1] else (high, middle)
        return share

    if not host.apart:  # both sides are added
        return mean(1.0, 1.0)._replace(below=0.0)
    share = best()
    return mean(share, 1 - share)


def cheapest(graph: Graph, price: float, output: bool, input: bool, weight: float = 1.0, region: float = 0.0) -> MinCut:
    """The cheapest way to have all that backward needs; see `selection`."""
    found = selection(graph, price, output, input, weight, region)
    if found is None:
        return _IMPOSSIBLE
    again, saved = found
    seconds = math.fsum(graph.nodes[i].seconds for i in again) + region * bool(again)
    return MinCut(seconds, sum(graph.nodes[i].bytes for i in saved))


def selection(
    graph: Graph, price: float, output: bool, input: bool, weight: float = 1.0, region: float = 0.0
) -> tuple[list[int], list[int]] | None:
    """Chooses the operations to run again, and those whose results to save, in the cheapest way; None if there is none.

    Args:
        graph: The operations.
        price: Of a saved byte.
        output: Whether the output must be there as well.
        input: Whether the segment's input is there.
        weight: Of a second.
        region: Seconds that are paid once if anything is run again.
    """
    nodes, size = graph.nodes, len(graph.nodes)
    roots: dict[int, int] = {-1: -1}  # each operation whose result is no view; of a view, its base
    for index, node in enumerate(nodes):
        reads = set(node.inputs)
        roots[index] = roots[reads.pop()] if node.bytes == 0 and len(reads) == 1 else index
    needed = {roots[index] for index, node in enumerate(nodes) if node.needed}
    needed |= ({roots[graph.output]} if output else set()) | ({-1} if graph.input_needed else set())
    if not input and -1 in needed:
        return None
    needed.discard(-1)
    relevant, left = set(needed), list(needed)
    while left:
        new = {roots[read] for read in nodes[left.pop()].inputs} - relevant - {-1}
        relevant |= new
        left += new
    # There: node i. Run again: node size + i.
    flow = _Flow(2 * size + 3)
    source, sink, any_again = 2 * size, 2 * size + 1, 2 * size + 2
    if region:
        flow.edge(any_again, sink, weight * region)
    for index in sorted(relevant):
        node = nodes[index]
        if index in needed:
            flow.edge(source, index, math.inf)
        flow.edge(index, size + index, price * node.bytes)
        flow.edge(size + index, index, math.inf)
        reads = {roots[read] for read in node.inputs}
        possible = (input or -1 not in reads) and node.seconds < math.inf
        flow.edge(size + index, sink, weight * node.seconds if possible else math.inf)
        if region:
            flow.edge(size + index, any_again, math.inf)
        for read in reads - {-1}:
            flow.edge(size + index, read, math.inf)
    side = flow.cut(source, sink)
    again = [index for index in sorted(relevant) if side[size + index]]
    return again, [index for index in sorted(relevant) if side[index] and not side[size + index]]


class _Flow:
    """Dinic's maximum flow."""

    def __init__(self, size: int) -> None:
        self._edges: list[list[int]] = [[] for _ in range(size)]
        self._to: list[int] = []
        self._room: list[float] = []

    def edge(self, start: int, stop: int, room: float) -> None:
        """Adds an edge and its reverse."""
        self._edges[start].append(len(self._to))
        self._edges[stop].append(len(self._to) + 1)
        self._to += [stop, start]
        self._room += [room, 0.0]

    def cut(self, source: int, sink: int) -> list[bool]:
        """Finds the side of a minimum cut that each vertex is on: True for the source's."""
        while (levels := self._levels(source))[sink] >= 0:
            self._block(source, sink, levels)
        return [level >= 0 for level in levels]

    def _levels(self, source: int) -> list[int]:
        levels = [-1] * len(self._edges)
        levels[source] = 0
        queue = deque([source])
        while queue:
            vertex = queue.popleft()
            for edge in self._edges[vertex]:
                if self._room[edge] > 0 and levels[self._to[edge]] < 0:
                    levels[self._to[edge]] = levels[vertex] + 1
                    queue.append(self._to[edge])
        return levels

    def _block(self, source: int, sink: int, levels: list[int]) -> None:
        """Fills all shortest paths."""
        left = [*map(list, self._edges)]  # of each vertex, the edges that may still lead to the sink
        path: list[int] = []
        while path or left[source]:
            vertex = self._to[path[-1]] if path else source
            if vertex == sink:
                room = min(self._room[edge] for edge in path)
                for edge in path:
                    self._room[edge] -= room
                    self._room[edge ^ 1] += room
                path = []
            elif not left[vertex]:
                levels[vertex] = -1
                path.pop()
            elif self._room[edge := left[vertex][-1]] > 0 and levels[self._to[edge]] == levels[vertex] + 1:
                path.append(edge)
            else:
                left[vertex].pop()
