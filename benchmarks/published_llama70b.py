"""Llama-3 70B on 32 H100: what recomputing every MLP was measured to save and to cost, beside what is predicted.

    python benchmarks/published_llama70b.py

Published by Megatron-Bridge in April 2026: fine-tuning with 4096 tokens in FP8 (current scaling), tensor parallel 4,
pipeline parallel 4 with 5 chunks, data parallel 2, microbatches of one sequence, on devices of 80 GB. Nothing is run
here: each rank's microbatch is simulated, in bfloat16, and what the schedule has in flight is counted. The number of
microbatches is not published; from 8 on it makes no difference to the peak.

Two layers are predicted. "eager" is that of transformers, whose operations keep what autograd keeps of each; "fused" is
Megatron's with fused kernels and products in FP8, by arithmetic: the MLP keeps gate and up in 16 bits and their product
in 8.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from _measure import arguments, finish

from torch_recompute import Choice, Plan, apply
from torch_recompute._models import load
from torch_recompute._ranks.flight import Instant, Taken, instants, taken
from torch_recompute._ranks.layout import Layout
from torch_recompute._ranks.model import Rank, ranks
from torch_recompute._ranks.optimizer import sharded
from torch_recompute.plan.cost import Option
from torch_recompute.planning.ops import Op, op_of
from torch_recompute.planning.prices import DEVICES
from torch_recompute.planning.schedules import orders_named
from torch_recompute.simulation import Simulation, simulate_step

LAYOUT = Layout(tp=4, pp=4, vpp=5, dp=2, mbs=1, sequence_parallel=True, batch=32)
TOKENS, WIDE = 4096, 28_672
DEVICE_BYTES = 80 * 1000**3
# TFLOP/s of a device and GB, or what became of the run; with no such module, "golden" was 709.93.
PUBLISHED = {"core_attn": (704.0, 58.8, "out of memory"), "mlp": (593.6, 55.6, "ran")}
GOLDEN = 709.93
GB = 1000**3


class Predicted:
    """One rank under one placement.

    Args:
        rank: The rank.
        plan: The placement.
    """

    def __init__(self, rank: Rank, plan: Plan) -> None:
        self._ran: Counter[Op] = Counter()
        self._rank = rank

        def watch(func: Any, args: Any, kwargs: Any, out: Any) -> None:
            op = op_of(func, args, kwargs, out)
            if op is not None:
                self._ran[op] += 1

        self.simulation: Simulation = simulate_step(
            rank.model,
            (),
            rank.batch,
            prepare=lambda copy: apply(copy, plan),
            optimizer=sharded("adamw", LAYOUT.dp),
            watch=watch,
        )

    @property
    def seconds(self) -> float:
        """Of all operations, the optimizer's step included."""
        return sum(DEVICES["h100"](op) * count for op, count in self._ran.items())

    def taken(self) -> Taken:
        """What its chunks take; its layers are alike, so each keeps as much."""
        sizes = [len(chunk) for chunk in self._rank.chunks]
        layers = [layer for chunk in self._rank.chunks for layer in chunk]
        paths = [f"model.layers.{layer}" for layer in layers]
        inside = {path: 0 for path in paths}
        for module, nbytes in self.simulation.saved_by_module.items():
            path = ".".join(module.split(".")[:3])
            if path in inside:
                inside[path] += nbytes
        options = [Option((), inside[path], 0, 0, 0.0) for path in paths]
        return taken(self.simulation, paths, options, sizes)


def main() -> None:
    """Prints each rank with nothing and with every MLP recomputed, and the published runs."""
    options = arguments(__doc__ or "")
    model = load("llama3-70b").model
    orders = orders_named("Interleaved1F1B", LAYOUT.pp, LAYOUT.microbatches, LAYOUT.vpp)
    fused = TOKENS * WIDE // LAYOUT.tp * (2 + 2 + 1)  # bytes that a fused MLP keeps beyond its input
    figures: list[dict[str, Any]] = []
    print(f"{LAYOUT}\nGB at the peak of each rank, and ms of a microbatch with the optimizer's step")
    for rank in ranks(model, "llama3-70b", LAYOUT, TOKENS):
        if rank.number == 2:
            continue  # holds as many layers as rank 1, and fewer microbatches
        figures.append(one(rank, instants(orders[rank.number], LAYOUT.pp), fused))
        said = figures[-1]
        print(
            f"  rank {rank.number}: {said['in_flight']} chunks of 4 layers in flight; nothing recomputed "
            f"{said['plain'] / GB:.1f}, every MLP {said['mlp'] / GB:.1f} (saves {said['saved'] / GB:.1f} eager, "
            f"{said['saved_fused'] / GB:.1f} fused); {1000 * said['plain_seconds']:.0f} ms, "
            f"{said['cost']:+.1%} stopping early, {said['cost_whole']:+.1%} with the MLP's last product",
            flush=True,
        )
    speed, memory, _ = PUBLISHED["mlp"]
    measured = GOLDEN / speed - 1
    before = PUBLISHED["core_attn"][1]
    print(f"published: {before} GB, out of memory; every MLP {memory} GB: {before - memory:.1f} GB less, {measured:+.1%} time")
    worst = figures[0]
    explained = worst["plain"] > DEVICE_BYTES * 0.9 and worst["mlp"] < DEVICE_BYTES
    near = min(abs(worst["cost"] - measured), abs(worst["cost_whole"] - measured)) <= 0.05
    print("time:", "within 5 points of the measurement" if near else "NOT within 5 points of the measurement")
    print("memory:", "explained" if explained else "NOT explained")
    finish(options, figures, near and explained)


def one(rank: Rank, found: tuple[Instant, ...], fused: int) -> dict[str, Any]:
    """The figures of one rank."""
    layers = [layer for chunk in rank.chunks for layer in chunk]
    mlps = Plan(tuple(Choice((f"model.layers.{layer}.mlp",)) for layer in layers))
    plain, mlp = Predicted(rank, Plan()), Predicted(rank, mlps)
    (peak, instant), (least, _) = plain.taken().peak(found), mlp.taken().peak(found)
    assert instant is not None
    held = sum(instant.held) + 1
    price = DEVICES["h100"]
    down = next(op for op, _ in mlp._ran.items() if "mm" in str(op.func) and _is_down(op))
    last = price(down) * len(layers)
    return {
        "rank": rank.number,
        "in_flight": held,
        "plain": peak,
        "mlp": least,
        "saved": peak - least,
        "saved_fused": fused * held * len(rank.chunks[0]),
        "plain_seconds": plain.seconds,
        "cost": mlp.seconds / plain.seconds - 1,
        "cost_whole": (mlp.seconds + last) / plain.seconds - 1,
    }


def _is_down(op: Op) -> bool:
    (result,) = op.results
    first = op.args[0]
    return result.shape[-1] == 8192 and result.shape[-2] == TOKENS and first.shape[-1] == WIDE // LAYOUT.tp


if __name__ == "__main__":
    main()
