"""The named random streams of Megatron-Core and DeepSpeed, as a region's state.

Under tensor parallelism some dropout masks must differ between ranks and others must agree. Both systems keep a
tracker: a dict of generator states by name, one of which `fork(name)` puts into the device's generator for a while. A
replay that found the streams where the forward left them would draw other masks, so a region that stands in for the
system's own must look after them. The system is not imported: if it has not been, there is no tracker.

A stream's state is a tensor, which a fork replaces and never writes to, or a generator (for CUDA graphs), which it
advances; the former is kept as it is, of the latter the state.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from ..state import Ambient


class TrackerRng:
    """The random streams of one tracker, for `recompute(fn, state=[TrackerRng(get_cuda_rng_tracker())])`.

    Args:
        tracker: An object with Megatron-Core's `get_states()` and `set_states(states)`.
    """

    def __init__(self, tracker: Any) -> None:
        self.tracker = tracker

    def capture(self) -> dict[str, tuple[Any, torch.Tensor | None]]:
        """Each stream by its name: what the tracker holds for it, and the state of that if it is a generator."""
        return {
            name: (stream, stream.get_state() if isinstance(stream, torch.Generator) else None)
            for name, stream in self.tracker.get_states().items()
        }

    def restore(self, value: dict[str, tuple[Any, torch.Tensor | None]]) -> None:
        """Gives the tracker its streams back. One that had none is left alone: it may not be in use."""
        for stream, state in value.values():
            if state is not None:
                stream.set_state(state)
        if value:
            self.tracker.set_states({name: stream for name, (stream, _) in value.items()})


def tracked(module: str) -> tuple[Ambient, ...]:
    """The streams of the tracker that `module` hands out; none if the module has not been imported."""
    loaded = sys.modules.get(module)
    return () if loaded is None else (TrackerRng(loaded.get_cuda_rng_tracker()),)
