"""A layer whose MLP is a mixture of experts, as in Mixtral."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_recompute.commands.small_models import Attention


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


class MixtralBlock(nn.Module):
    """A layer of a Mixtral: norms before attention and experts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.moe = Attention(width, 2, bias=False), Mixture(width, 2 * width)
        self.dropout = nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        """Adds what attention and the experts make of it."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.moe(self.norm2(x)))
