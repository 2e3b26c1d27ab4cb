"""The lower bound: below every schedule, equal to the best mixture of schedules, and as quick for many layers."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from support.costs import costs_of_graphs, executed, run_again, schedules
from torch_recompute.errors import BudgetError
from torch_recompute.planner import bound as module
from torch_recompute.planner.bound import bound
from torch_recompute.planner.cost import Costs, Graph, HostMemory, Kind, Node, Option, Point, Segment
from torch_recompute.planner.solve import choose
from torch_recompute.simulation.devices import Host, Work


def mixture(points: list[tuple[int, float]], room: int) -> float:
    """The fewest seconds of any mixture of schedules that saves no more than `room`: the linear program, tried out."""
    best = math.inf
    for size, seconds in points:
        for other, other_seconds in points:
            if size <= room < other:
                share = Fraction(room - size, other - size)
                best = min(best, float(share * Fraction(other_seconds) + (1 - share) * Fraction(seconds)))
        if size <= room:
            best = min(best, seconds)
    return best


@settings(max_examples=150, deadline=None)
@given(costs_of_graphs(), st.integers(0, 40))
def test_the_bound_is_the_best_mixture_of_all_schedules(costs: Costs, room: int) -> None:
    """No schedule of saving and recomputing costs less than the bound, and no higher bound holds for mixtures."""
    points = schedules(costs)
    found = bound(costs, costs.turn_bytes + room)
    assert found <= min((seconds for size, seconds in points if size <= room), default=math.inf)
    assert found == pytest.approx(mixture(points, room), rel=1e-9)


@settings(max_examples=150, deadline=None)
@given(costs_of_graphs(most=2, at_once=True), st.integers(0, 50))
def test_no_way_to_run_the_backwards_costs_less_than_the_bound(costs: Costs, budget: int) -> None:
    """However results come and go from one backward to the next, what is run again costs at least the bound."""
    assert bound(costs, budget) <= executed(costs, budget) + 1e-9


@settings(max_examples=100, deadline=None)
@given(costs_of_graphs(at_once=True), st.integers(0, 60), st.integers(0, 20))
def test_no_plan_costs_less_than_the_bound(costs: Costs, budget: int, more: int) -> None:
    """Plans made of the same operations cost at least the bound, which falls as the budget grows."""
    assert bound(costs, budget + more) <= bound(costs, budget)
    try:
        solution = choose(costs, budget)
    except BudgetError:
        assume(False)
    assert solution.seconds >= bound(costs, budget)


def layer() -> Kind:
    """A layer of twelve operations in a row, of rising price per byte."""
    nodes = tuple(Node(float(i), 10, (i - 1,), True) for i in range(12))
    return Kind((Option((), 120, 120, 120, 0.0),), Graph(nodes, 11, 10))


def stack(layers: int, at_once: int = 0, backward: tuple[int, ...] = (), points: tuple[Point, ...] = ()) -> Costs:
    """Equal layers; in the backward of each something is read and made at once, and other bytes are alive."""
    kind = layer()
    assert kind.graph is not None
    others = backward or (0,) * layers
    segments = tuple(Segment(str(i), "a", 0, others[i]) for i in range(layers))
    return Costs({"a": replace(kind, graph=replace(kind.graph, backward_bytes=at_once))}, segments, points, 0.0, 5)


VIEWS = Graph(
    (
        Node(8.0, 30, (-1,)),
        Node(math.inf, 0, (0,), True),
        Node(math.inf, 0, (0,), True),
        Node(math.inf, 10, (1,), True),
    ),
    3,
    10,
)
VIEWED = Costs({"a": Kind(layer().options, VIEWS)}, (Segment("0", "a", 0, 0),))
UNKNOWN = Costs(
    {"a": layer(), "b": Kind(layer().options)},
    (Segment("0", "b", 0, 0), Segment("1", "a", 0, 0), Segment("2", "b", 0, 0)),
    turn_bytes=5,
)


@pytest.mark.parametrize(
    ("costs", "budget", "seconds"),
    [
        # Half of a layer has room: the cheaper half is run again, 0 + 1 + 2 + 3 + 4 + 5 seconds, in each of them.
        (stack(1), 65, 15.0),
        (stack(100), 6005, 1500.0),
        (stack(2), 4, math.inf),
        # A kind whose operations are not known adds nothing, and what follows it has its input.
        (UNKNOWN, 65, 15.0),
        # What is alive in the loss leaves less to save; elsewhere it does not.
        (stack(1, points=(Point(1, 65, "in the loss"),)), 125, 15.0),
        (stack(1, points=(Point(0, 65),)), 125, 0.0),
        # In the backward of the second layer 185 bytes come on top of what the first has saved, and of 20 others.
        (stack(2), 245, 0.0),
        (stack(2, 185), 245, 15.0),
        (stack(2, 185, (0, 20)), 245, 28.0),
        (stack(2, 185, (60, 0)), 245, 15.0),
        (stack(2, 185), 184, math.inf),
        # A view costs its base, once for all views; an operation on it its own bytes, and the last can only be saved.
        (VIEWED, 9, math.inf),
        (VIEWED, 10, 8.0),
        (VIEWED, 25, 4.0),  # half of the base is saved, half run again: the linear program may do that
        (VIEWED, 40, 0.0),
    ],
)
def test_the_bound_of_small_models(costs: Costs, budget: int, seconds: float) -> None:
    """What must be run again, counted by hand."""
    assert bound(costs, budget) == pytest.approx(seconds)


def launched(costs: Costs, host: Host, plain: Work) -> Costs:
    """The same operations, one launch each, on a device whose host takes time, too."""

    def kind_of(kind: Kind) -> Kind:
        assert kind.graph is not None
        graph = replace(kind.graph, nodes=tuple(replace(node, operations=1) for node in kind.graph.nodes))
        counted = replace(
            graph, nodes=tuple(replace(node, seconds=float(node.seconds < math.inf)) for node in graph.nodes)
        )
        needed = [index for index, node in enumerate(graph.nodes) if node.needed] + [-1] * graph.input_needed
        options: list[Option] = []
        for option in kind.options:
            kept = [{*map(int, region.keep)} for region in option.regions]
            again = sum(run_again(counted, keep, needed)[0] for keep in kept)
            work = Work(option.seconds, 0, again, len(kept))
            options.append(replace(option, seconds=host.added(plain, work), work=work))
        return Kind(tuple(options), graph, plain)

    return replace(costs, kinds={name: kind_of(kind) for name, kind in costs.kinds.items()}, host=host)


@settings(max_examples=150, deadline=None)
@given(
    costs_of_graphs(at_once=True),
    st.integers(0, 60),
    st.builds(Host, replayed=st.integers(0, 8), region=st.integers(0, 8), operation=st.just(1), apart=st.booleans()),
    st.builds(Work, st.integers(0, 12), st.integers(0, 12)),
)
def test_no_plan_costs_less_than_the_bound_whoever_is_slower(
    costs: Costs, budget: int, host: Host, plain: Work
) -> None:
    """Where the slower of device and host counts, in the plain segment or only with replays, plans cost the bound."""
    costs = launched(costs, host, plain)
    try:
        solution = choose(costs, budget)
    except BudgetError:
        assume(False)
    assert solution.seconds >= bound(costs, budget) - 1e-9


@pytest.mark.parametrize(
    ("host", "plain", "seconds"),
    [
        # As without a host: the cheaper half of twelve operations of 0 to 11 seconds is run again.
        (Host(replayed=1.0, apart=True), Work(device=9.0), 15.0),
        # The host decides: of twelve launches of 12 seconds each, and of a region of 3, a linear program takes half.
        (Host(replayed=12.0, region=3.0, apart=True), Work(), 73.5),
        # The device is 20 seconds ahead of it, which its launches use up.
        (Host(replayed=4.0, region=3.0, apart=True), Work(device=20.0), 15.0),
        # Both, on a CPU.
        (Host(replayed=4.0, region=3.0), Work(), 42.0),
    ],
)
def test_the_bound_knows_the_host(host: Host, plain: Work, seconds: float) -> None:
    """What must be run again is paid for on the slower side, counted by hand."""
    costs = stack(1)
    kind = costs.kinds["a"]
    assert kind.graph is not None
    graph = replace(kind.graph, nodes=tuple(replace(node, operations=1) for node in kind.graph.nodes))
    costs = replace(costs, kinds={"a": Kind(kind.options, graph, plain)}, host=host)
    assert bound(costs, 65) == pytest.approx(seconds)


def test_room_that_is_short_twice_counts_more_than_either_time() -> None:
    """The bound lies above the one of the turn and the one of the last backward alone."""
    costs, budget = stack(3, 100), 185
    turn, last = bound(stack(3), budget), bound(stack(2), budget - 100 + 5)
    assert bound(costs, budget) > max(turn, last) > min(turn, last) > 0
    assert bound(costs, budget) <= turn + last


def test_equal_layers_are_cut_once(monkeypatch) -> None:
    """The number of minimum cuts does not depend on the number of layers."""
    cuts = []
    monkeypatch.setattr(module, "cheapest", lambda *args, cheapest=module.cheapest: cuts.append(1) or cheapest(*args))
    counts = {}
    for layers in (2, 126):
        for nbytes in (0, 120):
            cuts.clear()
            bound(stack(layers, nbytes), 5 + 60 * layers)
            counts[layers, nbytes] = len(cuts)
    assert counts[2, 0] == counts[126, 0] > 0
    assert counts[126, 120] < 2 * counts[2, 120]  # as many prices as are tried, not as many layers as there are


@settings(max_examples=60, deadline=None)
@given(costs_of_graphs(), st.integers(0, 40), st.integers(1, 20), st.none() | st.integers(0, 30))
def test_host_memory_is_room_that_time_limits(costs: Costs, room: int, speed: int, most: int | None) -> None:
    """No schedule costs less than the bound that sends some bytes away and waits for what the step does not hide."""
    hosted = replace(costs, host_memory=HostMemory(most, float(speed)))
    found = bound(hosted, costs.turn_bytes + room)
    for size, seconds in schedules(costs):
        sent = max(0, size - room)
        if most is None or sent <= most:
            assert found <= seconds + max(0.0, sent / speed - costs.step_seconds) + 1e-9
