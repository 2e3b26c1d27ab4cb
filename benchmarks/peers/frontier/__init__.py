"""`python benchmarks/peers frontier`: every peer at every setting, and our plans for budgets, on one model in one run.

Problem. Each way to recompute has a few settings, and each setting is one point of memory and cost. A user with so many
bytes wants to know which point fits and what it costs, and whether a planner finds a better one. Figures from different
papers, models and machines do not say.

Idea. One model and batch (`models.py`), the peers as a table of ways to run it, as their users would write them
(`ways.py`), one set of instruments for all (`measuring.py`), and two questions with their answers as data
(`result.py`): what ours replays within each peer's own peak, and at budgets between the peers' points.

FLOPs that are replayed are exact and the same on any machine; they are the claim. Times on a CPU are noisy, and are
shown with their noise. What our planner spares is time, measured on this machine (`--price measured`), so that it may
replay a product where that is faster than what it would save; with `--price flops` it spares FLOPs, which is what most
of the peers' settings were chosen for.

Rejected: a peer's own planner as a subprocess with an environment of its own. It could be compared by its claims only.

`--check` ends with 1 where a point of ours breaks its promise. Progress goes to stderr and the result to stdout, so
`--json` can be piped; `--plot` draws it (`plot.py`).
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any, cast

from carrying import add_common_options, carried_out

from torch_recompute.commands.output import FAILED, OK

from . import plot
from .comparing import run, ticks
from .config import PRICES, Config
from .models import MODELS
from .result import Between, Failure, Match, Point, Promise, Result

__all__ = ["Between", "Config", "Failure", "Match", "Point", "Promise", "Result", "add_command", "command", "run"]

SIZES = (
    ("layers", "layers of the model"),
    ("width", "its width"),
    ("tokens", "tokens of a sequence"),
    ("batch", "sequences"),
    ("rounds", "timed steps of each way"),
)


def add_command(benchmarks: Any) -> None:
    """Describe `python benchmarks/peers frontier` to the command line."""
    about = "peers at every setting they have against our plans, on one model: peak, replayed FLOPs, time, gradients"
    parser = cast("argparse.ArgumentParser", benchmarks.add_parser("frontier", help=about, description=about))
    parser.add_argument("--model", metavar="NAME", help=f"{', '.join(MODELS)} (default {Config.model})")
    for name, about in SIZES:
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{about} (default {getattr(Config, name)})")
    parser.add_argument("--dropout", type=float, metavar="P", help=f"its probability (default {Config.dropout})")
    parser.add_argument(
        "--price", metavar="WHAT", help=f"what our plans spare: {' or '.join(PRICES)} (default {Config.price})"
    )
    parser.add_argument("--check", action="store_true", help="end with 1 if a plan of ours breaks its promise")
    add_common_options(parser, command, plot="the points")


def _view() -> Any:
    from . import view

    return view


def command(args: argparse.Namespace) -> int:
    """Run `python benchmarks/peers frontier`; 0 if it is done, and with `--check` 1 if a promise is broken."""
    given = {field.name: getattr(args, field.name) for field in fields(Config)}
    config = Config(**{name: value for name, value in given.items() if value is not None})
    config.check()
    seen = carried_out(args, config, plot=plot, view=_view, ticks=ticks, run=run)
    return FAILED if args.check and seen.broken else OK
