"""The operations of a region's forward and replay side by side, for `checkpoint(..., debug=True)`.

A dispatch mode writes down each operation with the shapes of its tensors and the place in the user's code. PyTorch's
own debug mode adds two log filters per call and never removes them, so that each call costs more than the one before;
here nothing is shared between calls, and the 600th costs what the 20th did. Stacks are captured without symbols and
only turned into text if there is an error.
"""

from __future__ import annotations

from typing import Any

import torch

from . import _compat


class _Entry:
    __slots__ = ("stack", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.stack = _compat.capture_stack()


class OpTrace(_compat.TorchDispatchMode):
    """Writes down the operations that run under it."""

    supports_higher_order_operators = True

    def __init__(self, forward: OpTrace | None = None) -> None:
        super().__init__()
        self.entries: list[_Entry] = []
        self._forward = forward

    def __enter__(self) -> OpTrace:
        """Starts anew: a region may be replayed more than once."""
        self.entries = []
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes `func` and runs it."""
        result = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.detach.default:
            inputs = ", ".join(map(_say, _compat.tree_leaves((args, kwargs))))
            outputs = ", ".join(map(_say, _compat.tree_leaves(result)))
            self.entries.append(_Entry(f"{func}({inputs}) -> {outputs}"))
        return result

    def explain(self) -> str:
        """The first operation in which the replay differs from the forward, with the code that ran it."""
        then = self._forward.entries if self._forward is not None else []
        now = self.entries
        same = 0
        while same < min(len(then), len(now)) and then[same].text == now[same].text:
            same += 1
        lines = [
            "You are seeing this error because you passed `debug=True` to checkpoint.",
            f"Forward and replay first differ at operation {same} (counted from 0):",
        ]
        for title, entries in (("forward", then), ("replay", now)):
            lines.append(f"  {title} ({len(entries)} operations so far):")
            lines += [f"      {i}: {entries[i].text}" for i in range(max(0, same - 2), min(len(entries), same + 3))]
            if same < len(entries):
                lines.append(f"    operation {same} was run by:")
                lines += ["      " + line for line in _compat.say_stack(entries[same].stack)]
        return "\n".join(lines)


def _say(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)[:40]


def traces() -> tuple[OpTrace, OpTrace]:
    """The contexts of one call of a region: for its forward, and for its replays."""
    forward = OpTrace()
    return forward, OpTrace(forward)
