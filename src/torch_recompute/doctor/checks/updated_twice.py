"""Buffers that are updated twice in a step: once by the forward, and again by a replay.

Running statistics, counters of steps and of tokens, the maxima of an FP8 recipe. Regions of this library put the
buffers of their modules back after a replay; a checkpoint of another library does not, and neither is an attribute or
a tensor that no module owns put back by anybody.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..check import Check, Evidence
from ..finding import Finding
from ..regions import starred
from ..words import times
from .audited import grouped, place


class UpdatedTwice(Check):
    """Compares buffers before and after real backwards, and reads what the audit saw change."""

    kind = "updated_twice"
    needs = ("seen", "audit")

    def look(self, evidence: Evidence) -> Iterator[Finding]:
        """Buffers that a backward changed, and what a second run of a region changes."""
        if evidence.seen is not None:
            changed = evidence.seen.changed_buffers
            groups: dict[str, list[str]] = {}
            for name in changed:
                groups.setdefault(starred(name), []).append(name)
            for where, names in groups.items():
                yield self.found(
                    where,
                    f"{len(names)} buffer{'' if len(names) == 1 else 's'} ({names[0]}): changed by the forward, and "
                    f"again in {times(max(changed[name] for name in names))} of {evidence.seen.backwards} backwards.",
                    "real steps: the buffers were compared when a backward had ended with what its forward left.",
                    "torch_recompute.checkpoint in the place of torch.utils.checkpoint.checkpoint (the same "
                    "arguments), or a plan: their replays put buffers back.",
                    buffers=len(names),
                )
        if evidence.audit is not None:
            for where, rows in grouped(evidence, ("mutates",)):
                seen = ": ".join(filter(None, [place(rows[0]), rows[0].detail]))
                yield self.found(
                    where, f"{seen}.", "each region was run twice, and what was changed outside it was compared.",
                    rows[0].advice, regions=len(rows),
                )  # fmt: skip
