"""How the commands show that they are at work: a bar where it can move, elsewhere a line at every tenth, on stderr.

Where it is not known how much there is to do, one line says what is being done.

stdout belongs to the result, so that `--json` can be piped. rich is imported late, so that everything else works
without it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager


@contextmanager
def progress_shown(total: int, *, moving: bool) -> Generator[Callable[[str], None]]:
    """Show progress; what is yielded is to be called after each of `total` pieces of work, with a word on it."""
    if moving:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("starting", total=total)

            def advance(word: str) -> None:
                bar.update(task, advance=1, description=word)

            yield advance
        return
    done = 0

    def line(word: str) -> None:
        nonlocal done
        done += 1
        if done * 10 // total != (done - 1) * 10 // total:
            sys.stderr.write(f"{100 * done // total:3d}%  {word}\n")
            sys.stderr.flush()

    yield line


@contextmanager
def at_work(word: str, *, moving: bool) -> Generator[None]:
    """Say what is being done while it is: a line that goes away where it can, else one that stays."""
    if moving:
        from rich.console import Console

        with Console(stderr=True).status(word):
            yield
        return
    sys.stderr.write(f"{word} ...\n")
    sys.stderr.flush()
    yield
