"""Small language models that run where nothing else is installed: a GPT, a Llama and a mixture of experts.

A model is called with one batch and gives the loss. Parts that settings by labels name are modules, and `stacks` gives
the layers that a person would checkpoint. Everything is seeded, so each model has the same weights and data each time.
The demonstration and `bench run` train them, and so do the comparisons in `benchmarks/`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
        """From (batch, heads, tokens, head width) to the same."""
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
        """Mix each position with those of the source, by default the same sequence."""
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
        """Of (..., width)."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


def mlp(width: int) -> nn.Module:
    """The MLP of a GPT."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Experts(nn.Module):
    """Gated MLPs side by side, each for rows of its own."""

    def __init__(self, number: int, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Parameter(torch.randn(number, width, inner) * width**-0.5) for _ in range(2))
        self.down = nn.Parameter(torch.randn(number, inner, width) * inner**-0.5)

    def forward(self, rows: Tensor) -> Tensor:
        """Of (experts, rows, width)."""
        return (F.silu(rows @ self.gate) * (rows @ self.up)) @ self.down


class Mixture(nn.Module):
    """A mixture of experts: each token goes to the two that its scores are highest for.

    An expert takes up to `ROOM` times its even share of the tokens, those that come first; of the others the residual
    stream alone is left (Switch Transformer; Fedus et al. 2021, 2101.03961). So the shapes are those of every batch,
    and each expert's part of a product is of one size.
    """

    NUMBER, CHOSEN, ROOM = 4, 2, 1.25

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, self.NUMBER, bias=False)
        self.experts = Experts(self.NUMBER, width, inner)

    def forward(self, x: Tensor) -> Tensor:
        """Of (batch, tokens, width)."""
        tokens = x.flatten(0, 1)
        room = int(self.ROOM * self.CHOSEN * len(tokens) / self.NUMBER)
        scores, chosen = self.router(tokens).softmax(-1).topk(self.CHOSEN)
        # Each choice's place in the row of its expert, and one place more for what finds that row full.
        expert = chosen.flatten()
        place = F.one_hot(expert, self.NUMBER).cumsum(0).gather(1, expert[:, None])[:, 0] - 1
        seat = torch.where(place < room, expert * room + place, self.NUMBER * room)
        seats = tokens.new_zeros(self.NUMBER * room + 1, tokens.shape[1])
        seats = seats.index_copy(0, seat, tokens.repeat_interleave(self.CHOSEN, 0))
        rows = self.experts(seats[:-1].view(self.NUMBER, room, -1))
        found = F.pad(rows.flatten(0, 1), (0, 0, 0, 1))[seat].view(len(tokens), self.CHOSEN, -1)
        return (found * scores[..., None]).sum(1).view_as(x)


class TransformerBlock(nn.Module):
    """A layer with the norms before attention and MLP."""

    def __init__(self, norm: Callable[[int], nn.Module], width: int, attention: Attention, **after: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(width), norm(width)
        self.attention = attention
        ((self._second, module),) = after.items()
        self.add_module(self._second, module)
        self.dropout = nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        """Add what attention and the MLP have to say."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.get_submodule(self._second)(self.norm2(x)))

    @classmethod
    def gpt(cls, width: int, *, causal: bool = True, head: int = HEAD) -> TransformerBlock:
        """A layer of a GPT, or of an encoder."""
        return cls(nn.LayerNorm, width, Attention(width, causal=causal, head=head), mlp=mlp(width))

    @classmethod
    def llama(cls, width: int) -> TransformerBlock:
        """A layer with RMS norms, a gate, fewer heads of keys and no biases."""
        return cls(nn.RMSNorm, width, Attention(width, 2, bias=False), mlp=Gated(width, 8 * width // 3))

    @classmethod
    def mixtral(cls, width: int) -> TransformerBlock:
        """A layer of a Mixtral."""
        return cls(nn.RMSNorm, width, Attention(width, 2, bias=False), moe=Mixture(width, 2 * width))


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


def seeded(make: Callable[[], Any], dropout: float, seed: int = 0) -> Any:
    """What `make` builds from a seed, the caller's random numbers left alone; a model's dropouts drop this share."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = make()
    for model in made if isinstance(made, tuple) else (made,):
        for module in model.modules() if isinstance(model, nn.Module) else ():
            if isinstance(module, nn.Dropout):
                module.p = dropout
    return made


@dataclass(frozen=True)
class Shape:
    """One kind of model.

    Attributes:
        model: From the number of layers, the width and the number of tokens to a model.
        batch: From the number of tokens and of sequences to a batch.
        labels: What settings by labels recompute of it, one tuple per setting.
    """

    model: Callable[[int, int, int], nn.Module]
    batch: Callable[[int, int], Tensor] = text
    labels: tuple[tuple[str, ...], ...] = (("core_attn",), ("mlp",), ("layernorm",), ("core_attn", "mlp", "layernorm"))

    def build(self, layers: int, width: int, tokens: int, batch: int, dropout: float = 0.1) -> tuple[nn.Module, Tensor]:
        """A model and one batch for it; the caller's random numbers are left alone."""
        return seeded(lambda: (self.model(layers, width, tokens), self.batch(tokens, batch)), dropout)

    def skeleton(self, layers: int) -> list[list[Any]]:
        """The layers of a model, stack by stack, without weights."""
        with torch.device("meta"):
            found: Any = self.model(layers, 2 * HEAD, 1)
        return found.stacks()


MODELS = {
    "gpt": Shape(lambda layers, width, tokens: Decoder(layers, width, tokens, TransformerBlock.gpt)),
    "llama": Shape(lambda layers, width, tokens: Decoder(layers, width, tokens, TransformerBlock.llama)),
    "moe": Shape(
        lambda layers, width, tokens: Decoder(layers, width, tokens, TransformerBlock.mixtral),
        labels=(("core_attn",), ("moe",), ("layernorm",), ("core_attn", "moe", "layernorm")),
    ),
}
"""The models by name."""
