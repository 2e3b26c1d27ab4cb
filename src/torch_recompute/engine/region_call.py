"""One call of a region: its forward under hooks that hold nothing, and its replays, which fill what backward needs.

A `Recording` runs the forward and writes the call's tape. A `RegionCall` is what stays of it: the arguments (or what a
store made of them), the state it was made in, and the tape, which refers to slots weakly. The graph holds the slots,
and they the call. When the last slot dies, so does everything.

A `Replay` runs the function again and goes along the tape. Its pack hook puts each tensor, detached, into the slot of
its turn, if it has one: what the graph has held since the forward is passed by. So the forward alone distinguishes
inputs and stored outputs from the rest. A replay could not: one tensor of the forward may be two there, if it is an
input and also a global, a carried value, or the output of a saved call.

Returning the tensor itself from a pack hook would tie an operation's output to its own node and leak (softmax, exp), so
what the replay's own graph holds is the detached tensor too; that graph is dropped at once. A tensor that requires no
grad has no node, and is held as it is.

Where a replay ends is said in `region.py`. Ending means raising `Stop` through the user's function; nothing else leaves
it. A module with forward hooks that ends after the last slot was filled ends the replay before these run: backward is
inside that module, and under ZeRO-3 its forward hook would take away the weights that the next node reads.
"""

from __future__ import annotations

import contextlib
import weakref
from _thread import RLock
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

from .. import _torch, errors, state
from .._torch import devices, parameter_of, storage_id, tracing
from .._torch.modes import ComputedWeights
from .._torch.tensors import meta, say
from ..state.observer import here, is_exhaustion, tell
from ..state.tape import HELD, Entry, Run, Tape, thread
from ..stores import Hooks, Store
from .exchange import Exchange
from .guards import Opened, World
from .modules import Watching, name_in
from .saved_call import ENDINGS, SavedCall, Then
from .slots import Packed, Read, Slot, Stop, check_values, lend, this_task, unpack, without_history
from .taken import PLAIN, TAKEN, Around, Name, Taking, changed_weight, open_

if TYPE_CHECKING:
    from .mismatch import Fingerprints


def _needed_by(slot: Slot | None) -> str:
    """A sentence on the operation that backward needs the tensor of a slot for; "" where that is not known."""
    from .mismatch import reader_of

    op = reader_of(slot)
    return f" It is needed by {op}." if op else ""


def _new_fingerprints() -> Fingerprints:
    from .mismatch import Fingerprints

    return Fingerprints()


def _fewer(replay: Replay, slot: Slot | None) -> str:
    """Text for a replay that saved too few tensors."""
    got, expected = replay.tape.tensors(replay.place()), replay.tape.tensors()
    return (
        f"the replay of {replay.name} saved fewer tensors than its forward: {got} now, {expected} then. (A different "
        f"number of tensors was saved during the original forward and recomputation.){_needed_by(slot)}\n"
        f"{errors.WHY}"
    )


def _more(replay: Replay) -> str:
    """Text for a replay that saved too many tensors, in all or before a saved call, a choice or a nested region."""
    place, entries = replay.place(), replay.tape.entries
    where = ""
    if place < len(entries):
        named = entries[place]
        where = f"before {named.name}(...), " if isinstance(named, Entry) else "before a region inside it, "
    return (
        f"the replay of {replay.name} saved more tensors than its forward: {where}{replay.tape.tensors(place)} then, "
        "and now at least one more. (trying to save more tensors during recomputation than during the original "
        f"forward pass)\n{errors.WHY}"
    )


