"""The CUDA allocator's own peaks, of what it handed out and of what it held, shared by all running measurements.

The allocator keeps one of each per device and process, and resetting it is the only way to begin a new one. So each new
measurement first gives the peak so far to every one that still runs; then a reset takes nothing from any of them.
CUDA is never initialised here: a peak before its first use is 0.

What it holds beyond what it handed out is of blocks too small or too scattered for what was asked for (fragmentation),
and of what was freed before and kept: it begins with what it held when the measurement began.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

import torch


class Peak(NamedTuple):
    """The most bytes of one device at any time of a measurement.

    Attributes:
        allocated: Handed out to tensors, rounding included.
        reserved: Held from the device.
    """

    allocated: int = 0
    reserved: int = 0


_lock = threading.Lock()
_running: list[dict[int, Peak]] = []


def begin(peaks: dict[int, Peak]) -> None:
    """Start a peak: from now until `end`, `peaks` (by device index) belongs to this room."""
    with _lock:
        _read(_running)
        _running.append(peaks)
        if torch.cuda.is_initialized():
            for device in range(torch.cuda.device_count()):
                torch.cuda.reset_peak_memory_stats(device)


def read(peaks: dict[int, Peak]) -> None:
    """Bring a running peak up to date."""
    with _lock:
        _read([peaks])


def end(peaks: dict[int, Peak]) -> None:
    """Bring a peak up to date for the last time."""
    with _lock:
        _read([peaks])
        _running[:] = [other for other in _running if other is not peaks]


def _read(running: Iterable[dict[int, Peak]]) -> None:
    if not torch.cuda.is_initialized():
        return
    for device in range(torch.cuda.device_count()):
        allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        for peaks in running:
            before = peaks.get(device, Peak())
            peaks[device] = Peak(max(allocated, before.allocated), max(reserved, before.reserved))
