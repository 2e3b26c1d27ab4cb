"""`torch-recompute demo`: the whole point on one screen, on your machine, on real text.

Problem. "Recomputation saves memory and changes nothing" is easy to say. A reader wants to see it hold for a model
that he knows, with numbers that he can check, before he reads any documentation.

Idea. One small GPT, trained on Python's own standard library byte by byte, five times side by side: without
recomputation, with every layer recomputed, with attention recomputed only, with every layer recomputed but the
attention call saved, and with a plan for a budget. All take the same steps from the same weights. The settings are
`SETTINGS` below, one line each; the model wraps a callable in whatever the setting says and knows nothing else.

What is measured, each in steps of its own, because each measurement would spoil the others:

    seconds  median of the training steps, which go round the settings step by step so that noise hits all alike
    bytes    one step under `measure`, by category, at the peak; beside it what the plan has predicted
    FLOPs    one step under `FlopCounterMode`, less that of the plain setting. The counter knows no formula for the
             CPU's fused attention, so in this step attention runs as the matrix products that it stands for
    bits     the loss of every training step, compared as bits with the plain setting; a difference is an error

Dropout is on, so a replay that drew other random numbers would show in the very first backward. Progress goes to
stderr and the result to stdout, so `--json` can be piped.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, cast

from .._face import FAILED, OK, Face, add_options
from . import plot
from .model import HEADS, SETTINGS, Config, Setting
from .text import read_text
from .training import Outcome, Result, run, ticks

__all__ = ["SETTINGS", "Config", "Outcome", "Result", "Setting", "add_command", "command", "run"]


def add_command(commands: Any) -> None:
    """Describe `torch-recompute demo` to the command line."""
    about = "train a small GPT five ways side by side and compare memory, time, FLOPs and bits"
    parser = cast("argparse.ArgumentParser", commands.add_parser("demo", help=about, description=about))
    parser.add_argument("--text", type=Path, metavar="PATH", help="a text to learn (the Python standard library)")
    for name, about in (
        ("steps", "training steps of each setting"),
        ("layers", "transformer layers"),
        ("d_model", f"width, a multiple of {HEADS}"),
        ("seq", "bytes in a sequence"),
        ("batch", "sequences in a step"),
        ("seed", "of weights, text and dropout"),
    ):
        default = getattr(Config, name)
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=int, default=default, metavar="N", help=f"{about} (default {default})")
    add_options(parser, command, plot="the peaks")


def command(args: argparse.Namespace) -> int:
    """Run `torch-recompute demo`; 0 if all losses are identical, else 1."""
    config = Config(**{name: getattr(args, name) for name in Config.__dataclass_fields__})
    config.check()
    read_text(args.text, config.seq)
    face = Face.of(args)
    with face.progress(ticks(config)) as progress:
        result = run(config, args.text, progress=progress)
    if face.plot is not None:
        plot.draw(result, face.plot)
    face.give(result.to_json, lambda: _view().show(result))
    return OK if result.identical else FAILED


def _view() -> Any:
    from . import view

    return view
