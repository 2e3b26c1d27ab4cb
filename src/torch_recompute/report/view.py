"""What `torch-recompute report` looks like on a terminal: the step with the plan, and what other plans would take.

rich decides about colours and widths. It is imported late, so that `--json` works without rich.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table

from .._face import new_console

MIB = 2**20


def show(data: Mapping[str, Any]) -> None:
    """Print what a report says."""
    console = new_console(highlight=False, soft_wrap=True)
    steps, names = data["steps"], data["names"]
    chosen, plain = steps[data["chosen"]], steps[data["plain"]]
    console.print(data["title"], style="bold", markup=False)
    at = chosen["peak"]
    phase, module, op = (names[chosen["samples"][key][at]] for key in ("phase", "module", "op"))
    where = f"{phase}{f' of {module}' if module else ''}{f' ({op})' if op else ''}"
    console.print(f"the peak with the plan is in {where}:", markup=False)
    for layer, series in chosen["samples"]["layers"].items():
        if series[at]:
            console.print(f"{series[at] / MIB:14,.2f} MiB  {layer}")
    hosted = any(step["host_bytes"] for step in steps)
    if chosen["host_bytes"]:
        console.print(f"{chosen['host_bytes'] / MIB:14,.2f} MiB  in host memory at most, beside the device's")
    table = Table(box=box.SIMPLE)
    for title in ("", "peak MiB", "step ms", "more", "replays ms", "regions", *(["host MiB"] if hosted else [])):
        table.add_column(title, justify="right" if title else "left")
    for step in steps:
        table.add_row(
            step["name"],
            f"{step['peak_bytes'] / MIB:,.1f}",
            f"{1000 * step['step_seconds']:,.2f}",
            f"{step['step_seconds'] / plain['step_seconds'] - 1:+.1%}" if plain["step_seconds"] else "",
            f"{1000 * step['replay_seconds']:,.2f}",
            str(step["regions"]),
            *([f"{step['host_bytes'] / MIB:,.1f}"] if hosted else []),
            style="bold" if step is chosen else "",
        )
    console.print(table)
    console.print(f"counted: {data['counted']}", markup=False)
    for note in filter(None, [chosen["advice"], *data["notes"]]):
        console.print(note, style="yellow", markup=False)
