"""Transformers of diffusion, planned without weights: FLUX.1-dev on a picture of 1024 x 1024, Wan 2.1 14B on 81 frames.

    torch-recompute plan examples.diffusion:flux --recompute none,full --optimizer adamw-fused
    torch-recompute plan examples.diffusion:wan --budget 180GB --device b200

Each function returns the model on the meta device, one batch, and the loss of flow matching. Latents and embeddings of
text are what an autoencoder and text encoders, which are frozen, have made before. Sizes are those of the releases.
"""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from torch import nn

Task = tuple[nn.Module, dict[str, Any], Any]


def _velocity(output: Any) -> torch.Tensor:
    """The loss for a target of zeros; the target's values make no difference to memory or time."""
    return output.sample.float().square().mean()


def _built(model: type[nn.Module], **sizes: Any) -> nn.Module:
    with torch.device("meta"):
        return nn.Module.to(model(**sizes), torch.bfloat16).train()  # diffusers' own would warn of parts in 32 bits


def flux(batch: int = 1, size: int = 1024, **fewer: int) -> Task:
    """Returns FLUX.1-dev, of 12 billion parameters, and a batch of pictures; `fewer` are other sizes of the model."""
    model = _built(diffusers.FluxTransformer2DModel, guidance_embeds=True, **fewer)
    tokens = (size // 16) ** 2  # of a latent that is an eighth as wide, two by two
    half, words = {"dtype": torch.bfloat16, "device": "meta"}, 512
    return (
        model,
        {
            "hidden_states": torch.empty(batch, tokens, model.config.in_channels, **half),
            "encoder_hidden_states": torch.empty(batch, words, model.config.joint_attention_dim, **half),
            "pooled_projections": torch.empty(batch, model.config.pooled_projection_dim, **half),
            "timestep": torch.empty(batch, **half),
            "guidance": torch.empty(batch, **half),
            "img_ids": torch.empty(tokens, 3, **half),
            "txt_ids": torch.empty(words, 3, **half),
        },
        _velocity,
    )


def wan(batch: int = 1, frames: int = 81, height: int = 480, width: int = 832, **fewer: int) -> Task:
    """Returns Wan 2.1 of 14 billion parameters and a batch of films; `fewer` are other sizes of the model."""
    model = _built(diffusers.WanTransformer3DModel, **fewer)
    half = {"dtype": torch.bfloat16, "device": "meta"}
    latent = batch, model.config.in_channels, 1 + (frames - 1) // 4, height // 8, width // 8
    return (
        model,
        {
            "hidden_states": torch.empty(latent, **half),
            "timestep": torch.zeros(batch, dtype=torch.long),
            "encoder_hidden_states": torch.empty(batch, 512, model.config.text_dim, **half),
        },
        _velocity,
    )
