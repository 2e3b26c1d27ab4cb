"""Users' modes around a training step: a model with a plan computes under them what it computes without a plan."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import allow_mutation_on_saved_tensors, save_on_cpu, saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional as F
from torch.overrides import BaseTorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from support.models import Made
from torch_recompute import Choice, Plan, apply, no_recompute, recompute

LAYERS, WIDTH, TOKENS = 4, 16, 8


class Layer(nn.Module):
    """Attention, running statistics, a router and dropout: something for each kind of choice to meet."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale, self.gate = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4)
        self.up, self.drop, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(2, TOKENS, 3, 2, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = self.scale(x.transpose(1, 2)).transpose(1, 2)
        weight = self.gate(x).softmax(-1).topk(2)[0].sum(-1, keepdim=True)
        return x + self.drop(self.down(self.up(x).relu())) * weight


PLAN = Plan(
    (Choice(("0",)), Choice(("1",), keep=("@product", "norm", "drop@attention")), Choice(("2", "3"), carry=True))
)


class Dispatches(TorchDispatchMode):
    """A mode of the user's own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def debug_mode() -> Any:
    utils = pytest.importorskip("torch.utils._debug_mode", reason="this version of torch has no DebugMode")
    return utils.DebugMode()


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "FlopCounterMode": lambda: FlopCounterMode(display=False),
    "torch.profiler": lambda: torch.profiler.profile(record_shapes=True, profile_memory=True, acc_events=True),
    "DebugMode": debug_mode,
    "a dispatch mode": Dispatches,
    "a function mode": BaseTorchFunctionMode,
    "anomaly mode": torch.autograd.detect_anomaly,
    "save_on_cpu": save_on_cpu,
    "saved_tensors_hooks": lambda: saved_tensors_hooks(torch.clone, torch.clone),
    "allow_mutation_on_saved_tensors": allow_mutation_on_saved_tensors,
    "a default device": lambda: torch.device("cpu"),
}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(LAYERS)))


def step(m: nn.Module, mode: Callable[[], AbstractContextManager[Any]] = nullcontext) -> list[torch.Tensor]:
    """The output, the gradients and the buffers of one step under a mode."""
    torch.manual_seed(1)
    x = torch.linspace(-1, 1, 2 * TOKENS * WIDTH).view(2, TOKENS, WIDTH).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # anomaly mode says that it is slow
        entered = mode()
    with entered:
        y = m(x)
        y.square().sum().backward()
    gradients = [p.grad for p in (x, *m.parameters()) if p.grad is not None]
    return [y.detach(), *gradients, *(buffer.clone() for buffer in m.buffers())]


@pytest.mark.parametrize("watched", [False, True], ids=["", "watched"])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_the_same_under_a_mode(mode: str, watched: bool) -> None:
    """Under each mode a step with a plan has the output, the gradients and the buffers of the plain one, to the bit."""
    m = model()
    handle = apply(m, PLAN)
    with handle.watch() if watched else nullcontext():
        found = step(m, MODES[mode])
    assert all(map(torch.equal, found, step(model())))


@pytest.mark.parametrize("between", [False, True])
def test_a_call_within_hooks_of_a_region_is_said_not_to_be_kept(between: bool) -> None:
    """A kept call runs again where its region's function enters hooks around it; with a region between, it is kept."""
    runs: list[str] = []

    def kept(x: torch.Tensor) -> torch.Tensor:
        runs.append("kept")
        return x.exp()

    call = no_recompute(kept)
    inner = recompute(lambda x: call(x.sin()).sin()) if between else call

    def body(x: torch.Tensor) -> torch.Tensor:
        with saved_tensors_hooks(torch.clone, torch.clone):
            y = inner(x.sin())
        return y.sin()

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        recompute(body)(torch.ones(3, requires_grad=True)).sum().backward()
    assert (len(runs), ["so the call is not kept" in str(one.message) for one in said]) == (
        (1, []) if between else (2, [True])
    )


def test_flops_are_counted_exactly() -> None:
    """FlopCounterMode counts forward, replays and backward: the plain step's and those that the plan replays."""
    counters = [FlopCounterMode(display=False) for _ in range(2)]
    step(model(), lambda: counters[0])
    m = model()
    handle = apply(m, PLAN)
    with handle.watch():
        step(m)
    step(m, lambda: counters[1])
    plain, planned = (counter.get_total_flops() for counter in counters)
    assert planned - plain == handle.report().flops > 0


# --- tensor parallelism -------------------------------------------------------------------------------------------


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """A process group of two, of which only this rank is there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def mlp() -> nn.Module:
    parts = {"norm": nn.LayerNorm(WIDTH), "up": nn.Linear(WIDTH, 32), "down": nn.Linear(32, WIDTH)}
    return Made(lambda m, x: x + m.down(m.up(m.norm(x)).relu()).sin(), **parts)


def parallel(plan: Plan | None, mode: Any, sequence: bool) -> Any:
    """The mode, after a step of a tensor-parallel model under it."""
    torch.manual_seed(0)
    m = nn.Sequential(mlp(), mlp())
    layout: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence:
        layout = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
    for layer in m:
        parallelize_module(layer, init_device_mesh("cpu", (2,)), layout)
    if plan is not None:
        apply(m, plan)
    with mode:
        m(torch.ones(2, TOKENS, WIDTH, requires_grad=True)).square().sum().backward()
    return mode


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence parallel"])
def test_collectives_are_counted_exactly(sequence: bool) -> None:
    """CommDebugMode counts those of the plain step, and those that are replayed; the ones that are kept are not."""

    def counts(keep: tuple[str, ...] | None) -> Counter[str]:
        plan = None if keep is None else Plan(tuple(Choice((str(i),), keep) for i in range(2)))
        mode = parallel(plan, CommDebugMode(), sequence)
        return Counter({str(packet): count for packet, count in mode.get_comm_counts().items()})

    plain, kept = counts(None), counts(("@collective",))
    again = counts(()) - plain
    assert sum(plain.values()) > 0
    assert kept == plain
    assert sum(again.values()) == (4 if sequence else 2)  # what gathers the input and reduces the result of each layer
    assert counts(("@product", "@collective")) == plain


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence parallel"])
def test_keeping_collectives_hides_nothing_from_modes_around(sequence: bool) -> None:
    """FlopCounterMode sees DTensors also in regions that keep collectives, and kept ones are not repeated."""

    def flops(keep: tuple[str, ...]) -> tuple[int, int]:
        plan = Plan(tuple(Choice((str(i),), keep) for i in range(2)))
        with torch.profiler.profile(acc_events=True) as profile:
            counter = parallel(plan, FlopCounterMode(display=False), sequence)
        names = [event.name for event in profile.events() or ()]
        return counter.get_total_flops(), sum(name.startswith("c10d::") for name in names)

    (repeated, many), (kept, few) = flops(()), flops(("@collective",))
    assert kept == repeated
    assert few < many
