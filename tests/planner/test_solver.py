"""The solver finds the best choice within a budget: compared with a search of all, for random costs."""

import itertools
import math
import pickle
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.costs import choices, figures, some_costs, stack, taken
from torch_recompute import Choice, errors
from torch_recompute.planner import solve
from torch_recompute.planner.cost import Costs, Graph, HostMemory, Kind, Node, Option, Point, Segment
from torch_recompute.planner.profile import Profile
from torch_recompute.planner.solve import choose, frontier, smallest


@settings(max_examples=60, deadline=None)
@given(some_costs(), st.data())
def test_the_choice_is_the_best_of_all(costs: Costs, data: st.DataObject) -> None:
    """The choice has the seconds, then FLOPs, then peak of the best by trying all; below the least budget is none."""
    all_figures = [figures(costs, chosen) for chosen in choices(costs)]
    peaks = sorted({peak for _, _, peak in all_figures})
    for budget in {peaks[0], peaks[-1] + 100, *(data.draw(st.sampled_from(peaks)) + step for step in (-1, 0, 1))}:
        fitting = [figure for figure in all_figures if figure[2] <= budget]
        if not fitting:
            continue
        solution = choose(costs, budget)
        assert figures(costs, taken(solution)) == min(fitting)
        assert (solution.seconds, solution.peak_bytes) == (min(fitting)[0], min(fitting)[2])
        assert solution.solver == "exact"
    with pytest.raises(errors.BudgetError) as caught:
        choose(costs, peaks[0] - 1)
    assert caught.value.smallest == peaks[0]
    assert caught.value.solution == smallest(costs)
    sent = pickle.loads(pickle.dumps(caught.value))  # from a worker process
    assert (str(sent), sent.smallest, sent.solution) == (str(caught.value), peaks[0], smallest(costs))


@settings(max_examples=60, deadline=None)
@given(some_costs())
def test_the_frontier_and_the_smallest_are_those_of_all(costs: Costs) -> None:
    """The curve has exactly the points that trying all leaves, and `smallest` is the first."""
    points: list[tuple[int, float, int]] = []
    for peak, seconds, flops in sorted((p, s, f) for s, f, p in (figures(costs, chosen) for chosen in choices(costs))):
        if not points or (seconds, flops) < points[-1][1:]:
            points.append((peak, seconds, flops))
    curve = frontier(costs)
    found = [figures(costs, taken(solution)) for solution in curve]
    assert [(peak, seconds, flops) for seconds, flops, peak in found] == points
    assert {solution.solver for solution in curve} == {"exact"}
    assert smallest(costs) == curve[0]


@settings(max_examples=60, deadline=None)
@given(some_costs(most=6), st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 25), st.integers(0, 60))
def test_host_memory_has_a_limit(costs: Costs, sizes: list[int], room: int, more: int) -> None:
    """No choice takes more of it than there is, a larger budget never costs more, and with enough the best is found."""
    turn = itertools.cycle(sizes)
    kinds = {
        name: replace(
            kind, options=(kind.options[0], *(replace(option, host_bytes=next(turn)) for option in kind.options[1:]))
        )
        for name, kind in costs.kinds.items()
    }
    hosted = replace(costs, kinds=kinds, host_memory=HostMemory(room, 1.0))
    least = smallest(hosted)
    before = math.inf
    for solution in (least, choose(hosted, least.peak_bytes), choose(hosted, least.peak_bytes + more)):
        assert sum(option.host_bytes for option in taken(solution)) <= room
        assert solution.seconds <= before
        before = solution.seconds
    enough = replace(hosted, host_memory=HostMemory(1000, 1.0))
    assert (
        choose(enough, least.peak_bytes + more).seconds
        == choose(replace(hosted, host_memory=None), least.peak_bytes + more).seconds
    )
    assert all(sum(o.host_bytes for o in taken(point)) <= room for point in frontier(hosted))


@pytest.mark.parametrize(("layers", "kinds"), [(40, 1), (30, 3), pytest.param(70, 3, marks=pytest.mark.nightly)])
def test_a_larger_stack_is_solved_close_to_the_best(monkeypatch, layers: int, kinds: int) -> None:
    """Within 0.1 % of the step of what four times as many choices find, never above the budget, falling with it."""
    costs = stack(layers, kinds)
    least, most = smallest(costs).peak_bytes, figures(costs, taken(frontier(costs)[-1]))[2]
    budgets = [int(least + share * (most - least)) for share in (0.0, 0.1, 0.5, 1.0)]
    found = [choose(costs, budget) for budget in budgets]
    assert all(
        figures(costs, taken(solution))[2] == solution.peak_bytes <= budget
        for solution, budget in zip(found, budgets, strict=True)
    )
    assert [solution.seconds for solution in found] == sorted((solution.seconds for solution in found), reverse=True)
    assert found[-1].seconds == 0
    assert "near the best" in found[1].solver
    monkeypatch.setattr(solve, "WIDTH", 4 * solve.WIDTH)
    for at in (1, 2):
        assert found[at].seconds <= choose(costs, budgets[at]).seconds + 0.001 * costs.step_seconds


