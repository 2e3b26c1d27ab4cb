"""The ledger: which storages are alive on one device, their bytes, what they are for, and the peak.

PyTorch keeps the Python object of a storage for as long as the C++ storage lives, so a weak reference to that object
dies with the memory, also when only C++ holds it. The weak reference *is* the ledger's entry. Its callback only appends
it to a queue: a death may come at any moment and on any thread, so it is booked before anything else is looked up.

A storage can be resized behind the operators' back (`storage.resize_(0)`). Sizes are read again of storages that an
operation touches, of storages that were empty, and of all before a new peak is believed: a silent shrink cannot fake a
peak; only a silent growth of a non-empty storage that ends before any operation touches it goes unseen.

Every change of a size is written down under the event of the next sample, for `blocks_of`. The peak keeps its list of
entries, not of categories, so that bytes which turn out to be a gradient later are called a gradient at the peak too.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple, cast

import torch

from .._torch.fakes import FakeTensor
from .._torch.storages import is_zero_tensor

LARGEST = 3
"""The number of tensors that are named at a peak."""
CATEGORIES = ("parameters", "buffers", "gradients", "optimizer", "other", "activations")
PARAMETERS, BUFFERS, GRADIENTS, OPTIMIZER, OTHER, ACTIVATIONS = range(len(CATEGORIES))


class Sample(NamedTuple):
    """One point of a timeline: the bytes alive right after an operation that changed them.

    An operation with a workspace has two: one with it, and one after it was given back, whose `op` is "".
    """

    event: int
    op: str
    live_bytes: int


class Place(NamedTuple):
    """The operation that made a storage, and where it ran.

    Attributes:
        event: The number of the operation.
        phase: "forward", "loss", "backward", "replay" or "optimizer".
        module: Path of the module that ran it, or whose backward it belongs to, as a simulation knows it; where it was
            measured, the region.
        op: The operation, as `aten.gelu.default`.
        shape: Shape of the tensor that it made; () where it was measured.
        line: Where it was measured, `file:line` of the code that ran it.
        calls: In a simulation, of that module and those around it, the path and the number of the call.
    """

    event: int = 0
    phase: str = ""
    module: str = ""
    op: str = ""
    shape: tuple[int, ...] = ()
    line: str = ""
    calls: tuple[tuple[str, int], ...] = ()


class Entry(weakref.ref[torch.UntypedStorage]):
    """A tracked storage: a weak reference that remembers what it refers to."""

    __slots__ = ("exact", "key", "nbytes", "place", "rank")

    exact: int
    key: int
    nbytes: int
    rank: int
    place: Place


Entries = list[tuple[Entry, int]]
"""Storages, each with the bytes that it had at some moment."""


class Ledger:
    """The ledger of one device. Callers hold the measurement's lock.

    Args:
        rounding: Sizes are rounded up to multiples of this many bytes.
        told: Whether `resized` is called when a storage is resized by other than an operation; sizes are read again
            then. Else they are at each peak.

    Attributes:
        live: Bytes alive.
        peak: The most of them so far.
        place: Where the work is, for the entries made from now on.
        timeline: The bytes alive after each operation that changed them.
        changes: An event, an entry, and the bytes that it has from then on.
    """

    def __init__(self, rounding: int = 1, told: bool = False) -> None:
        self.live = 0
        self.peak = 0
        self.place = Place()
        self.timeline: list[Sample] = []
        self.changes: list[tuple[int, Entry, int]] = []
        self._rounding = rounding
        self._told, self._unsure = told, True
        self._until_peak = 0  # changes, with those that are pending
        self._pending: Entries = []
        self._entries: dict[int, Entry] = {}
        self._empty: dict[int, Entry] = {}
        self._dead: deque[Entry] = deque()
        self._died = cast("Callable[[Any], None]", self._dead.append)

    def touch(self, storage: torch.UntypedStorage) -> bool:
        """Reads a storage's size again; False if it is not tracked."""
        self.book_deaths()
        entry = self._entries.get(id(storage))
        if entry is None:
            return False
        if storage.nbytes() != entry.exact:
            self._resize(entry, storage.nbytes())
        return True

    def mark(self, storage: torch.UntypedStorage, rank: int, place: Place | None = None) -> None:
        """Says what a storage is for. It is tracked from now on; a category earlier in the list stays.

        Args:
            storage: The storage.
            rank: The number of the category.
            place: Where it was made; by default where the work is.
        """
        self.book_deaths()
        entry = self._entries.get(id(storage))
        if entry is not None:
            entry.rank = min(entry.rank, rank)
            return
        entry = Entry(storage, self._died)
        entry.key, entry.exact, entry.nbytes, entry.rank, entry.place = id(storage), 0, 0, rank, place or self.place
        self._entries[entry.key] = self._empty[entry.key] = entry
        if storage.nbytes():
            self._resize(entry, storage.nbytes())

    def book_deaths(self) -> None:
        """Takes out the storages that died since the last call."""
        while self._dead:
            self._take_out(self._dead.popleft())

    def give_up(self, storage: torch.UntypedStorage) -> None:
        """Takes out a storage before it dies, because the result of an operation stands for it."""
        self.book_deaths()
        if (entry := self._entries.get(id(storage))) is not None:
            self._take_out(entry)

    def _take_out(self, entry: Entry) -> None:
        if self._entries.get(entry.key) is entry:
            self.live -= entry.nbytes
            self._pending.append((entry, 0))
            del self._entries[entry.key]
            self._empty.pop(entry.key, None)

    def refresh(self) -> None:
        """Reads every size again."""
        self.book_deaths()
        self._reread(self._entries.values())

    def resized(self) -> None:
        """Says that a storage was resized by other than an operation."""
        self._unsure = True

    def settle(self) -> None:
        """Raises the peak if this moment is one."""
        if self._empty and not self._told:
            self._reread(self._empty.values())
        if self._unsure and (self._told or self.live > self.peak):
            self._reread(self._entries.values())
            self._unsure = not self._told
        if self.live > self.peak:
            self.peak = self.live
            self._until_peak = len(self.changes) + len(self._pending)

    def sample(self, event: int, op: str) -> None:
        """Adds a point to the timeline if the bytes alive have changed."""
        if not self.timeline or self.live != self.timeline[-1].live_bytes:
            self.timeline.append(Sample(event, op, self.live))
        self.stamp(event)

    def stamp(self, event: int) -> None:
        """Writes down the changes since the last event as this event's."""
        self.changes.extend((event, entry, nbytes) for entry, nbytes in self._pending)
        self._pending.clear()

    def alive(self) -> Entries:
        """Returns the storages that are tracked."""
        return [(entry, entry.nbytes) for entry in self._entries.values()]

    def alive_after(self, event: int) -> Entries:
        """Returns the storages that were tracked after an event."""
        return _last((entry, nbytes) for at, entry, nbytes in self.changes if at <= event)

    def at_peak(self) -> Entries:
        """Returns the storages that were tracked at the peak."""
        changed = chain(((entry, nbytes) for _, entry, nbytes in self.changes), self._pending)
        return _last(islice(changed, self._until_peak))

    def _reread(self, entries: Iterable[Entry]) -> None:
        for entry in [*entries]:
            storage = entry()
            if storage is not None and storage.nbytes() != entry.exact:
                self._resize(entry, storage.nbytes())

    def _resize(self, entry: Entry, exact: int) -> None:
        entry.exact, nbytes = exact, -(-exact // self._rounding) * self._rounding
        if nbytes == entry.nbytes:
            return
        if nbytes:
            self._empty.pop(entry.key, None)
        else:
            self._empty[entry.key] = entry
        self.live += nbytes - entry.nbytes
        self._pending.append((entry, nbytes))
        entry.nbytes = nbytes


def _last(changes: Iterable[tuple[Entry, int]]) -> Entries:
    """The entries with the bytes of their last change, without those that have none."""
    found = {id(entry): (entry, nbytes) for entry, nbytes in changes}
    return [(entry, nbytes) for entry, nbytes in found.values() if nbytes]


SCALARS: frozenset[type] = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout})
"""Types of arguments that hold no tensor, most of all that operations are given."""


