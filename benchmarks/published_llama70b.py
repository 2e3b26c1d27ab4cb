"""Llama-3 70B on 32 H100: what recomputing every MLP was measured to save and to cost, beside what is predicted.

    python benchmarks/published_llama70b.py

Published by Megatron-Bridge in April 2026: fine-tuning with 4096 tokens in FP8 (current scaling), tensor parallel 4,
pipeline parallel 4 with 5 chunks, data parallel 2, microbatches of one sequence, on devices of 80 GB. Nothing is run
here: each rank's microbatch is simulated, in bfloat16, and what the schedule has in flight is counted. The number of
microbatches is not published; from 8 on it makes no difference to the peak.

Two layers are predicted. "eager" is that of transformers, whose operations keep what autograd keeps of each. "fused" is
Megatron's: the same peak, less what an eager layer keeps beyond the terms of `FUSED`, in each microbatch in flight.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from _measure import arguments, finish

from torch_recompute import Choice, Plan
from torch_recompute.commands.models import load
from torch_recompute.devices import DEVICES
from torch_recompute.plan.ranks import Ranks
from torch_recompute.planner.layout import Layout, LayoutPlanner
from torch_recompute.planner.ops import Op, metas
from torch_recompute.planner.pipeline import RankPlanner
from torch_recompute.planner.rank_memory import RankPeak
from torch_recompute.planner.stage_runs import StageRun

LAYOUT = Layout(Ranks(tp=4, pp=4, vpp=5, dp=2, sequence_parallel=True), batch=32)
TOKENS, WIDTH, WIDE, QUERIES, KEYS = 4096, 8192, 28_672, 8192, 1024
GB = 1000**3
PRICE = DEVICES["h100"]

# What a layer keeps per token, before it is divided by the ranks of the tensor-parallel group, with norms, rotary
# embeddings and SwiGLU fused, products in FP8 and everything else in 16 bits.
FUSED_ATTENTION = {
    "the layer's input": 2 * WIDTH,
    "the first norm, for the product after it": WIDTH,
    "queries, keys and values": 2 * (QUERIES + 2 * KEYS),
    "the attention's result, and that for the product after it": 2 * QUERIES + QUERIES,
    "the residual": 2 * WIDTH,
    "the second norm, for the product after it": WIDTH,
}
FUSED_MLP = {"gate and up": 2 * 2 * WIDE, "their product, for the product after it": WIDE}

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
    planner = LayoutPlanner(load("llama3-70b").model, "llama3-70b", LAYOUT, TOKENS, "adamw", "h100")
    print(f"{LAYOUT}\npeak in GB, eager (fused), and time of a microbatch")
    figures: list[dict[str, Any]] = []
    for rank in planner.pipeline.ranks:
        if rank.number == 2:
            continue  # it holds as many layers as rank 1, and fewer microbatches
        said = one(planner, rank)
        figures.append(said)
        print(
            f"  rank {rank.number}: {said['in_flight']} x 4 layers in flight; nothing recomputed "
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


def one(planner: LayoutPlanner, rank: RankPlanner) -> dict[str, Any]:
    """The figures of one rank."""
    layers = [segment.path for stage in rank.stages for segment in planner.pipeline.segments(stage)]
    mlps = Plan(tuple(Choice((f"{path}.mlp",)) for path in layers))
    plain, mlp = Predicted(planner, rank, Plan()), Predicted(planner, rank, mlps)
    step, peak, least = plain.peak.step, plain.peak.bytes, mlp.peak.bytes
    assert step is not None
    held, each = sum(step.live(stage) for stage in rank.stages), len(layers) // len(rank.stages)
    alive, share = held * each, TOKENS // LAYOUT.ranks.tp
    attention, whole_mlp = (share * sum(terms.values()) for terms in (FUSED_ATTENTION, FUSED_MLP))
    eager, eager_mlp = plain.layer_bytes, mlp.layer_bytes
    down = max(PRICE(op) for op in plain.ran if _is_down(op)) * len(layers)
    seconds = plain.seconds
    return {
        "rank": rank.number,
        "in_flight": held,
        "layer_bytes": {"eager": eager, "eager_mlp": eager - eager_mlp, "fused": attention + whole_mlp},
        "plain": peak,
        "plain_fused": peak - alive * (eager - attention - whole_mlp),
        "mlp": least,
        "mlp_fused": least - alive * (eager_mlp - attention),
        "saved": peak - least,
        "saved_fused": alive * whole_mlp,
        "plain_seconds": seconds,
        "cost": mlp.seconds / seconds - 1,
        "cost_whole": (mlp.seconds + down) / seconds - 1,
    }


def _is_down(op: Op) -> bool:
    """Whether an operation has the shapes of the last product of an MLP in a forward."""
    tensors = [tuple(meta.shape) for meta in metas(op.args)]
    return bool(op.flops) and tensors[-2:] == [(TOKENS, WIDE // LAYOUT.ranks.tp), (WIDE // LAYOUT.ranks.tp, WIDTH)]


if __name__ == "__main__":
    main()
