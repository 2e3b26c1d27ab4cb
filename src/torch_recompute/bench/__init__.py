"""`torch-recompute bench`: settings compared on a model of the user's, on the user's machine."""

from __future__ import annotations

import argparse
from typing import Any, cast

from . import run

__all__ = ["add_command", "run"]


def add_command(commands: Any) -> None:
    """Describe `torch-recompute bench` and its benchmarks to the command line."""
    about = "measure what recomputation saves and costs"
    parser = cast("argparse.ArgumentParser", commands.add_parser("bench", help=about, description=about))
    run.add_command(parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True))
