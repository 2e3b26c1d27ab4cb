"""Tensor parallelism on DTensor: gradients of the plain model, and collectives that a replay repeats or does not."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from torch_recompute import (
    ArgumentError,
    Choice,
    Measurement,
    Plan,
    RecomputeConfig,
    apply,
    doing_recompute,
    measure,
    no_recompute,
    recompute,
)
from torch_recompute.distributed import keep_collectives

WIDTH, HEAD, TOKENS = 32, 8, 12


class Layer(nn.Module):
    """Attention and MLP; separate projections, so that each can be split by heads."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.proj, self.up, self.down = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )
        self.drop1, self.drop2, self.inner = nn.Dropout(dropout), nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (part(h).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.drop1(self.proj(a))
        return x + self.drop2(self.down(self.inner(F.gelu(self.up(self.norm2(x))))))


class Comm(TorchDispatchMode):
    """Counts functional collectives: all of them, and those in replays."""

    def __init__(self) -> None:
        super().__init__()
        self.all: Counter[str] = Counter()
        self.replayed: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in kinds):
            return NotImplemented
        namespace, _, name = func.name().partition("::")
        if namespace in ("_c10d_functional", "_dtensor") and not name.startswith(("wait", "_wrap")):
            self.all[name] += 1
            if doing_recompute():
                self.replayed[name] += 1
        return func(*args, **(kwargs or {}))


def split(layers: nn.ModuleList, sequence: bool) -> None:
    """Tensor parallelism over both ranks, as users write it."""
    mesh = init_device_mesh("cpu", (2,))
    if not sequence:
        style: dict[str, Any] = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
        style |= {name: RowwiseParallel() for name in ("proj", "down")}
    else:
        style = {name: ColwiseParallel(input_layouts=Shard(1)) for name in ("q", "k", "v", "up")}
        style |= {name: RowwiseParallel(output_layouts=Shard(1), use_local_output=False) for name in ("proj", "down")}
        style |= {n: SequenceParallel(use_local_output=False) for n in ("norm1", "norm2", "drop1", "drop2")}
    for layer in layers:
        parallelize_module(layer, mesh, style)


def settled(seen: Measurement) -> int:
    """The bytes alive once gloo's threads have freed what they sent, a moment after its result is there."""
    dist.barrier()  # what was sent before has arrived
    least, last = seen.live_bytes, 0
    for turn in range(25):
        if turn - last > 5:
            break
        time.sleep(0.02)
        if seen.live_bytes < least:
            least, last = seen.live_bytes, turn
    return least


def train(plan: Plan | RecomputeConfig, how: str, dropout: float = 0.0) -> Any:
    """Gradients, what was communicated, what of that in replays, and the bytes kept for backward."""
    warnings.filterwarnings("ignore", "DTensor random operators may not have complete support")
    torch.manual_seed(1)
    layers = nn.ModuleList(Layer(dropout) for _ in range(2))
    x = torch.randn(3, TOKENS, WIDTH)
    if how != "one process":
        split(layers, how == "sequence")
    if how == "sequence":
        x = distribute_tensor(x, init_device_mesh("cpu", (2,)), [Shard(1)])
    apply(layers, plan.plan(layers) if isinstance(plan, RecomputeConfig) else plan)
    torch.manual_seed(2)
    with measure() as seen, Comm() as comm:
        y = x
        for layer in layers:
            y = layer(y)
        loss = y.square().mean()
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        del y
        kept = settled(seen)
        loss.backward()
    grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in layers.parameters()]
    return grads, dict(comm.all), dict(comm.replayed), kept


EACH = (("0",), ("1",))
FULL: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
PLANS: dict[str, Plan | RecomputeConfig] = {
    "each": Plan(tuple(Choice(p) for p in EACH)),
    "products": Plan(tuple(Choice(p, keep=("@product",)) for p in EACH)),
    "attention": Plan(tuple(Choice(p, keep=("@attention",)) for p in EACH)),
    "modules": Plan(tuple(Choice(p, keep=("proj", "up", "norm1")) for p in EACH)),
    "group": Plan((Choice(("0", "1")),)),
    "parts": Plan((Choice(("0.norm1",)), Choice(("0.up",)), Choice(("1.proj",)), Choice(("1.inner",)))),
    "reductions": Plan(tuple(Choice(p, keep=("@reduction",)) for p in EACH)),
    "settings": RecomputeConfig(**FULL),
    "settings that repeat": RecomputeConfig(**FULL, repeat_collectives=True),
    "collectives": Plan(tuple(Choice(p, keep=("@collective",)) for p in EACH)),
    "collectives and products": Plan(tuple(Choice(p, keep=("@collective", "@product")) for p in EACH)),
    "collectives of a group": Plan((Choice(("0", "1"), keep=("@collective",)),)),
}


