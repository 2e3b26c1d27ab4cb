"""`torch-recompute plan MODEL --tp 4 --pp 4 ...`: a step that is spread over ranks, and a plan for each rank.

The ranks of a tensor-parallel group and the replicas do the same, so there is one plan for each place in the pipeline.
`--budget` is that of every rank; a share is of each rank's own activation memory. `--out plan.json` writes
`plan-rank0.json` and so on, each for `Plan.from_json` where that rank runs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import errors
from .._face import OK, Face, document
from .._models import DTYPES, batch_for, check_sizes, load
from ..planning.layout import Layout, LayoutPlanner, RankPlan, step_seconds
from .writing import write

SCHEMA_VERSION = 1
SIZES = ("tp", "pp", "vpp", "dp", "mbs")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the options to the command line."""
    group = parser.add_argument_group(
        "a step that is spread over ranks",
        "One plan for each rank of the pipeline. --budget is that of each rank. For language models by name or "
        "configuration.",
    )
    for name, what in (
        ("tp", "ranks that share each layer: tensor parallel (1)"),
        ("pp", "ranks that share the layers: pipeline parallel, by 1F1B (1)"),
        ("vpp", "chunks of layers on each of these, by interleaved 1F1B (1)"),
        ("dp", "replicas; they share the optimizer's state, as with ZeRO-1 (1)"),
        ("mbs", "sequences in a microbatch (1); --batch over --dp and this is how many microbatches a step has"),
    ):
        group.add_argument(f"--{name}", type=int, metavar="N", help=what)
    group.add_argument(
        "--sequence-parallel", action="store_true", help="norms and residuals hold a share of the tokens (with --tp)"
    )


def _goes_without(option: str, other: str, why: str) -> str:
    """Text for an option that excludes another one."""
    return f"{option} does not go with {other}: {why}. Leave one of them out."


def layout_of(args: argparse.Namespace) -> Layout | None:
    """How a command line spreads the step; None where it does not.

    Raises:
        ArgumentError: The numbers do not go together.
    """
    given = {name: value for name in SIZES if (value := getattr(args, name)) is not None}
    if not given and not args.sequence_parallel:
        return None
    option = next((f"--{name}" for name in given), "--sequence-parallel")
    if args.frontier:
        raise errors.ArgumentError(_goes_without("--frontier", option, "it is the curve of one device"))
    if args.offload is not False:
        raise errors.ArgumentError(_goes_without("--offload", option, "plans of ranks keep all on the device"))
    loop = {"--no-hold-output": args.hold_output, "--accumulate": args.accumulate == 1}
    loop |= {"--no-set-to-none": args.set_to_none, "--autocast": args.autocast is None}
    said = next((word for word, is_default in loop.items() if not is_default), None)
    if said is not None:
        why = "the schedule of a pipeline says what a rank holds"
        raise errors.ArgumentError(_goes_without(said, option, why))
    check_sizes(args)
    return Layout(**given, sequence_parallel=args.sequence_parallel, batch=args.batch)


def command(args: argparse.Namespace, layout: Layout, face: Face) -> int:
    """Run `torch-recompute plan` for a step that is spread over ranks; 0 when every rank has a plan."""
    with face.at_work(f"building {args.model}"):
        model, own, _ = load(args.model, None if args.dtype is None else DTYPES[args.dtype])
        if own is not None:
            raise errors.ArgumentError(errors.no_pipeline(args.model, type(model).__name__))
        batch = batch_for(model, args.model, layout.mbs, args.sequence)
        if "input_ids" not in batch:
            raise errors.ArgumentError(errors.no_pipeline(args.model, type(model).__name__))
        tokens = int(batch["input_ids"].shape[1])
    device = args.device or "h100"
    with face.at_work(f"profiling {args.model} on {layout}"):
        planner = LayoutPlanner(model, args.model, layout, tokens, args.optimizer, device)
    with face.at_work("planning"):
        plans = planner.plans(args.budget)
    if args.out is not None:
        for plan in plans:
            write(path_for(args.out, plan.rank), plan.plan)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    head = f"{args.model}: {parameters:,} parameters, {tokens} tokens, optimizer {args.optimizer}"
    face.give(lambda: to_json(args, layout, plans, tokens), lambda: _view().show(head, layout, plans))
    return OK


def _view() -> Any:
    from . import spread_view

    return spread_view


def path_for(out: Path, rank: int) -> Path:
    """The file of a rank's plan."""
    return out.with_name(f"{out.stem}-rank{rank}{out.suffix}")


def to_json(args: argparse.Namespace, layout: Layout, plans: Sequence[RankPlan], tokens: int) -> str:
    """All figures and plans as a JSON document; `Plan.from_json` reads each plan."""
    ranks: list[dict[str, Any]] = [{**plan.as_data(), "plan": json.loads(plan.plan.to_json())} for plan in plans]
    return document(
        "plan",
        SCHEMA_VERSION,
        {
            "model": args.model,
            "sequence": tokens,
            "optimizer": args.optimizer,
            "device": args.device or "h100",
            "layout": layout.as_data(),
            "step_seconds": step_seconds(layout, plans),
            "plain_step_seconds": step_seconds(layout, plans, plain=True),
            "ranks": ranks,
        },
    )
