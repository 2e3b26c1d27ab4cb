"""Reports of what a plan's regions drop and cost, as plain data and as a table.

A region that drops less than 1 % of the bytes per share of the time is marked, with the reason. What of the dropped
bytes something else holds, a real step does not show: the doctor counts what is freed (`doctor/simulated.py`).
Regions that differ in nothing but a number in their path are one line of the table. A report of steps that were not
watched has no figures, and says what to write for them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors.text import grouped, shown, starred, table
from .choice import Choice, Target, written
from .observe import Figures
from .plan import MIB

if TYPE_CHECKING:
    from ..memory.elastic import ElasticReport

WORTH = 0.01


@dataclass(frozen=True)
class Row:
    """The figures of one choice.

    Attributes:
        choice: The choice.
        modules: The class names of its modules.
        saved_bytes: Bytes that autograd saved in it in one forward and that were dropped or, if it is offloaded, given
            to its store; None if it has not run while it was watched.
        flops: FLOPs of products in one replay.
        seconds: Mean seconds of a replay; None before the second one that was watched.
        replays: How often it was replayed.
        flips: How many decisions (the experts of a token) a replay made otherwise than its forward; 0 where they are
            carried.
        decisions: Of how many; 0 where they are carried, or there are none.
    """

    choice: Choice
    modules: tuple[str, ...]
    saved_bytes: int | None
    flops: int
    seconds: float | None
    replays: int
    flips: int = 0
    decisions: int = 0

    @staticmethod
    def of(choice: Choice, modules: Sequence[str], figures: Sequence[Figures]) -> Row:
        """The row of a choice, from the class names of its modules and the figures of each."""
        known = [f.saved_bytes for f in figures if f.saved_bytes is not None]
        seconds = [f.seconds for f in figures if f.seconds is not None]
        return Row(
            choice,
            tuple(modules),
            saved_bytes=sum(known) if known else None,
            flops=sum(f.flops or 0 for f in figures),
            seconds=sum(seconds) if seconds and len(seconds) == len(figures) else None,
            replays=sum(f.replays for f in figures),
            flips=sum(f.flips for f in figures),
            decisions=sum(f.decisions for f in figures),
        )


@shown
@dataclass(frozen=True, repr=False)
class Report:
    """The figures of a plan, one row per choice, in the plan's order.

    Attributes:
        rows: The rows.
        watched: Whether any step was watched; if not, there are no figures.
        elastic: What the elastic regions did in all steps, and how near the limit was; None where there are none.
    """

    rows: tuple[Row, ...]
    watched: bool = True
    elastic: ElasticReport | None = None

    @property
    def saved_bytes(self) -> int:
        """Bytes freed by all regions in one forward each."""
        return sum(row.saved_bytes or 0 for row in self.rows if not row.choice.offload)

    @property
    def moved_bytes(self) -> int:
        """Bytes that offloaded modules give their stores in one forward each."""
        return sum(row.saved_bytes or 0 for row in self.rows if row.choice.offload)

    @property
    def flops(self) -> int:
        """FLOPs of products in one replay of each."""
        return sum(row.flops for row in self.rows)

    @property
    def seconds(self) -> float:
        """Mean seconds of one replay of each, as far as they are known."""
        return sum(row.seconds or 0.0 for row in self.rows)

    @property
    def flips(self) -> int:
        """Decisions that came out differently in one replay of each."""
        return sum(row.flips for row in self.rows)

    @property
    def decisions(self) -> int:
        """Decisions that were compared."""
        return sum(row.decisions for row in self.rows)

    def remark(self, row: Row) -> str:
        """Says what is wrong with a region, or why it is not worth its cost, if anything."""
        if not self.watched:
            return "not watched"
        if row.flips:
            return (
                f"{row.flips} of {row.decisions} decisions came out differently in the replay: carry them (carry=True)"
            )
        if row.saved_bytes is None:
            outside = " outside of other regions" if Target(row.choice.paths[0]).calls else ""
            return f"has not run with gradients{outside}"
        if row.choice.offload:
            return "" if row.saved_bytes else "moves nothing: all that is saved inside are parameters"
        if not row.saved_bytes:
            return "drops nothing: all that is saved inside are inputs, parameters and what saved calls store"
        dropped = row.saved_bytes / self.saved_bytes
        cost = row.seconds / self.seconds if row.seconds and self.seconds else 0.0
        if dropped < WORTH * cost:
            return f"drops {dropped:.2%} of the bytes for {cost:.0%} of the time"
        return ""

    def __str__(self) -> str:
        if self.elastic is None:
            return self._figures()
        always = [str(row.choice) for row in self.rows if not row.choice.elastic]
        groups = grouped(always, starred).items()
        lines = [str(self.elastic), *(f"in every step: {what if len(same) > 1 else same[0]}" for what, same in groups)]
        return "\n".join(lines + [self._figures()] * self.watched)

    def _figures(self) -> str:
        lines = [("dropped MiB", "replay ms", "GFLOP", "replays", "", "region")]
        for rows in grouped(self.rows, _look).values():
            first, remark = rows[0], self.remark(rows[0])
            name = starred(str(first.choice)) if len(rows) > 1 else str(first.choice)
            known = [row.seconds for row in rows if row.seconds is not None]
            dropped = "-" if first.saved_bytes is None else f"{first.saved_bytes / MIB:.2f}"
            seconds = f"{1000 * sum(known) / len(known):.3f}" if known else "-"
            times = f"{len(rows)} x" if len(rows) > 1 else ""
            which = name + (f"\n{'':10}{remark}" if remark else "")
            lines.append((dropped, seconds, f"{first.flops / 1e9:.3g}", str(first.replays), times, which))
        replayed = f"{1000 * self.seconds:.3f} ms replayed per step and call"
        if not any(row.seconds is not None for row in self.rows) and any(row.replays for row in self.rows):
            replayed = "no seconds: watch two steps, a replay is timed from the second on"
        moved = f", {self.moved_bytes / MIB:.2f} MiB offloaded" if self.moved_bytes else ""
        total = f"{self.saved_bytes / MIB:.2f} MiB dropped{moved}, {replayed}"
        if not self.watched:
            total = (
                "not watched, so there are no figures. Write, for one step or more:  with handle.watch(): train_step()"
            )
        return "\n".join([total, *table(lines, right=5)])

    def to_json(self) -> str:
        """The report as JSON text: one object per row, bytes as integers, seconds as numbers."""
        rows = [{**dataclasses.asdict(row, dict_factory=written), "remark": self.remark(row)} for row in self.rows]
        totals: dict[str, Any] = {
            "watched": self.watched,
            "saved_bytes": self.saved_bytes,
            "moved_bytes": self.moved_bytes,
            "seconds": self.seconds,
        }
        if self.elastic is not None:
            regions = [region._asdict() for region in self.elastic.rows]
            totals["elastic"] = {**self.elastic._asdict(), "seconds": self.elastic.seconds, "rows": regions}
        return json.dumps({**totals, "rows": rows}, indent=1)


def _look(row: Row) -> tuple[object, ...]:
    """The key by which rows become one line."""
    return starred(str(row.choice)), row.modules, row.saved_bytes, row.flops, row.replays, row.flips
