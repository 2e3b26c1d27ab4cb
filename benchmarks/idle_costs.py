"""Claim: outside of training a region costs at most 1 us, it leaves no cyclic garbage, and `debug` does not slow down.

Three counts. The time that a region adds to a plain call under `torch.no_grad()`; the objects that the garbage
collector finds after 100 regions have gone forward and backward with collection off; and the Python calls made by
`checkpoint(debug=True)` in its 600th call against its 20th. torch.utils.checkpoint beside each.

    python benchmarks/idle_costs.py
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from _measure import Goal, arguments, finish, medians

from torch_recompute import checkpoint, recompute

Checkpoint = Callable[..., torch.Tensor]
CALLS = 1000


def fn(x: torch.Tensor) -> torch.Tensor:
    """A function with something to save."""
    return x.sin().exp()


def stock(*args: Any, **kwargs: Any) -> torch.Tensor:
    """The engine of torch."""
    return torch.utils.checkpoint.checkpoint(*args, use_reentrant=False, **kwargs)


def idle(rounds: int) -> dict[str, float]:
    """Microseconds added to a call under no_grad."""
    x = torch.randn(8, 8)
    region = recompute(fn)

    def repeat(call: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(CALLS):
                call(x)

        return run

    with torch.no_grad():
        times = medians({"plain": repeat(fn), "ours": repeat(region), "torch": repeat(lambda x: stock(fn, x))}, rounds)
    return {name: (times[name] - times["plain"]) / CALLS * 1e6 for name in ("ours", "torch")}


def garbage(engine: Checkpoint) -> int:
    """Objects in reference cycles after 100 regions."""
    x = torch.randn(8, 8, requires_grad=True)
    engine(fn, x).sum().backward()
    gc.collect()
    gc.disable()
    try:
        for _ in range(100):
            engine(fn, x).sum().backward()
        return gc.collect()
    finally:
        gc.enable()


def debug_calls(engine: Checkpoint) -> tuple[int, int]:
    """Python calls made by the 20th and the 600th region with `debug`."""
    x = torch.randn(8, 8, requires_grad=True)
    counted = []
    for number in range(1, 601):
        count = 0

        def tally(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event == "call"

        if number in (20, 600):
            sys.setprofile(tally)
        engine(fn, x, debug=True).sum().backward()
        sys.setprofile(None)
        if number in (20, 600):
            counted.append(count)
    return counted[0], counted[1]


def main() -> None:
    """Measures and prints the three."""
    options = arguments("What regions cost where nothing is recomputed, and what they leave behind.")
    torch.set_num_threads(1)
    added = idle(max(5, options.rounds // 5))
    cycles = {"ours": garbage(checkpoint), "torch": garbage(stock)}
    calls = {"ours": debug_calls(checkpoint), "torch": debug_calls(stock)}
    figures = []
    for name in ("ours", "torch"):
        early, late = calls[name]
        print(f"{name:>6}: no_grad +{added[name]:.2f} us, {cycles[name]} objects of cyclic garbage per 100 regions,")
        print(f"        debug: {early} Python calls in region 20, {late} in region 600")
        figures.append(
            {"engine": name, "no_grad_us": round(added[name], 2), "garbage": cycles[name], "debug_calls": [early, late]}
        )
    idle_us, (early, late) = added["ours"], calls["ours"]
    goals = [
        Goal(
            "a region under `torch.no_grad()`", f"{idle_us:.2f} us (torch {added['torch']:.2f})", "1 us", idle_us <= 1
        ),
        Goal(
            "objects of cyclic garbage per 100 regions",
            f"{cycles['ours']} (torch {cycles['torch']})",
            "0",
            not cycles["ours"],
        ),
        Goal(
            "Python calls of `checkpoint(debug=True)`, the 600th beside the 20th",
            f"{late} and {early} (torch {calls['torch'][1]} and {calls['torch'][0]})",
            "the same",
            early == late,
        ),
    ]
    finish(options, figures, goals)


if __name__ == "__main__":
    main()