class Replay(Run):
    """One replay of a region call: goes along its tape, fills the slots that are still in the graph, then stops."""

    pack: Callable[..., Packed]
    replaying = True
    _fingerprints: Fingerprints | None = None
    _module_hook: RemovableHandle | None = None

    def __init__(self, region_call: RegionCall, exchange: Exchange, opened: Slot | None = None) -> None:
        self.name = region_call.name
        self.tape = self.source = tape = region_call.tape
        self.ambients = region_call.world.generators.ambients
        self._region_call, self._ids, self._opened = region_call, exchange.given, opened
        self._memories: frozenset[int] = frozenset()  # those that hold the values of the forward for this long
        if exchange.values:
            self._memories = frozenset([storage_id(tensor) for _, _, tensor, _ in exchange.values.values()])
        self._shared: list[tuple[Slot, torch.Tensor, int]] = []
        self._place, self._done, self._unfinished, self._opener = 0, False, -1, -1
        self._end = tape.end() if region_call.options.early_stop else -1  # the last place that is waited for
        if region_call.fingerprints is not None:
            self._fingerprints = _new_fingerprints()

    def go(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Runs the function under the hooks, as far as it is needed."""
        self.pack = pack = self._packer()
        _torch.push_hooks(pack, unpack)
        result, stopped = None, False
        try:
            result = fn(*args, **kwargs)
        except Stop as stop:
            if stop.args[0] is not self:
                raise
            stopped = True
        finally:
            _torch.pop_hooks()
            del self.pack, pack  # which refers to this replay
            if self._module_hook is not None:
                self._module_hook.remove()
            if self._fingerprints is not None:
                self._fingerprints.flush()
        if not stopped:
            self._ended(_torch.tensors_in(result) if self._region_call.later is not None else [])
        if self._shared:
            self._fill_shared()

    def _ended(self, results: list[torch.Tensor]) -> None:
        """Checks a replay that has come to the function's end, and fills the slots that are views of its results."""
        if not self._done and self.tape.tensors(self._place) < self.tape.tensors():
            raise errors.MismatchError(_fewer(self, next(self.tape.slots(self._place), None)))
        if self._region_call.later is not None:
            self._region_call.later.check(self.name, results)
            self._region_call.later.fill(self, results)

    def fill(self, slot: Slot, rebuilt: torch.Tensor) -> None:
        """Fills a slot; at the end with a copy, if the memory holds these values for the length of the replay alone."""
        if self._memories and storage_id(rebuilt) in self._memories:
            self._shared.append((slot, rebuilt, rebuilt._version))
        else:
            slot.fill(rebuilt, _torch.stream_for(rebuilt) if self._region_call.streams else None)

    def _fill_shared(self) -> None:
        with torch.no_grad():
            own = state.copies([tensor for _, tensor, _ in self._shared])
        for (slot, tensor, version), copy in zip(self._shared, own, strict=True):
            if tensor._version != version:
                raise errors.ChangedError(errors.changed_saved(self.name, version, tensor._version))
            slot.fill(copy, _torch.stream_for(copy) if self._region_call.streams else None)

    def place(self) -> int:
        """The place of the tape that it has come to."""
        return self._place

    def come_to(self) -> Any:
        """Returns what the forward left at the present place; ends here if every open slot has been filled."""
        if self._done:
            raise Stop(self)
        entries, place = self.tape.entries, self._place
        return entries[place] if place < len(entries) else None

    def write(self, *entries: Any) -> None:
        """Goes on behind entries, which the forward has written."""
        self._place += len(entries)

    def go_on_at(self, place: int) -> bool:
        """Goes on at the place at which a value was saved.

        The function might do the work all the same and fill the wrong slots, so from here on the replay does not stop
        early: it runs to its end, and the number of slots must come out exactly.
        """
        skipped = super().go_on_at(place)
        if skipped:
            self._end = -1
        return skipped

    def event(self) -> None:
        """Ends the replay if every open slot has been filled."""
        if self._done:
            raise Stop(self)

    @tracing.as_it_is
    def _module_ends(self, module: torch.nn.Module, *_: Any) -> None:
        # Of a module without hooks torch calls this only where there are other hooks of all modules.
        if thread.run is self and vars(module).get("_forward_hooks"):
            raise Stop(self)

    @tracing.as_it_is
    def _packer(self) -> Callable[..., Packed]:
        """The pack hook of the replay: fills the next slot. What it needs for every tensor is a local of its own."""
        region_call, ids, sequence_number = self._region_call, self._ids, _torch.sequence_number
        opened = self._opened
        entries, held, reference, check = self.tape.entries, HELD, weakref.ref, region_call.options.check != "none"
        count, fingerprints, plain = len(entries), self._fingerprints, torch.Tensor
        special = bool(self._memories or region_call.streams)

        def pack(tensor: torch.Tensor, finished: bool = False) -> Packed:
            place = self._place
            entry = entries[place] if place < count else None
            if entry is held:
                self._place = place + 1
                same = tensor if tensor.is_leaf else tensor.detach()  # a view may be its own node's result
                return (same, same._version) if finished else same
            if self._done:
                raise Stop(self)
            if type(entry) is not reference and (entry is not None or region_call.phase is not Phase.FORWARD):
                raise errors.MismatchError(_more(self))  # else it is a backward inside its own forward, not there yet
            if type(tensor) is not plain:
                check_values(tensor, "autograd, which saves it")
            differentiable = tensor.requires_grad
            rebuilt = tensor.detach() if differentiable else tensor
            slot: Slot | None = None if entry is None else entry()
            if slot is not None:
                if check and (slot.meta != meta(tensor) or id(tensor) in ids):
                    self._differs(slot, tensor)
                if special:
                    self.fill(slot, rebuilt)
                else:
                    slot.fill(rebuilt)
            self._place = place + 1
            if fingerprints is not None:
                fingerprints.add(place, tensor)
            if not differentiable:
                self._unfinished = sequence_number()
            if slot is opened:
                self._opener = sequence_number()
            if place == self._end:
                self._done = True
                if finished or (differentiable and self._unfinished != sequence_number()) or self._is_whole():
                    raise Stop(self)
                self._module_hook = register_module_forward_hook(self._module_ends)
            return rebuilt

        pack.__dict__.update(_torch.SEE_THROUGH)
        return pack

    def _is_whole(self) -> bool:
        """Whether what was saved last is known to be written: its node reads now what it saved, and is not RReLU's."""
        node = _torch.current_node() if self._opener == _torch.sequence_number() else None
        return node is not None and "Rrelu" not in node.name()

    def put(self, tensor: torch.Tensor) -> Packed:
        """Holds an input of a region inside this one; it is finished, whether it requires grad or not."""
        return without_history(self.pack(tensor, finished=True))

    def _differs(self, slot: Slot, tensor: torch.Tensor) -> None:
        if slot.meta == meta(tensor) and self._region_call.taking.views:
            return  # of a view, compiled code saves an alias; a replay's inputs are leaves, which it saves as they are
        then, now = say(slot.meta), say(meta(tensor))
        if id(tensor) in self._ids:
            now += ", an input of the region"
        raise errors.MismatchError(
            f"the replay of {self.name} saved another tensor than its forward at position "
            f"{self.tape.tensors(self._place)}:\n"
            f"      forward: {then}\n"
            f"      replay:  {now}\n"
            "  (Recomputed values for the following tensors have different metadata than during the forward pass.)"
            f"{_needed_by(slot)}\n{errors.WHY}"
        )

    def compare_values(self) -> None:
        """With `check="values"`, compares strides and bits of what was rebuilt with the forward's."""
        then, now = self._region_call.fingerprints, self._fingerprints
        if then is None or now is None:
            return
        found = then.difference(now)
        if found is not None:
            place, was, new = found
            saved: Any = self.tape.entries[place]
            raise errors.MismatchError(
                f"the replay of {self.name} saved a tensor with other values than its forward at position "
                f"{self.tape.tensors(place)}; those before it are the same to the last bit.{_needed_by(saved())}\n"
                f"      forward: {was}\n"
                f"      replay:  {new}\n"
                f"{errors.REASONS}"
            )

    def saved_call(self, record: SavedCall, inputs: Sequence[torch.Tensor]) -> None:
        """Fills the slots of a saved call of this region call; the replay may end here."""
        record.fill(self, inputs)
        if record.then in ENDINGS or (self._place - 1 == self._end and record.then is not Then.REFILLS):
            raise Stop(self)

    def refilled(self) -> None:
        """Ends here if an emptied saved call, which has just been made again, was the last that is waited for."""
        if self._place - 1 == self._end:
            raise Stop(self)


Contexts = Callable[[], tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]]


