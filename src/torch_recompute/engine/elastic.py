"""Elastic regions: what a call saves is resident while memory lasts, and can be evicted at any time before backward.

A resident call is an ordinary one whose slots are full from the start: the pack hook puts each tensor, detached, into
its slot, with its version. Backward reads it there, as plain autograd would, and no replay runs. To evict the call is
to empty its slots; from then on it is a region like any other. So there is no second engine, and every law of a region
holds in all three placements: resident, evicted, evicted between two halves of a backward.

Who decides is the region's part of a pool (`Part`; `memory/elastic.py`). It is told of four boundaries, before which it
makes room: a forward, the end of a forward, the first tensor that backward reads of a resident call, and a replay.

A pool with a store may move what a call holds there in the place of dropping it; it then comes back slot by slot.

What saved calls keep is in slots too, as a second grade: evicted with `saved=False`, the region is replayed as usual
and they are skipped; with `saved=True` they are emptied as well, and the replay makes them again.

A `torch.OutOfMemoryError` in a forward or replay is the exception, not the way: what the forward did to generators,
buffers and modules is undone, and it runs again with more room. Only the outermost region does so, because the tapes
of regions around it already count what it saved. An allocation that fails in a node of the graph cannot be repeated.
Rejected: to rely on that alone (of 192 steps under a limit, 21 failed in backward; with boundaries none).

Invariants: the slot of a resident call holds what plain autograd would have held. A call is evicted only before its
backward begins, or while its own thread is still in its forward; its lock is never waited for.
"""

from __future__ import annotations

import threading
import traceback
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, Protocol

import torch

from .. import _torch, errors
from .._torch import tracing, version_of
from .._torch.devices import capturing
from .._torch.tensors import meta, say
from ..state.observer import here, tell
from ..state.tape import Run, inside
from ..stores import Store, Stored
from .region_call import Contexts, Options, Phase, Recording, RegionCall, Replay
from .saved_call import SavedCall, Then
from .slots import Packed, Slot, this_task, unpack


class Part(Protocol):
    """One region's part of a pool: decides which calls are resident, and makes room before each stretch of a step."""

    def watch(self, call: ElasticCall) -> Contexts | None:
        """Returns what is entered around the forward of a call, and around its replays; None for nothing."""
        ...

    def forward(self, call: ElasticCall) -> bool:
        """Makes room for a forward, and returns whether the call is to be resident."""
        ...

    def forward_ended(self, call: ElasticCall) -> None:
        """Notes a call whose forward is over, and makes room for what comes next."""
        ...

    def interrupted(self, call: ElasticCall) -> None:
        """Notes that a forward or replay has raised."""
        ...

    def agree(self, call: ElasticCall) -> None:
        """Evicts what other ranks have evicted, before the backward of a call begins; the call may be among it."""
        ...

    def backward(self, call: ElasticCall) -> None:
        """Makes room for the backward of a resident call, which begins now."""
        ...

    def waits(self, call: ElasticCall) -> None:
        """Notes a resident call whose graph was retained: its backward may come again."""
        ...

    def replay(self, call: ElasticCall) -> None:
        """Makes room for a replay."""
        ...

    def replay_ended(self, call: ElasticCall) -> None:
        """Makes room for the backward of a call that has been replayed."""
        ...

    def failed(self, call: ElasticCall, attempt: int) -> bool:
        """Evicts others after an allocation of the call has failed; returns whether to try again."""
        ...

    def unrepeatable(self, replaying: bool = False) -> str:
        """A sentence on why a forward, or a replay, cannot be run again; "" where it can."""
        ...

    def shortage(self) -> str:
        """The sentences for an error that memory ran out although nothing is left to evict."""
        ...


