"""The command `torch-recompute`.

Each subcommand is a room of its own with two functions: `add_command`, which describes it to `argparse`, and the
`command` that this sets as its default, which runs it and returns the exit code; what all of them share is `_face.py`.
This file only dispatches, and turns what a user can mend into one line on stderr instead of a traceback.

Exit codes: 0 done; 1 a check failed (the output says which); 2 the command line asks for something that cannot be
done (stderr says what was passed, what was expected and what to write); 3 it does not fit into the memory there is
(stderr says what would); 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import __version__, bench, demo, doctor, plan_command, report, show, verify_command
from ._face import FAILED as FAILED
from ._face import INTERRUPTED, TOO_SMALL, USAGE
from ._face import OK as OK
from .errors import ArgumentError, BudgetError


def build_parser() -> argparse.ArgumentParser:
    """The command line of all subcommands."""
    parser = argparse.ArgumentParser(
        prog="torch-recompute",
        description="Activation recomputation for PyTorch.",
        epilog="exit codes: 0 done, 1 a check failed, 2 a wrong command line, 3 it does not fit into memory",
    )
    parser.add_argument("--version", action="version", version=f"torch-recompute {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    demo.add_command(commands)
    bench.add_command(commands)
    show.add_command(commands)
    plan_command.add_command(commands)
    verify_command.add_command(commands)
    doctor.add_command(commands)
    report.add_command(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: The arguments after the program's name; by default those of the process.

    Returns:
        The exit code; a malformed command line ends in `argparse`'s own `SystemExit(2)`.
    """
    return run(build_parser(), argv)


def run(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> int:
    """Run the command that a parser finds in a command line, and return its exit code.

    Args:
        parser: Of commands that set `command`, see `_face.add_options`.
        argv: The arguments after the program's name; by default those of the process.
    """
    args = parser.parse_args(argv)
    try:
        return args.command(args)
    except BudgetError as error:
        print(f"torch-recompute: {error}", file=sys.stderr)
        return TOO_SMALL
    except ArgumentError as error:
        print(f"torch-recompute: error: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
