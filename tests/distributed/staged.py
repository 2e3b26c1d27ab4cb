"""A small model in stages that keep the names of the whole, trained in a pipeline with and without plans."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from distributed.pipelines import ONE, stages_of
from models import Residual
from torch_recompute import Plan, StagePlans, Stages, apply, measure
from torch_recompute.distributed import agree_on
from torch_recompute.planner.pipeline import plan_stages
from torch_recompute.planner.planner import Planner

WIDTH, LAYERS, ROWS, MICROBATCHES, CLASSES = 32, 8, 64, 4, 16


class Net(nn.Module):
    """Some of the layers, the embedding before the first, the head behind the last."""

    def __init__(self, layers: Iterable[int] = range(LAYERS)) -> None:
        super().__init__()
        numbers = list(layers)
        self.embed = nn.Embedding(CLASSES, WIDTH) if 0 in numbers else None
        self.layers = nn.ModuleDict({str(i): Residual(WIDTH, dropout=0.1) for i in numbers})
        self.head = nn.Linear(WIDTH, CLASSES) if LAYERS - 1 in numbers else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


def loss_of(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(out.flatten(0, 1), target.flatten())


TARGET = torch.zeros(1, ROWS, dtype=torch.long)


@cache
def planner() -> Planner:
    """What is known of the whole model, which has weights: on meta it would be planned as it runs on a GPU."""
    whole, batch = Net(), torch.zeros(1, ROWS, dtype=torch.long)
    loss = partial(loss_of, target=TARGET)
    return Planner(whole, (batch,), None, loss=loss, optimizer=torch.optim.AdamW, device="h100")


def plans_for(schedule: str, budget: Any, ranks: int = 2) -> StagePlans:
    """The plans for a schedule."""
    stages = Stages(schedule, ranks, MICROBATCHES, 1 if schedule in ONE else 2)
    return plan_stages(planner(), stages, budget, "auto", torch.optim.AdamW)


def trained(schedule: str, plans: StagePlans) -> dict[str, Any]:
    """One rank's training: its gradients without a plan and with its own, and what was promised and measured."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    here = stages_of(rank, ranks, schedule)
    agree_on(plans)
    count = ranks * len(here)
    each = LAYERS // count
    ids = torch.randint(CLASSES, (MICROBATCHES, ROWS), generator=torch.Generator().manual_seed(1))
    last = {"target": ids.clone()} if count - 1 in here else {}

    def run(planned: bool) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        chunks = nn.ModuleDict({str(n): Net(range(n * each, (n + 1) * each)) for n in here})
        for n in here:
            apply(chunks[str(n)], plans[n] if planned else Plan())
        stages = [PipelineStage(chunks[str(n)], n, count, torch.device("cpu")) for n in here]
        make = getattr(schedules, f"Schedule{schedule}")
        pipeline = make(stages[0] if schedule in ONE else stages, MICROBATCHES, loss_fn=loss_of)
        optimizer = torch.optim.AdamW(chunks.parameters())

        def step() -> None:
            torch.manual_seed(2)
            pipeline.step(*([ids] if 0 in here else []), **last)

        # The buffers that the schedule keeps are made in the first step, so that one is measured, too.
        batch = [*([ids] if 0 in here else []), *last.values()]
        with measure(chunks, optimizer).track(*batch) as memory:
            for _ in range(2):
                optimizer.zero_grad()
                step()
                optimizer.step()
        return [p.grad for p in chunks.parameters() if p.grad is not None], memory.peak_bytes

    plain, plain_peak = run(planned=False)
    ours, peak = run(planned=True)
    promised = plans[here[0]].prediction
    return {
        "regions": sum(len(plans[n]) for n in here),
        "equal": len(plain) > 0 and all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True)),
        "peak": peak,
        "predicted": promised.peak_bytes,
        "budget": promised.budget_bytes,
        "plain": (plain_peak, promised.plain_peak_bytes),
    }