def compared(how: str, dropout: float) -> Any:
    plain = train(Plan(), how, dropout)
    answers = {}
    for name, plan in PLANS.items():
        grads, comm, replayed, kept = train(plan, how, dropout)
        answers[name] = all(map(torch.equal, grads, plain[0])), comm, replayed, kept
    worst = 0.0
    if not dropout:
        alone = train(Plan(), "one process")[0]
        worst = max((a - b).abs().max().item() for a, b in zip(plain[0], alone, strict=True))
    return worst, plain[1:], answers


@pytest.mark.parametrize(
    ("how", "dropout"), [("tensor", 0.0), *(pytest.param("sequence", p, marks=pytest.mark.nightly) for p in (0.0, 0.5))]
)
def test_plans_on_dtensors(ranks, how: str, dropout: float) -> None:
    """Gradients are bit for bit those without a plan, which are the single process's; replays repeat what is said."""
    for worst, (comm, _, whole), answers in ranks.run(compared, how, dropout):
        assert worst < 1e-6
        assert [name for name, (same, *_) in answers.items() if not same] == []
        reductions, gathers = ("reduce_scatter_tensor", "all_gather_into_tensor")
        if how == "tensor":
            reductions = "all_reduce"
        replayed = {name: found for name, (_, _, found, _) in answers.items()}
        # One reduction after attention; that after the MLP is the layer's last act, and only dropout follows it.
        last = 1 if dropout else 0
        assert replayed["each"][reductions] == 2 + 2 * last
        assert replayed["reductions"].get(reductions, 0) == 0
        assert [replayed[name] for name in PLANS if name.startswith("collectives")] == [{}] * 3
        if how == "sequence":
            assert replayed["each"][gathers] == replayed["reductions"][gathers] == 8
        kept = {name: size for name, (*_, size) in answers.items()}
        for settings, plan in (("settings", "reductions"), ("settings that repeat", "each")):
            assert (replayed[settings], kept[settings]) == (replayed[plan], kept[plan])
        for name, (_, found, again, _) in answers.items():
            first = {key: found[key] - again.get(key, 0) for key in found}
            assert first == comm, name  # forward and backward communicate as without a plan
        assert kept["each"] < kept["reductions"] <= kept["collectives"] < whole
        assert kept["group"] < 0.6 * kept["each"]  # one input, where each of the two layers has one
        assert kept["products"] < 0.6 * whole  # the inputs of saved products are rebuilt


@pytest.fixture
def four_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


FSDP, HSDP, TENSOR = "fully_shard", "fully_shard over two dimensions", "parallelize_module"


