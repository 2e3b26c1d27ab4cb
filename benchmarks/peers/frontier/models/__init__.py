"""The models that peers are compared on: those of `torch-recompute bench run`, and two of other shapes.

A model is called with one batch and gives the loss, so that every way to run a step sees the same call.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from torch_recompute.commands.small_models import HEAD, Shape, text
from torch_recompute.commands.small_models import MODELS as DECODERS

from .convnext import ConvNeXt, pictures
from .encoder_decoder import EncoderDecoder

__all__ = ["HEAD", "MODELS", "Shape", "build", "skeleton", "stacks"]

MODELS = {
    **DECODERS,
    "convnext": Shape(lambda layers, width, _: ConvNeXt(layers, width), pictures, (("layernorm",), ("mlp",))),
    "encoder-decoder": Shape(EncoderDecoder, text),
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
    return found.stacks()


def skeleton(name: str, layers: int) -> list[list[Any]]:
    """The layers of a model, stack by stack, without weights."""
    return MODELS[name].skeleton(layers)
