"""A budget for a compiled step: `Partition` beside torch's `activation_memory_budget`, by the allocator's own events.

    python benchmarks/compiled.py --rounds 10 --save compiled-cpu

Each model is compiled by inductor: without a budget, with torch's at some shares, with ours at the peaks that torch's
came to, and with ours at three or ten budgets of its own. Models are one graph, or ("by layers") each layer is compiled
by itself. Then the steps take turns in one process, and one step of each is profiled.

Each claim is printed with its figure: ours has the gradients of the step without a budget; its peaks rise with the
budget and are at most the budget; they are within 2 % of what was predicted; at each peak of torch's it runs at most
as many FLOPs again, and at the bytes that torch's saves it has at most that peak; at equal peaks its steps take no
longer in the median. `--save` draws both curves, too.
"""

from __future__ import annotations

import copy
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch
from _measure import Goal, arguments, finish

from torch_recompute._torch.partitioning import CustomPartitionerFn, split
from torch_recompute.compiling import Partition
from torch_recompute.compiling.choosing import Attempt, approach
from torch_recompute.compiling.joint import Joint

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from allocated import levels
from frontier.models import MODELS as BUILT
from frontier.models import stacks
from partitions import replayed_by, saved_by

SHAPE = (3, 256, 256, 4)  # layers, width, tokens, batch
LAYERS = ", by layers"
MODELS = ("gpt", "gpt, dropout", "llama", "encoder-decoder", "moe", "gpt, dropout" + LAYERS, "llama" + LAYERS)
SHARES = (0.5, 0.1, 0.0)
OWN = {"gpt, dropout": 10, "encoder-decoder": 10, "gpt, dropout" + LAYERS: 10, "llama" + LAYERS: 10}
"""Budgets from the least that any choice needs to the peak of the step without one; of other models `FEW`."""
FEW = 3
LEAST = 0.001  # a share as small as none
TRIES = 4  # budgets of layers for which the step's peak is measured
PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "compiled.png"
WITHIN = 0.02
NOISE = 1.02  # of a step's time
MIB = 2**20

Row = dict[str, Any]


class Counted(CustomPartitionerFn):
    """A partitioner whose graphs are looked at: bytes saved, FLOPs run again."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner, self.flops, self.saved = inner, 0, 0

    def __call__(self, gm: Any, joint_inputs: Any, **more: Any) -> Any:
        joint = Joint(copy.deepcopy(gm.graph), more["num_fwd_outputs"])
        forward, backward = self.inner(gm, joint_inputs, **more)
        self.flops += replayed_by(joint, backward)
        self.saved += sum(joint.values[number].bytes for number in saved_by(joint, forward, more["num_fwd_outputs"]))
        return forward, backward

    def uuid(self) -> str:
        return f"{time.time_ns()} {id(self)}"  # never in the cache of compiled graphs: nothing would be counted

    def __deepcopy__(self, memo: Any) -> Counted:
        return self


class Variant:
    """A model compiled in one way."""

    def __init__(self, name: str, by: str, budget: str, inner: Any, share: float = 1.0, allowed: int = 0) -> None:
        torch.manual_seed(0)
        self.model, self.text = BUILT[name.partition(",")[0]].build(*SHAPE, 0.1 if "dropout" in name else 0.0)
        self.by, self.budget, self.allowed, self.taken = by, budget, allowed, list[float]()
        ours = isinstance(inner, Partition)
        self.counted = Counted(inner)
        options = {**(inner.options if ours else {}), "custom_partitioner_fn": self.counted}
        for part in [layer for stack in stacks(self.model) for layer in stack] if LAYERS in name else [self.model]:
            part.compile(options=options)
        with functorch.patch(activation_memory_budget=share):
            self.step()
        self.gradients = self.step()
        self.peak = max(levels(self.step))
        self.graph = inner.graphs[0] if ours else None
        self.predicted = self.graph.peak_bytes if self.graph and LAYERS not in name else 0

    def step(self) -> list[torch.Tensor]:
        """Runs a step and returns its gradients."""
        torch.manual_seed(0)
        start = time.perf_counter()
        self.model(self.text).backward()
        self.taken.append(time.perf_counter() - start)
        found = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        self.model.zero_grad()
        return found

    def off_by(self, other: Variant) -> float:
        """The largest difference of a gradient to another's, as a share of the largest entry."""
        pairs = zip(self.gradients, other.gradients, strict=True)
        return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs)


