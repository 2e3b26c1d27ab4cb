"""The options that say how a step is run, for the commands that ask it, and the words that they were given."""

from __future__ import annotations

import argparse

from .._models import OPTIMIZERS
from ..planning.prices import DEVICES

NAMES = ("model", "batch", "sequence", "dtype", "optimizer", "device")


def add_step_options(parser: argparse.ArgumentParser) -> None:
    """Describe what of a step the model and its batch do not say: the optimizer and the device."""
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help="(adamw)")
    parser.add_argument(
        "--device", choices=(*DEVICES, "cpu"), help="what the seconds are of (h100; for a model with weights, its own)"
    )


def words_of(args: argparse.Namespace) -> dict[str, str | int]:
    """The words that a command line was given for the step; those that were left out are not among them."""
    return {name: getattr(args, name) for name in NAMES if getattr(args, name) is not None}
