"""What a test machine acts: the statistics of a CUDA allocator, a kernel of CUDA, a terminal."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Generator, Sequence
from typing import Any

import pytest
import torch

from torch_recompute.memory import allocator


class Terminal(io.StringIO):
    """A terminal that keeps what is printed."""

    def isatty(self) -> bool:
        return True


@contextlib.contextmanager
def copies_as_on_cuda() -> Generator[None]:
    """A context in which a copy of several tensors raises their versions wherever it runs, as CUDA's kernel does."""
    copy = torch._foreach_copy_

    def raising(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        copy(targets, values)
        torch.autograd.graph.increment_version(targets)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", raising)
        yield


class ActedAllocator:
    """Acts the statistics of a CUDA allocator with two devices: peaks since the last reset, and what is held now."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = {0: (0, 0), 1: (0, 0)}
        self.peaks = dict(self.now)
        self.asked = 0  # how often it built its statistics
        patch.setattr(allocator, "_running", [])  # what earlier tests have left, and nobody has collected yet
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        patch.setattr(torch.cuda, "memory_stats_as_nested_dict", self.stats)
        patch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)

    def stats(self, device: int) -> dict[str, Any]:
        self.asked += 1
        now, peaks = self.now[device], self.peaks[device]
        return {
            name: {"all": {"current": now[nth], "peak": peaks[nth]}}
            for nth, name in enumerate(("allocated_bytes", "reserved_bytes"))
        }

    def reset(self, device: int) -> None:
        self.peaks[device] = self.now[device]

    def hold(self, device: int, allocated: int, reserved: int = 0) -> None:
        """From now on the device has handed out and holds this much."""
        self.now[device] = allocated, reserved
        before = self.peaks[device]
        self.peaks[device] = max(before[0], allocated), max(before[1], reserved)
