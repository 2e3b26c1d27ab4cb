"""Llama-3 70B on 32 H100: what recomputing every MLP was measured to save and to cost, beside what is predicted.

    python benchmarks/published_llama70b.py

Published by Megatron-Bridge in April 2026: fine-tuning with 4096 tokens in FP8 (current scaling), tensor parallel 4,
pipeline parallel 4 with 5 chunks, data parallel 2, microbatches of one sequence, on devices of 80 GB. Nothing is run
here: each rank's microbatch is simulated, in bfloat16, and what the schedule has in flight is counted. The number of
microbatches is not published; from 8 on it makes no difference to the peak.

Two layers are predicted: those of transformers ("eager"), and with the kernels of Megatron-Core and products that keep
their inputs in 8 bits ("fused"), which is `torch-recompute plan llama3-70b --layers fused+fp8`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from _measure import arguments, finish

from torch_recompute import Choice, Plan
from torch_recompute.commands.models import load
from torch_recompute.plan.ranks import Ranks
from torch_recompute.planner.layout import Layout, LayoutPlanner
from torch_recompute.planner.ops import Op, metas
from torch_recompute.planner.pipeline import RankPlanner
from torch_recompute.planner.rank_memory import RankPeak
from torch_recompute.planner.stage_runs import StageRun
from torch_recompute.simulation.devices import DEVICES
from torch_recompute.simulation.fused import FP8, fuse

LAYOUT = Layout(Ranks(tp=4, pp=4, vpp=5, dp=2, sequence_parallel=True), batch=32)
TOKENS, WIDTH, WIDE = 4096, 8192, 28_672
GB = 1000**3
PRICE = DEVICES["h100"]

# TFLOP/s of a device, and GB; the recipe's own figure is 709.93 TFLOP/s.
GOLDEN = 709.93
WITHOUT = 58.8  # with core_attn alone, which changes nothing under fused attention; the run went out of memory
EVERY_MLP = (593.6, 55.6)


class Predicted:
    """One rank under one placement.

    Args:
        planner: Of all ranks.
        rank: The rank.
        plan: The placement.
    """

    def __init__(self, planner: LayoutPlanner, rank: RankPlanner, plan: Plan) -> None:
        runs: dict[int, StageRun] = {}
        for stage in rank.stages:
            layers = {segment.path for segment in planner.pipeline.segments(stage)}
            own = Plan(tuple(choice for choice in plan if choice.paths[0].removesuffix(".mlp") in layers))
            runs[stage] = planner.pipeline.runner.run(stage, own, "FB")
        self.ran = sum((run.ran for run in runs.values()), Counter[Op]())
        self.seconds = sum(PRICE(op) * count for op, count in self.ran.items())
        self.peak: RankPeak = rank.memory.peak({stage: run.bytes for stage, run in runs.items()})
        first = rank.stages[0]
        self.layer_bytes = runs[first].bytes.whole_bytes // len(planner.pipeline.segments(first))


def main() -> None:
    """Prints each rank with nothing and with every MLP recomputed, and the published runs."""
    options = arguments(__doc__ or "")
    eager, fused = load("llama3-70b").model, load("llama3-70b").model
    print(f"{LAYOUT}\nlayers {fuse(fused, [FP8])}\npeak in GB, eager (fused), and time of a microbatch of eager layers")
    planners = [LayoutPlanner(model, "llama3-70b", LAYOUT, TOKENS, "adamw", "h100") for model in (eager, fused)]
    figures: list[dict[str, Any]] = []
    for ranks in zip(*(planner.pipeline.ranks for planner in planners), strict=True):
        if ranks[0].number == 2:
            continue  # it holds as many layers as rank 1, and fewer microbatches
        said = one(planners, ranks)
        figures.append(said)
        print(
            f"  rank {said['rank']}: {said['in_flight']} x 4 layers in flight; nothing recomputed "
            f"{said['plain'] / GB:.1f} ({said['plain_fused'] / GB:.1f}), every MLP {said['mlp'] / GB:.1f} "
            f"({said['mlp_fused'] / GB:.1f}), so {said['saved'] / GB:.1f} ({said['saved_fused'] / GB:.1f}) less; "
            f"{1000 * said['plain_seconds']:.0f} ms, {said['cost']:+.1%} without the MLP's last product, "
            f"{said['cost_whole']:+.1%} with it",
            flush=True,
        )
    speed, memory = EVERY_MLP
    measured = GOLDEN / speed - 1
    print(
        f"published: nothing recomputed {WITHOUT}, out of memory; every MLP {memory}, so {WITHOUT - memory:.1f} less; "
        f"{measured:+.1%} time, Megatron replays the last product too"
    )
    first = figures[0]
    far = {
        "time of every MLP": (first["cost_whole"] - measured) / measured,
        "peak with every MLP, fused": first["mlp_fused"] / GB / memory - 1,
        "saved by every MLP, fused": first["saved_fused"] / GB / (WITHOUT - memory) - 1,
    }
    for what, off in far.items():
        print(f"  {what}: predicted {off:+.0%} from the published figure")
    print(
        f"The published saving is the difference to a run that went out of memory on 80 GB: {WITHOUT} GB may be what "
        f"it had reached, or what another rank had. Predicted are "
        f"{first['plain_fused'] / GB:.1f} GB in tensors, and the allocator's fragments come on top. One microbatch in "
        f"flight would save {first['saved_fused'] / first['in_flight'] * LAYOUT.ranks.vpp / GB:.1f} GB."
    )
    finish(options, figures, all(abs(off) <= 0.1 for off in far.values()))


def one(planners: Sequence[LayoutPlanner], ranks: Sequence[RankPlanner]) -> dict[str, Any]:
    """The figures of one rank, with eager layers and with fused ones."""
    figures: dict[str, Any] = {"rank": ranks[0].number, "layer_bytes": {}}
    for word, suffix, planner, rank in zip(("eager", "fused"), ("", "_fused"), planners, ranks, strict=True):
        layers = [segment.path for stage in rank.stages for segment in planner.pipeline.segments(stage)]
        mlps = Plan(tuple(Choice((f"{path}.mlp",)) for path in layers))
        plain, mlp = Predicted(planner, rank, Plan()), Predicted(planner, rank, mlps)
        figures["layer_bytes"] |= {word: plain.layer_bytes, f"{word}_mlp": plain.layer_bytes - mlp.layer_bytes}
        peak, least = plain.peak.bytes, mlp.peak.bytes
        figures |= {f"plain{suffix}": peak, f"mlp{suffix}": least, f"saved{suffix}": peak - least}
        if word == "eager":
            step, seconds = plain.peak.step, plain.seconds
            assert step is not None
            down = max(PRICE(op) for op in plain.ran if _is_down(op)) * len(layers)
            whole = (mlp.seconds + down) / seconds - 1
            figures |= {"plain_seconds": seconds, "cost": mlp.seconds / seconds - 1, "cost_whole": whole}
            figures["in_flight"] = sum(step.live(stage) for stage in rank.stages)
    return figures


def _is_down(op: Op) -> bool:
    """Whether an operation has the shapes of the last product of an MLP in a forward."""
    tensors = [tuple(meta.shape) for meta in metas(op.args)]
    return bool(op.flops) and tensors[-2:] == [(TOKENS, WIDE // LAYOUT.ranks.tp), (WIDE // LAYOUT.ranks.tp, WIDTH)]


if __name__ == "__main__":
    main()
