"""A model with a layer that computes something else in every run, which a check of two steps must notice."""

from collections.abc import Callable

import torch
from torch import nn


class Restless(nn.Module):
    """Something else in every run, and so in a replay; a simulation does not mind."""

    def __init__(self) -> None:
        super().__init__()
        self.runs, self.scale = [[0]], nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs[0][0] += 1  # a list in a list is not put back
        return torch.tanh(x * self.scale * self.runs[0][0])


def pair() -> tuple[nn.Module, tuple[torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]:
    """The model, with that layer as its second, a batch, and a loss."""
    first, *rest = (nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3))
    return nn.Sequential(first, Restless(), *rest), (torch.ones(64, 8),), torch.mean
