"""A budget for a compiled step: `Partition` beside torch's `activation_memory_budget`, by the allocator's own events.

    python benchmarks/compiled.py --rounds 10 --save compiled-cpu

Each model is compiled by inductor as one graph: without a budget, with torch's at some shares, with ours at the peaks
that torch's came to, and with ours at low shares of its own. Then the steps take turns in one process, and one step of
each is profiled. The verdict holds if ours replays at most the FLOPs of torch's, if its gradients are those of the step
without a budget, if no allocator's peak is above the budget, and if each is within 2 % of the predicted one.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch
from _measure import arguments, finish
from torch import nn

from torch_recompute._torch.partitioning import CustomPartitionerFn, split
from torch_recompute.compiling import Partition
from torch_recompute.compiling.joint import Joint

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from allocated import levels
from frontier.models import MODELS as BUILT

SHAPE = (4, 256, 256, 4)  # layers, width, tokens, batch
MODELS = ("gpt", "gpt, dropout", "llama", "encoder-decoder", "moe")
SHARES = (0.7, 0.4, 0.1)
LOW = (0.3, 0.01)  # from the least that any choice needs to the step without a budget
WITHIN = 0.02


class Counted(CustomPartitionerFn):
    """A partitioner whose graphs are looked at: bytes saved, FLOPs run again."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner, self.flops = inner, 0

    def __call__(self, gm: Any, joint_inputs: Any, **more: Any) -> Any:
        joint = Joint(copy.deepcopy(gm.graph), more["num_fwd_outputs"])
        forward, backward = self.inner(gm, joint_inputs, **more)
        flops = {one.node.name: one.flops for one in joint.operations if one.required}
        for node in backward.graph.nodes:
            if "run_with_rng_state" in str(node.target):
                self.flops += next(one.flops for one in joint.operations if one.node.target in node.args)
            elif node.op == "call_function":
                self.flops += flops.get(node.name, 0)
        return forward, backward

    def uuid(self) -> str:
        return f"{time.time_ns()} {id(self)}"  # never in the cache of compiled graphs: nothing would be counted

    def __deepcopy__(self, memo: Any) -> Counted:
        return self


class Variant:
    """A model compiled in one way."""

    def __init__(self, model: nn.Module, text: Any, inner: Callable[..., Any], share: float = 1.0, **more: Any) -> None:
        self.model, self.text = copy.deepcopy(model), text
        self.counted = Counted(inner)
        self._run = torch.compile(self.model, options={"custom_partitioner_fn": self.counted, **more})
        with functorch.patch(activation_memory_budget=share):
            self.step()
        self.gradients = self.step()
        self.peak = max(levels(self.step))
        self.taken: list[float] = []

    def step(self) -> list[torch.Tensor]:
        """Runs a step and returns its gradients."""
        torch.manual_seed(0)
        start = time.perf_counter()
        self._run(self.text).backward()
        if hasattr(self, "taken"):
            self.taken.append(time.perf_counter() - start)
        found = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        self.model.zero_grad()
        return found

    def off_by(self, other: Variant) -> float:
        """The largest difference of a gradient to another's, as a share of the largest entry."""
        pairs = zip(self.gradients, other.gradients, strict=True)
        return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs)


def built(name: str) -> tuple[nn.Module, Any]:
    """A model and its batch."""
    torch.manual_seed(0)
    return BUILT[name.partition(",")[0]].build(*SHAPE, 0.1 if "dropout" in name else 0.0)


def partitioned(model: nn.Module, text: Any, budget: float) -> tuple[Variant, int]:
    """A model compiled with a `Partition`, and the peak that it predicts."""
    partition = Partition(budget)
    more = {name: value for name, value in partition.options.items() if value is not partition}
    return Variant(model, text, partition, **more), partition.graphs[0].peak_bytes


def rows(name: str, rounds: int) -> list[dict[str, Any]]:
    """The figures of one model: torch's step without a budget, and a row for each of torch's and of ours."""
    model, text = built(name)
    plain = Variant(model, text, split)
    variants: list[tuple[str, float, Variant, int]] = [("torch", 1.0, plain, 0)]
    for share in SHARES:
        theirs = Variant(model, text, split, share)
        variants += [("torch", share, theirs, 0), ("Partition", share, *partitioned(model, text, theirs.peak))]
    variants += [("its own", share, *partitioned(model, text, share)) for share in LOW]
    for _ in range(rounds):
        for _, _, variant, _ in variants:
            variant.step()
    seconds = statistics.median(plain.taken[-rounds:]) if rounds else 0.0
    return [
        {
            "model": name,
            "by": by,
            "budget": share,
            "peak_mib": round(variant.peak / 2**20, 2),
            "predicted_mib": round(predicted / 2**20, 2),
            "replayed_gflop": round(variant.counted.flops / 1e9, 3),
            "gradients_off": float(f"{variant.off_by(plain):.1e}"),
            "step_ratio": round(statistics.median(variant.taken[-rounds:]) / seconds, 3) if rounds else 0.0,
        }
        for by, share, variant, predicted in variants
    ]


def holds(figures: list[dict[str, Any]]) -> bool:
    """Whether the verdict holds for one model."""
    theirs = [row for row in figures if row["by"] == "torch" and row["budget"] < 1]
    ours = [row for row in figures if row["by"] == "Partition"]
    return (
        all(a["replayed_gflop"] <= b["replayed_gflop"] for a, b in zip(ours, theirs, strict=True))
        and all(row["gradients_off"] < 1e-3 for row in figures if row["by"] != "torch")
        and all(a["peak_mib"] <= b["peak_mib"] for a, b in zip(ours, theirs, strict=True))
        and all(
            abs(row["peak_mib"] - row["predicted_mib"]) <= WITHIN * row["peak_mib"]
            for row in figures
            if row["by"] != "torch"
        )
    )


def main() -> None:
    """Prints a line for each way to compile each model."""
    options = arguments(__doc__ or "", models="which of the models")
    torch._dynamo.config.recompile_limit = 64  # all variants run the same code
    print(f"{'':25} {'budget':>6} {'peak MiB':>9} {'predicted':>9} {'GFLOP':>7} {'grads off':>9} {'step x':>7}")
    figures: list[dict[str, Any]] = []
    for name in options.models or MODELS:
        for row in rows(name, options.rounds):
            figures.append(row)
            print(
                f"{row['model']:14} {row['by']:10} {row['budget']:6.0%} {row['peak_mib']:9.2f} "
                f"{row['predicted_mib']:9.2f} {row['replayed_gflop']:7.3f} {row['gradients_off']:9.1e} "
                f"{row['step_ratio']:7.3f}",
                flush=True,
            )
    of = {name: [row for row in figures if row["model"] == name] for name in options.models or MODELS}
    finish(options, figures, all(map(holds, of.values())))


if __name__ == "__main__":
    main()
