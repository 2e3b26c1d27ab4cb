"""`torch-recompute bench`: the claims of this library as numbers, on your machine.

Each benchmark is a room of its own below this one, with the two functions that every command has: `add_command`,
which describes it to `argparse`, and the `command` that runs it. This file only lists them.
"""

from __future__ import annotations

import argparse
from typing import Any, cast

from . import discard, frontier, run

__all__ = ["add_command", "discard", "frontier", "run"]


def add_command(commands: Any) -> None:
    """Describe `torch-recompute bench` and its benchmarks to the command line."""
    about = "measure what recomputation saves and costs"
    parser = cast("argparse.ArgumentParser", commands.add_parser("bench", help=about, description=about))
    benchmarks = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    discard.add_command(benchmarks)
    frontier.add_command(benchmarks)
    run.add_command(benchmarks)
