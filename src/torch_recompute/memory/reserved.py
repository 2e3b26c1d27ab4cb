"""Follows PyTorch's CUDA allocator through steps of training, for the memory that it reserves; no device is asked.

The allocator takes segments from the device and cuts blocks out of them (`CUDACachingAllocator.cpp`). What is free of a
segment stays reserved: an out-of-memory error counts it. A step's peak does not, nor what a block has beyond the size
that was asked for, up to 1 MiB. Here the allocations of a simulated step are made in that order, by those rules:

    sizes       in multiples of 512 bytes; those of at most 1 MiB have segments of 2 MiB, for themselves
    segments    of 20 MiB for what is smaller than 10 MiB, else the size in multiples of 2 MiB
    fit         the smallest free block that is large enough, of equal ones the one with the lowest address, where each
                segment lies below those before it; what is left is split off if it is over 1 MiB (512 bytes in the
                small segments), and joined again when both are free
    expandable  with `PYTORCH_ALLOC_CONF=expandable_segments:True` one segment for all that is large and one for the
                small, which grow by 20 and 2 MiB at their ends; anything left is split off, and what is free at the
                end is taken last

    a limit     where it would reserve more, it gives back the segments that are all free; what is then still more is an
                error. One that expands can give back any page, so there only tensors count.

The first step finds weights and buffers alone, has the optimizer's state allocated before its gradients go, and leaves
the output to the next forward. Steps follow until the reserved memory is that of any later one.

Of 29 ways to train models of published sizes on an H100, the three that ran out of memory there were foreseen; of the
others the most that tensors had was within 0.05 %, the reserved memory 0.2 % off in the median and 4 % at the worst
(`benchmarks/reserved.py`). Of two, the allocator's own events there are those of the simulation, but for one of 7,680.
Rejected: a share of the peak, which was from 4 to 25 %.
"""

from __future__ import annotations

import bisect
import math
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .. import errors
from .ledger import CATEGORIES, GRADIENTS, OPTIMIZER, Block

EXPANDABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True"
_MIB = 2**20
_APART = 1 << 50  # bytes from one segment to the next
_STEPS = 4
_LEFT = frozenset(("activations", "other"))
"""Categories of what a step leaves to the next, which is its output; other blocks are of each step itself."""


class Reserved(NamedTuple):
    """The memory of steps as PyTorch's CUDA allocator counts it.

    Attributes:
        allocated_bytes: The most that tensors have (`torch.cuda.max_memory_allocated`).
        reserved_bytes: The most that is taken from the device for them (`torch.cuda.max_memory_reserved`).
        ran_out: Whether an allocation failed for want of memory.
        cache_flushes: How often a step reached the limit, gave back the segments that were all free, and went on
            (`num_alloc_retries` of `torch.cuda.memory_stats`): the more of the last two, since steps differ. None with
            expandable segments, where that is not known.
    """

    allocated_bytes: int
    reserved_bytes: int
    ran_out: bool
    cache_flushes: int | None

    def within(self, room: int) -> dict[str, int | None]:
        """Returns the figures under a limit of `room` bytes, as plans have them."""
        return {"room_bytes": room, "limited_bytes": self.reserved_bytes, "cache_flushes": self.cache_flushes}


@dataclass(eq=False, slots=True)
class _Piece:
    """A part of a segment, that is free or not, between its neighbours."""

    address: int
    size: int
    pool: _Segments
    before: _Piece | None = None
    behind: _Piece | None = None
    free: bool = False


