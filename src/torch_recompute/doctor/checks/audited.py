"""What an audit finds, as findings: waits for the device in a replay, and replays that do otherwise than their forward.

The audit runs every region twice; see `auditing/`. Rows that differ in numbers within paths only are one finding.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...auditing import Row
from ..check import Check, Evidence
from ..finding import Finding
from ..regions import starred

_CONFIRMED = "each region was run twice, as a replay runs it, with every operation written down"


def grouped(evidence: Evidence, kinds: tuple[str, ...]) -> list[tuple[str, list[Row]]]:
    """The rows of an audit of some kinds, those alike but for numbers together, and where they are."""
    assert evidence.audit is not None
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in evidence.audit.rows:
        if row.kind in kinds:
            groups.setdefault((row.kind, starred(row.region), starred(row.module), row.op, row.line), []).append(row)
    return [(starred(rows[0].module or rows[0].region), rows) for rows in groups.values()]


def place(row: Row) -> str:
    """The operation and its line."""
    line = row.line.rpartition("/")[2]
    return " at ".join(filter(None, [row.op, line]))


class HostSyncs(Check):
    """Reads the audit's waits."""

    kind = "host_syncs"
    needs = ("audit",)

    def look(self, evidence: Evidence) -> Iterator[Finding]:
        """Calls that make the host wait for the device, in replays."""
        for where, rows in grouped(evidence, ("syncs",)):
            count = sum(row.times for row in rows)
            yield self.found(
                where,
                f"{place(rows[0])}: the host waits for the device {count} times in the replays of one step.",
                f"{_CONFIRMED}.",
                rows[0].advice,
                waits=count,
            )


class NotDeterministic(Check):
    """Reads what the audit found to differ."""

    kind = "not_deterministic"
    needs = ("audit",)

    def look(self, evidence: Evidence) -> Iterator[Finding]:
        """Operations with other results in the second run, decisions made otherwise, regions that cannot run again."""
        for where, rows in grouped(evidence, ("differs", "flips", "fails")):
            first = rows[0]
            seen = ": ".join(filter(None, [place(first), first.detail]))
            yield self.found(where, f"{seen}.", f"{_CONFIRMED}.", first.advice, regions=len(rows))
