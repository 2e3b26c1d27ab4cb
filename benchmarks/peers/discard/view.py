"""What the comparison looks like: a table for each number of layers and dtype, and what each figure is.

rich decides about colours (`NO_COLOR`, a pipe, an old terminal); this file decides only what is in the table. It
is imported late, so that everything else works without rich.
"""

from __future__ import annotations

from itertools import groupby

from rich import box
from rich.table import Table
from rich.text import Text

from torch_recompute.commands.output import new_console

from .blocks import layers
from .parity import Comparison
from .result import MIB, Result, Row

NOTHING = "–"


def show(result: Result) -> None:
    """Print the tables."""
    console = new_console(highlight=True)
    how = result.how
    for (dtype, n_layers), group in groupby(result.rows, key=lambda row: (row.dtype, row.n_layers)):
        console.print(f"\nDiscarding outputs: {layers(n_layers)}, {dtype}", style="bold", highlight=False)
        console.print(_table(list(group)))
    for label, key in (("Peak", "peak"), ("Extra FLOPs", "flops"), ("Times", "times")):
        console.print(f"{label}: {how[key]}.", highlight=False)
    console.print("Saved, extra and delta: against the baseline.", highlight=False)
    if any(row.published for row in result.rows):
        console.print(f"Publ.: {how['published']}.", highlight=False)
    if any(row.published and row.published.by_arithmetic for row in result.rows):
        console.print(f"~: {how['by_arithmetic']}.", highlight=False)


def _table(rows: list[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    table.add_column("", no_wrap=True)
    for heading in (
        *("peak\nMiB", "publ.\nMiB", "saved\n%", "extra\nFLOP%"),
        *("fwd\nms", "bwd\nms", "total\nms", "delta\n%", "publ.\n%"),
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for block, group in groupby(rows, key=lambda row: row.block):
        of_block = list(group)
        least = min(row.peak_bytes for row in of_block if row.peak_bytes is not None)
        table.add_row(Text(block, style="bold"))
        for row in of_block:
            table.add_row(*_cells(row, least), end_section=row is of_block[-1])
    return table


def _cells(row: Row, least: int) -> list[str | Text]:
    peak = row.peak_bytes
    known = row.published
    style = "bold green" if peak == least else ""
    return [
        "  " + row.title,
        NOTHING if peak is None else Text(f"{peak / MIB:.1f}", style=style),
        NOTHING if known is None else "~" * known.by_arithmetic + f"{known.peak_mib:.1f}",
        _number(row.saved_percent),
        _number(row.extra_flops_percent),
        *(_milliseconds(value) for value in (row.forward_seconds, row.backward_seconds, row.total_seconds)),
        _number(row.time_delta_percent, "+"),
        _number(None if known is None else known.time_delta_percent, "+"),
    ]


def _number(value: float | None, sign: str = "") -> str:
    if value is None:
        return NOTHING
    return f"{value:{sign}.0f}" if abs(value) >= 1000 else f"{value if abs(value) >= 0.05 else 0.0:{sign}.1f}"


def _milliseconds(seconds: float | None) -> str:
    return _number(None if seconds is None else 1000 * seconds)


def show_parity(comparisons: list[Comparison]) -> None:
    """Print one line per stack and form, and loudly what differs."""
    console = new_console(highlight=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    for heading in ("block", "layers", "dtype", "form", "tensors", "difference", "allowed", ""):
        right = heading in ("layers", "tensors", "difference", "allowed")
        table.add_column(heading, no_wrap=True, justify="right" if right else "left")
    for entry in comparisons:
        table.add_row(
            entry.block,
            str(entry.n_layers),
            entry.dtype,
            entry.title,
            str(entry.tensors),
            f"{entry.difference:.1e}" if entry.difference else "0",
            entry.allowed,
            Text("yes", style="green") if entry.passed else Text("NO", style="bold red"),
        )
    console.print(table)
    for entry in comparisons:
        if not entry.passed:
            console.print(
                f"DIFFERENT: {entry.block}, {layers(entry.n_layers)}, {entry.dtype}, {entry.title}: {entry.worst} "
                f"differs from the plain stack's by {entry.difference:.3e} of its largest element; allowed is "
                f"{entry.allowed}.",
                style="bold red",
                soft_wrap=True,
                highlight=False,
            )
    failed = sum(not entry.passed for entry in comparisons)
    console.print(
        f"Outputs and gradients against the plain stack: {len(comparisons)} comparisons, {failed} with a difference. "
        "Differences are relative to the largest element.",
        highlight=False,
    )
