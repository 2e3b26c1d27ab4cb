"""Copies to host memory and back: what is on the host, what is on its way there, and what is on its way back.

A `Direct` makes the copies: on a CUDA device on two streams of their own (`Streams`), elsewhere at once. A
`HostCopy` is one piece of memory that was copied: all of a storage, or the part of it that a dense tensor takes up.
Handles of one storage at one version share a copy, whether they are one tensor or q, k and v cut from one product,
and what comes back is a view of one base. In host memory the copy must also have the tensor's bytes: a write by `.data`
has no version. To compare them on a device would wait for it, so such a write between two calls is not seen there. An
expanded tensor is not copied expanded. A view with gaps takes its whole storage along if it covers at least a quarter
of it, else its elements are gathered first.

What one region puts is a `Group`. In forward, the copies of the present group and of `ahead` groups before it may be
under way, and their tensors are still on the device; when the next group begins, the device waits for the oldest of
them and its memory is free. In backward, opening a copy of one group starts the copies back of the `ahead` groups
that were put before it, and no more than these wait on the device unopened. So both the memory that copies take and the
point at which it is free are the same in every step. What is opened while it is still on the device is not copied back.

Invariants: a copy is alive as long as a handle of it is; nothing here holds one strongly. Changes of a tensor that is
still being copied are noticed by its version and raise when it is opened.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .. import errors
from .._torch import storage_id
from .._torch.storages import Memory, is_fake
from .._torch.tensors import unexpanded
from ..state.tape import thread


class Mark(NamedTuple):
    """A copy under way: the event at its end, and the stream on which it was asked for."""

    done: Any
    asked: Any


class Direct:
    """Makes copies that are done when the call returns. Memory on the CPU is its own copy back.

    Tensors are dense and have one dimension. A mark, which `send` and `fetch` return beside the copy, is its end.

    Args:
        device: Where tensors come back to.

    Attributes:
        direct: Whether copies are done when a call returns, so that there is nothing to wait for.
        store: The store that it is for, as errors name it.
        copied: What happens to a tensor on its way.
    """

    direct = True
    store, copied = "OnHost", "copied to the host"

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)

    def steady(self, source: torch.Tensor) -> torch.Tensor:
        """Returns what is sent for a tensor: itself, or a copy of it that nobody else writes to."""
        return source

    def same(self, held: Any, first: int, source: torch.Tensor) -> bool:
        """Whether what is held for a tensor on the CPU has its bytes, from element `first` on."""
        found = held[first : first + source.numel()]
        return not source.is_quantized and torch.equal(found.view(torch.uint8), source.view(torch.uint8))

    def send(self, source: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Starts a copy to the host; returns it and its mark."""
        return torch.empty_like(source, device="cpu").copy_(source), None

    def wait_for_send(self, mark: Any) -> None:
        """Makes what is computed from now on wait for a `send`: the source's memory may be used again."""

    def fetch(self, host: torch.Tensor, after: Any) -> tuple[torch.Tensor, Any]:
        """Starts a copy back, to begin after the mark of a `send`; returns it and its mark."""
        return host.to(self._device), None

    def room(self, host: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Takes memory for a copy back; returns it and what says when it may be written."""
        return torch.empty_like(host, device=self._device), None

    def fill(self, tensor: torch.Tensor, host: torch.Tensor, room: Any, after: Any) -> Any:
        """Starts a copy back into such memory, on any thread; returns its mark."""
        tensor.copy_(host)

    def arrive(self, tensor: torch.Tensor, mark: Any) -> None:
        """Makes what is computed from now on wait for a `fetch`."""

    def abandon(self, tensor: torch.Tensor, mark: Any) -> None:
        """Called before a device tensor is dropped while its copy may still be running."""


class Streams(Direct):
    """Copies to and from pinned host memory on a stream each way, so that both are used while the CUDA device computes.

    Every edge between streams is an event:

        what wrote the tensor   before its copy to the host      `send`
        the copy to the host    before the tensor's memory       `wait_for_send`
                                is used for something else
        the copy to the host    before the copy back             `fetch`, whose `after` is what `send` returned
        what used the memory    before the copy back into it     `fetch`; it is allocated on the stream that computes
        the copy back           before its reader                `arrive`

    Memory whose copy was never waited for is not just dropped (`abandon`): the allocator is given the stream that still
    uses it. Otherwise `record_stream` is avoided: the allocator would get round to such blocks late, and a program that
    runs ahead of its device would take as much memory as without offloading. Torch itself notes which stream a pinned
    block of the host was copied on.
    """

    direct = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._away = torch.cuda.Stream(device)
        self._back = torch.cuda.Stream(device)

    def send(self, source: torch.Tensor) -> tuple[torch.Tensor, Mark]:
        """Starts a copy to pinned memory, once what is queued now has written the tensor."""
        here = torch.cuda.current_stream(self._device)
        host = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
        self._away.wait_stream(here)
        with torch.cuda.stream(self._away):
            host.copy_(source, non_blocking=True)
            return host, Mark(self._away.record_event(), here)

    def wait_for_send(self, mark: Mark) -> None:
        """Makes the stream that asked for the copy wait for it; on that stream the memory was allocated."""
        mark.asked.wait_event(mark.done)

    def fetch(self, host: torch.Tensor, after: Mark) -> tuple[torch.Tensor, Mark]:
        """Starts a copy into memory of the stream that computes."""
        tensor, room = self.room(host)
        return tensor, self.fill(tensor, host, room, after)

    def room(self, host: torch.Tensor) -> tuple[torch.Tensor, Mark]:
        """Takes memory of the present stream, and marks what used it."""
        here = torch.cuda.current_stream(self._device)
        tensor = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        return tensor, Mark(here.record_event(), here)

    def fill(self, tensor: torch.Tensor, host: torch.Tensor, room: Mark, after: Mark) -> Mark:
        """Starts the copy once that is done."""
        self._back.wait_event(room.done)
        self._back.wait_event(after.done)
        with torch.cuda.stream(self._back):
            tensor.copy_(host, non_blocking=True)
            return Mark(self._back.record_event(), room.asked)

    def arrive(self, tensor: torch.Tensor, mark: Mark) -> None:
        """Makes the present stream wait for the copy."""
        here = torch.cuda.current_stream(self._device)
        here.wait_event(mark.done)
        if here != mark.asked:
            tensor.record_stream(here)

    def abandon(self, tensor: torch.Tensor, mark: Mark) -> None:
        """Has the memory used again once both streams are past the copies now queued on them."""
        tensor.record_stream(self._away)
        tensor.record_stream(self._back)


COVERS = 4
"""A view with gaps takes its storage along if it covers at least one part in this many of it."""


class Cut(NamedTuple):
    """Which memory is copied for a tensor.

    Attributes:
        first: The first element copied, counted in the storage; -1 where the elements are gathered.
        stop: One past the last.
        stride: The tensor's strides, in what is copied.
        shift: Where the tensor begins in it.
        gathered: Size, stride and offset of the elements, where they are gathered.
    """

    first: int
    stop: int
    stride: tuple[int, ...]
    shift: int
    gathered: tuple[Any, ...] = ()

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns that memory of a tensor, in one dimension."""
        if self.first < 0:
            return unexpanded(tensor).contiguous().view(-1)
        return tensor.as_strided((self.stop - self.first,), (1,), self.first)


def cut(tensor: torch.Tensor) -> Cut:
    """Returns which memory to copy for a strided tensor that has at least one element."""
    stride, start = tensor.stride(), int(tensor.storage_offset())
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, stride, strict=True))
    once = unexpanded(tensor)
    if once.numel() >= span:
        return Cut(start, start + span, stride, 0)
    whole = tensor.untyped_storage().nbytes() // tensor.element_size()
    if once.numel() * COVERS >= whole:
        return Cut(0, whole, stride, start)
    steps, step = [0] * tensor.dim(), 1
    for dim in reversed(range(tensor.dim())):
        if once.shape[dim] == tensor.shape[dim]:
            steps[dim], step = step, step * tensor.shape[dim]
    return Cut(-1, once.numel(), tuple(steps), 0, (tensor.shape, stride, start))


