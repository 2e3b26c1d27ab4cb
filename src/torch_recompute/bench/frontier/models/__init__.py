"""The models of `bench frontier`: small ones of five shapes, on random data.

A model is called with one batch and gives the loss, so that every way to run a step sees the same call. Parts that
settings by labels name are modules, and `stacks` gives the layers that a person would checkpoint. Everything is seeded,
so each call of `build` gives the same weights and data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .convnext import ConvNeXt, pictures
from .decoder import Decoder, text
from .encoder_decoder import EncoderDecoder
from .layers import HEAD, Block

__all__ = ["HEAD", "MODELS", "Shape", "build", "skeleton", "stacks"]

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


MODELS = {
    "gpt": Shape(lambda layers, width, tokens: Decoder(layers, width, tokens, Block.gpt), text),
    "llama": Shape(lambda layers, width, tokens: Decoder(layers, width, tokens, Block.llama), text),
    "moe": Shape(
        lambda layers, width, tokens: Decoder(layers, width, tokens, Block.mixtral),
        text,
        (("core_attn",), ("moe",), ("layernorm",), ("core_attn", "moe", "layernorm")),
    ),
    "convnext": Shape(lambda layers, width, _: ConvNeXt(layers, width), pictures, (("layernorm",), ("mlp",))),
    "encoder-decoder": Shape(EncoderDecoder, text),
}
"""The models by name."""


def build(
    name: str, layers: int, width: int, tokens: int, batch: int, dropout: float = 0.1
) -> tuple[nn.Module, Tensor]:
    """A model and one batch for it; the caller's random numbers are left alone."""
    shape = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, given = shape.model(layers, width, tokens), shape.batch(tokens, batch)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    return model, given


def stacks(model: nn.Module) -> list[list[Any]]:
    """The layers of one of these models, or of a copy of one, stack by stack."""
    found: Any = model
    return found.stacks()


def skeleton(name: str, layers: int) -> list[list[Any]]:
    """The layers of a model, stack by stack, without weights."""
    with torch.device("meta"):
        return stacks(MODELS[name].model(layers, 2 * HEAD, 1))
