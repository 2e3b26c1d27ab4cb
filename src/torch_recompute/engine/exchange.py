"""Puts back, for the length of a replay, what users' objects held in the forward.

A replay must find lists, objects and modules as the forward found them. Where one holds something else by then, the
replay's contents are written into that same object, and afterwards those that were there are written back. The values
of buffers, and of small tensors that a function reaches, are written into their own memory likewise: whatever else
shares it, another module, a view or a global, finds them too.

Two threads must not do so to one object at once: each thread that writes owns the objects that it writes to, and only
these, for the length of its replay. A replay that finds everything as it was owns nothing and waits for nobody.

A thread that owns an object, or is inside another replay, never waits: the other thread may be waiting for it, in a
lock or in a collective, for ever. It raises, and names both regions. Every other thread waits, without a limit, until
nobody owns or reads its objects.

Rejected: one lock for the process (replays that meet in a barrier waited for each other until that gave up); a lock in
each object (builtin containers have no place for one); locks taken in an order (a nested replay cannot know which
objects the next one will need).
"""

from __future__ import annotations

import collections
import itertools
import operator
import threading
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import torch

from .. import errors
from ..state import copies, swap_in

CONTAINERS = (list, dict, set, collections.deque)


def entries_of(inside: Any) -> Any:
    """A copy of what a container holds: a dict of a dict, else a list."""
    return dict(inside) if isinstance(inside, dict) else [*inside]


def alike(inside: Any, content: Any, ordered: bool = True) -> bool:
    """Whether a container holds just these objects; in this order, unless that of a dict says nothing."""
    if isinstance(inside, dict):
        if inside.keys() != content.keys() or (ordered and [*inside] != [*content]):
            return False
        return all(map(operator.is_, inside.values(), map(content.__getitem__, inside)))
    return len(inside) == len(content) and all(map(operator.is_, inside, content))


def put(inside: Any, content: Any, ordered: bool = True) -> None:
    """Has a container hold just these objects, and writes no more than that takes."""
    if isinstance(inside, dict):
        for key in [key for key in inside if key not in content]:
            del inside[key]
        for key, value in content.items():
            if key not in inside or inside[key] is not value:
                inside[key] = value
    elif isinstance(inside, set):
        for one in [one for one in inside if one not in content]:  # a set that was emptied would have another order
            inside.discard(one)
        inside.update(content)
    if not alike(inside, content, ordered):
        inside.clear()
        (inside.update if isinstance(inside, (dict, set)) else inside.extend)(content)


class _Owner(NamedTuple):
    """A thread that has put other contents into an object, and the name of the region that it replays."""

    thread: int
    region: str


OWNED: dict[int, _Owner] = {}
"""The owners of objects, by the identity of the object, which an owner refers to."""
READING: dict[int, list[Exchange]] = {}
"""The replays that run now, by thread. Each stands here before it looks at `OWNED`, and an owner stands there before it
looks here, so one of two that begin at once sees the other."""
WAITING: list[int] = []
"""The threads that wait for an object."""
_changed = threading.Condition(threading.Lock())


def woken() -> None:
    """Wakes the threads that wait for an object, after a replay."""
    with _changed:
        _changed.notify_all()


def _each_needs_the_others(region: str, mine: str, other: str) -> str:
    return (
        f"two threads replay regions that need the same objects. The replay of {region} must find an object of yours "
        f"(a module, a list, a context) as its forward found it, but the replay of {other} on another thread has put "
        f"other contents into it. It cannot wait for that one, since this thread is inside the replay of {mine}, for "
        "which the other thread may be waiting.\n"
        "  Give each thread objects of its own (a copy of the module, one list per microbatch), or do not change them "
        "between a forward and its backward."
    )


Noted = tuple[torch.Tensor, int]
"""The values of a tensor, and a number that is larger for what was noted later."""
_numbers = itertools.count()


def note(tensors: Sequence[torch.Tensor]) -> list[Noted]:
    """Notes the values that some tensors have now."""
    return [(values, next(_numbers)) for values in copies(tensors)]


class Wanted(NamedTuple):
    """A container of some object, or the object itself if it is one, and what a replay must find in it."""

    owner: Any
    inside: Any
    content: Any
    ordered: bool  # whether the order of a dict says something: that of attributes does not


class WantedValues(NamedTuple):
    """A tensor of some object, and the values that a replay must find in it."""

    owner: Any
    changed: bool  # whether it may hold others now
    tensor: torch.Tensor
    values: torch.Tensor


