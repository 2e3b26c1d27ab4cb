"""What has been run already, one JSON object a line, so that a sweep that was cut off goes on where it was.

A line is written when a trial ends, whatever its end was. Lines are found by the key of what was asked, so a file may
hold several sweeps, and a setting that was changed is run anew. A last line that is cut off is left out; a trial
that failed or was refused is run again, because what was wrong may have been mended.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ... import errors
from .record import FAILED, REFUSED, STOPPED, Record

SCHEMA_VERSION = 1


class Journal:
    """The file of trials; without a path nothing is kept.

    Args:
        path: The file.
        fresh: Whether to begin it anew.
    """

    def __init__(self, path: Path | None, *, fresh: bool = False) -> None:
        self._path = path
        self._known: dict[tuple[str, int], list[Record]] = {}
        if path is None:
            return
        try:
            if fresh:
                path.unlink(missing_ok=True)
            with path.open("a+", encoding="utf-8") as file:
                file.seek(0)
                lines = file.read().split("\n")
                if lines[-1]:
                    file.write("\n")  # what was cut off stays a line of its own
        except OSError as error:
            raise errors.ArgumentError(
                errors.cannot_write("--results", str(path), (error.strerror or str(error)).lower())
            ) from error
        for number, line in enumerate(lines, 1):
            self._read(line, number, last=number == len(lines))

    def _read(self, line: str, number: int, *, last: bool) -> None:
        if not line.strip():
            return
        try:
            data: Any = json.loads(line)
            if data["schema_version"] != SCHEMA_VERSION:
                raise ValueError(f"schema_version is {data['schema_version']}")
            records = [Record(**record) for record in data["ranks"]]
            self._known[data["key"], data["round"]] = records
        except (ValueError, KeyError, TypeError) as error:
            if not last and not _cut_off(line):
                raise errors.ArgumentError(
                    f"--results is {self._path!s}, whose line {number} is no result of bench run ({error!s}). Write "
                    "the path of another file, or --fresh to begin this one anew."
                ) from None

    def get(self, key: str, number: int) -> list[Record] | None:
        """The records of a trial that came to an end of its own; None if it has to be run."""
        records = self._known.get((key, number))
        if records is None or any(record.status in (FAILED, REFUSED, STOPPED) for record in records):
            return None
        return records

    def add(self, key: str, name: str, number: int, records: Sequence[Record]) -> None:
        """Write a trial down."""
        if self._path is None:
            return
        ranks = [record.as_data() for record in records]
        data = {"schema_version": SCHEMA_VERSION, "key": key, "name": name, "round": number, "ranks": ranks}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(data) + "\n")


def _cut_off(line: str) -> bool:
    """Whether a line is the beginning of one that we have written."""
    return line.startswith('{"schema_version"') and not line.endswith("}")
