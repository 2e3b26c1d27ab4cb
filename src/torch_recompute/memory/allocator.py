"""The CUDA allocator's own peaks, of what it gave to tensors and of what it held, shared by all running measurements.

The allocator keeps one of each per device and process, and resetting it is the only way to begin a new one. So each new
measurement first gives the peak so far to every one that still runs; then a reset takes nothing from any of them.
CUDA is never initialised here: a peak before its first use is 0. What was freed before and kept counts as held.
"""

from __future__ import annotations

import threading
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


def begin(peaks: dict[int, Peak]) -> None:
    """Starts a measurement: from now until `end`, its peaks by device index are kept up to date in `peaks`."""
    with _lock:
        read(*_running)
        _running.append(peaks)
        if torch.cuda.is_initialized():
            for device in range(torch.cuda.device_count()):
                torch.cuda.reset_peak_memory_stats(device)


def read(*running: dict[int, Peak]) -> None:
    """Brings the peaks of measurements up to date."""
    with _lock:
        for device in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
            allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
            for peaks in running:
                before = peaks.get(device, Peak())
                peaks[device] = Peak(max(allocated, before.allocated), max(reserved, before.reserved))


def end(peaks: dict[int, Peak]) -> None:
    """Brings the peaks of a measurement up to date for the last time."""
    with _lock:
        read(peaks)
        _running[:] = [other for other in _running if other is not peaks]
