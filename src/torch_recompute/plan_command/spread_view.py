"""What a plan for many ranks looks like on a terminal: a row per rank, what each does, and what is not counted."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from .._ranks.layout import Layout
from .._ranks.planning import RankPlan, step_seconds

GIB = 2**30
TITLES = (
    *("rank", "layers", "in flight", "weights", "gradients", "optimizer", "activations", "peak", "with no region"),
    *("microbatch ms", "replays ms", "links ms"),
)


def show(task: str, layout: Layout, plans: Sequence[RankPlan]) -> None:
    """Print the ranks, their plans, and the step."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(task, style="bold", markup=False)
    console.print(str(layout), markup=False)
    table = Table(box=box.SIMPLE, caption="GiB, and ms of a microbatch", caption_justify="left")
    for title in TITLES:
        table.add_column(title, justify="right")
    for plan in plans:
        sizes = (plan.weight_bytes, plan.gradient_bytes, plan.optimizer_bytes, plan.activation_bytes)
        table.add_row(
            str(plan.rank),
            ranges(plan.layers),
            "+".join(map(str, plan.held)),
            *(f"{size / GIB:,.2f}" for size in (*sizes, plan.peak_bytes, plan.plain_peak_bytes)),
            *(
                f"{1000 * seconds:,.2f}"
                for seconds in (plan.microbatch_seconds, plan.replay_seconds, plan.link_seconds)
            ),
        )
    console.print(table)
    for plan in plans:
        console.print(f"rank {plan.rank}", style="bold")
        lines = plan.plan.prediction.lines if plan.plan.prediction is not None else ()
        for line in lines:
            console.print(
                f"  {line.count} x  {line.where}: {line.what}; keeps {line.saved_bytes / 2**20:,.2f} MiB, frees "
                f"{line.freed_bytes / 2**20:,.2f} MiB, costs {1000 * line.seconds:,.3f} ms",
                markup=False,
            )
    step, plain = step_seconds(layout, plans), step_seconds(layout, plans, plain=True)
    console.print(
        f"a step: {1000 * step:,.1f} ms ({step / plain - 1:+.1%} for replays), {layout.microbatches} microbatches and "
        f"{(layout.pp - 1) / layout.vpp:g} more to fill and drain the pipeline, of the slowest rank, and "
        f"{1000 * max(plan.optimizer_seconds for plan in plans):,.1f} ms for the optimizer"
    )
    console.print(
        "In flight are microbatches by chunk at the peak. Counted: collectives inside a layer, over the links of the "
        "device. Not counted: what is sent between stages and between replicas. The optimizer's state is shared by "
        "the replicas, as Megatron's distributed optimizer does; gradients are kept in buffers of the weights' type.",
        style="dim",
    )


def ranges(chunks: Sequence[Sequence[int]]) -> str:
    """The numbers of layers, those in a row as a range."""
    return " ".join(f"{chunk[0]}-{chunk[-1]}" if len(chunk) > 1 else str(chunk[0]) for chunk in chunks)
