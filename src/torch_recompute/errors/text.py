"""Results as text: a table with aligned columns for people, a JSON document for programs; and the line of long work.

Every table that a report, a plan or a command prints without colours is made here, so that all look alike: two spaces
between columns, nothing at the ends of lines. A notebook shows the same text as HTML: while it is made, tables mark
their cells (`in_html`), so that no result has a second way to print. Every document of a command begins with the same
two keys.
"""

from __future__ import annotations

import difflib
import functools
import html
import itertools
import json
import math
import re
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")
K = TypeVar("K")


def table(rows: Sequence[Sequence[str]], right: int | None = None) -> list[str]:
    """The rows as lines with aligned columns.

    Args:
        rows: The cells, equally many in each row. A cell with line breaks may only be the last of its row.
        right: How many columns, from the first, are aligned to the right; all by default.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = len(widths) if right is None else right
    if _for_notebook.get():
        return [_CELL.join((_ROW + str(right), *(cell.replace("\n", _BREAK) for cell in row))) for row in rows]
    return [
        "  ".join(
            cell.rjust(width) if place < right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


_for_notebook: ContextVar[bool] = ContextVar("for_notebook", default=False)
_ROW, _CELL, _BREAK = "\x1d", "\x1f", "\x1e"  # of a row in a text that becomes HTML


# Notebooks have smaller letters in tables than in lines; here both are alike.
_LOOK = "font-family: var(--jp-ui-font-family, sans-serif); font-size: 13px; line-height: 1.5; max-width: 110ch"


def in_html(result: object) -> str:
    """A printed result as HTML: its tables as tables, all else as lines."""
    token = _for_notebook.set(True)
    try:
        lines = str(result).split("\n")
    finally:
        _for_notebook.reset(token)
    parts: list[str] = []
    for is_row, group in itertools.groupby(lines, lambda line: _ROW in line):
        if is_row:
            parts.append(f'<table style="font-size: inherit">{"".join(map(_html_row, group))}</table>')
        else:
            parts.append(f'<div style="white-space: pre-wrap">{html.escape(chr(10).join(group))}</div>')
    return f'<div style="{_LOOK}">{"".join(parts)}</div>'


def _html_row(line: str) -> str:
    right, *cells = line.partition(_ROW)[2].split(_CELL)
    return "<tr>{}</tr>".format(
        "".join(
            f'<td style="text-align: {"right" if place < int(right) else "left"}; white-space: pre-wrap">'
            f"{html.escape(cell).replace(_BREAK, '<br>')}</td>"
            for place, cell in enumerate(cells)
        )
    )


def shown(result: type[T]) -> type[T]:
    """Makes a class that prints a text show its first line where Python shows values, and all of it in notebooks."""

    def short(self: object) -> str:
        first = str(self).partition("\n")[0]
        return f"<{type(self).__name__}: {first if len(first) <= WIDEST else first[: WIDEST - 3] + '...'}>"

    for name, method in (("__repr__", short), ("_repr_html_", in_html)):
        setattr(result, name, method)
    return result


WIDEST = 300  # characters of a result's first line, where it stands for all of it


def explained(words: Mapping[str, str]) -> str:
    """Words and what they mean, in two columns."""
    wide = max(map(len, words), default=0)
    rows = (paragraph(f"{word:{wide}}  {meaning}", hanging=wide + 2) for word, meaning in words.items())
    return "\n".join(line for row in rows for line in row)


def paragraph(text: str, indent: int = 0, hanging: int = 0) -> list[str]:
    """A text as lines that are not too long, with so many spaces before each; later ones may hang."""
    spaces = " " * indent
    more = spaces + " " * hanging
    return textwrap.wrap(
        text, 112, initial_indent=spaces, subsequent_indent=more, break_long_words=False, break_on_hyphens=False
    )


def starred(text: str) -> str:
    """The text with a star for each number: the pattern that paths of alike layers have in common."""
    return re.sub(r"\d+", "*", text)


def starred_path(text: str) -> str:
    """The text with a star for each number that is a whole part of a path: a layer's, not that of `fc1`."""
    return re.sub(r"(?<![^./\s'])\d+(?![^.\s'])", "*", text)


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items by what `key` says of each, in the order of the first of each group."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def counted(number: int, thing: str) -> str:
    """A number of things, as `1 region` or `3 regions`."""
    return f"{number} {thing}{'' if number == 1 else 'es' if thing.endswith('ch') else 's'}"


