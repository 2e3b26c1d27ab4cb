"""Two comparisons with peers, as programs: `python benchmarks/peers frontier` and `python benchmarks/peers discard`.

They have the options, the exit codes and the JSON documents of `torch-recompute`'s commands. Each comparison is a
package of its own beside this file, with `add_command`, which describes it, and the `command` that runs it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import discard
import frontier

from torch_recompute.commands import cli


def build_parser() -> argparse.ArgumentParser:
    """The command line of both."""
    parser = argparse.ArgumentParser(prog="python benchmarks/peers", description="Comparisons with peers.")
    comparisons = parser.add_subparsers(title="comparisons", metavar="COMPARISON", required=True)
    discard.add_command(comparisons)
    frontier.add_command(comparisons)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a comparison and return its exit code."""
    return cli.run(build_parser(), argv)
