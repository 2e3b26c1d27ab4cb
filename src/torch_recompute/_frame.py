"""One call of a region: its forward under hooks that keep nothing, and what its replays need.

A frame holds the call's arguments (or what a store made of them), the world it was made in, and weak references to
its slots; the graph holds the slots, and they the frame. When the last slot dies, so does everything.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from _thread import RLock
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from . import _compat, _tree, errors, state
from ._compat import parameter_of, storage_id
from ._hollow import Read, give_values
from ._inputs import Around, Inputs
from ._late import store_for, waiting
from ._mismatch import Fingerprints, OpTrace, reader_of
from ._observer import here, tell
from ._reach import reach, rebuild
from ._replay import Replay
from ._saved_call import SavedCall
from ._slots import KEPT, Packed, Slot, lend, unpack, without_history
from ._task import leaves_undone, this_task
from ._tree import meta
from .stores import Hooks, Store
from .values import Key, Run, Trace, thread

Contexts = Callable[[], tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]]
NEVER: Key = (-1, 0)
_NONE: dict[int, torch.Tensor] = {}
_END: Key = (math.inf, math.inf)


class Options(NamedTuple):
    """How a region is to be run."""

    name: str
    store: Store | None = None
    ambients: tuple[state.Ambient, ...] = state.DEFAULT
    check: str = "metadata"
    early_stop: bool = True
    rng: bool = True
    contexts: Contexts | None = None


class Frame(Run):
    """One call of a region: its forward run, and what its replays need.

    Attributes:
        slots: For each tensor that autograd has saved in the region, in order, its slot, or `KEPT`.
        later: Slots outside of the region that are views of its results (`_discard.py`), filled by its replays.
        overrides: Decides about calls with a name in it.
        observers: Who observes it; None for nobody.
    """

    __slots__ = (
        *("__weakref__", "_aliased", "_aliases", "_contexts", "_ids"),
        *("_lock", "_first", "_nested", "_template", "_world"),
        *("brief", "complete", "fingerprints", "inputs", "later", "observers", "options"),
        *("overrides", "slots", "store", "streams", "transient"),
    )

    def __init__(
        self, options: Options, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], outer: Run | None
    ) -> None:
        super().__init__(options.name, None, False, options.ambients)
        if outer is not None:
            outer.event()
            if outer.replaying:
                self.trace, self.replaying = outer.next_child(), True
        self.options = options
        self.overrides, self.observers = thread.overrides, here.observers
        self.transient = self.brief = self.complete = self._aliased = False
        self._aliases: dict[int, torch.Tensor] = _NONE
        self._nested: tuple[weakref.ref[Frame] | None, ...] = ()
        self.store = options.store or _ambient_store(outer)
        self.later: SavedCall | None = None
        self.slots: list[weakref.ref[Slot]] = []
        self.fingerprints = Fingerprints() if options.check == "values" else None
        self._first, self._lock = _compat.sequence_number(), RLock()
        self._contexts: contextlib.AbstractContextManager[Any] | None = None
        call = _tree.Call(args, kwargs)
        self.streams = _compat.streams_of(call.leaves[i] for i in call.tensors) if _compat.in_use() else ()
        found = reach(fn, self._look_at(call) if call.others else ())
        if found is None:
            self._template: Any = fn
        else:
            self._template = found.template
            if found.generators and options.rng:
                self.ambients = (*self.ambients, *map(state.GeneratorRng, found.generators))
        if self.store is None and waiting.results:
            captured = () if found is None else found.tensors
            self.store = store_for(self.name, [*(call.leaves[i] for i in call.tensors), *captured])
        self._world = state.World(found, self.ambients, cells=self.store is None)
        thread.calls += 1
        self.inputs = Inputs(call, () if found is None else found.tensors, self.store, self.name)
        self._ids = self.inputs.ids

    def _look_at(self, call: _tree.Call) -> list[torch.nn.Module]:
        """The modules among the arguments; takes generators, refuses iterators."""
        modules: list[torch.nn.Module] = []
        for i in call.others:
            leaf = call.leaves[i]
            if isinstance(leaf, torch.nn.Module):
                modules.append(leaf)
            elif isinstance(leaf, torch.Generator):
                if self.options.rng:
                    self.ambients = (*self.ambients, state.GeneratorRng(leaf))
            elif isinstance(leaf, Iterator):
                raise errors.ArgumentError(
                    f"{call.label(i)} of {self.name} is a {errors.kind(leaf)}, which can be consumed only once: the "
                    "forward would leave nothing for the replay.\n"
                    "  Pass a list instead: list(...)."
                )
        return modules

    @property
    def restored(self) -> frozenset[int]:
        """The storages of tensors that hold other contents outside of the replay."""
        return self._world.restored()

    def alias(self, tensors: Iterable[torch.Tensor]) -> None:
        """Notes stored outputs of saved calls: while the forward runs, the graph may hold them directly.

        From here on a tensor is known by its storage alone: what a replay hands out has the storage of what the call
        returned, but need not be a view where that was one.
        """
        self._aliased = True
        if self.store is None:
            self._aliases = {**self._aliases, **{storage_id(tensor): tensor for tensor in tensors}}

    def nested(self, frame: weakref.ref[Frame] | None) -> None:
        """Notes a region that ended inside this one."""
        self._nested = (*self._nested, frame)

    # --- forward --------------------------------------------------------------------------------------------------

    def saved(self) -> int:
        """How many tensors autograd has saved by now."""
        return len(self.slots)

    @property
    def replays(self) -> bool:
        """Whether a replay may have something to do; where all that was saved is alive anyway, none ever runs."""
        slots = self.slots
        return slots.count(KEPT) < len(slots) or self.trace is not None or not self.options.early_stop

    @_compat.see_through
    def pack(self, tensor: torch.Tensor) -> Packed:
        """The pack hook of the forward."""
        version = self._ids.get(id(tensor))
        if version is not None:
            now = tensor._version  # once changed here, its history leads to the very node that saves it
            self.slots.append(KEPT)
            return (tensor if now == version else tensor.detach()), now
        if type(tensor) is not torch.Tensor or self._aliased or tensor._is_view():
            parameter = parameter_of(tensor)
            if parameter is not None:
                self.slots.append(KEPT)
                return (tensor if tensor is parameter else tensor.detach()), tensor._version
            storage = storage_id(tensor)
            if storage in self.inputs.storages or storage in self._aliases:
                self.slots.append(KEPT)
                return tensor.detach(), tensor._version
        slot = Slot(self, meta(tensor))
        self.slots.append(weakref.ref(slot))
        if self.fingerprints is not None:
            self.fingerprints.add(len(self.slots) - 1, tensor)
        if self.observers is not None:
            self.observers.dropped(self, tensor)
        return slot

    def dropped(self, tensor: torch.Tensor) -> None:
        """Notes what a saved call leaves to the replay."""
        if self.observers is not None:
            self.observers.dropped(self, tensor)

    def put(self, tensor: torch.Tensor) -> Packed:
        """Keeps an input of a region inside this one."""
        return without_history(self.pack(tensor))

    def forward(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], outer: Run | None) -> Any:
        """Runs the function under the hooks."""
        if self.options.contexts is not None:
            before, self._contexts = self.options.contexts()
            fn = _within(before, fn)
        if self.observers is not None:
            fn = self.observers.around("forward", self.name, self, fn)
        _compat.push_hooks(self.pack, unpack)
        thread.run = self
        try:
            result = fn(*args, **kwargs)
        except BaseException as error:
            self._world.forget()
            if isinstance(error, RuntimeError):
                tell(error, self.name, replaying=self.replaying)
            raise
        finally:
            thread.run = outer
            _compat.pop_hooks()
            self.inputs.settle()
            self._aliases = _NONE  # an identity means something only while what it identifies is alive
        self.complete = True
        if self.fingerprints is not None:
            self.fingerprints.flush()
        if self.replays:
            self._world.settle()
        else:  # nothing to rebuild; what the graph holds keeps the pack hook alive, and so this frame
            self._world.forget()
            self.inputs.forget()
        if not self.replaying:
            self._settle(outer)
        return result

    def _settle(self, outer: Run | None) -> None:
        if self.trace is not None:
            mark_spare(self.trace, self._need() if self.options.early_stop else _END)
            if self.trace.values:
                alive = [ref() is not None for ref in self.slots]
                self.trace.live = alive, [ref is not None and ref() is not None for ref in self._nested]
        hand_over(self.trace, outer, weakref.ref(self))

    def _need(self) -> Key:
        """The last moment of the forward that backward still waits for; `NEVER` if none."""
        last = len(self.slots) - 1
        while last >= 0 and self.slots[last]() is None:
            last -= 1
        need: Key = (last, math.inf) if last >= 0 else NEVER
        for record in self._saved_calls():
            if record.needed:
                need = max(need, record.key)
        return need

    def _saved_calls(self) -> Sequence[SavedCall]:
        later = () if self.later is None else (self.later,)
        if self.trace is None:
            return later
        return [*later, *(record for record in self.trace.records if isinstance(record, SavedCall))]

    # --- replay ---------------------------------------------------------------------------------------------------

    def rebuild(self, slot: Slot) -> torch.Tensor:
        """Replays the region, unless another thread has done it meanwhile, and returns the slot's tensor."""
        with self._lock:
            if not isinstance(slot.tensor, torch.Tensor):
                try:
                    with _compat.on_streams(self.streams):
                        replay = self._replay
                        if self.observers is not None:
                            replay = self.observers.around("rebuild", self.name, self, replay)
                        filled = replay()
                except errors.MismatchError as error:
                    self.release()
                    if isinstance(self._contexts, OpTrace):
                        raise errors.MismatchError(f"{error}\n{self._contexts.explain()}") from None
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
                    raise errors.MismatchError(errors.fewer(self.name, len(self.slots), filled, reader_of(slot)))
            tensor = slot.tensor
            self._decide_lifetime()
            assert isinstance(tensor, torch.Tensor)
            return tensor

    def _replay(self) -> int:
        self._world.check(self.name)
        self.inputs.check(self.name)
        args, kwargs, cells, ids = self.inputs.open()
        fn = rebuild(self._template, cells)
        if self._contexts is not None:
            fn = _within(self._contexts, fn)
        run = Replay(self, ids, self._need() if self.options.early_stop else None)
        if self.observers is not None:
            fn = self.observers.around("replay", self.name, run, fn)
        grad, outer, overrides, observers = torch.is_grad_enabled(), thread.run, thread.overrides, here.observers
        _compat.set_grad_enabled(True)
        thread.run, thread.overrides, here.observers = run, self.overrides, self.observers
        try:
            self._world.run(self.name, run.go, fn, args, kwargs)
            run.compare_values()
            return run.filled
        except Read as read:
            give_values(self.name, read)
        finally:
            thread.run, thread.overrides, here.observers = outer, overrides, observers
            _compat.set_grad_enabled(grad)
        return self._replay()

    def _decide_lifetime(self) -> None:
        """Says how long the rebuilt tensors live: until they are read, or to the second half of this backward."""
        self.brief = False
        if not _compat.in_backward():
            self.transient = True
            self.release()
            return
        kept, task = _compat.graph_is_kept(), this_task()
        if _compat.exec_group() is not None or (kept and leaves_undone(self._first)):
            self.transient, task.split = False, True
        else:
            self.transient, self.brief = kept, not kept
            task.frames.append(weakref.ref(self))

    def let_go(self, slot: Slot, tensor: torch.Tensor) -> None:
        """Empties a slot that has been read, unless its node is to run once more, in another half of this backward."""
        if not _compat.in_backward():
            slot.tensor = None
        elif leaves_undone():
            self.transient, this_task().split = False, True
        else:
            slot.tensor = weakref.ref(tensor)

    def end(self, kept: bool, split: bool) -> None:
        """Empties every slot at the end of a backward call, unless it was a half and left some to the other."""
        if kept and (not self.transient or (split and any(_is_full(ref()) for ref in self.slots))):
            return
        self.release()

    def release(self) -> None:
        """Empties every slot."""
        with self._lock:  # another thread may just be rebuilding
            for ref in self.slots:
                slot = ref()
                if slot is not None:
                    slot.tensor = None
            for record in self._saved_calls():
                record.release()