class HostCopy:
    """Memory that was copied to the host.

    Attributes:
        host: The copy: one dimension, dense.
        nbytes: Its size.
    """

    def __init__(self, queue: TransferQueue, tensor: torch.Tensor, piece: Cut, freed: Callable[[int], None]) -> None:
        self._freed: Callable[[int], None] | None = None
        self._source: torch.Tensor | None = None
        self._coming: tuple[torch.Tensor, Any] | None = None
        self._queue = queue
        self._memory = Memory(tensor)
        self._version = tensor._version
        self._cut = piece
        self._arrived: Memory | None = None
        self._mark: Any = None
        self._spoiled: int | None = None
        source = queue.copy_streams.steady(piece.of(tensor))
        self._expected = source._version
        self.host, self._sent = queue.copy_streams.send(source)
        self.nbytes = self.host.nbytes
        self._freed = freed
        if not queue.copy_streams.direct:
            self._source = source

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        freed, self._freed = self._freed, None
        if freed is None:  # the copy could not be made
            return
        if self._source is not None:
            self._queue.copy_streams.abandon(self._source, self._sent)
        self.cancel_prefetch()
        freed(self.nbytes)

    def holds(self, tensor: torch.Tensor, piece: Cut) -> bool:
        """Whether the copy contains the tensor, of the same storage, as it is now."""
        mine = self._cut
        if self._freed is None or tensor.dtype != self.host.dtype or self._spoiled is not None:
            return False
        if tensor._version != self._version or piece.gathered != mine.gathered:
            return False
        if piece.first < mine.first or piece.stop > mine.stop:
            return False
        held: Any = self.host if self._source is None else self._source
        unknown = tensor.device.type != "cpu" or is_fake(tensor)
        return unknown or self._queue.copy_streams.same(held, piece.first - mine.first, piece.of(tensor))

    def view(self, flat: torch.Tensor, size: Sequence[int], piece: Cut) -> torch.Tensor:
        """Returns the tensor that was put, in what `open` returned."""
        shift = piece.shift + max(piece.first, 0) - max(self._cut.first, 0)
        return flat.as_strided(size, piece.stride, flat.storage_offset() + shift)

    def finish_offload(self) -> None:
        """Waits for the copy to the host, and frees the memory on the device."""
        if self._source is not None:
            if self._source._version != self._expected:
                self._spoiled = self._source._version
            self._queue.copy_streams.wait_for_send(self._sent)
            self._source = None

    def prefetch(self) -> bool:
        """Starts the copy back; False where there is no need to."""
        if self._source is not None or self._coming is not None or self._here() is not None:
            return False
        self._coming = self._queue.copy_streams.fetch(self.host, self._sent)
        return True

    def cancel_prefetch(self) -> None:
        """Drops the copy that was started but never read."""
        if self._coming is not None:
            self._queue.copy_streams.abandon(*self._coming)
            self._coming = None

    def _here(self) -> torch.Tensor | None:
        return None if self._arrived is None else self._arrived.flat(self.host.numel(), self.host.dtype)

    def open(self) -> torch.Tensor:
        """Returns the memory, on the device."""
        now = self._spoiled if self._source is None else self._source._version
        if now is not None and now != self._expected:
            made_by = self._queue.copy_streams
            raise errors.ChangedError(
                f"a tensor that {made_by.store} was given has been changed in place while it was being "
                f"{made_by.copied} (version {self._expected} then, {now} now), so neither its old nor its new "
                "values are known to be there.\n"
                "  With ahead=1 it may be changed once two more regions have been called. Write x = x + y instead of "
                "x += y, or give the region a copy: region(x.clone())."
            )
        if self._source is not None:
            return self._source
        if self._coming is None:
            flat = self._here()
            if flat is not None:
                self._queue.copy_streams.arrive(flat, self._mark)  # the reader may be on another stream than the first
                return flat
            self._coming = self._queue.copy_streams.fetch(self.host, self._sent)
        (flat, self._mark), self._coming = self._coming, None
        self._queue.copy_streams.arrive(flat, self._mark)
        if not self._queue.copy_streams.direct:
            self._arrived = Memory(flat)
        return flat


