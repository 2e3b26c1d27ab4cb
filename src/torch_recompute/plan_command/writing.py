"""Plans as files."""

from __future__ import annotations

from pathlib import Path

from .. import errors
from ..plan.plan import Plan


def write(path: Path, plan: Plan) -> None:
    """Write a plan to a file, for `Plan.from_json` to read."""
    try:
        path.write_text(plan.to_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise errors.ArgumentError(
            errors.cannot_write("--out", str(path), (error.strerror or str(error)).lower())
        ) from error
