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
from distributed.ranks import least_peak
from support.training import kept_by_compiled, kept_in, mean_square, peak_on_ranks
from torch_recompute import Choice, Plan, Ranks, apply
from torch_recompute.compiling.layers import compile_layers
from torch_recompute.memory.loop import Loop
from torch_recompute.simulation.step import simulate_step
from torch_recompute.simulation.training_step import TrainingStep

nightly = pytest.mark.nightly
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


def over_gathered(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    """Attention to the keys and values of all ranks; its result and log-sum-exp."""
    return aten._scaled_dot_product_flash_attention_for_cpu(q, gathered(k), gathered(v), 0.0, False)


def back_over_gathered(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *result: Any) -> Any:
    """Its backward, which gathers again."""
    whole = gathered(k), gathered(v)
    found = aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, *whole, *result, 0.0, False)
    del whole
    of_q, *others = found
    del found
    return of_q, *(reduced(others.pop(0)) for _ in range(2))


def passed_on(x: torch.Tensor) -> torch.Tensor:
    """The block of the rank before."""
    rank, size = dist.get_rank(), dist.get_world_size()
    to, of = ([x.numel() if other == (rank + step) % size else 0 for other in range(size)] for step in (1, -1))
    return functional.all_to_all_single(x, of, to, dist.group.WORLD)


def around_the_ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    """PyTorch's ring attention, without a mask: a block is passed on while attention to it runs."""
    key, value = k, v
    out = sums = sent = got = None
    for step in range(dist.get_world_size()):
        if step:
            key, value = functional.wait_tensor(got).chunk(2)
            key, value = key.view(k.shape), value.view(v.shape)
        sent = got = None
        if step < dist.get_world_size() - 1:
            sent = torch.cat([key.flatten(), value.flatten()])
            got = passed_on(sent)
        part, of_part = aten._scaled_dot_product_flash_attention_for_cpu(q, key, value, 0.0, False)
        of_part = of_part.unsqueeze(-1)
        if out is None:
            out, sums = part, of_part
        else:
            out = out - F.sigmoid(of_part - sums) * (out - part)
            sums = sums - F.logsigmoid(sums - of_part)
        del part, of_part
    return out, sums


def back_around_the_ring(grad: torch.Tensor, q: Any, k: Any, v: Any, out: torch.Tensor, sums: torch.Tensor) -> Any:
    """Its backward, in which gradients follow the blocks."""
    of_q, of_k, of_v = (torch.zeros_like(x) for x in (q, k, v))
    key, value, sent, got, on_its_way, followed = k, v, None, None, None, None
    for step in range(dist.get_world_size()):
        if step:
            key, value = (x.view(k.shape) for x in functional.wait_tensor(got).chunk(2))
        sent = got = None
        if step < dist.get_world_size() - 1:
            sent = torch.cat([key.flatten(), value.flatten()])
            got = passed_on(sent)
        parts = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, key, value, out, sums.squeeze(-1), 0.0, False
        )
        if step:
            of_k, of_v = (x.view(k.shape) for x in functional.wait_tensor(followed).chunk(2))
        on_its_way = followed = None
        of_k.add_(parts[1])
        of_v.add_(parts[2])
        on_its_way = torch.cat([of_k.flatten(), of_v.flatten()])
        followed = passed_on(on_its_way)
        of_q += parts[0]
        del parts
    del sent, got, on_its_way, key, value
    of_k, of_v = (x.view(k.shape) for x in functional.wait_tensor(followed).chunk(2))
    return of_q, of_k, of_v


WAYS = {"all-gather": (over_gathered, back_over_gathered), "ring": (around_the_ring, back_around_the_ring)}


