"""The command `torch-recompute`: its list of commands, without importing torch.

Beside the package, because importing the package imports torch, which takes seconds; help takes none. Any other command
line is one of `python -m torch_recompute`.
"""

from __future__ import annotations

import argparse
import difflib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
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

SHELLS = ("bash", "zsh", "fish")


class Completion(argparse.Action):
    """Prints what completes the command line in a shell, made by shtab from the parsers themselves."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        """Ends the process. `args`: the namespace, and the shell."""
        try:
            import shtab
        except ImportError:
            parser.error(
                "--completion is made by the package shtab, which is not installed. Write: pip install "
                "torch-recompute[cli]"
            )
        _complete_files(parser, shtab.FILE)
        sys.stdout.write(shtab.complete(parser, shell=str(args[1])) + "\n")
        parser.exit()


def _complete_files(parser: argparse.ArgumentParser, files: Any) -> None:
    """Has files completed for arguments that are paths, of all commands."""
    for action in parser._actions:  # pyright: ignore[reportPrivateUsage]
        if action.type is Path or action.metavar == "MODEL":
            action.complete = files  # type: ignore[attr-defined]
        if isinstance(action, argparse._SubParsersAction):  # pyright: ignore[reportPrivateUsage]
            for inner in dict.fromkeys(action.choices.values()):  # pyright: ignore[reportUnknownArgumentType]
                _complete_files(inner, files)


def new_parser(version: str = "") -> tuple[argparse.ArgumentParser, Any]:
    """The command line without its commands, and that to which they are added."""
    parser = argparse.ArgumentParser(
        prog="torch-recompute",
        description="Activation recomputation for PyTorch.",
        epilog="exit codes: 0 done, 1 a check failed, 2 a wrong command line, 3 it does not fit into memory",
    )
    parser.add_argument("--version", action="version", version=f"torch-recompute {version}")
    parser.add_argument("--completion", action=Completion, choices=SHELLS, help="print the completion for a shell")
    return parser, parser.add_subparsers(title="commands", metavar="COMMAND", required=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line, by default that of the process, and returns its exit code."""
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help"):
        parser, commands = new_parser()
        for name, about in COMMANDS.items():
            commands.add_parser(name, help=about)
        parser.parse_args(words)  # prints, and ends the process
    elif words[0] not in COMMANDS and not words[0].startswith("-"):
        near = "".join(f"; close to it: {name}" for name in difflib.get_close_matches(words[0], COMMANDS, n=1))
        new_parser()[0].error(f"{words[0]!r} is no command{near}. Commands are {', '.join(COMMANDS)}.")
    sys.argv = ["torch-recompute", *words]
    runpy.run_module("torch_recompute", run_name="__main__")  # which ends the process
    return 0
