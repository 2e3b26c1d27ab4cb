"""Records what the regions of a model do: their operations, their waits for the device, the memory they write to.

A dispatch mode sees every operation, those inside torch's own functions too. The engine says which regions it belongs
to (`state/observer.py`), the Python stack which line. What runs in a saved call or in `replay(fn)` is not repeated and
not recorded; neither is the engine's own work. An operation whose result is a number, or whose shape depends on values,
waits for the device; a function mode adds the calls that wait for an accelerator but run no operation on a CPU.

Of each result a sample is kept (`compare.py`), of a choice of experts (`topk`, `argmax`) all indices. `torch.empty` is
zeroed, so that it cannot differ from run to run. No tensor of the model's run is held, but storages that were there
before and are written to: these are kept with a copy, to be put back.
"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Callable, Container, Generator, Iterable, Mapping
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from .. import _torch
from .._torch import TorchDispatchMode
from .._torch.fakes import traced
from ..engine.region_call import Recording, RegionCall
from ..engine.taken import labelled
from ..engine.tiles import PLUMBING
from ..memory.ledger import leaves, storages
from ..memory.operations import ModuleStack, Operation, kind_of
from ..state.observer import Running, observing, running
from .compare import TensorSample, sample_of

T = TypeVar("T")
_ROOT = os.path.dirname(os.path.dirname(__file__)) + os.sep
_ENGINE = frozenset(
    f"{_ROOT}{name}.py"
    for name in (
        *("state/tape", "engine/saved_call", "engine/guards", "engine/slots", "engine/region_call", "engine/mismatch"),
        *("engine/discard", "engine/taken", "engine/exchange", "engine/modules", "state/values"),
        "state/__init__",
    )
)
_CHOICES = {"aten.topk": 1, "aten.argmax": 0, "aten.argmin": 0, "aten.sort": 1, "aten.argsort": 0}
_SORTS = frozenset({"aten.sort", "aten.argsort"})
_UNDEFINED = frozenset(
    {"aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty", "aten.new_empty_strided"}
)
_STATISTICS = frozenset({"aten.native_batch_norm", "aten.cudnn_batch_norm", "aten.miopen_batch_norm"})
_INDEXING = frozenset({"aten.index", "aten.index_put", "aten.index_put_", "aten._index_put_impl_"})
_WAITS: dict[Any, str] = {
    torch.Tensor.item: "item()",
    torch.Tensor.tolist: "tolist()",
    torch.Tensor.numpy: ".numpy()",
    torch.Tensor.cpu: ".cpu()",
    torch.Tensor.nonzero: "nonzero()",
    torch.Tensor.__bool__: "bool(tensor)",
    torch.Tensor.__int__: "int(tensor)",
    torch.Tensor.__float__: "float(tensor)",
    torch.Tensor.__index__: "a tensor as an index of Python",
}


class Indices(NamedTuple):
    """The indices that an operation such as `topk` picked."""

    values: torch.Tensor  # those of one token in the last dimension
    ordered: bool  # their order is the choice, as in a sort

    def moved(self, other: Indices) -> str:
        """Returns how many tokens another choice sends elsewhere, in words; "" for none."""
        if self.values.shape != other.values.shape or self.values.numel() == 0:
            return ""
        then, now = (one.values if one.ordered else one.values.sort(-1)[0] for one in (self, other))
        differ = (then != now).any(-1)
        what = "rows come in another order" if self.ordered else "tokens go elsewhere"
        return f"{int(differ.sum()):,} of {differ.numel():,} {what}" if differ.any() else ""


class RecordedOp:
    """One operation of a run: its name, as `aten.topk`, and the module, line and region that ran it."""

    __slots__ = ("chosen", "line", "metas", "module", "near", "op", "random", "region", "samples")

    def __init__(self, op: str, module: str, line: str = "", near: str = "", region: str = "") -> None:
        self.op, self.module, self.line, self.region = op, module, line, region
        self.near = near  # the line, if it is inside the region
        self.metas: list[Any] = []  # shape and dtype of each result; a number itself
        self.samples: list[TensorSample] = []  # of results; none of a view, whose memory has been looked at
        self.chosen: Indices | None = None
        self.random = False  # it draws random numbers

    def is_like(self, other: RecordedOp) -> bool:
        """Returns whether the other is the same operation at the same place."""
        return self.op == other.op and self.near == other.near


class Written(NamedTuple):
    """Memory that a region did not make and writes to, what it held before, and the first operation that wrote."""

    storage: torch.UntypedStorage
    before: torch.UntypedStorage
    op: RecordedOp
    argument: str

    def same(self, content: torch.UntypedStorage) -> bool:
        """Returns whether the memory holds this."""
        return self.storage.nbytes() == content.nbytes() and torch.equal(_bytes(self.storage), _bytes(content))

    def is_among(self, identities: Container[int]) -> bool:
        """Returns whether its identity, as `_torch.storage_id` gives it, is one of these."""
        return _torch.storage_id(_bytes(self.storage)) in identities


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class DeviceSync(NamedTuple):
    """A call that waits for the device."""

    what: str
    module: str
    line: str
    region: str


class RegionRun:
    """One run of one region's call: its operations, waits and writes."""

    def __init__(self, call: RegionCall, start: int = 0, line: str = "") -> None:
        self.call, self.line = call, line
        self.start = start  # how many storages had been made before it
        self.ops: list[RecordedOp] = []
        self.syncs: list[DeviceSync] = []
        self.written: dict[int, Written] = {}  # memory outside of it, by `id` of the storage
        self.scopes: dict[int, tuple[CodeType, dict[str, Any]]] = {}  # code and globals of the user's functions
        self.inputs: list[TensorSample | None] = []
        self.arguments: dict[int, str] = {}  # labels of their memory while it runs, by `id` of the storage


