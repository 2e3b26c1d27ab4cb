"""Finds out which operation waits for a slot, for the text of an error. Never on the hot path."""

from __future__ import annotations

from collections import deque
from typing import Any

from . import _compat


def reader_of(slot: Any, limit: int = 10_000) -> str:
    """The node whose saved tensor is `slot`, as `AddmmBackward0 (mat1)`; "" where it cannot be found.

    Walks the graph from the node that backward is at, at most `limit` nodes far.
    """
    start = _compat.current_node()
    if slot is None or start is None:
        return ""
    seen, queue = {start}, deque([start])
    while queue and len(seen) < limit:
        node = queue.popleft()
        for attribute in dir(node):
            if attribute.startswith("_raw_saved") and _holds(getattr(node, attribute), slot):
                field = attribute.removeprefix("_raw_saved_")
                return f"{node.name()} ({field})" if field != "_raw_saved_tensors" else node.name()
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                queue.append(following)
    return ""


def _holds(saved: Any, slot: Any) -> bool:
    entries = saved if isinstance(saved, (list, tuple)) else (saved,)
    return any(_compat.packed_of(entry) is slot for entry in entries)  # pyright: ignore[reportUnknownVariableType]
