"""How many Python functions of this library a region calls, once it has run before.

A region's own code runs once per call and is cold, so what it costs is how many different things are called, more than
how long each takes in a loop (docs/design/001). Counts are exact on every machine, where seconds are not.
"""

from __future__ import annotations

import contextvars
import os
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_recompute
from torch_recompute import Choice, Plan, _torch, apply, recompute
from torch_recompute._torch import devices, modes

FOLDER = os.path.dirname(torch_recompute.__file__)
HOOKS = 71  # 24 tensors saved in forward, 23 until the replay ends, 24 read; 15 slots are filled
DEVICES = 0 if devices.ACCELERATOR is None else 13  # a build of torch for a device, whose generators are asked for
CALLS, KINDS = 143 + DEVICES, 58 + DEVICES
SMALL, ORDINARY = 69 + DEVICES, 65 + DEVICES
KEPT = (
    379 + DEVICES
)  # of which 33 show a function to the mode that finds products and attention, and 2 hold what is stored
NORMS = 337 + DEVICES  # of which 27 tensors go through three hooks each, and 38 memories are told apart
SEEN = _torch.version_of_dict is getattr(torch._C._dynamo.guards, "dict_version", None)
READ = 0 if SEEN else 10  # where torch does not see attributes that are set, as on Python 3.13, modules are read


class Block(nn.Module):
    """A pre-norm transformer block, as in benchmarks/block_cost.py; input and output: [batch, sequence, 32]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.norm2, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer."""
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def calls(step: Callable[[], torch.Tensor]) -> Counter[str]:
    """The calls of functions of this library in a forward and backward, after four that make everything warm.

    They are made in a context without variables, of which torch sets some as it compiles.
    """
    return contextvars.Context().run(_calls, step)


def _calls(step: Callable[[], torch.Tensor]) -> Counter[str]:
    for _ in range(4):
        step().sum().backward()
    count: Counter[str] = Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        stands_in = code is getattr(modes.call, "__code__", None)  # for operator.call, on Python 3.10
        if event == "call" and code.co_filename.startswith(FOLDER) and not stands_in:
            count[f"{os.path.relpath(code.co_filename, FOLDER)}:{code.co_firstlineno} {code.co_name}"] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        step().sum().backward()
    finally:
        sys.setprofile(before)
    return count


def test_a_block() -> None:
    """Forward and backward of a transformer block: its 71 hooks, and few calls besides."""
    block, x = Block(), torch.randn(2, 8, 32, requires_grad=True)
    region = recompute(block)
    found = calls(lambda: region(x))
    hooks = sum(n for name, n in found.items() if name.endswith((" pack", " unpack")))
    assert hooks == HOOKS
    assert found.total() <= CALLS + READ, found
    assert len(found) <= KINDS + READ, found


def test_a_block_under_a_plan() -> None:
    """A plan with one region adds at most the calls of its wrapper."""
    model, x = nn.Sequential(Block()), torch.randn(2, 8, 32, requires_grad=True)
    apply(model, Plan((Choice(("0",)),)))
    assert calls(lambda: model(x)).total() <= CALLS + READ + 4


def test_a_block_with_kept_calls() -> None:
    """A plan that keeps products and attention: four and one of them, each found, kept and passed by."""
    model, x = nn.Sequential(Block()), torch.randn(2, 8, 32, requires_grad=True)
    apply(model, Plan((Choice(("0",), keep=("@product", "@attention")),)))
    assert calls(lambda: model(x)).total() <= KEPT + READ


def test_an_ordinary_region() -> None:
    """A layer and dropout: forward, replay and hooks, whose way through the files `docs/trust.md` walks."""
    region, x = recompute(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))), torch.randn(8, 8, requires_grad=True)
    found = calls(lambda: region(x))
    assert found.total() <= ORDINARY + READ, found
    assert len({name.partition(":")[0] for name in found}) <= 10, found


def test_a_small_function() -> None:
    """A function of five operations, where the calls besides the hooks are nearly all."""
    region, x = recompute(lambda x: x.sin().cos().exp().tanh().sin()), torch.randn(8, 8, requires_grad=True)
    assert calls(lambda: region(x)).total() <= SMALL


def test_running_statistics() -> None:
    """Three BatchNorms: what their modules hold is compared, and written only where it has changed."""
    layers = [layer for _ in range(3) for layer in (nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU())]
    region, x = recompute(nn.Sequential(*layers)), torch.randn(2, 4, 2, 2, requires_grad=True)
    assert calls(lambda: region(x)).total() <= NORMS + READ


class Deep(nn.Module):
    """A model of equal blocks, which count their calls where `counts`."""

    def __init__(self, depth: int, counts: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(depth))
        self.counts, self.calls = counts, 0
        for block in self.blocks:
            block.calls = 0  # type: ignore[assignment]

    def run(self, i: int, x: torch.Tensor) -> torch.Tensor:
        """One block."""
        block: Any = self.blocks[i]
        if self.counts:
            block.calls += 1
            self.calls += 1
        return block(x)


WAYS: dict[str, Callable[[Deep, torch.Tensor], torch.Tensor]] = {
    "bound method": lambda model, x: recompute(model.run)(1, x),
    "closure": lambda model, x: recompute(lambda x: model.run(1, x))(x),
    "partial": lambda model, x: recompute(partial(model.run, 1))(x),
    "list in a closure": lambda model, x: (lambda blocks: recompute(lambda x: blocks[1](x))(x))([*model.blocks]),
}


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_region_costs_what_it_runs(way: str, counts: bool) -> None:
    """A region in a model of 80 blocks makes the calls of one in a model of 10, also where blocks set an attribute."""
    x = torch.randn(2, 4, requires_grad=True)
    made = []
    for depth in (10, 80):
        model = Deep(depth, counts)
        made.append(calls(lambda model=model: WAYS[way](model, x)))
    assert made[0] == made[1]
