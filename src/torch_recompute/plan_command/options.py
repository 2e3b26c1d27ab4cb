"""The options that say which step is meant, for the commands that ask it, and the words that they were given."""

from __future__ import annotations

import argparse

from .._models import PRESETS
from ..planning.prices import DEVICES
from .task import DTYPES, OPTIMIZERS

MODEL_HELP = (
    f"one of {', '.join(PRESETS)}; or the config.json (or its folder) of a Hugging Face model, which is built without "
    "weights; or pkg.module:name of a function that returns (model, batch), where batch is a tuple of arguments or a "
    "dict of keyword arguments"
)
NAMES = ("model", "batch", "sequence", "dtype", "optimizer", "device")


def add_step_options(parser: argparse.ArgumentParser) -> None:
    """Describe the step of a model: its batch, the weights, the optimizer and the device."""
    parser.add_argument("--batch", type=int, metavar="N", help="sequences or pictures in a step (1)")
    parser.add_argument("--sequence", type=int, metavar="N", help="tokens in a sequence (the model's, at most 4096)")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of the weights (bf16 for a model by name, else what its configuration says)"
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help="(adamw)")
    parser.add_argument(
        "--device", choices=(*DEVICES, "cpu"), help="what the seconds are of (h100; for a model with weights, its own)"
    )


def words_of(args: argparse.Namespace) -> dict[str, str | int]:
    """The words that a command line was given for the step; those that were left out are not among them."""
    return {name: getattr(args, name) for name in NAMES if getattr(args, name) is not None}
