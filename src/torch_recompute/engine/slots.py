"""Places in the autograd graph where a region left no tensor, and what opens them.

A pack hook returns one of four things for a tensor that autograd saves, and `unpack` knows them apart by type: a
(tensor, version) pair, when the tensor is alive anyway; a `Kept`, when it is in a store; a `Slot`, when it will be
rebuilt; in a replay, whose graph is dropped at once, the tensor itself, detached. The version stands in for
autograd's own check, which hooks switch off.

A rebuilt tensor lives as long as plain autograd would keep it: to the end of the node that reads it, where the graph is
not retained; else its slot drops it once it is read (`RegionCall.was_read`). Rejected: to drop it in both cases as
soon as the node has read it. It took a twentieth of what a region costs, and frees one reduced bias earlier.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

from .. import errors
from .._torch import in_backward, wait_for
from .._torch.modes import compiler_at_work, overriding, transform_level, unseen
from .._torch.tensors import Meta, apart
from .._torch.tracing import as_it_is
from ..stores import Kept


class Owner(Protocol):
    """The interface a slot needs from its region call."""

    name: str
    transient: bool  # whether slots are emptied once they are read
    streams: tuple[Any, ...]  # those that the forward ran on; none where no accelerator is in use

    def rebuild(self, slot: Slot) -> torch.Tensor:
        """Replays the region and returns the slot's tensor."""
        ...

    def was_read(self, slot: Slot, tensor: torch.Tensor) -> None:
        """Empties a transient slot whose tensor has just been read."""
        ...


class Slot:
    """A tensor that autograd saved and that is not kept.

    Attributes:
        owner: The region call; it is alive as long as one of its slots is in a graph.
        meta: Shape, dtype and device of the tensor.
        tensor: The rebuilt tensor, detached, while it is here; a weak reference to it once it has been read under a
            retained graph; None before the replay.
        version: The tensor's version when it was saved in the replay; set with `tensor`.
        stream: The stream on which it was saved there, None on the CPU; set with `tensor`.
    """

    __slots__ = ("__weakref__", "meta", "owner", "stream", "tensor", "version")
    meta: Meta
    owner: Owner
    stream: Any
    tensor: torch.Tensor | weakref.ref[torch.Tensor] | None
    version: int


KEPT: weakref.ref[Slot] = weakref.ref(Slot())
"""Marks a tensor that the graph holds itself, in the order of slots: a reference to a slot that is gone."""


class Stop(BaseException):
    """Ends a replay that has filled every slot still open."""


Packed = tuple[torch.Tensor, int] | Kept | Slot | torch.Tensor


def without_history(packed: Packed) -> Packed:
    """Returns what a region call may hold: a tensor without its history, which could come to lead back to the call."""
    return (apart(packed[0]), packed[1]) if type(packed) is tuple else packed


def lend(packed: Any) -> torch.Tensor:
    """Opens what holds an input of a nested region. A slot is not emptied: other regions inside may ask for it too."""
    tensor = unpack(packed)
    if type(packed) is Slot and in_backward():
        packed.tensor = tensor
    return tensor


@as_it_is
def unpack(packed: Any) -> torch.Tensor:
    """The unpack hook of every region, replay and saved call."""
    kind = type(packed)
    if kind is Slot:
        owner, tensor = packed.owner, packed.tensor
        if tensor is None or type(tensor) is weakref.ref:
            tensor = None if tensor is None else tensor()
            if tensor is None:
                seen = torch.compiler.is_dynamo_compiling() or compiler_at_work() is not None
                seen = seen or transform_level() is not None or not overriding()
                tensor = unseen(owner.rebuild, packed) if seen else owner.rebuild(packed)
        if tensor._version != packed.version:
            raise errors.ChangedError(errors.changed_saved(owner.name, packed.version, tensor._version))
        if owner.streams and packed.stream is not None:  # a tensor on the CPU has none
            wait_for(packed.stream, tensor)
        if owner.transient:
            owner.was_read(packed, tensor)
        return tensor
    if kind is tuple:
        tensor, version = packed
        if tensor._version != version:
            raise errors.ChangedError(errors.changed_saved("a region", version, tensor._version))
        return tensor
    return packed.open() if kind is Kept else packed
