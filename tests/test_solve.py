"""Solvers: the best choice within a budget, for costs drawn at random and tried out in full."""

import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costs import choices, figures, some_costs, stack, taken
from torch_recompute import errors
from torch_recompute.plan.bound import bound
from torch_recompute.plan.cost import Costs, Graph, Host, Kind, Node, Option, Point, Segment
from torch_recompute.plan.solve import choose, frontier, smallest
from torch_recompute.plan.solvers import search
from torch_recompute.plan.solvers.auto import AutoSolver
from torch_recompute.plan.solvers.columns import Columns
from torch_recompute.plan.solvers.labels import Labels, extended, undominated
from torch_recompute.plan.solvers.problem import Problem


def between(costs: Costs, share: float) -> int:
    """A budget, as a share of the way from the least feasible to that of no region."""
    least = smallest(costs).peak_bytes
    most = figures(costs, tuple(costs.kinds[segment.kind].options[0] for segment in costs.segments))[2]
    return int(least + share * (most - least))


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
        assert "exact" in solution.solver
    with pytest.raises(errors.BudgetError) as caught:
        choose(costs, peaks[0] - 1)
    assert caught.value.smallest == peaks[0]
    assert caught.value.solution == smallest(costs)


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
    assert {solution.solver for solution in curve} == {"curve: exact"}
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
    hosted = replace(costs, kinds=kinds, host=Host(room, 1.0))
    least = smallest(hosted)
    before = math.inf
    for solution in (least, choose(hosted, least.peak_bytes), choose(hosted, least.peak_bytes + more)):
        assert sum(option.host_bytes for option in taken(solution)) <= room
        assert solution.seconds <= before
        before = solution.seconds
    enough = replace(hosted, host=Host(1000, 1.0))
    assert (
        choose(enough, least.peak_bytes + more).seconds
        == choose(replace(hosted, host=None), least.peak_bytes + more).seconds
    )
    assert all(sum(o.host_bytes for o in taken(point)) <= room for point in frontier(hosted))


@settings(max_examples=40, deadline=None)
@given(some_costs(most=9), st.integers(0, 60), st.integers(0, 60))
def test_a_larger_budget_never_costs_more(costs: Costs, more: int, yet_more: int) -> None:
    """Seconds fall as the budget grows."""
    least = smallest(costs).peak_bytes
    seconds = [choose(costs, budget).seconds for budget in (least, least + more, least + more + yet_more)]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize(("layers", "kinds"), [(40, 1), (30, 3), (300, 1), (70, 3)])
def test_a_larger_stack_is_solved_close_to_the_bound(layers: int, kinds: int) -> None:
    """Stacks are solved exactly, or in blocks within 0.2 % of the best step, never above the budget."""
    costs = stack(layers, kinds)
    before = float("inf")
    for share in (0.0, 0.1, 0.5, 1.0):
        budget = between(costs, share)
        solution = choose(costs, budget)
        assert figures(costs, taken(solution))[2] == solution.peak_bytes <= budget
        assert solution.seconds <= before
        before = solution.seconds
        within = re.search(r"within ([0-9.]+) % of the best", solution.solver)
        assert float(within[1]) <= 0.2 if within else "exact" in solution.solver


@pytest.mark.parametrize("kinds", [1, 2])
def test_blocks_reach_the_least_budget_and_lose_nothing_that_counts(kinds: int) -> None:
    """Tied layers reach the same least peak and, on a stack small enough to be solved exactly, nearly the same cost."""
    costs = stack(64, kinds)
    for share in (0.0, 0.05, 0.3, 0.7):
        budget = between(costs, share)
        tied, exact = choose(costs, budget, "blocks"), choose(costs, budget, "labels")
        assert "by blocks" in tied.solver
        assert figures(costs, taken(tied))[2] == tied.peak_bytes <= budget
        assert exact.seconds <= tied.seconds <= 1.002 * exact.seconds


def test_spans_fill_blocks_as_well() -> None:
    """Where only groups of layers fit, blocks are made of groups."""
    one, two = Option((("", ()),), 10, 30, 30, 1.0), Option((("", ()),), 10, 60, 60, 2.5, span=2)
    costs = Costs({"a": Kind((one, two))}, tuple(Segment(f"{i}", "a", 0, 0) for i in range(100)))
    for budget in (545, 560):
        tied, exact = choose(costs, budget, "blocks"), choose(costs, budget, "labels")
        assert "by blocks" in tied.solver
        assert two in tied.options
        assert tied.seconds == exact.seconds


