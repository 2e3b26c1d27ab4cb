"""`audit`: runs each region twice; reports what differs, what waits for the device and what changes outside of it.

A replay must do what the forward did, or gradients may be silently wrong: a router sends a token to another expert, a
counter counts twice, NumPy draws other numbers. So the model runs forward once, under a recorder of operations
(`recorder.py`). Then each region's function runs again as a replay would, under the state that the engine recorded, but
to its end and the last region first, and the two lists of operations are compared: the cause is at the first operation
with another result. What the second run changed outside of itself, a replay would change a second time. With
`perturb=` a third run has slightly other inputs, and the choices of experts that come out differently are counted.

Nothing runs backward. Buffers, attributes, generators and tensors that operations wrote to are put back.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import _torch, errors
from .._torch.compiler import uncompiled
from .._torch.tensors import each_once
from ..engine.exchange import Exchange
from ..engine.guards import Opened
from ..engine.region_call import Phase, RegionCall, Replay
from ..engine.saved_call import ENDINGS, SavedCall, Then
from ..engine.slots import Packed, Stop, unpack
from ..errors.text import at_work, counted, grouped, paragraph, shown, starred_path, table, times
from ..memory.batch import Batch, call_of
from ..memory.ledger import leaves, storages
from ..memory.reach import Reach
from ..memory.saved import short_line
from ..plan import Choice, Plan, apply
from ..state import TensorState
from ..state.tape import Tape, inside
from .compare import ModelCall, SideEffects, sample_of
from .recorder import NamedSyncs, RecordedOp, Recorder, RegionRun, Written

_WORDS = {
    "differs": "differs in the second run",
    "flips": "decided otherwise",
    "mutates": "changed by each run",
    "syncs": "waits for the device",
    "fails": "cannot be run again",
}


# --- what comes back --------------------------------------------------------------------------------------------------


class AuditRow(NamedTuple):
    """One finding of an audit.

    Attributes:
        kind: "differs", "flips" (a decision came out otherwise), "mutates", "syncs" or "fails".
        region: The region's name.
        op: The operation, as `aten.topk`; for a sync, what was called, as `item()`; "" where it is not one operation.
        module: Path of the module that ran it.
        line: `file:line` of the code that ran it.
        detail: What was found, in words.
        advice: What to write.
        times: How often it happened in one run of the region.
    """

    kind: str
    region: str
    op: str
    module: str
    line: str
    detail: str
    advice: str
    times: int = 1


@shown
class Audit(NamedTuple):
    """The findings of `audit`. True if there are none; `print` shows a text.

    Rows that differ only in the numbers within their paths, as the layers of a stack do, are shown as one, with a `*`
    where the numbers were; `rows` has them all.

    Attributes:
        rows: The findings; what is fine is not listed.
        regions: The names of the regions that ran twice, one per call, in order of their calls.
        perturb: How much noise the inputs got in a third run, relative to themselves; 0 where there was none.
    """

    rows: tuple[AuditRow, ...]
    regions: tuple[str, ...]
    perturb: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.rows

    def __bool__(self) -> bool:
        return self.ok

    def to_json(self) -> str:
        """Returns the audit as JSON text."""
        rows = [row._asdict() for row in self.rows]
        return json.dumps({"ok": self.ok, "regions": self.regions, "perturb": self.perturb, "rows": rows})

    def __str__(self) -> str:
        noise = f", and again with inputs off by {self.perturb:g}" if self.perturb else ""
        title = f"audit of {counted(len(self.regions), 'region')}, each run twice{noise}: "
        if self.ok:
            return title + "nothing to report"
        groups = grouped(self.rows, _common)
        counts = Counter(row.kind for row in self.rows)
        found = [f"{counts[kind]} x {words}" for kind, words in _WORDS.items() if counts[kind]]
        heads: list[tuple[str, ...]] = []
        for alike, rows in groups.items():
            row = alike if len(rows) > 1 else rows[0]
            times, module = f"{len(rows)} x" if len(rows) > 1 else "", f"in {row.module}" if row.module else ""
            heads.append((row.kind, times, row.op, module, f"region {row.region}", short_line(row.line)))
        lines = [title + ", ".join(found)]
        for head, rows in zip(table(heads, right=0), groups.values(), strict=True):
            first = "" if len({row.detail for row in rows}) == 1 else "the first: "
            lines += ["", head, *paragraph(first + rows[0].detail, 4), *paragraph(f"Fix: {rows[0].advice}", 4)]
        return "\n".join(lines)


def _common(row: AuditRow) -> AuditRow:
    """Returns the row without what may differ between rows that are printed as one."""
    starred = {name: starred_path(getattr(row, name)) for name in ("region", "module", "advice")}
    return row._replace(**starred, detail="", times=1)


# --- the audit --------------------------------------------------------------------------------------------------------


def audit(
    model: Callable[..., Any],
    args: Batch = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    modules: Sequence[str] = (),
    perturb: float = 0.0,
) -> Audit:
    """Runs each region of a model twice and reports what differs, what waits for the device, what changes state.

        found = audit(model, batch)
        print(found)
        assert found, found

    The model is called once, with grad, on its arguments as they are; then every region's function is run again under
    its recorded state, as a replay would, but to its end. No backward runs. Buffers, attributes, generators and tensors
    that operations wrote to are put back; gradients are not touched. Every operation is recorded: a small
    model takes about thirty times its forward.

    Found are operations whose results are not the same (the first of each region), choices of experts that come out
    otherwise, waits for the device, and what each run changes outside of itself. Not covered are tensors of
    subclasses (`DTensor`), what runs on other threads, and what compiled code does inside.

    Args:
        model: A module with a plan, or any callable that calls regions.
        args: A batch, see `make_plan`.
        kwargs: More keyword arguments of the call.
        modules: Paths of modules, or globs over paths such as "layers.*": these are made regions for the time of the
            audit. For a model that has none yet.
        perturb: Run each region a third time with its floating inputs off by this much, relative to themselves (0.002
            is half a step of bfloat16), and report the choices of experts that come out otherwise.

    Returns:
        The rows. True if there are none.

    Raises:
        ArgumentError: `model` cannot be called, or not with this batch; nothing is called `modules`, or the model calls
            no region; `perturb` is no number from 0 to 1.
    """
    call = call_of("audit", model, args, kwargs, loss=False)
    if not isinstance(perturb, (int, float)) or isinstance(perturb, bool) or not 0 <= perturb <= 1:
        raise errors.ArgumentError(
            f"audit(perturb=...) is how much to change the inputs of each region relative to themselves, a number from "
            f"0 to 1, but got {errors.say(perturb)}\n"
            "  Write perturb=0.002, half a step of bfloat16."
        )
    with at_work(f"auditing {getattr(model, '__name__', type(model).__name__)}"), _placed(model, modules):
        found = _audit(model, *call, float(perturb))
    if not found.regions:
        raise errors.ArgumentError(
            f"audit: {getattr(model, '__name__', type(model).__name__)} called no region that backward would replay, "
            "so there is nothing to run twice.\n"
            '  Name the modules to look at, audit(model, x, modules=["layers.*"]), or place regions first: '
            "recompute(fn), apply(model, plan). A region is not replayed whose inputs and parameters require no grad, "
            "or in which backward reads nothing but these, as around one linear layer."
        )
    return found


@contextlib.contextmanager
def _placed(model: Any, patterns: Sequence[str]) -> Generator[None]:
    """Makes regions of the modules that these patterns match, and removes them at the end."""
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise errors.ArgumentError(
            f"audit(modules=...) takes a list of paths or globs, but got {errors.say(patterns)}\n"
            '  Write audit(model, x, modules=["layers.*"]); paths are those of model.named_modules().'
        )
    if not patterns:
        yield
        return
    if not isinstance(model, nn.Module):
        raise errors.ArgumentError(
            "audit(model, modules=...) finds modules by their paths in a torch.nn.Module, but got "
            f"{errors.say(model)}\n"
            "  Pass the module, or a function that calls regions, without modules=."
        )
    containers = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    called = [path for path, module in model.named_modules() if not isinstance(module, containers)]
    paths: dict[str, None] = {}
    for pattern in patterns:
        matching = fnmatch.filter(called, pattern)
        if not matching:
            raise errors.ArgumentError(
                f"audit(modules=[{pattern!r}]): {type(model).__name__} has no module of this path that is called.\n"
                "  Paths are those of model.named_modules(); a glob matches whole paths, dots included; a ModuleList "
                "is never called."
            )
        paths.update(dict.fromkeys(matching))
    handle = apply(model, Plan(tuple(Choice((path,)) for path in paths), "audit"))
    try:
        yield
    finally:
        handle.remove()


def _audit(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], perturb: float) -> Audit:
    call = ModelCall(model, args, kwargs)
    recorder = Recorder(call.names)

    def run() -> Audit:  # all of it in one run of the recorder: the modes around second runs are those of the forward
        result = model(*args, **kwargs)  # alive to the end: its graph is what backward would replay
        firsts = [first for first in recorder.runs.values() if first.call.phase is Phase.REBUILDS]
        rows = _Rows(call.modules)
        for first in reversed(firsts):

            def around(fn: Any, first: RegionRun = first) -> SideEffects:
                return SideEffects(call.modules, [fn], first.scopes.values())

            rows.add(first, run_again(recorder, first, around))
            if perturb:
                third = run_again(recorder, first, around, perturb)
                for op, moved in _flips(first.ops, third.ops):
                    rows.put(_row("flips", op, f"with inputs slightly off {moved}", _CARRY))
        del result
        regions = tuple(first.call.name for first in firsts)
        return Audit(rows.sorted(regions), regions, perturb)

    caching = torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_cache_enabled(False)  # else second runs find weights that the first has cast
        with torch.inference_mode(False), torch.enable_grad(), uncompiled(model), NamedSyncs(recorder):
            return recorder.run(run)
    finally:
        torch.set_autocast_cache_enabled(caching)
        call.go_back(*recorder.kept.values())
        recorder.end()


# --- a region's function once more ------------------------------------------------------------------------------------


class _FullReplay(Replay):
    """A replay that fills no slot and runs the function to its end.

    Saved calls and `replay(fn)` return what they have stored. Where the engine has dropped that, because no replay gets
    that far, the run ends (`stopped`).
    """

    __slots__ = ("stopped",)

    def __init__(self, call: RegionCall, exchange: Exchange) -> None:
        super().__init__(call, exchange)
        self._end = -1
        self.stopped = False

    def go(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Runs the function under hooks that only count; saved calls that keep no output are run again."""
        unread = [one for one in self.tape.all_calls(SavedCall) if one.values_unused and one.make_again()]
        _torch.push_hooks(self.pack, unpack)
        try:
            fn(*args, **kwargs)
        except Stop as stop:
            if stop.args[0] is not self:
                raise
            self.stopped = True
        finally:
            _torch.pop_hooks()
            for one in unread:
                one.take_stored()

    @_torch.see_through
    def pack(self, tensor: torch.Tensor, finished: bool = False) -> Packed:
        """Counts the tensor."""
        self.write(tensor)
        return tensor.detach()

    def saved_call(self, record: SavedCall, inputs: Sequence[torch.Tensor]) -> None:
        """Ends where the output has been dropped."""
        if record.then in ENDINGS:
            raise Stop(self)

    def enter(self, tape: Tape) -> Tape | None:
        """Returns what the next nested region left; ends where outputs of saved calls in it have been dropped."""
        left = super().enter(tape)
        if left is not None and any(call.then is Then.ENDS for call in left.all_calls(SavedCall)):
            raise Stop(self)
        return left


