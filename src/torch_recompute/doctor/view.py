"""What `torch-recompute doctor` looks like on a terminal.

rich decides about colours and widths. It is imported late, so that `--json` works without rich.
"""

from __future__ import annotations

from rich.padding import Padding
from rich.text import Text

from .._face import new_console
from ..checking.checks import Report
from ..plan_command.task import Task


def show(task: Task, report: Report) -> None:
    """Print the findings."""
    console = new_console(highlight=False)
    console.print(str(task), style="bold", markup=False, soft_wrap=True)
    for finding in report.findings:
        console.print(Text.assemble("\n", (finding.kind, "bold red"), "  ", (finding.where, "cyan")))
        for word, text, style in (
            ("", finding.seen, ""),
            ("confirmed  ", finding.confirmed, "dim"),
            ("write  ", finding.write, "green"),
        ):
            console.print(Padding(Text.assemble((word, "bold"), (text, style)), (0, 0, 0, 4), expand=False))
    console.print(f"\n{report.summary()}", style="bold")
    for reason in report.reasons():
        console.print(reason, style="dim", markup=False)
