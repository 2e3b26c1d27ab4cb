"""Steps that are simulated for a rank of a context-parallel group have the peak of one written with collectives."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.nn import functional as F

from distributed.ranks import Ranks as Processes
from support.training import mean_square, peak_on_ranks
from torch_recompute import Choice, Plan, Ranks, apply
from torch_recompute.memory.loop import Loop
from torch_recompute.simulation.step import simulate_step
from torch_recompute.training_step import TrainingStep

WIDTH, HEADS, TOKENS, DEPTH, BATCH = 32, 4, 24, 3, 2
aten: Any = torch.ops.aten
PLANS = {
    "plain": Plan(),
    "regions": Plan(tuple(Choice((f"{i}",)) for i in range(DEPTH))),
    "attention kept": Plan(tuple(Choice((f"{i}",), keep=("@attention",)) for i in range(DEPTH))),
}


def gathered(x: torch.Tensor) -> torch.Tensor:
    """All ranks' tokens, of (batch, heads, tokens, width)."""
    own = x.permute(2, 0, 1, 3).contiguous()
    return functional.wait_tensor(functional.all_gather_tensor(own, 0, dist.group.WORLD)).permute(1, 2, 0, 3)


def reduced(grad: torch.Tensor) -> torch.Tensor:
    own = functional.reduce_scatter_tensor(grad.permute(2, 0, 1, 3).contiguous(), "sum", 0, dist.group.WORLD)
    return functional.wait_tensor(own).permute(1, 2, 0, 3)


class OverGathered(torch.autograd.Function):
    """Attention to the keys and values of all ranks, which are gathered again in backward."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, gathered(k), gathered(v), 0.0, False)
        ctx.save_for_backward(q, k, v, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v, out, sums = ctx.saved_tensors
        whole = gathered(k), gathered(v)
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, *whole, out, sums, 0.0, False)
        del whole
        of_q, *others = found
        del found
        return of_q, *(reduced(others.pop(0)) for _ in range(2))


class Exchange(torch.autograd.Function):
    """DeepSpeed's exchange of tokens for heads, or back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, to_heads: bool) -> torch.Tensor:
        ctx.to_heads = to_heads
        size, (batch, heads, tokens, width) = dist.get_world_size(), x.shape
        if to_heads:
            x = x.view(batch, size, heads // size, tokens, width).permute(1, 3, 0, 2, 4).contiguous()
        else:
            x = x.view(batch, heads, size, tokens // size, width).permute(2, 1, 3, 0, 4).contiguous()
        x = functional.wait_tensor(functional.all_to_all_single(x, None, None, dist.group.WORLD))
        return x.flatten(0, 1).permute(1, 2, 0, 3) if to_heads else x.flatten(0, 1).permute(2, 0, 1, 3)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return Exchange.forward(ctx, grad, not ctx.to_heads), None


def by_ulysses(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    q, k, v = (Exchange.apply(x, True) for x in (q, k, v))
    return Exchange.apply(F.scaled_dot_product_attention(q, k, v), False)


ATTENTIONS = {"": F.scaled_dot_product_attention, "all-gather": OverGathered.apply, "ulysses": by_ulysses}


class Attention(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.o(ATTENTIONS[self.kind](q, k, v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.attention, self.up = nn.LayerNorm(WIDTH), Attention(kind), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.up(x)


def model(kind: str) -> nn.Module:
    return nn.Sequential(*(Layer(kind) for _ in range(DEPTH)))


def peaks(kind: str) -> dict[str, list[int]]:
    """The peak that is measured, and the one predicted, of each plan."""
    ranks = Ranks(cp=dist.get_world_size(), zero=0, cp_kind=kind)
    x = torch.randn(BATCH, TOKENS // ranks.cp, WIDTH)
    found: dict[str, list[int]] = {}
    for name, plan in PLANS.items():
        if name == "attention kept" and kind == "all-gather":
            continue  # no plan keeps a call of an autograd function
        step = TrainingStep(
            model(""), (x,), {}, mean_square, torch.optim.SGD, loop=Loop(hold_output=False), ranks=ranks
        )
        simulated = simulate_step(step, prepare=partial(apply, plan=plan))
        assert "attention" in simulated.peak.module
        found[name] = [min(peak_on_ranks(model(kind), plan, x) for _ in range(3)), simulated.peak_bytes]
    return found


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("kind", ["all-gather", "ulysses"])
def test_the_peak_of_a_rank_that_shares_tokens(ranks: Processes, kind: str, count: int) -> None:
    """With gathered keys and values, or tokens for heads, the measured peak is the predicted one to the byte."""
    for found in Processes(ranks._pool, count).run(peaks, kind):
        assert {name: peak for name, (peak, _) in found.items()} == {name: peak for name, (_, peak) in found.items()}
