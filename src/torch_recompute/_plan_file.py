"""A plan from a file, for the commands that take one."""

from __future__ import annotations

from pathlib import Path

from . import errors
from .plan import Plan


def read_plan(path: Path, option: str = "--plan") -> Plan:
    """The plan in a file.

    Args:
        path: Of the file.
        option: What asks for it, in words.

    Raises:
        ArgumentError: There is none.
    """
    try:
        return Plan.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        why = (error.strerror or str(error)).lower()
    except UnicodeDecodeError:
        why = "is no text"
    except errors.ArgumentError as error:
        why = str(error).partition("\n")[0].rstrip(".")
    raise errors.ArgumentError(
        f"{option} is {path!s}: {why}. Write the path of a file that torch-recompute plan MODEL --budget ... --out "
        "plan.json has made, or that holds plan.to_json()."
    )
