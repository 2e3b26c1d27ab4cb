"""`torch-recompute plan MODEL --tp 4 --pp 4 ...`: a step that is spread over ranks, and a plan for each rank.

The ranks of a tensor-parallel group and the replicas do the same, so there is one plan for each place in the pipeline.
`--budget` is that of every rank; a share is of each rank's own activation memory. `--out plan.json` writes
`plan-rank0.json` and so on, each for `Plan.from_json` where that rank runs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .. import errors
from .._text import table
from ..planner.layout import Layout, LayoutPlanner, RankPlan, step_seconds
from .models import DTYPES, batch_for, check_sizes, load
from .output import GIB, MIB, OK, Output, document, write_plan

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 1
SIZES = ("tp", "pp", "vpp", "dp", "mbs")
TITLES = (
    *("rank", "in flight", "weights", "grads", "optimizer", "activations", "peak", "plain peak"),
    *("microbatch ms", "replays ms", "gap", "links ms"),
)


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """Describes the options to the command line."""
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
    """How a command line spreads the step; None where it does not."""
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


def command(args: argparse.Namespace, layout: Layout, output: Output) -> int:
    """Runs `torch-recompute plan` for a step that is spread over ranks; 0 when every rank has a plan."""
    with output.at_work(f"building {args.model}"):
        model, own, _ = load(args.model, None if args.dtype is None else DTYPES[args.dtype])
        if own is not None:
            raise errors.ArgumentError(errors.no_pipeline(args.model, type(model).__name__))
        batch = batch_for(model, args.model, layout.mbs, args.sequence)
        if "input_ids" not in batch:
            raise errors.ArgumentError(errors.no_pipeline(args.model, type(model).__name__))
        tokens = int(batch["input_ids"].shape[1])
    device = args.device or "h100"
    with output.at_work(f"profiling {args.model} on {layout}"):
        planner = LayoutPlanner(model, args.model, layout, tokens, args.optimizer, device)
    with output.at_work("planning"):
        plans = planner.plans(args.budget)
    if args.out is not None:
        for plan in plans:
            write_plan(args.out.with_name(f"{args.out.stem}-rank{plan.rank}{args.out.suffix}"), plan.plan)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    head = f"{args.model}: {parameters:,} parameters, {tokens} tokens, optimizer {args.optimizer}"
    output.give(lambda: _to_json(args, layout, plans, tokens), lambda console: _print(console, head, layout, plans))
    return OK


def _to_json(args: argparse.Namespace, layout: Layout, plans: Sequence[RankPlan], tokens: int) -> str:
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


def _print(console: Console, head: str, layout: Layout, plans: Sequence[RankPlan]) -> None:
    """The ranks, their plans, and the step."""
    console.print(head, style="bold")
    console.print(str(layout))
    for line in table([TITLES, *map(_row, plans)]):
        console.print(line)
    for plan in plans:
        console.print(f"rank {plan.rank}: layers {_ranges(plan.layers)}", style="bold")
        for line in plan.plan.prediction.lines if plan.plan.prediction is not None else ():
            console.print(
                f"  {line.count} x keeps {line.saved_bytes / MIB:,.2f} MiB, frees {line.freed_bytes / MIB:,.2f} MiB, "
                f"costs {1000 * line.seconds:,.3f} ms  {line.where}: {line.what}",
            )
    step, plain = step_seconds(layout, plans), step_seconds(layout, plans, plain=True)
    console.print(
        f"step {1000 * step:,.1f} ms, {step / plain - 1:+.1%} for replays: {layout.microbatches} microbatches of the "
        f"slowest rank and {(layout.pp - 1) / layout.vpp:g} to fill and drain the pipeline, then "
        f"{1000 * max(plan.optimizer_seconds for plan in plans):,.1f} ms of the optimizer"
    )
    console.print(
        "Sizes in GiB. In flight: microbatches of a chunk at the peak, over all chunks. Gap: no schedule of keeping "
        "and recomputing saves more of the rank's time. Links: collectives inside a layer, counted in a microbatch. "
        "Not counted: what is sent between stages and between replicas. Replicas share the optimizer's state, as "
        "Megatron's distributed optimizer does; gradients lie in buffers of the weights' type.",
        style="dim",
    )


def _row(plan: RankPlan) -> tuple[str, ...]:
    sizes = (plan.weight_bytes, plan.gradient_bytes, plan.optimizer_bytes, plan.activation_bytes)
    seconds = (plan.microbatch_seconds, plan.replay_seconds)
    return (
        str(plan.rank),
        str(sum(plan.held)),
        *(f"{size / GIB:,.2f}" for size in (*sizes, plan.peak_bytes, plan.plain_peak_bytes)),
        *(f"{1000 * each:,.2f}" for each in seconds),
        "" if plan.plan.prediction is None else f"{plan.plan.prediction.gap:.1%}",
        f"{1000 * plan.link_seconds:,.2f}",
    )


def _ranges(chunks: Sequence[Sequence[int]]) -> str:
    """The numbers of layers, those in a row as a range."""
    return ", ".join(f"{chunk[0]}-{chunk[-1]}" if len(chunk) > 1 else str(chunk[0]) for chunk in chunks)