@functools.lru_cache(2**14)
def laid(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Returns how a tensor lies in memory: 0 contiguous, 1 dense in another order of its dimensions, 2 with gaps."""
    if 0 in shape:
        return 0
    places = [(step, size) for step, size in zip(stride, shape, strict=True) if size != 1]
    for which, order in ((0, places[::-1]), (1, sorted(places))):
        expected = 1
        for step, size in order:
            if step != expected:
                break
            expected *= size
        else:
            return which
    return 2


def storages(value: object) -> list[tuple[torch.device, torch.UntypedStorage]]:
    """Returns the storages under a nest of tensors, with their devices; of a subclass that wraps tensors, theirs.

    Sparse and other tensors without a storage of their own have none, nor have zeros that were never allocated.
    """
    found: list[tuple[torch.device, torch.UntypedStorage]] = []
    for one in _held(value, []):
        if type(one) is FakeTensor:
            if not is_zero_tensor(one):
                found.append((one.fake_device, one.untyped_storage()))
        elif isinstance(one, torch.UntypedStorage):
            found.append((one.device, one))
        elif (flatten := getattr(one, "__tensor_flatten__", None)) is not None:
            found += storages([getattr(one, name) for name in flatten()[0]])
        elif one.layout is torch.strided and not is_zero_tensor(one):
            found.append((one.device, one.untyped_storage()))
    return found


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the shape of a tensor; of a nested one, which has no numbers in its own, that of its values."""
    return tuple(map(int, (tensor.values() if tensor.is_nested else tensor).shape))


def leaves(value: object) -> list[torch.Tensor]:
    """Returns the tensors in a nest of lists, tuples and dicts, as an operation returns them."""
    return [one for one in _held(value, []) if isinstance(one, torch.Tensor)]


def _held(
    value: object, found: list[torch.Tensor | torch.UntypedStorage]
) -> Sequence[torch.Tensor | torch.UntypedStorage]:
    """The tensors and the storages in a nest of lists, tuples and dicts."""
    if type(value) is FakeTensor or isinstance(value, (torch.Tensor, torch.UntypedStorage)):
        found.append(value)
    elif isinstance(value, (list, tuple, dict)):
        for item in cast("Iterable[object]", value.values() if isinstance(value, dict) else value):
            if type(item) is FakeTensor:
                found.append(item)
            elif type(item) not in SCALARS:
                _held(item, found)
    return found


class CountedOnce:
    """Counts storages once each, however many tensors show them; none is kept alive.

    They are distinguished by weak references: the next tensor may well be at the address of one that was dropped.

    Attributes:
        nbytes: Bytes of all.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._found: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def add(self, value: object) -> int:
        """Counts the storages under a nest of tensors; returns the bytes of those that are new."""
        before = self.nbytes
        for _, storage in storages(value):
            known = self._found.get(id(storage))
            if known is None or known[0]() is not storage:
                self._found[id(storage)] = weakref.ref(storage), int(storage.nbytes())
                self.nbytes += int(storage.nbytes())
        return self.nbytes - before

    def alive(self) -> Iterator[tuple[int, int]]:
        """Yields those that are still alive, by `id` of their Python object, with the bytes that were counted."""
        return ((key, nbytes) for key, (ref, nbytes) in self._found.items() if ref() is not None)


def by_category(entries: Iterable[tuple[Entry, int]]) -> dict[str, int]:
    """Sums the bytes of some entries by what they turned out to be for."""
    totals: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    for entry, nbytes in entries:
        totals[CATEGORIES[entry.rank]] += nbytes
    return totals


class Block(NamedTuple):
    """Bytes of one storage, for as long as it had them.

    Attributes:
        category: What they were for, as in `by_category`.
        nbytes: How many.
        born: The event after which they were alive; 0 for what was there when the step began.
        died: The event after which they were gone; None for what is there after the last operation.
        made: The operation that made the storage.
    """

    category: str
    nbytes: int
    born: int
    died: int | None
    made: Place


def largest(blocks: Iterable[Block]) -> tuple[Block, ...]:
    """Returns the largest of some blocks, the largest first."""
    return tuple(sorted(blocks, key=lambda block: -block.nbytes)[:LARGEST])


@dataclass
class _Life:
    """A block that may not have ended."""

    entries: list[Entry]
    nbytes: int
    born: int
    died: int | None = None


def blocks_of(*ledgers: Sequence[tuple[int, Entry, int]]) -> tuple[Block, ...]:
    """Returns the blocks of a ledger's changes, in the order of their beginning.

    Args:
        ledgers: The changes of one ledger, or of several of which each took over what was alive in the one before, as
            its first event. Of what is new there, an optimizer's state counts as there from the beginning.
    """
    lives: list[_Life] = []
    now: dict[int, _Life] = {}
    for number, changes in enumerate(ledgers):
        taking_over = changes[0][0] if number and changes else -1  # the event
        for key in now.keys() - {entry.key for event, entry, _ in changes if event == taking_over}:
            now.pop(key).died = taking_over
        for event, entry, nbytes in changes:
            life = now.get(entry.key)
            if life is not None and event == taking_over and life.nbytes == nbytes:
                life.entries.append(entry)
                continue
            if life is not None:
                now.pop(entry.key).died = event
            if nbytes:
                born = 0 if event == taking_over and entry.rank == OPTIMIZER else event
                now[entry.key] = _Life([entry], nbytes, born)
                lives.append(now[entry.key])
    found = [
        Block(CATEGORIES[min(e.rank for e in life.entries)], life.nbytes, life.born, life.died, life.entries[0].place)
        for life in lives
        if life.born != life.died
    ]
    return tuple(sorted(found, key=lambda block: block.born))
