"""Claim: a region costs at most 0.75 x what torch.utils.checkpoint costs, beyond the work itself.

The work of a recomputed function is forward + forward + backward. What a chain of 20 regions takes beyond that,
divided by 20, is the engine's cost per region. The functions are chains of `sin` on 8 x 8 tensors, so that nearly all
is engine: the first tensor each saves is the region's input, the others are inside it. All engines look after random
numbers, autocast and the metadata check, but torch_remat, which refuses to look after random numbers. Peers: torch's
two engines, and torch_remat where installed (`pip install --no-deps torch_remat==0.2.2`).

    python benchmarks/region_overhead.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.utils.checkpoint
from _measure import Goal, arguments, finish, medians

from torch_recompute import recompute

try:
    import torch_remat
except ImportError:
    torch_remat = None

REGIONS = 20
LIMITS = {1: 0.55, 2: 0.75, 5: 0.70, 20: 0.62}  # by the tensors that a region's function saves
Function = Callable[[torch.Tensor], torch.Tensor]


def chain(length: int) -> Function:
    """A function that saves `length` tensors."""

    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(length):
            x = x.sin()
        return x

    return run


def engines(fn: Function) -> dict[str, Function]:
    """`fn` as a region of each engine."""
    stock = torch.utils.checkpoint.checkpoint
    found = {
        "torch-recompute": recompute(fn),
        "torch": lambda x: stock(fn, x, use_reentrant=False),
        "torch reentrant": lambda x: stock(fn, x, use_reentrant=True),
    }
    if torch_remat is not None:
        found["torch_remat"] = torch_remat.checkpoint(determinism_check="default")(fn)
    return found


def forward(fn: Function, x: torch.Tensor) -> torch.Tensor:
    """A chain of calls."""
    for _ in range(REGIONS):
        x = fn(x)
    return x


def costs(length: int, rounds: int) -> dict[str, float]:
    """Microseconds per region of each engine, for a function that saves `length` tensors."""
    fn = chain(length)
    x = torch.randn(8, 8, requires_grad=True)

    def step(engine: Function) -> Callable[[], None]:
        return lambda: forward(engine, x).sum().backward()

    variants = {name: step(engine) for name, engine in engines(fn).items()}
    times = medians({"forward": lambda: forward(fn, x), "plain": step(fn), **variants}, rounds)
    work = times["plain"] + times["forward"]
    return {name: (times[name] - work) / REGIONS * 1e6 for name in variants}


def main() -> None:
    """Measures and prints the table."""
    options = arguments("What a region costs beyond the work itself.")
    torch.set_num_threads(1)
    figures = []
    goals = []
    print(f"{'saved tensors':>13} {'engine':>16} {'us per region':>14} {'x torch':>8}")
    for length, limit in LIMITS.items():
        row = costs(length, options.rounds)
        for name, cost in row.items():
            ratio = cost / row["torch"]
            figures.append({"saved_tensors": length, "engine": name, "us": round(cost, 2), "ratio": round(ratio, 3)})
            print(f"{length:>13} {name:>16} {cost:>14.1f} {ratio:>8.2f}")
        ours, least = row["torch-recompute"] / row["torch"], min(row, key=lambda name: row[name])
        claim = f"a region whose function saves {length} tensor{'s' if length > 1 else ''}"
        below = "" if least == "torch-recompute" else f"; {least} {row[least] / row['torch']:.2f} x"
        goals.append(Goal(claim, f"{ours:.2f} x torch's{below}", f"{limit:.2f} x", ours <= limit))
    finish(options, figures, goals)


if __name__ == "__main__":
    main()
