"""From two runs of a region to the rows of an audit.

A region whose inputs are not those of the first run, because they were changed or are rebuilt by a region that was
found to differ, is not compared: every one of its operations would differ, and the fault lies elsewhere. What a region
inside another was found to do is not said again of the outer one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torch import nn

from .. import errors
from ..memory.ledger import storages
from . import advice
from .comparing import Difference, Entry, first_difference, flips
from .listing import KINDS, Row
from .recorder import Record, Written
from .rerun import Outcome


class Findings:
    """The rows found so far.

    Args:
        modules: The model's modules and their paths.
    """

    def __init__(self, modules: Iterable[tuple[nn.Module, str]]) -> None:
        self._rows: dict[tuple[str, ...], Row] = {}
        self._names: dict[int, tuple[str, str]] = {}
        for module, path in modules:
            for kind, tensors in (("buffer", module.named_buffers), ("parameter", module.named_parameters)):
                for name, tensor in tensors(recurse=False):
                    for _, storage in storages(tensor):
                        self._names.setdefault(id(storage), (kind, f"{path}.{name}".removeprefix(".")))

    def sorted(self, regions: Sequence[str]) -> tuple[Row, ...]:
        """The rows, region by region, kind by kind."""
        order = {name: i for i, name in reversed(list(enumerate(regions)))}
        return tuple(
            sorted(self._rows.values(), key=lambda row: (order.get(row.region, len(order)), KINDS.index(row.kind)))
        )

    def add(self, first: Record, second: Outcome) -> None:
        """What a second run shows."""
        name, error = first.frame.name, second.error
        before = len(self._rows)
        self._mutations(first, second)
        inner = {entry.region for entry in first.entries} - {name}
        for place in second.places:
            self._put(Row("mutates", name, "", "", "", f"{place} is changed", advice.ATTRIBUTE), inner)
        for generator in second.generators:
            what, write = advice.of_generator(generator)
            self._put(Row("mutates", name, "", "", "", f"{what} is advanced", write), inner)
        if second.changed is not None and len(self._rows) == before:
            self._put(Row("mutates", name, "", "", "", _first_line(second.changed), advice.CHANGED), inner)
        if not second.inputs_differ:
            self._differences(first, second)
        self._waits(first, second)
        known = isinstance(error, errors.MismatchError) and (second.inputs_differ or len(self._rows) > before)
        if error is not None and not known and not second.inputs_differ:
            detail = f"{type(error).__name__}: {_first_line(error)}"
            self._put(Row("fails", name, "", "", "", detail, advice.FAILS), inner)

    def add_flips(self, first: Record, third: Outcome) -> None:
        """What a run over disturbed inputs shows."""
        for entry, moved in flips(first.entries, third.record.entries):
            self._put(_row("flips", entry, f"with inputs slightly off {moved}", advice.CARRY))

    def _mutations(self, first: Record, second: Outcome) -> None:
        restored = first.frame.restored
        for key, written in {**second.record.written, **first.written}.items():
            lasting = written.argument and not written.is_among(restored)
            if lasting or key in second.rewritten:
                label, write = self._label(written, second)
                self._put(_row("mutates", written.entry, f"{label} is changed in place", write))

    def _label(self, written: Written, second: Outcome) -> tuple[str, str]:
        key = id(written.storage)
        if key in self._names:
            kind, name = self._names[key]
            return f"{kind} '{name}'", advice.BUFFER if kind == "buffer" else advice.TENSOR
        if written.argument:
            return written.argument, advice.ARGUMENT
        return second.names.get(key, "a tensor from outside of the region"), advice.TENSOR

    def _differences(self, first: Record, second: Outcome) -> None:
        shorter = second.error is not None or second.ended_early or _may_leave_out(first)
        found = first_difference(first.entries, second.record.entries, shorter)
        writing = [written.entry for key, written in first.written.items() if key in second.rewritten]
        if found is not None and found.entry not in writing:  # else its output is what it should not write to
            self._put(_row("differs", found.entry, found.detail, self._against(found, second)))
        for entry, moved in flips(first.entries, second.record.entries):
            if found is None or entry is not found.entry:
                self._put(_row("flips", entry, moved, advice.CARRY))

    def _against(self, found: Difference, second: Outcome) -> str:
        return advice.of_difference(found, second.generators, second.places)

    def _waits(self, first: Record, second: Outcome) -> None:
        waits = second.record.waits if second.record.entries else first.waits
        modules = {(wait.what, wait.line): wait.module for wait in first.waits}  # the second run is called by none
        for wait, times in Counter(waits).items():
            often = "once" if times == 1 else f"{times} times"
            module = modules.get((wait.what, wait.line), wait.module)
            row = Row("syncs", wait.region, wait.what, module, wait.line, "", advice.WAIT, times)
            self._put(row._replace(detail=f"the replay waits for the device {often}"))

    def _put(self, row: Row, inner: Iterable[str] = ()) -> None:
        """Adds a row, unless it is known, of this region or of one of those `inner` to it."""
        said = row.detail if row.kind == "mutates" else ""
        for region in (row.region, *inner):
            if (row.kind, region, row.op, row.module, row.line, said) in self._rows:
                return
        self._rows[row.kind, row.region, row.op, row.module, row.line, said] = row


def _may_leave_out(first: Record) -> bool:
    """Whether a replay is meant to do less than the forward: a value was saved for it, or the code asks what it is."""
    trace = first.frame.trace
    asked = any(_ASKING.intersection(code.co_names) for code, _ in first.scopes.values())
    return asked or (trace is not None and bool(trace.values))


_ASKING = frozenset({"doing_recompute", "is_recomputing", "get_recompute_data"})


def _row(kind: str, entry: Entry, detail: str, write: str) -> Row:
    return Row(kind, entry.region, entry.op, entry.module, entry.line, detail, write)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
