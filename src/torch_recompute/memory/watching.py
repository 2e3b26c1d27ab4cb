"""The dispatch mode that shows a measurement every operation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .._compat import TorchDispatchMode


class Watch(TorchDispatchMode):
    """Runs operations as they are, and shows each.

    Args:
        record: Called with an operation, its arguments and its result.
    """

    supports_higher_order_operators = True

    def __init__(self, record: Callable[[object, object, object], None]) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self._record(func, (args, kwargs), out)
        return out
