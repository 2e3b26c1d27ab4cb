"""What a device has free for a step of a model: the budget that "fit" stands for."""

from __future__ import annotations

import os

import torch
from torch import nn

from ..memory.ledger import storages

# Of the device's memory: for workspaces of kernels, the context, and what fragmentation makes unusable.
RESERVE = 0.05


def free_bytes(model: nn.Module, device: torch.device) -> int:
    """Bytes that the peak of a step may reach: what is free, and what the model itself holds, less a reserve of 5 %."""
    held = {id(s): int(s.nbytes()) for _, s in storages([*model.parameters(), *model.buffers()]) if s.device == device}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + unused + sum(held.values()) - round(RESERVE * total)
    pages, size = os.sysconf("SC_AVPHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * size
    return pages * size + sum(held.values()) - round(RESERVE * total)
