"""Which option each segment takes, so that a step fits into a budget and costs the fewest seconds: plain data in and out.

`choose` answers for one budget, `smallest` gives the least peak that any choice reaches, `frontier` the whole curve.
The constraints are those of `cost.py`: exact bytes, at every point of forward and backward. The answer is one that
those constraints, counted anew, say fits. A larger budget never costs more. Among choices that cost the same the one
with fewer FLOPs is taken, then the one with the smaller peak, then the simpler one.
"""

from __future__ import annotations

from .. import errors
from .cost import Costs, Solution
from .solvers.labels import LabelSolver
from .solvers.problem import Problem, starts


def choose(costs: Costs, budget: int, solver: str = "auto") -> Solution:
    """The choice that fits into a budget and costs the fewest seconds.

    Args:
        costs: What there is to choose from.
        budget: The most bytes that may live at any time of the step.
        solver: Which solver: "auto" is the one to use.

    Raises:
        BudgetError: Nothing fits; it carries the least budget for which something does, and the choice that does.
    """
    problem = Problem(costs)
    least = problem.needs[0]
    if budget < least:
        solution = LabelSolver().solve(problem, least)
        peak = problem.peak(starts(solution.options))
        raise errors.BudgetError(errors.over_budget(budget, least, peak.where, peak.fixed), least, solution)
    return LabelSolver().solve(problem, budget)


def smallest(costs: Costs) -> Solution:
    """The choice with the least peak, and of those the one that costs the fewest seconds."""
    problem = Problem(costs)
    return LabelSolver().solve(problem, problem.needs[0])
