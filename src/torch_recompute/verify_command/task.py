"""What a command line asks to be verified: a model with weights on a device, its batch, and the plan."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .. import errors
from .._models import DTYPES, asked, filled, load
from ..checking.verify import Verification
from ..memory.free import free_bytes
from ..plan import Plan, simulate
from ..simulation.step import any_loss


def _does_not_run(model: str, error: BaseException) -> str:
    """Text for a model whose step raises by itself."""
    first = (str(error) or "no message").splitlines()[0]
    return (
        f"a step of {model} raises {type(error).__name__}: {first}. That is without a plan. Mend it, or write a "
        "function pkg.module:name that returns (model, batch) and runs."
    )


@dataclass(frozen=True)
class Task:
    """A step to verify.

    Attributes:
        word: What the user called the model.
        model: The model.
        args: Positional arguments of the call.
        kwargs: Its keyword arguments.
    """

    word: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @staticmethod
    def of(args: argparse.Namespace) -> Task:
        """The task of a command line.

        Raises:
            ArgumentError: The model cannot be had, or is not one that the options describe.
            BudgetError: It is too large to run here.
        """
        (model, batch, _), built_here = asked(args)
        if built_here:
            device = _device(args.device)
            _check_size(args.model, model, batch, device)
            batch = filled(batch, model, device)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model = load(args.model, None if args.dtype is None else DTYPES[args.dtype], device).model
        elif args.device is not None:
            raise errors.ArgumentError(errors.made_by_a_function("--device", args.model))
        elif any(parameter.is_meta for parameter in model.parameters()):
            raise errors.ArgumentError(
                f"{args.model} makes a model on the meta device, which has no weights to run with. Have it make the "
                "model on a device that is here."
            )
        return Task(args.model, model, *((batch, {}) if isinstance(batch, tuple) else ((), batch or {})))

    def verified(self, plan: Plan, verify: Callable[..., Verification]) -> Verification:
        """What `verify` finds.

        Raises:
            ArgumentError: The plan does not fit the model, or the model does not run by itself.
        """
        try:
            return verify(self.model, self.args, self.kwargs, plan=plan)
        except errors.RecomputeError:
            raise
        except Exception as error:
            raise errors.ArgumentError(_does_not_run(self.word, error)) from error


def _no_device_to_run(word: str, cuda: bool) -> str:
    """Text for a device that is none, or is not here."""
    here = "" if cuda else "; torch sees no CUDA device here"
    return f"--device is {word}; expected cpu, cuda or cuda:N{here}. Leave it out for what is here."


def _device(word: str | None) -> str:
    if word is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(word)
    except RuntimeError:
        found = torch.device("meta")
    if found.type not in ("cpu", "cuda") or (found.type == "cuda" and not torch.cuda.is_available()):
        raise errors.ArgumentError(_no_device_to_run(word, torch.cuda.is_available()))
    return word


def _check_size(word: str, model: nn.Module, batch: Any, device: str) -> None:
    """Refuses what does not fit, by arithmetic first, because a simulation of a large model takes its time."""
    free = free_bytes(model, torch.device(device))
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    needed, at_least = 3 * weights, True
    if needed <= free:
        needed, at_least = simulate(model, (), batch, loss=any_loss, device=device).peak_bytes + weights, False
    if needed > free:
        text = (
            f"{word} is too large to run here: weights, two sets of gradients and a step without a plan need "
            f"{'at least ' * at_least}{errors.size(needed, up=True)}, and {device} has {errors.size(free)} free. Write "
            "a smaller --batch or --sequence, or a config.json with fewer layers: layers that are alike need to be "
            "verified once."
        )
        raise errors.BudgetError(text, needed, None)
