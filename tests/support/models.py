"""Small models that many tests share: a module made of a function, a residual block, layers called in turn, a GPT."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Made(nn.Module):
    """A module of named parts and what it does with them.

        Made(lambda m, x: x + m.down(m.up(x).relu()), up=nn.Linear(8, 32), down=nn.Linear(32, 8))

    A tensor among the parts is a plain attribute; buffers are named apart.
    """

    def __init__(self, does: Callable[..., Any], buffers: dict[str, torch.Tensor] | None = None, **parts: Any) -> None:
        super().__init__()
        self.does = does
        for name, part in parts.items():
            setattr(self, name, part)
        for name, buffer in (buffers or {}).items():
            self.register_buffer(name, buffer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.does(self, *args, **kwargs)


class Residual(nn.Module):
    """A norm, two products with a GELU between them, dropout if asked for, and the input added."""

    def __init__(self, width: int, factor: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(dropout) if dropout else None
        self.up, self.down = nn.Linear(width, factor * width), nn.Linear(factor * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(F.gelu(self.up(self.norm(x))))
        return x + (y if self.drop is None else self.drop(y))


class InTurn(nn.Module):
    """Layers that a loop of the model's own calls one after the other; `residual` adds each to its input."""

    def __init__(self, layers: Iterable[nn.Module], residual: bool = False) -> None:
        super().__init__()
        self.layers, self.residual = nn.ModuleList(layers), residual

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x) if self.residual else layer(x)
        return x


class Attention(nn.Module):
    """Causal self-attention, or with scores that are written out and dropout on them."""

    def __init__(self, width: int, by_hand: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.by_hand = by_hand

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.view(*x.shape[:2], 4, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        if self.by_hand:
            y = F.dropout((q @ k.transpose(2, 3)).softmax(-1), 0.1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self, width: int, by_hand: bool) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, by_hand)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """Embedding, blocks, head; the loss of the ids it is given."""

    def __init__(self, layers: int = 3, *, by_hand: bool = False, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, by_hand) for _ in range(layers))
        self.head = nn.Linear(width, 64)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def gpt(layers: int = 4) -> Gpt:
    """The GPT with its scores written out, and weights from a fixed seed."""
    torch.manual_seed(0)
    return Gpt(layers, by_hand=True)


def ids_of(length: int, rows: int = 2) -> torch.Tensor:
    """Tokens for `Gpt`, the same for the same length."""
    return torch.randint(64, (rows, length), generator=torch.Generator().manual_seed(length))


DEEP = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))


def deep_is_made() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Many narrow layers over many tokens: the inputs of layers outweigh what is in them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual(16, dropout=0.1) for _ in range(12)))
    return model, lambda: model(DEEP).square().mean()


# A small Llama as its `config.json` has it.
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}


def without_a_loss() -> tuple[nn.Module, torch.Tensor]:
    """Two layers, whose result is no loss, and a batch."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in "ab")), torch.ones(
        4, 8
    )


def with_a_loss() -> tuple[nn.Module, torch.Tensor, object]:
    """The same with its loss."""
    return *without_a_loss(), torch.sum
