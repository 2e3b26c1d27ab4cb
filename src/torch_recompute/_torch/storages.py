"""Memory behind tensors, known without being kept alive; and what a call allocates.

The public way to hold a storage weakly is `torch.multiprocessing.reductions.StorageWeakRef`; what makes a storage of
one again is private.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

_C: Any = torch._C
_revive: Any = getattr(torch.UntypedStorage, "_new_with_weak_ptr", None)


def uses(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Counts the references to the first tensor of a mode's arguments, to its memory, and to its Python object.

    Only calls of C see the tensor itself: how many references a call of Python adds depends on who evaluates frames.
    """
    return args[0]._use_count(), _C._storage_Use_Count(args[0].untyped_storage()._cdata), sys.getrefcount(args[0])


class Memory:
    """The memory of a tensor, held weakly. While this is alive no other storage gets the same identity."""

    __slots__ = ("_fake", "_ref")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._ref = StorageWeakRef(tensor.untyped_storage())
        self._fake = (tensor.fake_mode, tensor.device) if isinstance(tensor, FakeTensor) else None

    def flat(self, size: int, dtype: torch.dtype) -> torch.Tensor | None:
        """The memory again, as a tensor of `size` elements; None where it is gone, or torch cannot tell."""
        storage: Any = None if _revive is None else _revive(self._ref.cdata)
        if storage is None:
            return None
        with _C._DisableTorchDispatch():  # in a simulation memory may be real, and a fake cannot be put over it
            empty: Any = torch.empty(0, dtype=dtype, device=storage.device)
            found = empty.set_(storage, 0, (size,))
        if self._fake is None:
            return found
        mode, device = self._fake  # its storage is on meta, wherever it pretends to be
        return FakeTensor(mode, found, device)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory behind it, as a fake one."""
    return isinstance(tensor, FakeTensor)


is_zero_tensor: Callable[[torch.Tensor], bool] = torch.Tensor._is_zerotensor
"""Whether a tensor stands for zeros that were never allocated, as those that `torch.func.jvp` makes."""

_autograd, _profiler = _C._autograd, _C._profiler
profiling: Callable[[], bool] = _autograd._profiler_enabled
"""Whether a profiler is active on this thread, which then cannot have another."""


def note_allocations() -> None:
    """Begins to write down what is allocated on the CPU by this thread, which must not be `profiling`.

    Operations are not written down: that would be most of the cost. What begins within a node of a backward is over,
    and lost, where the node ends: autograd gives each the state that its thread had when the backward was called.
    """
    config = _profiler.ProfilerConfig(
        _profiler.ProfilerState.CPU, False, True, False, False, False, _profiler._ExperimentalConfig()
    )
    _autograd._enable_record_function(False)
    _autograd._enable_profiler_legacy(config)


def noted_allocations() -> list[int] | None:
    """The bytes allocated since `note_allocations`, in order, negative where they are freed; None where that is over.

    What other threads allocate is not seen.
    """
    if _autograd._profiler_type() != _profiler.ActiveProfilerType.LEGACY:
        return None
    events = [event for thread in _autograd._disable_profiler_legacy() for event in thread]
    _autograd._enable_record_function(True)
    return [int(event.cpu_memory_usage()) for event in events if event.kind() == "memory_alloc"]


def cpu_allocations(call: Callable[[], object]) -> list[int]:
    """The bytes allocated, in order, by a call on this thread; negative where they are freed.

    The result of the call is alive until all is written down. What other threads allocate for it is not seen.
    """
    result: object = None
    sizes: list[int] | None = None
    note_allocations()
    try:
        result = call()
    finally:
        sizes = noted_allocations()
        del result
    return sizes or []


def rise(sizes: Iterable[int]) -> tuple[int, int]:
    """The most bytes by which allocations rise above where they began, and how far above they end.

    That older memory is freed is left out: PyTorch rarely tells, and then with the size of what it last saw there.
    """
    alive: Counter[int] = Counter()
    level = most = 0
    for size in sizes:
        if size > 0 or alive[-size]:
            alive[abs(size)] += 1 if size > 0 else -1
            level += size
            most = max(most, level)
    return most, level


def cpu_bytes_between(call: Callable[[], object], left: Callable[[], int] = int) -> int:
    """The bytes by which a call's allocations rise, while it runs, above what is left of them at its end.

    Args:
        call: The call.
        left: Says afterwards how much of it is left at least, should a size be that of something new, see `rise`.
    """
    most, level = rise(cpu_allocations(call))
    return max(0, most - max(level, left()))
