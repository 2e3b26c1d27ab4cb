"""Chooses the values of a joint graph to save: the compiled step stays within a budget and runs the least again.

The forward is cut where one large value alone crosses: between layers, and between their halves. Such a value is always
saved, or what backward makes again of several layers would live at once. Each segment between two cuts has its ways:
with a price for a saved byte, the cheapest set of operations to run again is a minimum cut (`planner/bound.py`), and
each price gives one; between the cheapest and the smallest are those that save some of what the smallest runs again.
What a way saves, and what lives in its backward, is counted in the whole graph (`Joint.simulate`). From there on it is
the problem of any other plan, and `planner/solve.py` chooses a way for each segment.

Segments that are the same except for their weights share their ways, so many layers take little longer than one. Where
none are, the graph is one layer: nothing of others can live at once with what it runs again, and the values between its
segments need not be saved. So it is one segment as well, and the better of the two choices is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from ..plan.choice import Choice
from ..planner.bound import selection
from ..planner.cost import Costs, Graph, Kind, Node, Option, Segment
from ..planner.solve import Solver
from .joint import Joint, Lives

SMALL = 0.002  # of the largest value: what may cross a cut besides the one
LONG = 1 / 3  # of the forward: what lives longer belongs to no segment, such as a mask or positions
PLAIN = 0.1  # price of a byte, in FLOPs, at which nothing is run again but what is a part of other kernels
NEVER = 2**60  # bytes of what cannot be saved
DEPTH = 8  # of the halvings between the lowest price and the highest
WORTH = 0.01  # of what a way costs: an operation that costs less is not saved by itself
MOST = 32  # ways of a segment between the cheapest and the smallest
WIDER = (1.02, 1.05, 1.1, 1.2, 1.5, 2.0)  # times the least room by the costs: where the least that is counted may be
TRIES = 12  # choices that are counted in the whole graph, with more room or less, until none that fits is cheaper
CLOSE = 0.01  # of the room: a choice that leaves less of the budget free is taken

Way = tuple[int, ...]
"""The operations of a segment that backward runs again, by their places in it."""


class Attempt(NamedTuple):
    """The outcome of choosing within a room, with the peak counted exactly.

    Attributes:
        over: Bytes by which the peak is above the budget; below it, negative.
        peak: The peak that was counted in the graph.
        plain: Whether nothing is run again.
    """

    over: int
    peak: int
    plain: bool


def approach(attempt: Callable[[int], Attempt | None], room: int, least: int, tries: int) -> None:
    """Searches for the room to choose in with which the exact peak is within the budget, and leaves little free.

    The exact peak differs from the one in the graph by nearly the same for all choices, so two or three attempts do.
    Where it does not, the next attempt is halfway between one that fits and one that does not.

    Args:
        attempt: Chooses within so many bytes; None where that is the choice of an earlier attempt.
        room: The bytes to begin with.
        least: The fewest that any choice needs; the last attempt has these, if none was within the budget.
        tries: The most attempts.
    """
    fits, above = 0, 2**62
    for left in reversed(range(tries)):
        room = max(room, least)
        came = attempt(room)
        if came is None or -CLOSE * room <= came.over <= 0 or (came.over < 0 and came.plain):
            return
        if came.over > 0:
            room = above = min(room, came.peak)
        else:
            fits = room
        room -= came.over
        if left == 1 and not fits:
            room = least
        elif fits and not fits < room < above:
            room = (fits + above) // 2


class GraphChoice(NamedTuple):
    """The values to save.

    Attributes:
        saved: Values of the graph, by number.
        lives: What lives with them.
        flops: FLOPs that backward runs again.
        peak: The most bytes alive at any time, with the graphs of all layers.
    """

    saved: frozenset[int]
    lives: Lives
    flops: int
    peak: int


class Chooser:
    """Chooses what to save of a joint graph, for any number of budgets.

    Args:
        joint: The graph.
        layers: How many graphs like this follow one another, each with the same choice.
        cut: Whether the graph is cut into segments.

    Attributes:
        least: The fewest bytes that any choice needs.
        plain: The choice that runs nothing again but what is a part of other kernels.
    """

    def __init__(self, joint: Joint, layers: int = 1, cut: bool = True) -> None:
        self._joint, self._others = joint, layers - 1
        self._cuts, self._long = _cuts(joint) if cut else (set[int](), set[int]())
        self._segment = self._segments()
        self._members: list[list[int]] = [[] for _ in range(1 + max(self._segment, default=0))]
        for number, segment in enumerate(self._segment):
            self._members[segment].append(number)
        self._spans = self._uses()
        graphs = [self._graph(members) for members in self._members]
        self._kinds = [self._described(graph, members) for graph, members in zip(graphs, self._members, strict=True)]
        self._ways: dict[str, list[Way]] = {}
        for kind, graph in zip(self._kinds, graphs, strict=True):
            if kind not in self._ways:
                self._ways[kind] = _ways(graph)
        self.plain = self._chosen([self._ways[kind][0] for kind in self._kinds])
        self._of: dict[tuple[str, Option], Way] = {}
        self._costs = Costs(
            {kind: self._options(kind) for kind in self._ways},
            tuple(
                Segment(f"segment {index}", kind, 0, max([joint.gradient_bytes[use] for use in span], default=0))
                for index, (kind, span) in enumerate(zip(self._kinds, self._spans, strict=True))
            ),
        )
        self._solver = Solver(self._costs)
        narrow = self._solver.smallest
        self._room = narrow.peak_bytes
        wider = (self._solver.choose(int(self._room * more)).options for more in WIDER)  # counted, one may be smaller
        self._narrow = min(map(self._count, (narrow.options, *wider)), key=lambda one: one.peak)
        several = [kind for kind in self._kinds if len(self._ways[kind]) > 1]
        alone = cut and len(several) == len({*several})
        self._uncut = Chooser(joint, layers, cut=False) if alone else None
        self.least = min(self._narrow.peak, self._uncut.least if self._uncut else self._narrow.peak)

    def choose(self, budget: int) -> GraphChoice:
        """Chooses what to save.

        Args:
            budget: The most bytes alive at any time, besides what is alive before the step; at least `least`.
        """
        best = self._narrow
        # Segments count together what never lives at once, so the room in which to choose is not the budget.
        low, high = self._room, 2 * max(budget, self._room)
        for _ in range(TRIES):
            room = (low + high) // 2
            tried = self._count(self._solver.choose(room).options)
            if tried.peak <= budget:
                best, low = tried, room
            else:
                high = room
        other = self._uncut.choose(budget) if self._uncut else best
        return min(best, other, key=lambda one: (max(one.peak - budget, 0), one.flops, one.peak))

    def _count(self, options: Sequence[Option]) -> GraphChoice:
        return self._chosen([self._of[pair] for pair in zip(self._kinds, options, strict=True)])

    def _chosen(self, ways: Sequence[Way]) -> GraphChoice:
        """The choice that these ways make, with what lives with it."""
        saved = self._values(ways)
        lives = self._joint.simulate(saved)
        again = (self._joint.operations[number] for number in lives.again)
        # Beside one layer's backward live what those before it save, and the gradients of those after it.
        beside = self._others * max(lives.saved, *self._joint.gradient_bytes[-1:], 0)
        return GraphChoice(saved, lives, sum(one.flops for one in again if one.required), lives.peak + beside)

    def _segments(self) -> list[int]:
        """The segment of each operation; one that backward alone needs goes where what it reads is made."""
        found: list[int] = []
        ends = {self._joint.values[cut].maker for cut in self._cuts}
        after: dict[int, int] = {}  # the segment in which a value is read
        now = 0
        for number, one in enumerate(self._joint.operations):
            mine = now if one.required else max([after.get(value, 0) for value in one.reads], default=0)
            found.append(mine)
            after.update({value: mine + (value in self._cuts) for value in one.makes})
            now += number in ends
        return found

    def _uses(self) -> list[range]:
        """The operations of backward that belong to each segment: up to the last that reads what only it makes."""
        last = [0] * len(self._members)
        for number, value in enumerate(self._joint.values):
            if value.uses and value.maker is not None and number not in self._long:
                mine = min(self._segment[value.maker] + (number in self._cuts), len(last) - 1)
                last[mine] = max(last[mine], value.uses[-1] + 1)
        last[0] = len(self._joint.uses)
        ends = list(accumulate(reversed(last), max))
        return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)][::-1]

    def _graph(self, members: Sequence[int]) -> Graph:
        """The operations of a segment, as a minimum cut takes them: what is saved anyway is free."""
        values = self._joint.values
        free = self._cuts | self._long
        place = {number: index for index, number in enumerate(members)}
        nodes: list[Node] = []
        for number in members:
            one = self._joint.operations[number]
            reads = {
                place[maker]
                for value in one.reads
                if (maker := values[value].maker) in place and value not in free and not values[value].output
            }
            made = [values[value] for value in one.makes if value not in free and not values[value].output]
            made = [value for value in made if value.uses or value.readers]
            cost = math.inf if not one.again else one.cost if one.required else 0.0
            size, read = sum(value.bytes for value in made), sum(values[value].bytes for value in one.reads)
            # Torch's partitioner runs what backward alone needs there, unless saving it takes half of what it reads.
            savable = one.required or not one.again or 2 * size <= read
            needed = any(value.uses for value in made)
            nodes.append(Node(cost, size if savable else NEVER, tuple(sorted(reads)), needed))
        return Graph(tuple(nodes), max(len(nodes) - 1, 0), 0)

    def _described(self, graph: Graph, members: Sequence[int]) -> str:
        return repr((graph, [str(self._joint.operations[number].node.target) for number in members]))

    def _values(self, ways: Sequence[Way]) -> frozenset[int]:
        """The values that are saved, with a way for each segment."""
        joint = self._joint
        again = {self._members[index][place] for index, way in enumerate(ways) for place in way}
        wanted = {number for number, value in enumerate(joint.values) if value.uses}
        wanted |= {value for number in again for value in joint.operations[number].reads}
        return frozenset(
            number
            for number in wanted
            if (maker := joint.values[number].maker) is not None
            and not joint.values[number].output
            and (maker not in again or number in self._cuts or number in self._long)
        )

    def _options(self, kind: str) -> Kind:
        """The ways of a kind of segments, counted in the first of them while the others run nothing again."""
        index = self._kinds.index(kind)
        plain = [self._ways[kind][0] for kind in self._kinds]
        for way in self._ways[kind]:
            ways = [*plain[:index], way, *plain[index + 1 :]]
            self._of.setdefault((kind, self._option(index, ways)), way)
        return Kind(tuple(option for of, option in self._of if of == kind))

    def _option(self, index: int, ways: Sequence[Way]) -> Option:
        joint, members = self._joint, self._members[index]
        values = self._values(ways)
        lives = joint.simulate(values)
        makers = [(joint.values[number].maker or 0, joint.values[number].bytes) for number in values]
        before = sum(size for maker, size in makers if self._segment[maker] < index)
        saved = sum(size for maker, size in makers if self._segment[maker] == index)
        forward = [lives.forward[number] - before for number in members if joint.operations[number].required]
        backward = [lives.backward[use] - joint.gradient_bytes[use] - before for use in self._spans[index]]
        mine = set(members)
        again = [one for number in lives.again if number in mine and (one := joint.operations[number]).required]
        beside = self._others * saved
        return Option(
            (Choice(("",)),) if ways[index] else (),
            saved + beside,
            max([saved, *forward]) + beside,
            max([saved, *backward]) + beside,
            math.fsum(one.cost for one in again),
            sum(one.flops for one in again),
        )


def _cuts(joint: Joint) -> tuple[set[int], set[int]]:
    """The values between segments, and those that live through many of them."""
    required = [number for number, one in enumerate(joint.operations) if one.required]
    order = {number: place for place, number in enumerate(required)}
    last = [max([order[r] for r in value.readers if r in order], default=-1) for value in joint.values]
    born = {number: order[value.maker] for number, value in enumerate(joint.values) if value.maker in order}
    long = {number for number in born if last[number] - born[number] > LONG * len(required)}
    small = SMALL * max([value.bytes for value in joint.values], default=0)
    ends: dict[int, int] = {}  # the last operation at which a value alone is alive
    live: set[int] = set()
    for place, number in enumerate(required):
        made = (value for value in joint.operations[number].makes if not joint.values[value].output)
        live |= {value for value in made if joint.values[value].bytes > small and value not in long}
        live = {value for value in live if last[value] > place}
        if len(live) == 1:
            ends[next(iter(live))] = number
    worth: list[int] = []
    start = 0
    for value, end in ends.items():  # where only cheap operations came since the last, it costs nothing to go back
        if any(joint.operations[number].flops for number in range(start, end)):
            worth.append(value)
            start = end
    sizes = [joint.values[value].bytes for value in worth]
    usual = max(set(sizes), key=sizes.count, default=0)
    return {value for value in worth if joint.values[value].bytes == usual}, long


def _ways(graph: Graph) -> list[Way]:
    """The ways of a segment: the cheapest, those between it and the smallest, and those at all prices of a byte."""
    found: dict[Way, float] = {}

    def at(price: float) -> tuple[float, int]:
        again, saved = selection(graph, price, False, True) or ([], [])
        found.setdefault(tuple(again), price)
        return math.fsum(graph.nodes[i].seconds for i in again), sum(graph.nodes[i].bytes for i in saved)

    def between(cheap: tuple[float, int], small: tuple[float, int], depth: int) -> None:
        if cheap[1] <= small[1] or small[0] <= cheap[0] or not depth:
            return
        middle = at((small[0] - cheap[0]) / (cheap[1] - small[1]))  # the price at which both cost the same
        if middle not in (cheap, small):
            between(cheap, middle, depth - 1)
            between(middle, small, depth - 1)

    most = 4 * (1 + sum(node.seconds for node in graph.nodes if node.seconds < math.inf))
    between(at(PLAIN), at(most), DEPTH)
    ways = sorted(found, key=found.__getitem__)
    return [*dict.fromkeys([*ways[:1], *_front(graph, *ways[:1], *ways[-1:]), *ways[1:]])]


def _front(graph: Graph, plain: Way, small: Way) -> Sequence[Way]:
    """Ways that save some of what the smallest runs again: the cheapest for each number of bytes saved."""
    nodes = graph.nodes
    least = WORTH * math.fsum(nodes[place].seconds for place in small)

    def way(saved: frozenset[int]) -> tuple[float, int, frozenset[int], Way]:
        wanted = {number for number, node in enumerate(nodes) if node.needed}
        again: list[int] = []
        for number in sorted({*small} - saved, reverse=True):
            if number in wanted:
                again.append(number)
                wanted.update(nodes[number].inputs)
        kept = sum(nodes[number].bytes for number in wanted.difference(again))
        return math.fsum(nodes[number].seconds for number in again), kept, saved, tuple(reversed(again))

    front = [way(frozenset())]
    for place in sorted({*small} - {*plain}):
        if nodes[place].bytes and nodes[place].seconds > least:
            more = sorted([*front, *(way(one[2] | {place}) for one in front)], key=lambda one: one[:2])
            front = [
                one
                for one, before in zip(more, [math.inf, *accumulate((x[1] for x in more), min)], strict=False)
                if one[1] < before
            ]
            front = front[:: -(-len(front) // MOST)]
    return [one[3] for one in front]
