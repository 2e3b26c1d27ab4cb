"""Which option each segment takes, so that a step fits into a budget and costs the fewest seconds.

Plain data in and out. `choose` answers for one budget, `smallest` gives the least peak that any choice reaches,
`frontier` the whole curve. The constraints are those of `cost.py`: exact bytes, at every point of forward and backward.
The peak of an answer is counted anew from them. A larger budget never costs more. Among choices that cost the same the
one with fewer FLOPs is taken, then the one with the smaller peak, then the simpler one.
"""

from __future__ import annotations

from importlib.util import find_spec

from .. import errors
from .cost import Costs, Solution
from .solvers.auto import AutoSolver
from .solvers.columns import Columns
from .solvers.curve import curve
from .solvers.highs import HighsSolver
from .solvers.problem import Problem, starts
from .solvers.search import LabelSolver
from .solvers.solver import Solver

_SOLVERS: dict[str, Solver] = {
    solver.name: solver for solver in (AutoSolver(), LabelSolver(), LabelSolver(tied=True), HighsSolver())
}


def choose(costs: Costs, budget: int, solver: str = "auto") -> Solution:
    """The choice that fits into a budget and costs the fewest seconds.

    Args:
        costs: What there is to choose from.
        budget: The most bytes that may live at any time of the step.
        solver: "auto"; "labels", which is exact; "blocks", which ties the middle of long runs of equal layers;
            or "highs", an integer program, which needs the package highspy. What was used, and how exact it is, is in
            `Solution.solver`.

    Raises:
        BudgetError: Nothing fits; it carries the least budget for which something does, and the choice that does.
        ArgumentError: There is no such solver, or it or numpy is not installed, or the costs cannot be.
    """
    if solver not in _SOLVERS:
        raise errors.ArgumentError(errors.unknown_solver(solver, list(_SOLVERS)))
    problem = _problem(costs)
    least = problem.needs[0]
    if budget < least:
        solution = _smallest(problem)
        peak = problem.peak(starts(solution.options))
        raise errors.BudgetError(errors.over_budget(budget, least, peak.where, peak.fixed), least, solution)
    return _SOLVERS[solver].solve(problem, budget)


def smallest(costs: Costs) -> Solution:
    """The choice with the least peak, and of those the one that costs the fewest seconds."""
    return _smallest(_problem(costs))


def frontier(costs: Costs, most: int = 200) -> list[Solution]:
    """The whole curve of budget against seconds, from one pass.

    Args:
        costs: What there is to choose from.
        most: How many points at most, spread evenly along the curve.

    Returns:
        Choices by rising peak and falling seconds. The first has the least peak, the last costs the least. Each says
        how far it can be from the best for its peak; `choose` may find a better one for the same budget, unless it
        says "exact".
    """
    problem = _problem(costs)
    return curve(problem, Columns(problem, tied=True), most)


def _problem(costs: Costs) -> Problem:
    if find_spec("numpy") is None:
        raise errors.ArgumentError(errors.needs_numpy())
    return Problem(costs)


def _smallest(problem: Problem) -> Solution:
    return AutoSolver().solve(problem, problem.needs[0])
