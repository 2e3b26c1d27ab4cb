"""Microbatches in flight: the orders that they are counted from are those that the schedules run, over gloo."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from distributed.pipelines import BACK, ONE, SCHEDULES, halves_of, stages_of
from torch_recompute.planner.schedules import in_flight, orders_named, orders_of

WIDTH = 4


def ran(schedule: str, microbatches: int) -> tuple[list[str], list[str], dict[int, int]]:
    """What this rank did in the second step, what its schedule's table says, and the most graphs that were alive."""
    here = stages_of(dist.get_rank(), 2, schedule)
    count = 2 * len(here)
    alive: dict[int, set[int]] = {stage: set() for stage in here}
    most = dict.fromkeys(here, 0)
    seen: list[str] = []

    def watched(kind: str, method: Any) -> Any:
        def call(stage: Any, microbatch: int, *args: Any, **kwargs: Any) -> Any:
            number = stage.stage_index
            halves = kind == "B" and not kwargs.get("full_backward", True)
            seen.append(f"{number}{'I' if halves else kind}{microbatch}")
            if kind == "F":
                alive[number].add(microbatch)
                most[number] = max(most[number], len(alive[number]))
            result = method(stage, microbatch, *args, **kwargs)
            if kind != "F" and not halves:
                alive[number].remove(microbatch)
            return result

        return call

    stages = [PipelineStage(nn.Linear(WIDTH, WIDTH), number, count, torch.device("cpu")) for number in here]
    make = getattr(schedules, f"Schedule{schedule}")
    pipeline = make(stages if schedule not in ONE else stages[0], microbatches, loss_fn=nn.functional.mse_loss)
    x = torch.ones(2 * microbatches, WIDTH)

    def step() -> None:
        with halves_of(schedule):
            pipeline.step(*([x] if 0 in here else []), **({"target": x} if count - 1 in here else {}))

    step()
    methods = {"F": "forward_one_chunk", "B": "backward_one_chunk", "W": "backward_weight_one_chunk"}
    with mock.patch.multiple(
        PipelineStage, **{name: watched(kind, getattr(PipelineStage, name)) for kind, name in methods.items()}
    ):
        step()
    table = orders_of(pipeline)[dist.get_rank()]
    return seen, [str(action) for action in table], most


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_orders_are_what_runs(ranks: Any, schedule: str) -> None:
    """The order read from a schedule, and the one made from its name, is the one that each rank runs."""
    microbatches = 6
    orders = orders_named(schedule, 2, microbatches, 1 if schedule in ONE else 2)
    counted = in_flight(orders)
    for rank, (seen, table, most) in enumerate(ranks.run(ran, schedule, microbatches)):
        assert [str(action) for action in orders[rank]] == table == seen
        assert most == {stage: counted[stage] for stage in most}
    assert len(counted) == (2 if schedule in ONE else 4)
    if schedule in BACK:
        assert {action.stage for action in orders[0]} == {0, 3}
