"""The peak that a plan promises, beside the one of a training loop, for every model of the tests.

    python benchmarks/promise.py

Besides those, models whose operations take memory while they run: convolutions in channels_last with pooling, LSTMs,
products in bfloat16, and weights that are computed in every forward. Two loops, three budgets. The meter shares nothing
with this library: it is the running sum of the CPU allocator's own events, from before the model is built to the end of
the third step, without the states of random generators (5,056 bytes each, host memory on any device). The peak is that
of the second step and the third.
"""

from __future__ import annotations

import gc
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _measure import Goal, arguments, finish
from torch import nn
from torch.profiler import ProfilerActivity, profile

from torch_recompute import Plan, apply
from torch_recompute.memory.loop import Loop
from torch_recompute.planner.planner import Planner
from torch_recompute.simulation.training_step import TrainingStep

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent / "peers"))

from allocated import levels_in

from support.zoo import ZOO, build, scalar_loss

Built = tuple[nn.Module, dict[str, Any]]


def blocks(make: Callable[[], nn.Module], x: torch.Tensor) -> Built:
    """Three blocks in a row, and their batch."""
    return nn.Sequential(*(make() for _ in range(3))), {"input": x}


def in_channels_last() -> Built:
    def block() -> nn.Module:
        return nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 1, 1))

    layout: Any = torch.channels_last
    model: Any
    model, batch = blocks(block, torch.randn(4, 16, 16, 16).to(memory_format=layout))
    return model.to(memory_format=layout), batch


class Recurrent(nn.Module):
    """An LSTM, whose state is dropped, added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 32, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.lstm(x)[0]


def computed(norm: Callable[[nn.Module], nn.Module]) -> Built:
    """Blocks whose weights are computed in every forward."""
    return blocks(
        lambda: nn.Sequential(norm(nn.Linear(64, 64)), nn.GELU(), norm(nn.Linear(64, 64))), torch.randn(32, 64)
    )


def in_halves() -> Built:
    layer = partial(nn.TransformerEncoderLayer, 64, 4, 128, batch_first=True, dtype=torch.bfloat16)
    return blocks(layer, torch.randn(4, 32, 64, dtype=torch.bfloat16))


TAKING: dict[str, Callable[[], Built]] = {
    "cnn-channels-last": in_channels_last,
    "lstm": lambda: blocks(Recurrent, torch.randn(8, 24, 32)),
    "bfloat16": in_halves,
    "weight_norm": lambda: computed(torch.nn.utils.weight_norm),
    "spectral_norm": lambda: computed(torch.nn.utils.spectral_norm),
}


def made(name: str) -> Built:
    """A model of the tests, or one of `TAKING`; the same every time."""
    if name in ZOO:
        return build(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, batch = TAKING[name]()
    return model.train(), batch


BUDGETS = (0.25, 0.5, 0.75)
ALLOWED = 0.005
Loss = Callable[[Any], torch.Tensor]


def held(model: nn.Module, batches: Iterator[dict[str, Any]], optimizer: torch.optim.Optimizer, loss_of: Loss) -> None:
    """The loop most people write: `out` is alive until the next forward has returned."""
    for batch in batches:
        out = model(**batch)
        loss = loss_of(out)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def released(
    model: nn.Module, batches: Iterator[dict[str, Any]], optimizer: torch.optim.Optimizer, loss_of: Loss
) -> None:
    """A loop that holds no output."""
    for batch in batches:
        loss_of(model(**batch)).backward()
        optimizer.step()
        optimizer.zero_grad()


LOOPS = {"held": held, "released": released}


def measured(name: str, plan: Plan, loop: Any) -> int:
    """The peak of the second and the third step of a loop, by the events of the CPU's allocator."""
    marks: list[int] = []

    def batches(batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for _ in range(3):
            marks.append(time.time_ns())
            yield batch

    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model, batch = made(name)
        apply(model, plan)
        loop(model, batches(batch), torch.optim.AdamW(model.parameters()), scalar_loss)
    return max(level for when, level in levels_in(profiler) if when > marks[1])


def rows(name: str, loop: str) -> Iterator[dict[str, Any]]:
    """What is promised and what is measured, for each budget."""
    model, batch = made(name)
    words = Loop(hold_output=loop == "held")
    # `make_plan` is this for one budget. With a device by name no time is taken; the bytes are those of the CPU.
    planner = Planner(
        TrainingStep(model, (), batch, loss=scalar_loss, optimizer=torch.optim.AdamW, device="h100", loop=words)
    )
    known: dict[str, int] = {}
    for budget in BUDGETS:
        plan = planner.plan(budget)
        promise = plan.prediction
        assert promise is not None
        digest = plan.digest()
        if digest not in known:
            known[digest] = measured(name, plan, LOOPS[loop])
        yield {
            "model": name,
            "loop": loop,
            "budget": budget,
            "budget_bytes": promise.budget_bytes,
            "promised": promise.peak_bytes,
            "measured": known[digest],
            "error": known[digest] / promise.peak_bytes - 1,
        }


def main() -> None:
    """Prints one line per model, loop and budget, and the worst of them."""
    options = arguments(__doc__ or "", only="these models alone")
    print(f"{'model':22} {'loop':9} {'budget':>6} {'promised':>10} {'measured':>10}")
    figures: list[dict[str, Any]] = []
    for one in (one for pair in itertools.product(options.only or [*ZOO, *TAKING], LOOPS) for one in rows(*pair)):
        figures.append(one)
        words = f"{one['model']:22} {one['loop']:9} {one['budget']:>6}"
        print(f"{words} {one['promised']:>10,} {one['measured']:>10,}  {one['error']:+.3%}", flush=True)
    worst = max(figures, key=lambda one: one["error"])
    print(f"of {len(figures)} steps that of {worst['model']} is the most above its promise")
    error = worst["error"]
    finish(
        options,
        figures,
        [Goal("measured peak above the promised one, at most", f"{error:.3%}", f"{ALLOWED:.1%}", error <= ALLOWED)],
    )


if __name__ == "__main__":
    main()
