"""The time of a training step that a plan predicts, beside the real one, both as a share of the plain step.

    python benchmarks/predicted_time.py --rounds 20 --save predicted_time-cpu
    python benchmarks/predicted_time.py --rounds 20 --models "gpt, compiled"

Each model is planned for several shares of its activation memory. Then the steps with each plan and the step with none
take turns in one process; a ratio is the median over rounds of a step's seconds to those of the plain step in the same
round. The verdict holds if every predicted ratio is within 10 % of the measured one.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from _measure import Goal, arguments, finish

from torch_recompute import Plan, apply, make_plan
from torch_recompute.compiling import Partition

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from frontier.models import MODELS as BUILT

MODELS = {  # layers, width, tokens, batch
    "gpt": (4, 128, 256, 4),
    "gpt, wide": (2, 512, 64, 4),
    "gpt, small": (4, 64, 64, 2),
    "llama": (4, 256, 128, 4),
    "gpt, compiled": (3, 256, 256, 4),
}
COMPILED = ", compiled"
SHARES = (0.1, 0.4, 0.7)
PLENTY = 2**60  # bytes: a compiled step runs nothing again
WITHIN = 0.10


def rows(name: str, rounds: int) -> list[dict[str, Any]]:
    """The figures of one model, a row for each budget."""
    model, text = BUILT[name.split(",", maxsplit=1)[0]].build(*MODELS[name])
    compiled = name.endswith(COMPILED)
    plans = {share: make_plan(model, (text,), budget=share, compiled=compiled) for share in SHARES}
    steps = {share: copy.deepcopy(model) for share in (None, *SHARES)}
    for share, step in steps.items():
        plan = Plan() if share is None else plans[share]
        if compiled:
            step.compile(options=Partition(plan if plan.graph_bytes else PLENTY, exact=False).options)
        else:
            apply(step, plan)
    taken: dict[float | None, list[float]] = {share: [] for share in steps}
    for _ in range(rounds + 1):
        for share, step in steps.items():
            start = time.perf_counter()
            step(text).backward()
            taken[share].append(time.perf_counter() - start)
            step.zero_grad()
    found: list[dict[str, Any]] = []
    for share, plan in plans.items():
        assert plan.prediction is not None
        predicted = plan.prediction.step_seconds / plan.prediction.plain_step_seconds
        pairs = zip(taken[share][1:], taken[None][1:], strict=True)  # the first round warms up
        measured = statistics.median(ours / plain for ours, plain in pairs)
        found.append(
            {
                "model": name,
                "budget": share,
                "regions": len(plan),
                "plain_ms": round(1000 * statistics.median(taken[None][1:]), 3),
                "predicted_plain_ms": round(1000 * plan.prediction.plain_step_seconds, 3),
                "measured_ratio": round(measured, 4),
                "predicted_ratio": round(predicted, 4),
                "error": round(predicted / measured - 1, 4),
            }
        )
    return found


def main() -> None:
    """Prints one line per model and budget."""
    options = arguments(__doc__ or "", models="which of the models")
    print(f"{'model':14} {'budget':>6} {'plain ms':>9} {'predicted':>9} {'step x':>7} {'predicted':>9}")
    figures: list[dict[str, Any]] = []
    for name in options.models or MODELS:
        for row in rows(name, options.rounds):
            figures.append(row)
            print(
                f"{row['model']:14} {row['budget']:6.0%} {row['plain_ms']:9.2f} {row['predicted_plain_ms']:9.2f} "
                f"{row['measured_ratio']:7.3f} {row['predicted_ratio']:9.3f}  {row['error']:+.1%}",
                flush=True,
            )
    worst = max(abs(row["error"]) for row in figures)
    claim = f"predicted seconds of {len(figures)} steps with plans beside those of steps that ran, at most"
    goal = Goal(claim, f"{worst:.1%} off", f"{WITHIN:.0%}", worst <= WITHIN)
    finish(options, figures, [goal], threads=torch.get_num_threads())


if __name__ == "__main__":
    main()
