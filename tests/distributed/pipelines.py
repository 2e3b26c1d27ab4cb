"""Pipelines for the tests: small stages, two steps through one of torch's schedules, and what the second leaves.

Each layer carries, from the forward of a microbatch to its replay, a number that no other forward of that layer has,
and the sum of the layer's input at that time. The replay compares that sum with the input that it is given, so data of
another microbatch cannot go unnoticed, and notes the number, so a second replay cannot either. The first step is left
out because the schedules find out the shapes in it, by a forward and a backward over memory that nobody has written.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.utils.checkpoint import GraphExecGroup, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as stock

from torch_recompute import (
    Choice,
    OnHost,
    Plan,
    RecomputeConfig,
    apply,
    checkpoint,
    get_recompute_data,
    is_recomputing,
    no_recompute,
    recompute,
    save_for_recompute,
)

WIDTH, ROWS, LAYERS, MICROBATCHES = 8, 4, 8, 4

ONE = ("GPipe", "1F1B")  # one stage per rank; all others have two
BACK = ("ZBVZeroBubble", "DualPipeV")  # the second half of the stages goes back through the ranks
SPLIT = ("InterleavedZeroBubble", *BACK)  # backward in two halves
SCHEDULES = (*ONE, "LoopedBFS", "Interleaved1F1B", *SPLIT)


def halves_of(schedule: str) -> AbstractContextManager[Any]:
    """What a step of a schedule that splits backward in two is called in, so that regions replay once for both."""
    return GraphExecGroup() if schedule in SPLIT else nullcontext()


def _with_others(stage: Any, neighbors: Callable[[Any], Any] = PipelineStage._get_init_p2p_neighbors_ops) -> list[Any]:
    """What torch 2.11 sends before the first step, but for what a rank with two stages in a row sends to itself.

    Such a message is one of NCCL's. Gloo, which has no connection of a rank with itself, stops at it.
    """
    return [op for op in neighbors(stage) if op.group_peer != stage.group_rank]


PipelineStage._get_init_p2p_neighbors_ops = _with_others  # type: ignore[method-assign]


class Layer(nn.Module):
    """Norm, experts chosen by a router, dropout, residual; it notes its runs and what its replays were told."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inside: list[Counter[Any]] = [Counter()]  # a Counter as an attribute would be put back by replays
        self.numbers = itertools.count()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, 2)
        self.up = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(2))
        self.mix = nn.Linear(2 * WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.zeros(WIDTH))
        self.dropout = nn.Dropout(dropout)

    @property
    def notes(self) -> Counter[Any]:
        return self.inside[0]

    @notes.setter
    def notes(self, notes: Counter[Any]) -> None:
        self.inside[0] = notes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.note(x)
        h = self.norm(x)
        scores = self.router(h).softmax(-1)
        chosen = self.chosen(scores)
        weight = scores.gather(-1, chosen)
        h = torch.where(chosen == 0, self.up[0](h), self.up[1](h)) * weight
        return x + self.scale.exp() * self.dropout(self.down(torch.tanh(self.mix(h))))

    def chosen(self, scores: torch.Tensor) -> torch.Tensor:
        """Where the plan carries decisions, a router that would not choose again as it has chosen."""
        return (-scores if is_recomputing() and self.notes["carried"] else scores).topk(1).indices

    def note(self, x: torch.Tensor) -> None:
        total = float(x.detach().sum())
        if is_recomputing():
            number, carried = get_recompute_data()
            self.notes["replay", number] += 1
            self.notes["mixed up"] += carried != total
        else:
            number = next(self.numbers)
            self.notes["forward", number] += 1
            save_for_recompute(number, total)