def test_a_search_without_room_says_how_far_it_may_be(monkeypatch) -> None:
    """A search that had to drop labels fits the budget and names a distance that contains the best."""
    costs = stack(30, 3)
    budget = between(costs, 0.3)
    exact = choose(costs, budget)
    monkeypatch.setattr(search, "BEAMS", (2,))
    narrow = choose(costs, budget)
    within = re.search(r"within ([0-9.]+) % of the best", narrow.solver)
    assert "exact" not in narrow.solver
    assert narrow.peak_bytes <= budget
    share = float(within[1]) / 100
    assert 0 < narrow.seconds - exact.seconds <= (share + 1e-6) * (costs.step_seconds + narrow.seconds)


def test_the_work_does_not_grow_faster_than_the_layers() -> None:
    """Three times as many equal layers in blocks keep no more than twice the labels."""

    def labels(layers: int) -> int:
        costs = stack(layers)
        found = [re.search(r"(\d+) labels", choose(costs, between(costs, share)).solver) for share in (0.3,)]
        return sum(int(count[1]) for count in found)

    assert labels(780) <= 2 * labels(260)


def test_ties_go_to_fewer_flops_then_a_smaller_peak_then_the_simpler_option() -> None:
    """Among choices of equal cost the order is FLOPs, peak, no region, fewer kept calls."""

    def chosen(*options: Option) -> Option:
        return choose(Costs({"a": Kind(options)}, (Segment("x", "a", 0, 0),)), 100).options[0]

    plain = Option((), 10, 20, 20, 0.0, flops=1)
    fewer_flops, smaller = Option((("", ("a",)),), 10, 30, 30, 0.0), Option((("", ("a", "b")),), 10, 25, 25, 0.0)
    assert chosen(plain, fewer_flops) == fewer_flops
    assert chosen(plain, fewer_flops, smaller) == smaller
    same = [Option((("", ("a",)),), 10, 20, 20, 0.0), Option((("", ()),), 10, 20, 20, 0.0), Option((), 10, 20, 20, 0.0)]
    assert chosen(*same) == same[2]
    assert chosen(*same[:2]) == same[1]


def test_the_automatic_solver_can_be_asked() -> None:
    """`select` names the solver for the costs and gives the reason, whatever the budget."""
    solver, why = AutoSolver().select(Problem(stack(40)))
    assert (solver.name, why) == ("labels", "no run of equal layers is long, so each segment is chosen by itself")
    solver, why = AutoSolver().select(Problem(stack(300)))
    assert (solver.name, why) == (
        "blocks",
        "284 of 300 segments lie inside long runs of equal layers, or of equal turns",
    )


@settings(max_examples=20, deadline=None)
@given(some_costs(), st.integers(0, 100))
def test_an_integer_program_agrees(costs: Costs, more: int) -> None:
    """HiGHS, which shares no idea with the labels, finds the same seconds."""
    pytest.importorskip("highspy", reason="the integer program is solved by the package highspy")
    budget = smallest(costs).peak_bytes + more
    assert choose(costs, budget, "highs").seconds == pytest.approx(choose(costs, budget).seconds, abs=1e-6)


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
                ({"forward_bytes": 2.5}, "not whole"),
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
    """Each rule for costs is looked at before anything is solved, and the one that is broken is named."""
    with pytest.raises(errors.ArgumentError, match=said):
        choose(costs, 100)
    with pytest.raises(errors.ArgumentError, match=said):
        bound(costs, 100)


def test_no_move_may_stand_before_any_label() -> None:
    """Where the bound rules out every pair of a move and a label, there are no labels, rather than an empty list."""
    problem = Problem(stack(3))
    columns = Columns(problem)
    last = [None, None, None, Labels.last(problem)]
    none = extended(problem, columns, last, 2, lambda _, column: np.zeros((len(column.moves), 1), dtype=bool))
    assert undominated(none) is None
    assert undominated(extended(problem, columns, last, 2)) is not None
