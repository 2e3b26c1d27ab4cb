"""How much memory a process may take, and how much it has taken.

Problem. On CUDA the allocator can be told a share of the device, and reports what it has reserved. A CPU has no such
allocator, and a process that takes too much brings the machine down with it.

Idea. Linux limits the private writable memory of a process (RLIMIT_DATA), and an allocation beyond it fails in the same
way as on a device. What libraries have taken before the step is not the step's: it is what the process has when the
model has been built, less the model itself, and both the limit and the figure of what was taken begin above it.

Rejected: RLIMIT_AS, which counts what is only mapped: code, and arenas that nothing is written to.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from ... import errors

STATUS = Path("/proc/self/status")
MESSAGES = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "bad_alloc")


def status(field: str) -> int | None:
    """Bytes of a field of the system's own account of this process; None where it keeps none."""
    try:
        lines = STATUS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = next((line.split() for line in lines if line.startswith(f"{field}:")), None)
    return None if found is None else int(found[1]) * 1024


def check(capacity: int | None, device: str) -> None:
    """Refuse a capacity that could not be kept to.

    Raises:
        ArgumentError: On a CPU the system does not limit this.
    """
    if capacity is not None and device == "cpu" and (sys.platform != "linux" or status("VmData") is None):
        raise errors.ArgumentError(
            f"--capacity limits a process's memory on a CPU by Linux's RLIMIT_DATA, and this system is {sys.platform}. "
            "Leave it out, or write --device cuda, where the allocator keeps to it."
        )


def limit(capacity: int, device: torch.device, held: int) -> None:
    """Let no more than `capacity` bytes be taken, of which the step holds some already."""
    if device.type == "cuda":
        share = min(1.0, capacity / torch.cuda.get_device_properties(device).total_memory)
        torch.cuda.set_per_process_memory_fraction(share, device)
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, ((status("VmData") or 0) - held + capacity, hard))


def unlimit(device: torch.device) -> None:
    """Take the limit back, for what is no part of the step."""
    if device.type != "cuda":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error).lower() for said in MESSAGES)


class Reserved:
    """What the process takes from the system, or from the device's driver, for the step.

    Args:
        device: Where the step runs.
        held: Bytes of the step that are there already.
    """

    def __init__(self, device: torch.device, held: int) -> None:
        self._device = device
        resident = status("VmRSS")
        self._before = None if resident is None else resident - held

    def bytes(self) -> int | None:
        """The most so far; None where the system does not say."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_reserved(self._device)
        peak = status("VmHWM")
        return None if peak is None or self._before is None else max(0, peak - self._before)
