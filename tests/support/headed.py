"""A small model with layers and a head as wide as a vocabulary, so that its loss is a part of the peak."""

from __future__ import annotations

import torch
from torch import nn

from .models import Made

TOKENS, WIDTH, WORDS = 64, 16, 512


def layer() -> nn.Module:
    mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    return Made(lambda m, x: x + m.mlp(m.norm(x)), norm=nn.LayerNorm(WIDTH), mlp=mlp)


def model(count: int = 4) -> nn.Module:
    layers = nn.Sequential(*(layer() for _ in range(count)))
    return Made(lambda m, x: m.head(m.layers(x)), layers=layers, head=nn.Linear(WIDTH, WORDS, bias=False))


def batch() -> torch.Tensor:
    return torch.randn(TOKENS, WIDTH)


def cross_entropy(logits: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
