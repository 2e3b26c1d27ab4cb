"""Claim: a plan comes while a person waits; with a profile that is kept, one for another budget takes a third of that.

CPU seconds of `make_plan` in a new process with an empty folder of prices, what the process imports for it included:
the example of the README; an eight-layer Llama of transformers (width 128, batch 4 x 128); llama3-8b without weights,
for an h100; llama3-70b over 32 ranks. Then those of a second call for the same budget, which plans again with the
prices that are known by then, and those of `Profile.solve` for another budget. The first call of a process imports
`torch._dynamo`, which PyTorch's fake tensors ask for; what that takes is a row.

The simulated steps, the trials of choices and the steps that were run are told apart by their calls, in the first plan.

    python benchmarks/planning_time.py --save planning_time-cpu
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from _measure import Goal, arguments, finish

BARS = {"readme": 1.5, "llama of 8 layers": 3.0, "llama3-8b": 8.0, "llama3-70b, 32 ranks": 20.0}
CLAIMS = {"readme": "the README's example", "llama of 8 layers": "a Llama of 8 layers"}
PHASES = {"simulate_step": "steps simulated", "attempt": "choices tried", "clock": "steps run", "capture": "captured"}


class Case(NamedTuple):
    """A step: makes the plan for a budget; and makes what is kept for further budgets, a function of them."""

    plan: Callable[[float], Any]
    keep: Callable[[], Callable[[float], Any]]

    @staticmethod
    def of(*step: Any, **options: Any) -> Case:
        """The plans and the profile of a step."""
        from torch_recompute import make_plan, profile

        def solving() -> Callable[[float], Any]:
            kept = profile(*step, **options)
            return lambda budget: kept.solve(budget=budget)

        return Case(lambda budget: make_plan(*step, budget=budget, **options), solving)


def readme() -> Case:
    """The example of the README."""
    layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
    model, batch = torch.nn.TransformerEncoder(layer, 6), torch.randn(8, 32, 64)

    def loss(out: torch.Tensor) -> torch.Tensor:
        return out.square().mean()

    return Case.of(model, (batch,), loss=loss, optimizer=torch.optim.AdamW)


def llama() -> Case:
    """A small Llama of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
    }
    model, ids = LlamaForCausalLM(LlamaConfig(vocab_size=1000, **sizes)), torch.randint(0, 1000, (4, 128))
    batch = {"input_ids": ids, "labels": ids}
    return Case.of(model, (), batch, optimizer=torch.optim.AdamW)


def llama_8b() -> Case:
    """llama3-8b on meta."""
    from torch_recompute.commands.models import batch_for, load

    model = load("llama3-8b").model
    batch = batch_for(model, "llama3-8b", 1, 4096)
    return Case.of(model, (), batch, optimizer=torch.optim.AdamW, device="h100")


def llama_70b() -> Case:
    """llama3-70b over 32 ranks; the budget of each is a share of 100 GB."""
    from torch_recompute.commands.models import load
    from torch_recompute.plan.ranks import Ranks
    from torch_recompute.planner.layout import Layout, LayoutPlanner

    model = load("llama3-70b").model
    layout = Layout(Ranks(tp=4, pp=4, vpp=5, dp=2, sequence_parallel=True), batch=32)

    def keep() -> Callable[[float], Any]:
        kept = LayoutPlanner(model, "llama3-70b", layout, 4096, "adamw", "h100")
        return lambda budget: kept.plans(int(1e11 * budget))

    return Case(lambda budget: keep()(budget), keep)


CASES = {"readme": readme, "llama of 8 layers": llama, "llama3-8b": llama_8b, "llama3-70b, 32 ranks": llama_70b}


def measured(name: str) -> dict[str, Any]:
    """The figures of one case, in this process."""
    torch.set_num_threads(1)
    case = CASES[name]()
    start = time.process_time()
    importlib.import_module("torch._dynamo")
    dynamo = time.process_time() - start
    from torch_recompute.planner import planner

    phases: dict[str, float] = defaultdict(float)

    def told_apart(part: str) -> None:
        fn = getattr(planner, part)

        @functools.wraps(fn)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.process_time()
            try:
                return fn(*args, **kwargs)
            finally:
                phases[PHASES[part]] += time.process_time() - begun

        setattr(planner, part, timed)

    for part in PHASES:
        told_apart(part)

    def seconds(plan: Callable[[float], Any], budget: float) -> float:
        start = time.process_time()
        plan(budget)
        return time.process_time() - start

    first = seconds(case.plan, 0.5)
    parts = dict(phases)
    again, kept = seconds(case.plan, 0.5), case.keep()
    kept(0.5)
    return {"name": name, "dynamo": dynamo, "first": first, "again": again, "other": seconds(kept, 0.6), **parts}


def main() -> None:
    """Prints a line per case."""
    options = arguments(__doc__ or "", cases=f"of {', '.join(CASES)}; by default all", child="used by itself")
    if options.child:
        print(json.dumps(measured(options.child[0])))
        return
    figures: list[dict[str, Any]] = []
    print(f"{'CPU seconds':22}{'goal':>6}{'plan':>8}{'imports':>9}{'again':>8}{'other budget':>14}   of the plan")
    for name in options.cases or CASES:
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "TORCH_RECOMPUTE_CACHE": folder, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, "--child", name]
            ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        row = json.loads(ran.stdout.splitlines()[-1])
        figures.append({key: value if key == "name" else round(value, 3) for key, value in row.items()})
        parts = ", ".join(f"{part} {row[part]:.2f}" for part in PHASES.values() if part in row)
        print(
            f"{name:22}{BARS[name]:6.1f}{row['first']:8.2f}{row['dynamo']:9.2f}{row['again']:8.2f}{row['other']:14.2f}"
            f"   {parts}",
            flush=True,
        )
    goals: list[Goal] = []
    for row in figures:
        imports = f" and {row['dynamo']:.1f} s for importing dynamo" if row["dynamo"] > 0.05 else ""
        bar = BARS[row["name"]]
        claim, figure = f"planning {CLAIMS.get(row['name'], row['name'])}", f"{row['first']:.1f} s{imports}"
        goals.append(Goal(claim, figure, f"{bar:g} s", row["first"] + row["dynamo"] <= bar))
    other = max(row["other"] / row["first"] for row in figures)
    claim = "a plan for another budget of the same profile, at most"
    goals.append(Goal(claim, f"{other:.0%} of that", "a third", other <= 1 / 3))
    finish(options, figures, goals)


if __name__ == "__main__":
    main()
