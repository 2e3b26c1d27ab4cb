"""Plans as files."""

from __future__ import annotations

from pathlib import Path

from .._face import write_text
from ..plan.plan import Plan


def write(path: Path, plan: Plan) -> None:
    """Write a plan to a file, for `Plan.from_json` to read."""
    write_text("--out", path, plan.to_json() + "\n")
