"""What a device has free for a step of a model: the budget that "fit" stands for.

On the CPU that is what the host has free for this process (`memory/host.py`).
"""

from __future__ import annotations

import torch
from torch import nn

from ..memory.host import host_memory
from ..memory.ledger import storages

# Of the device's memory: for workspaces of kernels, the context, and what fragmentation makes unusable.
RESERVE = 0.05


def free_bytes(model: nn.Module, device: torch.device) -> int:
    """Bytes that the peak of a step may reach: what is free, and what the model itself holds, less a reserve of 5 %.

    Raises:
        ArgumentError: The device is the CPU of a system that says nothing of its memory.
    """
    held = {id(s): int(s.nbytes()) for _, s in storages([*model.parameters(), *model.buffers()]) if s.device == device}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        free, total = host_memory()
    return free + sum(held.values()) - round(RESERVE * total)
