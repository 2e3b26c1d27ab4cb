"""Walks the graph that a backward runs through: who waits for a slot, what has yet to come. Never on the hot path."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from . import _compat

LIMIT = 10_000
"""How many nodes to look at before giving up."""


def _upstream() -> Iterator[Any]:
    """The nodes that the running backward is at and has yet to reach, nearest first."""
    start = _compat.current_node()
    if start is None:
        return
    seen, queue = {start}, deque([start])
    while queue and len(seen) < LIMIT:
        node = queue.popleft()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                queue.append(following)


def reader_of(slot: Any) -> str:
    """The node whose saved tensor is `slot`, as `AddmmBackward0 (mat1)`; "" where it cannot be found."""
    if slot is None:
        return ""
    for node in _upstream():
        for attribute in dir(node):
            if attribute.startswith("_raw_saved") and _holds(getattr(node, attribute), slot):
                field = attribute.removeprefix("_raw_saved_")
                return f"{node.name()} ({field})" if field != "_raw_saved_tensors" else node.name()
    return ""


def leads_to(leaf: torch.Tensor) -> bool:
    """Whether the running backward has yet to accumulate the gradient of `leaf`."""
    return any(getattr(node, "variable", None) is leaf for node in _upstream())


def _holds(saved: Any, slot: Any) -> bool:
    entries = saved if isinstance(saved, (list, tuple)) else (saved,)
    return any(_compat.packed_of(entry) is slot for entry in entries)  # pyright: ignore[reportUnknownVariableType]
