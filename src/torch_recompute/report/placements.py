"""The table of placements: what becomes of each part of the model, what that frees and what it costs.

A plan that was made for a budget carries this table (`Prediction.lines`), and it is taken as it is, as long as the
step is the one that was planned. For any other plan (a configuration's, one written by hand) the rows follow from two
simulations, with the plan and without: what a region keeps and frees are the bytes that the modules in it made and
left for backward, what it costs are the seconds of replays in them.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from ..plan.anatomy import inside
from ..plan.plan import Choice, Plan, stored_in
from ..plan.prediction import Line, Prediction
from ..plan.sizes import Sizes, parameters, size_of
from .timed import Timed


def in_force(
    plan: Plan, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Choice, ...], Prediction | None]:
    """The choices that a call goes by, and what was promised for them."""
    number = Sizes(plan).number(size_of(parameters(model), args, kwargs))
    if number < len(plan.sizes):
        return plan.sizes[number].choices, plan.sizes[number].prediction
    return plan.choices, plan.prediction


def rows(choices: tuple[Choice, ...], prediction: Prediction | None, step: Timed, plain: Timed) -> tuple[Line, ...]:
    """The table.

    Args:
        choices: What holds in the step.
        prediction: What was promised.
        step: The step with the choices.
        plain: The step without.
    """
    if prediction is not None and prediction.peak_bytes == step.simulation.peak_bytes:
        return prediction.lines
    groups: dict[tuple[str, str], list[Choice]] = {}
    for choice in choices:
        groups.setdefault((re.sub(r"\d+", "*", ", ".join(choice.paths)), _what(choice)), []).append(choice)
    return tuple(_line(pattern, what, alike, step, plain) for (pattern, what), alike in groups.items())


def _line(pattern: str, what: str, choices: list[Choice], step: Timed, plain: Timed) -> Line:
    """One row, its figures the mean of regions that are treated alike."""
    paths = [path.partition("@")[0] for choice in choices for path in choice.paths]
    count = len(choices)
    kept = _sum(step.simulation.saved_by_module, paths)
    return Line(
        pattern if count > 1 else ", ".join(choices[0].paths),
        count,
        what,
        round(kept / count),
        round(max(0, _sum(plain.simulation.saved_by_module, paths) - kept) / count),
        _sum(step.replayed, paths) / count,
        round(_sum(step.sent, paths) / count),
    )


def _sum(by_module: dict[str, Any], paths: list[str]) -> Any:
    return sum(value for module, value in by_module.items() if any(inside(module, path) for path in paths))


def _what(choice: Choice) -> str:
    together = f"{len(choice.paths)} together " if len(choice.paths) > 1 else ""
    kept = f" but not {', '.join(choice.keep)}" if choice.keep else ""
    stored = f"; inputs {stored_in(choice.store)}" if choice.store else ""
    asked = f" ({' '.join(choice.labels)})" if choice.labels else ""
    return f"{together}recomputed{kept}{stored}{asked}"
