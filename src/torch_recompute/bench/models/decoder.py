"""A language model: embeddings, a stack of equal layers, a head."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .layers import VOCABULARY


class Decoder(nn.Module):
    """Tokens in, loss out.

    Args:
        layers: How many.
        width: Of the residual stream.
        tokens: Of a sequence.
        layer: From the width to a layer.
    """

    def __init__(self, layers: int, width: int, tokens: int, layer: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(tokens, width)
        self.layers = nn.ModuleList(layer(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """The loss of predicting each token from those before it."""
        x = self.embed(text[:, :-1]) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), text[:, 1:].flatten())

    def stacks(self) -> list[list[nn.Module]]:
        """One."""
        return [list(self.layers)]


def text(tokens: int, batch: int) -> Tensor:
    """Random tokens, one more than the model reads."""
    return torch.randint(VOCABULARY, (batch, tokens + 1))
