"""Places in the autograd graph where a region left no tensor, what opens them, and when they are emptied.

A pack hook returns one of four things for a tensor that autograd saves, and `unpack` knows them apart by type: a
(tensor, version) pair, when the tensor is alive anyway; a `Stored`, when it is in a store; a `Slot`, when it will be
rebuilt; in a replay, whose graph is dropped at once, the tensor itself, detached. The version stands in for
autograd's own check, which hooks switch off.

A rebuilt tensor lives as long as plain autograd would keep it: to the end of the node that reads it, where the graph is
not retained; else its slot drops it once it is read (`RegionCall.was_read`). Rejected: to drop it in both cases as
soon as the node has read it. It took a twentieth of what a region costs, and frees one reduced bias earlier.

What a replay has rebuilt is freed when the backward call ends that it ran for, also where that retains its graph and
reads a part of it only: else recomputation would save nothing. A backward that is split in two, as zero-bubble
pipelines split it, looks the same from outside as a second gradient through a retained graph, so it has to say what it
is:

    with torch.utils.checkpoint.GraphExecGroup():
        schedule.step(...)

Inside a group what a call rebuilds stays in the graph. Calls that do not retain it empty it node by node, as plain
autograd does, and the rest goes with the graph: with the second part of its microbatch, not with the group.

Rejected: to ask PyTorch which of the later nodes the running backward call will execute. A gradient with
respect to an input alone (saliency, penalties) leaves nodes out too, and all stayed until its graph died.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol

import torch

from .. import _torch, errors
from .._torch import in_backward, wait_for
from .._torch.modes import compiler_at_work, overriding, transform_level, unseen
from .._torch.tensors import Meta, apart
from .._torch.tracing import as_it_is
from ..stores import Stored


class Owner(Protocol):
    """The interface a slot needs from its region call."""

    name: str
    transient: bool  # whether it is told of each slot that is read
    streams: tuple[Any, ...]  # those that the forward ran on; none where no accelerator is in use

    def rebuild(self, slot: Slot) -> torch.Tensor:
        """Replays the region and returns the slot's tensor."""
        ...

    def was_read(self, slot: Slot, tensor: torch.Tensor) -> None:
        """Told of a slot whose tensor has just been read, if it is transient."""
        ...


class Slot:
    """The place of a tensor that autograd saved and the graph does not hold; the slot alone writes what is in it.

    It is empty until a replay, then full. Where the graph is retained, one that has been read keeps a weak reference to
    its tensor. One field says which of the three, since another thread must not see half a change.

    Attributes:
        owner: The region call; it is alive as long as one of its slots is in a graph.
        meta: Shape, dtype and device of the tensor.
        content: The rebuilt tensor, detached; a weak reference to it once it has been read; None while it is empty.
        version: The tensor's version when it was put in here.
        stream: The stream on which it was saved then; None on the CPU.
    """

    __slots__ = ("__weakref__", "content", "meta", "owner", "stream", "version")
    content: torch.Tensor | weakref.ref[torch.Tensor] | None
    version: int
    stream: Any

    def __init__(self, owner: Owner, meta: Meta) -> None:
        self.owner, self.meta, self.content = owner, meta, None

    def fill(self, tensor: torch.Tensor, stream: Any = None) -> None:
        """Puts a detached tensor in; last of all, since another thread may be waiting for it."""
        self.version, self.stream = tensor._version, stream
        self.content = tensor

    def empty(self) -> None:
        """Lets go of the tensor."""
        self.content = None

    def was_read(self, tensor: torch.Tensor) -> None:
        """Lets go of the tensor, but for those that read it in the same node."""
        self.content = weakref.ref(tensor) if in_backward() else None


class Stop(BaseException):
    """Ends a replay that has filled every slot still open."""


class Unread(Protocol):
    """The saved call whose output a tensor without values stands for (`shape_only.py`)."""

    name: str

    def make_again(self) -> bool:
        """Has replays make the call for its values; False if they do so already."""
        ...


class Read(BaseException):
    """Ends a replay that reads the values of a tensor which has none.

    Attributes:
        call: The saved call that they are missing from.
        op: What needs them.
    """

    def __init__(self, call: Unread, op: str) -> None:
        super().__init__(op)
        self.call = call
        self.op = op


def check_values(tensor: torch.Tensor, op: str) -> None:
    """Raises if an operation needs the values of a tensor that has none."""
    missing = getattr(type(tensor), "missing", None)
    if missing is not None:
        raise missing(tensor, op)


Packed = tuple[torch.Tensor, int] | Stored | Slot | torch.Tensor


def without_history(packed: Packed) -> Packed:
    """Returns what a region call may hold: a tensor without its history, which could come to lead back to the call."""
    return (apart(packed[0]), packed[1]) if type(packed) is tuple else packed


def lend(packed: Any) -> torch.Tensor:
    """Opens what holds an input of a nested region. A slot is not emptied: other regions inside may ask for it too."""
    tensor = unpack(packed)
    if type(packed) is Slot and in_backward():
        packed.fill(tensor, packed.stream)
    return tensor


@as_it_is
def unpack(packed: Any) -> torch.Tensor:
    """The unpack hook of every region, replay and saved call."""
    kind = type(packed)
    if kind is Slot:
        owner, tensor = packed.owner, packed.content
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
    return packed.open() if kind is Stored else packed


class Ending(Protocol):
    """Receives the end of a backward call."""

    def end(self) -> None:
        """Called when it has ended."""
        ...


class Task:
    """A backward call, as one thread sees it. It holds no node and no region call.

    Attributes:
        id: PyTorch's number of the call.
        retains: Whether it was asked to retain its graph.
        told: The region calls that are told when it ends, by their identity.
    """

    def __init__(self, number: int) -> None:
        self.id, self.retains = number, _torch.keeps_graph()
        self.told: dict[int, weakref.ref[Ending]] = {}
        _torch.after_backward(self._end)

    def _end(self) -> None:  # on whichever thread the call ends: several devices have several
        for ref in self.told.values():
            if (region_call := ref()) is not None:
                region_call.end()


class _Running(threading.local):
    task: Task | None = None


_running = _Running()


def this_task() -> Task:
    """The running backward call. To be asked within one."""
    now, task = _torch.graph_task_id(), _running.task
    if task is None or task.id != now:
        task = _running.task = Task(now)
    return task
