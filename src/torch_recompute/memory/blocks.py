"""Blocks: what lay in memory, from which operation to which, as plain data.

Problem. A timeline says how many bytes were alive, the categories say what for, but only at the peak and at the end. A
picture of a step needs both at every moment, and so does a viewer of allocations.

Idea. A ledger with `history` keeps each change of a storage's size. A change to some bytes begins a block and the next
change of the same storage ends it, so one that is emptied and filled again is two. The category is read when all is
over, so bytes that turned out to be a gradient are called a gradient from the beginning.

Invariant. The blocks alive after an event sum to the ledger's `live` there.

Rejected: sums by category at each event, which are less to keep, and say neither who made the bytes nor how long they
stayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .ledger import CATEGORIES, OPTIMIZER, Entry, Place


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


class _Life:
    """A block that may not have ended."""

    def __init__(self, entry: Entry, nbytes: int, born: int) -> None:
        self.entries = [entry]
        self.nbytes = nbytes
        self.born = born
        self.died: int | None = None

    def block(self) -> Block:
        rank = min(entry.rank for entry in self.entries)
        return Block(CATEGORIES[rank], self.nbytes, self.born, self.died, self.entries[0].place)


def blocks_of(*books: Sequence[tuple[int, Entry, int]]) -> tuple[Block, ...]:
    """The blocks of a ledger's changes, in the order of their beginning.

    Args:
        books: The changes of one ledger, or of several of which each took over what was alive in the one before, as
            its first event. Of what is new there, an optimizer's state counts as there from the beginning.
    """
    lives: list[_Life] = []
    now: dict[int, _Life] = {}
    for number, changes in enumerate(books):
        before: dict[int, _Life] = {}
        start = changes[0][0] if changes else 0
        if number:
            before, now = now, {}
        for event, entry, nbytes in changes:
            taken_over = before.pop(entry.key, None) if number and event == start else None
            if taken_over is not None and taken_over.nbytes == nbytes:
                taken_over.entries.append(entry)
                now[entry.key] = taken_over
                continue
            ended = now.pop(entry.key, taken_over)
            if ended is not None:
                ended.died = event
            if nbytes:
                there = number and event == start and entry.rank == OPTIMIZER
                now[entry.key] = _Life(entry, nbytes, 0 if there else event)
                lives.append(now[entry.key])
        for life in before.values():
            life.died = start
    found = [life.block() for life in lives if life.born != life.died]
    return tuple(sorted(found, key=lambda block: block.born))
