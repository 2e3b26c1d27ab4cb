"""What the comparison looks like: a table of the peers' points with ours beside them, one of our budgets, the verdict.

rich decides about colours; this file decides only what is in the tables. It is imported late, so that everything
else works without rich.
"""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from torch_recompute.commands.output import new_console

from .result import Between, Match, Point, Result

MIB = 2**20
NOTHING = "–"


def show(result: Result) -> None:
    """Print the tables."""
    console = new_console(highlight=True)
    config = result.config
    console.print(
        f"\n{config.model}: {config.layers} layers, width {config.width}, {config.batch} x {config.tokens} tokens",
        style="bold",
        highlight=False,
    )
    matches = {match.peer.title: match for match in result.matches}
    table = _table("peer", "peak\nMiB", "replays\n%", "time\nx", "same\ngrads", "ours\n%", "ours\ntime x")
    for point in result.peers:
        table.add_row(*_figures(point), *_matched(matches.get(point.title)))
    console.print(table)
    table = _table("ours", "peak\nMiB", "replays\n%", "time\nx", "same\ngrads", "best peer\n%", "which")
    for entry in result.between:
        table.add_row(*_figures(entry.ours), *_best(entry))
    console.print(table)
    for line in result.verdict:
        console.print(f"- {line}", highlight=False)
    for point in result.broken:
        console.print(f"BROKEN PROMISE: {point}", style="bold red", soft_wrap=True, highlight=False)
    how = result.how
    for label in ("peak", "replay", "times", "gradients", "price"):
        console.print(f"{label.capitalize()}: {how[label]}.", highlight=False)


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    for heading in headings:
        left = heading in ("peer", "ours", "which")
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    return table


def _figures(point: Point) -> list[str | Text]:
    apart = point.gradient_difference
    return [
        point.title,
        f"{point.peak_bytes / MIB:.2f}",
        f"{point.replay_percent:.2f}",
        f"{point.time_ratio:.2f}",
        Text(f"{apart:.0e}", style="bold red") if apart else "yes",
    ]


def _matched(match: Match | None) -> list[str | Text]:
    if match is None or match.ours is None:
        return [NOTHING, NOTHING]
    style = "green" if match.no_more_flops else "red"
    return [Text(f"{match.ours.replay_percent:.2f}", style=style), f"{match.time_ratio:.2f}"]


def _best(entry: Between) -> list[str | Text]:
    return [NOTHING, "none fits"] if entry.peer is None else [f"{entry.peer.replay_percent:.2f}", entry.peer.title]
