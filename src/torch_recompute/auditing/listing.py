"""What `audit` returns: plain rows, and a text a person can read.

Rows that differ only in the numbers within their paths, as the layers of a stack do, are shown as one, with a `*` where
the numbers were; `rows` has them all.
"""

from __future__ import annotations

import json
import re
import textwrap
from typing import NamedTuple

from .._text import table
from ..memory.saved import short_line

KINDS = ("differs", "flips", "mutates", "syncs", "fails")
_WORDS = {
    "differs": "differs in the second run",
    "flips": "decided otherwise",
    "mutates": "changed by each run",
    "syncs": "waits for the device",
    "fails": "cannot be run again",
}
_INDEX = re.compile(r"(?<![^./\s'])\d+(?![^.\s'])")  # a part of a module's path that is a number


class Row(NamedTuple):
    """One finding.

    Attributes:
        kind: "differs", "flips" (a decision came out otherwise), "mutates", "syncs" or "fails".
        region: The region's name.
        op: The operation, as `aten.topk`; for a sync, what was called, as `item()`; "" where it is not one operation.
        module: Path of the module that ran it.
        line: `file:line` of the code that ran it.
        detail: What was found, in words.
        advice: What to write.
        times: How often it happened in one run of the region.
    """

    kind: str
    region: str
    op: str
    module: str
    line: str
    detail: str
    advice: str
    times: int = 1


class Audit(NamedTuple):
    """What an audit found; made by `audit`. True if it found nothing; `print` shows a text.

    Attributes:
        rows: The findings; what is fine is not listed.
        regions: The names of the regions that ran twice, one per call, in order of their calls.
        perturb: How much noise the inputs got in a third run, relative to themselves; 0 where there was none.
    """

    rows: tuple[Row, ...]
    regions: tuple[str, ...]
    perturb: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.rows

    def __bool__(self) -> bool:
        return self.ok

    def to_json(self) -> str:
        """All of it as JSON text."""
        rows = [row._asdict() for row in self.rows]
        return json.dumps({"ok": self.ok, "regions": self.regions, "perturb": self.perturb, "rows": rows})

    def __str__(self) -> str:
        count = len(self.regions)
        noise = f", and again with inputs off by {self.perturb:g}" if self.perturb else ""
        title = f"audit of {count} region{'' if count == 1 else 's'}, each run twice{noise}: "
        if self.ok:
            return title + "nothing to report"
        groups: dict[Row, list[Row]] = {}
        for row in self.rows:
            groups.setdefault(_alike(row), []).append(row)
        counts = {kind: sum(row.kind == kind for row in self.rows) for kind in KINDS}
        found = [f"{number} x {_WORDS[kind]}" for kind, number in counts.items() if number]
        heads = [_head(alike if len(rows) > 1 else rows[0], len(rows)) for alike, rows in groups.items()]
        lines = [title + ", ".join(found)]
        for head, rows in zip(table(heads, right=0), groups.values(), strict=True):
            first = "" if len({row.detail for row in rows}) == 1 else "the first: "
            lines += ["", head, *_wrapped(first + rows[0].detail), *_wrapped(f"Write: {rows[0].advice}")]
        return "\n".join(lines)


def _alike(row: Row) -> Row:
    """What the rows of one entry of the text have in common."""
    advice = _INDEX.sub("*", row.advice)
    return row._replace(
        region=_INDEX.sub("*", row.region), module=_INDEX.sub("*", row.module), detail="", advice=advice, times=1
    )


def _head(row: Row, count: int) -> tuple[str, ...]:
    return (
        row.kind,
        f"{count} x" if count > 1 else "",
        row.op,
        f"in {row.module}" if row.module else "",
        f"region {row.region}",
        short_line(row.line),
    )


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 110, initial_indent="    ", subsequent_indent="    ", break_long_words=False)
