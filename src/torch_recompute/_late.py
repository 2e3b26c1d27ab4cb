"""Inputs of a region that are going to be rebuilt, but are not yet known to be.

The result of a region whose output will be discarded (`_discard.py`) may be the input of the next region, which would
keep it alive. Such an input is held by a `Late`: the tensor for now, and once the output has been discarded the place
from which it is rebuilt. Nobody has to say which regions form a chain, nor in which order they are discarded.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Protocol

import torch

from . import errors
from ._compat import storage_id
from ._slots import Slot, lend


class Owner(Protocol):
    """Who will say that a result is discarded."""

    def waits_for(self, late: Late) -> None:
        """Notes an input that is one of its results, or a view of one."""
        ...


class Late:
    """One input of a region, held as a tensor until it is given a slot."""

    __slots__ = ("__weakref__", "_region", "_slot", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, region: str) -> None:
        self.tensor: torch.Tensor | None = tensor.detach()
        self.version = tensor._version
        self._region = region
        self._slot: Slot | None = None

    def give(self, slot: Slot | None) -> None:
        """Lets go of the tensor, which from now on comes out of the slot; without one it is kept."""
        if slot is not None:
            self.tensor, self._slot = None, slot

    def open(self) -> torch.Tensor:
        """The tensor, for a replay."""
        if self.tensor is None:
            return lend(self._slot)
        if self.tensor._version != self.version:
            text = errors.changed_input(self._region, "an argument", self.version, self.tensor._version)
            raise errors.ChangedError(text)
        return self.tensor


class LateStore:
    """The store of a region with such an input. The other inputs stay where they are, too."""

    __slots__ = ("_region",)

    def __init__(self, region: str) -> None:
        self._region = region

    def put(self, tensor: torch.Tensor) -> Late:
        """Holds the tensor, and says so to whom it will be taken from."""
        late = Late(tensor, self._region)
        owner = waiting.owner(storage_id(tensor))
        if owner is not None:
            owner.waits_for(late)
        return late

    def get(self, handle: Late) -> torch.Tensor:
        """The tensor, rebuilt if need be."""
        return handle.open()


class Waiting(threading.local):
    """The results of this thread that wait to be discarded, by storage; each entry dies with its owner.

    The owner holds the result, so that the storage's identity means something. A plain dict, because every region
    asks whether it is empty.
    """

    def __init__(self) -> None:
        self.results: dict[int, weakref.ref[Owner]] = {}

    def put(self, storage: int, owner: Owner) -> None:
        """Notes that a result waits."""
        results = self.results

        def forget(ref: weakref.ref[Owner]) -> None:
            if results.get(storage) is ref:
                del results[storage]

        results[storage] = weakref.ref(owner, forget)

    def owner(self, storage: int) -> Owner | None:
        """Who will say that this result is discarded; None where it does not wait."""
        ref = self.results.get(storage)
        return None if ref is None else ref()


waiting = Waiting()


def store_for(region: str, tensors: Iterable[torch.Tensor]) -> LateStore | None:
    """The store of a region with these inputs; None where none of them waits to be discarded."""
    return LateStore(region) if any(storage_id(tensor) in waiting.results for tensor in tensors) else None
