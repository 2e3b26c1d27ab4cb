"""One call of a region: its forward under hooks that keep nothing, and its replays, which fill what backward needs.

A `RegionCall` holds the call's arguments (or what a store made of them), the state it was made in, and weak references
to its slots; the graph holds the slots, and they the call. When the last slot dies, so does everything.

A `Replay` runs the function again. Its pack hook meets as many tensors in the same order as the forward's did and puts
each, detached, into the slot of its turn, if it has one: what the forward kept in the graph is passed by. So the
forward alone distinguishes inputs and stored outputs from the rest. A replay could not: one tensor of the forward may
be two there, if it is an input and also a global, a carried value, or the output of a saved call.

Returning the tensor itself from a pack hook would tie an operation's output to its own node and leak (softmax, exp), so
what the replay's own graph holds is the detached tensor too; that graph is dropped at once. A tensor that requires no
grad has no node, and is held as it is.

Where a replay ends is said in `region.py`. Ending means raising `Stop` through the user's function; nothing else leaves
it. A module with forward hooks that ends after the last slot was filled ends the replay before these run: backward is
inside that module, and under ZeRO-3 its forward hook would take away the weights that the next node reads.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from _thread import RLock
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

from .. import _torch, errors, state
from .._torch import devices, parameter_of, storage_id, tracing
from .._torch.modes import ComputedWeights
from .._torch.tensors import meta, say
from ..state.observer import here, is_exhaustion, tell
from ..state.values import CallRecord, Key, Run, thread
from ..stores import Hooks, Store
from .backward_task import this_task
from .exchange import Exchange
from .guards import World
from .modules import Modules, Watching, name_in
from .saved_call import SavedCall
from .shape_only import Read, ShapeOnly, give_values, missing
from .slots import KEPT, Packed, Slot, Stop, lend, unpack, without_history
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


def _fewer(region: str, expected: int, got: int, slot: Slot | None) -> str:
    """Text for a replay that saved too few tensors."""
    return (
        f"the replay of {region} saved fewer tensors than its forward: {got} now, {expected} then. (A different number "
        f"of tensors was saved during the original forward and recomputation.){_needed_by(slot)}\n"
        f"{errors.WHY}"
    )


def _more(region: str, expected: int) -> str:
    """Text for a replay that saved too many tensors."""
    return (
        f"the replay of {region} saved more tensors than its forward: {expected} then, and now at least one more. "
        f"(trying to save more tensors during recomputation than during the original forward pass)\n{errors.WHY}"
    )


class Replay(Run):
    """One replay of a region call: fills the slots that are still open, then stops."""

    pack: Callable[..., Packed]
    replaying = True
    _fingerprints: Fingerprints | None = None
    _module_hook: RemovableHandle | None = None

    def __init__(self, region_call: RegionCall, ids: Container[int], opened: Slot | None = None) -> None:
        self.name, self.record = region_call.name, region_call.record
        self.ambients = region_call.world.generators.ambients
        self._region_call, self._ids, self._opened = region_call, ids, opened
        self.filled, self._done, self._unfinished, self._opener, self._last = 0, False, -1, -1, -1
        self._stop = stop = region_call.need() if region_call.options.early_stop else None
        if stop is not None and stop[1] == math.inf:
            self._last = int(stop[0])
        if region_call.fingerprints is not None:
            self._fingerprints = _new_fingerprints()

    def go(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Runs the function under the hooks, as far as it is needed."""
        self.pack = pack = self._packer()
        _torch.push_hooks(pack, unpack)
        try:
            result = fn(*args, **kwargs)
        except Stop as stop:
            if stop.args[0] is not self:
                raise
            return
        finally:
            _torch.pop_hooks()
            del self.pack, pack  # which refers to this replay
            if self._module_hook is not None:
                self._module_hook.remove()
            if self._fingerprints is not None:
                self._fingerprints.flush()
        expected = len(self._region_call.slots)
        if self.filled < expected and not self._done:
            waiting = [slot for ref in self._region_call.slots[self.filled :] if (slot := ref()) is not None]
            first = waiting[0] if waiting else None
            raise errors.MismatchError(_fewer(self.name, expected, self.filled, first))
        if self._region_call.later is not None:
            results = _torch.tensors_in(result)
            self._region_call.later.check(self.name, results)
            self._region_call.later.fill(self.name, results)

    def saved(self) -> int:
        """Returns how many tensors autograd has saved by now."""
        return self.filled

    def skip(self, saved: int, records: int, children: int) -> bool:
        """Goes on at the moment at which a value was saved.

        The function might do the work all the same and fill the wrong slots, so from here on the replay does not stop
        early: it runs to its end, and the number of slots must come out exactly.
        """
        if (saved, records, children) == (self.filled, self._next_record, self._next_child):
            return True
        skipped = super().skip(saved, records, children)
        if skipped:
            self.filled = saved
            self._last = -1
            self._stop = None
        return skipped

    def event(self) -> None:
        """Ends the replay if every open slot has been filled."""
        if self._done:
            raise Stop(self)

    @tracing.as_it_is
    def _module_ends(self, module: torch.nn.Module, *_: Any) -> None:
        # Of a module without hooks torch calls this only where others follow modules, and a replay is the same there.
        if thread.run is self and vars(module).get("_forward_hooks"):
            raise Stop(self)

    @tracing.as_it_is
    def _packer(self) -> Callable[..., Packed]:
        """The pack hook of the replay: fills the next slot. What it needs for every tensor is a local of its own."""
        region_call, ids, sequence_number = self._region_call, self._ids, _torch.sequence_number
        opened = self._opened or KEPT  # a saved call is no slot
        slots, kept, check = region_call.slots, KEPT, region_call.options.check != "none"
        count, special = len(slots), bool(self._fingerprints is not None or region_call.streams)
        recorded = region_call.record is not None

        def pack(tensor: torch.Tensor, finished: bool = False) -> Packed:
            index = self.filled
            ref = slots[index] if index < count else None
            if ref is kept:
                self.filled = index + 1
                held = tensor if tensor.is_leaf else tensor.detach()  # a view may be its own node's result
                return (held, held._version) if finished else held
            if self._done:
                raise Stop(self)
            self.filled = index + 1
            if recorded and type(tensor) is ShapeOnly:
                raise missing(tensor, "autograd, which saves it")
            differentiable = tensor.requires_grad
            rebuilt = tensor.detach() if differentiable else tensor
            slot = None
            if ref is not None:
                slot = ref()
            elif region_call.complete:  # else for a backward inside its own forward, not there yet
                raise errors.MismatchError(_more(self.name, count))
            if slot is not None:
                if check and (slot.meta != meta(tensor) or id(tensor) in ids):
                    self._differs(slot, index, tensor)
                slot.version = rebuilt._version  # before the tensor: another thread may be waiting for that
                if not special:
                    slot.tensor = rebuilt
            if special:
                self._fill(slot, index, tensor, rebuilt)
            if not differentiable:
                self._unfinished = sequence_number()
            if slot is opened:
                self._opener = sequence_number()
            if index == self._last:
                self._done = True
                if finished or (differentiable and self._unfinished != sequence_number()) or self._is_whole():
                    raise Stop(self)
                self._module_hook = register_module_forward_hook(self._module_ends)
            return rebuilt

        pack.__dict__.update(_torch.SEE_THROUGH)
        return pack

    def _fill(self, slot: Slot | None, index: int, tensor: torch.Tensor, rebuilt: torch.Tensor) -> None:
        """Fills a slot where there are streams or fingerprints."""
        if slot is not None:
            slot.stream = _torch.stream_for(rebuilt) if self._region_call.streams else None
            slot.tensor = rebuilt
        if self._fingerprints is not None:
            self._fingerprints.add(index, tensor)

    def _is_whole(self) -> bool:
        """Whether what was saved last is known to be written: its node reads now what it saved, and is not RReLU's."""
        node = _torch.current_node() if self._opener == _torch.sequence_number() else None
        return node is not None and "Rrelu" not in node.name()

    def put(self, tensor: torch.Tensor) -> Packed:
        """Keeps an input of a region inside this one; it is finished, whether it requires grad or not."""
        return without_history(self.pack(tensor, finished=True))

    def _differs(self, slot: Slot, index: int, tensor: torch.Tensor) -> None:
        if slot.meta == meta(tensor) and self._region_call.taking.views:
            return  # of a view, compiled code saves an alias; a replay's inputs are leaves, which it saves as they are
        then, now = say(slot.meta), say(meta(tensor))
        if id(tensor) in self._ids:
            now += ", an input of the region"
        raise errors.MismatchError(
            f"the replay of {self.name} saved another tensor than its forward at position {index}:\n"
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
            index, was, new = found
            raise errors.MismatchError(
                f"the replay of {self.name} saved a tensor with other values than its forward at position {index}; "
                f"those before it are the same to the last bit.{_needed_by(self._region_call.slots[index]())}\n"
                f"      forward: {was}\n"
                f"      replay:  {new}\n"
                f"{errors.REASONS}"
            )

    def saved_call(self, record: SavedCall, inputs: Sequence[torch.Tensor]) -> None:
        """Fills the slots of a saved call of this region call; the replay may end here."""
        record.fill(self.name, inputs)
        if not record.emptied and (self._stop == record.key or not record.finished or record.dropped):
            raise Stop(self)

    def passed(self, record: SavedCall) -> None:
        """Ends here if an emptied saved call, which has just been made again, was the last that is waited for."""
        if self._stop == record.key:
            raise Stop(self)


Contexts = Callable[[], tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]]
NEVER: Key = (-1, 0)
_UNKNOWN: Mapping[int, int] = {}
_END: Key = (math.inf, math.inf)


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


