"""The common part of all commands: output options, exit codes, progress, tables, files, the JSON document.

`add_options` gives a command `--json`, `--quiet` and, where there is something to draw, `--plot`; `Output.of` refuses,
before anything is computed, what could not be printed or drawn afterwards. The command then works within `at_work` or
`progress`, and passes its result to `give`.

The result goes to stdout, everything else to stderr. A key that ends in `_bytes` holds whole bytes, one in `_seconds` a
float; what is not a finite number is null. With `NO_COLOR` there is no escape sequence at all. rich and matplotlib are
imported where they are used, so that everything else works without them.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import re
import sys
import textwrap
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch_recompute_cli import COMMANDS, Parser

from .. import errors
from ..errors.text import at_work
from ..errors.text import document as document
from ..plan.plan import Plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table

OK = 0
"""Exit code: done, and every check passed."""
FAILED = 1
"""Exit code: done, and a check failed; the output says which."""
USAGE = 2
"""Exit code: cannot be done; stderr says what was passed, what was expected and what to write."""
TOO_SMALL = 3
"""Exit code: nothing fits into the memory there is; stderr says what would."""
INTERRUPTED = 130

MIB, GIB = 2**20, 2**30
PICTURES = (".png", ".svg", ".pdf")


@contextmanager
def collecting_rarely() -> Generator[None]:
    """Lets Python look for cyclic garbage rarely: a simulation makes little, and looking took a sixth of a command."""
    before = gc.get_threshold()
    gc.set_threshold(500_000, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def new_command(commands: Any, name: str, about: str = "") -> Parser:
    """Returns the parser of a new command; `about` describes a command of a command."""
    about = about or COMMANDS[name]
    return cast("Parser", commands.add_parser(name, help=about, description=about))


def add_options(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int], *, plot: str = "", as_well: str = ""
) -> None:
    """Gives a command the common options, and the function that runs it and returns the exit code.

    `plot` describes the picture of a command that draws one, and `as_well` is another name for `--plot`.
    """
    if plot:
        names = ("--plot", as_well) if as_well else ("--plot",)
        help = f"draw {plot}: a .png, .svg or .pdf file"
        parser.add_argument(*names, dest="plot", type=Path, metavar="FILE.png", help=help)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    parser.add_argument("--quiet", action="store_true", help="say nothing of the work while it is done")
    parser.add_argument("--verbose", action="store_true", help="log operations that fail in a simulation")
    parser.set_defaults(command=run)


def add_explain(parser: argparse.ArgumentParser) -> None:
    """Gives a command `--explain`."""
    parser.add_argument("--explain", action="store_true", help="say after the result what its words mean")


@dataclass(frozen=True)
class Output:
    """The output options of a command line: JSON instead of a table, no progress, and a file for a picture."""

    json: bool = False
    quiet: bool = False
    plot: Path | None = None

    @staticmethod
    def of(args: argparse.Namespace) -> Output:
        """Reads the options of a command line; refuses those that cannot be followed."""
        output = Output(args.json, args.quiet, getattr(args, "plot", None))
        if getattr(args, "verbose", False):
            logging.getLogger("torch_recompute").setLevel(logging.DEBUG)
        if output.plot is not None:
            if output.plot.suffix.lower() not in PICTURES:
                raise errors.ArgumentError(
                    f"--plot is {output.plot!s}; expected a file name that ends in {', '.join(PICTURES)}. Write for "
                    "example --plot plan.png"
                )
            check_folder("--plot", output.plot)
            if find_spec("matplotlib") is None:
                raise errors.ArgumentError(
                    f"--plot is {output.plot!s}, but the package matplotlib, which draws it, is not installed. Write: "
                    "pip install torch-recompute[plot]"
                )
        if not output.json and find_spec("rich") is None:
            raise errors.ArgumentError(
                "tables are printed by the package rich, which is not installed. Write: pip install "
                "torch-recompute[cli], or add --json"
            )
        return output

    @contextmanager
    def at_work(self, word: str) -> Generator[None]:
        """Shows on a terminal what is being done, in a line that goes when it ends; in a pipe, every ten seconds."""
        with at_work(word, show=not self.quiet, lines=True):
            yield

    @contextmanager
    def progress(self, total: int) -> Generator[Callable[[str], None]]:
        """Shows progress on stderr; yields a function to call after each of `total` pieces of work, with a word.

        Lines of `at_work` inside are not shown.
        """
        with at_work("", show=False):
            if not self.quiet and _moves():
                from rich.console import Console
                from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

                columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), TimeRemainingColumn())
                with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
                    task = bar.add_task("starting", total=total)
                    yield lambda word: bar.update(task, advance=1, description=word)
                return
            done = 0

            def line(word: str) -> None:
                nonlocal done
                done += 1
                if not self.quiet and done * 10 // total != (done - 1) * 10 // total:
                    sys.stderr.write(f"{100 * done // total:3d}%  {word}\n")

            yield line

    def give(self, data: Callable[[], str], table: Callable[[Console], object]) -> None:
        """Prints the result, in the one form or the other."""
        if self.json:
            sys.stdout.write(data() + "\n")
        else:
            table(new_console())


def new_console(*, highlight: bool = False) -> Console:
    """Returns the console that results are printed on: as wide as a terminal, of any width elsewhere, as in a pipe."""
    from rich.console import Console

    plain: dict[str, Any] = {"force_terminal": False, "color_system": None} if _no_color() else {}
    if not sys.stdout.isatty():
        return Console(highlight=highlight, soft_wrap=True, width=10**5, **plain)

    class Folding(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            super().print(*(_folded(one, self.width) if isinstance(one, str) else one for one in objects), **options)

    return Folding(highlight=highlight, **plain)


def _folded(text: str, width: int) -> str:
    """Breaks lines that are too long between words; what is left of a row of a table stays in its last column."""
    found: list[str] = []
    for line in text.splitlines():
        column = max((gap.end() for gap in re.finditer(r"^ +| {2,}", line)), default=0)
        below = " " * (column if column + 30 <= width else 2)
        found += textwrap.wrap(line, width, subsequent_indent=below, break_long_words=False) or [""]
    return "\n".join(found)


def new_table(*titles: str) -> Table:
    """Returns a table of rich: a column without a title is aligned to the left, the others to the right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    for title in titles:
        table.add_column(title, justify="right" if title else "left")
    return table


