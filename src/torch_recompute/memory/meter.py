"""Meters: the bytes alive on a device, and the most alive since a moment, for decisions between two regions.

`measure` follows each operation and says what bytes are for. A meter gives one number, cheaply enough to ask at each
call of a region.

    CUDA   the allocator counts both numbers itself (`allocator.py`).
    CPU    the bytes alive are those in use in the C library's heap, tensors and everything else. Nothing counts a peak.
           So during a lap PyTorch's allocator writes down its events, without operations (`note_allocations`), and the
           lap is the heap at the beginning plus the most by which these rise. It costs some per cent of a layer's
           forward and up to its time in a backward of short sequences: for stretches that are not known yet.

On the CPU a lap belongs to one thread and ends when it is asked for. Within one function, such as a forward or a
replay, it is exact, but that older memory which is freed meanwhile is not subtracted. In a backward, events end with
the node in which they begin. So hooks on the nodes that follow begin and end them again, from the heap at that moment;
only what the first node takes and gives back after the lap began is not seen. A profiler or a measurement that already
has the events keeps them: the lap is then the most that the heap had at the moments when it was asked, and
`HeapMeter.missed` gives the reason, so that nobody learns from it.

Rejected: events in all steps, since no profiler of the user could start; the peak of the resident memory, which
includes what the heap holds and does not use; a dispatch mode, which costs more for each operation.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any, Protocol

import torch

from .. import errors
from .._torch import current_node, in_backward
from .._torch.storages import note_allocations, noted_allocations, profiling, rise
from .allocator import AllocatorMeter
from .free import heap
from .measurement import running

_PROBE = 2**22  # bytes
_PROBES = 8
_followed: list[object] = []  # the ways of reading the heap that were seen to follow it


class Meter(Protocol):
    """The bytes alive on one device, and the most since a moment; may be a user's own."""

    def live(self) -> int:
        """Returns the bytes alive now."""
        ...

    def reset_lap(self) -> None:
        """Begins a lap."""
        ...

    def lap(self) -> int:
        """Returns the most bytes alive since `reset_lap`."""
        ...


class HeapMeter:
    """A `Meter` of the CPU: the bytes in use in the C library's heap, and the allocator's events during a lap.

    Use a lap for a stretch of which nothing is known yet. The thread that begins it asks for it, in a `finally`, before
    it returns to the user's code, where a profiler could not start until then. Asking ends the lap.
    """

    def __init__(self) -> None:
        self._of = threading.local()

    def live(self) -> int:
        """Returns the bytes of the heap in use."""
        return _in_use()

    def reset_lap(self) -> None:
        """Begins a lap of this thread."""
        self._end().append(_Lap())

    def lap(self) -> int:
        """Returns the most bytes alive since `reset_lap`, and ends the lap."""
        laps = self._end()
        return laps[-1].most if laps else _in_use()

    @property
    def missed(self) -> str:
        """Why the last lap of this thread is not the most alive; empty where it is."""
        laps = self._laps()
        return laps[-1].missed if laps else "no lap began on this thread"

    def _laps(self) -> list[_Lap]:
        """The lap of this thread, and before it one around the running backward, which cannot end within it."""
        laps: list[_Lap] = self._of.__dict__.setdefault("laps", [])
        return laps

    def _end(self) -> list[_Lap]:
        laps = self._laps()
        for lap in laps:
            lap.end()
        laps[:-1] = [lap for lap in laps[:-1] if lap.noting]
        return laps


_numbers = itertools.count()
_MARK = "torch_recompute lap"


class _Lap:
    """One lap. The hooks of nodes hold it, so it holds none of them."""

    def __init__(self) -> None:
        self.most = self._before = 0
        self.missed = ""
        self.noting = False
        self._number = next(_numbers)
        self._hooks: list[Any] = []
        self._begin()
        node = current_node()
        self._outside = node is None
        if node is not None:
            self._hooks.append(node.register_hook(self._ran))
            self._follow(node)

    def end(self) -> None:
        if self.noting and self._outside and in_backward():
            self.missed = "it began before the backward that runs"
        else:
            self._end()
        while self._hooks:
            self._hooks.pop().remove()
        self.most = max(self.most, _in_use())

    def _begin(self, *_: Any) -> None:
        self._end()
        self._before = _in_use()
        self.most = max(self.most, self._before)
        if running() is not None:
            self.missed = "a measurement counts operations"
        elif profiling():
            self.missed = "a profiler runs on this thread"
        else:
            note_allocations()
            self.noting = True

    def _end(self) -> None:
        sizes = noted_allocations() if self.noting else None
        self.noting = False
        if sizes is not None:
            self.most = max(self.most, self._before + rise(sizes)[0])

    def _ran(self, *_: Any) -> None:
        """Follows a node that has run to those that can run next."""
        self._end()
        self._follow(current_node())

    def _follow(self, node: Any) -> None:
        for following, _ in node.next_functions:
            if following is not None and following.metadata.get(_MARK) != self._number:
                following.metadata[_MARK] = self._number
                self._hooks += following.register_prehook(self._begin), following.register_hook(self._ran)


def _in_use() -> int:
    return (heap() or (0,))[0]


def meter_for(device: torch.device) -> Meter:
    """Returns the meter of a device.

    Raises:
        ArgumentError: What is alive there is not known.
    """
    if device.type == "cuda":
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)
        return AllocatorMeter(device.index)
    if device.type == "cpu" and _heap_follows():
        return HeapMeter()
    counts = {"cpu": "the CPU's are counted by glibc 2.33 or later, where no other malloc is preloaded"}
    raise errors.ArgumentError(
        f"the bytes alive on a device of type {device.type!r} are not known: "
        f"{counts.get(device.type, 'they are counted on CUDA and on the CPU')}.\n"
        "  Pass an object with live(), reset_lap() and lap(), in bytes: those alive now, and the most since the reset."
    )


def _heap_follows() -> bool:
    """Whether the heap of the C library is where PyTorch allocates, and not that of another malloc.

    Another thread may free what hides a probe, so one of a few is enough, and is remembered.
    """
    if heap not in _followed and any(_probe_is_seen() for _ in range(_PROBES)):
        _followed.append(heap)
    return heap in _followed


def _probe_is_seen() -> bool:
    before = _in_use()
    probe = torch.empty(_PROBE, dtype=torch.uint8, device="cpu")
    return _in_use() - before >= probe.numel()


Stamp = float | torch.cuda.Event


def stamp() -> Stamp:
    """The present moment: on CUDA an event, so that nothing is waited for."""
    if torch.cuda.is_initialized():
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    return time.perf_counter()


def has_passed(moment: Any) -> bool:
    """Whether the device has got to a moment."""
    return isinstance(moment, float) or moment.query()


def between(start: Any, end: Any) -> float:
    """Seconds from one moment to another; waits for the device."""
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1000
