"""ZeRO-3: weights that are there only while a module runs, gathered and released by hooks, forward and backward.

DeepSpeed's hooks are acted here, so nothing but torch is needed: a weight's `data` is empty but between a module's
forward hooks, and between its backward hooks. A replay runs the forward's hooks inside the backward's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from support.zero3 import WIDTH, Block, Partitioned
from torch_recompute import Choice, OnHost, Plan, apply, checkpoint, recompute

DEPTH = 3
Region = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def torchs(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch_checkpoint(layer, x, use_reentrant=False)


def gradients(region: Region, behind: bool, *, partitioned: bool = True, plan: Plan | None = None) -> list[Any]:
    """Of the weights that are trained, after two backward passes that add up."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(Block(behind) for _ in range(DEPTH)))
    trained = [p for p in layers.parameters() if p.requires_grad]
    if plan is not None:
        apply(layers, plan)
    zero = Partitioned(layers) if partitioned else None
    for _ in range(2):
        x = torch.randn(4, WIDTH)
        for layer in layers:
            x = region(layer, x)
        x.square().mean().backward()
        if zero is not None:
            zero.release(zero.whole)
    return [p.grad for p in trained]


def plain(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x)


WAYS: dict[str, Region] = {
    "checkpoint": checkpoint,
    "recompute": lambda layer, x: recompute(layer)(x),
    "inputs on the host": lambda layer, x: recompute(layer, inputs=OnHost())(x),
    "nested": lambda layer, x: recompute(lambda x: recompute(layer)(x))(x),
    "values compared": lambda layer, x: recompute(layer, check="values")(x),
}


@pytest.mark.parametrize("behind", [False, True], ids=["norm in front", "norm behind"])
@pytest.mark.parametrize("way", [*WAYS, "plan"])
def test_weights_that_are_there_while_a_module_runs(way: str, behind: bool) -> None:
    """Finding ZeRO-3: with frozen weights that hooks gather and release, regions give the plain gradients."""
    plan = Plan(tuple(Choice((str(i),)) for i in range(DEPTH))) if way == "plan" else None
    wanted = gradients(plain, behind, partitioned=False)
    got = gradients(WAYS.get(way, plain), behind, plan=plan)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_what_torch_says_of_it() -> None:
    """PyTorch's checkpoint compares frozen weights with what they were: the emulation has the fault that users met."""
    wanted = gradients(plain, False, partitioned=False)
    assert all(torch.equal(a, b) for a, b in zip(gradients(plain, False), wanted, strict=True))
    with pytest.raises(CheckpointError, match="different metadata"):
        gradients(torchs, False)


def test_a_replay_leaves_no_hook_on_modules() -> None:
    """The hook by which a module's end ends a replay is gone after it, and after an error in it."""
    hooks = nn.modules.module._global_forward_hooks
    before = dict(hooks)
    layer = nn.LayerNorm(WIDTH)
    x = torch.randn(4, WIDTH, requires_grad=True)
    recompute(layer)(x).sum().backward()
    assert hooks == before

    def fails(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        runs.append(1)
        y = (
            x.exp(),
            layer(x),
        )  # no node that reads now says that the second is written
        if len(runs) > 1:
            assert hooks != before
            raise RuntimeError("later")
        return y

    runs: list[int] = []
    results = recompute(fails)(x)
    with warnings.catch_warnings(), pytest.raises(RuntimeError, match="later"):
        results[0].sum().backward()
    assert hooks == before
