"""What `torch-recompute show` looks like on a terminal: the tree of units, and the labels that match.

rich decides about colours and widths; this file decides only what stands where. It is imported late, so that `--json`
works without rich.
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.text import Text

from .._face import new_console
from ..plan.anatomy import Units


def show(units: Units, labels: Mapping[str, tuple[str, ...]], counts: Mapping[str, int]) -> None:
    """Print the tree, and how many regions each label makes."""
    console = new_console()
    stacks = ", ".join(
        f"{stack or 'the model'} {sum(u.stack == stack for u in units.layers)}" for stack in units.stacks
    )
    console.print(f"{units.model}; layers: {stacks or 'none'}", style="bold", highlight=False, soft_wrap=True)
    for line in units.lines({path: " ".join(words) for path, words in labels.items()}):
        text = Text("  " * (line.depth + 1)).append(line.name, style="bold" if line.depth == 0 else "")
        if line.times > 1:
            text.append(f" x {line.times}", style="bold")
        text.append(f": {', '.join(line.roles)} ").append(f"({line.cls})", style="dim")
        if line.note:
            text.append(f"  [{line.note}]", style="green")
        console.print(text, soft_wrap=True)
    matches = ", ".join(f"{label} {count}" for label, count in counts.items())
    console.print(
        f"labels that match, with their number of regions: {matches or 'none'}", highlight=False, soft_wrap=True
    )
