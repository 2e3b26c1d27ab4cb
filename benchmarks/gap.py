"""Claim: plans are near the best step: within 2 % for equal layers, 4 % for others, at budgets from 10 % to 90 %.

The models of `peers frontier`, at training sizes, in bf16 on meta, with AdamW, by the data sheet of an h100 with the
typical host, or that of `--host`; a budget is a share of the activation memory. For each budget what the plan adds to
the step, and the gap to the bound on every schedule, as a share of the step. Beside it the gap that plans would have
without two of the options, from the same profile: no part together with its norm, and no groups of layers.

And within 10 % where steps are so small that regions themselves are much of what plans add: models of transformers with
eight layers of width 128, 4 x 128 tokens, with weights, so that this machine's prices and steps count.

    python benchmarks/gap.py
    python benchmarks/gap.py moe --host slow
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _measure import Goal, arguments, finish

from torch_recompute.planner.bound import bound
from torch_recompute.planner.cost import Costs, Option
from torch_recompute.planner.planner import Planner
from torch_recompute.planner.solve import choose, smallest
from torch_recompute.simulation.devices import read_host
from torch_recompute.simulation.training_step import TrainingStep

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from frontier.models import MODELS

# Layers, width, tokens, batch, and the goal in percent.
CASES = {
    "gpt": (12, 768, 1024, 8, 2.0),
    "llama": (16, 2048, 4096, 2, 2.0),
    "moe": (12, 1024, 2048, 4, 4.0),
    "encoder-decoder": (12, 768, 1024, 8, 4.0),
    "convnext": (18, 192, 3136, 32, 4.0),
}


SMALL = {"granite": 10.0, "olmo2": 10.0, "qwen2_moe": 10.0}
SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "eos_token_id": 0,
    "bos_token_id": 0,
}
EXPERTS = {
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 352,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


def small(name: str) -> list[dict[str, Any]]:
    """A small model with weights at four budgets, in seconds of steps that are run here."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    config = AutoConfig.for_model(name, **SIZES, **(EXPERTS if "moe" in name else {}))
    batch = torch.randint(0, 1000, (4, 128), generator=torch.Generator().manual_seed(0))
    model = AutoModelForCausalLM.from_config(config)
    known = Planner(TrainingStep(model, (), {"input_ids": batch, "labels": batch}, optimizer=torch.optim.AdamW))
    rows: list[dict[str, Any]] = []
    for tenth in (2, 4, 6, 8):
        promised = known.plan(tenth / 10).prediction
        assert promised is not None
        more = promised.step_seconds / promised.plain_step_seconds - 1
        rows.append(
            {
                "model": name,
                "budget_percent": 10 * tenth,
                "more_percent": round(100 * more, 2),
                "gap_percent": round(100 * (promised.step_seconds / promised.bound_seconds - 1), 2),
            }
        )
    return rows


def planner(name: str, host: str = "typical") -> Planner:
    """What the step of a model costs with a host."""
    layers, width, tokens, number, _ = CASES[name]
    with torch.device("meta"):
        model = MODELS[name].model(layers, width, tokens).to(torch.bfloat16)
        batch = MODELS[name].batch(tokens, number)
    batch = batch.to(torch.bfloat16) if batch.is_floating_point() else batch
    step = TrainingStep(model, (batch,), optimizer=torch.optim.AdamW, device="h100", host=read_host(host))
    return Planner(step)


def only(costs: Costs, wanted: Callable[[Option], bool]) -> Costs:
    """The costs with some options only."""
    kinds = {
        name: replace(kind, options=tuple(option for option in kind.options if wanted(option)))
        for name, kind in costs.kinds.items()
    }
    return replace(costs, kinds=kinds)


def gap(costs: Costs, budget: int, floor: float) -> tuple[float, float]:
    """What the plan adds to the step, and how far from the bound it is, both in percent."""
    seconds = choose(costs, budget).seconds
    return 100 * seconds / costs.step_seconds, 100 * (seconds - floor) / (costs.step_seconds + seconds)


def measured(name: str, host: str) -> list[dict[str, Any]]:
    """One model at nine budgets, with a host."""
    known = planner(name, host)
    costs = known.costs
    plain = only(costs, lambda option: option.span == 1 and not any(len(choice.paths) > 1 for choice in option.regions))
    least, most = smallest(plain).peak_bytes, known.plain.peak_bytes
    rows: list[dict[str, Any]] = []
    for tenth in range(1, 10):
        budget = least + (most - least) * tenth // 10
        floor = bound(costs, budget)
        more, distance = gap(costs, budget, floor)
        rows.append(
            {
                "model": name,
                "budget_percent": 10 * tenth,
                "more_percent": round(more, 2),
                "gap_percent": round(distance, 2),
                "gap_without_percent": round(gap(plain, budget, floor)[1], 2),
            }
        )
    return rows


def main() -> None:
    """Measures and prints all models, or those that are named."""
    which = f"which models: {', '.join([*CASES, *SMALL])} (all)"
    options = arguments("How far plans are from the bound on every schedule.", which, host="the host (typical)")
    (host,) = options.host or ["typical"]
    figures: list[dict[str, Any]] = []
    print(f"h100 and its host: {read_host(host)}")
    print("model            budget | more %  gap % | gap % without norms with parts and groups")
    wanted = options.words or [*CASES, *SMALL]
    for name, (*_, goal) in CASES.items():
        if name in wanted:
            rows = measured(name, host)
            figures.extend({**row, "goal_percent": goal} for row in rows)
            for row in rows:
                print(
                    f"{name:16} {row['budget_percent']:4} % | {row['more_percent']:6.2f} {row['gap_percent']:6.2f} | "
                    f"{row['gap_without_percent']:6.2f}"
                )
    for name, goal in SMALL.items():
        if name in wanted:
            rows = small(name)
            figures.extend({**row, "goal_percent": goal} for row in rows)
            for row in rows:
                figure = f"{row['more_percent']:6.2f} {row['gap_percent']:6.2f}"
                print(f"{name:16} {row['budget_percent']:4} % | {figure} |")
    goals: list[Goal] = []
    for name in dict.fromkeys(row["model"] for row in figures):
        rows = [row for row in figures if row["model"] == name]
        worst, goal = max(rows, key=lambda row: row["gap_percent"]), rows[0]["goal_percent"]
        figure = f"{worst['gap_percent']:.1f} %, at a budget of {worst['budget_percent']} %"
        claim = f"{name}: gap to the lower bound, at most"
        goals.append(Goal(claim, figure, f"{goal:g} %", worst["gap_percent"] <= goal))
    finish(options, figures, goals)


if __name__ == "__main__":
    main()
