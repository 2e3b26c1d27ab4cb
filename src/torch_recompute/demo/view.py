"""What the demonstration looks like at its end: one table on stdout.

rich decides about colours (`NO_COLOR`, a pipe, an old terminal); this file decides only what stands in the table. It
is imported late, so that everything else works without rich.
"""

from __future__ import annotations

from collections.abc import Callable
from textwrap import wrap

from rich import box
from rich.table import Table
from rich.text import Text

from .._face import new_console
from .training import Outcome, Result

MIB = 2**20
COLUMN = len("recomputed")


def show(result: Result) -> None:
    """Print the table, and loudly any loss that differs."""
    console = new_console()
    config = result.config
    table = Table(box=box.SIMPLE)
    table.add_column("", no_wrap=True)
    for outcome in result.outcomes:
        table.add_column("\n".join(wrap(outcome.title, COLUMN)), justify="right")

    def row(label: str, cell: Callable[[Outcome], str | Text], *, last: bool = False) -> None:
        table.add_row(label, *(cell(outcome) for outcome in result.outcomes), end_section=last)

    def mebibytes(category: str) -> Callable[[Outcome], str]:
        return lambda outcome: f"{outcome.by_category[category] / MIB:.1f}"

    row("peak MiB", lambda outcome: Text(f"{outcome.peak_bytes / MIB:.1f}", style="bold"))
    row("  predicted", _predicted)
    for category in ("activations", "parameters", "gradients", "optimizer"):
        row(f"  {category}", mebibytes(category), last=category == "optimizer")
    row("seconds per step", lambda outcome: f"{outcome.step_seconds:.3f}")
    row("recomputed GFLOP", lambda outcome: f"{outcome.recomputed_flops / 1e9:.2f}")
    row("  of a plain step", lambda outcome: f"{outcome.recomputed_percent:.1f}%", last=True)
    row("first loss", lambda outcome: f"{outcome.losses[0]:.4f}")
    row("last loss", lambda outcome: f"{outcome.losses[-1]:.4f}")
    row("same bits", lambda outcome: Text("yes", style="green") if outcome.identical else Text("NO", style="bold red"))
    console.print(
        f"GPT of {config.layers} layers, d_model {config.d_model}, {result.parameters:,} parameters; "
        f"{config.steps} steps of {config.batch} x {config.seq} bytes of {result.text}",
        style="bold",
        highlight=False,
    )
    console.print(table)
    console.print(
        "MiB: at the peak of a step. Same bits: the losses of all steps equal those without recomputation "
        "to the last bit.",
        highlight=False,
    )
    for outcome in result.outcomes:
        if outcome.predicted_peak_bytes is not None:
            console.print(
                f"{outcome.title.capitalize()}: the plan predicts a peak of {outcome.predicted_peak_bytes:,} bytes, "
                f"measured were {outcome.peak_bytes:,}.",
                highlight=False,
            )
        if outcome.first_difference is not None:
            at = outcome.first_difference
            mine, theirs = outcome.losses[at], result.outcomes[0].losses[at]
            console.print(
                f"NOT IDENTICAL: {outcome.title}: the loss of step {at + 1} is {mine!r} ({mine.hex()}), "
                f"without recomputation it is {theirs!r} ({theirs.hex()}).",
                style="bold red",
                soft_wrap=True,
                highlight=False,
            )


def _predicted(outcome: Outcome) -> str:
    predicted = outcome.predicted_peak_bytes
    return "-" if predicted is None else f"{predicted / MIB:.1f}"
