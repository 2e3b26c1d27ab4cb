"""The lower bound: below every schedule, equal to the best mixture of schedules, and as quick for many layers."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from costs import costs_of_graphs, executed, schedules
from torch_recompute.errors import BudgetError
from torch_recompute.plan import bound as module
from torch_recompute.plan.bound import bound
from torch_recompute.plan.cost import Costs, Graph, Host, Kind, Node, Option, Point, Segment
from torch_recompute.plan.solve import choose


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


def stack(layers: int) -> Costs:
    return Costs({"a": layer()}, tuple(Segment(str(i), "a", 0, 0) for i in range(layers)), turn_bytes=5)


def test_the_bound_of_equal_layers_follows_from_one() -> None:
    """A hundred layers with a hundred times the room cost a hundred times what one does, less what they may share."""
    one, many = (bound(stack(layers), 5 + 60 * layers) for layers in (1, 100))
    # The cheaper half of each layer is run again: 0 + 1 + 2 + 3 + 4 + 5 seconds.
    assert one == pytest.approx(15.0)
    assert many == pytest.approx(1500.0)


def at_once(layers: int, nbytes: int) -> Costs:
    """A stack in whose backwards something is read and made at once."""
    costs = stack(layers)
    graph = costs.kinds["a"].graph
    assert graph is not None
    return replace(costs, kinds={"a": replace(costs.kinds["a"], graph=replace(graph, backward_bytes=nbytes))})


def test_what_one_operation_of_a_backward_needs_leaves_less_room() -> None:
    """With room for all at the turn, the layers before the last pay for what must go before the last one's backward."""
    costs = at_once(2, 185)
    assert bound(stack(2), 245) == 0
    assert bound(costs, 245) == pytest.approx(bound(stack(1), 5 + 60)) == pytest.approx(15.0)
    # What else lives in that backward takes room as well; in the backward of the first layer nothing has to go.
    more = replace(costs, segments=(costs.segments[0], replace(costs.segments[1], backward_bytes=20)))
    assert bound(more, 245) == pytest.approx(bound(stack(1), 5 + 40))
    less = replace(costs, segments=(replace(costs.segments[0], backward_bytes=60), costs.segments[1]))
    assert bound(less, 245) == bound(costs, 245)
    assert bound(costs, 184) == math.inf


def test_room_that_is_short_twice_counts_more_than_either_time() -> None:
    """The bound lies above the one of the turn and the one of the last backward alone."""
    costs, budget = at_once(3, 100), 185
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
            bound(at_once(layers, nbytes), 5 + 60 * layers)
            counts[layers, nbytes] = len(cuts)
    assert counts[2, 0] == counts[126, 0] > 0
    assert counts[126, 120] < 2 * counts[2, 120]  # as many prices as are tried, not as many layers as there are


def test_a_layer_without_operations_counts_nothing() -> None:
    """A kind whose graph is not known adds nothing, and what follows it has its input."""
    costs = stack(2)
    unknown = Costs(
        {"a": layer(), "b": Kind(layer().options)},
        (Segment("0", "b", 0, 0), Segment("1", "a", 0, 0), Segment("2", "b", 0, 0)),
        turn_bytes=5,
    )
    assert bound(unknown, 65) == bound(stack(1), 65)
    assert bound(costs, 4) == math.inf


def test_what_lives_in_the_loss_takes_room() -> None:
    """After the last forward and before the first backward whatever else lives leaves less to save; elsewhere not."""
    costs, layers = stack(4), 4
    for after, counts in ((layers, True), (layers - 1, False), (0, False)):
        more = replace(costs, points=(Point(after, 25, "in the loss"),))
        assert bound(more, 205) == bound(costs, 185 if counts else 205)
    assert bound(costs, 185) > bound(costs, 205)


@settings(max_examples=60, deadline=None)
@given(costs_of_graphs(), st.integers(0, 40), st.integers(1, 20), st.none() | st.integers(0, 30))
def test_host_memory_is_room_that_time_limits(costs: Costs, room: int, speed: int, most: int | None) -> None:
    """No schedule costs less than the bound that sends some bytes away and waits for what the step does not hide."""
    hosted = replace(costs, host=Host(most, float(speed)))
    found = bound(hosted, costs.turn_bytes + room)
    for size, seconds in schedules(costs):
        sent = max(0, size - room)
        if most is None or sent <= most:
            assert found <= seconds + max(0.0, sent / speed - costs.step_seconds) + 1e-9


def test_a_view_is_had_with_what_it_views() -> None:
    """A needed view costs the bytes of its base, once for all views of it, and an operation on its output its price."""
    nodes = (
        Node(8.0, 30, (-1,)),
        Node(math.inf, 0, (0,), True),
        Node(math.inf, 0, (0,), True),
        Node(math.inf, 10, (1,), True),
    )
    costs = Costs({"a": Kind(layer().options, Graph(nodes, 3, 10))}, (Segment("0", "a", 0, 0),))
    # The last can only be saved; the base is saved or run again.
    assert [bound(costs, budget) for budget in (9, 10, 40)] == [math.inf, pytest.approx(8.0), 0.0]
    # Half of the base saved, half run again: the linear program may do that.
    assert bound(costs, 25) == pytest.approx(4.0)


def test_the_linear_program_agrees() -> None:
    """HiGHS finds the same optimum for the linear program of a chain, written down in full."""
    highspy = pytest.importorskip("highspy", reason="the linear program is solved by the package highspy")
    costs, room = stack(5), 217
    graph = layer().graph
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    before, saved = None, []
    for _ in costs.segments:
        there = [highs.addVariable(lb=1.0 if node.needed else 0.0, ub=1.0) for node in graph.nodes]
        again = [highs.addVariable(lb=0.0, ub=1.0, obj=node.seconds) for node in graph.nodes]
        for node, x, y in zip(graph.nodes, there, again, strict=True):
            highs.addConstr(y <= x)
            saved.append(node.bytes * x - node.bytes * y)
            for read in node.inputs:
                if read >= 0:
                    highs.addConstr(y <= there[read])
                elif before is not None:
                    highs.addConstr(y <= before)
        before = there[graph.output]
    highs.addConstr(highs.qsum(saved) <= room)
    highs.minimize()
    assert bound(costs, 5 + room) == pytest.approx(highs.getInfo().objective_function_value)
