"""`torch-recompute doctor MODEL`: the findings of `examine`, on a terminal or as JSON.

MODEL and its options are those of `torch-recompute plan`, so the model of a plan is examined with the same words.
Exit codes: 0 nothing found, 1 findings, 2 for a command line that cannot be followed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..doctor import Report, examine
from ..memory.budget import read_budget
from .models import AskedStep, add_loop_options, add_model_options, add_step_options, autocasting
from .output import FAILED, OK, Output, add_options, new_command, read_plan

if TYPE_CHECKING:
    from rich.console import Console


def add_command(commands: Any) -> None:
    """Adds `torch-recompute doctor` to the command line."""
    parser = new_command(commands, "doctor")
    add_model_options(parser, weights="without weights, so that its step is simulated")
    parser.add_argument("--plan", type=Path, metavar="FILE.json", help="the plan to look at")
    parser.add_argument("--budget", metavar="BYTES", help="the most bytes alive in the step, as 24GiB, or a share, 0.4")
    add_step_options(parser)
    parser.add_argument("--no-run", action="store_true", help="simulate only, also where the model has weights")
    add_loop_options(parser)
    parser.add_argument("--exit-zero", action="store_true", help="exit with 0 also where something is found")
    add_options(parser, command)


def command(args: argparse.Namespace) -> int:
    """Runs `torch-recompute doctor`; 0 when nothing is found, or with `--exit-zero`."""
    output = Output.of(args)
    plan = None if args.plan is None else read_plan(args.plan)
    if args.budget is not None:
        read_budget(args.budget)
    with output.at_work(f"building {args.model}"):
        step = AskedStep.asked(args)
    with output.at_work(f"examining {step}"), autocasting(step.model, args.autocast):
        report = examine(
            step.model,
            *step.call,
            plan=plan,
            budget=args.budget,
            run=False if args.no_run else None,
            loss=step.loss,
            optimizer=step.optimizer,
            device=cast("str | None", step.device),  # which has no other links here
            **step.loop.words,
        )
    output.give(report.to_json, lambda console: _print(console, step, report))
    return FAILED if report.findings and not args.exit_zero else OK


def _print(console: Console, step: AskedStep, report: Report) -> None:
    from rich.padding import Padding
    from rich.text import Text

    console.print(str(step), style="bold", markup=False)
    for finding in report.findings:
        console.print(Text.assemble("\n", (finding.kind, "bold red"), "  ", (finding.where, "cyan")))
        for word, text, style in (
            ("", finding.seen, ""),
            ("evidence  ", finding.confirmed, "dim"),
            ("fix  ", finding.write, "green"),
        ):
            lines = Padding(Text.assemble((word, "bold"), (text, style)), (0, 0, 0, 4), expand=False)
            console.print(lines)
    console.print(f"\n{report.summary()}", style="bold")
    for reason in report.reasons():
        console.print(reason, style="dim", markup=False)