@contextmanager
def drawing(path: Path, size: tuple[float, float], dpi: int = 150) -> Generator[Figure]:
    """Yields an empty picture, which is written to `path` at the end."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    yield figure
    with writing("--plot", path):
        figure.savefig(path, dpi=dpi)


def check_folder(option: str, path: Path) -> None:
    """Refuses, before the work, a file that is in no folder."""
    if not path.parent.is_dir():
        raise _cannot_write(option, path, f"there is no folder {path.parent}")


@contextmanager
def writing(option: str, path: Path) -> Generator[None]:
    """Turns an error of the system while a file is written into one of the command line."""
    try:
        yield
    except OSError as error:
        raise _cannot_write(option, path, reason(error)) from error


def _cannot_write(option: str, path: Path, why: str) -> errors.ArgumentError:
    return errors.ArgumentError(
        f"{option} is {path}: {why}. Write the path of a file in a folder that is there, and that may be written."
    )


def write_text(option: str, path: Path, text: str) -> None:
    """Writes a text to the file that an option names."""
    with writing(option, path):
        path.write_text(text, encoding="utf-8")


def reason(error: OSError) -> str:
    """Returns the system's reason for an error, in lower case."""
    return (error.strerror or str(error)).lower()


def write_plan(path: Path, plan: Plan, words: Mapping[str, str | int] | None = None) -> None:
    """Writes a plan to a file, for `Plan.from_json` to read, and the words of the step that it is for."""
    data = json.loads(plan.to_json())
    write_text("--out", path, json.dumps(data if words is None else {**data, "task": words}, indent=1) + "\n")


def read_plan(path: Path, option: str = "--plan") -> Plan:
    """Reads the plan in a file that an option names."""
    return read_planned(path, option)[0]


def read_planned(path: Path, option: str) -> tuple[Plan, Any]:
    """Reads a plan, and the words of its step (None where the file has none), at once: a pipe can be read only once."""
    try:
        text = path.read_text(encoding="utf-8")
        return Plan.from_json(text), json.loads(text).get("task")
    except OSError as error:
        why = reason(error)
    except UnicodeDecodeError:
        why = "is no text"
    except errors.ArgumentError as error:
        why = str(error).partition("\n")[0].rstrip(".")
    raise errors.ArgumentError(
        f"{option} is {path!s}: {why}. Write the path of a file that torch-recompute plan MODEL --budget ... --out "
        "plan.json has made, or that holds plan.to_json()."
    )


def _no_color() -> bool:
    return bool(os.environ.get("NO_COLOR"))


def _moves() -> bool:
    """Returns whether stderr may show a moving bar; without rich, or with `NO_COLOR`, progress is lines."""
    return sys.stderr.isatty() and not _no_color() and find_spec("rich") is not None