class _OpPlace(NamedTuple):
    line: str
    near: str
    region: str
    runs: list[RegionRun]


class Recorder(TorchDispatchMode):
    """A dispatch mode that records operations, with their modules and regions, while a model runs.

    Args:
        names: The names of modules, by `id`.
    """

    supports_higher_order_operators = True

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.modules = ModuleStack(names, others=True)
        self.runs: dict[int, RegionRun] = {}
        self.kept: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.calling = ""  # the call that runs, as the code writes it
        self.waited = 0  # how many operations that wait were seen
        self._made: dict[int, tuple[weakref.ref[Any], int]] = {}  # storages that were made, numbered in order
        self._count = 0
        self._running = False
        self._again: tuple[CodeType, RegionRun] | None = None
        self._recording = True

    def run(self, fn: Callable[[], T]) -> T:
        """Calls `fn` and records what runs meanwhile."""
        self._running = True
        try:
            with self.modules.following(), observing(), self:
                return fn()
        finally:
            self._running = False
            self.modules = ModuleStack({})

    def end(self) -> None:
        """Drops all records: regions hold this mode, and the runs hold regions."""
        self.runs, self.kept, self._made, self._again = {}, {}, {}, None

    @contextlib.contextmanager
    def paused(self) -> Generator[None]:
        """Records nothing meanwhile."""
        before, self._recording = self._recording, False
        try:
            yield
        finally:
            self._recording = before

    @contextlib.contextmanager
    def recording(self, code: CodeType, run: RegionRun) -> Generator[None]:
        """Records everything that runs below a call of `code` in `run`."""
        before, self._recording, self._again = self._recording, True, (code, run)
        run.start = self._count
        try:
            yield
        finally:
            self._recording, self._again = before, None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not (self._running and self._recording) or traced():
            return func(*args, **kwargs)
        name = str(getattr(func, "overloadpacket", func))
        with _no_function_modes():
            place = self._place()
            op = RecordedOp(name, self.modules.module, *(() if place is None else place[:3]))
            written = [*_torch.written_by(func, args, kwargs), *(args[3:5] if name in _STATISTICS else ())]
            self._before_writing(written, op, () if place is None else place.runs)
        out = func(*args, **kwargs)
        with _no_function_modes():
            if name in _UNDEFINED:
                out.zero_()
            self._number(Operation(func, args, kwargs, out))
            if place is not None and place.runs and name != "aten.detach" and not name.startswith("profiler."):
                _describe(op, func, args, kwargs, out, written)
                what = _sync_of(name, func, args, kwargs, out)
                for run in place.runs:
                    run.ops.append(op)
                    if what:
                        run.syncs.append(DeviceSync(self.calling or what, op.module, op.line, op.region))
                self.waited += bool(what)
        return out

    def wait(self, what: str) -> None:
        """Records a call that waits for the device and ran no operation that was seen to."""
        place = self._place() if self._running and self._recording else None
        if place is not None:
            for run in place.runs:
                run.syncs.append(DeviceSync(what, self.modules.module, place.line, place.region))

    # --- memory ---------------------------------------------------------------------------------------------------

    def _made_at(self, storage: torch.UntypedStorage) -> int:
        """Returns the number of this storage among those that were made; 0 if it was there before."""
        ref, number = self._made.get(id(storage), (None, 0))
        return number if ref is not None and ref() is storage else 0

    def _number(self, ran: Operation) -> None:
        for _, storage in ran.made:
            if not self._made_at(storage):
                self._count += 1
                self._made[id(storage)] = weakref.ref(storage), self._count

    def _before_writing(self, tensors: list[Any], op: RecordedOp, runs: Iterable[RegionRun]) -> None:
        for tensor in leaves(tensors):
            for _, storage in storages(tensor):
                made, key = self._made_at(storage), id(storage)
                if storage.nbytes() == 0 or storage.device.type == "meta":
                    continue
                if made == 0 and key not in self.kept:
                    self.kept[key] = storage, storage.clone()
                for run in runs:
                    if made <= run.start and key not in run.written:
                        run.written[key] = Written(storage, storage.clone(), op, run.arguments.get(key, ""))

    # --- places ---------------------------------------------------------------------------------------------------

    def _place(self) -> _OpPlace | None:
        """Returns the line and the runs of the present operation; None for the engine's own and in saved calls."""
        inside: list[Running] = []
        again = self._again
        for at in reversed(running()):
            if at.kind == "forward":
                inside.append(at)
            elif at.kind in ("saved call", "choice"):
                again = None  # no replay repeats it; regions in it are
                break
            else:
                return None
        if not inside and again is None:
            return None
        stack = _CodePlace.of(sys._getframe(2), again)  # pyright: ignore[reportPrivateUsage]
        if stack is None:
            return None
        if self._again is None:
            runs = [self._run_of(at.run, at.args, at.kwargs) for at in inside]
        else:
            runs = [] if again is None else [again[1]]
        for run in runs:
            run.line = run.line or stack.user_line
            run.scopes.update(stack.scopes)
        region = inside[0].name if inside else self._again[1].call.name if self._again else ""
        return _OpPlace(stack.line, stack.near, region, runs)

    def _run_of(self, call: RegionCall, args: Any, kwargs: Any) -> RegionRun:
        run = self.runs.get(id(call))
        if run is None:
            run = self.runs[id(call)] = RegionRun(call, self._count)
            run.inputs = [sample_of(tensor) for tensor in leaves([*args, kwargs])]
            for label, tensor in labelled(args, kwargs):
                for _, storage in storages(tensor):
                    run.arguments.setdefault(id(storage), label)
        return run


