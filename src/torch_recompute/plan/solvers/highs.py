"""An integer program, solved by HiGHS: a second opinion that shares no idea with the labels.

One yes-or-no variable per segment and option that may begin there. Each segment is in exactly one of the taken options,
and at each segment what was saved before it and what its option needs stay within the budget; at each point likewise.

HiGHS works in floats: constraints hold to its tolerance, ties are broken as it likes, and a thousand layers can take
minutes. If the exact bytes of its answer exceed the budget it is asked again with a budget as much smaller.
"""

from __future__ import annotations

import importlib
from typing import Any

from ... import errors
from ..cost import Option, Solution
from .problem import Problem
from .solver import Solver

# HiGHS is at home with numbers around one.
UNIT = 2**20


class HighsSolver(Solver):
    """HiGHS, if it is installed."""

    name = "highs"

    def solve(self, problem: Problem, budget: int) -> Solution:
        """The best choice, to the tolerances of HiGHS."""
        allowed = budget
        while True:
            chosen = _solved(problem, allowed)
            peak = problem.peak(chosen).bytes
            if peak <= budget:
                return problem.solution(chosen, "highs: optimal, to the tolerance of HiGHS")
            allowed -= peak - budget


def _solved(problem: Problem, budget: int) -> list[Option]:
    try:
        highspy: Any = importlib.import_module("highspy")
    except ImportError:
        raise errors.ArgumentError(
            'solver="highs" needs the package highspy, which is not installed.\n  Write: pip install highspy'
        ) from None
    size = len(problem)
    moves = [(index, option) for index in range(size) for group in problem.groups(index) for option in group.options]
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("mip_rel_gap", 0.0)
    highs.setOptionValue("mip_abs_gap", 0.0)
    highs.setOptionValue("threads", 1)
    unit = max((option.seconds for _, option in moves), default=0.0) or 1.0
    taken = [highs.addBinary(obj=option.seconds / unit) for _, option in moves]
    for index in range(size):
        covering = [x for (start, option), x in zip(moves, taken, strict=True) if start <= index < start + option.span]
        highs.addConstr(highs.qsum(covering) == 1)
    for index in range(size + 1):
        saved = [
            (option.saved_bytes / UNIT) * x for (start, option), x in zip(moves, taken, strict=True) if start < index
        ]
        own = [
            (problem.own(index, option) / UNIT) * x
            for (start, option), x in zip(moves, taken, strict=True)
            if start == index
        ]
        if own:
            highs.addConstr(highs.qsum([*saved, *own]) <= budget / UNIT)
        if saved and problem.points[index]:
            highs.addConstr(highs.qsum(saved) <= (budget - problem.points[index]) / UNIT)
    highs.minimize()
    values = highs.getSolution().col_value
    return [option for (_, option), value in zip(moves, values, strict=True) if value > 0.5]
