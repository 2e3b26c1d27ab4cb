"""The options of a `Problem` as numpy columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..cost import Option
from .problem import Group, Problem

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[Any, np.dtype[np.float64]]
    Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Column:
    """A `Group` as arrays."""

    span: int
    options: tuple[Option, ...]
    saved: Ints
    forward: Ints
    backward: Ints
    ticks: Ints
    flops: Ints


class Columns:
    """The columns of a problem, made once."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._made: dict[int, Column] = {}

    def groups(self, index: int) -> list[Column]:
        """The options that may start at a segment."""
        return [self._column(group) for group in self._problem.groups(index)]

    def own(self, index: int, column: Column) -> Ints:
        """What each option takes by itself above what was saved before."""
        import numpy as np

        forward, backward, inside = self._problem.bases(index, column.span)
        own = np.maximum(column.forward + forward, column.backward + backward)
        return np.maximum(own, column.saved + inside) if column.span > 1 else np.maximum(own, column.saved)

    def _column(self, group: Group) -> Column:
        import numpy as np

        key = id(group)
        if key not in self._made:
            arrays = (group.saved, group.forward, group.backward, group.ticks, group.flops)
            self._made[key] = Column(group.span, group.options, *(np.array(row, dtype=np.int64) for row in arrays))
        return self._made[key]
