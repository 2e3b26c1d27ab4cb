"""`Reading`: the figures of one device at one moment, as plain data."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .ledger import Sample


class Reading(NamedTuple):
    """What a measurement says of one device.

    Attributes:
        device: The device these figures are of.
        peak_bytes: The most bytes alive at any one operation, on the CPU with its workspace, or when the block began.
        live_bytes: The bytes alive now; after the block, those of its storages that still are.
        by_category: `peak_bytes`, split; every category is there, and they sum to it.
        live_by_category: `live_bytes`, split in the same way.
        timeline: The bytes alive when the block began, and after each operation that changed them.
        allocator_peak_bytes: On CUDA the allocator's own peak, rounding and untracked tensors included; else None.
        reserved_peak_bytes: On CUDA the most that the allocator held from the device, which is what has to fit onto it;
            what exceeds `allocator_peak_bytes` is fragmentation and freed memory that it kept. Else None.
    """

    device: torch.device
    peak_bytes: int
    live_bytes: int
    by_category: dict[str, int]
    live_by_category: dict[str, int]
    timeline: tuple[Sample, ...]
    allocator_peak_bytes: int | None
    reserved_peak_bytes: int | None
