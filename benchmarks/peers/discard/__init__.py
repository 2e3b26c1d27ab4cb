"""`python benchmarks/peers discard`: the published table of output-discarding checkpointing, and regions beside it.

Problem. A region frees what is inside it; its own output stays, because the consumer saves it. The methods that free
that too were published with one table of six blocks. To choose between them and this library one wants that table,
line by line, on his own machine, with the new columns beside the old ones.

Idea. The same blocks, loss and lifetimes (`blocks.py`); the columns as a table of ways to run a block (`forms.py`); the
published figures as data (`published.py`); and for each figure the way in which it was obtained, said in the output
(`measuring.py`). Nothing in this room knows how a region works: the forms are what a user would write.

`--check` compares values instead of bytes (`parity.py`). Progress goes to stderr and the result to stdout, so `--json`
can be piped; `--plot` draws the peaks as well (`plot.py`).
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, cast

import torch
from carrying import add_common_options, carried_out

from torch_recompute import __version__
from torch_recompute.commands.output import FAILED, OK, Output, document
from torch_recompute.errors import ArgumentError

from . import parity, plot, result
from .blocks import BLOCKS, DTYPES
from .config import ITERS, SCALE, Config
from .forms import FORMS
from .parity import Comparison, compare
from .result import Result, Row, run

__all__ = ["BLOCKS", "FORMS", "Comparison", "Config", "Result", "Row", "add_command", "command", "compare", "run"]

SIZES = (
    ("d_model", "width of the blocks' input"),
    ("d_ff", "width of the MLPs inside"),
    ("batch", "sequences"),
    ("seq", "tokens in a sequence"),
)


def add_command(benchmarks: Any) -> None:
    """Describe `python benchmarks/peers discard` to the command line."""
    about = "the published table of output-discarding checkpointing, with regions beside it"
    parser = cast("argparse.ArgumentParser", benchmarks.add_parser("discard", help=about, description=about))
    default = ", ".join(map(str, Config.n_layers))
    parser.add_argument(
        "--n-layers", type=int, nargs="+", metavar="N", help=f"blocks in a stack, one table each (default {default})"
    )
    parser.add_argument(
        "--dtype", nargs="+", metavar="TYPE", help=f"of weights and input: {', '.join(DTYPES)} (default fp32)"
    )
    parser.add_argument("--only", nargs="+", metavar="BLOCK", help=f"blocks (default all: {', '.join(BLOCKS)})")
    parser.add_argument(
        "--iters", type=int, metavar="N", help=f"timed steps (default {ITERS}); with --check {parity.ITERS}"
    )
    for index, (name, about) in enumerate(SIZES):
        full, small = getattr(Config, name), parity.SIZE[index]
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"{about} (default {full}; with --check {small})"
        )
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default cuda where there is one)")
    parser.add_argument(
        "--scale",
        type=int,
        metavar="N",
        help=f"without CUDA, time a copy whose d_model, d_ff and seq are N times smaller (default {SCALE})",
    )
    parser.add_argument("--check", action="store_true", help="compare outputs and gradients with the plain stack's")
    add_common_options(parser, command, plot="the peaks")


def _view() -> Any:
    from . import view

    return view


def command(args: argparse.Namespace) -> int:
    """Run `python benchmarks/peers discard`; 0 if it is done, and with `--check` 1 if anything differs."""
    given: dict[str, Any] = {
        "n_layers": args.n_layers and tuple(dict.fromkeys(args.n_layers)),
        "dtypes": args.dtype and tuple(dict.fromkeys(args.dtype)),
        "blocks": args.only and tuple(dict.fromkeys(args.only)),
        "device": args.device,
        **{name: getattr(args, name) for name in ("iters", "scale", *(name for name, _ in SIZES))},
    }
    given = {name: value for name, value in given.items() if value is not None}
    if args.check:
        return _check(given, args)
    config = Config(**given)
    config.check()
    gpu = torch.cuda.get_device_name(config.on) if config.on.type == "cuda" else ""
    carried_out(args, config, plot=plot, view=_view, ticks=result.ticks, run=run, gpu=gpu)
    return OK


def _check(given: dict[str, Any], args: argparse.Namespace) -> int:
    for option, value in (("--scale", args.scale), ("--plot", args.plot), ("--save", args.save)):
        if value is not None:
            raise ArgumentError(
                f"{option} is {value}, but --check neither times nor draws, nor saves. Leave one of the two out."
            )
    small = dict(zip((name for name, _ in SIZES), parity.SIZE, strict=True))
    config = Config(**cast("dict[str, Any]", {"iters": parity.ITERS, **small, **given}))
    config.check()
    output = Output.of(args)
    with output.progress(parity.ticks(config)) as progress:
        comparisons = compare(config, progress)
    passed = all(entry.passed for entry in comparisons)
    output.give(lambda: _checked(config, comparisons, passed), lambda _: _view().show_parity(comparisons))
    return OK if passed else FAILED


def _checked(config: Config, comparisons: Sequence[Comparison], passed: bool) -> str:
    data = {
        "torch_recompute": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": str(config.on),
        "config": asdict(config),
        "passed": passed,
        "comparisons": [asdict(entry) for entry in comparisons],
    }
    return document("peers discard --check", result.SCHEMA_VERSION, data)
