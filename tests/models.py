"""Small models that many tests share: a module made of a function, a residual block, and layers called in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Made(nn.Module):
    """A module of named parts and what it does with them.

        Made(lambda m, x: x + m.down(m.up(x).relu()), up=nn.Linear(8, 32), down=nn.Linear(32, 8))

    A tensor among the parts is a plain attribute; buffers are named apart.
    """

    def __init__(self, does: Callable[..., Any], buffers: dict[str, torch.Tensor] | None = None, **parts: Any) -> None:
        super().__init__()
        self.does = does
        for name, part in parts.items():
            setattr(self, name, part)
        for name, buffer in (buffers or {}).items():
            self.register_buffer(name, buffer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.does(self, *args, **kwargs)


class Residual(nn.Module):
    """A norm, two products with a GELU between them, dropout if asked for, and the input added."""

    def __init__(self, width: int, factor: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(dropout) if dropout else None
        self.up, self.down = nn.Linear(width, factor * width), nn.Linear(factor * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(F.gelu(self.up(self.norm(x))))
        return x + (y if self.drop is None else self.drop(y))


class InTurn(nn.Module):
    """Layers that a loop of the model's own calls one after the other; `residual` adds each to its input."""

    def __init__(self, layers: Iterable[nn.Module], residual: bool = False) -> None:
        super().__init__()
        self.layers, self.residual = nn.ModuleList(layers), residual

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x) if self.residual else layer(x)
        return x
