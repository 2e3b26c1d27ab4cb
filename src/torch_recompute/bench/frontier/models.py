"""The models of `bench frontier`: small ones of the two common shapes, on random tokens.

`forward` takes tokens and gives the loss, so that every way to run a step sees the same call. Attention's core and the
MLP are modules, because that is what settings by labels name. Everything is seeded, so each call of `build` gives the
same weights and tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 1024
HEAD = 32
"""Width of an attention head."""
DROPOUT = 0.1


class Core(nn.Module):
    """Causal attention; a key and value head may serve several query heads."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """From (batch, heads, tokens, head width) to the same."""
        several = q.shape[1] // k.shape[1]
        if several > 1:
            k, v = k.repeat_interleave(several, 1), v.repeat_interleave(several, 1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    """Self-attention of `width // HEAD` query heads and as many or fewer heads of keys and values."""

    def __init__(self, width: int, shared: int, *, bias: bool) -> None:
        super().__init__()
        self.kept = width // shared
        self.q = nn.Linear(width, width, bias=bias)
        self.k, self.v = (nn.Linear(width, self.kept, bias=bias) for _ in range(2))
        self.core = Core()
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Mix each position with those before it."""
        batch, tokens, width = x.shape
        q, k, v = (product(x).view(batch, tokens, -1, HEAD).transpose(1, 2) for product in (self.q, self.k, self.v))
        return self.out(self.core(q, k, v).transpose(1, 2).reshape(batch, tokens, width))


class Gated(nn.Module):
    """The MLP with a gate."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Of (..., width)."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A pre-norm layer: of GPT, or of a Llama, which has RMS norms, a gate, fewer heads of keys and no biases."""

    def __init__(self, width: int, *, llama: bool) -> None:
        super().__init__()
        norm: Callable[[int], nn.Module] = nn.RMSNorm if llama else nn.LayerNorm
        self.norm1, self.norm2 = norm(width), norm(width)
        self.attention = Attention(width, 2 if llama else 1, bias=not llama)
        self.mlp = (
            Gated(width, 8 * width // 3)
            if llama
            else nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        )
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        """Add what attention and the MLP have to say."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Model(nn.Module):
    """Tokens in, loss out."""

    def __init__(self, layers: int, width: int, tokens: int, *, llama: bool) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(tokens, width)
        self.layers = nn.ModuleList(Block(width, llama=llama) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """The loss of predicting each token from those before it."""
        x = self.embed(text[:, :-1]) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), text[:, 1:].flatten())


MODELS = {"gpt": False, "llama": True}
"""The models by name, and whether the layers are a Llama's."""


def build(name: str, layers: int, width: int, tokens: int, batch: int) -> tuple[Model, Tensor]:
    """A model and one batch for it; the caller's random numbers are left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Model(layers, width, tokens, llama=MODELS[name])
        return model, torch.randint(VOCABULARY, (batch, tokens + 1))