def _is_full(slot: Slot | None) -> bool:
    return slot is not None and isinstance(slot.tensor, torch.Tensor)


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


def _ambient_store(outer: Run | None) -> Store | None:
    """The saved-tensor hooks around a region, as its store; None where there are none."""
    hooks = _compat.ambient_hooks()
    if hooks is None:
        return None
    if isinstance(outer, (Frame, Replay)) and getattr(hooks[0], "__self__", None) is outer:
        return Around(outer.put, lend)
    return Hooks(*hooks)


def hand_over(trace: Trace | None, outer: Run | None, frame: weakref.ref[Frame] | None, key: Key | None = None) -> None:
    """Gives a finished region's trace to the region around it, or drops what no replay will ever need.

    `key` is the moment of the outer forward after which replays pass the region by: by default the present one.
    """
    if outer is not None:
        outer.writing().children.append((outer.key() if key is None else key, trace))
        if isinstance(outer, Frame):
            outer.nested(frame)
    elif trace is not None:
        _drop_spare(trace)


def mark_spare(trace: Trace, need: Key) -> None:
    """Marks what lies at or after the last moment that backward waits for: replays of this region end before it."""
    for record in trace.records:
        if isinstance(record, SavedCall):
            record.spare = record.key >= need
    for key, child in trace.children:
        if child is not None:
            child.spare = key >= need


def _drop_spare(trace: Trace) -> None:
    for record in trace.records:
        if isinstance(record, SavedCall) and record.spare:
            record.drop()
    for _, child in trace.children:
        if child is not None and child.spare:
            _drop_spare(child)
