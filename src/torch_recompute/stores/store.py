"""The protocol of stores, and the checks of what they return.

None, the default, keeps the tensor itself and watches it for in-place changes. Saved-tensor hooks that are active
around a region (`torch.autograd.graph.save_on_cpu`, an enclosing region) act as its store, so that they see what the
region keeps exactly as they would see what autograd keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from .. import errors
from .._torch import storage_id, tensors_in, version_of
from .._torch.tensors import is_leaf_of_constant, wants_grad


@runtime_checkable
class Store(Protocol):
    """Keeps tensors between forward and replay.

    `put` and `get` may be called from different threads, and `get` any number of times per `put`. What `put` returns
    is dropped when the tensor is no longer needed; a store frees what it holds for it then.
    """

    def put(self, tensor: torch.Tensor) -> Any:
        """Takes a tensor (detached from the graph or not; it must not be changed) and returns a handle for it."""
        ...

    def get(self, handle: Any) -> torch.Tensor:
        """Returns the tensor behind a handle: same shape, dtype, device and values as the one that was put."""
        ...


class OnDevice:
    """Keeps tensors where they are. The default; written out for a store chosen by an expression."""

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor, detached."""
        return tensor.detach()

    def get(self, handle: torch.Tensor) -> torch.Tensor:
        """Returns the tensor."""
        return handle


class Hooks:
    """A pair of saved-tensor hooks as a store."""

    __slots__ = ("_pack", "_unpack")

    def __init__(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
        self._pack = pack
        self._unpack = unpack

    def put(self, tensor: torch.Tensor) -> Any:
        """Calls the pack hook."""
        return self._pack(tensor)

    def get(self, handle: Any) -> torch.Tensor:
        """Calls the unpack hook."""
        return self._unpack(handle)


class Stored:
    """One tensor in a store, checked when it comes back.

    Args:
        store: Where to.
        tensor: The tensor.
        region: Who puts it there.
        later: Whether it waits for `put`: some kernels write to what autograd has saved before they run (`rrelu`).
            What is changed in place meanwhile is gone, and opening it raises, as plain PyTorch does.
    """

    __slots__ = ("_grad", "_handle", "_meta", "_of_constant", "_region", "_same", "_store", "_tensor", "_versions")

    def __init__(self, store: Store, tensor: torch.Tensor, region: str, later: bool = False) -> None:
        self._store = store
        self._region = region
        self._meta = (tensor.shape, tensor.dtype, tensor.device)
        self._grad, self._of_constant = wants_grad(tensor), is_leaf_of_constant(tensor)
        self._tensor: torch.Tensor | None = tensor
        self._handle: Any = None
        self._same: Sequence[tuple[torch.Tensor, int]] = ()  # what the store holds without having copied it
        self._versions = version_of(tensor), version_of(tensor)
        if not later:
            self.put()

    def put(self) -> None:
        """Puts the tensor into the store."""
        if self._tensor is not None:
            self._versions = self._versions[0], version_of(self._tensor)
            self._handle, storage = self._store.put(self._tensor), storage_id(self._tensor)
            self._same = [(x, version_of(x)) for x in tensors_in(self._handle) if storage_id(x) == storage]
            self._tensor = None

    def open(self) -> torch.Tensor:
        """Returns the tensor, as a leaf that requires grad where the one put did.

        Raises:
            StoreError: The store returned something else than it was given.
            ChangedError: The tensor was changed in place before it was put, or since by others, if it was not copied.
        """
        tensor: Any = self._store.get(self._handle) if self._tensor is None else self._tensor
        for then, now in (self._versions, *((then, version_of(x)) for x, then in self._same)):
            if then != now:
                raise errors.ChangedError(errors.changed_saved(self._region, then, now))
        if not isinstance(tensor, torch.Tensor) or (tensor.shape, tensor.dtype, tensor.device) != self._meta:
            shape, dtype, device = self._meta
            got = (
                f" {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}" if isinstance(tensor, torch.Tensor) else ""
            )
            raise errors.StoreError(
                f"the store {errors.kind(self._store)} of {self._region} was given a tensor {tuple(shape)} {dtype} on "
                f"{device} and returned {errors.kind(tensor)}{got}.\n"
                "  get(put(tensor)) must return a tensor of the same shape, dtype, device and values."
            )
        held = tensor.detach()
        if self._of_constant:  # views of it ask whether what it is a view of requires grad
            held = held.view_as(held)
        return held.requires_grad_() if self._grad else held
