"""Costs drawn by hypothesis, costs of stacks of equal layers, and the best choices by exhaustive search."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from torch_recompute import Choice
from torch_recompute.planner.cost import Costs, Graph, Kind, Node, Option, Point, Segment, Solution


def choices(costs: Costs) -> Iterator[tuple[Option, ...]]:
    """All choices, each with one option per start of a span."""

    def beginning(index: int) -> Iterator[tuple[Option, ...]]:
        if index == len(costs.segments):
            yield ()
            return
        kind = costs.segments[index].kind
        for option in costs.kinds[kind].options:
            taken = costs.segments[index : index + option.span]
            if len(taken) == option.span and all(segment.kind == kind for segment in taken):
                yield from ((option, *rest) for rest in beginning(index + option.span))

    yield from beginning(0)


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


def figures(costs: Costs, chosen: tuple[Option, ...]) -> tuple[float, int, int]:
    """Seconds, FLOPs and peak."""
    return math.fsum(o.seconds for o in chosen), sum(o.flops for o in chosen), peak(costs, chosen)


def taken(solution: Solution) -> tuple[Option, ...]:
    """One option per start of a span."""
    chosen, index = [], 0
    while index < len(solution.options):
        chosen.append(solution.options[index])
        index += solution.options[index].span
    return tuple(chosen)


@st.composite
def an_option(draw: st.DrawFn, number: int, span: int = 1) -> Option:
    saved = draw(st.integers(0, 20))
    return Option(
        regions=() if number == 0 else (Choice(("",), tuple(f"call{i}" for i in range(draw(st.integers(0, 2))))),),
        saved_bytes=saved,
        forward_bytes=saved + draw(st.integers(0, 10)),
        backward_bytes=saved + draw(st.integers(0, 20)),
        seconds=0.0 if number == 0 else draw(st.integers(0, 40)) / 8,
        flops=draw(st.integers(0, 3)),
        span=span,
    )


@st.composite
def some_costs(draw: st.DrawFn, most: int = 5) -> Costs:
    """A few segments of up to three kinds, some equal, some options over two or three segments."""
    kinds: dict[str, Kind] = {}
    for name in "abc"[: draw(st.integers(1, 3))]:
        single = [draw(an_option(number)) for number in range(draw(st.integers(1, 4)))]
        spans = [draw(an_option(9, span)) for span in draw(st.lists(st.integers(2, 3), max_size=2))]
        kinds[name] = Kind((*single, *spans))
    names = draw(st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=most))
    base = st.just(10) if draw(st.booleans()) else st.integers(0, 20)
    grow = draw(st.integers(-3, 3))
    segments = tuple(
        Segment(f"layers.{i}", name, draw(base), max(0, draw(base) + grow * i)) for i, name in enumerate(names)
    )
    point = st.builds(Point, after=st.integers(0, len(segments)), bytes=st.integers(0, 40))
    return Costs(kinds, segments, tuple(draw(st.lists(point, max_size=2))), 10.0, draw(st.integers(0, 20)))


def stack(layers: int, kinds: int = 1, options: int = 40, seed: int = 0) -> Costs:
    """A model of layers with ten results each to keep or to compute again, of bytes and prices as in a transformer.

    Gradients grow during backward, the loss has a transient, and kinds take turns.
    """
    mib, rng = 2**20, random.Random(seed)
    made = {f"kind{i}": Kind(tuple(_options(rng, options))) for i in range(kinds)}
    fixed, gradients = 100 * mib, 200_000
    segments = tuple(
        Segment(f"layers.{i}", f"kind{i % kinds}", fixed, fixed + (layers - i) * gradients) for i in range(layers)
    )
    return Costs(made, segments, (Point(layers, fixed + 60 * mib, "in the loss"),), 1.0, fixed)


def _options(rng: random.Random, count: int) -> list[Option]:
    mib = 2**20
    results = [
        (rng.randint(1, 8) * mib + rng.randint(0, 5) * 512, rng.choice([1e-5, 2e-5, 1e-3, 1.3e-3, 4e-3]) * rng.random())
        for _ in range(10)
    ]
    whole = sum(size for size, _ in results)
    options: list[Option] = []
    for subset in itertools.product((True, False), repeat=len(results)):
        kept = sum(size for (size, _), keep in zip(results, subset, strict=True) if keep)
        seconds = math.fsum(price for (_, price), keep in zip(results, subset, strict=True) if not keep)
        saved = 2 * mib + kept
        regions = () if all(subset) else (Choice(("",), tuple(f"call{i}" for i, keep in enumerate(subset) if keep)),)
        backward = whole + 2 * mib + rng.randint(0, 8) * mib
        options.append(
            Option(regions, saved, saved + rng.randint(1, 6) * mib, backward, seconds, round(seconds * 1e12))
        )
    useful: list[Option] = []
    for option in sorted(options, key=lambda option: (option.seconds, option.saved_bytes)):
        sizes = option.saved_bytes, option.forward_bytes, option.backward_bytes
        if not any(
            all(a <= b for a, b in zip((o.saved_bytes, o.forward_bytes, o.backward_bytes), sizes, strict=True))
            for o in useful
        ):
            useful.append(option)
    # The first keeps everything, the last nothing.
    return [useful[0], *rng.sample(useful[1:-1], min(count - 2, len(useful) - 2)), useful[-1]]


# What the output of each drawn segment weighs, so that any may follow any.
HANDED_ON = 4


@st.composite
def a_graph(draw: st.DrawFn, most: int = 4) -> Graph:
    """A few operations, some of them views, some never to be run again."""
    nodes: list[Node] = []
    for index in range(draw(st.integers(1, most))):
        inputs = tuple(draw(st.lists(st.integers(-1, index - 1), min_size=1, max_size=2, unique=True)))
        seconds = math.inf if draw(st.integers(0, 9)) == 0 else draw(st.integers(0, 16)) / 4
        nodes.append(Node(seconds, draw(st.integers(0, 6)), inputs, draw(st.booleans())))
    nodes.append(Node(draw(st.integers(0, 16)) / 4, HANDED_ON, (len(nodes) - 1,), draw(st.booleans())))
    return Graph(tuple(nodes), len(nodes) - 1, HANDED_ON, draw(st.booleans()))


@st.composite
def costs_of_graphs(draw: st.DrawFn, most: int = 3, *, at_once: bool = False) -> Costs:
    """Up to three segments whose options are made from their graphs: each keeps some results in a region.

    With `at_once` an operation of each backward reads and makes some bytes, no more than lives there in any case.
    """
    kinds: dict[str, Kind] = {}
    for name in "ab"[: draw(st.integers(1, 2))]:
        graph, transient = draw(a_graph(most=most)), draw(st.integers(0, 8))
        if at_once:
            graph = replace(graph, backward_bytes=draw(st.integers(0, transient)))
        kinds[name] = Kind(tuple(_options_of(graph, transient)), graph)
    names = draw(st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=most))
    segments = tuple(Segment(f"layers.{i}", name, 0, draw(st.integers(0, 8))) for i, name in enumerate(names))
    return Costs(kinds, segments, (), 1.0, draw(st.integers(0, 8)))


def _options_of(graph: Graph, transient: int) -> Iterator[Option]:
    needed = _needed(graph)
    plain = sum(graph.nodes[index].bytes for index in {_origin(graph, index) for index in needed} - {-1})
    plain += graph.input_bytes * any(_origin(graph, index) < 0 for index in needed)
    yield Option((), plain, plain + transient, plain + transient, 0.0)
    for kept in _subsets([index for index in range(len(graph.nodes)) if _origin(graph, index) == index]):
        seconds = run_again(graph, kept, needed)[0]
        if seconds < math.inf:
            saved = graph.input_bytes + sum(graph.nodes[index].bytes for index in kept)
            keep = tuple(map(str, sorted(kept)))
            yield Option((Choice(("",), keep),), saved, saved + transient, saved + transient, seconds)


def _needed(graph: Graph) -> list[int]:
    return [index for index, node in enumerate(graph.nodes) if node.needed] + [-1] * graph.input_needed


def _origin(graph: Graph, index: int) -> int:
    """What a result is a view of, in the end."""
    while index >= 0 and graph.nodes[index].bytes == 0 and len(graph.nodes[index].inputs) == 1:
        index = graph.nodes[index].inputs[0]
    return index


def _subsets(items: list[int]) -> Iterator[set[int]]:
    for size in range(len(items) + 1):
        yield from map(set, itertools.combinations(items, size))


def run_again(graph: Graph, kept: set[int], wanted: list[int]) -> tuple[float, bool]:
    """Seconds to have what is wanted from what is kept, and whether the input is read for it."""
    again: set[int] = set()
    reads_input = False

    def want(index: int) -> None:
        nonlocal reads_input
        index = _origin(graph, index)
        if index < 0:
            reads_input = True
        elif index not in kept and index not in again:
            again.add(index)
            for read in graph.nodes[index].inputs:
                want(read)

    for index in wanted:
        want(index)
    return math.fsum(graph.nodes[index].seconds for index in again), reads_input


def schedules(costs: Costs) -> list[tuple[int, float]]:
    """Bytes saved at the turn and seconds run again, for every set of results of the whole model to save."""
    found = [(0, 0.0, False)]
    for segment in reversed(costs.segments):
        graph = costs.kinds[segment.kind].graph
        assert graph is not None
        own = [index for index in range(len(graph.nodes)) if _origin(graph, index) == index]
        ways: dict[tuple[int, bool, bool], float] = {}
        for kept in _subsets(own):
            size = sum(graph.nodes[index].bytes for index in kept)
            for handed_on in (False, True):
                seconds, reads = run_again(graph, kept, _needed(graph) + [graph.output] * handed_on)
                key = size, reads, handed_on
                ways[key] = min(seconds, ways.get(key, math.inf))
        found = [
            (bytes_ + size, rest + seconds, reads)
            for bytes_, rest, demanded in found
            for (size, reads, handed_on), seconds in ways.items()
            if demanded == handed_on and seconds < math.inf
        ]
        best: dict[tuple[int, bool], float] = {}
        for bytes_, seconds, reads in found:
            best[bytes_, reads] = min(seconds, best.get((bytes_, reads), math.inf))
        found = [(bytes_, seconds, reads) for (bytes_, reads), seconds in best.items()]
    return [(bytes_, seconds) for bytes_, seconds, _ in found]


def executed(costs: Costs, budget: int) -> float:
    """The fewest seconds of any way to run the backwards one after the other, tried out; infinite if none fits.

    What is there is known at the turn and at one operation of each backward; in between anything may be run again from
    what was there before, and be kept. What a backward needs is had before that operation or after it.
    """
    nodes: list[
        tuple[float, int, set[int]]
    ] = []  # seconds, bytes, what is read; the input of the model is always there
    place: list[dict[int, int]] = []
    handed_on: int | None = None
    needed: list[set[int]] = []
    for segment in costs.segments:
        graph = costs.kinds[segment.kind].graph
        assert graph is not None
        here: dict[int, int] = {}

        def found(index: int, graph: Graph = graph, here: dict[int, int] = here, before: Any = handed_on) -> set[int]:
            index = _origin(graph, index)
            return {here[index]} if index >= 0 else set() if before is None else {before}

        for index, node in enumerate(graph.nodes):
            if _origin(graph, index) == index:
                here[index] = len(nodes)
                nodes.append((node.seconds, node.bytes, set().union(*map(found, node.inputs))))
        needed.append(set().union(*map(found, _needed(graph))))
        (handed_on,) = found(graph.output) or {None}
        place.append(here)
    first = [min(here.values(), default=0) for here in place]

    def seconds(there: frozenset[int], wanted: set[int]) -> float:
        again: set[int] = set()
        open_ = [*wanted]
        while open_:
            node = open_.pop()
            if node not in there and node not in again:
                again.add(node)
                open_.extend(nodes[node][2])
        return math.fsum(nodes[node][0] for node in again)

    def sets(stop: int, room: int) -> list[frozenset[int]]:
        return [frozenset(kept) for kept in _subsets([*range(stop)]) if sum(nodes[i][1] for i in kept) <= room]

    ways = {(there, frozenset[int]()): 0.0 for there in sets(len(nodes), budget - costs.turn_bytes)}
    for number in reversed(range(len(costs.segments))):
        segment = costs.segments[number]
        graph = costs.kinds[segment.kind].graph
        assert graph is not None
        room = budget - segment.backward_bytes - graph.backward_bytes
        after: dict[tuple[frozenset[int], frozenset[int]], float] = {}
        for then in sets(first[number], room) if room >= 0 else ():
            for (there, late), spent in ways.items():
                for early in (True, False):
                    wanted = {*then, *late, *(needed[number] if early else ())}
                    key = then, frozenset[int]() if early else frozenset(needed[number])
                    after[key] = min(after.get(key, math.inf), spent + seconds(there, wanted))
        ways = after
    return min((spent + seconds(there, {*late}) for (there, late), spent in ways.items()), default=math.inf)
