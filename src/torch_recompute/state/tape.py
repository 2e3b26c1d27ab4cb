"""The tape of a region's call: what its forward leaves for replays, in the order in which it came about.

    HELD                a tensor that autograd saved and that the graph holds itself
    a weak reference    a tensor that autograd saved and that a replay rebuilds: to its `Slot`, which the graph holds
    an `Entry`          a saved call, or a choice whose result was carried
    a `Tape`            a region inside this one

A `Run` is one execution of the function on one thread. The forward appends; a replay goes along the same tape, and must
come upon the same entries in the same order. When an outer region is replayed, an inner one runs as an ordinary
forward again: it writes a tape of its own, and takes saved calls and choices, place by place, from the one that the
first forward left, its source. So these run once at any depth.

The run that the present thread is in is the only state of a thread; there is no flag on a module or a process.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from .. import _torch, errors
from . import Ambient


class Entry:
    """A saved call or a choice, as a replay finds it.

    Attributes:
        name: The name of the call, for errors.
        needed: Whether backward waits for a tensor that a replay fills in here.
    """

    __slots__ = ("__weakref__", "name")
    name: str
    needed = False

    def drop(self) -> None:
        """Forgets what only a replay that goes on after this entry would need."""


E = TypeVar("E", bound=Entry)

_FAR = 1 << 62
HELD: weakref.ref[Any] = weakref.ref(set[None]())
"""Stands for a tensor that the graph holds itself: a reference to nothing."""


class Tape:
    """The tape of one call of a region.

    Attributes:
        entries: What the forward left, in order.
        values: What `save_for_recompute` saved, by key.
        reach: The place at which replays of this region end. None needs the results of entries from here on.
        alive: For each entry, whether the graph still held it when the forward ended; noted only where there are
            values. What was dead by then had only been computed for the value.
    """

    __slots__ = ("alive", "entries", "reach", "values")
    needed = False  # a region inside rebuilds its own

    def __init__(self) -> None:
        self.entries: list[weakref.ref[Any] | Entry | Tape] = []
        self.values: dict[Hashable, Any] = {}
        self.reach = _FAR
        self.alive: Sequence[bool] = ()

    def end(self) -> int:
        """The place of the last entry that backward waits for; -1 if it waits for none."""
        place = len(self.entries) - 1
        while place >= 0:
            entry = self.entries[place]
            if entry() is not None if isinstance(entry, weakref.ref) else entry.needed:
                break
            place -= 1
        return place

    def close(self, early_stop: bool, outermost: bool) -> None:
        """Notes, at the end of the forward, how far replays go, and drops what none needs unless one around may."""
        if early_stop:
            self.reach = self.end()
        if self.values:
            self.alive = [*map(_is_alive, self.entries)]
        if outermost:
            self.drop()

    def drop(self) -> None:
        """Drops the results of entries from `reach` on. For a tape that no region around it reads."""
        for entry in self.entries[max(self.reach, 0) :]:
            if isinstance(entry, (Entry, Tape)):
                entry.drop()

    def tensors(self, until: int | None = None) -> int:
        """Counts the tensors that autograd saved before a place; by default, all."""
        return sum(type(entry) is weakref.ref for entry in self.entries[:until])

    def slots(self, place: int = 0) -> Iterator[Any]:
        """The slots from a place on that are still in the graph."""
        entries = self.entries[place:] if place else self.entries
        return (slot for entry in entries if type(entry) is weakref.ref and (slot := entry()) is not None)

    def calls(self, kind: type[E]) -> Iterator[E]:
        """The entries of one kind."""
        return (entry for entry in self.entries if isinstance(entry, kind))

    def all_calls(self, kind: type[E]) -> Iterator[E]:
        """The entries of one kind, those of the regions inside included."""
        for entry in self.entries:
            if isinstance(entry, kind):
                yield entry
            elif isinstance(entry, Tape):
                yield from entry.all_calls(kind)


def _is_alive(entry: weakref.ref[Any] | Entry | Tape) -> bool:
    if isinstance(entry, Tape):
        return any(map(_is_alive, entry.entries))
    return entry.needed if isinstance(entry, Entry) else entry() is not None


class Run:
    """One execution of a region's function: a forward, which writes a tape, or one that reads what such a one wrote.

    Attributes:
        name: The region's name, for errors.
        tape: What it writes.
        source: What an earlier run of the same call wrote; None where this is the first.
        replaying: Whether the function is being run again.
        ambients: The generators and states that a saved call in it may advance.
        modules: Of a region's forward, what its own modules held.
    """

    source: Tape | None = None
    replaying = False
    modules: Any = None

    def __init__(self, name: str, tape: Tape, ambients: Sequence[Ambient] = ()) -> None:
        self.name = name
        self.tape = tape
        self.ambients = ambients

    def follow(self, source: Tape | None) -> None:
        """Has this run, which begins now, read what an earlier one left; None where this is the first."""
        if source is not None:
            self.source, self.replaying = source, True
            self.tape.values, self.tape.alive = source.values, source.alive

    def event(self) -> None:
        """Called before a nested region takes its inputs; a replay may end here."""

    def place(self) -> int:
        """The place of the tape that comes next."""
        return len(self.tape.entries)

    def write(self, *entries: Any) -> None:
        """Appends entries to the tape. A `Replay` only goes on behind them."""
        self.tape.entries.extend(entries)

    def come_to(self) -> Any:
        """Returns what an earlier run left at the present place, None at its end; a replay may end here."""
        entries, place = () if self.source is None else self.source.entries, self.place()
        return entries[place] if place < len(entries) else None

    def enter(self, tape: Tape) -> Tape | None:
        """Goes on to a nested region, which writes `tape`; returns what it left in an earlier run, if this follows one.

        Raises:
            MismatchError: The earlier run came to something else here.
        """
        found = self.come_to()
        if found is not None and type(found) is not Tape:
            raise errors.MismatchError(_other(self, "a region inside it", found))
        self.write(tape)
        return found or (Tape() if self.replaying else None)

    def read(self, kind: type[E], name: str) -> E:
        """Takes what the forward left at this point.

        Raises:
            MismatchError: The forward left nothing here, or something of another kind or name.
        """
        found = self.come_to()
        if not isinstance(found, kind) or found.name != name:
            raise errors.MismatchError(_other(self, f"{name}(...)", found))
        self.write(found)
        return found

    def go_on_at(self, place: int) -> bool:
        """Goes on at the place at which a value was saved, where the replay leaves out the work before it.

        It does so if nothing in between was part of the graph; else the value is read early and the work redone.
        Returns whether entries were left out.
        """
        here, source = self.place(), self.source
        if source is None or here >= place or any(source.alive[here:place]):
            return False
        self.write(*source.entries[here:place])
        return True


def _other(run: Run, reached: str, found: Any) -> str:
    """Text for a replay that comes to a saved call, a choice or a region where its forward came to something else."""
    if isinstance(found, weakref.ref):  # what is named tells more
        assert run.source is not None
        following = run.source.entries[run.place() :]
        found = next((entry for entry in following if isinstance(entry, Entry)), found)
    if isinstance(found, Entry):
        had = f"reached {found.name}(...)"
        if f"{found.name}(...)" == reached:
            had += ", but saved more tensors for backward before it"
    elif isinstance(found, Tape):
        had = "reached a region inside it"
    else:
        had = "made no more saved calls or choices"
        if found is not None:
            had = f"saved a tensor for backward, and {had}"
    return f"the replay of {run.name} reached {reached} where its forward {had}.\n{errors.WHY}"


class Overrides(Protocol):
    """Decides, from outside, about calls that the author of a model gave a name."""

    @property
    def around(self) -> Overrides | None:
        """The enclosing overrides, if any."""

    def saved_call(self, name: str, fn: Callable[..., Any]) -> Callable[..., Any] | None:
        """Returns what is called in the place of a saved call of this name; None to leave it as it is written."""

    def region(self, name: str) -> None:
        """Called when a region of this name is called."""


class Thread(threading.local):
    """Per-thread execution state.

    Attributes:
        run: The run that the thread is in; None outside of every region, and inside a saved call.
        overrides: Decides about calls with a name; None without one. A replay has that of its forward.
        calls: How many calls of regions it has begun; what is put into a store meanwhile belongs together.
        plain_calls: How many saved calls, choices and saved values were outside of regions, where they are plain calls.
        modules: What receives the modules that are called, while a region runs whose function is no module.
        calls_hidden: Whether modules are called in compiled code, where no hook sees it: a region then reads all
            modules that its function holds, with all below them.
        waiting: The results of regions that wait to be discarded, by storage (`engine/discard.py`).
        traced: Whether `torch.compile` is tracing a region here.
        untraced: Whether this is in a region that it could not trace: saved calls and choices in it run as they are.
    """

    def __init__(self) -> None:
        # Not on the class: the compiler guards what it finds, and would find an object that has more by the first call.
        self.run: Run | None = None
        self.overrides: Overrides | None = None
        self.calls = self.plain_calls = 0
        self.modules: Any = None
        self.calls_hidden = False
        self.waiting: dict[int, Any] = {}
        self.traced = self.untraced = False


thread = Thread()


class inside:
    """Makes a run the one that this thread is in, for a `with` block; None is outside of every region.

    Args:
        run: The run.
        hooks: What packs and unpacks the tensors that autograd saves in the block; by default, whatever does already.
    """

    __slots__ = ("_hooks", "_outer", "_run")

    def __init__(self, run: Run | None, hooks: tuple[Callable[..., Any], Callable[..., Any]] | None = None) -> None:
        self._run, self._hooks = run, hooks

    def __enter__(self) -> None:
        self._outer, thread.run = thread.run, self._run
        if self._hooks is not None:
            _torch.push_hooks(*self._hooks)

    def __exit__(self, *_: object) -> None:
        if self._hooks is not None:
            _torch.pop_hooks()
        thread.run = self._outer
