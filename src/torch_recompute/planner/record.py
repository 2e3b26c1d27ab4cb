"""Records a segment: runs it once and writes what happens to a tape (`tape.py`).

    segment = record(call, pretend)
    figures = evaluate(segment.tape, choices)       # of any regions, in less than a millisecond (`evaluate.py`)

The segment runs forward and backward alone (`alone.py`). What autograd saves is not held: a token stands for it, and
when backward reads it, it is given a fresh fake tensor of that layout. So storages end in the forward when Python lets
go of them, as in a replay, and the tokens say when backward reads each saved tensor and when it is done with it. Who
holds what under some regions is then counted from the record.

A region may carry decisions from its forward to its replays, and then runs other operations than without (`Carry`); a
segment with a router is therefore recorded a second time, as it runs then.

Where a replay would do something else than the forward did, or memory is held by what no hook sees, no figures can be
counted: `Tape.why_not` says why, and choices are tried one by one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .. import _torch, errors
from .._torch.checkpoints import in_checkpoint
from .._torch.fakes import APART, FakeTensor, resizes
from .._torch.graphs import attention_in_parts
from .._torch.modes import transforming, without_modes
from ..engine.shape_only import ASK_FOR_LAYOUT, DROPOUT, goes_through
from ..engine.taken import SMALL
from ..memory.batch import tensors_of_call
from ..memory.ledger import storages
from ..memory.operations import ADDED, Operation
from ..plan.calls import carried, kind_of, may_decide
from ..plan.choice import DOWN, PRODUCT
from ..simulation.fake_mode import FakeMode
from ..state.tape import thread
from .alone import SegmentCall, Stage, alone, run_alone
from .candidates import CallNames, Candidates
from .ops import Op, op_of
from .tape import DECISION, KeepableCall, ModuleCall, RanOp, Saved, Tape, Values, What


@dataclass(frozen=True)
class RecordedSegment:
    """A segment that has run, and its calls that a region may keep.

    Attributes:
        tape: Its run.
        carrying: Its run with decisions carried; the same where no router is near.
        candidates: Its calls; empty for several modules in a row.
    """

    tape: Tape
    carrying: Tape
    candidates: Candidates


def record(call: SegmentCall, pretend: FakeMode, *, frees: bool = False, carry: bool = False) -> RecordedSegment:
    """Runs a segment forward and backward, and records what happens.

    Args:
        call: The segment.
        pretend: The mode of its fake tensors, which is active.
        frees: Whether the gradients of parameters are freed as they come.
        carry: Whether it is recorded with decisions carried, too.

    Raises:
        ArgumentError: It calls what allows no saved-tensor hooks around it.
    """
    names = CallNames(call.steps[0][0]) if len(call.steps) == 1 else None
    try:
        tape = _Recorder(call, pretend, names, carries=False).run(frees)
        carrying = _Recorder(call, pretend, None, carries=True).run(frees) if carry else tape
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        raise errors.ArgumentError(
            f"{type(call.steps[0][0]).__name__} calls torch.func.grad or one of its kind, for which PyTorch takes no "
            "saved-tensor hooks, by which regions are made: neither it nor what is around it can be recomputed.\n"
            "  Take a smaller batch: no other layer is called that a plan could recompute."
        ) from error
    return RecordedSegment(tape, carrying, Candidates() if names is None else names.candidates())


class _Token:
    """Stands for a tensor that autograd saved; says when autograd drops it."""

    __slots__ = ("__weakref__", "layout", "number", "real", "recorder")

    def __init__(self, number: int, recorder: _Recorder, layout: Any, real: torch.Tensor | None) -> None:
        self.number, self.recorder, self.layout, self.real = number, recorder, layout, real

    def __del__(self) -> None:
        self.recorder.note(What.RELEASE, self.number)


class _Recorder:
    """Records one run of a segment.

    Args:
        call: The segment.
        pretend: The mode of its fake tensors.
        names: Is told of its modules and calls.
        carries: Whether decisions are carried.
    """

    def __init__(self, call: SegmentCall, pretend: FakeMode, names: CallNames | None, *, carries: bool) -> None:
        self._call, self._pretend, self._names, self.carries = call, pretend, names, carries
        self._tape = Tape()
        self._stage = Stage.BEFORE
        self._open = True
        self._within = 0  # calls that a region may keep
        self._stack: list[tuple[str, int]] = []
        self._numbers: dict[int, int] = {}  # of storages that are alive, by identity
        self._refs: dict[Any, weakref.ref[Any]] = {}
        self._keys: dict[int, int] = {}  # of operations, by identity
        self._weights = set[int]()
        self._copied, self._unchanged = set[int](), set[int]()  # what regions copy, and what then must not change
        self._copies: dict[int, list[_Copied]] = {}  # by module
        self._made_in_forward = set[int]()
        self._reads: dict[int, list[ModuleCall | KeepableCall]] = {}  # by storage, those whose replay needs its values
        self._check = False  # whether sizes may have changed
        self._hook = _torch.see_through(partial(self._pack))  # which takes attributes, as a method does not

    def run(self, frees: bool) -> Tape:
        """Runs the segment."""
        tape = self._tape
        with alone(self._call, frees=frees) as modules, resizes(self._resized):
            buffers, plain_calls = _buffers_of(modules), thread.plain_calls
            tape.there = self._held_by(modules)
            self._know_weights_and_copies(modules)
            try:
                with self._pretend.showing(self._see):
                    run_alone(self._call, self._at, self._following(modules))
                if self._held_by(modules) != tape.there or _buffers_of(modules) != buffers:
                    self._cannot("its modules hold other tensors in attributes after a call than before")
                if thread.plain_calls != plain_calls:
                    self._cannot("it calls functions that do something else in a region: saved calls or choices")
                if any(number in self._refs for number in self._made_in_forward.difference(tape.results)):
                    self._cannot("something holds a tensor of its forward after its backward")
            finally:
                self._open = False
        return tape

    def _know_weights_and_copies(self, modules: nn.Module) -> None:
        """Notes which memory is that of weights, and which is copied by regions."""
        for weight in modules.parameters():
            self._weights.update(id(storage) for _, storage in storages(weight))
        for module in modules.modules():
            self._copies[id(module)] = [*_copied(module)]
            for copied in self._copies[id(module)]:
                (self._copied if copied.is_kept else self._unchanged).update(copied.memory)
        if not self._weights.isdisjoint(self._copied | self._unchanged):
            self._cannot("it holds the memory of a parameter in an attribute, too")

    def _bytes_copied(self, modules: Iterable[nn.Module]) -> tuple[int, int]:
        """The bytes that a region copies of modules: those that it keeps, and those that its forward alone has."""
        found, seen = [0, 0], set[int]()
        for copied in (one for part in modules for one in self._copies.get(id(part), ())):
            if copied.memory.isdisjoint(seen):
                seen |= copied.memory
                found[not copied.is_kept] += copied.nbytes
        return found[0], found[1]

    def _cannot(self, why: str) -> None:
        """Says why the tape has no figures."""
        self._tape.why_not = self._tape.why_not or why

    def _resized(self) -> None:
        """Is told that some storage is about to be resized."""
        self._check = True

    def _held_by(self, modules: nn.Module) -> tuple[int, ...]:
        """Numbers the storages that modules hold in attributes."""
        held = [tensor for module in modules.modules() for tensor in _in_attributes(module)]
        return tuple({self._number_of(storage) for _, storage in storages(held)})

    def note(self, what: What, number: int) -> None:
        """Adds an event."""
        if self._open:
            self._tape.events.append((what, number))

    def _at(self, stage: Stage, tensors: list[torch.Tensor]) -> None:
        tape, now = self._tape, len(self._tape.events)
        self._stage = stage
        if stage is Stage.BEFORE:
            tape.level = now
        elif stage is Stage.FORWARD:
            tape.start = now
            made = len(tape.sizes)
            tape.known = frozenset(self._number_of(s) for _, s in storages([*tensors, *self._call.given]))
            tape.outside = tuple(range(made, len(tape.sizes)))
            tape.sizes[made:] = [0] * len(tape.outside)
        elif stage is Stage.RETURNED:
            tape.results = self._numbers_of(tensors)
        elif stage is Stage.TURN:
            tape.turn = now
        elif stage is Stage.BACKWARD:
            tape.back = now

    # --- storages and operations ---

    def _sizes_changed(self) -> bool:
        """Whether a storage has been resized."""
        alive = ((number, ref()) for number, ref in self._refs.items() if isinstance(number, int))
        return any(s is not None and 0 < self._tape.sizes[number] != s.nbytes() for number, s in alive)

    def _number_of(self, storage: torch.UntypedStorage) -> int:
        """The number of a storage, which is new if it has none."""
        key = id(storage)
        if key not in self._numbers:
            number = self._numbers[key] = len(self._tape.sizes)
            self._tape.sizes.append(int(storage.nbytes()))
            self._refs[number] = weakref.ref(storage, partial(self._ended, key, number))
        return self._numbers[key]

    def _ended(self, key: int, number: int, _: object) -> None:
        if self._numbers.get(key) == number:
            del self._numbers[key]
            self.note(What.FREE, number)
        self._refs.pop(number, None)

    def _numbers_of(self, values: Any) -> tuple[int, ...]:
        """The numbers of the storages in some tensors, as far as they have one."""
        found = (self._numbers.get(id(s), -1) for tensor in _torch.tensors_in(values) for _, s in storages(tensor))
        return tuple(number for number in dict.fromkeys(found) if number >= 0)

    def _see(self, ran: Operation) -> None:
        """Is shown each operation."""
        if not self._open:
            return
        if self._stage is Stage.FORWARD and (hooks := _torch.ambient_hooks()) is not None and hooks[0] != self._hook:
            self._cannot("it enters saved-tensor hooks of its own, and what is saved in them is theirs")
        if self._check and self._sizes_changed():
            self._cannot("it resizes the memory of tensors")
        self._check = False
        read = [self._numbers[id(s)] for _, s in ran.given if id(s) in self._numbers]
        if ran.func is ADDED and ran.made:  # the engine's sum: it writes to its first argument, and here to new memory
            first = id(ran.args[0].untyped_storage())
            if first in self._numbers:
                self.note(What.FREE, self._numbers.pop(first))
        wrote = [self._numbers[id(s)] for _, s in ran.results if id(s) in self._numbers]
        if self._stage is Stage.FORWARD:
            self._changed(storages(_torch.written_by(ran.func, ran.args, ran.kwargs)))
        elif self._stage is Stage.BACKWARD and torch.is_grad_enabled():
            self._cannot("its backward runs a forward")
        made = [self._number_of(s) for device, s in ran.made if device != APART and id(s) not in self._numbers]
        needs = Values.ALL
        if ran.func is DROPOUT:
            needs = Values.MASK
            if len(made) == 2:
                made.reverse()
        elif ran.func in ASK_FOR_LAYOUT:
            needs = Values.NONE
        elif goes_through(ran.func):
            needs = Values.ITS_OWN
        workspace, op = self._pretend.workspace(ran), op_of(ran)
        taken = workspace if isinstance(workspace, int) else 0
        if made or op is not None or taken:
            surrounding, key = self._stage in (Stage.BEFORE, Stage.TURN), -1 if op is None else self._key(op)
            self.note(What.MAKE, len(self._tape.ops))
            if self._stage is Stage.FORWARD:
                self._made_in_forward.update(made)
            given, written = tuple(dict.fromkeys(read)), tuple(dict.fromkeys(wrote))
            self._tape.ops.append(RanOp(tuple(made), written, given, taken, key, surrounding, needs))

    def _changed(self, written: list[tuple[torch.device, torch.UntypedStorage]]) -> None:
        """Notes what the forward has changed in place."""
        for _, storage in written:
            if id(storage) in self._unchanged:
                self._cannot("it changes a large buffer, or one of a module in evaluation")
            for call in self._reads.get(self._numbers.get(id(storage), -1), ()):
                call.is_changed = True

    def _key(self, op: Op) -> int:
        number = self._keys.get(id(op))
        if number is None:
            number = self._keys[id(op)] = len(self._tape.keys)
            self._tape.keys.append(op)
        return number

    # --- saved tensors ---

    def _pack(self, tensor: torch.Tensor) -> _Token:
        tape, number, found = self._tape, len(self._tape.saves), storages(tensor)
        first = id(found[0][1]) if found else 0
        weight = first in self._weights or (tensor.is_leaf and tensor.requires_grad and not found)
        storage, buffer = self._numbers.get(first, -1), int(tensor.nbytes) if first in self._copied else 0
        tape.saves.append(Saved(storage, tensor.requires_grad, _torch.sequence_number(), weight, buffer))
        self.note(What.SAVE, number)
        layout, real = None, None
        if type(tensor) is FakeTensor:
            layout = tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
        if weight:
            real = tensor if tensor.is_leaf else tensor.detach()
        elif layout is None and type(tensor) is torch.Tensor and not tensor.is_nested:
            with without_modes():
                memory = tensor.untyped_storage().clone()
                real = tensor.new_empty(0).set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
        elif layout is None:
            real = tensor.detach()
            self._cannot(f"autograd saves a {type(tensor).__name__}, whose memory is not followed")
        return _Token(number, self, layout, real)

    def _unpack(self, token: _Token) -> torch.Tensor:
        number = token.number
        if self._stage is Stage.FORWARD:
            self._cannot("it runs a backward in its forward")
        self.note(What.READ, number)
        if token.real is not None:
            self.note(What.DROP, number)
            return token.real
        shape, stride, dtype, device = token.layout
        with self._pretend.fakes:
            made = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        dropped = partial(self._dropped, number)
        self._refs["read", number, len(self._tape.events)] = weakref.ref(made.untyped_storage(), dropped)
        return made

    def _dropped(self, number: int, _: object) -> None:
        self.note(What.DROP, number)

    # --- modules and calls ---

    @contextmanager
    def _following(self, modules: nn.ModuleList) -> Generator[None]:
        """Follows the forward: its modules, its calls, and what autograd saves."""
        with ExitStack() as stack:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._hook, self._unpack))
            for path, module in modules.named_modules():
                if path:
                    enter = partial(self._enter, path)
                    stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                    leave = module.register_forward_hook(self._leave, prepend=True, always_call=True)
                    stack.callback(leave.remove)  # hooks of its own run outside of a region
            stack.enter_context(_Calls(self))
            yield

    def _enter(self, path: str, module: nn.Module, *given: Any) -> None:
        if transforming():  # in `vmap` one tensor stands for several
            return
        tensors = _torch.tensors_in(given)
        if self._names is not None:
            self._names.enter(_within(path), tensors)
        self._stack.append((path, len(self._tape.modules)))
        if torch.is_grad_enabled():  # else a region is the plain call
            self.note(What.ENTER, len(self._tape.modules))
        call = ModuleCall(
            path, self._numbers_of(tensors), *self._bytes_copied(module.modules()), self._bytes_copied([module])
        )
        self._tape.modules.append(call)
        for storage in call.given:
            self._reads.setdefault(storage, []).append(call)

    def _leave(self, _: nn.Module, _given: Any, result: Any) -> None:
        if transforming() or not self._stack:
            return
        path, number = self._stack.pop()
        if self._names is not None:
            self._names.leave(_within(path), result)
        self.note(What.LEAVE, number)

    @property
    def within_call(self) -> bool:
        """Whether a call that a region may keep is running."""
        return self._within > 0

    def keepable(self, kind: str, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Runs a call that a region may keep, or a decision that it may carry."""
        kinds = (kind, PRODUCT) if kind == DOWN else (kind,)
        path = self._stack[-1][0] if self._stack else ""
        named = kind != DECISION and self._names is not None and path
        candidate = self._names.call(_within(path), kind) if named and self._names is not None else None
        paths = tuple(path for path, _ in self._stack)
        call = KeepableCall(kinds, paths, self._numbers_of((args, kwargs)), candidate)
        number = len(self._tape.calls)
        self._tape.calls.append(call)
        self.note(What.BEGIN, number)
        self._within += 1
        try:
            result = func(*args, **kwargs)
        finally:
            self._within -= 1
        call.results = self._numbers_of(result)
        for storage in call.results:
            if storage not in call.given:
                self._reads.setdefault(storage, []).append(call)
        self.note(What.END, number)
        return result