class Options(NamedTuple):
    """The options of a region.

    `owner` is the module that the function belongs to, where the caller knows it: nothing else is then looked for in
    the function. `tile` says whether the call is one tile of several. `make` makes the calls; None for `RegionCall`.
    Code that torch.compile traces names `ambients`: before torch 2.13, Dynamo has no source for a default.
    """

    name: str
    store: Store | None = None
    ambients: tuple[state.Ambient, ...] = state.DEFAULT
    check: str = "metadata"
    early_stop: bool = True
    rng: bool = True
    contexts: Contexts | None = None
    owner: torch.nn.Module | None = None
    tile: bool = False
    make: Callable[..., RegionCall] | None = None


class Recording(Run):
    """The forward of a region call: writes its tape, and puts slots into the graph in the place of tensors.

    Attributes:
        region_call: The call, which stays when the forward is over.
        alive: The versions of its inputs and parameters, by identity: these the graph holds itself.
    """

    pack: Callable[[torch.Tensor], Packed]

    def __init__(self, region_call: RegionCall, outer: Run | None) -> None:
        self.region_call, self.name, self.tape = region_call, region_call.name, region_call.tape
        self.modules = region_call.world.modules
        self.alive: dict[int, int] = {}
        self._aliases: dict[int, torch.Tensor] = {}
        self._ordinary = {torch.Tensor}  # classes of tensors that are looked at no further
        if outer is not None:
            self.follow(outer.enter(self.tape))

    @property
    def ambients(self) -> Sequence[state.Ambient]:  # type: ignore[override]
        """The generators and states that a saved call in it may advance."""
        return self.region_call.world.generators.ambients

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], outer: Run | None) -> Any:
        """Runs the function under the hooks."""
        self.pack = pack = self._packer()
        _torch.push_hooks(pack, unpack)
        thread.run = self
        try:
            if not self.region_call.world.watches:
                return fn(*args, **kwargs)
            with Watching(self.modules):
                return fn(*args, **kwargs)
        finally:
            thread.run = outer
            _torch.pop_hooks()
            del self.pack, pack  # which refers to the call
            self.alive, self._aliases = {}, {}  # an identity means something while what it identifies is alive

    def alias(self, record: SavedCall) -> None:
        """Notes the stored outputs of a saved call: while the forward runs, the graph may hold them directly.

        From here on a tensor is known by its storage alone: what a replay returns has the storage of what the call
        returned, but need not be a view where that was one.
        """
        self._ordinary.clear()
        if self.region_call.store is None:
            for tensor in record.held():
                self._aliases[storage_id(tensor)] = tensor

    def put(self, tensor: torch.Tensor) -> Packed:
        """Holds an input of a region inside this one."""
        return without_history(self.pack(tensor))

    @tracing.as_it_is
    def _packer(self) -> Callable[[torch.Tensor], Packed]:
        """The pack hook of the forward. What it needs for every tensor is a local of its own.

        Parameters and inputs are known by identity, and so are their views. What has their storage without being a
        view of them is looked for only where there can be such: where an input is a view, or a saved call has returned
        a tensor that is kept.
        """
        region_call, modules, known = self.region_call, self.modules, self.alive
        if modules is not None:
            known.update(zip(map(id, modules.weights), modules.weight_versions, strict=True))
        known.update(region_call.taking.ids)
        alive, add, new, ref, held = known.get, self.tape.entries.append, Slot.__new__, weakref.ref, HELD
        ordinary = self._ordinary
        bases = () if region_call.taking.views else ordinary
        watched = region_call.fingerprints is not None or region_call.observers is not None

        def pack(tensor: torch.Tensor) -> Packed:
            version = alive(id(tensor))
            if version is not None:
                add(held)
                now = tensor._version  # once changed here, its history leads to the very node that saves it
                return (tensor if now == version else tensor.detach()), now
            base = tensor._base
            if base is None:
                gone = type(tensor) in ordinary or not self._is_alive(tensor)
            else:
                gone = alive(id(base)) is None and (type(base) in bases or not self._is_alive(tensor))
            if not gone:
                add(held)
                return tensor.detach(), tensor._version
            slot = new(Slot)  # as its constructor makes it, without that call
            slot.owner, slot.meta, slot.content = region_call, meta(tensor), None
            add(ref(slot))
            if watched:
                self._watched(tensor)
            return slot

        pack.__dict__.update(_torch.SEE_THROUGH)
        return pack

    def _watched(self, tensor: torch.Tensor) -> None:
        """Shows a tensor whose slot is in the graph to those who look on."""
        region_call = self.region_call
        if region_call.fingerprints is not None:
            region_call.fingerprints.add(self.place() - 1, tensor)
        if region_call.observers is not None:
            region_call.observers.dropped(region_call, tensor)

    def _is_alive(self, tensor: torch.Tensor) -> bool:
        """Says whether a tensor has the storage of an input, a parameter or a kept output."""
        weight = parameter_of(tensor)
        if weight is not None:
            self.region_call.used.append((tensor if tensor.is_leaf else tensor.detach(), tensor._version))
            return True
        storage = storage_id(tensor)
        return storage in self.region_call.taking.storages or storage in self._aliases


