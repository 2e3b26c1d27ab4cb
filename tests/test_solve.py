"""Solvers: the best choice within a budget, for programs of costs drawn at random and tried out in full."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costs import best, peak, some_costs
from torch_recompute import errors
from torch_recompute.plan.cost import Costs, Solution
from torch_recompute.plan.solve import choose, smallest


def starts(solution: Solution) -> tuple:
    chosen, index = [], 0
    while index < len(solution.options):
        chosen.append(solution.options[index])
        index += solution.options[index].span
    return tuple(chosen)


def figures(costs: Costs, solution: Solution) -> tuple[float, int, int]:
    chosen = starts(solution)
    assert peak(costs, chosen) == solution.peak_bytes
    return solution.seconds, sum(option.flops for option in chosen), solution.peak_bytes


@settings(max_examples=150, deadline=None)
@given(some_costs(), st.integers(0, 200))
def test_the_choice_is_the_best_of_all(costs: Costs, budget: int) -> None:
    """The choice has the seconds, FLOPs and peak of the best by trying all, and nothing fits where nothing does."""
    expected = best(costs, budget)
    if expected is None:
        with pytest.raises(errors.BudgetError):
            choose(costs, budget)
    else:
        solution = choose(costs, budget)
        assert figures(costs, solution) == expected
        assert "exact" in solution.solver


@settings(max_examples=50, deadline=None)
@given(some_costs())
def test_the_smallest_has_the_least_peak(costs: Costs) -> None:
    """`smallest` reaches the least peak of all choices, at the fewest seconds."""
    solution = smallest(costs)
    least = min(best(costs)[2], solution.peak_bytes)
    assert best(costs, least - 1) is None
    assert figures(costs, solution) == best(costs, least)
