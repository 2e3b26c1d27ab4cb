"""Small language models on random data, which run where nothing else is installed.

A model is called with one batch and gives the loss. Parts that settings by labels name are modules, and `stacks` gives
the layers that a person would checkpoint. Everything is seeded, so each model has the same weights and data each time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .decoder import Decoder, text
from .layers import HEAD, VOCABULARY, Block

__all__ = ["HEAD", "MODELS", "VOCABULARY", "Shape"]

ATTENDING = (("core_attn",), ("mlp",), ("layernorm",), ("core_attn", "mlp", "layernorm"))


@dataclass(frozen=True)
class Shape:
    """One kind of model.

    Attributes:
        model: From the number of layers, the width and the number of tokens to a model.
        batch: From the number of tokens and of sequences to a batch.
        labels: What settings by labels recompute of it, one tuple per setting.
    """

    model: Callable[[int, int, int], nn.Module]
    batch: Callable[[int, int], Tensor]
    labels: tuple[tuple[str, ...], ...] = ATTENDING

    def build(self, layers: int, width: int, tokens: int, batch: int, dropout: float = 0.1) -> tuple[nn.Module, Tensor]:
        """A model and one batch for it; the caller's random numbers are left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model, given = self.model(layers, width, tokens), self.batch(tokens, batch)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = dropout
        return model, given

    def skeleton(self, layers: int) -> list[list[Any]]:
        """The layers of a model, stack by stack, without weights."""
        with torch.device("meta"):
            found: Any = self.model(layers, 2 * HEAD, 1)
        return found.stacks()


MODELS = {
    "gpt": Shape(lambda layers, width, tokens: Decoder(layers, width, tokens, Block.gpt), text),
    "llama": Shape(lambda layers, width, tokens: Decoder(layers, width, tokens, Block.llama), text),
    "moe": Shape(
        lambda layers, width, tokens: Decoder(layers, width, tokens, Block.mixtral),
        text,
        (("core_attn",), ("moe",), ("layernorm",), ("core_attn", "moe", "layernorm")),
    ),
}
"""The models by name."""
