"""The peak of a training step that `simulate` predicts, beside the real one, for every model of the tests.

    python benchmarks/simulated_peak.py

"measure" is this library's measurement of the real step; "allocator" is the running sum of the CPU allocator's own
events in a third run, without the random generator's states (5,056 bytes each, host memory on any device).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from _measure import Goal, arguments, finish
from torch.utils._pytree import tree_leaves

from torch_recompute import Plan, apply, measure, simulate

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent / "peers"))

from allocated import levels

from support.zoo import ZOO, build, plans, scalar_loss


def row(name: str, kind: str, plan: Plan) -> dict[str, Any]:
    """The three peaks of one model under one plan."""
    model, inputs = build(name)
    handle = apply(model, plan)

    def step() -> None:
        torch.manual_seed(1)
        scalar_loss(model(**inputs)).backward()
        model.zero_grad()

    step()
    batch = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    counted = [*model.state_dict().values(), *batch]
    start = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in counted}
    with measure(model).track(*batch) as measured:
        step()
    allocator = sum(start.values()) + max(levels(step))
    handle.remove()
    simulated = simulate(model, (), inputs, plan=plan, loss=scalar_loss, hold_output=False).peak_bytes
    return {
        "model": name,
        "plan": kind,
        "simulated": simulated,
        "measured": measured.peak_bytes,
        "allocator": allocator,
        "error": simulated / measured.peak_bytes - 1,
        "allocator_error": simulated / allocator - 1,
    }


def main() -> None:
    """Prints one line per model and plan, and how many are within half a percent."""
    options = arguments(__doc__ or "")
    print(f"{'model':22} {'plan':14} {'simulated':>10} {'measure':>10} {'allocator':>10}")
    figures: list[dict[str, Any]] = []
    for index, name in enumerate(ZOO):
        known = list(plans(build(name)[0]).items())
        for kind, plan in [("none", Plan()), known[index % len(known)]]:
            one = row(name, kind, plan)
            figures.append(one)
            print(
                f"{name:22} {kind:14} {one['simulated']:>10,} {one['measured']:>10,} {one['allocator']:>10,}"
                f"  {one['error']:+.3%}  {one['allocator_error']:+.3%}",
                flush=True,
            )
    exact = sum(one["error"] == 0 for one in figures)
    near = sum(abs(one["allocator_error"]) <= 0.005 for one in figures)
    worst = max(abs(one["error"]) for one in figures)
    print(f"of {len(figures)} rows {exact} equal `measure` to the byte, the worst is off by {worst:.3%};")
    print(f"{near} are within 0.5 % of the allocator's events")
    finish(
        options, figures, [Goal("simulated peaks off measured ones, at most", f"{worst:.2%}", "0.5 %", worst <= 0.005)]
    )


if __name__ == "__main__":
    main()
