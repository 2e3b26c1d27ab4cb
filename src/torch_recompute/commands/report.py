"""`torch-recompute report plan.json -o report.html`: makes a page that shows what a plan does to the step.

The step is simulated with the plan, without, and with plans along the curve of budget against seconds; all of it
becomes one document (`report_data.py`), and the document a page, a picture, a snapshot for PyTorch's viewer of
allocations, or a table. A file that `torch-recompute plan --out` wrote holds the options of its step; for any other
plan the command line has to give them.

The page is a template, a style and two scripts (`page/`) and the document, in one text. Nothing is fetched: its own
security policy forbids it. The pictures are SVG that some two hundred lines of JavaScript draw from the document; the
plotting library that is most used would add four megabytes to each page.
"""

from __future__ import annotations

import argparse
import html
import json
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from .. import errors
from ..memory.batch import Batch
from ..plan.plan import Plan
from ..simulation.devices import DEVICES
from ..simulation.training_step import OPTIMIZERS, Loss, MakeOptimizer, TrainingStep
from . import models
from . import output as out
from .models import DTYPES, POINTS, RANK_KINDS, RANK_WORDS, STATE_KINDS, STEP_WORDS, AskedStep
from .output import OK, Output
from .report_data import Clock, Reported, collect

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 1
PAGE = {"PAGE": "page.html", "STYLE": "page.css", "LOGIC": "logic.js", "SCRIPT": "page.js"}
COLOURS = {
    "parameters": "#8694a6",
    "buffers": "#b9c2cd",
    "optimizer": "#b59a7a",
    "gradients": "#9575cd",
    "other": "#d7a3c1",
    "activations": "#3f88c5",
    "rebuilt": "#ee964b",
    "backward": "#4fa58a",
}
PHASES = {
    "forward": "#3f88c5",
    "loss": "#b8860b",
    "backward": "#4fa58a",
    "replay": "#ee964b",
    "optimizer": "#b59a7a",
}
MARK = "#c2185b"
HOST = "#4a148c"
LABELS = {
    "activations": "activations of the forward",
    "rebuilt": "rebuilt by replays",
    "backward": "made in backward",
}


def report(
    plan: Plan,
    model: nn.Module,
    args: Batch = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Loss = None,
    optimizer: MakeOptimizer = None,
    device: torch.device | str | None = None,
    points: int = POINTS,
    title: str = "",
) -> str:
    """Makes a page on a plan: memory over the step, what other budgets would cost, and the placements.

        Path("report.html").write_text(report(plan, model, batch, optimizer="adamw"))

    The step is that of the training loop that the plan was made for. It is simulated some `points` + 2 times, and the
    model is profiled once; see `profile` for what that runs.

    Args:
        plan: The plan, from a budget, a configuration or written by hand.
        model: The model; on the meta device if it is too large for this machine.
        args: A batch, see `make_plan`.
        kwargs: More keyword arguments of the call.
        loss: From the model's output to a scalar; see `simulate`.
        optimizer: See `simulate`.
        device: What the seconds are of; see `make_plan`.
        points: The most plans along the curve of budget against seconds; 0 for none.
        title: The title of the page; by default the model's class.

    Returns:
        A text of HTML that needs no other file and no network.

    Raises:
        ArgumentError: The plan does not fit the model, or see `simulate` and `make_plan`.
    """
    _check_points(points)
    clock = Clock(TrainingStep.of("report", model, args, kwargs, loss, optimizer, device, plan.loop))
    return render(_document(collect(plan, clock.frontier(plan, points), clock, title=title)))


def _check_points(points: int) -> None:
    if points < 0 or points == 1:
        raise errors.ArgumentError(
            f"--points is {points}; expected 0, for no curve, or at least 2. Write for example --points 10."
        )


def render(data: Mapping[str, Any]) -> str:
    """Returns the page of a document; see `collect`."""
    # In a script a "<" might begin its end, or a comment.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    folder = files(__package__ or "") / "page"
    parts = {key: (folder / name).read_text(encoding="utf-8").rstrip() for key, name in PAGE.items()}
    return Template(parts.pop("PAGE")).substitute(parts, TITLE=html.escape(str(data["title"])), DATA=text)


