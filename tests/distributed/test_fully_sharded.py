"""Steps that are simulated for a rank of FSDP2 have the peak that `fully_shard` over gloo has, to the byte."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from distributed.ranks import Ranks as Processes
from distributed.ranks import least_peak
from support.limited import limited, missing
from support.models import Residual
from torch_recompute import Choice, Plan, apply, measure
from torch_recompute.memory.loop import Loop
from torch_recompute.plan.ranks import Ranks
from torch_recompute.planner.states import OptimizerSpec
from torch_recompute.simulation.step import simulate_step
from torch_recompute.simulation.training_step import TrainingStep

nightly = pytest.mark.nightly
WORDS, WIDTH, TOKENS, DEPTH = 37, 24, 40, 4
PLANS = {"plain": Plan(), "regions": Plan(tuple(Choice((f"layers.{i}",)) for i in range(DEPTH)))}
CASES = {
    "weights": Ranks(fsdp=2),
    "by ZeRO's number": Ranks(dp=2, zero=3),
    "whole from forward to backward": Ranks(fsdp=2, zero=2),
    "mixed precision": Ranks(fsdp=2, param_dtype="bfloat16", reduce_dtype="float32"),
    "reduced as computed": Ranks(fsdp=2, param_dtype="bfloat16"),
    "three ranks": Ranks(fsdp=3),
    "replicas": Ranks(dp=2, fsdp=2, param_dtype="bfloat16", reduce_dtype="bfloat16"),
    "shards in host memory": Ranks(fsdp=2, on_host=True),
    "one rank, and host memory": Ranks(on_host=True),
    "one rank in mixed precision, and host memory": Ranks(on_host=True, param_dtype="bfloat16", reduce_dtype="float32"),
    "host memory, whole from forward to backward": Ranks(
        fsdp=2, zero=2, on_host=True, param_dtype="bfloat16", reduce_dtype="float32"
    ),
}
FAST = ("weights", "one rank, and host memory")


class Model(nn.Module):
    """An embedding, layers and a head whose rows two ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.layers = nn.ModuleList(Residual(WIDTH) for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return out.float().logsumexp(-1).mean()


def sharded(ranks: Ranks) -> Model:
    """The model as a user shards it."""
    model = Model()
    policy = MixedPrecisionPolicy(
        getattr(torch, ranks.param_dtype) if ranks.param_dtype else None,
        getattr(torch, ranks.reduce_dtype) if ranks.reduce_dtype else None,
    )
    shape = (ranks.shards,) if ranks.replicas == 1 else (ranks.replicas, ranks.shards)
    how: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard")[-len(shape) :]),
        "mp_policy": policy,
    }
    stays: dict[str, Any] = {"reshard_after_forward": False} if ranks.zero == 2 else {}
    if ranks.on_host:
        stays["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for layer in model.layers:
        fully_shard(layer, **how, **stays)
    fully_shard(model, **how, **stays)
    return model


class _Host:
    """Host memory apart from the device where that is the CPU: numpy's arrays, which torch's allocator has not made."""

    def __init__(self) -> None:
        self._arrays: dict[int, Any] = {}

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy there."""
        array = np.empty(tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        copied = torch.from_numpy(array)
        np.copyto(array, tensor.detach().numpy())
        self._arrays[copied.untyped_storage().data_ptr()] = array
        return copied

    def moved(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`Tensor.to`, of which FSDP's calls for another device say whether they wait."""
        if "non_blocking" not in kwargs:
            return _TO(tensor, *args, **kwargs)
        return tensor.clone() if tensor.untyped_storage().data_ptr() in self._arrays else self.put(tensor)


_TO = torch.Tensor.to


@contextmanager
def host_apart() -> Generator[None]:
    """A context in which what FSDP2 sends to host memory, and fetches from it, is copied."""
    host = _Host()

    def cpu(tensor: torch.Tensor) -> torch.Tensor:
        return host.put(tensor)

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return host.moved(tensor, *args, **kwargs)

    with patch.object(torch.Tensor, "cpu", cpu), patch.object(torch.Tensor, "to", to):
        yield


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, foreach=False)


def measured(ranks: Ranks, plan: Plan, accumulate: int, stated: OptimizerSpec) -> int:
    """The peak of two steps; the first is measured too, since whole weights are made in it, and resized in the next."""
    with limited() if ranks.on_host else nullcontext() as allocator, host_apart() if ranks.on_host else nullcontext():
        model = sharded(ranks)
        apply(model, plan)
        optimizer = stated(model.parameters())
        x = torch.zeros(2, TOKENS, dtype=torch.long)
        with measure(model, optimizer).track(x) as memory:
            others = 0
            if allocator is not None:
                others = allocator.live() - x.nbytes  # FSDP's own scalars
                assert others < 16
                allocator.reset_lap()
            for _ in range(2):
                for _ in range(accumulate):
                    loss_of(model(x)).backward()
                if not stated.in_backward:
                    optimizer.step()
                    optimizer.zero_grad()
        peak = memory.peak_bytes if allocator is None else allocator.lap() - others
    dist.barrier()
    return peak


