"""Functions of torch that show themselves alone to function modes, as ones whose calls inside are shown."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch.nn import functional as F


def _shown_inside(function: types.FunctionType) -> Callable[..., Any]:
    """A Python function of torch whose calls inside are shown to function modes, where it would show itself alone."""
    names = {**function.__globals__, "has_torch_function": lambda _: False}
    twin = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


attention_in_parts = _shown_inside(F.multi_head_attention_forward)
"""What `nn.MultiheadAttention` calls, with its products, its attention and its dropout shown."""