def add_command(commands: Any) -> None:
    """Adds `torch-recompute report` to the command line."""
    parser = out.new_command(commands, "report")
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
    what = models.model_help("without weights")
    parser.add_argument(
        "--model", metavar="MODEL", help=f"for a plan whose file does not say which step it is for: {what}"
    )
    models.add_batch_options(parser)
    models.add_step_options(parser)
    models.add_host_option(parser)
    out.add_options(parser, command, plot="the step and the curve", as_well="--png")


def command(args: argparse.Namespace) -> int:
    """Runs `torch-recompute report`; 0 when the step could be simulated."""
    output = Output.of(args)
    for option in ("out", "snapshot"):
        if getattr(args, option) is not None:
            out.check_folder(f"--{option}", getattr(args, option))
    _check_points(args.points)
    plan, task = out.read_planned(args.plan, "PLAN")
    described = _step(args, task)
    with output.at_work(f"building {described.model}"):
        step = AskedStep.asked(described)
    clock = Clock(replace(step, loop=plan.loop))
    with models.autocasting(
        step.model, plan.prediction.loop.autocast if plan.prediction and plan.prediction.loop else None
    ):
        with output.at_work(f"profiling {step}" if args.points else f"reading {args.plan}"):
            others = clock.frontier(plan, args.points)
        with output.progress(len(others) + 2) as done:
            seen = collect(plan, others, clock, title=str(step), done=done)
    data = _document(seen)
    if args.out is not None:
        out.write_text("--out", args.out, render(data))
    if args.snapshot is not None:
        with out.writing("--snapshot", args.snapshot):
            seen.chosen.to_snapshot(args.snapshot)
    if output.plot is not None:
        _draw(output.plot, data)
    output.give(lambda: out.document("report", SCHEMA_VERSION, seen.data), lambda console: _print(console, data))
    return OK


def _document(seen: Reported) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION, **seen.data}


def _step(args: argparse.Namespace, task: Any) -> argparse.Namespace:
    """Returns the options that describe the step: those in the plan's file, or these if they name a model."""
    given = models.words_of(args)
    if "model" not in given:
        words = cast("dict[str, Any]", task) if isinstance(task, dict) else {}
        if "model" not in words:
            raise errors.ArgumentError(
                f"{args.plan!s} holds a plan and does not say for which model and batch; a file that torch-recompute "
                "plan --out wrote does. Add --model MODEL, and what else torch-recompute plan takes to describe a "
                "step."
            )
        states = {name: allowed for name, allowed in STATE_KINDS.items() if allowed is not str}
        known: dict[str, Any] = {"dtype": DTYPES, "optimizer": OPTIMIZERS, "device": (*DEVICES, "cpu"), **states}
        kinds = {**dict.fromkeys(("model", "host", "layers", "lora"), str), **RANK_KINDS}
        kinds |= dict.fromkeys(("batch", "sequence", *RANK_WORDS), int)
        for name, word in words.items():
            if not (word in known[name] if name in known else type(word) is kinds.get(name)):
                raise errors.ArgumentError(
                    f"{args.plan!s} says {name}={word!r} of its step, which no command line of torch-recompute plan "
                    "says. Make the plan again, or add --model MODEL: then the command line alone says which step is "
                    "meant."
                )
        given = {**words, **given}
    loop = {"hold_output": True, "accumulate": 1, "set_to_none": True}  # of the plan, where it says
    return argparse.Namespace(**{**dict.fromkeys(STEP_WORDS), **given}, **loop)


