"""The CUDA allocator's own peak, shared by all measurements that are running.

The allocator keeps one peak per device and process, and resetting it is the only way to begin a new one. So whoever
begins first hands the peak so far to every measurement still running; then a reset takes nothing from any of them.
CUDA is never initialised here: a peak before its first use is 0.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch

_lock = threading.Lock()
_running: list[dict[int, int]] = []


def begin(peaks: dict[int, int]) -> None:
    """Start a peak: from now until `end`, `peaks` (device index -> bytes) belongs to this room."""
    with _lock:
        _read(_running)
        _running.append(peaks)
        if torch.cuda.is_initialized():
            for device in range(torch.cuda.device_count()):
                torch.cuda.reset_peak_memory_stats(device)


def read(peaks: dict[int, int]) -> None:
    """Bring a running peak up to date."""
    with _lock:
        _read([peaks])


def end(peaks: dict[int, int]) -> None:
    """Bring a peak up to date for the last time."""
    with _lock:
        _read([peaks])
        _running[:] = [other for other in _running if other is not peaks]


def _read(running: Iterable[dict[int, int]]) -> None:
    if not torch.cuda.is_initialized():
        return
    for device in range(torch.cuda.device_count()):
        peak = torch.cuda.max_memory_allocated(device)
        for peaks in running:
            peaks[device] = max(peak, peaks.get(device, 0))