class _Copied(NamedTuple):
    """Memory of a module that a region copies: all of `memory`, and whether the copy is kept if nothing changes it."""

    memory: frozenset[int]
    nbytes: int
    is_kept: bool


def _copied(module: nn.Module) -> Iterator[_Copied]:
    """Lists the memory of a module that a region copies: buffers, and tensors in attributes (`engine/modules.py`)."""
    for buffer in module.buffers(recurse=False):
        small = buffer.nbytes <= SMALL
        if module.training or small:
            yield _Copied(_memory(buffer), int(buffer.nbytes), module.training and small)
    for tensor in _in_attributes(module):
        nbytes = sum(int(storage.nbytes()) for _, storage in storages(tensor))
        if nbytes and nbytes <= SMALL and not tensor.requires_grad:
            yield _Copied(_memory(tensor), nbytes, True)
        elif nbytes and module.training and not tensor.requires_grad and _is_attribute(tensor, module):
            yield _Copied(_memory(tensor), int(tensor.nbytes), False)


def _memory(tensor: torch.Tensor) -> frozenset[int]:
    return frozenset(id(storage) for _, storage in storages(tensor))


def _is_attribute(tensor: torch.Tensor, module: nn.Module) -> bool:
    """Whether an attribute of a module is this tensor, and not a container of it."""
    return any(tensor is value for value in vars(module).values())


def _in_attributes(module: nn.Module) -> list[torch.Tensor]:
    """The tensors that a module holds besides parameters and buffers."""
    return tensors_of_call({**vars(module), "_parameters": None, "_modules": None, "_buffers": None})


def _buffers_of(modules: nn.Module) -> list[int]:
    """The identities of the storages of buffers."""
    return [id(storage) for _, storage in storages(list(modules.buffers()))]


def _within(path: str) -> str:
    """A path below the segment, of one below the list that holds it."""
    return path.partition(".")[2]


class _Calls(TorchFunctionMode):
    """Shows the recorder the calls that a region may keep, and makes decisions as a region that carries them."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, recorder = kwargs or {}, self._recorder
        if transforming() or recorder.within_call or "out" in kwargs:
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:
                return attention_in_parts(*args, **kwargs)
        kind = kind_of(func, args, kwargs)
        if kind is not None:
            return recorder.keepable(kind, func, args, kwargs)
        if recorder.carries and may_decide(func, args, kwargs) and not in_checkpoint():
            return carried(func, args, kwargs, lambda decide: partial(self._decided, decide))
        return func(*args, **kwargs)

    def _decided(self, decide: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._recorder.keepable(DECISION, decide, args, kwargs)