def _print(console: Console, data: Mapping[str, Any]) -> None:
    """Prints the step with the plan, and what other plans would take."""
    steps, names = data["steps"], data["names"]
    chosen, plain = steps[data["chosen"]], steps[data["plain"]]
    console.print(data["title"], style="bold", markup=False)
    at = chosen["peak"]
    phase, module, op = (names[chosen["samples"][key][at]] for key in ("phase", "module", "op"))
    where = f"{phase}{f' of {module}' if module else ''}{f' ({op})' if op else ''}"
    console.print(f"the peak with the plan is in {where}:", markup=False)
    for layer, series in chosen["samples"]["layers"].items():
        if series[at]:
            console.print(f"{errors.size(series[at]):>16}  {layer}")
    hosted = any(step["host_bytes"] for step in steps)
    if chosen["host_bytes"]:
        console.print(f"{errors.size(chosen['host_bytes']):>16}  in host memory at most, beside the device's")
    unit, name = errors.unit_of(plain["peak_bytes"])
    titles = (f"peak {name}", "step ms", "slower", "replays ms", "regions", *([f"host {name}"] if hosted else []))
    table = out.new_table("", *titles)
    for step in steps:
        table.add_row(
            step["name"],
            f"{step['peak_bytes'] / unit:,.2f}",
            f"{1000 * step['step_seconds']:,.2f}",
            f"{step['step_seconds'] / plain['step_seconds'] - 1:+.1%}" if plain["step_seconds"] else "",
            f"{1000 * step['replay_seconds']:,.2f}",
            str(step["regions"]),
            *([f"{step['host_bytes'] / unit:,.2f}"] if hosted else []),
            style="bold" if step is chosen else "",
        )
    console.print(table)
    console.print(f"counted: {data['counted']}", markup=False)
    for note in filter(None, [chosen["advice"], *data["notes"]]):
        console.print(note, style="yellow", markup=False)


def _draw(path: Path, data: Mapping[str, Any]) -> None:
    """Draws the step with the plan, and below it the peaks and times of all plans."""
    unit, word = errors.unit_of(data["steps"][data["plain"]]["peak_bytes"])
    with out.drawing(path, (9, 7), dpi=120) as figure:
        above, strip, below = figure.subplots(3, 1, height_ratios=(10, 0.6, 6))
        _draw_step(above, strip, data, unit)
        _draw_curve(below, data, unit)
        above.set_ylabel(f"alive, {word}")
        below.set_xlabel(f"peak of the step, {word}")
        figure.suptitle(data["title"], fontsize=9, wrap=True)


def _draw_step(axes: Any, strip: Any, data: Mapping[str, Any], unit: int) -> None:
    step, plain = data["steps"][data["chosen"]], data["steps"][data["plain"]]
    ends = _milliseconds(step)
    floor = [0.0] * len(ends)
    for layer, series in step["samples"]["layers"].items():
        top = [low + nbytes / unit for low, nbytes in zip(floor, series, strict=True)]
        axes.fill_between(
            ends, floor, top, step="post", color=COLOURS[layer], label=LABELS.get(layer, layer), linewidth=0
        )
        floor = top
    if step is not plain:
        heights = [sum(column) / unit for column in zip(*plain["samples"]["layers"].values(), strict=True)]
        axes.step(
            _milliseconds(plain), heights, where="post", color="#5a6675", linewidth=0.8, label="without recomputation"
        )
    if step["samples"]["host"]:
        heights = [nbytes / unit for nbytes in step["samples"]["host"]]
        axes.step(ends, heights, where="post", color=HOST, linestyle=":", linewidth=1.8, label="in host memory")
    if step["promised"] is not None:
        axes.axhline(step["promised"]["budget_bytes"] / unit, color=MARK, linestyle="--", linewidth=1, label="budget")
    axes.set_xlim(0, 1000 * max(step["step_seconds"], plain["step_seconds"]))
    axes.legend(fontsize=7, ncols=2, loc="upper right")
    for phase, start, end in step["phases"]:
        strip.axvspan(1000 * start, 1000 * end, color=PHASES[phase], linewidth=0)
    strip.set_xlim(axes.get_xlim())
    strip.set_yticks([])
    axes.tick_params(labelbottom=False)
    strip.set_xlabel(f"ms on {data['device']}; the strip: forward blue, replay orange, backward green", fontsize=8)


def _draw_curve(axes: Any, data: Mapping[str, Any], unit: int) -> None:
    points = [(step["peak_bytes"] / unit, 1000 * step["step_seconds"]) for step in data["steps"]]
    curve = [point for point, step in zip(points, data["steps"], strict=True) if step["name"] != "the plan"]
    axes.plot(*zip(*curve, strict=True), "o-", color="#5a6675", markersize=4, label="what other budgets cost")
    axes.plot(*points[data["plain"]], "s", color="#5a6675", label="without recomputation")
    axes.plot(*points[data["chosen"]], "o", color=MARK, label="the plan")
    axes.set_ylabel("step, ms")
    axes.legend(fontsize=7)


def _milliseconds(step: Mapping[str, Any]) -> list[float]:
    return [1000 * end for end in step["samples"]["ends"]]
