"""What a plan for many ranks looks like on a terminal: a row per rank, what each does, and what is not counted."""

from __future__ import annotations

from collections.abc import Sequence

from .._face import new_console
from .._text import table
from ..planning.layout import Layout, RankPlan, step_seconds

GIB, MIB = 2**30, 2**20
TITLES = (
    *("rank", "in flight", "weights", "grads", "optimizer", "activations", "peak", "no region"),
    *("microbatch ms", "replays ms", "gap", "links ms"),
)


def show(task: str, layout: Layout, plans: Sequence[RankPlan]) -> None:
    """Print the ranks, their plans, and the step."""
    console = new_console(highlight=False, soft_wrap=True)
    console.print(task, style="bold")
    console.print(str(layout))
    for line in table([TITLES, *map(_row, plans)]):
        console.print(line)
    for plan in plans:
        console.print(f"rank {plan.rank}: layers {ranges(plan.layers)}", style="bold")
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


def ranges(chunks: Sequence[Sequence[int]]) -> str:
    """The numbers of layers, those in a row as a range."""
    return ", ".join(f"{chunk[0]}-{chunk[-1]}" if len(chunk) > 1 else str(chunk[0]) for chunk in chunks)
