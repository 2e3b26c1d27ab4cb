"""ZeRO-3 without DeepSpeed: adapted layers, and hooks that gather and release their weights around each module."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from laws.watch import InBackward

WIDTH = 8


class Linear(torch.autograd.Function):
    """A product that saves the weight itself, as the one of ZeRO-3 does: a saved view of it would keep it gathered."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight, (grad.t() @ x if ctx.needs_input_grad[1] else None)


class Project(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns) / columns**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Linear.apply(x, self.weight)


class Adapted(nn.Module):
    """A frozen product with a low-rank one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = Project(WIDTH, WIDTH), Project(2, WIDTH), Project(WIDTH, 2)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


class Block(nn.Module):
    """Two adapted products; the norm, frozen too, in front, or behind as in BERT."""

    def __init__(self, behind: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.behind = nn.LayerNorm(WIDTH), Adapted(), Adapted(), behind
        self.norm.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.down(F.gelu(self.up(x if self.behind else self.norm(x))))
        return self.norm(y) if self.behind else y


class Partitioned:
    """The weights of a model, taken out of it and put back by hooks around each module that has any."""

    def __init__(self, model: nn.Module) -> None:
        self.whole = {p: p.data.clone() for p in model.parameters()}
        for module in model.modules():
            own = list(module.parameters(recurse=False))
            if own:
                module.register_forward_pre_hook(lambda _, args, own=own: self.enter(own, args))
                module.register_forward_hook(lambda _, args, y, own=own: self.leave(own, y))
        self.release(self.whole)

    def enter(self, own: list[nn.Parameter], args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        self.gather(own)
        (x,) = args
        return (InBackward.apply(x, lambda: self.release(own)) if x.requires_grad else x,)

    def leave(self, own: list[nn.Parameter], y: torch.Tensor) -> torch.Tensor:
        self.release(own)
        return InBackward.apply(y, lambda: self.gather(own)) if y.requires_grad else y

    def gather(self, own: Any) -> None:
        for p in own:
            p.data = self.whole[p]

    def release(self, own: Any) -> None:
        for p in own:
            p.data = p.data.new_empty(0)
