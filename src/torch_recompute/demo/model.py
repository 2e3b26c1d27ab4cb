"""What the demonstration trains: a small GPT whose nested calls are wrapped in what a setting says.

`SETTINGS` is the table of what is compared, one line each. The model asks its setting at three places, around the
layer, around attention and around the attention core, and knows nothing else of recomputation. A setting with a budget
wraps nothing: a plan is made for the finished model and applied to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from .. import no_recompute, recompute
from ..errors import ArgumentError

VOCABULARY = 256
HEADS = 4
DROPOUT = 0.1

Call = Callable[..., Tensor]
Wrap = Callable[[Call], Call]


def plain(fn: Call) -> Call:
    """No recomputation."""
    return fn


@dataclass(frozen=True)
class Setting:
    """What is wrapped around the three nested calls of a transformer layer, or the budget of a plan for the model."""

    name: str
    title: str
    layer: Wrap = plain
    attention: Wrap = plain
    core: Wrap = plain
    budget: float | None = None


SETTINGS = (
    Setting("none", "nothing recomputed"),
    Setting("layers", "every layer", layer=partial(recompute, name="layer")),
    Setting("attention", "attention only", attention=partial(recompute, name="attention")),
    Setting(
        "layers_save_attention",
        "every layer but attention",
        layer=partial(recompute, name="layer"),
        core=partial(no_recompute, name="attention core"),
    ),
    Setting("planned", "planned for 35 % of the activation memory", budget=0.35),
)


@dataclass(frozen=True)
class Config:
    """The size of the demonstration."""

    steps: int = 20
    layers: int = 6
    d_model: int = 256
    seq: int = 256
    batch: int = 12
    seed: int = 0

    def check(self) -> None:
        """Refuse what cannot run, and say what would."""
        for name in ("steps", "layers", "d_model", "seq", "batch"):
            if getattr(self, name) < 1:
                option = name.replace("_", "-")
                raise ArgumentError(
                    f"--{option} is {getattr(self, name)}; expected a whole number of at least 1. "
                    f"Write for example --{option} {getattr(Config, name)}, which is what you get without it."
                )
        if self.d_model % HEADS:
            above = self.d_model + HEADS - self.d_model % HEADS
            raise ArgumentError(
                f"--d-model is {self.d_model}; expected a multiple of {HEADS}, because the model has {HEADS} "
                f"attention heads of equal width. Write --d-model {above}"
            )


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, d_model: int, setting: Setting) -> None:
        super().__init__()
        self.setting = setting
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """Mix each position with those before it."""
        batch, seq, d_model = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, HEADS, d_model // HEADS).permute(2, 0, 3, 1, 4)
        mixed = self.setting.core(F.scaled_dot_product_attention)(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, seq, d_model))


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, d_model: int, setting: Setting) -> None:
        super().__init__()
        self.setting = setting
        self.norm1 = nn.LayerNorm(d_model)
        self.attention = Attention(d_model, setting)
        self.norm2 = nn.LayerNorm(d_model)
        self.mlp = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        """Add what attention and the MLP have to say."""
        x = x + self.dropout(self.setting.attention(self.attention)(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """A byte-level language model; `forward` gives its loss."""

    def __init__(self, config: Config, setting: Setting) -> None:
        super().__init__()
        self.setting = setting
        self.tokens = nn.Embedding(VOCABULARY, config.d_model)
        self.positions = nn.Embedding(config.seq, config.d_model)
        self.dropout = nn.Dropout(DROPOUT)
        self.layers = nn.ModuleList(Layer(config.d_model, setting) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.d_model)
        self.head = nn.Linear(config.d_model, VOCABULARY, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Predict every byte from those before it."""
        x = self.tokens(text[:, :-1]) + self.positions.weight
        x = self.dropout(x)
        for layer in self.layers:
            x = self.setting.layer(layer)(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
