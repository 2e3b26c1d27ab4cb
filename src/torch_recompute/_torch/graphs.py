"""Autograd's graphs and stacks, looked at from outside: what nodes have saved, which code runs a backward or called.

Besides, an attention whose calls inside are shown to function modes.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Callable
from functools import partial
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._traceback import CapturedTraceback


def roots_of_backward() -> list[Any]:
    """The nodes that the backward calls which run now began with, whichever threads wait for them."""
    roots: list[Any] = []
    for frame in sys._current_frames().values():
        at: FrameType | None = frame
        while at is not None:
            if at.f_code is ENGINE:
                roots += [
                    getattr(one, "grad_fn", None) or getattr(one, "node", None) for one in at.f_locals["t_outputs"]
                ]
            at = at.f_back
    return [node for node in roots if node is not None]


_AROUND_MODES = tuple(
    os.path.join(os.path.dirname(torch.__file__), *path)
    for path in (("_compile.py",), ("_dynamo", ""), ("_ops.py",), ("utils", "_python_dispatch.py"))
)


ENGINE = torch.autograd.graph._engine_run_backward.__code__
"""Python's frame around PyTorch's engine."""


def caller(ours: str) -> CodeType:
    """The code that called the present operation of PyTorch, directly or from C++; `ENGINE` on threads of the engine.

    Args:
        ours: The folder of the mode that asks, whose frames do not count.
    """
    passed = ours, *_AROUND_MODES
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(passed):
        frame = frame.f_back
    return ENGINE if frame is None else frame.f_code


def gradient_hooks(tensor: torch.Tensor) -> tuple[Callable[[torch.Tensor], object], ...]:
    """The hooks that run when a gradient of a tensor has been accumulated, in the order of their registration."""
    return tuple((getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values())


_C: Any = torch._C
SavedTensor: type = _C._autograd.SavedTensor
"""The class of the `_raw_saved_*` attributes of a node."""


def packed_of(saved: Any) -> Any:
    """Returns what a pack hook made of a `_raw_saved_*` attribute of a node; None where torch cannot tell."""
    return getattr(saved, "data", None)


def unpack_hook_of(saved: Any) -> Any:
    """The unpack hook of a `_raw_saved_*` attribute of a node; None where there is none, or torch cannot tell."""
    return getattr(saved, "unpack_hook", None)


def replace_saved(node: Any, choose: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
    """Replaces each tensor that a node has saved by what `choose` makes of it.

    Left alone is a tensor for which `choose` returns None, and one that was saved under hooks: torch takes one pair.
    """
    kind = type(node)
    names = _saved_names.get(kind)
    if names is None:
        names = _saved_names[kind] = tuple(name for name in dir(node) if name.startswith("_raw_saved_"))
    for name in names:
        saved = getattr(node, name)
        for one in saved if isinstance(saved, tuple) else (saved,):
            if hasattr(one, "data"):
                bare = isinstance(one.data, torch.Tensor) and unpack_hook_of(one) is None
                packed = choose(one.data) if bare else None
                if packed is not None:
                    one.register_hooks(partial(_swap, packed), unpack)
            else:  # torch 2.11 does not show it, so everything is looked at from within a hook
                with contextlib.suppress(RuntimeError):
                    one.register_hooks(partial(_swap_if, choose), unpack)


def _swap(packed: Any, tensor: torch.Tensor) -> Any:
    return packed


def _swap_if(choose: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
    packed = choose(tensor)
    return (tensor, tensor._version) if packed is None else packed


_saved_names: Any = weakref.WeakKeyDictionary()  # by class of node


def function_of(node: Any) -> type | None:
    """The autograd Function that made a node; None for a node of PyTorch's own."""
    return getattr(node, "_forward_cls", None)


def in_function() -> bool:
    """Whether this is in the forward of an autograd Function, which `torch.no_grad()` alone is not."""
    return not (torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled())


capture_stack: Callable[[], Any] = CapturedTraceback.extract


def say_stack(stack: Any, last: int = 12) -> list[str]:
    """A captured stack as lines, the innermost calls last, without this library's and torch's own frames."""
    lines: list[str] = "".join(stack.format()).splitlines()
    frames = [lines[i : i + 2] for i in range(0, len(lines) - 1, 2)]
    inside = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))
    return [line.strip() for frame in frames if not any(part in frame[0] for part in inside) for line in frame][-last:]


def _shown_inside(function: FunctionType) -> Callable[..., Any]:
    """A Python function of torch whose calls inside are shown to function modes, where it would show itself alone."""
    names = {**function.__globals__, "has_torch_function": lambda _: False}
    twin = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


attention_in_parts = _shown_inside(F.multi_head_attention_forward)
"""The function that `nn.MultiheadAttention` calls, with its products, its attention and its dropout shown."""