class SecondRun(RegionRun):
    """A second run of a region: the outcome, and the changes that the engine did not put back."""

    def __init__(self, first: RegionRun) -> None:
        super().__init__(first.call, line=first.line)
        self.inputs_differ = False  # the engine could not give it the inputs of the first run
        self.ended_early = False  # at what the engine has dropped
        self.error: Exception | None = None
        self.changed: errors.ChangedError | None = None  # the engine's, in place of a replay
        self.rewritten: list[int] = []  # memory, by `id` of the storage
        self.places: list[str] = []  # attributes, closure variables, globals
        self.generators: list[str] = []  # that it has advanced
        self.names: dict[int, str] = {}  # of the tensors that the function reaches, by `id` of the storage


def run_again(
    recorder: Recorder, first: RegionRun, around: Callable[[Any], SideEffects], noise: float = 0.0
) -> SecondRun:
    """Runs a region's function again and undoes its changes.

    With noise, the floating inputs are changed in their own memory meanwhile: a copy would be no input of the region.
    """
    call, second = first.call, SecondRun(first)
    with recorder.paused():
        inputs = _inputs_again(first, second)
        if inputs is None:
            return second
        found, fn, args, kwargs, exchange, tensors = inputs
        before = {key: (one, one.storage.clone()) for key, one in first.written.items()}
        reached = Reach(fn).beside_parameters(grad=False)
        second.names = {id(storage): seen.label() for seen in reached for _, storage in storages(seen.tensor)}
        effects, run = around(fn), _FullReplay(call, exchange)

        def go() -> None:
            contexts = call._contexts or contextlib.nullcontext()  # pyright: ignore[reportPrivateUsage]
            with recorder.recording(_FullReplay.go.__code__, second), contexts:
                run.go(fn, args, kwargs)

        try:
            with inside(run), torch.enable_grad(), _disturbed(tensors, noise):
                call.world.run(exchange, found, go)
        except Exception as error:
            second.error = error.with_traceback(None)
        second.ended_early = run.stopped
        second.places, second.generators = effects.changed_places(), effects.advanced_generators()
        effects.restore()
        copies = frozenset(map(_torch.storage_id, exchange.copies))
        for key, one in second.written.items():
            if key not in before and not one.is_among(copies):
                before[key] = one, one.before
        for key, (one, content) in before.items():
            if not one.same(content):
                second.rewritten.append(key)
                one.storage.copy_(content)
    return second