@pytest.mark.parametrize(
    ("ways", "split"), [((), False), ((FSDP,), False), ((HSDP,), False), ((TENSOR,), True), ((TENSOR, FSDP), True)]
)
def test_which_layers_keep_reductions(four_ranks, ways: tuple[str, ...], split: bool) -> None:
    """Settings keep reductions of layers that tensor parallelism has split, not of those that only FSDP has."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = nn.ModuleList(Layer(0.0) for _ in range(2))
    for layer in model:
        if TENSOR in ways:
            parallelize_module(layer, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if FSDP in ways or HSDP in ways:
            fully_shard(layer, mesh=mesh["data"] if FSDP in ways else mesh)
    keeps = {choice.keep for choice in RecomputeConfig(**FULL).plan(model).choices}
    assert keeps == {("@reduction",) if split else ()}
    if split:
        again = RecomputeConfig(**FULL, repeat_collectives=True).plan(model)
        assert {choice.keep for choice in again.choices} == {()}
        part = RecomputeConfig(recompute_granularity="selective", recompute_modules=["0.norm1", "0.up"]).plan(model)
        assert [choice.keep for choice in part.choices] == [(), ("@reduction",)]
    else:
        with pytest.raises(ArgumentError, match="no weight in what is recomputed is split"):
            RecomputeConfig(**FULL, repeat_collectives=True).plan(model)


def implicit() -> Any:
    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)]))
    x = distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)])

    def body(x: Any) -> Any:
        return (x.sin().sum(0) + 1).exp() @ weight.cos()  # `exp` of a partial sum cannot wait: DTensor reduces it

    found = []
    for region in (lambda f: f, recompute, lambda f: recompute(keep_collectives(f))):
        with Comm() as comm:
            (grad,) = torch.autograd.grad(region(body)(x).sum().full_tensor(), weight)
        found.append((grad.full_tensor(), dict(comm.all), dict(comm.replayed)))
    (plain, counts, _), (one, _, again), (two, same, none) = found
    return torch.equal(plain, one), torch.equal(plain, two), again, none, same == counts


def test_collectives_that_dtensor_makes_on_its_own(ranks) -> None:
    """What DTensor communicates while it dispatches an operation is repeated in a replay, and not when kept."""
    for one, two, again, none, same in ranks.run(implicit):
        assert (one, two, none, same) == (True, True, {}, True)
        assert again["all_reduce"] == 1


class Reduce(torch.autograd.Function):
    """A reduction in place, as Megatron's functions make it: its result forward, its gradient as it is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Reduce.calls += 1
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad

    calls = 0


def by_hand() -> Any:
    group = dist.group.WORLD
    x = torch.randn(8, 8, requires_grad=True)
    kinds = {
        "functional": lambda x: functional.all_reduce(x.sin(), "sum", group).exp() + 0,
        "gather": lambda x: functional.all_gather_tensor(x.sin(), 0, group).exp() + 0,
        "scatter": lambda x: functional.reduce_scatter_tensor(x.sin(), "sum", 0, group).exp() + 0,
        "exchange": lambda x: functional.all_to_all_single(x.sin(), None, None, group).exp() + 0,
        "in place": lambda x: Reduce.apply(x.sin()).exp(),
        "saved": lambda x: no_recompute(Reduce.apply)(x.sin()).exp(),
    }
    answers = {}
    warnings.simplefilter("ignore", FutureWarning)
    for name, body in kinds.items():
        found = []
        for region in (lambda f: f, recompute, lambda f: recompute(keep_collectives(f))):
            Reduce.calls = 0
            with Comm() as comm:
                (grad,) = torch.autograd.grad(region(body)(x).sum(), x)
            found.append((grad, sum(comm.replayed.values()) + max(0, Reduce.calls - 1)))
        answers[name] = [torch.equal(found[0][0], grad) for grad, _ in found[1:]], [again for _, again in found[1:]]
    return answers


def test_collectives_by_hand(ranks) -> None:
    """Each functional collective is repeated once, or not when kept; one in place is, unless it is a saved call."""
    repeated = {"functional": [1, 0], "gather": [1, 0], "scatter": [1, 0], "exchange": [1, 0]}
    for answers in ranks.run(by_hand):
        assert all(same == [True, True] for same, _ in answers.values())
        assert {name: counts for name, (_, counts) in answers.items()} == {
            **repeated,
            "in place": [1, 1],
            "saved": [0, 0],
        }


def partial_results() -> Any:
    mesh = init_device_mesh("cpu", (2,))
    module = nn.Linear(8, 8, bias=False)
    parallelize_module(module, mesh, RowwiseParallel(output_layouts=Partial(), use_local_output=False))
    outer = nn.Sequential(nn.Tanh(), module)
    apply(outer, Plan((Choice(("",), keep=("1",)),)))
    x = torch.randn(4, 8)
    with Comm() as comm:
        y = outer(distribute_tensor(x, mesh, [Replicate()]))
    placements = y.placements
    y.redistribute(mesh, [Replicate()]).sum().to_local().backward()
    whole = module.weight.full_tensor().detach().requires_grad_()
    F.linear(x.tanh(), whole).sum().backward()
    return str(placements), dict(comm.all), (module.weight.grad.full_tensor() - whole.grad).abs().max().item()


def test_a_saved_module_keeps_its_placements(ranks) -> None:
    """A partial result of a module that a plan saves stays partial: nothing is reduced before the model asks for it."""
    for placements, comm, worst in ranks.run(partial_results):
        assert placements == "(Partial(sum),)"
        assert comm == {}
        assert worst < 1e-6
