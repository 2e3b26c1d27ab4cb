"""The published formulas for what a transformer layer keeps, against what torch keeps, byte for byte.

`s` tokens, `b` sequences, `h` the width, `a` heads. The layer is the one that the formulas are of: LayerNorm, one
product for queries, keys and values, attention, a projection, and an MLP four times as wide with a GELU, without
biases, in bfloat16. Two terms of torch are in no formula: the mean and the reciprocal deviation of each norm, and the
log-sum-exp of fused attention. Korthikanti et al. count a byte per element of a dropout's mask, as CUDA's fused dropout
keeps it; the CPU's, whose kernels a simulation here runs, keeps the mask in the type of the activations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from support.zoo import mean_loss
from torch_recompute import Choice, Plan, simulate
from torch_recompute.planner.planner import Planner
from torch_recompute.planner.tensor_parallel import add_collectives, divided
from torch_recompute.simulation.devices import Roofline
from torch_recompute.simulation.training_step import TrainingStep

S, B, H, A, LAYERS = 96, 2, 64, 4, 4
SBH, SB = S * B * H, S * B
STATISTICS = 2 * 2 * 2 * SB  # two norms, mean and deviation of each token, in bfloat16 on the CPU
LOGSUMEXP = 4 * A * SB
MASK = 2  # bytes per element


class Attention(nn.Module):
    """The heads of one of some ranks."""

    def __init__(self, *, fused: bool, ranks: int) -> None:
        super().__init__()
        self.heads, own = A // ranks, H // ranks
        self.qkv, self.proj = nn.Linear(H, 3 * own, bias=False), nn.Linear(own, H, bias=False)
        self.fused = fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.view(B, S, self.heads, H // A).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            scores = (q @ k.transpose(2, 3)) / math.sqrt(H // A)
            y = F.dropout(scores.softmax(-1), 0.1) @ v
        return self.proj(y.transpose(1, 2).reshape(B, S, H // A * self.heads))


class Mlp(nn.Module):
    def __init__(self, *, ranks: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, 4 * H // ranks, bias=False), nn.Linear(4 * H // ranks, H, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    """Pre-norm. `fused`: one attention call and no dropout; else attention by hand, and dropout in three places."""

    def __init__(self, *, fused: bool, ranks: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(H, bias=False), nn.LayerNorm(H, bias=False)
        self.attention, self.mlp = Attention(fused=fused, ranks=ranks), Mlp(ranks=ranks)
        self.dropout = 0.0 if fused else 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropped(self.attention(self.norm1(x)))
        return x + self.dropped(self.mlp(self.norm2(x)))

    def dropped(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.dropout) if self.dropout else x


class Stack(nn.Module):
    def __init__(self, layers: int, *, fused: bool = True, ranks: int = 1) -> None:
        super().__init__()
        self.first = nn.Linear(H, H, bias=False)
        self.layers = nn.ModuleList(Layer(fused=fused, ranks=ranks) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def stack(layers: int, *, fused: bool = True) -> tuple[Stack, tuple[torch.Tensor]]:
    with torch.device("meta"):
        return Stack(layers, fused=fused).bfloat16(), (torch.empty(B, S, H, dtype=torch.bfloat16),)


def kept_by_a_rank(ranks: int, *, sequence: bool) -> int:
    """What one more layer adds to what one of several tensor-parallel ranks keeps, by hand and with dropout."""
    kept: list[int] = []
    for layers in (2, 3):
        with torch.device("meta"):
            whole, part = (Stack(layers, fused=False, ranks=n).bfloat16() for n in (1, ranks))
            x = torch.empty(B, S // ranks if sequence else S, H, dtype=torch.bfloat16)
        paths, slices = [f"layers.{i}" for i in range(layers)], divided(whole, part, ranks, "gpt")
        add_collectives(part, paths, slices, ranks, sequence)
        kept.append(simulate(part, (x,), loss=mean_loss).saved_bytes)
    return kept[1] - kept[0]


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_a_rank_keeps(ranks: int) -> None:
    """Of t tensor-parallel ranks each keeps sbh (10 + 24 / t) + 5 a s^2 b / t; with sequence parallelism a t-th of all.

    The masks of the attention's dropout are of heads and divided; those of the others are of tokens.
    """
    scores = A * S * S * B
    divided_up = 24 * SBH + 5 * scores + (MASK - 1) * scores
    shared = 10 * SBH + (MASK - 1) * 2 * SBH + STATISTICS
    assert kept_by_a_rank(ranks, sequence=False) == shared + divided_up // ranks
    assert kept_by_a_rank(ranks, sequence=True) == (shared + divided_up) // ranks


class Placement(NamedTuple):
    """What is kept besides the layer's input, the published bytes in sbh, and the replayed products in sbh^2."""

    keep: tuple[str, ...]
    kept: int
    products: int


