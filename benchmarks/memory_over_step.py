"""The memory of one training step over time, without a plan and with one: the picture of the README.

    python benchmarks/memory_over_step.py --rounds 10 --save memory_over_step-cpu && python tools/pages.py

A GPT of 12 layers is trained with AdamW in fp32. Bytes and times are those of PyTorch's own CPU allocator, event by
event, on top of what is alive before the step: parameters, the optimizer's state and the batch. Of all rounds the
fastest is drawn. The goals are that the peak with the plan is within its budget and the one that the plan promises to
half a percent, and that gradients are equal to the last bit.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _measure import Goal, arguments, finish
from torch.profiler import ProfilerActivity, profile

from torch_recompute import Plan, apply, make_plan
from torch_recompute.commands.small_models import Decoder, TransformerBlock, seeded

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from allocated import levels_in

LAYERS, WIDTH, HEAD, ROWS, TOKENS, VOCABULARY = 12, 256, 32, 8, 256, 256
BUDGET = "300MiB"
POINTS = 240  # of the longer curve


class Way:
    """A model under a plan, with what its fastest step took."""

    def __init__(self, name: str, plan: Plan | None = None) -> None:
        torch.manual_seed(0)
        self.name = name
        self.model = seeded(
            lambda: Decoder(LAYERS, WIDTH, TOKENS, partial(TransformerBlock.gpt, head=HEAD), VOCABULARY), dropout=0.0
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.text = torch.randint(VOCABULARY, (ROWS, TOKENS + 1))
        self.plan = plan or Plan()
        self.events: list[tuple[int, int]] = []
        self.gradients: list[torch.Tensor] = []

    def step(self, keep: bool = False) -> None:
        """One step as in any training loop; it may keep copies of the gradients."""
        self.model(self.text).backward()
        if keep:
            self.gradients = [
                parameter.grad.clone() for parameter in self.model.parameters() if parameter.grad is not None
            ]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def begin(self) -> None:
        """Applies the plan and makes the optimizer's state."""
        apply(self.model, self.plan)
        self.step(keep=True)

    def watch(self) -> None:
        """Runs a step and keeps its events if it is the fastest so far."""
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            self.step()
        events = levels_in(profiler)
        events = [(when - events[0][0], level) for when, level in events]
        if not self.events or events[-1][0] < self.events[-1][0]:
            self.events = events

    @property
    def before(self) -> int:
        """The bytes alive before a step."""
        state = [value for of in self.optimizer.state.values() for value in of.values()]
        return sum(t.untyped_storage().nbytes() for t in (*self.model.parameters(), *state, self.text))

    def curve(self, width: float) -> list[int]:
        """The most bytes alive in each part of the step that is `width` nanoseconds long."""
        highest = [0] * (int(self.events[-1][0] / width) + 1)
        level, place = 0, 0
        for when, then in self.events:
            while place < int(when / width):
                place += 1
                highest[place] = max(level, 0)
            level = then
            highest[place] = max(highest[place], level)
        return [self.before + one for one in highest]


def main() -> None:
    """Prints peak and time of both, and whether the plan kept its promise."""
    options = arguments(__doc__ or "")
    plain = Way("without a plan")
    planned = Way("with a plan", make_plan(plain.model, plain.text, budget=BUDGET, optimizer=plain.optimizer))
    for way in (plain, planned):
        way.begin()
    for _ in range(options.rounds):
        plain.watch()
        planned.watch()
    width = max(way.events[-1][0] for way in (plain, planned)) / POINTS
    figures: list[dict[str, Any]] = []
    for way in (plain, planned):
        curve, seconds = way.curve(width), way.events[-1][0] / 1e9
        print(f"{way.name:16} peak {max(curve) / 2**20:6.1f} MiB, {1000 * seconds:6.1f} ms", flush=True)
        figures.append({"name": way.name, "seconds": seconds, "peak_bytes": max(curve), "live_bytes": curve})
    promised, found = planned.plan.predicted_peak_bytes, figures[1]["peak_bytes"]
    assert promised
    pairs = [torch.equal(a, b) for a, b in zip(plain.gradients, planned.gradients, strict=True)]
    off, budget = found / promised - 1, int(BUDGET.removesuffix("MiB")) * 2**20
    goals = [
        Goal("the peak with a plan", f"{found / 2**20:.0f} MiB", f"its budget, {BUDGET}", found <= budget),
        Goal("that peak beside the promised one", f"{off:+.2%}", "within 0.5 %", abs(off) <= 0.005),
        Goal("gradients equal to the last bit", f"{sum(pairs)} of {len(pairs)}", "all", all(pairs)),
    ]
    config = {"layers": LAYERS, "width": WIDTH, "rows": ROWS, "tokens": TOKENS, "budget": BUDGET}
    finish(options, figures, goals, config=config, promised_bytes=promised)


if __name__ == "__main__":
    main()
