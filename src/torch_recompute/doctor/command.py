"""`torch-recompute doctor MODEL`: the findings of `examine`, on a terminal or as JSON.

MODEL and its options are those of `torch-recompute plan`, so the model of a plan is examined with the same words.
Exit codes: 0 nothing found, 1 findings, 2 for what cannot be asked.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, cast

from .. import errors
from .._models import PRESETS
from .._progress import at_work
from ..plan.budget import read_budget
from ..plan.plan import Plan
from ..plan_command.task import DTYPES, OPTIMIZERS, Task
from ..planning.prices import DEVICES
from .examining import examine


def add_command(commands: Any) -> None:
    """Describe `torch-recompute doctor` to the command line."""
    about = "why a model is still out of memory, slow or wrong: findings, how each was confirmed, and what to write"
    parser = cast("argparse.ArgumentParser", commands.add_parser("doctor", help=about, description=about))
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f"one of {', '.join(PRESETS)}; or the config.json (or its folder) of a Hugging Face model; or "
        "pkg.module:name of a function that returns (model, batch), with weights if a step is to be run as well",
    )
    parser.add_argument("--plan", type=Path, metavar="FILE.json", help="the plan to look at")
    parser.add_argument("--budget", metavar="BYTES", help="the most bytes alive in the step, as 24GiB, or a share, 0.4")
    parser.add_argument("--batch", type=int, metavar="N", help="sequences or pictures in a step (1)")
    parser.add_argument("--sequence", type=int, metavar="N", help="tokens in a sequence (the model's, at most 4096)")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (bf16 for a model by name)")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="(adamw)")
    parser.add_argument("--device", choices=(*DEVICES, "cpu"), help="what seconds are of (h100)")
    parser.add_argument("--no-run", action="store_true", help="simulate only, also where the model has weights")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the text")
    parser.add_argument("--quiet", action="store_true", help="print nothing: the exit code says whether there are any")
    parser.set_defaults(command=command)


def command(args: argparse.Namespace) -> int:
    """Run `torch-recompute doctor`; 0 when there is nothing to find."""
    plan = None if args.plan is None else _plan(args.plan)
    if args.budget is not None:
        read_budget(args.budget)
    with at_work(f"building {args.model}"):
        task = Task.of(args)
    batch = task.batch
    given, named = (batch, None) if isinstance(batch, tuple) else ((), batch)
    with at_work(f"examining {task}"):
        report = examine(
            task.model,
            given,
            named,
            plan=plan,
            budget=args.budget,
            optimizer=OPTIMIZERS[args.optimizer],
            device=task.device,
            run=False if args.no_run else None,
        )
    if args.json:
        sys.stdout.write(report.to_json() + "\n")
    elif not args.quiet:
        from . import view

        view.show(task, report)
    return 0 if report else 1


def _plan(path: Path) -> Plan:
    try:
        return Plan.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise errors.ArgumentError(
            errors.cannot_read("--plan", str(path), (error.strerror or str(error)).lower())
        ) from error
