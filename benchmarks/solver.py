"""Claim: a plan for 126 layers is solved in under 1 s, near the bound on every schedule.

A pre-norm transformer of width 8192 at 4096 tokens in bf16, by arithmetic: the results of a layer, what each weighs and
what computing it again costs at 400 TFLOP/s and 2 TB/s, every set of them to keep as an option. Gradients, sharded over
64 ranks, grow during backward, and the logits of 128,000 words are at the turn. For stacks of equal layers, and of two
kinds in turns, at budgets from 10 % to 90 % of the way from the least feasible to no recomputation: the seconds that
the choice takes, and the gap to the lower bound as a share of the step. Then the whole curve, and the bound.

    python benchmarks/solver.py
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from _measure import RESULTS, Goal, arguments, finish

from torch_recompute import Choice
from torch_recompute.planner.bound import bound
from torch_recompute.planner.cost import Costs, Graph, Kind, Node, Option, Point, Segment
from torch_recompute.planner.solve import choose, frontier, smallest

WIDTH, TOKENS, RANKS = 8192, 4096, 64
UNIT = WIDTH * TOKENS
SIZES = (8, 32, 80, 126, 256, 500)
GOALS = {126: 1.0}


def graph(feed_forward: int) -> Graph:
    """The operations of a layer; widths in units of the model's."""

    def product(k: int, n: int) -> float:
        return 2 * TOKENS * k * n * WIDTH**2 / 400e12

    def pointwise(units: int) -> float:
        return 2 * units * UNIT / 2e12

    attention = 2 * TOKENS**2 * WIDTH / 400e12
    nodes = (
        Node(pointwise(2), 8 * TOKENS, (-1,), True),  # statistics of the first norm
        Node(pointwise(4), 2 * UNIT, (-1, 0), True),
        Node(product(1, 3), 6 * UNIT, (1,), True),
        Node(attention, 2 * UNIT + 4 * TOKENS * WIDTH // 128, (2,), True),
        Node(product(1, 1), 2 * UNIT, (3, -1), True),
        Node(pointwise(2), 8 * TOKENS, (4,), True),
        Node(pointwise(4), 2 * UNIT, (4, 5), True),
        Node(product(1, feed_forward), 2 * feed_forward * UNIT, (6,), True),
        Node(pointwise(4 * feed_forward), 2 * feed_forward * UNIT, (7,), True),
        Node(product(feed_forward, 1), 2 * UNIT, (8, 4)),
    )
    return Graph(nodes, 9, 2 * UNIT, True)


def kind(feed_forward: int) -> Kind:
    """Each set of results to keep, less those that another is at least as good as."""
    layer = graph(feed_forward)
    needed = [index for index, node in enumerate(layer.nodes) if node.needed]
    whole = layer.input_bytes + sum(layer.nodes[index].bytes for index in needed)
    options: list[Option] = []
    for keeps in itertools.product((True, False), repeat=len(needed)):
        kept = {index for index, keep in zip(needed, keeps, strict=True) if keep}
        again: set[int] = set()
        wanted = [index for index in needed if index not in kept]
        while wanted:
            again.add(index := wanted.pop())
            wanted += [read for read in layer.nodes[index].inputs if read >= 0 and read not in kept | again]
        seconds = sum(layer.nodes[index].seconds for index in sorted(again))
        saved = layer.input_bytes + sum(layer.nodes[index].bytes for index in kept)
        forward = saved + max((layer.nodes[index].bytes for index in again), default=0)
        regions = () if all(keeps) else (Choice(("",), tuple(str(index) for index in sorted(kept))),)
        options.append(
            Option(regions, saved, forward, whole + 2 * feed_forward * UNIT, seconds, round(seconds * 400e12))
        )
    useful: list[Option] = []
    for option in sorted(options, key=lambda option: (option.seconds, option.saved_bytes)):
        if not any(o.saved_bytes <= option.saved_bytes and o.forward_bytes <= option.forward_bytes for o in useful):
            useful.append(option)
    return Kind(tuple(useful), layer)


def model(layers: int, feed_forwards: tuple[int, ...]) -> Costs:
    """A stack in which layers of these kinds take turns."""
    kinds = {f"layer{width}": kind(width) for width in feed_forwards}
    gradients = 24 * WIDTH**2 // RANKS
    fixed = 8 * layers * gradients
    segments = tuple(
        Segment(
            f"layers.{i}",
            f"layer{feed_forwards[i % len(feed_forwards)]}",
            fixed,
            fixed + (layers - 1 - i) * gradients,
        )
        for i in range(layers)
    )
    logits = 2 * TOKENS * 128_000
    forward = sum(
        sum(node.seconds for node in costs.graph.nodes if node.seconds) if costs.graph else 0.0
        for segment in segments
        for costs in [kinds[segment.kind]]
    )
    return Costs(kinds, segments, (Point(layers, fixed + 3 * logits, "in the loss"),), 3 * forward, fixed + 2 * logits)


def timed(run: Callable[[], Any], rounds: int) -> tuple[Any, float]:
    """What it returns, and the median seconds of one core."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        result = run()
        times.append(time.process_time() - start)
    return result, sorted(times)[len(times) // 2]


def measured(layers: int, feed_forwards: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """One stack: the slowest of nine budgets, and the largest gap."""
    costs = model(layers, feed_forwards)
    least = smallest(costs).peak_bytes
    curve, curve_seconds = timed(lambda: frontier(costs), 1)
    most = curve[-1].peak_bytes
    assert curve[-1].seconds == 0
    seconds, gaps, bounds = [], [], []
    for tenth in range(1, 10):
        budget = least + (most - least) * tenth // 10
        solution, taken = timed(lambda budget=budget: choose(costs, budget), rounds)
        floor, bound_taken = timed(lambda budget=budget: bound(costs, budget), 1)
        seconds.append(taken)
        bounds.append(bound_taken)
        gaps.append((solution.seconds - floor) / (costs.step_seconds + solution.seconds))
    return {
        "layers": layers,
        "kinds": len(feed_forwards),
        "options": max(len(kind.options) for kind in costs.kinds.values()),
        "choose_seconds": round(max(seconds), 3),
        "gap_percent": round(100 * max(gaps), 3),
        "frontier_seconds": round(curve_seconds, 3),
        "bound_seconds": round(max(bounds), 3),
    }


def draw(figures: list[dict[str, Any]], name: str) -> None:
    """The growth with the number of layers, beside the saved figures, if matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    figure = Figure(figsize=(4, 3), layout="constrained")
    axes = figure.subplots()
    for kinds, said in ((1, "equal layers"), (2, "two kinds in turns")):
        rows = [row for row in figures if row["kinds"] == kinds]
        axes.loglog([row["layers"] for row in rows], [row["choose_seconds"] for row in rows], "o-", label=said)
    axes.loglog(list(GOALS), list(GOALS.values()), "k_", markersize=12, label="goal")
    axes.set(xlabel="layers", ylabel="seconds of one core, slowest of nine budgets")
    axes.legend(frameon=False)
    path = RESULTS / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None})
    print("drawn in", path)


def main() -> None:
    """Measures and prints all stacks."""
    torch.set_num_threads(1)
    options = arguments("How long plans take to solve, by number of layers.")
    rounds = max(1, options.rounds // 33)
    figures = []
    print("layers kinds options | choose s   gap % | frontier s  bound s")
    for feed_forwards, sizes in (((4,), SIZES), ((4, 2), SIZES[:5])):
        for layers in sizes:
            row = measured(layers, feed_forwards, rounds)
            figures.append(row)
            print(
                f"{layers:6} {row['kinds']:5} {row['options']:7} | {row['choose_seconds']:8.3f} "
                f"{row['gap_percent']:7.3f} | {row['frontier_seconds']:10.3f} {row['bound_seconds']:8.3f}"
            )
    goals = [
        Goal(f"solving {layers} layers", f"{slowest:.2f} s", f"{goal:g} s", slowest < goal)
        for layers, goal in GOALS.items()
        for slowest in [max(row["choose_seconds"] for row in figures if row["layers"] == layers)]
    ]
    finish(options, figures, goals)
    if options.save:
        draw(figures, options.save)


if __name__ == "__main__":
    main()
