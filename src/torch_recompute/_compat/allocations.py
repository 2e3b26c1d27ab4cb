"""What the CPU's allocator hands out while something runs, by PyTorch's older profiler, whose names are private.

It belongs to one thread, writes nothing to standard error and starts in a third of a millisecond; the newer one
(`torch.profiler`) is one per process, so it could not be asked inside a block that somebody else profiles.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_C: Any = torch._C
_autograd, _profiler = _C._autograd, _C._profiler


def cpu_allocations(call: Callable[[], object]) -> list[int]:
    """The bytes allocated, in order, by a call on this thread; negative where they are freed.

    The result of the call is alive until all is written down. What other threads allocate for it is not seen.
    """
    config = _profiler.ProfilerConfig(
        _profiler.ProfilerState.CPU, False, True, False, False, False, _profiler._ExperimentalConfig()
    )
    result: object = None
    _autograd._enable_profiler_legacy(config)
    try:
        result = call()
    finally:
        events = [event for thread in _autograd._disable_profiler_legacy() for event in thread]
        del result
    return [int(event.cpu_memory_usage()) for event in events if event.kind() == "memory_alloc"]
