"""The command line: finds the command, runs it, and returns its exit code.

An error that the user can correct becomes one text on stderr instead of a traceback.

Exit codes: 0 done; 1 a check failed (the output says which); 2 the command line asks for something that cannot be
done (stderr says what was passed, what was expected and what to write); 3 it does not fit into the memory there is
(stderr says what would); 130 interrupted.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch_recompute_cli import new_parser

from .. import __version__
from ..errors import ArgumentError, BudgetError
from . import bench, calibrate, demo, doctor, plan, report, show, verify
from .output import FAILED as FAILED
from .output import INTERRUPTED, TOO_SMALL, USAGE
from .output import OK as OK


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser, commands = new_parser(__version__)
    for module in (demo, bench, show, plan, calibrate, verify, doctor, report):
        module.add_command(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line, by default that of the process, and returns its exit code.

    A malformed one ends in `argparse`'s own `SystemExit(2)`.
    """
    return run(build_parser(), argv)


def run(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> int:
    """Runs a command line of another parser, whose commands set `command` (`output.add_options`)."""
    args = parser.parse_args(argv)
    try:
        return args.command(args)
    except BudgetError as error:
        print(f"torch-recompute: {in_options(str(error), vars(args))}", file=sys.stderr)
        return TOO_SMALL
    except ArgumentError as error:
        print(f"torch-recompute: error: {in_options(str(error), vars(args))}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED


def in_options(text: str, options: Mapping[str, Any]) -> str:
    """An error's text in the words of a command line: `offload="64GiB"` is `--offload 64GiB` where that was given."""

    def written(found: re.Match[str]) -> str:
        name, value = found[1], found[2].strip("'\"")
        if options.get(name) is None or name.startswith("recompute_"):  # of a file, or a field of the same name
            return found[0]
        return f"--{name.replace('_', '-')}" + (f" {value}" if value not in ("", "True") else "")

    text = re.sub(r"""(?<![\w(.])(\w+)=("[^"]*"|'[^']*'|[\w.%]*)""", written, text)
    said = "  Let what MODEL names return the loss as well: (model, batch, loss), where loss takes the model's output."
    return re.sub(r"^  Say how .*loss=lambda.*$", said, text, flags=re.MULTILINE)
