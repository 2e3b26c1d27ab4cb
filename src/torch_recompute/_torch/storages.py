"""Memory behind tensors, known without being kept alive.

The public way to hold a storage weakly is `torch.multiprocessing.reductions.StorageWeakRef`; what makes a storage of
one again is private.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

_C: Any = torch._C
_set_versions: Any = _C._autograd._unsafe_set_version_counter
_revive: Any = getattr(torch.UntypedStorage, "_new_with_weak_ptr", None)


def versions_of(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    """Pairs each tensor that counts changes in place with the number that it has seen."""
    return [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]


def set_versions(versions: list[tuple[torch.Tensor, int]]) -> None:
    """Gives tensors their former versions, so that graphs that have saved them remain valid."""
    changed = [(tensor, then) for tensor, then in versions if tensor._version != then]
    if changed:
        _set_versions(*map(tuple, zip(*changed, strict=True)))


class Memory:
    """The memory of a tensor, held weakly. While this is alive no other storage gets the same identity."""

    __slots__ = ("_ref",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._ref = StorageWeakRef(tensor.untyped_storage())

    def flat(self, size: int, dtype: torch.dtype) -> torch.Tensor | None:
        """The memory again, as a tensor of `size` elements; None where it is gone, or torch cannot tell."""
        storage: Any = None if _revive is None else _revive(self._ref.cdata)
        if storage is None:
            return None
        empty: Any = torch.empty(0, dtype=dtype, device=storage.device)
        return empty.set_(storage, 0, (size,))


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory behind it, as a fake one."""
    return isinstance(tensor, FakeTensor)