def _inputs_again(
    first: RegionRun, second: SecondRun
) -> tuple[Opened, Callable[..., Any], Sequence[Any], dict[str, Any], Exchange, list[torch.Tensor]] | None:
    """Returns what a replay gets, with the tensors among its inputs; None if it gets an error.

    `second` records how the inputs differ from those of the first run.
    """
    call = first.call
    exchange = Exchange(call.name)
    try:
        try:
            call.check()
        except errors.ChangedError as error:
            second.changed = error
        found, fn, args, kwargs = call.opened(exchange)
    except errors.RecomputeError as error:  # rebuilt by another region, which is the one to blame
        second.inputs_differ, second.error = True, error
        return None
    given = list(leaves([*args, kwargs]))
    samples = zip(first.inputs, map(sample_of, given), strict=False)
    differ = any(then is not None and now is not None and not then.same(now) for then, now in samples)
    second.inputs_differ = second.changed is not None or differ
    return found, fn, args, kwargs, exchange, [*given, *exchange.tensors.values()]


@contextlib.contextmanager
def _disturbed(tensors: Sequence[torch.Tensor], noise: float) -> Generator[None]:
    """Adds noise to the floating tensors, in place, and takes it back at the end."""
    chosen = [
        tensor
        for tensor in tensors
        if noise
        and tensor.is_floating_point()
        and tensor.layout is torch.strided
        and _torch.is_plain(tensor)
        and _torch.parameter_of(tensor) is None
    ]
    state = TensorState(*chosen)
    before = state.capture()
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in chosen:
            data = each_once(tensor.data)
            factor = 1 + noise * torch.randn(data.shape, generator=random)
            data.copy_(data * factor.to(data.device, torch.float64 if data.dtype is torch.float64 else torch.float32))
    try:
        yield
    finally:
        state.restore(before)