class Phase(Enum):
    """Where a region call is."""

    FORWARD = "its forward runs, or has raised"
    REBUILDS = "its forward is over, and replays rebuild what backward needs"
    HOLDS_ALL = "its forward is over, and the graph holds all that it saved: no replay ever runs"


class RegionCall:
    """One call of a region: what its replays need. The slots in the graph hold it, and it dies with the last of them.

    Attributes:
        recording: The class of its forward.
        saved_call: The class of the saved calls in it.
        later: Slots outside of the region that are views of its results (`discard.py`), filled by its replays.
        phase: Where it is.
        transient: Whether it is told of each slot that is read.
        resident: Whether its slots are full, because it is elastic.
        used: Weights that the forward has met and no module or argument has shown, with their versions.
        overrides: Decides about calls with a name in it.
        observers: Its observers; None without any.
    """

    recording = Recording
    saved_call = SavedCall
    phase = Phase.FORWARD
    later: SavedCall | None = None
    fingerprints: Fingerprints | None = None
    streams: tuple[Any, ...] = ()
    transient = resident = False
    _contexts: contextlib.AbstractContextManager[Any] | None = None

    def __init__(
        self, options: Options, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], outer: Run | None
    ) -> None:
        self.options, self.name, self.store = options, options.name, options.store
        if outer is not None:
            outer.event()
        self.tape = Tape()
        self.overrides, self.observers = thread.overrides, here.observers
        self._lock = RLock()
        if options.check == "values":
            self.fingerprints = _new_fingerprints()
        if self.store is None and ((hooks := _torch.ambient_hooks()) is not None or thread.waiting):
            self.store = self._store_around(hooks, fn, args, kwargs, outer)
        left = state.left_to(options.ambients) if len(options.ambients) > len(state.DEFAULT) else ()
        self.taking = taking = Taking(self.name, self.store, left)
        self._args: list[Any] = []
        for i, value in enumerate(args):
            if type(value) is torch.Tensor:
                self._args.append(taking.tensor(value, i))
            else:
                self._args.append(value if type(value) in PLAIN else taking.argument(value, i))
        self._kwargs = {key: taking.argument(value, Name(key)) for key, value in kwargs.items()} if kwargs else kwargs
        passed = bool(taking.modules)
        owner = fn if isinstance(fn, torch.nn.Module) else options.owner or _owner_of(fn)
        self._fn: Any = fn if owner is not None else taking.function(fn)
        if devices.ACCELERATOR is not None and _torch.in_use():
            self.streams = _torch.streams_of(taking.given)
        ambients = (*options.ambients, ComputedWeights()) if ComputedWeights.cached() else options.ambients
        around = None if outer is None else outer.modules
        self.world = World(taking, ambients, owner, passed, around, options.rng)
        self.used: list[tuple[torch.Tensor, int]] = []
        thread.calls += 1

    def _store_around(
        self, hooks: tuple[Any, Any] | None, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outer: Run | None
    ) -> Store | None:
        """Returns what surrounds the call and holds its inputs: saved-tensor hooks, or a result to be discarded."""
        if hooks is not None:
            return _ambient_store(outer, hooks)
        from .discard import store_for

        return store_for(self.name, fn, args, kwargs)

    @property
    def final(self) -> RegionCall:
        """The call whose forward went through to its end: this one, unless it was run again."""
        return self

    # --- forward --------------------------------------------------------------------------------------------------

    def forward(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], outer: Run | None) -> Any:
        """Runs the function under the hooks."""
        if self.options.contexts is not None:
            before, self._contexts = self.options.contexts()
            fn = _within(before, fn)
        if self.observers is not None:
            fn = self.observers.around("forward", self.name, self, fn)
        recording = self.recording(self, outer)  # by now, since the region around this one may have saved its inputs
        try:
            result = recording.run(fn, args, kwargs, outer)
        except BaseException as error:
            self._forget()
            if isinstance(error, RuntimeError):
                tell(error, self.name, replaying=recording.replaying)
            raise
        finally:
            self.taking.settle()
        if self.fingerprints is not None:
            self.fingerprints.flush()
        entries = self.tape.entries
        rebuilds = entries.count(HELD) < len(entries) or not self.options.early_stop
        self.phase = Phase.REBUILDS if rebuilds else Phase.HOLDS_ALL
        if rebuilds:
            try:
                self.world.settle()
            except BaseException:  # no memory for a copy: what is held may lead back to the graph
                self._forget()
                raise
        else:  # nothing to rebuild; what the graph holds keeps the pack hook alive, and so this call
            self._forget()
        if not recording.replaying:
            self.tape.close(self.options.early_stop, outermost=outer is None)
        return result

    def _forget(self) -> None:
        """Drops everything: there will be no replay."""
        self._args, self._kwargs, self._fn, self.used = [], {}, None, []
        self.taking.forget()
        self.world.forget()

    def _saved_calls(self) -> Iterator[SavedCall]:
        if self.later is not None:
            yield self.later
        yield from self.tape.calls(SavedCall)

    # --- replay ---------------------------------------------------------------------------------------------------

    def rebuild(self, slot: Slot) -> torch.Tensor:
        """Replays the region, unless another thread has done it meanwhile, and returns the slot's tensor."""
        with self._lock:
            if not isinstance(slot.content, torch.Tensor):
                replay = self._replay
                if self.observers is not None:
                    replay = self.observers.around("rebuild", self.name, self, replay)
                try:
                    if self.streams:
                        with _torch.on_streams(self.streams):
                            done = replay(slot)
                    else:
                        done = replay(slot)
                except BaseException as error:
                    self._failed(error)
                    raise
                if not isinstance(slot.content, torch.Tensor):
                    raise errors.MismatchError(self._missed(slot, done))
            tensor: Any = slot.content
            if _torch.graph_task_id() == -1:
                self.transient = True
                self.release()
                return tensor
            # Where the graph is not retained, autograd empties nodes. Else a slot is emptied once it is read, unless
            # this is one of several parts of a backward.
            self.transient = False
            if _torch.exec_group() is None:
                task = this_task()
                self.transient = task.retains
                task.told[id(self)] = weakref.ref(self)
            return tensor

    def _failed(self, error: BaseException) -> None:
        """After a replay that has raised: empties every slot, and raises an error that says more, where one can."""
        if isinstance(error, RuntimeError) and not isinstance(error, errors.MismatchError):
            tell(error, self.name, replaying=True)
        self.release()
        if isinstance(error, errors.MismatchError):
            self._explain(error)

    def _missed(self, slot: Slot, replay: Replay) -> str:
        """Text for a replay that has ended, and has left a slot empty."""
        for record in self._saved_calls():
            if record.owns(slot):
                return errors.missed_call(self.name, record.name)
        return _fewer(replay, slot)

    def _explain(self, error: errors.MismatchError) -> None:
        """Raises an error that says more than a mismatch does, where more is known."""
        changed = self._changed()
        if changed:
            raise errors.ChangedError(changed) from None
        from .mismatch import OpTrace

        if isinstance(self._contexts, OpTrace):
            raise errors.MismatchError(f"{error}\n{self._contexts.explain()}") from None

    def _changed(self) -> str:
        """Text for what has been changed since the forward so that another replay came of it; "" if that is unknown."""
        owner: Any = getattr(getattr(self._fn, "func", self._fn), "__self__", None)
        text: str = owner.changed() if hasattr(owner, "changed") else ""
        trained = {id(getattr(node, "variable", None)) for node in _torch.upstream()}
        for module in () if text or self.world.modules is None else [*self.world.modules.seen.values()]:
            for name, weight in module._parameters.items():  # pyright: ignore[reportPrivateUsage]
                if weight is not None and not weight.requires_grad and id(weight) in trained:
                    return (
                        f"parameter '{name}' of {type(module).__name__}, which {self.name} reads, has been frozen "
                        "since the forward (requires_grad_(False)), so the replay saves other tensors than the forward "
                        "did.\n"
                        "  Freeze it before the forward, or after backward()."
                    )
        return text

    def _repeats_calls(self, error: Exception) -> bool:
        """Whether a replay may have failed because a gradient was asked for through a saved call, and another is made.

        What a saved call returns has no history in a replay. In the next one the calls are made.
        """
        asked = any(text in str(error) for text in _NO_HISTORY) or isinstance(error, (TypeError, AttributeError))
        if not asked or isinstance(error, errors.RecomputeError) or is_exhaustion(error):
            return False
        return sum(record.repeat() for record in self.tape.all_calls(SavedCall)) > 0

    def check(self) -> None:
        """Raises a `ChangedError` if the replay would read what has been changed in place since the forward."""
        self.taking.check()
        modules = self.world.modules
        if modules is not None:
            modules.check()
        for tensor, version in self.used:
            if tensor._version != version:
                name = (modules is not None and name_in(modules.seen.values(), tensor)) or "a weight"
                raise errors.ChangedError(changed_weight(name, self.name, version, tensor._version))

    def opened(self, exchange: Exchange) -> tuple[Opened, Callable[..., Any], list[Any], dict[str, Any]]:
        """Returns what a replay finds, with the function and the arguments; `exchange` puts back what differs."""
        found = self.world.open(exchange)
        args: list[Any] = []
        for value in self._args:
            args.append(value.open(exchange) if type(value) in TAKEN else value)  # noqa: PERF401 - one call less
        kwargs = {key: open_(value, exchange) for key, value in self._kwargs.items()} if self._kwargs else {}
        fn = self._fn.open(exchange) if type(self._fn) in TAKEN else self._fn
        for box in self.taking.boxes:
            box.open(exchange)
        return found, fn, args, kwargs

    def _replay(self, opened: Slot) -> Replay:
        self.check()
        modules = self.world.modules
        exchange = Exchange(self.name, () if modules is None else modules.seen)
        found, fn, args, kwargs = self.opened(exchange)
        if self._contexts is not None:
            fn = _within(self._contexts, fn)
        run = Replay(self, exchange, opened)
        if self.observers is not None:
            fn = self.observers.around("replay", self.name, run, fn)
        grad, outer, overrides, observers = torch.is_grad_enabled(), thread.run, thread.overrides, here.observers
        _torch.set_grad_enabled(True)
        thread.run, thread.overrides, here.observers = run, self.overrides, self.observers
        watching = Watching(None) if self.world.watches else None
        try:
            if watching is not None:
                watching.__enter__()
            self.world.run(exchange, found, run.go, fn, args, kwargs)
            if self.fingerprints is not None:
                run.compare_values()
            return run
        except (Exception, Read) as error:
            if not self._another_helps(error):
                raise
        finally:
            if watching is not None:
                watching.__exit__()
            thread.run, thread.overrides, here.observers = outer, overrides, observers
            _torch.set_grad_enabled(grad)
        return self._replay(opened)

    def _another_helps(self, error: Exception | Read) -> bool:
        """After a replay that has raised: changes what the next one does; False where that would end the same way."""
        if isinstance(error, Read):
            from .shape_only import give_values

            give_values(self.name, error)
            return True
        if self._repeats_calls(error):
            return True
        if any(text in str(error) for text in _NO_HISTORY) and self.taking.holds_results():
            raise errors.RecomputeError(f"{error}\n  {_through_an_input(self.name)}") from error
        return False

    def was_read(self, slot: Slot, tensor: torch.Tensor) -> None:
        """Empties a slot that has been read."""
        slot.was_read(tensor)

    def end(self) -> None:
        """Empties every slot at the end of a backward call."""
        self.release()

    def release(self) -> None:
        """Empties every slot."""
        with self._lock:  # another thread may just be rebuilding
            for slot in self.tape.slots():
                slot.empty()
            for record in self._saved_calls():
                record.release()


