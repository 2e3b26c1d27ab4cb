"""Writes down what the regions of a model do: their operations, their waits for the device, the memory they write to.

A dispatch mode sees every operation, those inside torch's own functions too; `waits.py` adds what the code called it.
Which region an operation belongs to is read off the Python stack: the frames of the regions that it runs in. What runs
in a saved call or in `replay(fn)` is not repeated and not written down; neither is the engine's own work.

Memory that an operation leaves as it was (`torch.empty`) is zeroed, so that it cannot differ from run to run.

Invariants. Nothing here holds a tensor of the model's run, but for storages that were there before and are written to:
these are kept with a copy, to be put back. Regions keep the modes that were active around them: `end` empties both.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Container, Generator, Iterable, Mapping
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from .. import _compat, _tree
from .._compat.fakes import traced
from .._frame import Frame
from .._observer import running
from .._replay import Replay
from .._saved_call import call_again, record_call
from ..memory.ledger import storages
from ..memory.operations import Allocation, Allocations, kind_of, leaves
from .comparing import Chosen, Entry, Print, print_of
from .waits import Wait, wait_of

aten = torch.ops.aten
_ROOT = os.path.dirname(os.path.dirname(__file__)) + os.sep
_ENGINE = frozenset(
    f"{_ROOT}{name}.py"
    for name in (
        *("_saved_call", "_tree", "_inputs", "_slots", "_frame", "_replay", "_late", "_discard", "_mismatch"),
        *("_reach", "stores", "values", "state"),
    )
)
_ENDS = (record_call.__code__, call_again.__code__, Allocations.run.__code__)
_VALUES = f"{_ROOT}values.py"
_CHOICES = {"aten.topk": 1, "aten.argmax": 0, "aten.argmin": 0, "aten.sort": 1, "aten.argsort": 0}
_SORTS = frozenset({"aten.sort", "aten.argsort"})
_UNDEFINED = frozenset(
    {"aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty", "aten.new_empty_strided"}
)
_STATISTICS = frozenset({"aten.native_batch_norm", "aten.cudnn_batch_norm", "aten.miopen_batch_norm"})


class Written(NamedTuple):
    """Memory that a region did not make and writes to.

    Attributes:
        storage: The memory.
        before: What it held before.
        entry: The operation that wrote first.
        argument: Which argument of the region it is; "" if none.
    """

    storage: torch.UntypedStorage
    before: torch.UntypedStorage
    entry: Entry
    argument: str

    def same(self, content: torch.UntypedStorage) -> bool:
        """Whether the memory holds this."""
        return self.storage.nbytes() == content.nbytes() and torch.equal(_bytes(self.storage), _bytes(content))

    def is_among(self, identities: Container[int]) -> bool:
        """Whether its identity, as `_compat.storage_id` gives it, is one of these."""
        return _compat.storage_id(_bytes(self.storage)) in identities


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class Record:
    """One run of one region.

    Attributes:
        frame: The region's call.
        start: How many storages had been made before it.
        entries: Its operations, in order.
        waits: Its waits for the device.
        written: The memory outside of it that it wrote to, by `id` of the storage.
        scopes: The user's functions that ran in it: code and globals.
        inputs: What is kept of the tensors it was called with.
        arguments: What to call the memory of those, by `id` of the storage, while it runs.
        line: The line that called it.
    """

    def __init__(self, frame: Frame, start: int = 0) -> None:
        self.frame = frame
        self.start = start
        self.line = ""
        self.entries: list[Entry] = []
        self.waits: list[Wait] = []
        self.written: dict[int, Written] = {}
        self.scopes: dict[int, tuple[CodeType, dict[str, Any]]] = {}
        self.inputs: list[Print | None] = []
        self.arguments: dict[int, str] = {}


class _Place(NamedTuple):
    line: str
    near: str
    region: str
    records: list[Record]


class Recorder(Allocations):
    """Sees operations, modules and regions while a model runs.

    Args:
        names: What to call a module, by its `id`.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__(names)
        self.records: dict[int, Record] = {}
        self.kept: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.calling = ""
        self.waited = 0
        self._made: dict[int, tuple[Allocation, int]] = {}
        self._count = 0
        self._again: tuple[CodeType, Record] | None = None
        self._listening = True

    def end(self) -> None:
        """Lets go of everything: regions hold this mode, and the records hold regions."""
        self.records, self.kept, self._made, self._again = {}, {}, {}, None

    @contextlib.contextmanager
    def deaf(self) -> Generator[None]:
        """Nothing is written down meanwhile."""
        before, self._listening = self._listening, False
        try:
            yield
        finally:
            self._listening = before

    @contextlib.contextmanager
    def listening_to(self, code: CodeType, record: Record) -> Generator[None]:
        """Everything that runs below a call of `code` is written down in `record`."""
        before, self._listening, self._again = self._listening, True, (code, record)
        record.start = self._count
        try:
            yield
        finally:
            self._listening, self._again = before, None

    # --- operations -----------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not (self._running and self._listening) or traced():
            return func(*args, **kwargs)
        op = str(getattr(func, "overloadpacket", func))
        with _no_function_modes():
            place = self._place()
            entry = Entry(op, self._module(), "", "")
            if place is not None:
                entry.line, entry.near, entry.region = place.line, place.near, place.region
            written = [*_compat.written_by(func, args, kwargs), *(args[3:5] if op in _STATISTICS else ())]
            self._before_writing(written, entry, () if place is None else place.records)
        out = func(*args, **kwargs)
        with _no_function_modes():
            if op in _UNDEFINED:
                out.zero_()
            self._look(func, (args, kwargs), out)
            self._number(out)
            if place is not None and place.records and op != "aten.detach":
                self._describe(entry, func, args, kwargs, out, written)
                what = wait_of(op, func, args, kwargs, out)
                what = what and (self.calling or what)
                for record in place.records:
                    record.entries.append(entry)
                    if what:
                        record.waits.append(Wait(what, entry.module, entry.line, entry.region))
                self.waited += bool(what)
        return out

    def _describe(self, entry: Entry, func: Any, args: Any, kwargs: Any, out: Any, written: list[Any]) -> None:
        results = list(leaves(out))
        entry.metas = [(tuple(tensor.shape), tensor.dtype) for tensor in results]
        if isinstance(out, (bool, int, float)):
            entry.metas.append(out)
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            entry.random = "a generator" if any(isinstance(v, torch.Generator) for v in kwargs.values()) else "random"
        inputs = {id(storage) for _, storage in storages((args, kwargs))}
        shown = results if type(out) is list else results[:1]
        if entry.op in _CHOICES and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
            shown = results
            indices = results[_CHOICES[entry.op]]
            entry.chosen = Chosen(_chosen(entry.op, indices.detach(), args, kwargs), entry.op in _SORTS)
        if not list(leaves(written)):  # else it is the memory of an input, but with other contents
            shown = [tensor for tensor in shown if not {id(storage) for _, storage in storages(tensor)} & inputs]
        entry.prints = [kept for kept in map(print_of, shown) if kept is not None]

    def wait(self, what: str) -> None:
        """Notes a call that waits for the device and ran no operation that was seen to."""
        if self._running and self._listening:
            place = self._place()
            for record in () if place is None else place.records:
                record.waits.append(
                    Wait(what, self._module(), place.line if place else "", place.region if place else "")
                )

    # --- memory ---------------------------------------------------------------------------------------------------

    def _number(self, out: Any) -> None:
        for tensor in leaves(out):
            for _, storage in storages(tensor):
                birth = self._births.get(id(storage))
                if birth is not None and self._made.get(id(storage), (None,))[0] is not birth:
                    self._count += 1
                    self._made[id(storage)] = birth, self._count

    def _made_at(self, storage: torch.UntypedStorage) -> int:
        """When a storage was made, counting those made while listening; 0 if it was there before."""
        birth, number = self._made.get(id(storage), (None, 0))
        return number if birth is not None and birth() is storage else 0

    def _before_writing(self, tensors: list[Any], entry: Entry, records: Iterable[Record]) -> None:
        for tensor in leaves(tensors):
            for _, storage in storages(tensor):
                made, key = self._made_at(storage), id(storage)
                if storage.nbytes() == 0 or storage.device.type == "meta":
                    continue
                if made == 0 and key not in self.kept:
                    self.kept[key] = storage, storage.clone()
                for record in records:
                    if made <= record.start and key not in record.written:
                        record.written[key] = Written(storage, storage.clone(), entry, record.arguments.get(key, ""))

    def _module(self) -> str:
        return self.name(self._modules[-1]) if self._modules else ""

    # --- places ---------------------------------------------------------------------------------------------------

    def _place(self) -> _Place | None:
        """Where the present operation runs; None for the engine's own, and for what no replay repeats."""
        line = fallback = region = ""
        near: str | None = None
        records: list[Record] = []
        decided = False
        frame: FrameType | None = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
        scopes: list[tuple[CodeType, dict[str, Any]]] = []
        again = self._again
        forwards = [at for at in running() if at.kind == "forward"]
        while frame is not None:
            code = frame.f_code
            if forwards and code is Frame.forward.__code__:
                decided, near = True, line or fallback if near is None else near
                at = forwards.pop()
                region = region or at.name
                if again is None:
                    records.append(self._record(at.run, at.args, at.kwargs))
            elif again is not None and code is again[0]:
                near = line or fallback if near is None else near
                records.append(again[1])
                region = region or again[1].frame.name
                line = line or fallback or again[1].line
                break
            elif code is Replay.go.__code__:
                return None
            elif code in _ENDS or (code.co_name == "choose" and code.co_filename == _VALUES):
                break
            else:
                kind = kind_of(code.co_filename)
                if kind == "library":
                    if not decided and code.co_filename in _ENGINE:
                        return None
                else:
                    decided = decided or kind == "user"
                    if not records:
                        scopes.append((code, frame.f_globals))
                    if kind == "user" and not line:
                        line = f"{code.co_filename}:{frame.f_lineno}"
                    elif kind == "nn" and not fallback:
                        fallback = f"{code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back
        for record in records:
            record.line = record.line or line
            for code, scope in scopes:
                record.scopes[id(code)] = code, scope
        return _Place(line or fallback, near or "", region, records)

    def _record(self, frame: Frame, args: Any, kwargs: Any) -> Record:
        record = self.records.get(id(frame))
        if record is None:
            record = self.records[id(frame)] = Record(frame, self._count)
            record.inputs = [print_of(tensor) for tensor in leaves([*args, kwargs])]
            call = _tree.Call(args, kwargs)
            for index in call.tensors:
                for _, storage in storages(call.leaves[index]):
                    record.arguments.setdefault(id(storage), call.label(index))
        return record


@contextlib.contextmanager
def _no_function_modes() -> Generator[None]:
    """The user's function modes do not see what the recorder does."""
    modes = _compat.function_modes()
    _compat.set_function_modes(())
    try:
        with torch.no_grad():
            yield
    finally:
        _compat.set_function_modes(modes)


def _chosen(op: str, indices: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The indices with those of one token in the last dimension."""
    if op in ("aten.argmax", "aten.argmin"):
        return indices.clone().unsqueeze(-1)
    place = 2 if op == "aten.topk" else 1
    dim = kwargs.get("dim", args[place] if len(args) > place else -1)
    if isinstance(dim, bool) or dim is None:
        dim = kwargs.get("dim", -1)
    return indices.clone().movedim(dim, -1) if indices.dim() else indices.clone().unsqueeze(0)
