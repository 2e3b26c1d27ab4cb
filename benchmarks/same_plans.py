"""Whether a change of the planner or of the engine changed what they do: plans, peaks and gradients, before and after.

    python benchmarks/same_plans.py --save plans          # before the change
    python benchmarks/same_plans.py --against plans       # after it

For every model of the tests and three budgets: the plan, the peak, seconds and FLOPs that it predicts, and a digest of
the gradients of a step under it. After the change, the plans from before are predicted again (the same bytes) and run
again (the same bits), and new plans may not be slower by more than 0.3 % of the step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from torch_recompute import Plan, apply, make_plan, simulate

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from zoo import ZOO, build, scalar_loss

RESULTS = Path(__file__).parent / "results"
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    parser.add_argument("--against", metavar="NAME", help="compare with benchmarks/results/NAME.json, or a path")
    parser.add_argument("--models", nargs="+", default=list(ZOO), metavar="MODEL", help="only these")
    options = parser.parse_args()
    before: dict[Any, dict[str, Any]] = {}
    if options.against:
        named = RESULTS / f"{options.against}.json"
        rows = json.loads((named if named.exists() else Path(options.against)).read_text())["figures"]
        before = {(one["model"], one["budget"]): one for one in rows}
    figures: list[dict[str, Any]] = []
    changed, slower = 0, list[float]()
    for name in options.models:
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
            f"{changed} of {len(slower)} changed; steps {sum(slower) / len(slower):+.3%} on average, {max(slower):+.3%} at worst"
        )
        print("verdict:", "NOT the same" if changed else "the same")
    if options.save:
        path = RESULTS / f"{options.save}.json"
        path.write_text(json.dumps({"torch": torch.__version__, "figures": figures}, indent=1) + "\n")
        print("saved to", path)
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