_NO_HISTORY = ("appears to not have been used in the graph", "does not require grad")


def _through_an_input(region: str) -> str:
    return (
        f"The replay of {region} asks for a gradient, and cannot go on behind the region's inputs: a tensor that was "
        "computed before the region is a leaf there, without the operations that made it.\n"
        "  Compute it inside the region; or take this gradient outside of it, and pass the result as an argument."
    )


def _within(context: contextlib.AbstractContextManager[Any], fn: Callable[..., Any]) -> Callable[..., Any]:
    def inner(*args: Any, **kwargs: Any) -> Any:
        with context:
            return fn(*args, **kwargs)
        raise errors.RecomputeError(
            f"the context {errors.kind(context)} provided by context_fn suppressed an exception raised during the "
            "checkpointed call, so there is no result to return.\n"
            "  Its __exit__ must return False or None."
        )

    return inner


def _owner_of(fn: Any) -> torch.nn.Module | None:
    """The module whose forward a function is."""
    owner = getattr(fn, "__self__", None)
    return owner if isinstance(owner, torch.nn.Module) and getattr(fn, "__name__", "") == "forward" else None


def _ambient_store(outer: Run | None, hooks: tuple[Any, Any]) -> Store:
    """The saved-tensor hooks around a region, as its store."""
    if isinstance(outer, (Recording, Replay)) and getattr(outer, "pack", None) == hooks[0]:
        return Around(outer.put, lend)
    return Hooks(*hooks)