def listed(words: Sequence[str]) -> str:
    """Words, as `a, b and c`."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def close_to(word: str, known: Iterable[str], most: int = 2, say: Callable[[str], str] = str) -> str:
    """Says which known words are close to one that is not, as " Close to it: a or b."; "" where none is."""
    near = " or ".join(map(say, difflib.get_close_matches(word, list(known), n=most)))
    return f" Close to it: {near}." if near else ""


def times(number: int) -> str:
    """As `once` or `3 times`."""
    return "once" if number == 1 else f"{number} times"


def document(command: str, schema_version: int, data: Mapping[str, Any]) -> str:
    """The JSON document of a command's result.

    Args:
        command: Its name, as it is typed.
        schema_version: Of its document: one more when a key goes or changes its meaning.
        data: The rest, in order.
    """
    head = {"schema_version": schema_version, "command": command}
    return json.dumps(finite({**head, **data}), indent=1, allow_nan=False)


def finite(value: Any) -> Any:
    """Plain data with None for each number that is not finite, which JSON has no word for."""
    if isinstance(value, Mapping):
        return {str(key): finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- what long work is doing ---

SILENT = 0.5  # seconds that work may take without a word
LINES = 10.0  # seconds between the lines of a command whose stderr is no terminal


@contextmanager
def at_work(word: str, show: bool = True, lines: bool = False) -> Generator[None]:
    """Says what is being done, in a line that appears after half a second and goes when the work ends.

    On a terminal the line is on stderr, in a notebook an output of the cell. Into a file, a pipe or a log nothing is
    written, or a line every ten seconds. Work inside other work is said in its line.

    Args:
        word: What is being done, as "planning Llama".
        show: Whether anything is to be said, also of work inside.
        lines: Whether that holds for a file, a pipe or a log.
    """
    if _line.get() is not None:
        doing(word)
        yield
        return
    line = _Line(word)
    token = _line.set(line)
    write = _writer()
    run = line.log if write is None else functools.partial(line.show, write)
    shown = threading.Thread(target=run, daemon=True) if show and (lines or write is not None) else None
    if shown is not None:
        shown.start()
    try:
        yield
    finally:
        _line.reset(token)
        line.ended.set()
        if shown is not None:
            shown.join()


def doing(word: str, part: int = 0, of: int = 0) -> None:
    """Says what the present work is at, and how far it is."""
    line = _line.get()
    if line is not None:
        line.detail = f"{word}, {part} of {of}" if of else word


class _Line:
    """The line of the present work; it is written by a thread of its own, and the work only says words."""

    def __init__(self, word: str) -> None:
        self.word, self.detail, self.began = word, "", time.monotonic()
        self.ended = threading.Event()

    def show(self, write: Callable[[str, str], None]) -> None:
        """Writes the line twice a second until the work ends, then an empty one."""
        while not self.ended.wait(SILENT):
            write(*self._words())
        write("", "")

    def log(self) -> None:
        """Writes a line every ten seconds until the work ends."""
        while not self.ended.wait(LINES):
            sys.stderr.write("".join(self._words()) + "\n")
            sys.stderr.flush()

    def _words(self) -> tuple[str, str]:
        text = ": ".join(filter(None, (self.word, self.detail)))
        return text, f" ({time.monotonic() - self.began:.0f} s)"


_line: ContextVar[_Line | None] = ContextVar("line", default=None)


def _writer() -> Callable[[str, str], None] | None:
    """Returns what shows a line, and its seconds, instead of the one before; None for a file, a pipe or a log."""
    if type(sys.stderr).__module__.startswith("ipykernel."):
        return _in_notebook()
    return _on_terminal() if sys.stderr.isatty() else None


def _on_terminal() -> Callable[[str, str], None]:
    wide = 0

    def write(text: str, seconds: str) -> None:
        nonlocal wide
        if text or wide:
            text = text[: shutil.get_terminal_size().columns - 1 - len(seconds)] + seconds
            sys.stderr.write("\r" + text.ljust(wide) + ("" if text else "\r"))
            sys.stderr.flush()
            wide = len(text)

    return write


def _in_notebook() -> Callable[[str, str], None]:
    """A line that is an output of the cell, as stderr has a red ground there."""
    publisher = sys.modules["IPython"].get_ipython().display_pub
    shown = False

    def write(text: str, seconds: str) -> None:
        nonlocal shown
        if text or shown:
            line = f"<small>{html.escape(text + seconds)}</small>" if text else ""
            data = {"text/plain": text + seconds, "text/html": line}
            publisher.publish(data, transient={"display_id": f"torch_recompute {id(write)}"}, update=shown)
            shown = True

    return write