def stated_for(ranks: Ranks, in_backward: bool) -> OptimizerSpec:
    return OptimizerSpec(torch.optim.SGD if ranks.on_host else optimizer_of, in_backward=in_backward)


def predicted(ranks: Ranks, in_backward: bool = False) -> dict[tuple[str, int], int]:
    """The peak that is predicted of each plan and number of accumulated backwards.

    An optimizer that steps in backward, from hooks of the shards, goes with one.
    """
    found: dict[tuple[str, int], int] = {}
    x, stated = torch.zeros(2, TOKENS, dtype=torch.long), stated_for(ranks, in_backward)
    device = "h100" if ranks.on_host else None  # of which host memory is no part
    for name, accumulate in product(PLANS, (1,) if in_backward else (1, 2)):
        loop = Loop(hold_output=False, accumulate=accumulate)
        step = TrainingStep(Model(), (x,), {}, loss_of, stated, device, loop, ranks)
        found[name, accumulate] = simulate_step(step, prepare=partial(apply, plan=PLANS[name])).peak_bytes
    return found


def peaks(ranks: Ranks, promised: dict[tuple[str, int], int], in_backward: bool = False) -> dict[tuple[str, int], int]:
    """The peak that is measured of each, on this rank."""
    stated = stated_for(ranks, in_backward)
    return {
        (name, accumulate): least_peak(partial(measured, ranks, PLANS[name], accumulate, stated), peak, times=4)
        for (name, accumulate), peak in promised.items()
    }


@pytest.mark.parametrize("case", [pytest.param(case, marks=[nightly] * (case not in FAST)) for case in CASES])
def test_the_peak_of_a_sharded_step(ranks: Processes, case: str) -> None:
    """The first rank, whose shards are the largest, has the predicted peak, with FSDP2's buffers where it has them."""
    if CASES[case].on_host and missing():
        pytest.skip(missing())
    promised = predicted(CASES[case])
    assert Processes(ranks._pool, CASES[case].world).run(peaks, CASES[case], promised)[0] == promised


class Tiled(Model):
    """The model with many classes, and a loss of its own or one that its caller makes of the logits."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.head, self.inside = nn.Linear(WIDTH, 512, bias=False), inside

    def forward(self, x: torch.Tensor) -> Any:
        logits = super().forward(x)
        return (cross_entropy(logits), logits) if self.inside else logits


def cross_entropy(logits: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), torch.zeros(2 * TOKENS, dtype=torch.long))


def tiled_peaks(ranks: Ranks, inside: bool) -> list[tuple[int, int]]:
    """Of a head in tiles, and of one without: the predicted peak, and the measured one."""
    x = torch.zeros(2, TOKENS, dtype=torch.long)
    found: list[tuple[int, int]] = []
    trained: list[list[torch.Tensor]] = []

    def loss(out: Any) -> torch.Tensor:
        return out[0] if inside else cross_entropy(out)

    for choices in ((Choice(("head",), tiles=8, with_loss=True),), ()):
        torch.manual_seed(0)
        plan, model = Plan((*PLANS["regions"].choices, *choices)), Tiled(inside)
        loop = Loop(hold_output=False)
        step = TrainingStep(model, (x,), {}, loss, torch.optim.SGD, None, loop, ranks)
        predicted = simulate_step(step, prepare=partial(apply, plan=plan)).peak_bytes
        how: dict[str, Any] = {"mesh": init_device_mesh("cpu", (ranks.fsdp,))}
        for layer in (*model.layers, model):
            fully_shard(layer, **how)
        apply(model, plan)
        optimizer = torch.optim.SGD(model.parameters())
        with measure(model, optimizer).track(x) as memory:
            for _ in range(2):
                loss(model(x)).backward()
                optimizer.step()
                optimizer.zero_grad()
        dist.barrier()
        found.append((predicted, memory.peak_bytes))
        trained.append([weight.full_tensor() for weight in model.parameters()])
    torch.testing.assert_close(*trained)
    return found


@nightly
@pytest.mark.parametrize("inside", [True, False], ids=["loss inside", "loss outside"])
def test_a_head_in_tiles(ranks: Processes, inside: bool) -> None:
    """FSDP2 hooks the logits to learn when backward begins. They are not made for that, and training is the same."""
    of_first, *_ = Processes(ranks._pool, 2).run(tiled_peaks, CASES["weights"], inside)
    (predicted, peak), (untiled, other) = of_first
    assert peak == predicted < untiled == other


@nightly
def test_a_step_in_backward(ranks: Processes) -> None:
    """Hooks of shards step where their gradients have been reduced: the measured peak is the predicted one."""
    promised = predicted(CASES["weights"], True)
    assert Processes(ranks._pool, 2).run(peaks, CASES["weights"], promised, True)[0] == promised
