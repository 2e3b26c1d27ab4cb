"""The model and the call that a command line asks for, in the options that all such commands share."""

from __future__ import annotations

import argparse

from .. import errors
from .batches import batch_for
from .loading import Loaded, load
from .presets import PRESETS
from .words import DTYPES


def model_help(weights: str) -> str:
    """What MODEL may be, and how one from a configuration is built."""
    return (
        f"one of {', '.join(PRESETS)}; or the config.json (or its folder) of a Hugging Face model, which is built "
        f"{weights}; or pkg.module:name of a function that returns (model, batch), where batch is a tuple of arguments "
        "or a dict of keyword arguments"
    )


def add_batch_options(parser: argparse.ArgumentParser) -> None:
    """Gives a command what says of which size a model's batch is, and its weights."""
    parser.add_argument("--batch", type=int, metavar="N", help="sequences or pictures in a step (1)")
    parser.add_argument("--sequence", type=int, metavar="N", help="tokens in a sequence (the model's, at most 4096)")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of the weights (bf16 for a model by name, else what its configuration says)"
    )


def add_model_options(parser: argparse.ArgumentParser, *, weights: str) -> None:
    """Gives a command MODEL, and the options of its batch.

    Args:
        parser: The command's.
        weights: How a model from a configuration is built, in words.
    """
    parser.add_argument("model", metavar="MODEL", help=model_help(weights))
    add_batch_options(parser)


def check_sizes(args: argparse.Namespace) -> None:
    """Refuses a batch or a sequence of no length.

    Raises:
        ArgumentError: One is less than 1.
    """
    for option in ("batch", "sequence"):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise errors.ArgumentError(errors.not_a_size(f"--{option}", value))


def asked(args: argparse.Namespace) -> tuple[Loaded, bool]:
    """The model with its batch, and whether it was built here, on the meta device.

    Raises:
        ArgumentError: The model cannot be had, or is not one that the options describe.
    """
    check_sizes(args)
    model, batch = load(args.model, None if args.dtype is None else DTYPES[args.dtype])
    if batch is None:
        return Loaded(model, batch_for(model, args.model, args.batch, args.sequence)), True
    for option in ("batch", "sequence"):
        if getattr(args, option) is not None:
            raise errors.ArgumentError(errors.made_by_a_function(f"--{option}", args.model))
    return Loaded(model, batch), False
