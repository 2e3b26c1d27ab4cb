"""`torch-recompute doctor MODEL`: the findings of `examine`, on a terminal or as JSON.

MODEL and its options are those of `torch-recompute plan`, so the model of a plan is examined with the same words.
Exit codes: 0 nothing found, 1 findings, 2 for what cannot be asked.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, cast

from .._face import FAILED, OK, Face, add_options
from .._models import OPTIMIZERS, add_loop_options, add_model_options, autocasting
from .._plan_file import read_plan
from ..checking.doctor import examine
from ..plan.budget import read_budget
from ..plan_command.task import Task
from ..planning.prices import DEVICES


def add_command(commands: Any) -> None:
    """Describe `torch-recompute doctor` to the command line."""
    about = "why a model is still out of memory, slow or wrong: findings, how each was confirmed, and what to write"
    parser = cast("argparse.ArgumentParser", commands.add_parser("doctor", help=about, description=about))
    add_model_options(parser, weights="without weights, so that its step is simulated")
    parser.add_argument("--plan", type=Path, metavar="FILE.json", help="the plan to look at")
    parser.add_argument("--budget", metavar="BYTES", help="the most bytes alive in the step, as 24GiB, or a share, 0.4")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="(adamw)")
    parser.add_argument("--device", choices=(*DEVICES, "cpu"), help="what seconds are of (h100)")
    parser.add_argument("--no-run", action="store_true", help="simulate only, also where the model has weights")
    add_loop_options(parser)
    add_options(parser, command)
    parser.set_defaults(offload=False)


def command(args: argparse.Namespace) -> int:
    """Run `torch-recompute doctor`; 0 when there is nothing to find."""
    face = Face.of(args)
    plan = None if args.plan is None else read_plan(args.plan)
    if args.budget is not None:
        read_budget(args.budget)
    with face.at_work(f"building {args.model}"):
        task = Task.of(args)
    batch = task.batch
    given, named = (batch, None) if isinstance(batch, tuple) else ((), batch)
    with face.at_work(f"examining {task}"), autocasting(task.model, args.autocast):
        report = examine(
            task.model,
            given,
            named,
            plan=plan,
            budget=args.budget,
            optimizer=OPTIMIZERS[args.optimizer],
            device=task.device,
            run=False if args.no_run else None,
            loss=task.loss,
            **task.loop.words,
        )
    face.give(report.to_json, lambda: _view().show(task, report))
    return FAILED if report.findings else OK


def _view() -> Any:
    from . import view

    return view
