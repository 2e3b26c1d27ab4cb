"""What `torch-recompute doctor` looks like on a terminal.

rich decides about colours and widths. It is imported late, so that `--json` works without rich.
"""

from __future__ import annotations

from rich.padding import Padding
from rich.text import Text

from .._face import new_console
from ..plan_command.task import Task
from .finding import Report


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
    count = len(report.findings)
    found = "nothing found" if not count else f"{count} finding{'' if count == 1 else 's'}"
    console.print(f"\n{found}; {len(report.looked_for)} kinds looked for", style="bold")
    reasons: dict[str, list[str]] = {}
    for kind, why in report.not_looked_for:
        reasons.setdefault(why, []).append(kind)
    for why, kinds in reasons.items():
        console.print(f"not looked for, because {why}: {', '.join(kinds)}", style="dim", markup=False)