class _CodePlace(NamedTuple):
    """The lines of code that run an operation, and the user's functions inside the innermost region."""

    line: str
    user_line: str  # "" where no code of the user is on the stack
    near: str  # the line, if it is inside the innermost region
    scopes: dict[int, tuple[CodeType, dict[str, Any]]]

    @classmethod
    def of(cls, frame: FrameType | None, again: tuple[CodeType, RegionRun] | None) -> _CodePlace | None:
        """Walks up the stack from `frame` to the user's code; None for an operation of the engine itself.

        `again` is the function below which a region runs a second time, and that run.
        """
        line = fallback = ""
        near: str | None = None
        scopes: dict[int, tuple[CodeType, dict[str, Any]]] = {}
        engine = True  # no code of a user or of torch.nn has been met yet
        while frame is not None and not (line and near is not None):
            code = frame.f_code
            if code is Recorder.run.__code__:
                break
            kind = kind_of(code.co_filename)
            if code is Recording.run.__code__ or (again is not None and code is again[0]):
                engine, near = False, line or fallback if near is None else near
                if again is not None and code is again[0]:
                    line = line or fallback or again[1].line
                    break
            elif kind == "library":
                if engine and (code.co_filename in _ENGINE or code in PLUMBING):
                    return None
            else:
                engine = engine and kind != "user"
                if near is None:
                    scopes[id(code)] = code, frame.f_globals
                if kind == "user" and not line:
                    line = f"{code.co_filename}:{frame.f_lineno}"
                elif kind == "nn" and not fallback:
                    fallback = f"{code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back
        return cls(line or fallback, line, near or "", scopes)


