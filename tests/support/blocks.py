"""Memory in blocks: the unit of programs whose bytes are known by hand, and what is alive at one event."""

from __future__ import annotations

from typing import Any

import torch

from torch_recompute.memory import CATEGORIES, Block

BLOCK = 64 * 64 * 4  # bytes of one [64, 64] float32 tensor


def block(**options: Any) -> torch.Tensor:
    """One unit of memory."""
    return torch.ones(64, 64, **options)


def alive(blocks: tuple[Block, ...], event: int) -> dict[str, int]:
    """The bytes by category of the blocks that are there at an event."""
    sums = dict.fromkeys(CATEGORIES, 0)
    for block in blocks:
        if block.born <= event and (block.died is None or block.died > event):
            sums[block.category] += block.nbytes
    return sums
