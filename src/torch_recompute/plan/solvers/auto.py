"""The solver that is used unless another is asked for."""

from __future__ import annotations

from ..cost import Solution
from .columns import Columns
from .problem import Problem
from .search import LabelSolver
from .solver import Solver


class AutoSolver(Solver):
    """Labels for every segment, or in blocks where that would take long; `select` says which, and why.

    The choice looks at the costs alone. If it looked at the budget, or at the time that a solver took, a larger budget
    could meet a worse solver and cost more.
    """

    name = "auto"

    def select(self, problem: Problem) -> tuple[Solver, str]:
        """The solver that `solve` uses, and why."""
        tied = Columns(problem, tied=True).tied
        if tied:
            return LabelSolver(
                tied=True
            ), f"{tied} of {len(problem)} segments lie inside long runs of equal layers, or of equal turns"
        return LabelSolver(), "no run of equal layers is long, so each segment is chosen by itself"

    def solve(self, problem: Problem, budget: int) -> Solution:
        """What the selected solver answers."""
        solver, _ = self.select(problem)
        return solver.solve(problem, budget)
