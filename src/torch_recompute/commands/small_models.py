"""Small language models that run where nothing else is installed: a GPT and a Llama.

A model is called with one batch and returns the loss. Parts that settings by labels name are modules. Everything is
seeded, so each model has the same weights each time. The demonstration and `bench run` train them, and so do the
comparisons in `benchmarks/`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 1024
HEAD = 32
"""Width of an attention head."""


class Core(nn.Module):
    """Attention; a key and value head may serve several query heads."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Takes and returns (batch, heads, tokens, head width)."""
        several = q.shape[1] // k.shape[1]
        if several > 1:
            k, v = k.repeat_interleave(several, 1), v.repeat_interleave(several, 1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


class Attention(nn.Module):
    """Attention with heads of width `head`; a head of keys and values serves `shared` query heads."""

    def __init__(
        self, width: int, shared: int = 1, *, bias: bool = True, causal: bool = True, head: int = HEAD
    ) -> None:
        super().__init__()
        kept = width // shared
        self.head = head
        self.q = nn.Linear(width, width, bias=bias)
        self.k, self.v = (nn.Linear(width, kept, bias=bias) for _ in range(2))
        self.core = Core(causal=causal)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        """Mixes each position with those of the source, by default the same sequence."""
        source = x if source is None else source
        q, k, v = (
            product(of).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for product, of in ((self.q, x), (self.k, source), (self.v, source))
        )
        return self.out(self.core(q, k, v).transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """The MLP with a gate."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns (..., width)."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


def mlp(width: int) -> nn.Module:
    """Returns the MLP of a GPT."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class TransformerBlock(nn.Module):
    """A layer with the norms before attention and MLP."""

    def __init__(self, norm: Callable[[int], nn.Module], width: int, attention: Attention, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(width), norm(width)
        self.attention, self.mlp = attention, mlp
        self.dropout = nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        """Adds the outputs of attention and of the MLP."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))

    @classmethod
    def gpt(cls, width: int, *, causal: bool = True, head: int = HEAD) -> TransformerBlock:
        """Returns a layer of a GPT, or of an encoder."""
        return cls(nn.LayerNorm, width, Attention(width, causal=causal, head=head), mlp(width))

    @classmethod
    def llama(cls, width: int) -> TransformerBlock:
        """Returns a layer with RMS norms, a gate, fewer heads of keys and no biases."""
        return cls(nn.RMSNorm, width, Attention(width, 2, bias=False), Gated(width, 8 * width // 3))


class Decoder(nn.Module):
    """A language model, tokens in and loss out: embeddings, equal layers, a head; `layer` makes a layer of a width."""

    def __init__(
        self, layers: int, width: int, tokens: int, layer: Callable[[int], nn.Module], vocabulary: int = VOCABULARY
    ) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.layers = nn.ModuleList(layer(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Returns the loss of predicting each token of [batch, tokens + 1], or fewer, from those before it."""
        x = self.embed(text[:, :-1]) + self.places.weight[: text.shape[1] - 1]
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), text[:, 1:].flatten())


def seeded(make: Callable[[], Decoder], dropout: float = 0.1, seed: int = 0) -> Decoder:
    """Builds a model from a seed, the caller's random numbers left alone; its dropouts drop this share."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    return model
