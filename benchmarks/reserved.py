"""Claim: what PyTorch's allocator reserves on a GPU is known without one: 1 % off in the median, 6 % at the worst.

Each row of `results/on_gpu-h100.json` is a way to train a model of a published size that ran on that GPU
(`benchmarks/on_gpu.py`). Here each is simulated for that device, and its allocations are made in an allocator by the
rules of PyTorch's. As there, the ways of a case follow each other in one process: the first finds an empty device, each
other what the ways before have left, after `torch.cuda.empty_cache()`. Compared are the most that tensors had, the most
that was reserved, and whether memory ran out.

    python benchmarks/reserved.py               # all ways, in about a minute
    python benchmarks/reserved.py vit           # of these cases

It prints the verdict for all rows, and what a first run alone, as a user's is, is predicted to reserve.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from typing import Any

from _measure import RESULTS, Goal, arguments, finish
from on_gpu import GIB, WARM, planned_file

from torch_recompute import Plan
from torch_recompute.commands import cli, models
from torch_recompute.memory.reserved import Allocator, load, train
from torch_recompute.planner.configurations import configurations, peaks_of
from torch_recompute.simulation import Simulation

TENSORS, MEDIAN, WORST = 0.001, 0.01, 0.06
FREE = 78.5 * GIB
"""What an H100 of 79.18 GiB has beside the context of a process."""


def simulated(case: str, ways: list[str], plans: dict[tuple[str, str], Any]) -> Iterator[tuple[Simulation, int]]:
    """Each way of a case, simulated for an H100, and the bytes of weights that its model has made and given up."""
    words = [word for word in case.split() if word not in ("--tiles", "--offload")]  # a plan says itself where
    args = cli.build_parser().parse_args(["plan", *words, "--device", "h100", "--recompute", "none"])
    step = models.AskedStep.asked(args)
    model: Any = step.model
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = 0 if head is None or head.weight is not embedding.weight else head.weight.nbytes
    for way in ways:
        stated = plans.get((case, way))
        plan = Plan.from_json(stated) if stated else configurations("way", way, step)[way]
        with models.autocasting(step.model, args.autocast):
            yield peaks_of(step, {way: plan}, step.plan_options)[0].simulation, tied


def compared(case: str, rows: list[dict[str, Any]], plans: dict[tuple[str, str], Any], rounds: int) -> Iterator[Any]:
    """The rows of a case that ran, beside what is predicted."""
    allocator: Allocator | None = None
    for row, (found, tied) in zip(rows, simulated(case, [row["way"] for row in rows], plans), strict=True):
        expandable = bool(row.get("expandable"))
        states = allocator is None or expandable  # each run with expandable segments is a process of its own
        if allocator is None or states:
            allocator = Allocator(expandable, int(FREE))
            load(allocator, found.blocks)
            if tied:  # transformers ties a head to the embedding when both have a weight
                allocator.give_back(allocator.take(tied))
        allocator.reset()
        train(allocator, found.blocks, WARM + rounds, states=states)
        most = allocator.most()
        allocator.empty_cache()
        alone = found.reserved(expandable)
        yield {
            **{name: row.get(name) for name in ("case", "way", "expandable", "failed", "peak_bytes", "reserved_bytes")},
            "simulated_peak_bytes": found.peak_bytes,
            "predicted_peak_bytes": most.allocated_bytes,
            "predicted_reserved_bytes": most.reserved_bytes,
            "predicted_to_run_out": most.ran_out,
            "alone_reserved_bytes": alone.reserved_bytes,
        }


def show(row: dict[str, Any]) -> None:
    """Prints a row."""
    predicted = f"predicted {row['predicted_peak_bytes'] / GIB:6.2f}, {row['predicted_reserved_bytes'] / GIB:6.2f}"
    there = "out of memory" if row["failed"] else ""
    if not row["failed"]:
        off = row["predicted_reserved_bytes"] / row["reserved_bytes"] - 1
        there = f"{row['peak_bytes'] / GIB:6.2f}, {row['reserved_bytes'] / GIB:6.2f} ({off:+.1%})"
    ran_out = ", to run out" if row["predicted_to_run_out"] else ""
    segments = ", expandable" if row["expandable"] else ""
    alone = f"; in a process of its own {row['alone_reserved_bytes'] / GIB:.2f}"
    print(
        f"  {row['way']:>6}{segments}  GiB of tensors, reserved: {predicted}{ran_out}; there {there}{alone}", flush=True
    )


def main() -> None:
    """Compares all rows."""
    options = arguments(__doc__ or "", words="words of the cases to compare (all)")
    saved = json.loads((RESULTS / "on_gpu-h100.json").read_text("utf-8"))
    ways = json.loads(planned_file("h100").read_text("utf-8"))["ways"]
    plans = {(way["case"], way["way"]): way["plan"] for way in ways}
    cases: dict[str, list[dict[str, Any]]] = {}
    for row in saved["figures"]:
        if not options.words or any(word in row["case"] for word in options.words):
            cases.setdefault(row["case"], []).append(row)
    figures: list[dict[str, Any]] = []
    for case, rows in cases.items():
        print(case, flush=True)
        for row in compared(case, rows, plans, saved["rounds"]):
            show(row)
            figures.append(row)
    ran = [row for row in figures if not row["failed"]]
    tensors = [abs(row["predicted_peak_bytes"] / row["peak_bytes"] - 1) for row in ran]
    reserved = [abs(row["predicted_reserved_bytes"] / row["reserved_bytes"] - 1) for row in ran]
    foreseen = sum(row["predicted_to_run_out"] is bool(row["failed"]) for row in figures)
    median, worst = statistics.median(reserved), max(reserved)
    figure = f"{foreseen} of {len(figures)}"
    goals = [
        Goal(
            "bytes of tensors on an H100, beside the simulated ones, off at most",
            f"{max(tensors):.2%}",
            f"{TENSORS:.1%}",
            max(tensors) <= TENSORS,
        ),
        Goal("reserved bytes there, off in the median", f"{median:.2%}", f"{MEDIAN:.0%}", median <= MEDIAN),
        Goal("reserved bytes there, off at most", f"{worst:.1%}", f"{WORST:.0%}", worst <= WORST),
        Goal("runs there of which it was foreseen whether memory runs out", figure, "all", foreseen == len(figures)),
    ]
    finish(options, figures, goals)


if __name__ == "__main__":
    main()
