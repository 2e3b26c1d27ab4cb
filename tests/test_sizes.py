"""Plans with choices for several sizes: each call goes by its own, whatever runs beside it."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from torch_recompute import (
    ArgumentError,
    BudgetError,
    Choice,
    Plan,
    SizeClass,
    apply,
    make_plan,
    measure,
    simulate,
)

WIDTH, BATCH = 32, 2
SIZES = (16, 48, 128)


class Block(nn.Module):
    """A block of a GPT, with scores that are written out and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.view(*x.shape[:2], 2, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.dropout((q @ k.transpose(2, 3)).softmax(-1), 0.1) @ v
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """Embedding, blocks, head; the loss of the ids it is given."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def gpt() -> Gpt:
    torch.manual_seed(0)
    return Gpt()


def at(length: int) -> torch.Tensor:
    return torch.randint(64, (BATCH, length), generator=torch.Generator().manual_seed(length))


def grads(model: nn.Module, *calls: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of one step over some microbatches, all of whose forwards come first."""
    model.zero_grad()
    torch.manual_seed(1)
    for loss in [model(ids) for ids in calls]:
        loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def flops_of(model: nn.Module, *calls: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        grads(model, *calls)
    return counter.get_total_flops()


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Planned for three sizes, with a budget at which the smallest needs no region and the largest many."""
    return make_plan(gpt(), budget=0.3, device="h100", sizes=[(at(length),) for length in SIZES])


# No replay at all, parts of the MLP, and everything: sets that share modules and nest differently.
BY_HAND = Plan(
    (Choice(("blocks.0",), ("mlp.0",)), Choice(("blocks.1", "blocks.2")), Choice(("blocks.3",), ("@product",))),
    sizes=(
        SizeClass((BATCH, 16)),
        SizeClass((BATCH, 48), (Choice(("blocks.0.mlp",)), Choice(("blocks.3",)))),
    ),
)


def test_a_stream_of_lengths_stays_under_the_budget(plan: Plan) -> None:
    """Lengths with a heavy tail: no step exceeds the budget, and fewer FLOPs are replayed than by one safe plan."""
    assert plan.prediction is not None
    assert plan.choices
    random = torch.distributions.Pareto(10.0, 1.1)
    torch.manual_seed(3)
    lengths = [min(SIZES[-1], int(random.sample())) for _ in range(12)] + [*SIZES, SIZES[-1] - 1]
    assert min(lengths) < SIZES[0] < max(lengths)
    plain, planned, fixed = gpt(), gpt(), gpt()
    apply(planned, plan)
    apply(fixed, Plan(plan.choices))
    replayed = {"planned": 0, "fixed": 0}
    for length in lengths:
        ids = at(length)
        assert equal(grads(planned, ids), grads(plain, ids))
        with measure(planned) as measured:
            planned.zero_grad()
            planned(ids).backward()
        assert measured.peak_bytes <= plan.prediction.budget_bytes
        without = flops_of(plain, ids)
        replayed["planned"] += flops_of(planned, ids) - without
        replayed["fixed"] += flops_of(fixed, ids) - without
    assert 0 < replayed["planned"] < 0.8 * replayed["fixed"]


def test_each_size_is_promised_its_own_peak(plan: Plan) -> None:
    """Every size fits into the one budget; the simulated peak is the promised one, and short calls replay nothing."""
    assert [size.shape for size in plan.sizes] == [(BATCH, length) for length in SIZES]
    assert plan.sizes[0].choices == ()
    assert plan.choices == plan.sizes[-1].choices != plan.sizes[1].choices
    for size, length in zip(plan.sizes, SIZES, strict=True):
        assert size.prediction is not None
        assert size.prediction.budget_bytes == plan.prediction.budget_bytes if plan.prediction else False
        assert size.prediction.peak_bytes <= size.prediction.budget_bytes
        assert simulate(gpt(), (at(length),), plan=plan).peak_bytes == size.prediction.peak_bytes


def test_a_size_holds_up_to_its_shape() -> None:
    """At a size its choices are used, one above it those of the next, above all those of the plan itself."""
    plain, planned = gpt(), gpt()
    handle = apply(planned, BY_HAND)
    ran: dict[int, list[str]] = {}
    for length in (15, 16, 17, 48, 49):
        assert equal(grads(planned, at(length)), grads(plain, at(length)))
        ran[length] = ["-".join(row.choice.paths) for row in handle.report().rows if row.replays]
    middle, large = ["blocks.0.mlp", "blocks.3"], ["blocks.0", "blocks.1-blocks.2", "blocks.3"]
    assert ran == {15: [], 16: [], 17: sorted(middle, reverse=True)[::-1], 48: middle, 49: large}
    wide = torch.zeros(BATCH + 1, 4, dtype=torch.long)  # few elements, but more rows than any size
    grads(planned, wide)
    assert ["-".join(row.choice.paths) for row in handle.report().rows if row.replays] == large


def test_calls_that_overlap_keep_their_own() -> None:
    """Microbatches of all sizes in flight, backward in another order or on another thread: each replays as it began."""
    calls = [at(length) for length in (8, 40, 60, 30, 100)]
    plain, planned = gpt(), gpt()
    apply(planned, BY_HAND)
    assert equal(grads(planned, *calls), grads(plain, *calls))
    assert flops_of(planned, *calls) == sum(flops_of(planned, ids) for ids in calls)

    results: dict[int, bool] = {}

    def run(number: int) -> None:
        mine = gpt()
        mine.blocks = planned.blocks  # the modules are shared, the calls are not
        results[number] = True

    losses = []
    torch.manual_seed(1)
    losses = [planned(ids) for ids in calls]
    planned.zero_grad()
    thread = threading.Thread(target=lambda: [loss.backward() for loss in losses])
    thread.start()
    thread.join()
    assert equal([p.grad for p in planned.parameters() if p.grad is not None], grads(plain, *calls))
