"""The doctor: each kind of finding is provoked by a model that has it, and a model that has nothing gets none."""

from __future__ import annotations

import gc
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from torch_recompute import Choice, Plan, apply, cli, doctor, make_plan, no_recompute, recompute
from torch_recompute.doctor.checks.fragmentation import Fragmentation
from torch_recompute.doctor.checks.replay_share import ReplayShare
from torch_recompute.doctor.observing import Allocator, Seen
from torch_recompute.errors import ArgumentError

SIZE = 32


class Core(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Layer(nn.Module):
    """Attention and an MLP with a softmax in the place of its activation function."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.core = nn.LayerNorm(SIZE), nn.Linear(SIZE, 3 * SIZE), Core()
        self.proj, self.up = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 4 * SIZE)
        self.soft, self.down = nn.Softmax(-1), nn.Linear(4 * SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(len(x), -1, 3, 4, 8).permute(2, 0, 3, 1, 4)
        x = x + self.proj(self.core(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(self.soft(self.up(x)))


def stack(layer: Callable[[], nn.Module] = Layer, count: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer() for _ in range(count)))


def batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 2 * 64 * SIZE).view(2, 64, SIZE)


def each(*parts: str, keep: tuple[str, ...] = ()) -> Plan:
    """A plan with these parts of each layer as regions; "" is the layer itself."""
    return Plan(tuple(Choice((f"{i}.{part}".strip("."),), keep) for i in range(3) for part in parts))


class Wrapped(nn.Module):
    """A module that is called in some way of its own."""

    def __init__(self, inner: nn.Module, call: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.inner, x)


class Waits(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x).sin()
        return y * y.abs().max().item()


class Forgets(nn.Linear):
    """Each run draws numbers from a generator that nobody knows of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (super().forward(x) * next(NUMBERS)).sin()


class Counts(nn.Linear):
    def __init__(self) -> None:
        super().__init__(SIZE, SIZE)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().forward(x).sin()


class Remembers(nn.Linear):
    """An attribute, which is nobody's to put back."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x).sin()


class Head(nn.Module):
    """A tiny layer, and logits that are much wider."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 4096, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.gelu(self.layer(x)))


def entropy(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), torch.zeros(logits[..., 0].numel(), dtype=torch.long))


NUMBERS = iter(range(1, 10**6))


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.Sigmoid())


def region(fn: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return recompute(fn)(x)


def reentrant(fn: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch_checkpoint(fn, x, use_reentrant=True)


def theirs(fn: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch_checkpoint(fn, x, use_reentrant=False)


def twice(fn: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return recompute(recompute(fn, name="inner"), name="outer")(x)


def around_theirs(fn: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return recompute(lambda x: theirs(fn, x).sin())(x)


@dataclass(frozen=True)
class Case:
    """A model that has one thing wrong, and words that the finding must say."""

    kind: str
    model: Callable[[], nn.Module]
    where: str
    words: tuple[str, ...]
    options: Callable[[], dict[str, Any]] = dict
    x: Callable[[], torch.Tensor] = batch
    also: tuple[str, ...] = ()


def wrapped(call: Callable[[nn.Module, torch.Tensor], torch.Tensor], inner: Callable[[], nn.Module] = linear) -> Any:
    return lambda: stack(lambda: Wrapped(inner(), call))


def with_grad(out: torch.Tensor) -> torch.Tensor:
    return (out + torch.zeros((), requires_grad=True)).mean()


def inner() -> Plan:
    return Plan(tuple(Choice((f"{i}.inner",)) for i in range(3)))


CASES = [
    Case("saves_nothing", stack, "*.up", ("dropped 0 bytes",), lambda: {"plan": each("up")}),
    Case(
        "saves_nothing",
        wrapped(lambda fn, x: x * 2),
        "*.inner",
        ("3 regions of the plan never ran", "0.inner was not called"),
        lambda: {"plan": inner(), "loss": with_grad},
    ),
    Case("output_pins", wrapped(lambda fn, x: fn(x)), "*.inner", ("are held by",), lambda: {"plan": inner()}, also=("replay_share",)),
    Case("made_worse", stack, "*.soft", ("196,608 bytes more than the plain",), lambda: {"plan": each("soft")}),
    Case("double_recompute", stack, "*.core", ("fused attention", "AddmmBackward0"), lambda: {"plan": each("core")}),
    Case("double_recompute", wrapped(twice), "inner", ("which is a region as well",), also=("replay_share",)),
    Case("double_recompute", wrapped(around_theirs), "*.inner", ("called once in forward",), also=("replay_share",)),
    Case("replay_share", stack, "*", ("of the step's FLOPs", "100% of them"), lambda: {"plan": each("")}),
    Case("host_syncs", wrapped(region, lambda: Waits(SIZE, SIZE)), "*.inner", ("waits", "item()"), also=("replay_share",)),
    Case("not_deterministic", wrapped(region, lambda: Forgets(SIZE, SIZE)), "*.inner", ("aten",), also=("replay_share",)),
    Case("updated_twice", wrapped(theirs, Counts), "*.inner.count", ("again in once of 1",)),
    Case("updated_twice", wrapped(region, lambda: Remembers(SIZE, SIZE)), "Remembers", ("calls",), also=("replay_share",)),
    Case("reentrant", wrapped(reentrant), "*.inner", ("marks its parameters",), x=lambda: batch().requires_grad_()),
    Case("frozen_input", wrapped(reentrant), "*.inner.*", ("got no gradient",)),
    Case("over_budget", stack, "Sequential", ("more than the budget",), lambda: {"budget": "560KiB"}),
    Case("optimizer_state", stack, "Sequential", ("optimizer state",), lambda: {"plan": each("", keep=("@product",)), "optimizer": torch.optim.AdamW, "budget": "400KiB"}, also=("over_budget",)),
    Case("loss_head", lambda: nn.Sequential(Head()), "Sequential", ("as wide as the logits",), lambda: {"loss": entropy, "plan": Plan((Choice(("0.layer",)),))}, x=lambda: torch.ones(64, 8), also=("saves_nothing",)),
]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}-{case.where}")
def test_provoked(case: Case) -> None:
    """The model gets the finding, at the place, with the figures; every finding is whole; nothing else is found."""
    report = doctor.examine(case.model(), (case.x(),), **{"device": "h100", **case.options()})
    print(report)
    found = [finding for finding in report.findings if finding.kind == case.kind]
    assert [finding.where for finding in found] == [case.where]
    assert all(word in found[0].seen for word in case.words)
    assert {finding.kind for finding in report.findings} == {case.kind, *case.also}