@settings(max_examples=40, deadline=None)
@given(some_costs(most=9), st.integers(0, 60), st.integers(0, 60), st.integers(3, 6))
def test_a_larger_budget_never_costs_more(costs: Costs, more: int, yet_more: int, width: int) -> None:
    """Seconds fall as the budget grows, the least budget is the same, however few choices are kept."""
    least = smallest(costs).peak_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solve, "WIDTH", width)
        found = [choose(costs, budget) for budget in (least, least + more, least + more + yet_more)]
        assert smallest(costs).peak_bytes == least
    seconds = [solution.seconds for solution in found]
    assert seconds == sorted(seconds, reverse=True)
    assert found[0].peak_bytes == least


def test_groups_of_layers_are_chosen_where_only_they_fit() -> None:
    """A group stands in the forward of its first layer and the backward of its last."""
    one, two = Option((Choice(("",)),), 10, 30, 30, 1.0), Option((Choice(("",)),), 10, 60, 60, 2.5, span=2)
    costs = Costs({"a": Kind((one, two))}, tuple(Segment(f"{i}", "a", 0, 0) for i in range(100)))
    for budget, groups in ((545, 48), (560, 46), (1020, 0)):
        solution = choose(costs, budget)
        assert sum(option == two for option in solution.options) == 2 * groups
        assert solution.seconds == 100 + groups / 2


def test_ties_go_to_fewer_flops_then_a_smaller_peak_then_the_simpler_option() -> None:
    """Among choices of equal cost the order is FLOPs, peak, no region, fewer kept calls."""

    def chosen(*options: Option) -> Option:
        return choose(Costs({"a": Kind(options)}, (Segment("x", "a", 0, 0),)), 100).options[0]

    plain = Option((), 10, 20, 20, 0.0, flops=1)
    fewer_flops, smaller = (
        Option((Choice(("",), ("a",)),), 10, 30, 30, 0.0),
        Option((Choice(("",), ("a", "b")),), 10, 25, 25, 0.0),
    )
    assert chosen(plain, fewer_flops) == fewer_flops
    assert chosen(plain, fewer_flops, smaller) == smaller
    same = [
        Option((Choice(("",), ("a",)),), 10, 20, 20, 0.0),
        Option((Choice(("",)),), 10, 20, 20, 0.0),
        Option((), 10, 20, 20, 0.0),
    ]
    assert chosen(*same) == same[2]
    assert chosen(*same[:2]) == same[1]


GOOD = Option((), 1, 2, 2, 0.0)
NODE = Node(1.0, 1, (-1,))


@pytest.mark.parametrize(
    ("costs", "said"),
    [
        (Costs({}, ()), "no segment"),
        (Costs({"a": Kind(())}, (Segment("x", "a", 0, 0),)), "single segment"),
        (Costs({"a": Kind((replace(GOOD, span=2),))}, (Segment("x", "a", 0, 0),)), "single segment"),
        (Costs({"a": Kind((GOOD,))}, (Segment("x", "b", 0, 0),)), "of kind 'b'"),
        (Costs({"a": Kind((GOOD,))}, (Segment("x", "a", -1, 0),)), "segment 'x' are not whole"),
        (Costs({"a": Kind((GOOD,))}, (Segment("x", "a", 0, 0),), (Point(2, 0),)), "after 2 of 1 segments"),
        (Costs({"a": Kind((GOOD,))}, (Segment("x", "a", 0, 0),), (Point(1, -1),)), "bytes of a point"),
        (Costs({"a": Kind((GOOD,))}, (Segment("x", "a", 0, 0),), turn_bytes=-1), "turn_bytes"),
        *(
            (Costs({"a": Kind((GOOD, replace(GOOD, **bad)))}, (Segment("x", "a", 0, 0),)), said)
            for bad, said in [
                ({"saved_bytes": 3}, "saves more"),
                ({"forward_bytes": 2.5}, "2.5 is no int"),
                ({"seconds": float("nan")}, "negative or no number"),
                ({"seconds": float("inf")}, "negative or no number"),
                ({"flops": -1}, "not whole"),
                ({"span": 0}, "takes no segment"),
            ]
        ),
        *(
            (Costs({"a": Kind((GOOD,), graph)}, (Segment("x", "a", 0, 0),)), said)
            for graph, said in [
                (Graph((NODE,), 1, 0), "no operation 1"),
                (Graph((replace(NODE, inputs=(0,)),), 0, 0), "does not come before"),
                (Graph((replace(NODE, seconds=-1.0),), 0, 0), "negative or no number"),
            ]
        ),
    ],
)
def test_costs_that_cannot_be_are_refused(costs: Costs, said: str) -> None:
    """Where a profile is read from a file each rule for costs is looked at, and the one that is broken is named."""
    with pytest.raises(errors.ArgumentError, match=said):
        Profile.from_json(Profile("Net", "h100", costs, 100).to_json())
