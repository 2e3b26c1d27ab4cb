"""What a comparison looks like: one table of all settings, one of their ranks where there are several, and the verdict.

rich decides about colours; this file decides only what stands in the tables. It is imported late, so that everything
else works without rich.
"""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from ..._face import new_console
from .golden import Golden
from .result import OK, Result, Row

UNITS = ((2**30, "GiB"), (2**20, "MiB"))
NOTHING = "–"


def show(result: Result, saved: Golden, path: Path | None) -> None:
    """Print the tables, and which golden figures were written to `path`."""
    console = new_console(highlight=False, soft_wrap=True)
    config = result.config
    console.print(
        f"{config.workload.model}, {result.parameters:,} parameters, on {result.device}", style="bold", markup=False
    )
    unit = _unit(result)
    console.print(_settings(result, *unit))
    if len(result.rows[0].ranks) > 1:
        console.print(_ranks(result, *unit))
    for line in notes(result):
        console.print(line, markup=False)
    for row in result.rows:
        if row.result != OK:
            console.print(f"{row.result}: {row.name}: {row.detail}", style="bold red", markup=False)
    if path is not None:
        names = "; ".join(figure.name for figure in saved.figures.values())
        said = f"Golden figures of {names} written to {path}." if names else "No golden figure was written: none ran."
        console.print(said, markup=False)
    for label, text in result.how.items():
        console.print(f"{label[0].upper()}{label[1:]}: {text}.", style="dim", markup=False)


def notes(result: Result) -> list[str]:
    """What has to be known to read the table."""
    said: list[str] = []
    if result.taken:
        said.append(f"{result.taken} trials were taken from the file of results; --fresh runs them anew.")
    if result.noise_percent is not None:
        said.append(f"Noise: rounds of one setting lie up to {result.noise_percent:.1f} % apart.")
        if result.golden is not None and result.noise_percent > result.config.threshold:
            said.append("That is more than the threshold, so a regression may be noise: take more --rounds.")
    golden = result.golden
    if golden is not None:
        said.append(f"Golden: {golden.source}, with torch {golden.torch}.")
        others = [row.name for row in result.rows if row.golden is not None and row.golden.name != row.name]
        if others:
            said.append(f"Compared with a golden figure of another name: {', '.join(others)}.")
    compared = [row.compared_with for row in result.rows if row.compared_with not in (None, result.rows[0].name)]
    if compared:
        which = f"losses are compared with those of {compared[0]}" if compared[1:] else "no losses could be compared"
        said.append(f"The control did not finish, so {which}.")
    said += [f"FLOPs of {row.name} are not counted: {row.uncounted}" for row in result.rows if row.uncounted]
    return said


def _settings(result: Result, size: int, unit: str) -> Table:
    """The table of settings; the column of golden figures only where there are any."""
    per = result.rows[0].unit
    titles = ("", "TFLOP/s", "vs\ngolden", f"{per}\nper s", f"alloc.\n{unit}", f"reser.\n{unit}")
    titles += ("more\nmemory", "more\ntime", "replay", "result")
    rows = [titles, *(_cells(row, size, beside=row is not result.rows[0]) for row in result.rows)]
    shown = [number for number in range(len(titles)) if number != titles.index("vs\ngolden") or result.golden]
    table = _table(*(titles[number] for number in shown))
    for cells in rows[1:]:
        table.add_row(*(cells[number] for number in shown))
    return table


def _cells(row: Row, size: int, *, beside: bool) -> tuple[str | Text, ...]:
    return (
        Text(row.name),
        _flops(row.tflops),
        _percent(row.change_percent),
        NOTHING if row.per_second is None else f"{row.per_second:,.0f}",
        _bytes(row.allocated_bytes, size),
        _bytes(row.reserved_bytes, size),
        _percent(row.control_memory_percent if beside else None),
        _percent(row.control_time_percent if beside else None),
        NOTHING if row.replay_percent is None else f"{row.replay_percent:.1f}%",
        Text(row.result, style="green" if row.result == OK else "bold red"),
    )


def _ranks(result: Result, size: int, unit: str) -> Table:
    per = result.rows[0].unit
    table = _table("", "rank", "TFLOP/s", f"{per}\nper s", f"alloc.\n{unit}", f"reser.\n{unit}", "result")
    for row in result.rows:
        for rank in row.ranks:
            table.add_row(
                Text(row.name),
                str(rank.rank),
                _flops(rank.tflops),
                NOTHING if rank.per_second is None else f"{rank.per_second:,.0f}",
                _bytes(rank.allocated_bytes, size),
                _bytes(rank.reserved_bytes, size),
                rank.status,
            )
    return table


def _table(*titles: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for title in titles:
        words = title in ("", "result")
        least = {"": 9, "result": 10}.get(title)
        table.add_column(
            title, justify="left" if words else "right", no_wrap=not words, overflow="fold", min_width=least
        )
    return table


def _unit(result: Result) -> tuple[int, str]:
    """What bytes are counted in, so that the largest has at least two digits before the point."""
    most = max((row.allocated_bytes or 0 for row in result.rows), default=0)
    return next((unit for unit in UNITS if most >= 10 * unit[0]), UNITS[-1])


def _bytes(count: int | None, size: int) -> str:
    return NOTHING if count is None else f"{count / size:,.1f}"


def _flops(tflops: float | None) -> str:
    return NOTHING if tflops is None else f"{tflops:,.2f}" if tflops >= 10 else f"{tflops:.4f}"


def _percent(percent: float | None) -> str:
    return NOTHING if percent is None else f"{percent:+.1f}%"