class Group:
    """The copies that one call of a region put."""

    def __init__(self, key: int, before: weakref.ref[Group] | None) -> None:
        self.key = key
        self.before = before
        self.copies: list[weakref.ref[HostCopy]] = []


class _Puts(threading.local):
    """The puts of one thread: its groups, and the copies whose tensors are still on the device."""

    def __init__(self) -> None:
        self.groups: list[weakref.ref[Group]] = []
        self.leaving: deque[list[weakref.ref[HostCopy]]] = deque()
        self.enough = 64


class TransferQueue:
    """All copies of one device.

    Args:
        copy_streams: Makes the copies.
    """

    def __init__(self, copy_streams: Direct) -> None:
        self.copy_streams = copy_streams
        self.lock = threading.RLock()
        self._known: dict[int, list[weakref.ref[HostCopy]]] = {}
        self._dropped: deque[tuple[int, weakref.ref[HostCopy]]] = deque()
        self._puts = _Puts()
        self._called: deque[list[weakref.ref[HostCopy]]] = deque()

    def find(self, tensor: torch.Tensor, piece: Cut) -> HostCopy | None:
        """Returns a copy that holds the tensor already."""
        for ref in list(self._known.get(storage_id(tensor), ())):
            host_copy = ref()
            if host_copy is not None and host_copy.holds(tensor, piece):
                return host_copy
        return None

    def send(self, tensor: torch.Tensor, piece: Cut, freed: Callable[[int], None]) -> HostCopy:
        """Starts a copy. `freed` is called with its size when it is dropped."""
        host_copy, storage = HostCopy(self, tensor, piece, freed), storage_id(tensor)

        def forget(ref: weakref.ref[HostCopy]) -> None:
            self._dropped.append((storage, ref))
            if self.lock.acquire(blocking=False):  # else its holder may be waiting for this thread
                try:
                    self._forget()
                finally:
                    self.lock.release()

        self._forget()
        self._known.setdefault(storage, []).append(weakref.ref(host_copy, forget))
        return host_copy

    def _forget(self) -> None:
        while self._dropped:
            storage, ref = self._dropped.popleft()
            known = self._known[storage]
            known.remove(ref)
            if not known:
                del self._known[storage]

    def join(self, host_copy: HostCopy, ahead: int) -> Group | None:
        """Returns the group that a copy started now belongs to; None where nothing has to be waited for."""
        if self.copy_streams.direct:
            return None
        mine = self._puts
        groups = mine.groups
        while groups and groups[-1]() is None:
            groups.pop()
        group = groups[-1]() if groups else None
        if group is None or group.key != thread.calls:
            group = Group(thread.calls, groups[-1] if groups else None)
            groups.append(weakref.ref(group))
            if len(groups) > mine.enough:
                mine.groups = [ref for ref in groups if ref() is not None]
                mine.enough = max(64, 2 * len(mine.groups))
            while len(mine.leaving) > ahead:
                self._leave(mine.leaving.popleft())
            mine.leaving.append([])
        mine.leaving[-1].append(weakref.ref(host_copy))
        group.copies.append(weakref.ref(host_copy))
        return group

    def settle(self) -> None:
        """Waits for all that this thread has sent, as when further groups begin."""
        leaving = self._puts.leaving
        while leaving:
            self._leave(leaving.popleft())

    @staticmethod
    def _leave(refs: list[weakref.ref[HostCopy]]) -> None:
        for ref in refs:
            leaving = ref()
            if leaving is not None:
                leaving.finish_offload()

    def open(self, host_copy: HostCopy, group: Group | None, ahead: int) -> torch.Tensor:
        """Returns the memory of a copy on the device, and starts the copies back that will be wanted next."""
        with self.lock:
            flat = host_copy.open()
            for _ in range(ahead):
                group = None if group is None or group.before is None else group.before()
                if group is None:
                    break
                called = [ref for ref in group.copies if (other := ref()) is not None and other.prefetch()]
                if called:
                    self._called.append(called)
            while len(self._called) > ahead:
                for ref in self._called.popleft():
                    other = ref()
                    if other is not None:
                        other.cancel_prefetch()
            return flat
