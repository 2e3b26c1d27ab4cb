"""What `saved_activations` returns: plain rows, their sums, and a table a person can read.

The table groups rows that differ only in the numbers within their module's path, as the layers of a stack do: one line
then stands for all, with their count, and the path has a `*` where the numbers were. The sums are never grouped.
"""

from __future__ import annotations

import json
import linecache
import os
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from .._text import table

KINDS = ("saved", "region", "escaped")
_LINES = 40
_NUMBER = re.compile(r"\d+")
_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a module's path that is a number


class Row(NamedTuple):
    """One storage that a forward keeps.

    Attributes:
        bytes: Its size in bytes.
        kind: "saved", "region" or "escaped"; "parameter", "buffer", "input" or "other" if it was there before.
        op: The operation that made it, as `aten.gelu`.
        saved_by: The nodes of the graph that saved it, as `GeluBackward0 (self)`.
        held_by: Regions that hold it; of one that escaped, the places that were found to refer to it.
        module: Path of the module that ran the operation, "" for the model itself; its own name if it was there before.
        line: `file:line` of the code that ran the operation.
        shape: Shape of the tensor as it was made.
        dtype: Its type, as `float32`.
        device: Its device, as `cuda:0`.
        in_result: Whether the model's result contains it too.
    """

    bytes: int
    kind: str
    op: str
    saved_by: tuple[str, ...]
    held_by: tuple[str, ...]
    module: str
    line: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    in_result: bool


class SavedActivations(NamedTuple):
    """What a forward keeps for backward; made by `saved_activations`. `print` shows a table.

    Attributes:
        rows: One per storage that was made in the forward and is alive without its result, largest first.
        result_bytes: Bytes made in the forward that are alive only as long as its result is; not in any row.
        existing: Parameters, buffers and inputs that the forward keeps too, with 0 bytes each.
    """

    rows: tuple[Row, ...]
    result_bytes: int
    existing: tuple[Row, ...]

    @property
    def total_bytes(self) -> int:
        """The sum of the rows, in bytes."""
        return sum(row.bytes for row in self.rows)

    def by_module(self) -> dict[str, int]:
        """Bytes by path of the module that made them ("" is the model itself); they sum to the total, as all these."""
        return self._by(lambda row: row.module)

    def by_line(self) -> dict[str, int]:
        """Bytes by `file:line` of the code that made them."""
        return self._by(lambda row: row.line)

    def by_op(self) -> dict[str, int]:
        """Bytes by the operation that made them."""
        return self._by(lambda row: row.op)

    def by_device(self) -> dict[str, int]:
        """Bytes by device."""
        return self._by(lambda row: row.device)

    def by_kind(self) -> dict[str, int]:
        """Bytes "saved" by autograd, held by a "region", "escaped" from both; all three are always there."""
        return {**dict.fromkeys(KINDS, 0), **self._by(lambda row: row.kind)}

    def to_json(self) -> str:
        """Everything as JSON, with the sums by kind."""
        plain = {
            "total_bytes": self.total_bytes,
            "result_bytes": self.result_bytes,
            "by_kind": self.by_kind(),
            "rows": [row._asdict() for row in self.rows],
            "existing": [row._asdict() for row in self.existing],
        }
        return json.dumps(plain)

    def _by(self, key: Callable[[Row], str]) -> dict[str, int]:
        sums: dict[str, int] = {}
        for row in self.rows:
            sums[key(row)] = sums.get(key(row), 0) + row.bytes
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {nbytes:,}" for kind, nbytes in self.by_kind().items() if nbytes)
        title = f"{self.total_bytes:,} bytes kept for backward in {_count(len(self.rows), 'tensor')}"
        lines = [f"{title}: {kinds}" if kinds else title]
        if self.result_bytes:
            lines.append(f"{self.result_bytes:,} more are alive as long as the result is")
        if not self.rows:
            return "\n".join(lines)
        groups: dict[tuple[Any, ...], list[Row]] = {}
        for row in self.rows:
            groups.setdefault(_alike(row), []).append(row)
        listed = sorted(groups.values(), key=lambda rows: -sum(row.bytes for row in rows))
        head = ("bytes", "", "kind", "made by", "tensor", "module", "line", "kept by")
        lines += table([head, *map(_cells, listed[:_LINES])], right=2)
        rest = [row for rows in listed[_LINES:] for row in rows]
        if rest:
            lines.append(f"{sum(row.bytes for row in rest):,} bytes more in {_count(len(rest), 'smaller tensor')}")
        return "\n".join(lines)


def _alike(row: Row) -> tuple[Any, ...]:
    """What the rows of one line of the table have in common."""
    held = tuple(_NUMBER.sub("*", name) for name in row.held_by)
    return row._replace(module=_INDEX.sub("*", row.module), held_by=held, in_result=False)


def _cells(rows: list[Row]) -> tuple[str, ...]:
    row = rows[0]
    several = len(rows) > 1 and len({(row.module, row.held_by) for row in rows}) > 1
    shown = _alike(row) if several else row
    return (
        f"{sum(row.bytes for row in rows):,}",
        f"{len(rows)} x" if len(rows) > 1 else "",
        row.kind,
        row.op,
        f"{row.dtype}{list(row.shape)}" + ("" if row.device == "cpu" else f" {row.device}"),
        shown[5],
        short_line(row.line),
        _join(row.saved_by if row.kind == "saved" else shown[4]),
    )


def short_line(line: str) -> str:
    """The file's name, the number, and the code there."""
    file, _, number = line.rpartition(":")
    if not file:
        return ""
    code = linecache.getline(file, int(number)).strip()
    return f"{os.path.basename(file)}:{number}  {code if len(code) <= 40 else code[:37] + '...'}".rstrip()


def _join(names: Iterable[str]) -> str:
    """The names in a row; `A (x), A (y)` becomes `A (x, y)`."""
    fields: dict[str, list[str]] = {}
    for name in names:
        node, _, field = name.partition(" (")
        fields.setdefault(node, []).append(field.removesuffix(")"))
    merged = [f"{node} ({', '.join(filter(None, found))})" if any(found) else node for node, found in fields.items()]
    return ", ".join(merged[:3]) + (f" and {len(merged) - 3} more" if len(merged) > 3 else "")


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
