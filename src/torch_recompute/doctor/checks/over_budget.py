"""A step that does not fit into the budget, and the nearest plan that does."""

from __future__ import annotations

from collections.abc import Iterator

from ... import errors
from ..check import Check, Evidence
from ..finding import Finding
from ..words import budget_word, mib


class OverBudget(Check):
    """Compares the peak of a simulated step with the budget."""

    kind = "over_budget"
    needs = ("simulated",)

    def why_not(self, evidence: Evidence) -> str:
        """As of any check; and there must be a budget."""
        return super().why_not(evidence) or ("no budget was given" if evidence.budget is None else "")

    def look(self, evidence: Evidence) -> Iterator[Finding]:
        """One finding, with what the planner says."""
        assert evidence.simulated is not None
        assert evidence.budget is not None
        step, budget = evidence.simulated.step, evidence.budget
        if step.peak_bytes <= budget:
            return
        where = f" of {step.peak.module}" if step.peak.module else ""
        kinds = ", ".join(f"{name} {mib(count)}" for name, count in step.by_category.items() if count)
        yield self.found(
            evidence.name,
            f"the peak is {mib(step.peak_bytes)}, {mib(step.peak_bytes - budget)} more than the budget, in "
            f"{step.peak.phase}{where}: {kinds}.",
            f"one simulated step, counted: {step.loop}.",
            _write(evidence, budget),
            peak_bytes=step.peak_bytes,
            budget_bytes=budget,
        )


def _write(evidence: Evidence, budget: int) -> str:
    if evidence.best is None:
        return f'apply(model, make_plan(model, batch, budget="{budget_word(budget)}")).'
    try:
        plan = evidence.best(budget)
    except errors.BudgetError as error:
        return (
            f"a smaller batch, or an optimizer with less state, or shard the model: no plan takes less than "
            f"{mib(error.smallest)}."
        )
    except errors.ArgumentError as error:
        return f"recompute(fn) around its largest parts: the planner cannot plan it ({str(error).splitlines()[0]})"
    promise = plan.prediction
    assert promise is not None
    return (
        f'apply(model, make_plan(..., budget="{budget_word(budget)}")): {len(plan)} regions, a peak of '
        f"{mib(promise.peak_bytes)}, a step that takes {promise.step_seconds / promise.plain_step_seconds - 1:+.1%}."
    )
