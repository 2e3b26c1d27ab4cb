"""The cheapest way to have what backward needs of one segment, at a price per saved byte: a minimum cut.

Problem. Each operation's result is saved (bytes), computed again (seconds, and its inputs must be there), or not there.
What is cheapest, when a byte has a price?

Idea. Two yes-or-no questions per operation: is its result there in backward, and is it run again? "Run again" implies
"there" for it and for all that it reads; "there" without "run again" costs its bytes, "run again" costs its seconds.
Costs that are paid when one answer is yes and another no are the edges of a graph, and the cheapest answers are a
minimum cut, found as a maximum flow (Dinic). Exact, in milliseconds for the tens of operations of a layer. Every demand
can be met by saving, so no cut is infinite.

A view (no bytes, one input) is no operation of its own: it is there when what it views is, and costs nothing.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from .cost import Graph, Node


@dataclass(frozen=True)
class Cut:
    """What is cheapest: the seconds of what is run again, and the bytes of what is saved. Infinite if impossible."""

    seconds: float
    bytes: int

    def __add__(self, other: Cut) -> Cut:
        return Cut(self.seconds + other.seconds, self.bytes + other.bytes)

    def value(self, price: float, weight: float = 1.0) -> float:
        """Both in one figure."""
        return weight * self.seconds + price * self.bytes if self.seconds < math.inf else math.inf


IMPOSSIBLE = Cut(math.inf, 0)


def cheapest(graph: Graph, price: float, output: bool, input: bool, weight: float = 1.0) -> Cut:
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
        return IMPOSSIBLE
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
    return Cut(
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
        """An edge; its reverse stands beside it."""
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
