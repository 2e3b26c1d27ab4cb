"""What all commands have in common: options, exit codes, what goes where, pictures, and the JSON document.

Problem. A person who knows one command should know all of them, and a script that reads one should be able to read
all. Said by each command for itself, that drifts.

Idea. A command is a Python function with a face. `add_options` gives it `--json`, `--quiet` and, where there is
something to draw, `--plot`; `Face.of` refuses, before anything is computed, what could not be shown after it; then
the command calls its function within `at_work` or `progress`, and hands the result to `give`.

Invariants, which `tests/test_face.py` holds all commands to. The result goes to stdout, as a table or with `--json` as
one document; everything else goes to stderr, and nothing does with `--quiet`. A document begins with `schema_version`
and `command`; a key that ends in `_bytes` holds whole bytes, one in `_seconds` a float, and what is not a finite
number is null. A terminal is coloured, unless `NO_COLOR` is set: then there is no escape sequence at all, of styles or
of moving bars. Exit codes are those below.

Rejected: a decorator that makes a command of any function. The options of a command are words for people, and do not
follow from a signature.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import _progress, errors

if TYPE_CHECKING:
    from rich.console import Console

OK = 0
"""It is done, and every check passed."""
FAILED = 1
"""It is done, and a check failed: the output says which."""
USAGE = 2
"""It cannot be done: stderr says what was passed, what was expected and what to write."""
TOO_SMALL = 3
"""Nothing fits into the memory there is: stderr says what would."""
INTERRUPTED = 130

PICTURES = (".png", ".svg", ".pdf")


def add_options(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int], *, plot: str = "", as_well: str = ""
) -> None:
    """Gives a command the options that all have, and the function that runs it.

    Args:
        parser: The command's.
        run: From the command line to the exit code.
        plot: What `--plot` draws; a command without it has nothing to draw.
        as_well: Another name for `--plot`.
    """
    if plot:
        names = [name for name in ("--plot", as_well) if name]
        parser.add_argument(
            *names, dest="plot", type=Path, metavar="FILE.png", help=f"draw {plot}: a .png, .svg or .pdf file"
        )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    parser.add_argument("--quiet", action="store_true", help="say nothing of the work while it is done")
    parser.set_defaults(command=run)


@dataclass(frozen=True)
class Face:
    """How one command is to show itself.

    Attributes:
        json: As a document instead of a table.
        quiet: Without a word about the work.
        plot: Where to draw; None for no picture.
    """

    json: bool = False
    quiet: bool = False
    plot: Path | None = None

    @staticmethod
    def of(args: argparse.Namespace) -> Face:
        """The face that a command line asks for.

        Raises:
            ArgumentError: It could not be shown: no such picture, no such folder, or a package is missing.
        """
        face = Face(args.json, args.quiet, getattr(args, "plot", None))
        if face.plot is not None:
            if face.plot.suffix.lower() not in PICTURES:
                raise errors.ArgumentError(
                    f"--plot is {face.plot!s}; expected a file name that ends in {', '.join(PICTURES)}. Write for "
                    "example --plot plan.png"
                )
            check_folder("--plot", face.plot)
            if find_spec("matplotlib") is None:
                raise errors.ArgumentError(
                    f"--plot is {face.plot!s}, but the package matplotlib, which draws it, is not installed. Write: "
                    "pip install torch-recompute[plot]"
                )
        if not face.json and find_spec("rich") is None:
            raise errors.ArgumentError(
                "tables are printed by the package rich, which is not installed. Write: pip install "
                "torch-recompute[cli], or add --json"
            )
        return face

    def at_work(self, word: str) -> AbstractContextManager[object]:
        """Says what is being done while it is."""
        return nullcontext() if self.quiet else _progress.at_work(word, moving=_moves())

    def progress(self, total: int) -> AbstractContextManager[Callable[[str], None]]:
        """Shows progress; what is entered is to be called after each of `total` pieces of work, with a word on it."""
        return nullcontext(_nothing) if self.quiet else _progress.progress_shown(total, moving=_moves())

    def give(self, data: Callable[[], str], table: Callable[[], object]) -> None:
        """Prints the result, in the one form or the other."""
        if self.json:
            sys.stdout.write(data() + "\n")
        else:
            table()


def document(command: str, schema_version: int, data: Mapping[str, Any]) -> str:
    """The JSON document of a command's result.

    Args:
        command: Its name, as it is typed.
        schema_version: Of its document: one more when a key goes or changes its meaning.
        data: The rest, in order.
    """
    head = {"schema_version": schema_version, "command": command}
    return json.dumps(_finite({**head, **data}), indent=1, allow_nan=False)


def new_console(*, highlight: bool = True, soft_wrap: bool = False) -> Console:
    """Where a table is printed; the options are those of rich."""
    from rich.console import Console

    if _no_color():
        return Console(highlight=highlight, soft_wrap=soft_wrap, force_terminal=False, color_system=None)
    return Console(highlight=highlight, soft_wrap=soft_wrap)


def check_folder(option: str, path: Path) -> None:
    """Refuses, before the work, a file that could not be written after it.

    Raises:
        ArgumentError: It lies in no folder.
    """
    if not path.parent.is_dir():
        raise errors.ArgumentError(errors.cannot_write(option, str(path), f"there is no folder {path.parent}"))


def write_text(option: str, path: Path, text: str) -> None:
    """Writes what an option asks for into a file.

    Raises:
        ArgumentError: The file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise errors.ArgumentError(errors.cannot_write(option, str(path), why)) from error


def _no_color() -> bool:
    return bool(os.environ.get("NO_COLOR"))


def _moves() -> bool:
    """Whether stderr may show what moves; without rich, and where colours are not wanted, there are lines."""
    return sys.stderr.isatty() and not _no_color() and find_spec("rich") is not None


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _nothing(_: str) -> None:
    pass