class Exchange:
    """Collects what one replay must find in users' objects, writes it there, and writes back what was there.

    Attributes:
        region: The region's name, for errors.
        modules: The modules that the replay may read, by their identity.
        tensors: What was made of each tensor that is held, by what holds it: one stays one. `taken.py` writes this,
            and the next two.
        objects: What was made of each container, object and function, likewise.
        given: The identities of the tensors that the graph of the forward may hold directly.
        copies: What the replay finds in the place of buffers that are gone; `modules.py` writes this.
        wanted: What the replay must find in containers.
        values: What it must find in tensors; by number, so that of two that share memory, what was noted first is what
            counts.
    """

    __slots__ = (
        *("_found", "_keys", "_undo_values", "_waits", "copies", "given", "modules", "objects", "region", "tensors"),
        *("values", "wanted"),
    )

    def __init__(self, region: str, modules: Container[int] = ()) -> None:
        self.region, self.modules = region, modules
        self.tensors: dict[int, Any] = {}
        self.objects: dict[int, Any] = {}
        self.given: set[int] = set()
        self.copies: list[torch.Tensor] = []
        self.wanted: list[Wanted] = []
        self.values: dict[int, WantedValues] = {}
        self._undo_values: Callable[[], None] | None = None
        self._found: list[Wanted] = []
        self._keys: list[int] = []
        self._waits = False  # whether it waits for an object; it has not read any yet

    def want(self, owner: Any, inside: Any, content: Any, ordered: bool = True) -> None:
        """Has the replay find this in a container of an object, or in the object, a container itself."""
        self.wanted.append(Wanted(owner, inside, content, ordered))

    def want_values(self, owner: Any, tensor: torch.Tensor, noted: Noted, changed: bool = True) -> None:
        """Has the replay find these values in a tensor of an object, which may have `changed`."""
        values, number = noted
        self.values[number] = WantedValues(owner, changed, tensor, values)

    def reads(self, keys: Container[int]) -> bool:
        """Whether the replay may read one of some objects."""
        if self._waits:
            return False
        mine = [*self.modules] if isinstance(self.modules, dict) else []  # another thread may add to it
        owners = [one[0] for one in (*self.wanted, *[*self.values.values()])]
        return any(key in keys for key in (*mine, *map(id, owners)))

    def is_busy(self, owner: Any) -> bool:
        """Whether another thread's replay has put something into an object, which it will take out again."""
        found = OWNED.get(id(owner))
        return found is not None and found.thread != threading.get_ident()

    def enter(self) -> None:
        """Writes what differs, once no other thread's replay reads or owns what is written to."""
        others, owners = self._differing()
        if owners:
            with _changed:
                me = threading.get_ident()
                WAITING.append(me)  # before it looks, so that a replay that ends after that wakes it
                try:
                    while True:
                        others, owners = self._differing()
                        if not owners or self._owns(owners):
                            break
                        self._waits = True
                        _changed.wait()
                        self._waits = False
                finally:
                    WAITING.remove(me)
                    self._waits = False
        mine = [one for one in self.wanted if not self.is_busy(one.owner)]
        self._found = [Wanted(owner, inside, entries_of(inside), order) for owner, inside, _, order in mine]
        for _, inside, content, ordered in others:
            put(inside, content, ordered)
        if self.values:
            self._write_values()

    def _write_values(self) -> None:
        # Of two that share memory, what was noted first is written last.
        _, _, tensors, values = zip(*[self.values[number] for number in sorted(self.values, reverse=True)], strict=True)
        self._undo_values = swap_in(tensors, values)

    def _owns(self, wanted: set[int]) -> bool:
        """Makes this thread the owner of some objects; False where another one has to end first.

        Raises:
            RecomputeError: Another one has to end first, and may wait for this thread.
        """
        me = threading.get_ident()
        of_others = [OWNED[key].region for key in wanted if key in OWNED and OWNED[key].thread != me]
        new = [key for key in wanted if key not in OWNED]
        OWNED.update(dict.fromkeys(new, _Owner(me, self.region)))
        running = [one for thread, many in [*READING.items()] if thread != me for one in [*many]]
        of_others += [one.region for one in running if one.reads(wanted)]
        if not of_others:
            self._keys += new
            return True
        for key in new:
            del OWNED[key]
        outer = [one.region for one in READING.get(me, ()) if one is not self]
        mine = [*[owner.region for owner in OWNED.values() if owner.thread == me], *outer]
        if mine:
            raise errors.RecomputeError(_each_needs_the_others(self.region, mine[0], of_others[0]))
        return False

    def _differing(self) -> tuple[list[Wanted], set[int]]:
        """Returns what differs from the forward, or is what another thread will put back, and the objects to own."""
        differing = [one for one in self.wanted if not alike(*one[1:]) or self.is_busy(one.owner)]
        owners = {id(one.owner) for one in differing}
        owners |= {id(owner) for owner, changed, _, _ in self.values.values() if changed or self.is_busy(owner)}
        return differing, owners

    def leave(self) -> None:
        """Has the objects hold what they held before."""
        try:
            if self._undo_values is not None:
                self._undo_values()
            for _, inside, content, ordered in reversed(self._found):
                if not alike(inside, content, ordered):
                    put(inside, content, ordered)
        finally:
            if self._keys:
                with _changed:  # others go through the owners
                    for key in self._keys:
                        del OWNED[key]
                    _changed.notify_all()
            self._found, self._keys, self.wanted, self.values, self._undo_values = [], [], [], {}, None