class RegionCall(Run):
    """One call of a region: its forward run, and what its replays need.

    Attributes:
        saved_call: The class of the saved calls in it.
        slots: For each tensor that autograd has saved in the region, in order, its slot, or `KEPT`.
        later: Slots outside of the region that are views of its results (`discard.py`), filled by its replays.
        replays: Whether a replay may have something to do; where all that was saved is alive anyway, none ever runs.
        kept: Whether its slots are full, because it is elastic.
        overrides: Decides about calls with a name in it.
        observers: Its observers; None without any.
    """

    saved_call = SavedCall
    pack: Callable[[torch.Tensor], Packed]
    later: SavedCall | None = None
    fingerprints: Fingerprints | None = None
    streams: tuple[Any, ...] = ()
    transient = complete = replays = kept = False
    alive: Mapping[int, int] = _UNKNOWN
    _aliases: dict[int, torch.Tensor] | None = None
    _contexts: contextlib.AbstractContextManager[Any] | None = None
    _nested: tuple[weakref.ref[RegionCall] | None, ...] = ()

    def __init__(
        self, options: Options, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], outer: Run | None
    ) -> None:
        self.options, self.name, self.store = options, options.name, options.store
        if outer is not None:
            outer.event()
            if outer.replaying:
                self.read(outer.next_child())
        self.overrides, self.observers = thread.overrides, here.observers
        self.slots: list[weakref.ref[Slot]] = []
        self._ordinary = {torch.Tensor}  # classes of tensors that are looked at no further
        self._first, self._lock = _torch.sequence_number(), RLock()
        if options.check == "values":
            self.fingerprints = _new_fingerprints()
        if self.store is None:
            hooks = _torch.ambient_hooks()
            if hooks is not None:
                self.store = _ambient_store(outer, hooks)
            elif thread.waiting:
                from .discard import store_for

                self.store = store_for(self.name, fn, args, kwargs)
        left = state.left_to(options.ambients) if len(options.ambients) > len(state.DEFAULT) else ()
        self.taking = taking = Taking(self.name, self.store, left)
        self._args: Sequence[Any] = args
        if not PLAIN.issuperset(map(type, args)):
            self._args = [
                taking.tensor(value, i) if type(value) is torch.Tensor else taking.argument(value, i)
                for i, value in enumerate(args)
            ]
        self._kwargs = {key: taking.argument(value, Name(key)) for key, value in kwargs.items()} if kwargs else kwargs
        passed = len(taking.modules)
        owner = fn if isinstance(fn, torch.nn.Module) else options.owner or _owner_of(fn)
        self._fn: Any = fn if owner is not None else taking.function(fn)
        if devices.ACCELERATOR is not None and _torch.in_use():
            self.streams = _torch.streams_of(taking.given)
        ambients = (*options.ambients, ComputedWeights()) if ComputedWeights.cached() else options.ambients
        self.world = world = World(taking, ambients)
        self._watches = passed > 0 or (owner is None and taking.may_call_modules)
        if owner is not None or self._watches:
            around = None if outer is None else outer.modules
            self.modules = world.modules = modules = Modules(taking, around, world.generators if options.rng else None)
            if owner is not None:
                modules.add(owner)
            for module in taking.modules:
                modules.add(module, below=thread.calls_hidden)
        if options.rng and taking.generators:
            world.generators.add(taking.generators)
        self._used: list[tuple[torch.Tensor, int]] = []
        thread.calls += 1

    @property
    def ambients(self) -> Sequence[state.Ambient]:  # type: ignore[override]
        """The generators and states that a saved call in it may advance."""
        return self.world.generators.ambients

    def alias(self, record: SavedCall) -> None:
        """Notes the stored outputs of a saved call: while the forward runs, the graph may hold them directly.

        From here on a tensor is known by its storage alone: what a replay returns has the storage of what the call
        returned, but need not be a view where that was one.
        """
        self._ordinary.clear()
        if self.store is None:
            self._aliases = aliases = self._aliases or {}
            for tensor in record.held():
                aliases[storage_id(tensor)] = tensor

    @property
    def final(self) -> RegionCall:
        """The call whose forward went through to its end: this one, unless it was run again."""
        return self

    def nested(self, region_call: weakref.ref[RegionCall] | None) -> None:
        """Notes a region that ended inside this one."""
        self._nested = (*self._nested, region_call)

    # --- forward --------------------------------------------------------------------------------------------------

    def saved(self) -> int:
        """Returns how many tensors autograd has saved by now."""
        return len(self.slots)

    def put(self, tensor: torch.Tensor) -> Packed:
        """Keeps an input of a region inside this one."""
        return without_history(self.pack(tensor))

    @tracing.as_it_is
    def _packer(self) -> Callable[[torch.Tensor], Packed]:
        """The pack hook of the forward. What it needs for every tensor is a local of its own.

        Parameters and inputs are known by identity, and so are their views. What has their storage without being a
        view of them is looked for only where there can be such: where an input is a view, or a saved call has returned
        a tensor that is kept.
        """
        modules = self.modules
        self.alive = known = {}
        if modules is not None:
            known.update(zip(map(id, modules.weights), modules.weight_versions, strict=True))
        known.update(self.taking.ids)
        alive, add, new, ref, kept = known.get, self.slots.append, Slot, weakref.ref, KEPT
        ordinary = self._ordinary
        bases = () if self.taking.views else ordinary
        watched = self.fingerprints is not None or self.observers is not None

        def pack(tensor: torch.Tensor) -> Packed:
            version = alive(id(tensor))
            if version is not None:
                add(kept)
                now = tensor._version  # once changed here, its history leads to the very node that saves it
                return (tensor if now == version else tensor.detach()), now
            base = tensor._base
            if base is None:
                gone = type(tensor) in ordinary or not self._is_alive(tensor)
            else:
                gone = alive(id(base)) is None and (type(base) in bases or not self._is_alive(tensor))
            if not gone:
                add(kept)
                return tensor.detach(), tensor._version
            slot = new()
            slot.owner, slot.meta, slot.tensor = self, meta(tensor), None
            add(ref(slot))
            if watched:
                self._watched(tensor)
            return slot

        pack.__dict__.update(_torch.SEE_THROUGH)
        return pack

    def _watched(self, tensor: torch.Tensor) -> None:
        """Shows a tensor that is not kept to those who look on."""
        if self.fingerprints is not None:
            self.fingerprints.add(len(self.slots) - 1, tensor)
        if self.observers is not None:
            self.observers.dropped(self, tensor)

    def _is_alive(self, tensor: torch.Tensor) -> bool:
        """Says whether a tensor has the storage of an input, a parameter or a kept output."""
        weight = parameter_of(tensor)
        if weight is not None:
            self._used.append((tensor if tensor.is_leaf else tensor.detach(), tensor._version))
            return True
        storage = storage_id(tensor)
        return storage in self.taking.storages or storage in (self._aliases or ())

    def forward(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], outer: Run | None) -> Any:
        """Runs the function under the hooks."""
        if self.options.contexts is not None:
            before, self._contexts = self.options.contexts()
            fn = _within(before, fn)
        if self.observers is not None:
            fn = self.observers.around("forward", self.name, self, fn)
        self.pack = pack = self._packer()
        _torch.push_hooks(pack, unpack)
        thread.run = self
        try:
            if self._watches:
                with Watching(self.modules):
                    result = fn(*args, **kwargs)
            else:
                result = fn(*args, **kwargs)
        except BaseException as error:
            self._forget()
            if outer is not None and not self.replaying:  # which may catch the error; its replay counts this call too
                hand_over(self.record, outer, None)
            if isinstance(error, RuntimeError):
                tell(error, self.name, replaying=self.replaying)
            raise
        finally:
            thread.run = outer
            _torch.pop_hooks()
            del self.pack, pack  # which refers to this call
            self.taking.settle()
            self.alive, self._aliases = _UNKNOWN, None  # an identity means something while what it identifies is alive
        self.complete = True
        if self.fingerprints is not None:
            self.fingerprints.flush()
        slots = self.slots
        self.replays = slots.count(KEPT) < len(slots) or self.record is not None or not self.options.early_stop
        if self.replays:
            try:
                self.world.settle()
            except BaseException:  # no memory for a copy: what is held may lead back to the graph
                self._forget()
                raise
        else:  # nothing to rebuild; what the graph holds keeps the pack hook alive, and so this call
            self._forget()
        if (outer is not None or self.record is not None) and not self.replaying:
            self._settle(outer)
        return result

    def _forget(self) -> None:
        """Drops everything: there will be no replay."""
        self._args, self._kwargs, self._fn, self._used = [], {}, None, []
        self.taking.forget()
        self.world.forget()
        self.modules = None

    def _settle(self, outer: Run | None) -> None:
        if self.record is not None:
            mark_not_needed(self.record, self.need() if self.options.early_stop else _END)
            if self.record.values:
                alive = [ref() is not None for ref in self.slots]
                self.record.live = alive, [ref is not None and ref() is not None for ref in self._nested]
        hand_over(self.record, outer, weakref.ref(self))

    def need(self) -> Key:
        """The last moment of the forward that backward still waits for; `NEVER` if none."""
        last = len(self.slots) - 1
        while last >= 0 and self.slots[last]() is None:
            last -= 1
        need: Key = (last, math.inf) if last >= 0 else NEVER
        if self.record is None and self.later is None:
            return need
        later = (record.key for record in reversed(self._saved_calls()) if record.needed)
        return max(need, next(later, NEVER))

    def _saved_calls(self) -> Sequence[SavedCall]:
        later = () if self.later is None else (self.later,)
        if self.record is None:
            return later
        return [*later, *[record for record in self.record.records if isinstance(record, SavedCall)]]

    # --- replay ---------------------------------------------------------------------------------------------------

    def rebuild(self, slot: Slot) -> torch.Tensor:
        """Replays the region, unless another thread has done it meanwhile, and returns the slot's tensor."""
        with self._lock:
            if not isinstance(slot.tensor, torch.Tensor):
                replay = self._replay
                if self.observers is not None:
                    replay = self.observers.around("rebuild", self.name, self, replay)
                try:
                    if self.streams:
                        with _torch.on_streams(self.streams):
                            filled = replay(slot)
                    else:
                        filled = replay(slot)
                except errors.MismatchError as error:
                    self.release()
                    self._explain(error)
                    raise
                except BaseException as error:
                    if isinstance(error, RuntimeError):
                        tell(error, self.name, replaying=True)
                    self.release()
                    raise
                if not isinstance(slot.tensor, torch.Tensor):
                    for record in self._saved_calls():
                        if record.owns(slot):
                            raise errors.MismatchError(errors.missed_call(self.name, record.name))
                    raise errors.MismatchError(_fewer(self.name, len(self.slots), filled, slot))
            tensor: Any = slot.tensor
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
        for module in () if text or self.modules is None else [*self.modules.seen.values()]:
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
        found = [record for record in calls_in(self.record) if not record.repeated]
        for record in found:
            record.repeated = True
        return bool(found)

    def check(self) -> None:
        """Raises a `ChangedError` if the replay would read what has been changed in place since the forward."""
        self.taking.check()
        modules = self.modules
        if modules is not None:
            modules.check()
        for tensor, version in self._used:
            if tensor._version != version:
                name = (modules is not None and name_in(modules.seen.values(), tensor)) or "a weight"
                raise errors.ChangedError(changed_weight(name, self.name, version, tensor._version))

    def opened(self, exchange: Exchange) -> tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]:
        """The function and the arguments, for a replay."""
        world = self.world
        if world.modules is not None:  # before the arguments, which a module may hold as well
            exchange.places = world.modules.open(exchange)
        exchange.context = world.variables.open(exchange)
        args = [value.open(exchange) if type(value) in TAKEN else value for value in self._args]
        kwargs = {key: open_(value, exchange) for key, value in self._kwargs.items()} if self._kwargs else {}
        fn = self._fn.open(exchange) if type(self._fn) in TAKEN else self._fn
        for box in self.taking.boxes:
            box.open(exchange)
        return fn, args, kwargs

    def _replay(self, opened: Slot) -> int:
        self.check()
        exchange = Exchange(self.name)
        fn, args, kwargs = self.opened(exchange)
        if self._contexts is not None:
            fn = _within(self._contexts, fn)
        run = Replay(self, exchange.given, opened)
        if self.observers is not None:
            fn = self.observers.around("replay", self.name, run, fn)
        grad, outer, overrides, observers = torch.is_grad_enabled(), thread.run, thread.overrides, here.observers
        _torch.set_grad_enabled(True)
        thread.run, thread.overrides, here.observers = run, self.overrides, self.observers
        watching = Watching(None) if self._watches else None
        try:
            if watching is not None:
                watching.__enter__()
            self.world.run(exchange, run.go, fn, args, kwargs)
            if self.fingerprints is not None:
                run.compare_values()
            return run.filled
        except Read as read:
            give_values(self.name, read)
        except Exception as error:
            if not self._repeats_calls(error):
                raise
        finally:
            if watching is not None:
                watching.__exit__()
            thread.run, thread.overrides, here.observers = outer, overrides, observers
            _torch.set_grad_enabled(grad)
        return self._replay(opened)

    def was_read(self, slot: Slot, tensor: torch.Tensor) -> None:
        """Empties a slot that has been read."""
        slot.tensor = weakref.ref(tensor) if _torch.in_backward() else None

    def end(self) -> None:
        """Empties every slot at the end of a backward call."""
        self.release()

    def release(self) -> None:
        """Empties every slot."""
        with self._lock:  # another thread may just be rebuilding
            for ref in self.slots:
                if (slot := ref()) is not None:
                    slot.tensor = None
            for record in self._saved_calls():
                record.release()


