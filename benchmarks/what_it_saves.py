"""What recomputation is predicted to save in models of published sizes, and what it is predicted to cost.

Four ways: no region, every layer a region, a plan for that peak, and a plan for half way between both peaks. Peaks are
those of the whole step (weights, gradients, activations, and fused AdamW's states), computed on tensors without data.
Seconds are those that `torch-recompute plan` prints for the data sheet of an H100, what its host takes to launch the
operations included. `simulated_peak.py` and `on_gpu.py` show how far from measured ones both are. Dropout is off: with
it the CPU build of torch has no fused attention.

    python benchmarks/what_it_saves.py
"""

from __future__ import annotations

from typing import Any

import torch
from _measure import Goal, arguments, finish

from torch_recompute import Plan, make_plan, peaks
from torch_recompute.commands.models import batch_for, load
from torch_recompute.simulation.training_step import USUAL

# Model -> rows of its batch, tokens in each (None: it has pictures).
MODELS = {"llama3-8b": (2, 4096), "gpt2-xl": (8, 1024), "vit-h": (64, None)}


def figures_of(name: str) -> dict[str, Any]:
    """The peaks, times and replays of one model."""
    model = load(name).model
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    inputs = batch_for(model, name, *MODELS[name])
    step: dict[str, Any] = {"optimizer": USUAL, "device": "h100", "hold_output": False}
    stated = peaks(model, (), inputs, recompute="none,full", **step)
    ways: dict[str, Any] = {}
    for way, one in (("plain", stated.named("none")), ("every_layer", stated.named("full"))):
        flops = one.simulation.flops["replay"]
        ways[way] = {"peak_bytes": one.peak_bytes, "seconds": one.step_seconds, "replay_flops": flops}
    least, most = (ways[way]["peak_bytes"] for way in ("every_layer", "plain"))
    for way, budget in (("same_peak", least), ("half_way", (least + most) // 2)):
        plan = make_plan(model, (), inputs, budget=budget, **step)
        assert isinstance(plan, Plan)
        ways[way] = {
            "peak_bytes": plan.predicted_peak_bytes,
            "seconds": plan.predicted_step_seconds,
            "replay_flops": plan.predicted_replay_flops,
        }
    return {
        "model": name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "batch": " x ".join(str(size) for size in next(iter(inputs.values())).shape),
        **ways,
    }


def main() -> None:
    """Prints one block per model, and whether no plan takes more time than every layer within its peak."""
    options = arguments(__doc__ or "")
    rows: list[dict[str, Any]] = []
    for name in MODELS:
        row = figures_of(name)
        rows.append(row)
        print(f"{name}, batch {row['batch']}", flush=True)
        for way in ("plain", "every_layer", "same_peak", "half_way"):
            one = row[way]
            print(
                f"  {way:12} {one['peak_bytes'] / 2**30:6.1f} GiB, step {1000 * one['seconds']:.0f} ms "
                f"({one['seconds'] / row['plain']['seconds'] - 1:+.1%}), {one['replay_flops'] / 1e9:,.0f} GFLOP again",
                flush=True,
            )
    no_worse = sum(
        row["same_peak"]["peak_bytes"] <= row["every_layer"]["peak_bytes"]
        and row["same_peak"]["seconds"] <= (1 + 1e-6) * row["every_layer"]["seconds"]  # sums in another order
        for row in rows
    )
    claim = "plans that take no longer than every layer recomputed, within its peak"
    finish(options, rows, [Goal(claim, f"{no_worse} of {len(rows)}", "all", no_worse == len(rows))])


if __name__ == "__main__":
    main()