class Shared(torch.autograd.Function):
    """Attention to the tokens of all ranks, which keeps a rank's own."""

    @staticmethod
    def forward(ctx: Any, kind: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        own = (k.contiguous(), v.contiguous()) if kind == "ring" else (k, v)
        out, sums = WAYS[kind][0](q, *own)
        ctx.kind = kind
        ctx.save_for_backward(q, *own, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, *WAYS[ctx.kind][1](grad, *ctx.saved_tensors)


@torch.library.custom_op("tests::shared", mutates_args=())
def shared(kind: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as one operation of a graph, as DTensor's is; its result and log-sum-exp."""
    return WAYS[kind][0](q, k.contiguous(), v.contiguous())


@shared.register_fake
def _(kind: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), q.new_empty(*q.shape[:3], *([1] if kind == "ring" else []))


@torch.library.custom_op("tests::shared_backward", mutates_args=())
def back_shared(kind: str, grad: torch.Tensor, kept: list[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of a rank's queries, keys and values."""
    return [x.contiguous() for x in WAYS[kind][1](grad, *kept)]


@back_shared.register_fake
def _(kind: str, grad: torch.Tensor, kept: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.new_empty(x.shape) for x in kept[:3]]


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.kind, *own = inputs
    ctx.save_for_backward(*own, *output)


shared.register_autograd(
    lambda ctx, grad, _: (None, *back_shared(ctx.kind, grad, list(ctx.saved_tensors))), setup_context=_save
)


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


ATTENTIONS: dict[str, Any] = {
    "": F.scaled_dot_product_attention,
    "all-gather": partial(Shared.apply, "all-gather"),
    "ulysses": by_ulysses,
    "ring": partial(Shared.apply, "ring"),
    **{f"compiled {kind}": lambda q, k, v, kind=kind: shared(kind, q, k, v)[0] for kind in WAYS},
}


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


def plans(kind: str) -> dict[str, Plan]:
    """Those of a kind of attention; no plan keeps a call of an autograd function."""
    return {name: plan for name, plan in PLANS.items() if name != "attention kept" or kind == "ulysses"}


def measured_once(kind: str, plan: Plan, x: torch.Tensor) -> int:
    return peak_on_ranks(model(kind), plan, x)


def measured(kind: str, promised: dict[str, int]) -> dict[str, int]:
    """The peak of each plan on this rank."""
    x = torch.randn(BATCH, TOKENS // dist.get_world_size(), WIDTH)
    return {
        name: least_peak(partial(measured_once, kind, plan, x), promised[name]) for name, plan in plans(kind).items()
    }


def predicted(kind: str, count: int) -> dict[str, int]:
    """The peak of each plan on any of so many ranks."""
    ranks = Ranks(cp=count, zero=0, cp_kind=kind)
    x = torch.randn(BATCH, TOKENS // count, WIDTH)
    found: dict[str, int] = {}
    for name, plan in plans(kind).items():
        step = TrainingStep(
            model(""), (x,), {}, mean_square, torch.optim.SGD, loop=Loop(hold_output=False), ranks=ranks
        )
        simulated = simulate_step(step, prepare=partial(apply, plan=plan))
        assert "attention" in simulated.peak.module
        found[name] = simulated.peak_bytes
    return found


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=nightly)])
@pytest.mark.parametrize("kind", ["all-gather", "ulysses", "ring"])
def test_the_peak_of_a_rank_that_shares_tokens(ranks: Processes, kind: str, count: int) -> None:
    """With gathered keys and values, tokens for heads, or blocks that go round, the peak is the predicted one."""
    promised = predicted(kind, count)
    assert Processes(ranks._pool, count).run(measured, kind, promised) == [promised] * count


def kept(kind: str) -> tuple[int, int]:
    """What a layer keeps that torch compiles on ranks, and what is predicted."""
    ranks = Ranks(cp=dist.get_world_size(), zero=0, cp_kind=kind)
    x, whole = torch.randn(BATCH, TOKENS // ranks.cp, WIDTH, requires_grad=True), model("")
    compile_layers(whole, ranks)
    step = TrainingStep(whole, (x,), {}, mean_square, torch.optim.SGD, loop=Loop(hold_output=False), ranks=ranks)
    return kept_by_compiled(model(f"compiled {kind}")[1], x), kept_in(simulate_step(step), "1")


@nightly
@pytest.mark.parametrize("kind", [*WAYS])
def test_a_compiled_layer_that_shares_tokens_keeps_what_torch_keeps(ranks: Processes, kind: str) -> None:
    """A layer that torch compiles on two ranks, attention to all tokens in its graph, keeps what is predicted."""
    for measured, predicted in ranks.run(kept, kind):
        assert measured == predicted
