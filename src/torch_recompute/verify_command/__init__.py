"""`torch-recompute verify MODEL --plan plan.json`: does this plan change anything, on this machine?

Problem. A plan is made for a model that need not be here. Before it trains for a week, or when it is made anew in a
repository's checks, somebody wants to know that the step is the same, in one line and with an exit code.

Idea. MODEL is what it is for `torch-recompute plan`, but with weights: those of the function that makes it, or random
ones, which serve as well, because what is compared is two steps from the same weights. The comparison is
`torch_recompute.verify`.

Exit codes: 1 if anything differs, 2 for what cannot be asked, 3 for a model that is too large to be run here, which is
said before it is built, with the bytes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, cast

from .._face import FAILED, OK, Face, add_options, document
from .._models import add_model_options
from .._plan_file import read_plan
from ..checking.verify import Verification, verify
from .task import Task

__all__ = ["add_command", "command", "to_json"]

SCHEMA_VERSION = 1


def add_command(commands: Any) -> None:
    """Describe `torch-recompute verify` to the command line."""
    about = "run a step with a plan and without it, and compare gradients, random states, buffers and routing"
    parser = cast("argparse.ArgumentParser", commands.add_parser("verify", help=about, description=about))
    add_model_options(parser, weights="with random weights")
    parser.add_argument("--plan", type=Path, metavar="FILE.json", required=True, help="as written by plan --out")
    parser.add_argument(
        "--device", help="cpu, cuda or cuda:N, for a model that is built here (cuda where there is one, else cpu)"
    )
    add_options(parser, command)


def command(args: argparse.Namespace) -> int:
    """Run `torch-recompute verify`; 0 if nothing differs, else 1."""
    face = Face.of(args)
    plan = read_plan(args.plan)
    with face.at_work(f"building {args.model}"):
        task = Task.of(args)
    with face.at_work(f"running {task.word}: two plain steps, and one with {len(plan.all_choices)} regions"):
        found = task.verified(plan, verify)
    face.give(lambda: to_json(task, found), lambda: _view().show(found))
    return OK if found else FAILED


def to_json(task: Task, found: Verification) -> str:
    """What was found, as a JSON document."""
    return document("verify", SCHEMA_VERSION, {"asked": task.word, **found.as_data()})


def _view() -> Any:
    from . import view

    return view
