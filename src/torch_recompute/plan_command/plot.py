"""The curve of budget against seconds as a picture.

Drawn without pyplot, so no window system and no global state is touched. matplotlib is imported late.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..plan.plan import Plan
from ..plan.profile import Profile

GIB = 2**30


def draw(path: Path, profile: Profile, plans: Sequence[Plan], title: str) -> None:
    """Draw the curve, the bound below it, and the step with no region."""
    from matplotlib.figure import Figure

    promises = [plan.prediction for plan in plans if plan.prediction is not None]
    budgets = [promise.budget_bytes / GIB for promise in promises]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(budgets, [1000 * promise.step_seconds for promise in promises], "o-", label="plans")
    bound = [1000 * promise.bound_seconds for promise in promises]
    axes.plot(budgets, bound, ":", color="#9a9a9a", label="no schedule takes less")
    axes.plot([profile.plain_peak_bytes / GIB], [1000 * profile.costs.step_seconds], "s", label="no region")
    axes.set_xlabel("peak of the step, GiB")
    axes.set_ylabel(f"step, ms on {profile.device}")
    axes.set_title(title, fontsize=8, wrap=True)
    axes.legend()
    figure.savefig(path, dpi=150)