def at_peak(name: str, theirs: Variant, first: Variant, layers: int) -> Variant:
    """A model compiled with a budget for which its step's peak is at most another's.

    Layers are compiled without what is around them. What that takes is measured with the least of the choices, and with
    each that is tried.
    """
    found: list[Variant] = []

    def attempt(room: int) -> Attempt:
        inner = Partition(room, layers=layers)
        found.append(Variant(name, "at torch's", theirs.budget, inner, allowed=theirs.peak))
        graph = inner.graphs[0]
        return Attempt(found[-1].peak - theirs.peak, graph.peak_bytes, not graph.replay_flops)

    assert first.graph is not None
    least = first.graph.peak_bytes
    around = first.peak - least if layers > 1 else 0
    approach(attempt, theirs.peak - around, least, TRIES if layers > 1 else 1)
    return min(found, key=lambda one: (max(one.peak - theirs.peak, 0), one.counted.flops))


def variants(name: str) -> Iterator[Variant]:
    """A model compiled without a budget, with torch's, and with ours."""
    plain = Variant(name, "torch", "none", split)
    yield plain
    own, layers = OWN.get(name, FEW), SHAPE[0] if LAYERS in name else 1
    first = Variant(name, "its own", "0%", Partition(LEAST, layers=layers))
    for share in SHARES:
        theirs = Variant(name, "torch", f"{share:.0%}", split, share)
        yield theirs
        if theirs.peak >= first.peak:
            yield at_peak(name, theirs, first, layers)
    yield first
    for share in (step / (own - 1) for step in range(1, own)):
        # What is not compiled with the layers is in their step's peak, too, so bytes would not be comparable.
        budget = 0 if layers > 1 else int(first.peak + share * (plain.peak - first.peak))
        inner = Partition(budget or min(share, 1 - LEAST), layers=layers)
        yield Variant(name, "its own", f"{share:.0%}", inner, allowed=budget)


def rows(name: str, rounds: int) -> list[Row]:
    """The figures of one model, a row for each way to compile it."""
    torch.compiler.reset()
    made: list[Variant] = []
    for variant in variants(name):
        made.append(variant)
        sys.stderr.write(f"\r{name}: {len(made)} compiled ")
    sys.stderr.write("\r" + " " * 60 + "\r")
    for _ in range(rounds):
        for variant in made:
            variant.step()
    seconds = [statistics.median(variant.taken[-max(1, rounds) :]) for variant in made]
    return [
        {
            "model": name,
            "by": variant.by,
            "budget": variant.budget,
            "allowed_mib": round(variant.allowed / MIB, 2),
            "peak_mib": round(variant.peak / MIB, 2),
            "predicted_mib": round(variant.predicted / MIB, 2),
            "saved_mib": round(variant.counted.saved / MIB, 2),
            "replayed_gflop": round(variant.counted.flops / 1e9, 3),
            "gradients_off": float(f"{variant.off_by(made[0]):.1e}"),
            "step_ratio": round(taken / seconds[0], 3),
        }
        for variant, taken in zip(made, seconds, strict=True)
    ]


def ratio(ours: float, theirs: float) -> float:
    """One over the other; 1 where both are nothing."""
    return ours / theirs if theirs else 1.0 if not ours else math.inf


def compared(figures: Sequence[Row]) -> dict[str, list[float]]:
    """At each budget of torch's below 1: ours over theirs, in FLOPs, in peaks and in time."""
    found: dict[str, list[float]] = {"FLOPs": [], "peak": [], "time": []}
    for theirs in figures:
        if theirs["by"] != "torch" or theirs["budget"] == "none":
            continue
        ours = [row for row in figures if row["model"] == theirs["model"] and row["by"] != "torch"]
        low = [row for row in ours if row["peak_mib"] <= theirs["peak_mib"]]
        small = [row for row in ours if row["saved_mib"] <= theirs["saved_mib"]]
        best = min(low, key=lambda row: row["replayed_gflop"], default=None)
        if theirs["replayed_gflop"] or best is None or best["replayed_gflop"]:
            found["FLOPs"].append(ratio(best["replayed_gflop"], theirs["replayed_gflop"]) if best else math.inf)
        found["time"].append(best["step_ratio"] / theirs["step_ratio"] if best else math.inf)
        if small:
            found["peak"].append(ratio(min(row["peak_mib"] for row in small), theirs["peak_mib"]))
    return found


