"""`torch-recompute plan MODEL --budget 24GiB`: a plan for a model that this machine need not be able to hold.

Problem. Whether a model can be trained on a device, and what that costs, is asked before there is a device, a script
or a checkpoint.

Idea. MODEL and a few options say the whole step: which model, a batch of which size, which optimizer, which device.
The model lies on meta, the device is a data sheet, and the plan is that of `make_plan`, with `--out` in the form that
`Plan.from_json` reads where the training runs, beside the words of the command line, so that `torch-recompute report`
can do the step again. `--frontier` shows the whole curve instead, from one profile: what each budget costs, before one
is chosen. With `--tp`, `--pp` or another of these the step is spread over ranks, and there is a plan for each rank of
the pipeline (`spread.py`).

The result goes to stdout, as a table or with `--json` as one document; what is being done goes to stderr. Exit codes:
2 for what cannot be asked, 3 where no plan fits.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from .. import errors
from .._face import OK, Face, add_options, check_folder, document
from .._models import add_loop_options, add_model_options, autocasting, loop_of
from ..plan.budget import read_budget
from ..plan.plan import Plan
from ..plan.profile import Profile
from ..planning.planner import Planner
from . import plot, spread
from .options import add_step_options, words_of
from .task import Task, curve
from .writing import write

__all__ = ["Task", "add_command", "command", "curve", "to_json", "write"]

SCHEMA_VERSION = 1


def add_command(commands: Any) -> None:
    """Describe `torch-recompute plan` to the command line."""
    about = "a plan for a budget of memory: what to keep, what to recompute, what the step takes"
    parser = cast("argparse.ArgumentParser", commands.add_parser("plan", help=about, description=about))
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
    spread.add_options(parser)
    add_options(parser, command, plot="the curve of --frontier")


def command(args: argparse.Namespace) -> int:
    """Run `torch-recompute plan`; 0 when there is a plan."""
    face = Face.of(args)
    _check(args)
    layout = spread.layout_of(args)
    if layout is not None:
        return spread.command(args, layout, face)
    with face.at_work(f"building {args.model}"):
        task = Task.of(args)
    with autocasting(task.model, args.autocast):
        with face.at_work(f"profiling {task}"):
            planner = task.planner()
        profile = planner.profile
        with face.at_work("planning"):
            plans = curve(profile) if args.frontier else [_planned(planner, args)]
    if args.out is not None:
        write(args.out, plans[0], words_of(args))
    if face.plot is not None:
        plot.draw(face.plot, profile, plans, str(task))
    face.give(
        lambda: to_json(task, profile, plans, curve=args.frontier),
        lambda: _view().show(task, profile, plans, curve=args.frontier),
    )
    return OK


def _no_plan_to_write(budget: int, smallest: int, plain: int, advice: str, out: str | None) -> str:
    """Text for a budget on a command line that no plan fits into."""
    unwritten = f" {out} has not been written; with --budget {smallest} it is that plan." if out else ""
    return (
        f"{errors.too_small(budget, smallest, plain)}\n"
        f"  Write --budget {errors.enough(smallest)} or more, or a smaller batch.{unwritten}"
        f"{errors.more_advice(advice)}"
    )


def _planned(planner: Planner, args: argparse.Namespace) -> Plan:
    """The plan for a budget; where there is none, what to write on the command line."""
    try:
        return planner.plan(args.budget)
    except errors.BudgetError as error:
        least: Any = error.solution
        figures = least.prediction.budget_bytes, error.smallest, planner.profile.plain_peak_bytes
        out = None if args.out is None else str(args.out)
        text = _no_plan_to_write(*figures, least.prediction.advice, out)
        raise errors.BudgetError(text, error.smallest, least) from None


def to_json(task: Task, profile: Profile, plans: Sequence[Plan], *, curve: bool) -> str:
    """The plan, or the plans along the curve, as a JSON document; `Plan.from_json` reads each of them."""
    data = [json.loads(plan.to_json()) for plan in plans]
    found = {
        **task.as_data(),
        "device": profile.device,
        "plain": {"peak_bytes": profile.plain_peak_bytes, "step_seconds": profile.costs.step_seconds},
        "advice": profile.advice if curve or plans[0].prediction is None else plans[0].prediction.advice,
        **({"frontier": data} if curve else {"plan": data[0]}),
    }
    return document("plan", SCHEMA_VERSION, found)


def _check(args: argparse.Namespace) -> None:
    """Refuse before the work what could not be done after it."""
    for option, other in (("out", "budget"), ("plot", "frontier")):
        if getattr(args, option) is not None and not getattr(args, other):
            raise errors.ArgumentError(errors.goes_with(f"--{option}", f"--{other}"))
    if args.out is not None:
        check_folder("--out", args.out)
    if args.budget is not None:
        read_budget(args.budget)
    loop_of(args)


def _view() -> Any:
    from . import view

    return view
