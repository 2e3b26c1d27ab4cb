"""A convolutional network whose layers are not equal: four stages, each of half the size and twice the width."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 100
PATCH = 4
"""Pixels along a patch."""
STAGES = (1, 1, 3, 1)
"""How the layers are shared out."""
FINEST = 2 ** (len(STAGES) - 1)
"""What the patches along a picture must be a multiple of."""


class Layer(nn.Module):
    """Mix places, then channels (ConvNeXt; Liu et al. 2022, 2201.03545)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        """Of (batch, width, height, width of the picture)."""
        y = self.mlp(self.norm(self.mix(x).permute(0, 2, 3, 1)))
        return x + self.dropout(y).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """Pictures in, loss out; the first stage is half as wide as asked for, the last four times."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        widths = [width // 2 * 2**stage for stage in range(len(STAGES))]
        self.downs = nn.ModuleList(
            nn.Conv2d(before, after, size, stride=size)
            for before, after, size in zip([3, *widths], widths, [PATCH, 2, 2, 2], strict=False)
        )
        self.stages = nn.ModuleList(
            nn.Sequential(*(Layer(width) for _ in range(number)))
            for width, number in zip(widths, _shared(layers), strict=True)
        )
        self.norm = nn.LayerNorm(widths[-1])
        self.head = nn.Linear(widths[-1], CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        """The loss of telling each picture from the others."""
        x = pictures
        for down, stage in zip(self.downs, self.stages, strict=True):
            x = stage(down(x))
        wanted = torch.arange(len(pictures)) % CLASSES
        return F.cross_entropy(self.head(self.norm(x.mean((-2, -1)))), wanted)

    def stacks(self) -> list[list[nn.Module]]:
        """The stages."""
        return [list(stage.children()) for stage in self.stages]


def _shared(layers: int) -> list[int]:
    """How many layers each stage gets, at least one."""
    whole = sum(STAGES)
    found = [max(1, layers * share // whole) for share in STAGES]
    found[STAGES.index(max(STAGES))] += max(0, layers - sum(found))
    return found


def pictures(tokens: int, batch: int) -> Tensor:
    """Random pictures of so many patches."""
    pixels = PATCH * math.isqrt(tokens)
    return torch.randn(batch, 3, pixels, pixels)
