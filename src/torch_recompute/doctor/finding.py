"""What the doctor returns: findings as plain data, what was looked at, and what could not be."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from .._face import document

SCHEMA_VERSION = 1
_WIDTH = 112


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        kind: What sort of thing, a word of `KINDS`; each has a heading on the page about the doctor.
        where: The region, module, parameter or device; numbers in paths as `*` where several are alike.
        seen: What was seen, with its figures.
        confirmed: How it was made sure of: what was run, simulated or counted.
        write: What to write.
        figures: The figures as numbers, by name; bytes as integers, seconds and shares as floats.
    """

    kind: str
    where: str
    seen: str
    confirmed: str
    write: str
    figures: Mapping[str, float] = field(default_factory=dict[str, float])

    def __str__(self) -> str:
        parts = ((self.seen, ""), (self.confirmed, "Confirmed: "), (self.write, "Write: "))
        lines = [f"{self.kind}  {self.where}".rstrip()]
        for text, word in parts:
            lines += textwrap.wrap(
                word + text, _WIDTH, initial_indent="    ", subsequent_indent="    ", break_long_words=False
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class Report:
    """What an examination found. True if it found nothing; `print` shows a text.

    Attributes:
        model: The name of the model's class.
        findings: What is wrong, in the order of `looked_for`.
        looked_for: The kinds that were looked for.
        not_looked_for: The kinds that were not, each with the reason.
    """

    model: str
    findings: tuple[Finding, ...]
    looked_for: tuple[str, ...]
    not_looked_for: tuple[tuple[str, str], ...]

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def __bool__(self) -> bool:
        return self.ok

    def to_json(self) -> str:
        """All of it as JSON text, with `schema_version`."""
        return document(
            "doctor",
            SCHEMA_VERSION,
            {
                "model": self.model,
                "ok": self.ok,
                "findings": [asdict(finding) for finding in self.findings],
                "looked_for": self.looked_for,
                "not_looked_for": dict(self.not_looked_for),
            },
        )

    def __str__(self) -> str:
        count = len(self.findings)
        found = "nothing found" if not count else f"{count} finding{'' if count == 1 else 's'}"
        lines = [f"{self.model}: {found}; {len(self.looked_for)} kinds looked for"]
        for finding in self.findings:
            lines += ["", str(finding)]
        reasons: dict[str, list[str]] = {}
        for kind, why in self.not_looked_for:
            reasons.setdefault(why, []).append(kind)
        if reasons:
            lines.append("")
        for why, kinds in reasons.items():
            lines += textwrap.wrap(f"not looked for, because {why}: {', '.join(kinds)}", _WIDTH + 4)
        return "\n".join(lines)
