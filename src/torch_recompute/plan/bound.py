"""The lower bound: seconds that every schedule of saving and recomputing adds to the step, whatever the planner.

Problem. "The best of our options" says nothing about the options. How far is a plan from the best that *any* planner
could find, with regions cut as it likes and tensors recomputed as often as it likes?

Idea. At any moment after the last forward and before the first backward, the loss included, what is saved fits into the
budget beside all else that is alive. Whatever backward needs and is not saved is computed again at least once, from
what is saved. So every schedule pays at least for the cheapest set of operations to run again, over the operations of
the whole model, with so many bytes to save. With a price per byte instead of the limit that is a minimum cut. Segments
of one kind share theirs, and meet only in whether the output of one must be there for the next, so the whole is a
dynamic program over two states per segment. Any price gives a valid bound; the best one is found where two cuts
balance, in a few steps, and the bound is then the optimum of the linear program of the whole model.

A second moment. In the backward of segment j some operation reads and makes `backward_bytes` at once, under any plan,
so what is kept of the segments before j, whose backwards are still to come, fits into what is left. Let A be what is
run again because it is not there between forward and backward, and B what is run again of the segments before j because
it is not there at that operation. A schedule pays for what is in either, so of the segments before j for at least a
share s of A's price and 1 - s of B's, and of the others for A's. With a fixed share these are two independent bounds,

    (whole model, seconds before j times s, room between forward and backward) + (1 - s) (segments before j, room in j)

and any share is valid; some are tried, at the j where most has to go. Rejected: one set of saved results that fits into
both rooms. That gives more, but is no bound: a schedule may keep a large result until backward begins, and make a small
one of it in time for j.

Where host memory may be used, what can leave the device within the time of a step counts as room, and no byte is worth
more than the seconds in which one more leaves it; the second moment is not looked at then.

Assumed: all of forward comes before all of backward; what is saved is saved as it is, on the device; the operations are
those that were profiled; what else is alive in the backward of a segment (parameters, the optimizer's state, gradients
of later segments) is there throughout. A segment without a graph counts nothing and gives its output for free.

The cut of a segment. Two yes-or-no questions per operation: is its result there in backward, and is it run again? "Run
again" implies "there" for it and for all that it reads; "there" without "run again" costs its bytes, "run again" costs
its seconds. Costs that are paid when one answer is yes and another no are the edges of a graph, and the cheapest
answers are a minimum cut, found as a maximum flow (Dinic), in milliseconds for the tens of operations of a layer. Every
demand can be met by saving, so no cut is infinite. A view (no bytes, one input) is there when its base is, for free.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from .cost import Costs, Graph, Node, check

# More than the rounding of sums of floats; the bound is lowered by it.
ROUNDING = 1e-12
SHARES = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class MinCut:
    """What is cheapest: the seconds of what is run again, and the bytes of what is saved. Infinite if impossible."""

    seconds: float
    bytes: int

    def __add__(self, other: MinCut) -> MinCut:
        return MinCut(self.seconds + other.seconds, self.bytes + other.bytes)

    def value(self, price: float, weight: float = 1.0) -> float:
        """Both in one figure."""
        return weight * self.seconds + price * self.bytes if self.seconds < math.inf else math.inf


_NOTHING, _IMPOSSIBLE = MinCut(0.0, 0), MinCut(math.inf, 0)


def bound(costs: Costs, budget: int) -> float:
    """The fewest seconds that any schedule adds to the step without recomputation; infinite if none fits.

    Args:
        costs: The segments; those with a `Graph` are counted.
        budget: The most bytes that may live at any time of the step.
    """
    check(costs)
    room = budget - between(costs)
    if room < 0:
        return math.inf
    if costs.host is not None:
        moved = costs.host.to_host * costs.step_seconds
        room += math.floor(moved if costs.host.bytes is None else min(moved, costs.host.bytes))
        return _least(partial(_cheapest, costs), room, 1 / costs.host.to_host)
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
    """The segment in whose backward most of what those before it save has to go, and the room for it there.

    The first, before which there is none, where nothing is known of any backward.
    """
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


def between(costs: Costs) -> int:
    """The most that lives besides what segments saved after the last forward and before the first backward of any."""
    last = len(costs.segments)
    return max([costs.turn_bytes, *(point.bytes for point in costs.points if point.after == last)])


def _cheapest(
    costs: Costs, price: float, weight: float = 1.0, *, stop: int | None = None, before: int = 0, share: float = 1.0
) -> MinCut:
    """The cheapest cut of the segments up to `stop`; in those before `before` a second counts as a share of one."""
    made: dict[tuple[str, bool, bool, float], MinCut] = {}

    def of(index: int, output: bool, input: bool) -> MinCut:
        kind, part = costs.segments[index].kind, share if index < before else 1.0
        key = kind, output, input, part
        if key not in made:
            graph = costs.kinds[kind].graph
            cut = _NOTHING if graph is None else cheapest(graph, price, output, input, weight * part)
            made[key] = MinCut(cut.seconds * part, cut.bytes)
        return made[key]

    # The cheapest for all that follows, by whether it needs the output of this place to be there.
    free, demanded = _NOTHING, _IMPOSSIBLE
    for index in reversed(range(len(costs.segments) if stop is None else stop)):
        free, demanded = (
            min(
                (of(index, output, input) + rest for output, rest in ((False, free), (True, demanded))),
                key=lambda cut: cut.value(price, weight),
            )
            for input in (False, True)
        )
    return min(free, demanded, key=lambda cut: cut.value(price, weight))


def cheapest(graph: Graph, price: float, output: bool, input: bool, weight: float = 1.0) -> MinCut:
    """The cheapest way to have all that backward needs.

    Args:
        graph: The operations.
        price: Of a saved byte.
        output: Whether the output must be there as well.
        input: Whether the segment's input is there.
        weight: Of a second.
    """
    roots = _roots(graph)
    needed = {roots[index] for index, node in enumerate(graph.nodes) if node.needed}
    if output:
        needed.add(roots[graph.output])
    if graph.input_needed:
        needed.add(-1)
    if not input and -1 in needed:
        return _IMPOSSIBLE
    needed.discard(-1)
    relevant = _ancestors(graph, roots, needed)
    size = len(graph.nodes)
    # There: node i. Run again: node size + i.
    flow = _Flow(2 * size + 2)
    source, sink = 2 * size, 2 * size + 1
    for index in relevant:
        node = graph.nodes[index]
        if index in needed:
            flow.edge(source, index, math.inf)
        flow.edge(index, size + index, price * node.bytes)
        flow.edge(size + index, index, math.inf)
        reads = {roots[read] if read >= 0 else -1 for read in node.inputs}
        flow.edge(size + index, sink, _price_of(node, weight, -1 not in reads or input))
        for read in reads - {-1}:
            flow.edge(size + index, read, math.inf)
    side = flow.cut(source, sink)
    again = [index for index in relevant if side[size + index]]
    saved = [index for index in relevant if side[index] and not side[size + index]]
    return MinCut(
        math.fsum(graph.nodes[index].seconds for index in again), sum(graph.nodes[index].bytes for index in saved)
    )


def _price_of(node: Node, weight: float, possible: bool) -> float:
    return weight * node.seconds if possible and node.seconds < math.inf else math.inf


def _roots(graph: Graph) -> list[int]:
    """What each operation's result is a view of: itself, another, or the input (-1)."""
    roots: list[int] = []
    for index, node in enumerate(graph.nodes):
        reads = set(node.inputs)
        if node.bytes == 0 and len(reads) == 1:
            (read,) = reads
            roots.append(read if read < 0 else roots[read])
        else:
            roots.append(index)
    return roots


def _ancestors(graph: Graph, roots: list[int], needed: set[int]) -> list[int]:
    found = set(needed)
    open_ = list(needed)
    while open_:
        for read in graph.nodes[open_.pop()].inputs:
            root = roots[read] if read >= 0 else -1
            if root >= 0 and root not in found:
                found.add(root)
                open_.append(root)
    return sorted(found)


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
        """Which side of a minimum cut each vertex is on: True for the source's."""
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
        next_ = [0] * len(self._edges)
        path: list[int] = []
        vertex = source
        while True:
            if vertex == sink:
                room = min(self._room[edge] for edge in path)
                for edge in path:
                    self._room[edge] -= room
                    self._room[edge ^ 1] += room
                path, vertex = [], source
                continue
            edges = self._edges[vertex]
            while next_[vertex] < len(edges):
                edge = edges[next_[vertex]]
                if self._room[edge] > 0 and levels[self._to[edge]] == levels[vertex] + 1:
                    break
                next_[vertex] += 1
            else:
                if not path:
                    return
                levels[vertex] = -1
                vertex = self._to[path.pop() ^ 1]
                continue
            path.append(edges[next_[vertex]])
            vertex = self._to[edges[next_[vertex]]]