# --- the two runs compared --------------------------------------------------------------------------------------------


class Divergence(NamedTuple):
    """The first operation in which two runs differ."""

    op: RecordedOp
    what: str  # "value", "shape" or "operation"
    detail: str  # how it differs, in words


def first_divergence(then: Sequence[RecordedOp], now: Sequence[RecordedOp], shorter: bool) -> Divergence | None:
    """Returns the first operation in which a second run differs from the first; None if there is none.

    Where a function calls `doing_recompute()` or has saved a value for its replay, or a context saves what operations
    return, the second run may be `shorter`: it leaves out operations of the first. Then its operations must be among
    those of the first, in this order.
    """
    place = 0
    for op in now:
        start = place
        while shorter and place < len(then) and not (op.is_like(then[place]) and op.metas == then[place].metas):
            place += 1
        if place == len(then):
            place = start
        if place == len(then):
            return Divergence(op, "operation", "the first run had ended before it")
        found = _compare(then[place], op)
        if found is not None:
            return found
        place += 1
    if place < len(then) and not shorter:
        return Divergence(then[place], "operation", "the second run ended before it")
    return None


def _compare(then: RecordedOp, now: RecordedOp) -> Divergence | None:
    if not then.is_like(now):
        where = f" at {now.near.rpartition('/')[2]}" if now.near != then.near else ""
        return Divergence(then, "operation", f"in its place the second run did {now.op}{where}")
    if then.metas != now.metas:
        words = f"returned {_say(now.metas)} in the second run, {_say(then.metas)} in the first"
        return Divergence(then, "shape" if any(type(meta) is tuple for meta in then.metas) else "value", words)
    moved = "" if then.chosen is None or now.chosen is None else then.chosen.moved(now.chosen)
    if moved:
        return Divergence(then, "value", f"its indices differ: {moved}")
    for index, (a, b) in enumerate(zip(then.samples, now.samples, strict=False)):
        if not a.same(b):
            which = f"output {index} of {len(then.samples)}" if len(then.samples) > 1 else "its output"
            return Divergence(then, "value", f"{which} differs {a.difference(b)}")
    return None


