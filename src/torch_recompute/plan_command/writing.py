"""Plans as files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from .._face import write_text
from ..plan.plan import Plan


def write(path: Path, plan: Plan, words: Mapping[str, str | int] | None = None) -> None:
    """Write a plan to a file, for `Plan.from_json` to read, and the words that said what it is for."""
    data = json.loads(plan.to_json())
    write_text("--out", path, json.dumps(data if words is None else {**data, "task": words}, indent=1) + "\n")
