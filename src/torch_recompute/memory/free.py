"""The memory that the host, or a device, has free for this process: the budget that "fit" stands for.

Of the host that is what the system calls available, which counts files in the cache that it would give up, and no more
than what is left of any limit on the process's control groups: a container ends what goes beyond its own, however much
the machine has. Linux says both in files; elsewhere psutil does. An accelerator says it itself.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import errors
from .ledger import storages

# Of the device's memory: for workspaces of kernels, the context, and what fragmentation makes unusable.
RESERVE = 0.05
CONTEXT = 600 * 2**20  # bytes of a device that a process takes for its libraries, as seen on an H100

# Files of a control group: its limit, its use, and how much of the use is file cache that can be given up.
GROUPS = {
    "sys/fs/cgroup": ("memory.max", "memory.current", "inactive_file"),
    "sys/fs/cgroup/memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """Returns the bytes of the host's memory that are available to this process, and all there are.

    Args:
        root: Where `proc` and `sys` are mounted, on Linux.

    Raises:
        ArgumentError: The system says nothing of its memory.
    """
    if sys.platform != "linux":
        try:
            import psutil
        except ImportError:
            raise errors.ArgumentError(
                f"what memory of this machine is free is not known: its system ({sys.platform}) says it to psutil, "
                "which is not installed. pip install psutil, or pass the budget in bytes."
            ) from None
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)
    found = _numbers(root / "proc/meminfo")
    free, total = 1024 * found["MemAvailable:"], 1024 * found["MemTotal:"]
    for folder, (limit, used, spare) in _groups(root):
        most = (folder / limit).read_text().strip()
        if most != "max" and int(most) < total:
            total = int(most)
            left = total - int((folder / used).read_text()) + _numbers(folder / "memory.stat").get(spare, 0)
            free = max(0, min(free, left))
    return free, total


class _Heap(ctypes.Structure):
    """The result of glibc's `mallinfo2`."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


@functools.cache
def _mallinfo() -> Callable[[], Any] | None:
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return None
    ask.restype = _Heap
    return ask


def heap() -> tuple[int, int] | None:
    """Returns the bytes of this process's heap that are in use, and all it holds; None where the C library is mute."""
    ask = _mallinfo()
    if ask is None:
        return None
    now = ask()
    return now.uordblks + now.hblkhd, now.arena + now.hblkhd


def _groups(root: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yields the control groups of this process that can limit memory, outer ones first, and their files' names."""
    listed = root / "proc/self/cgroup"
    lines = [line.split(":", maxsplit=2) for line in listed.read_text().splitlines()] if listed.exists() else []
    for where, names in GROUPS.items():
        kind = "memory" if where.endswith("memory") else ""
        own = next((path for _, kinds, path in lines if kind in kinds.split(",")), "/")
        inner = Path(own.lstrip("/"))
        for place in (*reversed(inner.parents), inner) if inner.parts else (inner,):
            folder = root / where / place
            if all((folder / name).exists() for name in (*names[:2], "memory.stat")):
                yield folder, names


def _numbers(file: Path) -> dict[str, int]:
    """Returns the first two columns of a file of the kernel."""
    rows = (line.split() for line in file.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}


def free_bytes(model: nn.Module, device: torch.device, optimizer: object = None, batch: object = ()) -> int:
    """Returns the bytes that the peak of a step may reach: what is free, and what the step itself holds, less 5 %.

    In training the device holds gradients, the optimizer's state and the batch, which the peak of a step counts.

    Args:
        model: The model.
        device: Where the step runs.
        optimizer: The optimizer of the step, whose state is given back where it has one.
        batch: A nest of the tensors of the call.

    Raises:
        ArgumentError: What is free is said neither by the device nor, for the CPU, by the system.
    """
    free, total = memory_of(device)
    return free + held_bytes(model, device, optimizer, batch) - reserve(total)


def held_bytes(model: nn.Module, device: torch.device, optimizer: object = None, batch: object = ()) -> int:
    """Returns the bytes on a device that a step of a model holds now; the arguments are those of `free_bytes`."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    state = [*optimizer.state.values()] if isinstance(optimizer, torch.optim.Optimizer) else []
    own = storages([[*model.parameters(), *model.buffers(), *gradients], state, batch])
    held = {
        id(storage): int(storage.nbytes())
        for place, storage in own
        if place.type == device.type and device.index in (None, place.index)
    }
    return sum(held.values())


def reserve(total: int) -> int:
    """Returns the bytes that a budget of what is free leaves, of all that a device has."""
    return round(RESERVE * total)


def memory_of(device: torch.device) -> tuple[int, int]:
    """Returns the bytes of a device that are free for this process, and all of them."""
    if device.type == "cpu":
        return host_memory()
    module = torch.get_device_module(device)
    if hasattr(module, "mem_get_info"):
        free, total = module.mem_get_info(device)
        return free + module.memory_reserved(device) - module.memory_allocated(device), total
    if hasattr(module, "recommended_max_memory"):  # MPS, whose memory is the host's, up to a share of it
        total = module.recommended_max_memory()
        return total - module.current_allocated_memory(), total
    raise errors.ArgumentError(
        f'budget="fit": what a device of type {device.type!r} has free is not known, since torch.{device.type} does '
        "not say it.\n"
        '  Pass the most bytes that the step may take, such as budget="24GiB".'
    )
