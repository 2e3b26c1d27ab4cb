"""The model and the call that a command line asks for, in the options that all such commands share."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Generator

import torch
from torch import nn

from .. import _compat, errors
from .._loop import Loop
from .batches import batch_for
from .loading import Loaded, load
from .presets import PRESETS
from .words import DTYPES


def model_help(weights: str) -> str:
    """What MODEL may be, and how one from a configuration is built."""
    return (
        f"one of {', '.join(PRESETS)}; or the config.json (or its folder) of a Hugging Face model, which is built "
        f"{weights}; or pkg.module:name of a function that returns (model, batch) or (model, batch, loss), where batch "
        "is a tuple of arguments or a dict of keyword arguments, and loss makes a scalar of the model's output"
    )


def add_batch_options(parser: argparse.ArgumentParser) -> None:
    """Gives a command what says of which size a model's batch is, and its weights."""
    parser.add_argument("--batch", type=int, metavar="N", help="sequences or pictures in a step (1)")
    parser.add_argument("--sequence", type=int, metavar="N", help="tokens in a sequence (the model's, at most 4096)")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of the weights (bf16 for a model by name, else what its configuration says)"
    )


def add_loop_options(parser: argparse.ArgumentParser) -> None:
    """Gives a command what says which training loop its peak is of."""
    group = parser.add_argument_group("the training loop that the peak is of")
    group.add_argument(
        "--no-hold-output",
        dest="hold_output",
        action="store_false",
        help="the model's output is gone in backward (default: held, as in `out = model(**b); out.loss.backward()`)",
    )
    group.add_argument("--accumulate", type=int, default=1, metavar="N", help="backwards per step of the optimizer (1)")
    group.add_argument(
        "--no-set-to-none",
        dest="set_to_none",
        action="store_false",
        help="gradients are zeroed, or there until after the forward (default: gone when forward begins)",
    )
    group.add_argument("--autocast", choices=("bf16", "fp16"), help="dtype of torch.autocast around the step (none)")


def loop_of(args: argparse.Namespace) -> Loop:
    """The training loop of a command line.

    Raises:
        ArgumentError: There is no such loop.
    """
    return Loop(args.hold_output, args.accumulate, args.set_to_none)


@contextlib.contextmanager
def autocasting(model: nn.Module, dtype: str | None) -> Generator[None]:
    """Runs a block under autocast.

    Args:
        model: What is to run in it.
        dtype: A word of `DTYPES`, or what it stands for; None or "" for no autocast.
    """
    where = next((p.device.type for p in model.parameters() if not p.is_meta), _compat.ACCELERATOR or "cpu")
    if not dtype:
        yield
        return
    with torch.autocast(where, DTYPES[dtype] if dtype in DTYPES else getattr(torch, dtype)):
        yield


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
    model, batch, loss = load(args.model, None if args.dtype is None else DTYPES[args.dtype])
    if batch is None:
        return Loaded(model, batch_for(model, args.model, args.batch, args.sequence)), True
    for option in ("batch", "sequence"):
        if getattr(args, option) is not None:
            raise errors.ArgumentError(errors.made_by_a_function(f"--{option}", args.model))
    return Loaded(model, batch, loss), False