_NO_HISTORY = ("appears to not have been used in the graph", "does not require grad")


def calls_in(record: CallRecord | None) -> Iterator[SavedCall]:
    """The saved calls of a region's call and of those inside it."""
    if record is not None:
        yield from (entry for entry in record.records if isinstance(entry, SavedCall))
        for _, child in record.children:
            yield from calls_in(child)


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
    if isinstance(outer, (RegionCall, Replay)) and getattr(outer, "pack", None) == hooks[0]:
        return Around(outer.put, lend)
    return Hooks(*hooks)


def hand_over(
    record: CallRecord | None, outer: Run | None, region_call: weakref.ref[RegionCall] | None, key: Key | None = None
) -> None:
    """Gives a finished region's record to the region around it, or drops what no replay will ever need.

    `key` is the moment of the outer forward after which replays pass the region by: by default the present one.
    """
    if outer is not None:
        outer.writing().children.append((outer.key() if key is None else key, record))
        if isinstance(outer, RegionCall):
            outer.nested(region_call)
    elif record is not None:
        _drop_spare(record)


def mark_not_needed(record: CallRecord, need: Key) -> None:
    """Marks the slots at or after the last moment that backward waits for: replays of this region end before it."""
    for call in record.records:
        if isinstance(call, SavedCall):
            call.not_needed = call.key >= need
    for key, child in record.children:
        if child is not None:
            child.not_needed = key >= need


def _drop_spare(record: CallRecord) -> None:
    for call in record.records:
        if isinstance(call, SavedCall) and call.not_needed:
            call.drop()
    for _, child in record.children:
        if child is not None and child.not_needed:
            _drop_spare(child)