def _say(metas: Sequence[Any]) -> str:
    return ", ".join(
        f"{str(meta[1]).removeprefix('torch.')}{list(meta[0])}" if type(meta) is tuple else repr(meta) for meta in metas
    )


def _flips(then: Sequence[RecordedOp], now: Sequence[RecordedOp]) -> Iterator[tuple[RecordedOp, str]]:
    """Yields the choices that came out otherwise, each with the number of tokens that moved, in words."""
    later = [op for op in now if op.chosen is not None]
    for op in then:
        match = next((other for other in later if op.is_like(other)), None) if op.chosen is not None else None
        if match is not None and op.chosen is not None and match.chosen is not None:
            later.remove(match)
            moved = op.chosen.moved(match.chosen)
            if moved:
                yield op, moved


# --- rows -------------------------------------------------------------------------------------------------------------

_CARRY = (
    "have the choice carried to the replay: `carry=True` in the plan's Choice, or `replay(fn)` around it, as "
    "`indices = replay(lambda s: s.topk(2).indices)(scores)`"
)
_SYNC = (
    "`replay(fn)` around what is read from the device, or `carry=True` in the plan's Choice: the replay then takes the "
    "value of the forward and does not wait; best is to read it before the region and pass it in"
)
_GENERATORS = {"random": ("Python's random", "PythonRng()"), "numpy": ("NumPy's global generator", "NumpyRng()")}
_ARGUMENT = "`x = x.mul(2)` in place of `x.mul_(2)`, or a clone of it: a replay needs the argument as it was"
_TENSOR = (
    "`recompute(fn, state=[TensorState(tensor)])`, from torch_recompute.state, or the update in `no_recompute(fn)`, or "
    "only if `not doing_recompute()`"
)
_BUFFER = (
    "the update outside of the region or in `no_recompute(fn)`, or the module in training mode: buffers of modules in "
    "training mode are put back"
)
_ATTRIBUTE = "the update outside of the region or in `no_recompute(fn)`, or only if `not doing_recompute()`"
FAILS = "a function that can be called again with the same arguments, or `no_recompute(fn)` around the part that cannot"
_CHANGED = "the change after backward, or on a clone: a replay needs the tensor as it was in the forward"
_RANDOM = (
    "`recompute(fn, state=[GeneratorRng(generator)])`, from torch_recompute.state, for a generator that the region "
    "cannot see in its function's arguments, closure or globals"
)
_BRANCH = (
    "`replay(fn)` around what decides the branch, or pass it to the region as an argument; a global or attribute that "
    "it depends on must not change before backward"
)
_SHAPE = "`replay(fn)` around what decides the shape, or pass it to the region as an argument"
_VALUE = (
    "`replay(fn)` or `no_recompute(fn)` around it where the operation is not deterministic "
    "(`torch.use_deterministic_algorithms(True)` finds out); where it depends on a global or attribute, pass that to "
    "the region as an argument"
)


