"""Steps that are simulated for a rank of an expert-parallel group have the peak of one written with collectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from distributed.ranks import Ranks as Processes
from distributed.ranks import least_peak
from support.training import mean_square, peak_on_ranks
from torch_recompute import Choice, Plan, Ranks, apply, measure
from torch_recompute.memory.loop import Loop
from torch_recompute.planner.tensor_parallel import add_collectives
from torch_recompute.simulation.step import simulate_step
from torch_recompute.simulation.training_step import TrainingStep

pytestmark = pytest.mark.nightly

WIDTH, INNER, EXPERTS, CHOSEN, TOKENS, DEPTH = 16, 24, 8, 2, 64, 3
PLANS = {"plain": Plan(), "regions": Plan(tuple(Choice((f"{i}",)) for i in range(DEPTH)))}
SKEWED = 1.5


GROUP: list[Any] = []  # the group that shares experts, if it is not that of all ranks


def group() -> Any:
    return GROUP[-1] if GROUP else dist.group.WORLD


def skewed(count: int) -> list[int]:
    """Of the first rank's rows, how many go to each of two ranks: all ranks send the first one half as many more."""
    return [int(count * SKEWED) // 2, count - int(count * SKEWED) // 2]


class AllToAll(torch.autograd.Function):
    """Rows to the ranks of their experts, given how many go to each and come from each."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, to: list[int], of: list[int]) -> torch.Tensor:
        ctx.splits = to, of
        return functional.wait_tensor(functional.all_to_all_single(x, of, to, group()))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        to, of = ctx.splits
        return AllToAll.forward(ctx, grad.contiguous(), of, to), None, None


class Experts(nn.Module):
    """Experts stacked as those of transformers are, which loop over those that are asked."""

    def __init__(self, count: int, inner: int = INNER) -> None:
        super().__init__()
        self.num_experts = count
        self.gate_up_proj = nn.Parameter(torch.randn(count, 2 * inner, WIDTH) / 8)
        self.down_proj = nn.Parameter(torch.randn(count, WIDTH, inner) / 8)

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
        rows = torch.arange(top_k_index.numel()) // top_k_index.shape[1]
        each = hidden_states[rows].chunk(self.num_experts)
        outs = []
        for number, x in enumerate(each):
            gate, up = F.linear(x, self.gate_up_proj[number]).chunk(2, -1)
            outs.append(F.linear(F.silu(gate) * up, self.down_proj[number]))
        weighted = torch.cat(outs) * top_k_weights.reshape(-1, 1)
        return weighted.view(*top_k_index.shape, -1).sum(1)


class Shared(Experts):
    """The experts of one rank."""

    def __init__(self, skew: bool, rows: int = TOKENS * CHOSEN, inner: int = INNER) -> None:
        size, rank = dist.get_world_size(group()), dist.get_rank(group())
        super().__init__(EXPERTS // size, inner)
        self.to = skewed(rows) if skew else [rows // size] * size
        self.of = [self.to[rank]] * size

    def sent(self, x: torch.Tensor) -> torch.Tensor:
        return AllToAll.apply(x, self.to, self.of)

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
        order = torch.arange(top_k_index.numel())
        asked = torch.arange(sum(self.of))[:, None] % self.num_experts
        out = super().forward(self.sent(hidden_states[order // CHOSEN]), asked, self.sent(top_k_weights.reshape(-1, 1)))
        back = AllToAll.apply(out, self.of, self.to)
        return back[order].view(*top_k_index.shape, -1).sum(1)


class Mixture(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.view(-1, WIDTH)
        weights, _ = self.gate(flat).softmax(-1).topk(CHOSEN)
        index = torch.arange(flat.shape[0] * CHOSEN).view(-1, CHOSEN) % EXPERTS
        return self.experts(flat, index, weights).view(x.shape)


class Tokens(torch.autograd.Function):
    """Gathers the tokens of ranks that share each expert, or adds up their results and gives each rank its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, gather: bool) -> torch.Tensor:
        ctx.how = group, gather
        flat = x.reshape(-1, WIDTH)
        if gather:
            return functional.wait_tensor(functional.all_gather_tensor(flat, 0, group)).unsqueeze(0)
        return functional.wait_tensor(functional.reduce_scatter_tensor(flat, "sum", 0, group)).unsqueeze(0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        group, gather = ctx.how
        return Tokens.forward(ctx, grad, group, not gather), None, None


class SharedByFew(Mixture):
    """A mixture on ranks of tensor parallelism of which fewer share each expert."""

    def __init__(self, experts: nn.Module, group: Any) -> None:
        super().__init__(experts)
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Tokens.apply(super().forward(Tokens.apply(x, self.group, True)), self.group, False)


class Layer(nn.Module):
    def __init__(self, experts: nn.Module, group: Any = None) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mixture(experts) if group is None else SharedByFew(experts, group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def predicted(model: nn.Module, tokens: int, ranks: Ranks, loss: Any = mean_square) -> dict[str, int]:
    """The peak that is predicted of each plan."""
    found: dict[str, int] = {}
    for name, plan in PLANS.items():
        x, loop = torch.randn(1, tokens, WIDTH), Loop(hold_output=False)
        step = TrainingStep(model, (x,), {}, loss, torch.optim.SGD, loop=loop, ranks=ranks)
        simulated = simulate_step(step, prepare=partial(apply, plan=plan))
        assert ranks.fsdp > 1 or "experts" in simulated.peak.module
        found[name] = simulated.peak_bytes
    return found


def layers(inner: int = INNER) -> nn.Module:
    return nn.Sequential(*(Layer(Experts(EXPERTS, inner)) for _ in range(DEPTH)))


def least(run: Callable[[Plan], int], promised: dict[str, int]) -> dict[str, int]:
    """The peak that is measured of each plan, on this rank."""
    return {name: least_peak(partial(run, PLANS[name]), peak) for name, peak in promised.items()}


def peaks(skew: bool, promised: dict[str, int]) -> dict[str, int]:
    """Those of layers whose experts all ranks share."""
    x = torch.randn(1, TOKENS, WIDTH)

    def measured_once(plan: Plan) -> int:
        return peak_on_ranks(nn.Sequential(*(Layer(Shared(skew)) for _ in range(DEPTH))), plan, x)

    return least(measured_once, promised)


@pytest.mark.parametrize(("count", "skew"), [(2, False), (2, True), (4, False)])
def test_the_peak_of_a_rank_that_shares_experts(ranks: Processes, count: int, skew: bool) -> None:
    """The rank whose experts are asked the most has the measured peak that is predicted, to the byte."""
    shares = Ranks(dp=count, ep=count, zero=0, imbalance=SKEWED if skew else 1.0)
    promised = predicted(layers(), TOKENS, shares)
    assert Processes(ranks._pool, count).run(peaks, skew, promised)[0] == promised


SHARDED = Ranks(fsdp=4, ep=2, param_dtype="bfloat16", reduce_dtype="float32")


def sharded_peaks(ep: int, promised: dict[str, int]) -> dict[str, int]:
    """Those of layers that FSDP2 shards over all ranks, and of their experts over those that have the same ones."""
    mesh = init_device_mesh("cpu", (4 // ep, ep), mesh_dim_names=("same", "share"))
    GROUP.append(mesh["share"].get_group())
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    x = torch.randn(1, TOKENS, WIDTH)

    def measured_once(plan: Plan) -> int:
        model = nn.Sequential(*(Layer(Shared(False)) for _ in range(DEPTH)))
        for layer in model:
            fully_shard(layer.mlp.experts, mesh=mesh["same"], mp_policy=policy)
            fully_shard(layer, mesh=init_device_mesh("cpu", (4,)), mp_policy=policy)
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)), mp_policy=policy)
        apply(model, plan)
        optimizer = torch.optim.SGD(model.parameters())
        with measure(model, optimizer).track(x) as memory:
            for _ in range(2):
                mean_square(model(x).float()).backward()
                optimizer.step()
                optimizer.zero_grad()
        dist.barrier()
        return memory.peak_bytes

    found = least(measured_once, promised)
    GROUP.clear()
    return found


@pytest.mark.parametrize("ep", [2, 4])
def test_the_peak_of_experts_that_are_sharded_too(ranks: Processes, ep: int) -> None:
    """Experts are sharded over the ranks that have the same ones, all else over all ranks; the peak is predicted."""
    promised = predicted(layers(), TOKENS, replace(SHARDED, ep=ep), lambda y: mean_square(y.float()))
    assert Processes(ranks._pool, 4).run(sharded_peaks, ep, promised)[0] == promised


def peaks_of_few(ep: int, promised: dict[str, int]) -> dict[str, int]:
    """Those of layers on four ranks that share the tokens, of which two share each expert."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("share", "expert"))
    few, x = mesh["expert"].get_group(), torch.randn(1, TOKENS // 4, WIDTH)
    GROUP.append(mesh["share"].get_group())

    def measured_once(plan: Plan) -> int:
        slices = (
            Shared(False, 2 * x.shape[1] * CHOSEN, INNER // 2) if ep > 1 else Experts(EXPERTS, INNER // 2)
            for _ in range(DEPTH)
        )
        return peak_on_ranks(nn.Sequential(*(Layer(experts, few) for experts in slices)), plan, x)

    found = least(measured_once, promised)
    GROUP.clear()
    return found


@pytest.mark.parametrize("ep", [1, 2])
def test_the_peak_of_experts_that_fewer_ranks_share(ranks: Processes, ep: int) -> None:
    """Of four ranks of tensor parallelism two share each expert and take both tokens; the peak is predicted."""
    whole, paths = layers(INNER // 2), [*map(str, range(DEPTH))]
    add_collectives(whole, paths, set(), 4, True, [f"{path}.mlp.experts" for path in paths], 2)
    promised = predicted(whole, TOKENS // 4, Ranks(tp=4, sequence_parallel=True, etp=2, ep=ep, zero=0))
    assert Processes(ranks._pool, 4).run(peaks_of_few, ep, promised)[0] == promised