class Stage(nn.Module):
    """Some layers of the whole model."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def whole_layers(stage: Stage) -> None:
    """A plan by hand, with the decisions inside carried."""
    for layer in stage.layers:
        layer.notes["carried"] = 1
    apply(stage, Plan(tuple(Choice((f"layers.{i}",), carry=True) for i in range(len(stage.layers)))))


def configured(stage: Stage, **fields: Any) -> None:
    config = RecomputeConfig(recompute_granularity="full", **fields)
    apply(stage, config.plan(stage))


def wrapped(stage: Stage, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    for layer in stage.layers:
        layer.forward = wrap(layer.forward)


def saved_calls(stage: Stage) -> None:
    for layer in stage.layers:
        layer.mix.forward = no_recompute(layer.mix.forward)
    wrapped(stage, recompute)


def nested(stage: Stage) -> None:
    for layer in stage.layers:
        layer.mix.forward = recompute(layer.mix.forward)
    wrapped(stage, recompute)


def stocks(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return lambda *args: stock(fn, *args, use_reentrant=False, **options)


PLACES: dict[str, Callable[[Stage], None]] = {
    "nothing": lambda stage: None,
    "whole layers": whole_layers,
    "uniform": partial(configured, recompute_method="uniform", recompute_num_layers=2),
    "block": partial(configured, recompute_method="block", recompute_num_layers=1),
    "saved calls": saved_calls,
    "nested": nested,
    "inputs on the host": partial(wrapped, wrap=lambda fn: recompute(fn, inputs=OnHost())),
    "checkpoint": partial(wrapped, wrap=lambda fn: lambda x: checkpoint(fn, x, use_reentrant=False)),
    "stock": partial(wrapped, wrap=stocks),
    "stock selective": partial(
        wrapped,
        wrap=partial(stocks, context_fn=partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])),
    ),
}


def stages_of(rank: int, ranks: int, schedule: str) -> list[int]:
    """The numbers of the stages on a rank."""
    if schedule in ONE:
        return [rank]
    return [rank, 2 * ranks - 1 - rank if schedule in BACK else ranks + rank]


def layers(dropout: float = 0.0) -> list[Layer]:
    torch.manual_seed(0)
    return [Layer(dropout).double() for _ in range(LAYERS)]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, target = torch.randn(2, 2 * MICROBATCHES, ROWS, WIDTH, generator=generator, dtype=torch.double)
    return x, target


def loss_of(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (out - target).square().mean()


def in_one_process() -> dict[str, torch.Tensor]:
    """The gradients of the whole model over the same microbatches."""
    model = Stage(layers())
    for x, target in zip(*(part.chunk(MICROBATCHES) for part in batch()), strict=True):
        (loss_of(model(x), target) / MICROBATCHES).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def step(schedule: str, place: str, dropout: float = 0.0) -> tuple[dict[str, torch.Tensor], dict[int, Counter[Any]]]:
    """This rank's gradients by their names in the whole model, and the notes of its layers by their numbers there."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    here = stages_of(rank, ranks, schedule)
    count = ranks * len(here)
    every = layers(dropout)
    each = LAYERS // count
    modules = {number: Stage(every[number * each :][:each]) for number in here}
    for module in modules.values():
        PLACES[place](module)
    stages = [PipelineStage(module, number, count, torch.device("cpu")) for number, module in modules.items()]
    make = getattr(schedules, f"Schedule{schedule}")
    pipeline = make(stages if len(stages) > 1 else stages[0], MICROBATCHES, loss_fn=loss_of)
    x, target = batch()
    torch.manual_seed(2)
    for _ in range(2):
        for module in modules.values():
            module.zero_grad()
        for layer in every:
            layer.notes = Counter({"carried": layer.notes["carried"]})
        with halves_of(schedule if not place.startswith("stock") else ""):
            pipeline.step(*([x] if 0 in here else []), **({"target": target} if count - 1 in here else {}))
    gradients = {
        f"layers.{number * each + int(name.split('.')[1])}.{name.split('.', 2)[2]}": parameter.grad
        for number, module in modules.items()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    notes = {number * each + i: every[number * each + i].notes for number in here for i in range(each)}
    return gradients, notes


def joined(results: Sequence[tuple[dict[Any, Any], dict[Any, Any]]]) -> tuple[dict[str, torch.Tensor], dict[int, Any]]:
    """What the ranks of one `step` hold together."""
    gradients, notes = ({key: part[key] for part in parts for key in part} for parts in zip(*results, strict=True))
    return gradients, notes


def replays(notes: dict[int, Counter[Any]]) -> dict[int, list[int]]:
    """For each layer how often the forward of each microbatch was replayed."""
    return {
        layer: [seen["replay", key[1]] for key in seen if key[0] == "forward"] for layer, seen in sorted(notes.items())
    }
