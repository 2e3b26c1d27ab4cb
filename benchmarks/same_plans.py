"""Whether a change of the planner or of the engine changed what they do: plans, peaks and gradients, before and after.

    python benchmarks/same_plans.py --save plans          # before the change
    python benchmarks/same_plans.py --against plans       # after it

For every model of the tests and three budgets: the plan, the peak, seconds and FLOPs that it predicts, and a digest of
the gradients of a step under it. After the change, the plans from before are predicted again (the same bytes) and run
again (the same bits), and new plans may not be slower by more than 0.3 % of the step.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from _measure import RESULTS, Goal, arguments, finish

from torch_recompute import Plan, apply, make_plan, simulate

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.zoo import ZOO, build, scalar_loss

BUDGETS = (0.1, 0.4, 0.7)
SLOWER = 0.003


def gradients(name: str, plan: Plan | None) -> str:
    """A digest of the gradients of one step under a plan."""
    model, inputs = build(name)
    if plan is not None:
        apply(model, plan)
    torch.manual_seed(1)
    scalar_loss(model(**inputs)).backward()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        if parameter.grad is not None:
            digest.update(parameter.grad.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def row(name: str, budget: float) -> dict[str, Any]:
    """What the planner says now. The device is named, so that no price is measured."""
    model, inputs = build(name)
    plan = make_plan(model, (), inputs, budget=budget, loss=scalar_loss, optimizer=torch.optim.AdamW, device="h100")
    assert isinstance(plan, Plan)
    return {
        "model": name,
        "budget": budget,
        "peak": plan.predicted_peak_bytes,
        "seconds": plan.predicted_step_seconds,
        "flops": plan.predicted_replay_flops,
        "bound": plan.lower_bound,
        "gradients": gradients(name, plan),
        "plan": plan.to_json(),
    }


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What changed for one model and budget."""
    name, said = old["model"], []
    plan = Plan.from_json(old["plan"])
    model, inputs = build(name)
    peak = simulate(model, (), inputs, plan=plan, loss=scalar_loss, optimizer=torch.optim.AdamW).peak_bytes
    if peak != old["peak"]:
        said.append(f"the old plan's peak is {peak:,} bytes; it was {old['peak']:,}")
    if gradients(name, plan) != old["gradients"] or old["gradients"] != gradients(name, None):
        said.append("other gradients under the old plan")
    if new["gradients"] != old["gradients"]:
        said.append("other gradients under the new plan")
    slower = new["seconds"] / old["seconds"] - 1
    if slower > SLOWER:
        said.append(f"the new plan's step takes {slower:.2%} longer")
    return said


def main() -> int:
    """Writes the figures, or compares them."""
    lists = {"against": "compare with benchmarks/results/NAME.json, or with a path", "models": "only these models"}
    options = arguments(__doc__ or "", **lists)
    before: dict[Any, dict[str, Any]] = {}
    for name in options.against:
        named = RESULTS / f"{name}.json"
        rows = json.loads((named if named.exists() else Path(name)).read_text())["figures"]
        before = {(one["model"], one["budget"]): one for one in rows}
    figures: list[dict[str, Any]] = []
    changed, slower = 0, list[float]()
    for name in options.models or ZOO:
        for budget in BUDGETS:
            new = row(name, budget)
            figures.append(new)
            words = f"{name:22} {budget:>5} {new['peak']:>10,} bytes {new['seconds'] * 1e6:>9.2f} us"
            if old := before.get((name, budget)):
                said = differences(old, new)
                changed += bool(said)
                slower.append(new["seconds"] / old["seconds"] - 1)
                words += f" {slower[-1]:+.2%} " + ("; ".join(said) or "same")
            print(words, flush=True)
    if slower:
        print(
            f"{changed} of {len(slower)} changed; steps {sum(slower) / len(slower):+.3%} on average, "
            f"{max(slower):+.3%} at worst"
        )
    goals = [Goal("plans, peaks or gradients that changed", f"{changed} of {len(slower)}", "0", not changed)]
    finish(options, figures, goals)
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
