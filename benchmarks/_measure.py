"""How every benchmark here takes its times: interleaved, in one process, medians, so that noise hits all alike."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def medians(variants: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each variant over `rounds` rounds, each round running all of them once."""
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for run in variants.values():
        run()
    for _ in range(rounds):
        for name, run in variants.items():
            start = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in taken.items()}


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    return {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}


def arguments(description: str, words: str = "", **lists: str) -> argparse.Namespace:
    """The options that every benchmark takes; words without an option; and options that take lists of words."""
    parser = argparse.ArgumentParser(description=description)
    if words:
        parser.add_argument("words", nargs="*", metavar="CASE", help=words)
    parser.add_argument("--rounds", type=int, default=100, help="rounds of interleaved runs (default 100)")
    parser.add_argument("--save", metavar="NAME", help="write the figures to benchmarks/results/NAME.json")
    for name, says in lists.items():
        parser.add_argument(f"--{name}", nargs="+", default=[], metavar="NAME", help=says)
    return parser.parse_args()


def finish(options: argparse.Namespace, figures: list[dict[str, Any]], passed: bool, **more: Any) -> None:
    """Prints the verdict and saves the figures, with what else there is to save."""
    print("verdict:", "reached" if passed else "NOT reached")
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{options.save}.json"
        path.write_text(json.dumps({**machine(), "reached": passed, **more, "figures": figures}, indent=1) + "\n")
        print("saved to", path)
