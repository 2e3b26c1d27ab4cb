"""The CUDA allocator's figures: the bytes that it gave to tensors, those that it holds, and the peaks of both.

The allocator keeps one peak of each per device and process, and resetting it is the only way to begin a new one. So
each new measurement, and each new lap of a meter, first gives the peak so far to every one that still runs; then a
reset takes nothing from any of them. CUDA is never initialised here: a peak before its first use is 0. What was freed
before and kept counts as held. Nothing waits for the device: the allocator's bookkeeping is the host's.
"""

from __future__ import annotations

import threading
import weakref
from typing import NamedTuple

import torch


class Peak(NamedTuple):
    """The most bytes of one device at any time of a measurement.

    Attributes:
        allocated: Given to tensors, rounding included.
        reserved: Held from the device.
    """

    allocated: int = 0
    reserved: int = 0


_lock = threading.RLock()
_running: list[dict[int, Peak]] = []


def _figures(device: int, which: str) -> Peak:
    """The bytes of a device now ("current"), or the most since the last reset ("peak")."""
    # The nested form: flattening it, as torch.cuda.memory_allocated does, is most of that function's time.
    found = torch.cuda.memory_stats_as_nested_dict(device)
    return Peak(*(found[name]["all"][which] for name in ("allocated_bytes", "reserved_bytes"))) if found else Peak()


def _devices(device: int | None) -> range:
    """The devices to look at: one, or all there are; none before CUDA is used."""
    if not torch.cuda.is_initialized():
        return range(0)
    return range(torch.cuda.device_count()) if device is None else range(device, device + 1)


def begin(peaks: dict[int, Peak], device: int | None = None) -> None:
    """Starts a measurement: from now until `end`, its peaks by device index are kept up to date in `peaks`.

    Args:
        peaks: Of this measurement. One that runs already starts again.
        device: The only device that it is about; by default all.
    """
    with _lock:
        _running[:] = [other for other in _running if other is not peaks]
        read(*_running, device=device)
        _running.append(peaks)
        peaks.clear()
        for index in _devices(device):
            torch.cuda.reset_peak_memory_stats(index)


def read(*running: dict[int, Peak], device: int | None = None) -> None:
    """Brings the peaks of measurements up to date, on one device or all."""
    with _lock:
        for index in _devices(device) if running else ():
            now = _figures(index, "peak")
            for peaks in running:
                before = peaks.get(index, Peak())
                peaks[index] = Peak(max(now.allocated, before.allocated), max(now.reserved, before.reserved))


def end(peaks: dict[int, Peak]) -> None:
    """Brings the peaks of a measurement up to date for the last time."""
    with _lock:
        read(peaks)
        _running[:] = [other for other in _running if other is not peaks]


class AllocatorMeter:
    """A `Meter` of one CUDA device, by the allocator's statistics of what it gave to tensors.

    A lap counts what all threads allocate. Beginning one resets `torch.cuda.max_memory_allocated`, as any measurement
    does.

    Args:
        device: The index of the device.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._peaks: dict[int, Peak] = {}
        weakref.finalize(self, end, self._peaks).atexit = False

    def live(self) -> int:
        """Returns the bytes that tensors have now, rounding included."""
        return _figures(self._device, "current").allocated

    def reset_lap(self) -> None:
        """Begins a lap."""
        begin(self._peaks, self._device)

    def lap(self) -> int:
        """Returns the most bytes that tensors had since `reset_lap`."""
        read(self._peaks, device=self._device)
        return self._peaks.get(self._device, Peak()).allocated
