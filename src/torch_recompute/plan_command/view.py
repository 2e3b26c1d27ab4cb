"""What `torch-recompute plan` looks like on a terminal: the task, and the plan's own table or that of the curve.

rich decides about colours and widths. It is imported late, so that `--json` works without rich.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from .._face import new_console
from ..plan.plan import Plan
from ..plan.profile import Profile
from .task import Task

GIB = 2**30


def show(task: Task, profile: Profile, plans: Sequence[Plan], *, curve: bool) -> None:
    """Print the plan, or the curve."""
    console = new_console(highlight=False, soft_wrap=True)
    console.print(str(task), style="bold")
    if curve:
        _curve(console, profile, plans)
    else:
        console.print(str(plans[0]), markup=False)
    for path, why in profile.left_out:
        console.print(f"not planned: {path} {why}", style="dim", markup=False)
    if curve and profile.advice:
        console.print(f"with no region: {profile.advice}", style="yellow", markup=False)


def _curve(console: Console, profile: Profile, plans: Sequence[Plan]) -> None:
    plain = profile.costs.step_seconds
    console.print(
        f"with no region: peak {profile.plain_peak_bytes / GIB:,.2f} GiB, step {1000 * plain:,.1f} ms on "
        f"{profile.device}"
    )
    if profile.loop is not None:
        console.print(f"counted: {profile.loop}")
    table = Table(box=box.SIMPLE)
    for title in ("budget GiB", "step ms", "more", "replayed GFLOP", "regions", "from the best"):
        table.add_column(title, justify="right")
    for plan in plans:
        promise = plan.prediction
        assert promise is not None
        table.add_row(
            f"{promise.budget_bytes / GIB:,.2f}",
            f"{1000 * promise.step_seconds:,.1f}",
            f"{promise.step_seconds / plain - 1:+.1%}",
            f"{promise.replay_flops / 1e9:,.1f}",
            str(len(plan)),
            f"{promise.gap:.1%}",
        )
    console.print(table)
    console.print(
        "From the best: no schedule within the budget saves more than this of the step. A row follows from one "
        "profile; --budget also simulates the plan that it prints."
    )
