"""What a device has free for a step of a model: the budget that "fit" stands for.

On the CPU that is what the host has free for this process (`memory/host.py`); an accelerator is asked itself.
"""

from __future__ import annotations

import torch
from torch import nn

from .. import errors
from ..memory.host import host_memory
from ..memory.ledger import storages

# Of the device's memory: for workspaces of kernels, the context, and what fragmentation makes unusable.
RESERVE = 0.05


def free_bytes(model: nn.Module, device: torch.device, optimizer: object = None, batch: object = ()) -> int:
    """Bytes that the peak of a step may reach: what is free, and what the step itself holds, less a reserve of 5 %.

    In the middle of training the device holds gradients and the optimizer's state, which the peak of a step counts, and
    the batch.

    Args:
        model: The model.
        device: Where the step runs.
        optimizer: The optimizer of the step, whose state is given back where it has one.
        batch: A nest of the tensors of the call.

    Raises:
        ArgumentError: What is free is said neither by the device nor, for the CPU, by the system.
    """
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    state = [*optimizer.state.values()] if isinstance(optimizer, torch.optim.Optimizer) else []
    own = storages([[*model.parameters(), *model.buffers(), *gradients], state, batch])
    held = {id(storage): int(storage.nbytes()) for place, storage in own if _same(place, device)}
    free, total = _memory(device)
    return free + sum(held.values()) - round(RESERVE * total)


def _same(place: torch.device, device: torch.device) -> bool:
    return place.type == device.type and device.index in (None, place.index)


def _memory(device: torch.device) -> tuple[int, int]:
    """Bytes of a device that are free for this process, and all of them."""
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
