"""`torch-recompute plan MODEL --budget 24GiB`: a plan for a model that this machine need not be able to hold.

MODEL and a few options describe the whole step: which model, a batch of which size, which optimizer, which device. The
model is on meta, the device is a data sheet, and the plan is that of `make_plan`. `--out` writes it for
`Plan.from_json`, beside the words of the command line, so that `torch-recompute report` can do the step again.
`--frontier` shows the whole curve of budget against seconds from one profile instead. With `--tp`, `--pp` or another of
these the step is spread over ranks, and there is a plan for each rank of the pipeline (`ranks.py`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import errors
from ..plan.budget import read_budget
from ..plan.plan import Plan
from ..plan.profile import Profile
from ..planner.planner import Planner
from . import ranks
from .models import Step, add_loop_options, add_model_options, add_step_options, autocasting, curve, loop_of, words_of
from .output import GIB, OK, Output, add_options, check_folder, document, new_command, new_table, write_plan

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 1


def add_command(commands: Any) -> None:
    """Describes `torch-recompute plan` to the command line."""
    parser = new_command(commands, "plan")
    add_model_options(parser, weights="without weights")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument(
        "--budget",
        metavar="BYTES",
        help='the most bytes alive in the step, as 24GiB; or a share of the activation memory, as 0.4 or "40%%"',
    )
    asked.add_argument("--frontier", action="store_true", help="what ten budgets cost, instead of a plan for one")
    add_step_options(parser)
    add_loop_options(parser)
    parser.set_defaults(optimizer="adamw")
    parser.add_argument(
        "--offload",
        nargs="?",
        const=True,
        default=False,
        metavar="BYTES",
        help="allow inputs of regions to be kept in host memory: as much as there is, or at most so much, as 64GiB",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE.json", help="write the plan, for Plan.from_json and torch-recompute report"
    )
    ranks.add_rank_options(parser)
    add_options(parser, command, plot="the curve of --frontier")


def command(args: argparse.Namespace) -> int:
    """Runs `torch-recompute plan`; 0 when there is a plan."""
    output = Output.of(args)
    for option, other in (("out", "budget"), ("plot", "frontier")):
        if getattr(args, option) is not None and not getattr(args, other):
            raise errors.ArgumentError(errors.goes_with(f"--{option}", f"--{other}"))
    if args.out is not None:
        check_folder("--out", args.out)
    if args.budget is not None:
        read_budget(args.budget)
    loop_of(args)
    layout = ranks.layout_of(args)
    if layout is not None:
        return ranks.command(args, layout, output)
    with output.at_work(f"building {args.model}"):
        step = Step.of(args)
    with autocasting(step.model, args.autocast):
        with output.at_work(f"profiling {step}"):
            planner = step.planner()
        profile = planner.profile
        with output.at_work("planning"):
            plans = curve(profile) if args.frontier else [_planned(planner, args)]
    if args.out is not None:
        write_plan(args.out, plans[0], words_of(args))
    if output.plot is not None:
        _draw(output.plot, profile, plans, str(step))
    output.give(
        lambda: _to_json(step, profile, plans, frontier=args.frontier),
        lambda console: _print(console, step, profile, plans, frontier=args.frontier),
    )
    return OK


def _planned(planner: Planner, args: argparse.Namespace) -> Plan:
    """The plan for a budget; where there is none, what to write on the command line."""
    try:
        return planner.plan(args.budget)
    except errors.BudgetError as error:
        least: Any = error.solution
        smallest, promise = error.smallest, least.prediction
        unwritten = f" {args.out} has not been written; with --budget {smallest} it is that plan." if args.out else ""
        text = (
            f"{errors.too_small(promise.budget_bytes, smallest, planner.profile.plain_peak_bytes)}\n"
            f"  Write --budget {errors.enough(smallest)} or more, or a smaller batch.{unwritten}"
            f"{errors.more_advice(promise.advice)}"
        )
        raise errors.BudgetError(text, smallest, least) from None


def _to_json(step: Step, profile: Profile, plans: Sequence[Plan], *, frontier: bool) -> str:
    """The plan, or the plans along the curve, as a JSON document; `Plan.from_json` reads each of them."""
    data = [json.loads(plan.to_json()) for plan in plans]
    found = {
        **step.as_data(),
        "device": profile.device,
        "plain": {"peak_bytes": profile.plain_peak_bytes, "step_seconds": profile.costs.step_seconds},
        "advice": profile.advice if frontier or plans[0].prediction is None else plans[0].prediction.advice,
        **({"frontier": data} if frontier else {"plan": data[0]}),
    }
    return document("plan", SCHEMA_VERSION, found)


def _print(console: Console, step: Step, profile: Profile, plans: Sequence[Plan], *, frontier: bool) -> None:
    console.print(str(step), style="bold")
    if frontier:
        _print_curve(console, profile, plans)
    else:
        console.print(str(plans[0]), markup=False)
    for path, why in profile.left_out:
        console.print(f"not planned: {path} {why}", style="dim", markup=False)
    if frontier and profile.advice:
        console.print(f"without recomputation: {profile.advice}", style="yellow", markup=False)


def _print_curve(console: Console, profile: Profile, plans: Sequence[Plan]) -> None:
    plain = profile.costs.step_seconds
    console.print(
        f"without recomputation: peak {profile.plain_peak_bytes / GIB:,.2f} GiB, step {1000 * plain:,.1f} ms on "
        f"{profile.device}"
    )
    if profile.loop is not None:
        console.print(f"counted: {profile.loop}")
    table = new_table("budget GiB", "step ms", "more", "replayed GFLOP", "regions", "from the best")
    for plan in plans:
        promise = plan.prediction
        assert promise is not None
        table.add_row(
            f"{promise.budget_bytes / GIB:,.2f}",
            f"{1000 * promise.step_seconds:,.1f}",
            f"{promise.step_seconds / plain - 1:+.1%}",
            f"{promise.replay_flops / 1e9:,.1f}",
            str(len(plan)),
            f"{promise.gap:.1%}",
        )
    console.print(table)
    console.print(
        "From the best: no schedule within the budget saves more than this of the step. A row follows from one "
        "profile; --budget also simulates the plan that it prints."
    )


def _draw(path: Path, profile: Profile, plans: Sequence[Plan], title: str) -> None:
    """Draws the curve, the bound below it, and the step without recomputation."""
    from matplotlib.figure import Figure

    promises = [plan.prediction for plan in plans if plan.prediction is not None]
    budgets = [promise.budget_bytes / GIB for promise in promises]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(budgets, [1000 * promise.step_seconds for promise in promises], "o-", label="plans")
    bound = [1000 * promise.bound_seconds for promise in promises]
    axes.plot(budgets, bound, ":", color="#9a9a9a", label="no schedule takes less")
    axes.plot([profile.plain_peak_bytes / GIB], [1000 * profile.costs.step_seconds], "s", label="without recomputation")
    axes.set_xlabel("peak of the step, GiB")
    axes.set_ylabel(f"step, ms on {profile.device}")
    axes.set_title(title, fontsize=8, wrap=True)
    axes.legend()
    figure.savefig(path, dpi=150)
