"""Four ranks: plans agreed on, and long runs with everything on that end where the plain runs end."""

from __future__ import annotations

import datetime
import gc
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from distributed.pipelines import WIDTH, Layer, Stage, whole_layers
from laws.watch import Bytes
from torch_recompute import ArgumentError, Choice, Plan, apply, is_recomputing
from torch_recompute.distributed import agree_on

pytestmark = pytest.mark.nightly

RANKS = 4

STEPS, WINDOW = 40, 3
LOOKS = (10, 20, STEPS - 2 * WINDOW)  # before these steps objects are counted; the first look makes some of its own
PIPELINED = 40  # a step of a pipeline over four ranks takes ten times one of DDP
PATIENCE = datetime.timedelta(seconds=5)


def agrees(plans, groups=None):
    """What a rank learns when each rank passes the plan of its number: the text of the error, or True."""
    group = None
    if groups is not None:
        for members in groups:  # every rank makes every group
            made = dist.new_group(members)
            group = made if dist.get_rank() in members else group
    try:
        return agree_on(plans[dist.get_rank()], group) is plans[dist.get_rank()]
    except ArgumentError as error:
        return str(error)


def train(regions):
    """Losses of a DDP run with accumulation, dropout and routing; bytes left by steps; live objects; new groups."""
    torch.manual_seed(dist.get_rank())
    model = Stage([Layer(0.25)])
    if regions:
        whole_layers(model)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    target = torch.full((4, WIDTH), 2.0)  # what a bias can learn
    losses, left, objects = [], [], []
    groups = len(dist.distributed_c10d._world.pg_map)

    def one():
        optimizer.zero_grad()
        with ddp.no_sync():
            first = (ddp(torch.randn(4, WIDTH)) - target).square().mean()
            first.backward()
        second = (ddp(torch.randn(4, WIDTH)) - target).square().mean()
        second.backward()
        optimizer.step()
        for layer in model.layers:
            layer.notes.clear()
            layer.notes["carried"] = int(regions)
        losses.append(float(first.detach() + second.detach()))

    while len(losses) < STEPS:
        if len(losses) not in LOOKS:
            one()
            continue
        gc.collect()
        objects.append(len(gc.get_objects()))
        with Bytes() as seen:
            for _ in range(2):
                for _ in range(WINDOW):
                    one()
                left.append(seen.live)
    return losses, left, objects, len(dist.distributed_c10d._world.pg_map) - groups


def pipelined_and_sharded(regions, steps):
    """Losses of a pipeline of two stages, each over two tensor-parallel ranks; bytes left by steps; new groups."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "tensor"))
    stage = mesh.get_local_rank("pipeline")
    torch.manual_seed(stage)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)) for _ in range(2)))
    for layer in module:
        parallelize_module(layer, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if regions:
        plan = Plan((Choice(("0",)), Choice(("1",))))
        apply(module, agree_on(plan, mesh.get_group("tensor")))
    pipeline = Schedule1F1B(
        PipelineStage(module, stage, 2, torch.device("cpu"), group=mesh.get_group("pipeline")),
        2,
        loss_fn=lambda out, target: (out - target).square().mean(),
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
    generator = torch.Generator().manual_seed(5)
    x, target = torch.randn(2, 4, WIDTH, generator=generator)
    curve, left = [], []
    groups = len(dist.distributed_c10d._world.pg_map)

    def one():
        optimizer.zero_grad()
        losses = []
        if stage == 0:
            pipeline.step(x)
        else:
            pipeline.step(target=target, losses=losses)
        optimizer.step()
        curve.append([float(loss.detach()) for loss in losses])

    while len(curve) < steps - 2 * WINDOW:
        one()
    gc.collect()
    with Bytes() as seen:
        for _ in range(2):
            for _ in range(WINDOW):
                one()
            left.append(seen.live)
    return curve, left, len(dist.distributed_c10d._world.pg_map) - groups


class Dies(nn.Module):
    """A layer whose first replay is the last thing that rank 2 does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        if is_recomputing() and dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.linear(x.sin()).tanh()


def one_dies():
    model = nn.Sequential(Dies())
    apply(model, Plan((Choice(("0",)),)))
    group = dist.new_group(timeout=PATIENCE)
    ddp = DistributedDataParallel(model, process_group=group)
    ddp(torch.ones(2, WIDTH)).sum().backward()


A, B = Plan((Choice(("layers.0",)), Choice(("layers.1",)))), Plan((Choice(("layers.0",)),))


def test_equal_plans_are_agreed_on(ranks):
    """Ranks that hold the same plan get it back, wherever each of them has it from."""
    same = [Plan(A.choices, source=f"rank {i}") for i in range(4)]
    assert ranks.run(agrees, same) == [True] * 4


def test_the_rank_that_differs_is_named_on_every_rank(ranks):
    """One rank with another plan: every rank raises the same text, with its number and the first difference."""
    texts = ranks.run(agrees, [A, A, B, A])
    assert len(set(texts)) == 1
    assert "One is held by ranks 0, 1, 3." in texts[0]
    assert "rank 2 holds another. First difference:\n    -recompute layers.1\n" in texts[0]


def test_a_rank_without_a_plan_is_named_on_every_rank(ranks):
    """A rank that passes something else than a plan stops all of them, and leaves none waiting."""
    texts = ranks.run(agrees, [A, None, A, A])
    assert len(set(texts)) == 1
    assert texts[0].startswith("rank 1 passed no Plan")


def test_stages_agree_each_over_its_own_group(ranks):
    """Stages hold different plans: over the groups that share layers they agree; ranks in an error are global ones."""
    assert ranks.run(agrees, [A, A, B, B], [[0, 1], [2, 3]]) == [True] * 4
    first, _, second, _ = ranks.run(agrees, [A, A, B, A], [[0, 1], [2, 3]])
    assert first is True
    assert "rank 3 holds another" in second


def test_forty_steps_are_those_of_the_plain_run(ranks):
    """DDP, regions, carried routing, dropout, accumulation: the plain losses to the last bit, and nothing piles up."""
    plain, ours = ranks.run(train, False), ranks.run(train, True)
    for (wanted, *_), (losses, left, (_, early, late), groups) in zip(plain, ours, strict=True):
        assert losses == wanted
        assert len(losses) == STEPS
        assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
        assert len(set(left)) == 1
        assert late - early < LOOKS[2] - LOOKS[1]  # not one more for each step
        assert groups == 0


def test_pipeline_and_tensor_parallel_together(ranks):
    """Two stages of two tensor-parallel ranks, 40 steps: the plain losses to the last bit, and nothing piles up."""
    plain, ours = (ranks.run(pipelined_and_sharded, regions, PIPELINED) for regions in (False, True))
    for (wanted, *_), (curve, left, groups) in zip(plain, ours, strict=True):
        assert curve == wanted
        assert len(curve) == PIPELINED
        assert len(set(left)) == 1
        assert groups == 0
    losses = ours[-1][0]
    assert [len(step) for step in losses] == [2] * PIPELINED
    assert sum(losses[-1]) < 0.7 * sum(losses[0])


def test_a_killed_rank_ends_the_others(ranks):
    """A rank that is killed in a replay: the others end with an error, not later than the group's timeout says."""
    ranks.run(agrees, [A] * 4)  # the processes are there
    start = time.monotonic()
    outcomes = ranks.outcomes(one_dies)
    assert time.monotonic() - start < 4 * PATIENCE.total_seconds()
    assert "exit code -9" in outcomes[2].error
    assert all("Error" in outcomes[rank].error for rank in (0, 1, 3))
