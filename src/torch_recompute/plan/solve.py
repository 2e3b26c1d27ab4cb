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
from .hosting import restrictions
from .repeated import tied
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


def _over_budget(budget: int, smallest: int, where: str, fixed: int) -> str:
    """Text for a budget that no choice fits into."""
    exact = "" if smallest < 2**10 else f" ({smallest} bytes)"
    return (
        f"budget={errors.size(budget)} is too small: no choice of what to recompute needs less than "
        f"{errors.size(smallest, up=True)}{exact}.\n"
        f"  With that choice the peak is {where}, where {errors.size(fixed)} are not for a plan to change: parameters, "
        "gradients, optimizer state and what lies between the planned modules.\n"
        f'  Pass budget="{errors.size(smallest, up=True).replace(" ", "")}" or more, or a smaller batch. The choice '
        "that "
        "needs the least is .solution of this error, and its bytes are .smallest."
    )


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
        raise errors.ArgumentError(
            f"solver={solver!r} is not a solver.\n  Write one of {', '.join(list(_SOLVERS))}; auto is the one to use."
        )
    problems = _problems(costs)
    fitting = [problem for problem in problems if problem.needs[0] <= budget]
    if not fitting:
        problem = min(problems, key=lambda problem: problem.needs[0])
        solution = _smallest(problem)
        peak = problem.peak(starts(solution.options))
        least = problem.needs[0]
        raise errors.BudgetError(_over_budget(budget, least, peak.where, peak.fixed), least, solution)
    return min((_SOLVERS[solver].solve(problem, budget) for problem in fitting), key=_by_cost)


def smallest(costs: Costs) -> Solution:
    """The choice with the least peak, and of those the one that costs the fewest seconds."""
    return min(map(_smallest, _problems(costs)), key=lambda solution: (solution.peak_bytes, *_by_cost(solution)))


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
    problems = _problems(costs)
    found = [point for problem in problems for point in curve(problem, Columns(problem, tied=True), most)]
    if len(problems) == 1:
        return found
    falling: list[Solution] = []
    for point in sorted(found, key=lambda point: (point.peak_bytes, *_by_cost(point))):
        if not falling or _by_cost(point)[:2] < _by_cost(falling[-1])[:2]:
            falling.append(point)
    return falling


def _problems(costs: Costs) -> list[Problem]:
    if find_spec("numpy") is None:
        raise errors.ArgumentError(
            "planning for a memory budget needs the package numpy, which is not installed.\n  Write: pip install numpy"
        )
    return [Problem(one) for restricted in restrictions(costs) for one in tied(restricted)]


def _by_cost(solution: Solution) -> tuple[float, int, int]:
    return solution.seconds, sum(option.flops for option in starts(solution.options)), solution.peak_bytes


def _smallest(problem: Problem) -> Solution:
    return AutoSolver().solve(problem, problem.needs[0])
