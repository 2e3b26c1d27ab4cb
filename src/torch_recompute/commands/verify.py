"""`torch-recompute verify MODEL --plan plan.json`: checks on this machine that a plan changes no result.

MODEL is as for `torch-recompute plan`, but with weights: those of the function that makes it, or random ones, which
serve as well, because two steps from the same weights are compared. The comparison is `torch_recompute.verify`.

Exit codes: 1 if anything differs, 2 for a command line that cannot be followed, 3 for a model that is too large to be
run here, which is refused before it is built, with the bytes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .. import errors
from ..doctor.verify import Verification
from ..doctor.verify import verify as compare
from ..memory.free import free_bytes
from ..simulation import simulate
from ..simulation.training_step import any_loss
from .models import DTYPES, add_model_options, load, load_with_batch, made_by_a_function, random_batch
from .output import FAILED, OK, Output, add_options, document, new_command, read_plan

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 1


def add_command(commands: Any) -> None:
    """Adds `torch-recompute verify` to the command line."""
    parser = new_command(commands, "verify")
    add_model_options(parser, weights="with random weights")
    parser.add_argument("--plan", type=Path, metavar="FILE.json", required=True, help="as written by plan --out")
    parser.add_argument(
        "--device", help="cpu, cuda or cuda:N, for a model that is built here (cuda where there is one, else cpu)"
    )
    add_options(parser, command)


def command(args: argparse.Namespace) -> int:
    """Runs `torch-recompute verify`; 0 if nothing differs, else 1."""
    output = Output.of(args)
    plan = read_plan(args.plan)
    with output.at_work(f"building {args.model}"):
        model, given, named = _built(args)
    with output.at_work(f"running {args.model}: two plain steps, and one with {len(plan.all_choices)} regions"):
        try:
            found = compare(model, given, named, plan=plan)
        except errors.RecomputeError:
            raise
        except Exception as error:
            first = (str(error) or "no message").splitlines()[0]
            raise errors.ArgumentError(
                f"a step of {args.model} raises {type(error).__name__}: {first}. That is without a plan. Mend it, or "
                "write a function pkg.module:name that returns (model, batch) and runs."
            ) from error
    output.give(
        lambda: document("verify", SCHEMA_VERSION, {"asked": args.model, **found.as_data()}),
        lambda console: _print(console, found),
    )
    return OK if found else FAILED


def _built(args: argparse.Namespace) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Returns the model with weights, and its call."""
    model, (given, named), _, built_here = load_with_batch(args)
    if built_here:
        device = device_here(args.device)
        _check_size(args.model, model, named, device)
        named = random_batch(named, model, device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = load(args.model, None if args.dtype is None else DTYPES[args.dtype], device).model
    elif args.device is not None:
        raise errors.ArgumentError(made_by_a_function("--device", args.model))
    elif any(parameter.is_meta for parameter in model.parameters()):
        raise errors.ArgumentError(
            f"{args.model} makes a model on the meta device, which has no weights to run with. Have it make the "
            "model on a device that is here."
        )
    return model, given, named


def device_here(word: str | None) -> str:
    """Returns the device of this machine that a command line names, or the default."""
    here = torch.cuda.is_available()
    if word is None:
        return "cuda" if here else "cpu"
    try:
        found = torch.device(word)
    except RuntimeError:
        found = torch.device("meta")
    if found.type not in ("cpu", "cuda") or (found.type == "cuda" and not here):
        none = "" if here else "; torch sees no CUDA device here"
        raise errors.ArgumentError(
            f"--device is {word}; expected cpu, cuda or cuda:N{none}. Leave it out for what is here."
        )
    return word


def _check_size(word: str, model: nn.Module, batch: Any, device: str) -> None:
    """Refuses a model that does not fit, by arithmetic first, because simulating a large model takes time."""
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


def _print(console: Console, found: Verification) -> None:
    head, _, rest = str(found).partition("\n")
    console.print(head, style="green" if found else "bold red", markup=False)
    if rest:
        console.print(rest, markup=False)
