"""The models that peers are compared on: language models of `torch-recompute bench run`, and three of other shapes.

A model is called with one batch and gives the loss, so that every way to run a step sees the same call. `stacks` gives
the layers that a person would checkpoint. Everything is seeded, so each model has the same weights and data each time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_recompute.commands.small_models import HEAD, VOCABULARY, Decoder, TransformerBlock

from .convnext import ConvNeXt, pictures
from .encoder_decoder import EncoderDecoder
from .mixture import MixtralBlock

__all__ = ["HEAD", "MODELS", "Shape", "build", "skeleton", "stacks"]


def text(tokens: int, batch: int) -> Tensor:
    """Random tokens, one more than the model reads."""
    return torch.randint(VOCABULARY, (batch, tokens + 1))


@dataclass(frozen=True)
class Shape:
    """One kind of model.

    Attributes:
        model: From the number of layers, the width and the number of tokens to a model.
        batch: From the number of tokens and of sequences to a batch.
        labels: The labels of each setting by labels.
    """

    model: Callable[[int, int, int], nn.Module]
    batch: Callable[[int, int], Tensor] = text
    labels: tuple[tuple[str, ...], ...] = (("core_attn",), ("mlp",), ("layernorm",), ("core_attn", "mlp", "layernorm"))

    def build(self, layers: int, width: int, tokens: int, batch: int, dropout: float = 0.1) -> tuple[nn.Module, Tensor]:
        """A model and one batch for it; the caller's random numbers are left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model, data = self.model(layers, width, tokens), self.batch(tokens, batch)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = dropout
        return model, data


MODELS = {
    "gpt": Shape(lambda layers, width, tokens: Decoder(layers, width, tokens, TransformerBlock.gpt)),
    "llama": Shape(lambda layers, width, tokens: Decoder(layers, width, tokens, TransformerBlock.llama)),
    "moe": Shape(
        lambda layers, width, tokens: Decoder(layers, width, tokens, MixtralBlock),
        labels=(("core_attn",), ("moe",), ("layernorm",), ("core_attn", "moe", "layernorm")),
    ),
    "convnext": Shape(lambda layers, width, _: ConvNeXt(layers, width), pictures, (("layernorm",), ("mlp",))),
    "encoder-decoder": Shape(EncoderDecoder),
}
"""The models by name."""


def build(
    name: str, layers: int, width: int, tokens: int, batch: int, dropout: float = 0.1
) -> tuple[nn.Module, Tensor]:
    """A model and one batch for it; the caller's random numbers are left alone."""
    return MODELS[name].build(layers, width, tokens, batch, dropout)


def stacks(model: nn.Module) -> list[list[Any]]:
    """The layers of one of these models, or of a copy of one, stack by stack."""
    found: Any = model
    return [list(found.layers)] if isinstance(found, Decoder) else found.stacks()


def skeleton(name: str, layers: int) -> list[list[Any]]:
    """The layers of a model, stack by stack, without weights."""
    with torch.device("meta"):
        return stacks(MODELS[name].model(layers, 2 * HEAD, 1))