QKV, CORE, PROJ, UP = "attention.qkv@product", "attention@attention", "attention.proj@product", "mlp.up@product"
PLACEMENTS: Mapping[str, Placement] = {
    "without norms and gelu": Placement((QKV, CORE, PROJ, UP), 20, 0),
    "and without up": Placement((QKV, CORE, PROJ), 12, 8),
    "and without qkv": Placement((CORE, PROJ), 6, 14),
    "and without x'": Placement((CORE,), 4, 16),
    "only the input": Placement((), 2, 16),
}


def placed(placement: Placement, layers: int) -> Plan:
    return Plan(tuple(Choice((f"layers.{i}",), placement.keep) for i in range(layers)))


def kept_per_layer(plan: Placement | None, *, fused: bool = True) -> int:
    """What one more layer adds to what is kept at the turn."""
    kept: list[int] = []
    for layers in (2, 3):
        model, args = stack(layers, fused=fused)
        kept.append(
            simulate(model, args, plan=None if plan is None else placed(plan, layers), loss=mean_loss).saved_bytes
        )
    return kept[1] - kept[0]


def test_everything_kept() -> None:
    """32 sbh with fused attention and no dropout; 34 sbh + 5 a s^2 b with both by hand, a mask's byte made two."""
    assert kept_per_layer(None) == 32 * SBH + STATISTICS + LOGSUMEXP
    masks = 2 * SBH + A * S * S * B
    assert kept_per_layer(None, fused=False) == 34 * SBH + 5 * A * S * S * B + (MASK - 1) * masks + STATISTICS


@pytest.mark.parametrize("name", PLACEMENTS)
def test_what_a_placement_keeps(name: str) -> None:
    """20, 12, 6, 4 and 2 sbh, and the log-sum-exp wherever the attention is kept."""
    placement = PLACEMENTS[name]
    assert kept_per_layer(placement) == placement.kept * SBH + (LOGSUMEXP if CORE in placement.keep else 0)


@pytest.fixture(scope="module")
def planner() -> Planner:
    model, args = stack(LAYERS)
    return Planner(TrainingStep(model, args, device=Roofline("counting FLOPs", {1: 1e12}, 1e18, 1e-12), loss=mean_loss))


@pytest.mark.parametrize("name", PLACEMENTS)
def test_the_frontier_lies_on_them(name: str, planner: Planner) -> None:
    """At the peak of every placement the plan replays no more than the formula says; the layer's options have it.

    PyTorch counts no FLOPs for the CPU's fused attention, so they are those of the products.
    """
    placement = PLACEMENTS[name]
    flops = placement.products * SBH * H
    model, args = stack(LAYERS)
    reached = simulate(model, args, plan=placed(placement, LAYERS), loss=mean_loss)
    assert reached.flops["replay"] == LAYERS * flops
    plan = planner.plan(reached.peak_bytes)
    assert plan.predicted_peak_bytes is not None
    assert plan.predicted_peak_bytes <= reached.peak_bytes
    assert plan.predicted_replay_flops is not None
    assert plan.predicted_replay_flops <= LAYERS * flops
    (kind,) = {segment.kind for segment in planner.costs.segments}
    kept = placement.kept * SBH + (LOGSUMEXP if CORE in placement.keep else 0)
    assert any(way.saved_bytes <= kept and way.flops <= flops for way in planner.costs.kinds[kind].options)
