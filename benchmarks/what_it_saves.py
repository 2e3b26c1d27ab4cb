"""What recomputation saves in models of published sizes.

Four ways: no region, every layer a region, a plan for that peak, and a plan for half way between both peaks. Peaks are
those of the whole step (weights, gradients, activations, and fused AdamW's states), replays are shares of the step's
FLOPs in products. Both are computed on tensors without data; `simulated_peak.py` and `on_gpu.py` show how far from
measured ones they are.
Times are sums over the operations of the same simulated steps, each priced by the data sheet of an H100:
predictions, there to compare. Dropout is off: with it the CPU build of torch has no fused attention.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from _measure import arguments, finish

from torch_recompute import Plan, RecomputeConfig, apply
from torch_recompute.commands.models import batch_for, load
from torch_recompute.memory.loop import Loop
from torch_recompute.memory.operations import Operation
from torch_recompute.planner.ops import Op, op_of
from torch_recompute.planner.planner import Planner
from torch_recompute.simulation import simulate_step
from torch_recompute.simulation.training_step import OPTIMIZERS, USUAL, TrainingStep

DEVICE = "h100"
# Model -> rows of its batch, tokens in each (None: it has pictures).
MODELS = {"llama3-8b": (2, 4096), "gpt2-xl": (8, 1024), "vit-h": (64, None)}
LOOP = Loop(hold_output=False)
EVERY_LAYER = RecomputeConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


def figures_of(name: str) -> dict[str, Any]:
    """The peaks, replays and times of one model."""
    model = load(name).model
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    inputs = batch_for(model, name, *MODELS[name])
    trained = TrainingStep(model, (), inputs, optimizer=OPTIMIZERS[USUAL], device=DEVICE, loop=LOOP)
    planner = Planner(trained)

    def step(plan: Plan) -> dict[str, Any]:
        ran: Counter[Op] = Counter()

        def count(_phase: str, operation: Operation) -> None:
            op = op_of(operation)
            if op is not None:
                ran[op] += 1

        result = simulate_step(trained, prepare=lambda copy: apply(copy, plan), watch=count)
        replay = result.flops.get("replay", 0)
        return {
            "peak_bytes": result.peak_bytes,
            "replayed_share": replay / (sum(result.flops.values()) - replay),
            "seconds": sum(planner.price(op) * times for op, times in ran.items()),
        }

    plain, every_layer = step(Plan()), step(EVERY_LAYER.plan(model))
    half_way = (plain["peak_bytes"] + every_layer["peak_bytes"]) // 2
    return {
        "model": name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "batch": " x ".join(str(size) for size in next(iter(inputs.values())).shape),
        "plain": plain,
        "every_layer": every_layer,
        "same_peak": step(planner.plan(every_layer["peak_bytes"])),
        "half_way": step(planner.plan(half_way)),
    }


def main() -> None:
    """Prints one block per model, and whether no plan takes more time than every layer within its peak."""
    options = arguments(__doc__ or "")
    rows = []
    for name in MODELS:
        row = figures_of(name)
        rows.append(row)
        print(f"{name}, batch {row['batch']}", flush=True)
        for way in ("plain", "every_layer", "same_peak", "half_way"):
            one = row[way]
            print(
                f"  {way:12} {one['peak_bytes'] / 2**30:6.1f} GiB, replays {one['replayed_share']:.1%}, "
                f"step {1000 * one['seconds']:.0f} ms ({one['seconds'] / row['plain']['seconds'] - 1:+.1%})",
                flush=True,
            )
    no_worse = all(
        row["same_peak"]["peak_bytes"] <= row["every_layer"]["peak_bytes"]
        and row["same_peak"]["seconds"] <= row["every_layer"]["seconds"]
        for row in rows
    )
    finish(options, rows, no_worse)


if __name__ == "__main__":
    main()
