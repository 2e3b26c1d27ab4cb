"""The command `torch-recompute`: its list of commands, without importing torch.

Beside the package, because importing the package imports torch, which takes seconds; help takes none.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

COMMANDS = {
    "demo": "train a small GPT five ways side by side and compare memory, time, FLOPs and bits",
    "bench": "measure what recomputation saves and costs",
    "show": "the parts of a model, and the labels that match each",
    "plan": "a plan for a budget of memory: what to keep, what to recompute, what the step takes",
    "verify": "run a step with a plan and without it, and compare gradients, random states, buffers and routing",
    "doctor": "why a model is still out of memory, slow or wrong: findings, how each was confirmed, and what to write",
    "report": "a plan to look at: memory over the step, what other budgets would cost, the placements",
}


def new_parser(version: str = "") -> tuple[argparse.ArgumentParser, Any]:
    """The command line without its commands, and that to which they are added."""
    parser = argparse.ArgumentParser(
        prog="torch-recompute",
        description="Activation recomputation for PyTorch.",
        epilog="exit codes: 0 done, 1 a check failed, 2 a wrong command line, 3 it does not fit into memory",
    )
    parser.add_argument("--version", action="version", version=f"torch-recompute {version}")
    return parser, parser.add_subparsers(title="commands", metavar="COMMAND", required=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line, by default that of the process, and returns its exit code."""
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help"):
        parser, commands = new_parser()
        for name, about in COMMANDS.items():
            commands.add_parser(name, help=about)
        parser.parse_args(words)  # prints, and ends the process
    from torch_recompute.commands.cli import main as run

    return run(words)