class ElasticSavedCall(SavedCall):
    """A saved call whose tensors are in slots, and that can be emptied and made again."""

    can_be_emptied = True
    _full = False  # whether a replay finds what is stored, and need not get as far as here for it

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._stored: list[weakref.ref[Slot] | None] = []  # in the order in which autograd saved; None: not stored

    @property
    def needed(self) -> bool:
        """Whether backward still waits for a tensor that a replay has to fill in here."""
        return super().needed or (not self._full and any(True for _ in self._slots()))

    def _slots(self) -> Iterator[Slot]:
        """The slots of what it stores that are in a graph still."""
        yield from (slot for ref in self._stored if ref is not None and (slot := ref()) is not None)

    def rebuilt(self) -> Iterator[weakref.ref[Slot]]:
        """The slots that a replay fills."""
        yield from (ref for ref, _, _ in self._views)

    def settle(self) -> None:
        """After the region's forward: what is stored is there."""
        self._full = True

    def owns(self, slot: Slot) -> bool:
        """Whether `slot` is one of the call's."""
        return super().owns(slot) or self.stores(slot)

    def stores(self, slot: Slot) -> bool:
        """Whether `slot` holds a tensor that the call stores, and that no replay fills."""
        return self.then is not Then.REFILLS and any(stored is slot for stored in self._slots())

    def release(self) -> None:
        """Empties the slots that a replay fills."""
        super().release()
        for slot in self._slots() if self.then is Then.REFILLS else ():
            slot.empty()

    def empty(self) -> bool:
        """Drops what is stored, so that a replay makes the call again; returns whether there was anything."""
        if self.then is Then.REFILLS or not (self._outputs or any(self._stored)):
            return False
        self.then, self._full = Then.REFILLS, False
        self._outputs, self._mutated, self._after = (), (), ()
        self.release()
        return True

    def pack(
        self,
        inputs: Sequence[torch.Tensor],
        versions: Sequence[int],
        scope: Any,
        store: Store | None,
        tensor: torch.Tensor,
    ) -> Packed:
        """The pack hook of the call: what it stores, and what is a view of its inputs, is put into a slot."""
        before = len(self._stored)
        packed = super().pack(inputs, versions, scope, store, tensor)
        if len(self._stored) == before:
            self._stored.append(None)
            if type(packed) is Slot and scope.region_call.resident:
                packed.fill(tensor.detach())
        return packed

    def hold(self, tensor: torch.Tensor, scope: Any, store: Store | None) -> Packed:
        """A slot with the tensor in it; with a store, what the store makes of it."""
        held = super().hold(tensor, scope, store)
        if type(held) is not tuple or scope is None:
            return held
        slot = Slot(scope.region_call, meta(tensor))
        slot.fill(held[0])
        self._stored.append(weakref.ref(slot))
        return slot

    def again(self, run: Run, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes the call again in a replay; one of its own region fills what was emptied."""
        if self.then is not Then.REFILLS or not isinstance(run, Replay):
            return super().again(run, fn, args, kwargs)
        turn, name = iter(self._stored), self.name

        @_torch.see_through
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            held = tensor.detach()
            try:
                ref = next(turn)
            except StopIteration:
                raise errors.MismatchError(_other_work(run.name, name, "more tensors than in its forward")) from None
            slot = None if ref is None else ref()
            if slot is not None:
                if slot.meta != meta(tensor):
                    found = f"{say(meta(tensor))} where it was {say(slot.meta)} in its forward"
                    raise errors.MismatchError(_other_work(run.name, name, found))
                run.fill(slot, held)
            return held

        if here.observers is not None:
            fn = here.observers.around("saved call", name, run, fn)
        with inside(None, (pack, unpack)), torch.enable_grad():
            result = fn(*args, **kwargs)
        run.refilled()
        return result


def _other_work(region: str, call: str, found: str) -> str:
    """Text for a saved call that was emptied, and saved something else when it was made again."""
    return f"the replay of {region} made the saved call {call} again, which saved {found}.\n{errors.WHY}"


class _Failed(BaseException):
    """Leads an error that memory ran out past everybody who would add to it; no code that it passes catches it."""


class ElasticRecording(Recording):
    """The forward of an elastic region's call: what it puts into slots stays there while the call is resident."""

    def alias(self, record: SavedCall) -> None:
        """The graph holds no output of a saved call directly, so that eviction frees it."""
        self._ordinary.clear()

    @tracing.as_it_is
    def _packer(self) -> Callable[[torch.Tensor], Packed]:
        """The pack hook of the forward, which fills the slots while the call is resident."""
        plain, region_call = super()._packer(), self.region_call
        if not region_call.resident:
            return plain

        def pack(tensor: torch.Tensor) -> Packed:
            packed = plain(tensor)
            if type(packed) is Slot and region_call.resident:
                packed.fill(tensor.detach())
            return packed

        pack.__dict__.update(_torch.SEE_THROUGH)
        return pack


class ElasticCall(RegionCall):
    """One call of an elastic region.

    Attributes:
        part: The region's part of the pool.
        was_resident: Whether it was to be resident when it began.
        started: Whether the backward that reads its slots has begun.
        thread: The thread of its forward, while that runs.
        attempt: How often the call has failed before.
        microbatch: How many older calls of the region wait for their backward; the pool writes it.
        size: Bytes of the tensors that it was given.
    """

    recording = ElasticRecording
    saved_call = ElasticSavedCall
    started = was_resident = False
    thread: int | None = None
    attempt = microbatch = 0
    _again: ElasticCall | None = None

    def __init__(self, part: Part, options: Options, fn: Any, args: Any, kwargs: Any, outer: Run | None) -> None:
        if capturing():
            raise errors.ArgumentError(_in_graph(options.name))
        contexts = part.watch(self)
        if contexts is not None:
            options = options._replace(contexts=contexts)
        super().__init__(options, fn, args, kwargs, outer)
        self.part = part
        self._moved: weakref.WeakKeyDictionary[Slot, Stored] = weakref.WeakKeyDictionary()
        self.size = sum(tensor.numel() * tensor.element_size() for tensor in self.taking.given)

    def saved_bytes(self) -> int:
        """Bytes of the tensors that a replay would rebuild, each as large as it is said to be."""
        metas = [slot.meta for slot in self._rebuilt()]
        return sum(shape.numel() * dtype.itemsize for shape, dtype, _ in metas)

    # --- forward --------------------------------------------------------------------------------------------------

    def forward(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], outer: Run | None) -> Any:
        """Runs the function; the outermost region once more, with less kept, where memory runs out."""
        if outer is not None and outer.replaying:  # what it saves belongs to a graph that is dropped at once
            return super().forward(fn, args, kwargs, outer)
        outermost = outer is None and not here.again
        self.resident = self.was_resident = self.part.forward(self)
        self.transient = True  # so that the first tensor that backward reads is seen
        self.thread = threading.get_ident()
        result, failed = None, list[tuple[Exception, str]]()
        try:
            here.again = here.again or outermost
            run = self._watched_for_failure(fn) if outermost else fn
            result = super().forward(run, args, kwargs, outer)
        except _Failed as failure:
            failed.append(failure.args[0])
        except BaseException:
            self.resident = False
            self.part.interrupted(self)
            raise
        finally:
            self.thread = None
            if outermost:
                here.again = False
        if failed:
            self.resident = False
            return self._once_more(failed, fn, args, kwargs)
        for record in self._own_saved_calls():
            record.settle()
        self.part.forward_ended(self)
        return result

    def _watched_for_failure(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        given = self.taking.given
        versions = [*map(version_of, given)]

        def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                return fn(*args, **kwargs)
            except torch.OutOfMemoryError as error:
                changed = self.part.unrepeatable()
                modules = self.world.modules
                if [*map(version_of, given)] != versions or (modules is not None and modules.changed()):
                    changed = "a tensor that it was given, a weight or a large buffer has been changed in place"
                if not changed:
                    self.world.rewind()
                raise _Failed((error, changed)) from None

        return watched

    def _once_more(self, failed: list[tuple[Exception, str]], fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        error, changed = failed.pop()
        try:
            clear(error)
            if changed or not self.part.failed(self, self.attempt):
                self._give_up(error, changed, replaying=False)
                raise error
        finally:
            del error  # whose traceback leads back to this frame
        again = type(self)(self.part, self.options, fn, args, kwargs, None)
        again.attempt = self.attempt + 1
        self._again = again
        return again.forward(fn, args, kwargs, None)

    @property
    def final(self) -> RegionCall:
        """The call whose forward went through to its end."""
        return self if self._again is None else self._again.final

    def _give_up(self, error: Exception, changed: str, *, replaying: bool) -> None:
        more = f"{self.name} is not run again with less kept: {changed}" if changed else self.part.shortage()
        error.args = ("\n".join([*map(str, error.args), f"  {more}"]),)
        tell(error, self.name, replaying=replaying)

    # --- eviction -------------------------------------------------------------------------------------------------

    def in_saved_call(self) -> str:
        """The name of the saved call of its own that its forward is in; "" outside of them."""
        last = self.tape.entries[-1] if self.tape.entries else None
        return last.name if isinstance(last, SavedCall) and last.then is Then.ENDS_BEFORE else ""

    @property
    def emptied(self) -> bool:
        """Whether what saved calls keep is gone, too."""
        return any(record.then is Then.REFILLS for record in self._own_saved_calls())

    def evict(self, saved: bool, to: Store | None = None, but: Container[str] = ()) -> bool:
        """Empties the slots, and with `saved` what saved calls keep; returns whether there was something to empty.

        A call whose backward has begun stays, and so does one that another thread is busy with.

        Args:
            saved: Whether what saved calls keep goes too.
            to: A store that what the slots hold is moved to.
            but: The names of saved calls that keep what they have.
        """
        if self.started or (self.phase is Phase.FORWARD and self.thread != threading.get_ident()):
            return False
        if not self._lock.acquire(blocking=False):
            return False
        try:
            was, self.resident = self.resident, False
            if was:
                if to is not None:
                    self._move(to)
                self.release()
            records = [*self._own_saved_calls()] if saved and self.phase is not Phase.FORWARD else []
            emptied = [record.empty() for record in records if record.name not in but]
            return was or any(emptied)
        finally:
            self._lock.release()

    def _rebuilt(self) -> Iterator[Slot]:
        """The slots that a replay fills."""
        yield from self.tape.slots()
        refs = [ref for record in self._own_saved_calls() for ref in record.rebuilt()]
        yield from (slot for ref in refs if (slot := ref()) is not None)

    def _move(self, store: Store) -> None:
        for slot in self._rebuilt():
            if isinstance(slot.content, torch.Tensor) and slot.content._version == slot.version:
                self._moved[slot] = Stored(store, slot.content, self.name)

    # --- backward -------------------------------------------------------------------------------------------------

    def rebuild(self, slot: Slot) -> torch.Tensor:
        """Replays the region, or brings a tensor back that was moved away, and returns it."""
        moved = self._moved.get(slot)
        if moved is None:
            return super().rebuild(slot)
        self._begin()
        tensor = moved.open()
        slot.fill(tensor)
        return tensor

    def was_read(self, slot: Slot, tensor: torch.Tensor) -> None:
        """Notes the first tensor that backward reads of a call that was not replayed; of others, empties the slot."""
        if self.started:
            if not any(record.stores(slot) for record in self._own_saved_calls()):
                super().was_read(slot, tensor)
            return
        self.part.agree(self)
        if slot.content is not None:
            self._begin()
        else:  # it is replayed now, as on the ranks that had evicted it
            rebuilt = self.rebuild(slot)
            if self.transient:
                super().was_read(slot, rebuilt)

    def _begin(self) -> None:
        """Notes that a backward has begun to read what was not replayed."""
        if not self.started and _torch.graph_task_id() != -1:
            self.started, self.transient = True, False
            task = this_task()
            if task.retains:
                task.told[id(self)] = weakref.ref(self)
            self.part.backward(self)

    def _own_saved_calls(self) -> Iterator[ElasticSavedCall]:
        yield from (record for record in self._saved_calls() if isinstance(record, ElasticSavedCall))

    def end(self) -> None:
        """At the end of a backward that retains its graph: a resident call may be evicted again."""
        if self.resident:
            self.started, self.transient = False, True
            self.part.waits(self)
        else:
            super().end()

    def _replay(self, opened: Slot) -> Replay:
        outermost, attempt = not here.again, 0
        self.part.agree(self)
        self.started = True
        self.part.replay(self)
        while True:
            try:
                here.again = True
                done = super()._replay(opened)
                break
            except torch.OutOfMemoryError as error:
                if not outermost:
                    raise
                clear(error)
                self.release()
                again = self.part.unrepeatable(replaying=True)
                if again or not self.part.failed(self, attempt):
                    here.again = False
                    self._give_up(error, again, replaying=True)
                    raise
            except BaseException:
                self.part.interrupted(self)
                raise
            finally:
                if outermost:
                    here.again = False
            attempt += 1
        self.part.replay_ended(self)
        return done


def clear(error: BaseException) -> None:
    """Clears the locals of the frames that an error has left: they hold tensors."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__context__


def _in_graph(region: str) -> str:
    """Text for an elastic region in a CUDA graph."""
    return (
        f"{region} is elastic, and a CUDA graph is captured: every launch of the graph would keep or drop what this "
        "one does, whatever memory is free then.\n"
        "  Capture a step with plain regions (leave elastic= out), or leave this region out of the graph."
    )
