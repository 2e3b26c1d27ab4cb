"""A small model in stages that keep the names of the whole, trained in a pipeline with and without plans."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from distributed.pipelines import ONE, halves_of
from support.models import Residual
from torch_recompute import Plan, StagePlans, Stages, apply, measure
from torch_recompute.distributed import agree_on
from torch_recompute.planner.pipeline import plan_stages
from torch_recompute.planner.planner import Planner
from torch_recompute.simulation.training_step import TrainingStep

WIDTH, LAYERS, ROWS, MICROBATCHES, CLASSES = 32, 8, 64, 4, 16


class Net(nn.Module):
    """Some of the layers, the embedding before the first, the head behind the last."""

    def __init__(self, layers: Iterable[int] = range(LAYERS), *, of: int = LAYERS) -> None:
        super().__init__()
        numbers, dropout = list(layers), 0.1 if of == LAYERS else 0.0
        self.embed = nn.Embedding(CLASSES, WIDTH) if 0 in numbers else None
        self.layers = nn.ModuleDict({str(i): Residual(WIDTH, dropout=dropout) for i in numbers})
        self.head = nn.Linear(WIDTH, CLASSES) if of - 1 in numbers else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


def loss_of(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(out.flatten(0, 1), target.flatten())


TARGET = torch.zeros(1, ROWS, dtype=torch.long)


class Part(NamedTuple):
    """What is trained: all but the embedding and the first layers, by an optimizer of some parameters."""

    frozen: int = 0
    make: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW

    def freeze(self, net: Net) -> Net:
        """Freezes the others."""
        frozen = [net.layers[name] for name in net.layers if int(name) < self.frozen]
        for module in (*frozen, *([net.embed] if self.frozen and net.embed is not None else [])):
            module.requires_grad_(False)
        return net


ALL = Part()


def of_trained(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for parameter in parameters if parameter.requires_grad])


def of_biases(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for parameter in parameters if parameter.dim() == 1])


@cache
def planner(of: int = LAYERS, part: Part = ALL) -> Planner:
    """What is known of the whole model, which has weights: on meta it would be planned as it runs on a GPU."""
    whole, batch = part.freeze(Net(range(of), of=of)), torch.zeros(1, ROWS, dtype=torch.long)
    loss = partial(loss_of, target=TARGET)
    return Planner(TrainingStep(whole, (batch,), loss=loss, optimizer=part.make, device="h100"))


def plans_for(
    schedule: str, budget: Any, ranks: int = 2, chunks: int = 2, of: int = LAYERS, part: Part = ALL
) -> StagePlans:
    """The plans for a schedule."""
    stages = Stages(schedule, ranks, MICROBATCHES, 1 if schedule in ONE else chunks)
    return plan_stages(planner(of, part).step, stages, budget)


def in_one_process(whole: Net, ids: torch.Tensor, order: Iterable[int]) -> dict[str, torch.Tensor]:
    """The gradients of the second step of the model that is not cut, with backwards of microbatches in an order."""
    optimizer = torch.optim.AdamW(whole.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        for one in order:
            loss_of(whole(ids[one : one + 1]), ids[one : one + 1]).backward()
        for parameter in whole.parameters():
            assert parameter.grad is not None
            parameter.grad /= MICROBATCHES
        optimizer.step()
    return {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}


class Chunk(nn.Module):
    """Some layers of a language model, with the embedding if they are the first and the head if they are the last."""

    def __init__(self, model: Any, layers: Sequence[int]) -> None:
        super().__init__()
        body, first, last = model.model, layers[0] == 0, layers[-1] == model.config.num_hidden_layers - 1
        self.embed = body.embed_tokens if first else None
        self.layers = nn.ModuleList(body.layers[number] for number in layers)
        self.rotary = body.rotary_emb
        self.norm, self.head = (body.norm, model.lm_head) if last else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embed is None else self.embed(x)
        position = self.rotary(x, torch.arange(x.shape[1])[None])
        for layer in self.layers:
            x = layer(x, attention_mask=None, position_embeddings=position)
        return x if self.norm is None else self.head(self.norm(x))


def language_model(config: str) -> nn.Module:
    """The model of a configuration file, with the weights of seed 0."""
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(config))


def trained_from_files(config: str, files: str, layers: Sequence[Sequence[Sequence[int]]]) -> dict[str, Any]:
    """One rank's training by the plan in its file: gradients, those without it and those of one process, and peaks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    plan = Plan.from_json(Path(files.format(rank)).read_text())
    mine, count, many = layers[rank], ranks * len(layers[rank]), 2 * ranks
    ids = torch.randint(CLASSES, (many, ROWS), generator=torch.Generator().manual_seed(1))

    def run(plan: Plan) -> tuple[dict[str, torch.Tensor], int]:
        model = language_model(config)
        apply(model, plan)
        chunks = nn.ModuleDict({str(rank + ranks * n): Chunk(model, chunk) for n, chunk in enumerate(mine)})
        stages = [PipelineStage(chunk, int(n), count, torch.device("cpu")) for n, chunk in chunks.items()]
        pipeline = schedules.ScheduleInterleaved1F1B(stages, many, loss_fn=loss_of)
        given, last = [ids] if rank == 0 else [], {"target": ids} if rank == ranks - 1 else {}
        pipeline.step(*given, **last)  # which makes the buffers that the schedule keeps
        chunks.zero_grad()
        with measure(chunks).track(*given) as memory:
            pipeline.step(*given, **last)
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return found, memory.peak_bytes

    plain, plain_peak = run(Plan())
    ours, peak = run(plan)
    whole = language_model(config)
    for one in ids.split(1):
        (loss_of(whole(one).logits, one) / many).backward()
    held = {f"model.layers.{number}." for chunk in mine for number in chunk}
    wanted = dict(whole.named_parameters())
    return {
        "regions": len(plan),
        "its own": all(any(f"{path}.".startswith(layer) for layer in held) for one in plan for path in one.paths),
        "equal": plain.keys() == ours.keys() != set() and all(torch.equal(plain[n], grad) for n, grad in ours.items()),
        "as if not cut": all(torch.allclose(wanted[n].grad, grad, atol=1e-7) for n, grad in ours.items()),
        "names": sorted(ours),
        "peaks": (peak, plain_peak),
    }