def goals(figures: Sequence[Row]) -> list[Goal]:
    """Each claim with its figure and its goal."""
    ours = [row for row in figures if row["by"] != "torch"]
    off = max(row["gradients_off"] for row in ours)
    worst = max((abs(row["predicted_mib"] / row["peak_mib"] - 1) for row in ours if row["predicted_mib"]), default=0.0)
    over = max((row["peak_mib"] / row["allowed_mib"] - 1 for row in ours if row["allowed_mib"]), default=0.0)
    falls = 0.0
    for name in dict.fromkeys(row["model"] for row in figures):
        peaks = [row["peak_mib"] for row in ours if row["model"] == name and row["by"] == "its own"]
        falls = max(falls, *(a / b - 1 for a, b in pairwise(peaks)))
    at = compared(figures)
    middle = {key: statistics.median(values or [0.0]) for key, values in at.items()}
    most = {key: max(values, default=0.0) for key, values in at.items()}
    found = (
        ("gradients of `Partition` that are off, at most", f"{off:.1e}", "1e-3", off < 1e-3),
        ("measured peaks off their prediction, at most", f"{worst:.1%}", "2 %", worst <= WITHIN),
        ("measured peaks above their budget in bytes, by at most", f"{max(over, 0):.1%}", "0 %", over <= 0.0005),
        ("peaks that fall as the budget rises, by at most", f"{falls:.1%}", "2 %", falls <= WITHIN),
        ("GFLOP again at torch's peaks, in the median", f"{middle['FLOPs']:.2f} x", "0.4 x", middle["FLOPs"] <= 0.4),
        ("GFLOP again at torch's peaks, at most", f"{most['FLOPs']:.2f} x", "1 x", most["FLOPs"] <= 1),
        ("peak at torch's saved bytes, in the median", f"{middle['peak']:.2f} x", "0.75 x", middle["peak"] <= 0.75),
        ("peak at torch's saved bytes, at most", f"{most['peak']:.2f} x", "1 x", most["peak"] <= 1),
        ("time of a step at torch's peaks, in the median", f"{middle['time']:.2f} x", "1 x", middle["time"] <= NOISE),
    )
    return [Goal(*one) for one in found]


def draw(figures: Sequence[Row], path: Path) -> None:
    """FLOPs run again by peak, of torch's budgets and of ours."""
    from matplotlib.figure import Figure

    names = [name for name in ("gpt, dropout", "encoder-decoder") if any(row["model"] == name for row in figures)]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for by, colour, label in (("torch", "#b8453b", "activation_memory_budget"), ("", "#2b6cb0", "Partition")):
            of = [row for row in figures if row["model"] == name and (row["by"] == "torch") == bool(by)]
            of = of if by else sorted(of, key=lambda row: row["peak_mib"])
            xs, ys = [row["peak_mib"] for row in of], [row["replayed_gflop"] for row in of]
            axes.plot(xs, ys, "-", color=colour, label=label)
            wrong = [row["gradients_off"] > 1e-3 for row in of]
            for is_wrong in (False, True):
                points = [(x, y) for x, y, w in zip(xs, ys, wrong, strict=True) if w is is_wrong]
                if points:
                    face, said = ("none", f"{label}: wrong gradients") if is_wrong else (colour, None)
                    axes.plot(*zip(*points, strict=True), "o", color=colour, markerfacecolor=face, label=said)
        axes.set(title=name, xlabel="peak of forward and backward, MiB", ylabel="GFLOP run again")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
    print("drawn in", path)


def main() -> None:
    """Prints a line for each way to compile each model, and each claim."""
    options = arguments(__doc__ or "", models="which of the models")
    torch._dynamo.config.recompile_limit = 512  # all variants run the same code
    torch._dynamo.config.accumulated_recompile_limit = 2048
    print(f"{'':37} {'budget':>6} {'peak MiB':>9} {'predicted':>9} {'saved':>7} {'GFLOP':>7} {'off':>8} {'step x':>7}")
    figures: list[Row] = []
    for name in options.models or MODELS:
        for row in rows(name, options.rounds):
            figures.append(row)
            print(
                f"{row['model']:26} {row['by']:10} {row['budget']:>6} {row['peak_mib']:9.2f} "
                f"{row['predicted_mib']:9.2f} {row['saved_mib']:7.2f} {row['replayed_gflop']:7.3f} "
                f"{row['gradients_off']:8.1e} {row['step_ratio']:7.3f}",
                flush=True,
            )
    finish(options, figures, goals(figures))
    if options.save:
        draw(figures, PICTURE)


if __name__ == "__main__":
    main()