class NamedSyncs(TorchFunctionMode):
    """Tells a recorder the Python call behind an operation that waits for the device."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        what = _WAITS.get(func)
        if what is None:
            return func(*args, **(kwargs or {}))
        recorder = self._recorder
        before, recorder.calling = recorder.calling, what
        count = recorder.waited
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            recorder.calling = before
        if recorder.waited == count:
            recorder.wait(what)
        return result


def _sync_of(name: str, func: Any, args: Any, kwargs: Any, out: Any) -> str:
    """Returns the name to print for an operation that waits for the device; "" for one that does not."""
    tags = getattr(func, "tags", ())
    if name in _INDEXING:
        return "a mask as an index" if any(t.dtype in (torch.bool, torch.uint8) for t in leaves(args[1])) else ""
    if name == "aten.repeat_interleave" and kwargs.get("output_size") is not None:
        return ""
    if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
        return name
    if name in ("aten._to_copy", "aten.copy_") and out.device.type == "cpu":
        source = args[1] if name == "aten.copy_" else args[0]
        return "a copy to the host" if source.device.type != "cpu" else ""
    return ""


def _describe(op: RecordedOp, func: Any, args: Any, kwargs: Any, out: Any, written: list[Any]) -> None:
    """Records what an operation returned."""
    results = leaves(out)
    op.metas = [(tuple(tensor.shape), tensor.dtype) for tensor in results]
    if isinstance(out, (bool, int, float)):
        op.metas.append(out)
    op.random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
    inputs = {id(storage) for _, storage in storages((args, kwargs))}
    shown = results if type(out) is list else results[:1]
    if op.op in _CHOICES and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
        shown = results
        op.chosen = Indices(_by_token(op.op, results[_CHOICES[op.op]].detach(), args, kwargs), op.op in _SORTS)
    kind, _, name = op.op.partition(".")
    if kind.startswith("_c10d_functional"):  # whose results are there after the wait
        shown = results if name == "wait_tensor" else []
    elif not leaves(written):  # else it is the memory of an input, but with other contents
        shown = [tensor for tensor in shown if not {id(storage) for _, storage in storages(tensor)} & inputs]
    op.samples = [sample for sample in map(sample_of, shown) if sample is not None]


def _by_token(name: str, indices: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Returns the indices with those of one token in the last dimension."""
    if name in ("aten.argmax", "aten.argmin"):
        return indices.clone().unsqueeze(-1)
    place = 2 if name == "aten.topk" else 1
    dim = kwargs.get("dim", args[place] if len(args) > place else -1)
    if isinstance(dim, bool) or dim is None:
        dim = kwargs.get("dim", -1)
    return indices.clone().movedim(dim, -1) if indices.dim() else indices.clone().unsqueeze(0)


@contextlib.contextmanager
def _no_function_modes() -> Generator[None]:
    """Takes the user's function modes off, so that they do not see the recorder's own operations."""
    modes = _torch.function_modes()
    _torch.set_function_modes(())
    try:
        with torch.no_grad():
            yield
    finally:
        _torch.set_function_modes(modes)
