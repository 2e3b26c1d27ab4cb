"""What every solver is."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ..cost import Solution
from .problem import Problem


class Solver(ABC):
    """A way to find the choice that costs the fewest seconds within a budget.

    Attributes:
        name: How a user asks for it.
    """

    name: str

    @abstractmethod
    def solve(self, problem: Problem, budget: int) -> Solution:
        """The best choice.

        Args:
            problem: What to choose from.
            budget: Bytes, no fewer than the least need of the whole (`problem.needs[0]`).
        """