class _Segments:
    """Segments of one kind, small or large, and what is free in them."""

    def __init__(self, small: bool, expandable: bool) -> None:
        self.small, self.expandable = small, expandable
        self.free: list[tuple[int, int, _Piece]] = []  # by size, then by address
        self.reserved = self._lowest = 0
        self._last: _Piece | None = None  # of the segment that grows

    def take(self, size: int) -> _Piece:
        """Allocates a block."""
        place = bisect.bisect_left(self.free, (size, -math.inf))
        if self.expandable and place + 1 < len(self.free) and self.free[place][2] is self._last:
            place += 1  # the end counts as all that it can grow to
        piece = self._without(self.free[place][2]) if place < len(self.free) else self._more(size)
        left = piece.size - size
        if left >= 512 if self.small or self.expandable else left > _MIB:
            rest = _Piece(piece.address + size, left, self, piece, piece.behind)
            if piece.behind is not None:
                piece.behind.before = rest
            piece.behind, piece.size = rest, size
            self._last = rest if piece is self._last else self._last
            self._add(rest)
        return piece

    def give_back(self, piece: _Piece) -> None:
        """Frees a block, and joins it with what is free beside it."""
        before, behind = piece.before, piece.behind
        if before is not None and before.free:
            piece = self._joined(self._without(before), piece)
        if behind is not None and behind.free:
            piece = self._joined(piece, self._without(behind))
        self._add(piece)

    def release(self) -> None:
        """Gives segments back that are all free."""
        for *_, piece in [*self.free]:
            if piece.before is None and piece.behind is None and not self.expandable:
                self._without(piece)
                self.reserved -= piece.size

    def _more(self, size: int) -> _Piece:
        """A free piece of at least a size, of a new segment or at the end of the one that grows."""
        page = 2 * _MIB if self.small or (not self.expandable and size >= 10 * _MIB) else 20 * _MIB
        last = self._last if self.expandable else None
        room = last.size if last is not None and last.free else 0
        taken = -(-(size - room) // page) * page
        self._lowest -= _APART
        piece = _Piece(self._lowest if last is None else last.address + last.size, taken, self, last)
        self.reserved += taken
        if last is not None:
            last.behind = piece
            if last.free:
                piece = self._joined(self._without(last), piece)
        self._last = piece
        return piece

    def _joined(self, piece: _Piece, other: _Piece) -> _Piece:
        piece.size, piece.behind = piece.size + other.size, other.behind
        if other.behind is not None:
            other.behind.before = piece
        self._last = piece if other is self._last else self._last
        return piece

    def _add(self, piece: _Piece) -> None:
        piece.free = True
        bisect.insort(self.free, (piece.size, piece.address, piece))

    def _without(self, piece: _Piece) -> _Piece:
        del self.free[bisect.bisect_left(self.free, (piece.size, piece.address))]
        piece.free = False
        return piece


def in_words(
    reserved_bytes: int,
    expandable_bytes: int,
    room_bytes: int = 0,
    limited_bytes: int = 0,
    cache_flushes: int | None = None,
) -> str:
    """Says what is reserved, with segments of fixed sizes and with expandable ones; first, what is under a limit.

    The arguments are the fields of a `Prediction`.
    """
    usual, by = errors.size(reserved_bytes), "by PyTorch's CUDA allocator"
    expandable = f"{errors.size(expandable_bytes)} with {EXPANDABLE}"
    if not limited_bytes:
        return f"{usual} {by}, {expandable}"
    limited = f"{errors.brief(limited_bytes, room_bytes)} {by}"
    if limited_bytes > room_bytes:
        limited += ", so the step does not fit"
    elif cache_flushes:
        times = "once" if cache_flushes == 1 else f"{cache_flushes} times"
        limited += f", which empties its cache at most {times} a step to stay within"
    elif cache_flushes == 0 and limited_bytes < reserved_bytes:
        limited += ", which empties its cache in the first steps alone"
    without = f"; {usual} without that limit" if limited_bytes != reserved_bytes else ""
    return f"{limited}{without}, {expandable}"


def in_brief(reserved_bytes: int, room_bytes: int, limited_bytes: int) -> str:
    """Says how much is reserved beside the most that may be: always under a limit, else where it is more than that.

    The arguments are the fields of a `Prediction`.
    """
    if limited_bytes:
        fits = "" if limited_bytes <= room_bytes else ", so the step does not fit"
        return f"PyTorch's allocator reserves {errors.brief(limited_bytes, room_bytes)}{fits}"
    if 0 < room_bytes < reserved_bytes:
        return f"PyTorch's allocator reserves {errors.brief(reserved_bytes)} for it, more than the budget"
    return ""


def expands() -> bool:
    """Whether the environment asks for expandable segments."""
    settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    return "expandable_segments:true" in settings.lower().replace(" ", "")


class Allocator:
    """PyTorch's allocator of one stream of a CUDA device.

    Args:
        expandable: Whether its segments are expandable.
        limit: The most bytes that it may reserve.

    Attributes:
        allocated: Bytes of blocks in use.
        ran_out: Whether an allocation failed; it goes on as if there were more.
        flushes: How often it gave back free segments to stay within the limit, by step.
    """

    def __init__(self, expandable: bool = False, limit: int | None = None) -> None:
        self._small, self._large = _Segments(True, expandable), _Segments(False, expandable)
        self._expandable, self._limit = expandable, limit
        self.allocated, self.flushes = 0, [0]
        self.reset()

    @property
    def reserved(self) -> int:
        """Bytes of segments."""
        return self._small.reserved + self._large.reserved

    def reset(self) -> None:
        """Begins to look for the most bytes again, and for what fails."""
        self._most_allocated, self._most_reserved, self.ran_out = self.allocated, self.reserved, False

    def most(self) -> Reserved:
        """Returns the most bytes so far."""
        flushes = None if self._expandable else max(self.flushes[-2:])
        return Reserved(self._most_allocated, self._most_reserved, self.ran_out, flushes)

    def take(self, nbytes: int) -> _Piece:
        """Allocates a block."""
        size = max(512, -(-nbytes // 512) * 512)
        piece = (self._small if size <= _MIB else self._large).take(size)
        self.allocated += piece.size
        held = self.reserved
        if self._limit is not None and held > self._limit:
            self.empty_cache()
            held = max(self.allocated, self._limit) if self._expandable else self.reserved
            self.ran_out |= held > self._limit
            self.flushes[-1] += held <= self._limit
        self._most_allocated = max(self._most_allocated, self.allocated)
        self._most_reserved = max(self._most_reserved, held)
        return piece

    def give_back(self, piece: _Piece) -> None:
        """Frees a block."""
        self.allocated -= piece.size
        piece.pool.give_back(piece)

    def empty_cache(self) -> None:
        """Gives segments back that are all free."""
        self._small.release()
        self._large.release()


def reserved(blocks: Sequence[Block], expandable: bool = False, limit: int | None = None) -> Reserved:
    """Returns what the allocator reserves for steps like a simulated one.

    Args:
        blocks: What lay in memory in the simulated step, one from the middle of training.
        expandable: Whether its segments are expandable.
        limit: The most bytes that it may reserve.
    """
    allocator = Allocator(expandable, limit)
    load(allocator, blocks)
    train(allocator, blocks, _STEPS, states=True)
    return allocator.most()


def load(allocator: Allocator, blocks: Sequence[Block]) -> None:
    """Allocates what is there before the first step."""
    for block in blocks:
        if not block.born and block.died is None and block.category != CATEGORIES[OPTIMIZER]:
            allocator.take(block.nbytes)


def train(allocator: Allocator, blocks: Sequence[Block], steps: int, *, states: bool) -> None:
    """Makes the allocations of some steps; `states`: also those of the optimizer's state, in the first of them."""
    begins, ends = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    there: list[int] = []
    returned = 0
    for number, block in enumerate(blocks):
        if block.born:
            begins[block.born].append(number)
        elif block.died is not None and block.category in _LEFT:
            returned = max(returned, block.died)
            continue
        elif block.died is not None:
            there.append(number)
        if block.died is not None:
            ends[block.died].append(number)
    state = [one for one in blocks if not one.born and one.died is None and one.category == CATEGORIES[OPTIMIZER]]
    last = max(begins, default=0)
    gone = (one.died for one in blocks if one.category == CATEGORIES[GRADIENTS] and one.died and one.died > last)
    stepped = min(gone, default=max(last, *ends, 0) + 1)  # the event before which the optimizer has made its step
    left: list[_Piece] = []
    for step in range(steps):
        allocator.flushes.append(0)
        now = {number: allocator.take(blocks[number].nbytes) for number in there}
        for event in sorted({*begins, *ends, returned, stepped}):
            for block in state if states and event == stepped and not step else ():
                allocator.take(block.nbytes)
            for piece in left if event == returned else ():
                allocator.give_back(piece)
            for number in ends[event]:
                allocator.give_back(now.pop(number))
            now.update((number, allocator.take(blocks[number].nbytes)) for number in begins[event])
        left = [*now.values()]
    for piece in left:
        allocator.give_back(piece)
