"""What `verify` returns: how many tensors were compared, those that differ, and the regions that it comes from."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SHOWN = 8
_WORDS = {"generators": "random generators"}


@dataclass(frozen=True)
class Row:
    """One thing that was compared.

    Attributes:
        kind: "outputs", "gradients", "buffers", "generators", "attributes", "routing", or "error" for a step that
            raised.
        name: What it is, in words.
        distance: The largest difference of two elements, relative to the largest element; 0.0 for the same bits, and
            infinite where that cannot be said.
        allowed: What the noise of the plain step explains.
        detail: How it differs, in words; empty if it does not.
    """

    kind: str
    name: str
    distance: float = 0.0
    allowed: float = 0.0
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.detail}" if self.detail else f"{self.name}: the same"


@dataclass(frozen=True)
class Verification:
    """What `verify` found; true if nothing differs. `print` shows a text.

    Attributes:
        model: Its class.
        device: Where the steps ran.
        regions: How many regions the plan has.
        counts: How many things of each kind were compared.
        noise: The largest distance between two plain steps; 0.0 if they are the same to the bit.
        differences: What differs, the first to look at first.
        likely: The regions that it comes from, the most likely first.
        tried: Whether each of `likely` was tried, and differs when it is the only region.
    """

    model: str
    device: str
    regions: int
    counts: Mapping[str, int]
    noise: float
    differences: tuple[Row, ...] = ()
    likely: tuple[str, ...] = ()
    tried: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def __bool__(self) -> bool:
        return self.ok

    @property
    def first(self) -> Row | None:
        """What differs first: an output, else the gradient that backward made before all others that differ."""
        return self.differences[0] if self.differences else None

    def as_data(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "model": self.model,
            "device": self.device,
            "regions": self.regions,
            "passed": self.ok,
            "counts": dict(self.counts),
            "noise": self.noise,
            "differences": [vars(row) for row in self.differences],
            "likely": list(self.likely),
            "tried": self.tried,
        }

    def to_json(self) -> str:
        """All of it as JSON text."""
        return json.dumps(self.as_data())

    def __str__(self) -> str:
        counted = ", ".join(f"{count} {_WORDS.get(kind, kind)}" for kind, count in self.counts.items() if count)
        noise = f"two plain steps differ by {self.noise:.2g}" if self.noise else "two plain steps are the same"
        head = f"{self.model} on {self.device}, {_regions(self.regions)}, against the plain step ({noise}): "
        if self.ok:
            within = " within its noise" if self.noise else " to the last bit"
            return _wrapped(f"{head}the same{within}: {counted}", "")
        lines = [_wrapped(f"{head}{len(self.differences)} of {sum(self.counts.values())} differ ({counted})", "")]
        lines += [_wrapped(str(row), "  ") for row in self.differences[:SHOWN]]
        if len(self.differences) > SHOWN:
            lines.append(f"  and {len(self.differences) - SHOWN} more")
        if self.likely:
            names = ", ".join(self.likely[:SHOWN]) + (" ..." if len(self.likely) > SHOWN else "")
            how = "the step differs with this region alone" if self.tried else "by where the first difference is"
            lines += [_wrapped(f"Likely: {names} ({how}).", "")]
            lines += ["Write, to see the operation: with the plan applied, print(audit(model, args))"]
        return "\n".join(lines)


def _regions(count: int) -> str:
    return "1 region" if count == 1 else f"{count} regions"


def _wrapped(text: str, indent: str) -> str:
    lines = textwrap.wrap(text, 110 - len(indent), break_long_words=False, break_on_hyphens=False)
    return "\n".join(indent + "  " * bool(number) + line for number, line in enumerate(lines))