class _Rows:
    """Collects the rows of an audit.

    A region whose inputs are not those of the first run, because they were changed or are rebuilt by a region that
    differs, is not compared: the fault is elsewhere. A finding of a region inside another is not repeated for the outer
    one.
    """

    def __init__(self, modules: Iterable[tuple[nn.Module, str]]) -> None:
        self._rows: dict[tuple[str, ...], AuditRow] = {}
        self._names: dict[int, tuple[str, str]] = {}
        for module, path in modules:
            for kind, tensors in (("buffer", module.named_buffers), ("parameter", module.named_parameters)):
                for name, tensor in tensors(recurse=False):
                    for _, storage in storages(tensor):
                        self._names.setdefault(id(storage), (kind, f"{path}.{name}".removeprefix(".")))

    def sorted(self, regions: Sequence[str]) -> tuple[AuditRow, ...]:
        """Returns the rows, region by region, kind by kind."""
        order = {name: i for i, name in reversed(list(enumerate(regions)))}
        rows = self._rows.values()
        return tuple(sorted(rows, key=lambda row: (order.get(row.region, len(order)), list(_WORDS).index(row.kind))))

    def put(self, row: AuditRow, inner: Iterable[str] = ()) -> None:
        """Adds a row, unless its region, or one `inner` to it, has it already."""
        detail = row.detail if row.kind == "mutates" else ""
        keys = [(row.kind, region, row.op, row.module, row.line, detail) for region in (row.region, *inner)]
        if not any(key in self._rows for key in keys):
            self._rows[keys[0]] = row

    def add(self, first: RegionRun, second: SecondRun) -> None:
        """Adds the findings of a second run."""
        name, error = first.call.name, second.error
        before = len(self._rows)
        inner = {op.region for op in first.ops} - {name}

        def whole(kind: str, detail: str, advice: str) -> None:
            self.put(AuditRow(kind, name, "", "", "", detail, advice), inner)

        for key, written in {**second.written, **first.written}.items():
            if (written.argument and not _is_put_back(first.call, written)) or key in second.rewritten:
                label = second.names.get(key, "a tensor from outside of the region")
                advice = _TENSOR
                if key in self._names:
                    kind, owner = self._names[key]
                    label, advice = f"{kind} '{owner}'", _BUFFER if kind == "buffer" else _TENSOR
                elif written.argument:
                    label, advice = written.argument, _ARGUMENT
                self.put(_row("mutates", written.op, f"{label} is changed in place", advice))
        for place in second.places:
            whole("mutates", f"{place} is changed", _ATTRIBUTE)
        for generator in second.generators:
            what = _GENERATORS.get(generator, ("PyTorch's default generator",))[0]
            whole("mutates", f"{what} is advanced", _for_generators([generator]))
        if second.changed is not None and len(self._rows) == before:
            whole("mutates", str(second.changed).partition("\n")[0], _CHANGED)
        if not second.inputs_differ:
            self._compare(first, second)
        modules = {(sync.what, sync.line): sync.module for sync in first.syncs}  # the second run is called by none
        for sync, count in Counter(second.syncs if second.ops else first.syncs).items():
            detail = f"the replay waits for the device {times(count)}"
            module = modules.get((sync.what, sync.line), sync.module)
            self.put(AuditRow("syncs", sync.region, sync.what, module, sync.line, detail, _SYNC, count))
        known = isinstance(error, errors.MismatchError) and len(self._rows) > before
        if error is not None and not known and not second.inputs_differ:
            whole("fails", f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", FAILS)

    def _compare(self, first: RegionRun, second: SecondRun) -> None:
        asks = any(_ASKING.intersection(code.co_names) for code, _ in first.scopes.values())
        selective = first.call._contexts is not None  # pyright: ignore[reportPrivateUsage]
        shorter = second.error is not None or second.ended_early or asks or selective
        shorter |= bool(first.call.tape.values)
        found = first_divergence(first.ops, second.ops, shorter)
        writing = [written.op for key, written in first.written.items() if key in second.rewritten]
        if found is not None and found.op not in writing:  # else its output is what it should not write to
            self.put(_row("differs", found.op, found.detail, _against(found, second)))
        for op, moved in _flips(first.ops, second.ops):
            if found is None or op is not found.op:
                self.put(_row("flips", op, moved, _CARRY))


_ASKING = frozenset({"doing_recompute", "is_recomputing", "get_recompute_data"})


def _row(kind: str, op: RecordedOp, detail: str, advice: str) -> AuditRow:
    return AuditRow(kind, op.region, op.op, op.module, op.line, detail, advice)


def _for_generators(names: Sequence[str]) -> str:
    states = [_GENERATORS[name][1] for name in names if name in _GENERATORS]
    if states:
        return f"`recompute(fn, state=[{', '.join(states)}])`, from torch_recompute.state"
    return "`preserve_rng_state=True`, which is the default"


def _against(found: Divergence, second: SecondRun) -> str:
    """Returns what to write where two runs differ."""
    if second.generators:
        return _for_generators(second.generators)
    if found.op.chosen is not None:
        return _CARRY
    if second.places:
        return f"{_ATTRIBUTE}; {second.places[0]} is not in the second run what it was in the first"
    if found.op.random:
        return _RANDOM
    return {"operation": _BRANCH, "shape": _SHAPE}.get(found.what, _VALUE)


def _is_put_back(call: RegionCall, written: Written) -> bool:
    """Whether a storage is that of a buffer whose values replays put back."""
    return call.world.modules is not None and written.is_among(call.world.modules.put_back())
