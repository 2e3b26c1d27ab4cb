"""CUDA graphs: whether one is being captured, and the state of a generator meanwhile.

While a graph is captured a generator has no offset of its own, only one relative to where it will be when the graph
is launched. `get_offset` refuses to answer then; `get_state` and `set_state` (torch 2.10 and later) read and write
the relative one, as long as the seed is not changed.
"""

from __future__ import annotations

import torch

from .devices import ACCELERATOR


def capturing() -> bool:
    """Whether the present stream records a CUDA graph instead of running what it is given."""
    return ACCELERATOR == "cuda" and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def captured_state(generator: torch.Generator) -> tuple[int, int]:
    """Seed and relative offset of a generator of the device whose graph is being captured."""
    seed, offset = generator.get_state().view(torch.int64).tolist()
    return seed, offset


def set_captured_state(generator: torch.Generator, state: tuple[int, int]) -> None:
    """Puts the generator where `captured_state` found it, in the same capture."""
    generator.set_state(torch.tensor(state, dtype=torch.int64, device="cpu").view(torch.uint8))
