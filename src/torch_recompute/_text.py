"""Plain text for people: a table with aligned columns.

Every table that a report, a plan or a command prints without colours is made here, so that all look alike: two spaces
between columns, nothing at the ends of lines.
"""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], right: int | None = None) -> list[str]:
    """The rows as lines with aligned columns.

    Args:
        rows: The cells, equally many in each row. A cell with line breaks may only be the last of its row.
        right: How many columns, from the first, are aligned to the right; all by default.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = len(widths) if right is None else right
    return [
        "  ".join(
            cell.rjust(width) if place < right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
