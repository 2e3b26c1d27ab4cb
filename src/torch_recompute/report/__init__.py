"""`torch-recompute report plan.json -o report.html`: what a plan does to the step, to look at.

Problem. A plan is a list of choices and a few figures. Where the peak lies, what is in it, when replays run, and what
some more memory would buy, is seen in a picture or not at all.

Idea. The step is simulated with the plan, without, and with plans along the curve of budget against seconds
(`timed.py`); all of it becomes one document (`data.py`), and the document a page that needs nothing but itself
(`page.py`), a picture (`picture.py`), a snapshot for the viewer of allocations that PyTorch has, or a table. A file
that `torch-recompute plan --out` wrote says which step it is for; for any other plan the command line has to.

    page = report(plan, model, (batch,), optimizer=torch.optim.AdamW)
    Path("report.html").write_text(page)

The table goes to stdout, as one document with `--json`; files are written beside it. Exit codes: 2 for what cannot be
asked.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from .. import errors
from .._face import OK, Face, add_options, check_folder, document, write_text
from .._models import DTYPES, OPTIMIZERS, add_batch_options, autocasting, model_help
from .._plan_file import read_plan
from ..plan.plan import Plan
from ..plan_command.options import NAMES, add_step_options, words_of
from ..plan_command.task import Task
from ..planning.planner import Loss, MakeOptimizer
from ..planning.prices import DEVICES
from . import picture
from .data import POINTS, Reported, collect, compared
from .page import render
from .timed import Clock

__all__ = ["add_command", "command", "report"]

SCHEMA_VERSION = 1


def _too_few_points(points: int) -> str:
    """Text for a curve of too few points."""
    return f"--points is {points}; expected 0, for no curve, or at least 2. Write for example --points 10."


def report(
    plan: Plan,
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    loss: Loss = None,
    optimizer: MakeOptimizer = None,
    device: torch.device | str | None = None,
    points: int = POINTS,
    title: str = "",
) -> str:
    """A page on a plan: memory over the step, what other budgets would cost, and the placements.

        Path("report.html").write_text(report(plan, model, (batch,), optimizer=torch.optim.AdamW))

    The step is that of the training loop that the plan was made for. It is simulated some `points` + 2 times, and the
    model is profiled once; what a profile runs is said at `profile`.

    Args:
        plan: The plan, from a budget, a configuration or written by hand.
        model: The model; on the meta device if it is too large for this machine.
        args: The positional arguments of one call.
        kwargs: Its keyword arguments.
        loss: From the model's output to a scalar; see `simulate`.
        optimizer: From a list of parameters to an optimizer, or an optimizer of the model's parameters.
        device: What the seconds are of; see `make_plan`.
        points: How many plans along the curve of budget against seconds there are at most; 0 for none.
        title: What the page is called; by default the model's class.

    Returns:
        A text of HTML that needs no other file and no network.

    Raises:
        ArgumentError: The plan does not fit the model, or see `simulate` and `make_plan`.
    """
    if points < 0 or points == 1:
        raise errors.ArgumentError(_too_few_points(points))
    step: dict[str, Any] = {"loss": loss, "optimizer": optimizer, "device": device, "loop": plan.loop}
    others = compared(plan, model, args, kwargs, points=points, **step)
    return render(_document(collect(plan, others, Clock(model, args, kwargs, **step), title=title)))


def add_command(commands: Any) -> None:
    """Describe `torch-recompute report` to the command line."""
    about = "a plan to look at: memory over the step, what other budgets would cost, the placements"
    parser = cast("argparse.ArgumentParser", commands.add_parser("report", help=about, description=about))
    parser.add_argument(
        "plan", type=Path, metavar="PLAN", help="a plan's file, from torch-recompute plan --out or Plan.to_json"
    )
    parser.add_argument("-o", "--out", type=Path, metavar="FILE.html", help="write the page")
    parser.add_argument(
        "--snapshot", type=Path, metavar="FILE.pickle", help="write the step for https://pytorch.org/memory_viz"
    )
    parser.add_argument(
        "--points", type=int, default=POINTS, metavar="N", help=f"budgets to compare with; 0 for none ({POINTS})"
    )
    what = model_help("without weights")
    parser.add_argument(
        "--model", metavar="MODEL", help=f"for a plan whose file does not say which step it is for: {what}"
    )
    add_batch_options(parser)
    add_step_options(parser)
    add_options(parser, command, plot="the step and the curve", as_well="--png")


def command(args: argparse.Namespace) -> int:
    """Run `torch-recompute report`; 0 when there is something to look at."""
    face = Face.of(args)
    for option in ("out", "snapshot"):
        if getattr(args, option) is not None:
            check_folder(f"--{option}", getattr(args, option))
    if args.points < 0 or args.points == 1:
        raise errors.ArgumentError(_too_few_points(args.points))
    plan, words = _read(args.plan)
    step = _step(args, words)
    with face.at_work(f"building {step.model}"):
        task = Task.of(step)
    call, how = _call(task, plan)
    with autocasting(task.model, plan.prediction.loop.autocast if plan.prediction and plan.prediction.loop else None):
        with face.at_work(f"profiling {task}" if args.points else f"reading {args.plan}"):
            others = compared(plan, *call, points=args.points, **how)
        with face.progress(len(others) + 2) as done:
            seen = collect(plan, others, Clock(*call, **how), title=str(task), done=done)
    data = _document(seen)
    if args.out is not None:
        write_text("--out", args.out, render(data))
    if args.snapshot is not None:
        _write_snapshot(args.snapshot, seen)
    if face.plot is not None:
        picture.draw(face.plot, data)
    face.give(lambda: document("report", SCHEMA_VERSION, seen.data), lambda: _view().show(data))
    return OK


def _call(task: Task, plan: Plan) -> tuple[tuple[nn.Module, tuple[Any, ...], dict[str, Any]], dict[str, Any]]:
    """A task as the arguments of `compared` and `Clock`."""
    args, kwargs = (task.batch, dict[str, Any]()) if isinstance(task.batch, tuple) else ((), task.batch)
    how: dict[str, Any] = {"optimizer": OPTIMIZERS[task.optimizer], "device": task.device, "loss": task.loss}
    return (task.model, args, kwargs), {**how, "loop": plan.loop}


def _document(seen: Reported) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION, **seen.data}


def _read(path: Path) -> tuple[Plan, dict[str, Any]]:
    """The plan in a file, and the words for its step, if there are any."""
    plan = read_plan(path, "PLAN")
    words: Any = json.loads(path.read_text(encoding="utf-8")).get("task")
    return plan, cast("dict[str, Any]", words) if isinstance(words, dict) else {}


def _bad_step_in_plan(path: str, word: str) -> str:
    """Text for a plan whose file says of its step what is no word for one."""
    return (
        f"{path} says {word} of its step, which no command line of torch-recompute plan says. Make the plan again, or "
        "add --model MODEL: then the command line alone says which step is meant."
    )


def _step(args: argparse.Namespace, words: dict[str, Any]) -> argparse.Namespace:
    """The command line that says which step is meant: the file's, in which this one's words come first."""
    given = words_of(args)
    if "model" not in given:
        if "model" not in words:
            raise errors.ArgumentError(
                f"{args.plan!s} holds a plan and does not say for which model and batch; a file that torch-recompute "
                "plan --out wrote does. Add --model MODEL, and what else torch-recompute plan takes to describe a "
                "step."
            )
        for name, word in words.items():
            if not _is_a_word(name, word):
                raise errors.ArgumentError(_bad_step_in_plan(str(args.plan), f"{name}={word!r}"))
        given = {**words, **given}
    loop = {"hold_output": True, "accumulate": 1, "set_to_none": True}  # of the plan, where it says
    return argparse.Namespace(**{**dict.fromkeys(NAMES), **given}, offload=False, **loop)


def _is_a_word(name: str, word: object) -> bool:
    """Whether a command line could say this of a step."""
    known = {"dtype": DTYPES, "optimizer": OPTIMIZERS, "device": (*DEVICES, "cpu")}
    if name in known:
        return word in known[name]
    return type(word) is {"model": str, "batch": int, "sequence": int}.get(name)


def _write_snapshot(path: Path, seen: Reported) -> None:
    try:
        seen.chosen.to_snapshot(path)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise errors.ArgumentError(errors.cannot_write("--snapshot", str(path), why)) from error


def _view() -> Any:
    from . import view

    return view