def trained(schedule: str, plans: StagePlans, part: Part = ALL) -> dict[str, Any]:
    """One rank's training: its gradients without a plan and with its own, and what was promised and measured."""
    here = [stage.stage for stage in plans.stages if stage.rank == dist.get_rank()]
    agree_on(plans)
    count, of = len(plans), sum(len(stage.layers) for stage in plans.stages)
    numbers = {n: [int(path.split(".")[1]) for path in plans.stages[n].layers] for n in here}
    torch.manual_seed(0)
    whole = Net(range(of), of=of)
    ids = torch.randint(CLASSES, (MICROBATCHES, ROWS), generator=torch.Generator().manual_seed(1))
    last = {"target": ids.clone()} if count - 1 in here else {}

    def run(planned: bool) -> tuple[dict[str, torch.Tensor], int]:
        chunks = nn.ModuleDict({str(n): Net(numbers[n], of=of) for n in here})
        for n in here:
            chunks[str(n)].load_state_dict({name: whole.state_dict()[name] for name in chunks[str(n)].state_dict()})
            apply(part.freeze(chunks[str(n)]), plans[n] if planned else Plan())
        stages = [PipelineStage(chunks[str(n)], n, count, torch.device("cpu")) for n in here]
        make = getattr(schedules, f"Schedule{schedule}")
        pipeline = make(stages[0] if schedule in ONE else stages, MICROBATCHES, loss_fn=loss_of)
        trains = any(parameter.requires_grad for parameter in chunks.parameters())
        optimizer = part.make(chunks.parameters()) if trains else torch.optim.AdamW(chunks.parameters())

        def step() -> None:
            torch.manual_seed(2)
            with halves_of(schedule):
                pipeline.step(*([ids] if 0 in here else []), **last)

        # The buffers that the schedule keeps are made in the first step, so that one is measured, too.
        batch = [*([ids] if 0 in here else []), *last.values()]
        with measure(chunks, optimizer).track(*batch) as memory:
            for _ in range(2):
                optimizer.zero_grad()
                step()
                optimizer.step()
        named = ((name.split(".", 1)[1], p.grad) for name, p in chunks.named_parameters())
        return {name: grad for name, grad in named if grad is not None}, memory.peak_bytes

    plain, plain_peak = run(planned=False)
    ours, peak = run(planned=True)
    promised = plans[here[0]].prediction
    cut = True
    if of != LAYERS:  # without dropout, whose masks depend on the rank
        backwards = range(MICROBATCHES)
        one = in_one_process(whole, ids, backwards[::-1] if schedule == "LoopedBFS" else backwards)
        cut = all(torch.equal(one[name], grad) for name, grad in ours.items())
    return {
        "regions": sum(len(plans[n]) for n in here),
        "equal": plain.keys() == ours.keys() and all(torch.equal(plain[n], grad) for n, grad in ours.items()),
        "gradients": len(ours),
        "as if not cut": cut,
        "peak": peak,
        "predicted": promised.peak_bytes,
        "budget": promised.budget_bytes,
        "plain": (plain_peak, promised.plain_peak_bytes),
    }
