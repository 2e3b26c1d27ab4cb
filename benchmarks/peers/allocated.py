"""What PyTorch's CPU allocator gave out, by its own events, which see compiled code and every thread."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from torch.profiler import ProfilerActivity, profile

GENERATOR_STATE = 5056
"""Bytes of a random generator's state, in host memory on any device: not counted."""


def levels_in(profiler: Any) -> list[tuple[int, int]]:
    """When the bytes alive changed, in nanoseconds, and how many more than at the start there were then."""
    found = profiler.profiler.kineto_results.events()
    told = sorted((event.start_ns(), event.nbytes()) for event in found if event.name() == "[memory]")
    counted = [(when, nbytes) for when, nbytes in told if abs(nbytes) != GENERATOR_STATE]
    return [*zip((when for when, _ in counted), accumulate(nbytes for _, nbytes in counted), strict=True)]


def levels(call: Callable[[], object]) -> list[int]:
    """The bytes alive during a call, beyond those before it; what it returns is alive to the end."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
    found = [0, *(level for _, level in levels_in(profiler))]
    del result
    return found
