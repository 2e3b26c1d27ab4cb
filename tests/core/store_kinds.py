"""The stores that the laws of stores are tried over, and what acts a device or a second rank where there is none.

`Late` is the way from a device to host memory and back, with copies that happen as late as their waits allow, into
memory that holds NaN until then: where somebody forgets to wait, NaN is read, or memory is changed under the copy.
`TwoRanks` is one process that acts both ranks of a group.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_recompute import OnDevice, OnDisk, OnHost
from torch_recompute.distributed import ShardedOver, sharded
from torch_recompute.stores import Hooks
from torch_recompute.stores.transfers import Direct, TransferQueue


class Job:
    """One copy that has been asked for."""

    def __init__(self, what: str, source: torch.Tensor, target: torch.Tensor, after: Job | None) -> None:
        self.what = what
        self.alias: torch.Tensor | None = source
        self.target = weakref.ref(target)
        self.after, self._lock = after, threading.Lock()

    def run(self) -> None:
        """Copies now, if not yet."""
        with self._lock:
            source, self.alias = self.alias, None
            if source is None:
                return
            if self.after is not None:
                self.after.run()
            target = self.target()
            if target is not None:
                target.copy_(source)

    @property
    def done(self) -> Any:
        """What a thread waits for."""
        return SimpleNamespace(synchronize=self.run)


class Late(Direct):
    """Copies that happen as late as they may."""

    direct = False

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, int]] = []
        self.jobs: list[Job] = []
        self.hosts: list[weakref.ref[torch.Tensor]] = []

    def _job(self, what: str, source: torch.Tensor, target: torch.Tensor, after: Job | None) -> Job:
        self.log.append((what, source.numel()))
        self.jobs.append(Job(what, source, target, after))
        return self.jobs[-1]

    def same(self, held: torch.Tensor, first: int, source: torch.Tensor) -> bool:
        return True  # as on a device, where bytes are not compared

    def send(self, source: torch.Tensor) -> tuple[torch.Tensor, Job]:
        host, _ = self.room(source)
        self.hosts.append(weakref.ref(host))
        return host, self._job("send", source, host, None)

    def wait_for_send(self, mark: Job) -> None:
        mark.run()

    def room(self, host: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.full_like(host, float("nan") if host.is_floating_point() else 77), None

    def fill(self, tensor: torch.Tensor, host: torch.Tensor, room: None, after: Job) -> Job:
        self.hosts.append(weakref.ref(host))
        return self._job("fetch", host, tensor, after)

    def fetch(self, host: torch.Tensor, after: Job) -> tuple[torch.Tensor, Job]:
        tensor, room = self.room(host)
        return tensor, self.fill(tensor, host, room, after)

    def arrive(self, tensor: torch.Tensor, mark: Job) -> None:
        mark.run()

    def abandon(self, tensor: torch.Tensor, mark: Job | None) -> None:
        self.log.append(("abandon", tensor.numel()))
        if mark is not None:
            mark.run()

    def count(self, what: str) -> int:
        """How often something was asked for."""
        return sum(one == what for one, _ in self.log)

    def waiting(self, what: str) -> int:
        """How many copies have been asked for that nobody has waited for, and whose memory is there."""
        return sum(job.what == what and job.alias is not None and job.target() is not None for job in self.jobs)


class LateHost(OnHost):
    """Host memory, from a device whose copies are late."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.lane = Late()
        self.queue = TransferQueue(self.lane)

    def _queue(self, tensor: torch.Tensor) -> TransferQueue:
        return self.queue


class LateDisk(OnDisk):
    """A disk, from such a device."""

    def __init__(self, folder: str, **options: Any) -> None:
        super().__init__(folder, **options)
        self.lane = Late()

    def _queue(self, tensor: torch.Tensor) -> TransferQueue:
        queue = super()._queue(tensor)
        files: Any = queue.copy_streams
        files._link = self.lane
        return queue


class TwoRanks:
    """`ShardedOver` on two ranks, which put the same tensors in the same order; the first one opens them."""

    def __init__(self) -> None:
        self._ranks = [ShardedOver(), ShardedOver()]
        self._ranks[1]._rank = 1
        self._lock = threading.Lock()

    def put(self, tensor: torch.Tensor) -> Any:
        with self._lock:
            mine, other = (rank.put(tensor) for rank in self._ranks)
            mine.part.other = other.part
            return mine

    def get(self, handle: Any) -> torch.Tensor:
        return self._ranks[0].get(handle)

    @property
    def held(self) -> int:
        """Bytes that the first rank holds."""
        return sum(shard.part.nbytes for shard in self._ranks[0]._live.values())


@contextlib.contextmanager
def two_ranks() -> Iterator[None]:
    """The context in which there are two ranks, of which this process acts both."""

    def gather(out: torch.Tensor, part: torch.Tensor, **_: Any) -> Any:
        out.copy_(torch.cat([part, getattr(part, "other", part)]))
        return SimpleNamespace(wait=lambda: None)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded, "_all_gather", gather)
        yield
    dist.destroy_process_group()


class Noted:
    """A user's store that copies, and notes what it is asked for."""

    def __init__(self) -> None:
        self.put_shapes: list[tuple[int, ...]] = []
        self.gets = 0
        self.handles: list[weakref.ref[torch.Tensor]] = []

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        self.put_shapes.append(tuple(tensor.shape))
        copy = tensor.detach().clone()
        self.handles.append(weakref.ref(copy))
        return copy

    def get(self, handle: torch.Tensor) -> torch.Tensor:
        self.gets += 1
        return handle

    @property
    def held(self) -> int:
        """Bytes of the copies that are alive."""
        return sum(copy.nbytes for ref in self.handles if (copy := ref()) is not None)


class Copying(Hooks):
    """Saved-tensor hooks that copy."""

    def __init__(self) -> None:
        self._noted = Noted()
        super().__init__(self._noted.put, self._noted.get)

    @property
    def held(self) -> int:
        """Bytes of the copies that are alive."""
        return self._noted.held


@dataclass(frozen=True)
class Kind:
    """One kind of store.

    Attributes:
        name: Its name.
        make: Makes a store.
        held: The bytes that a store holds; 0 where it holds the tensor itself.
        changed: What the error says of a tensor that is changed in place right after it was put; empty where a copy is
            held by then.
        frees: Whether the memory of what a region was given is free three regions later.
        around: The context that it needs.
    """

    name: str
    make: Callable[[], Any]
    held: Callable[[Any], int]
    changed: str = ""
    frees: bool = True
    around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


def on_disk(kind: type[OnDisk], ahead: int) -> Callable[[], OnDisk]:
    return functools.partial(kind, tempfile.gettempdir(), ahead=ahead, threads=2)


def late(ahead: int) -> dict[str, Any]:
    """What is true of copies from a device: a tensor is there until `ahead` + 1 more regions have been called."""
    return {"changed": "while it was being", "frees": ahead < 3}


def on_the_disk(store: OnDisk) -> int:
    assert (store.disk_bytes == 0) == (store.file_bytes == 0)
    return store.disk_bytes


def in_late_host_memory(store: LateHost) -> int:
    assert (store.host_bytes == 0) == (not store.queue._known)
    assert store.host_bytes or not store.lane.waiting("send") + store.lane.waiting("fetch")
    return store.host_bytes


HELD = {"held": lambda store: store.held}
LATE, DISK = {"held": in_late_host_memory}, {"held": on_the_disk}
AHEAD = (0, 1, 9)
KINDS = [
    Kind("device", OnDevice, lambda store: 0, "modified by an inplace operation", frees=False),
    Kind("host", OnHost, lambda store: store.host_bytes),
    *(Kind(f"host, late, {n} ahead", functools.partial(LateHost, ahead=n), **LATE, **late(n)) for n in AHEAD),
    *(Kind(f"disk, {n} ahead", on_disk(OnDisk, n), **DISK) for n in AHEAD),
    *(Kind(f"disk, late, {n} ahead", on_disk(LateDisk, n), **DISK, **late(n)) for n in AHEAD),
    Kind("two ranks", TwoRanks, around=two_ranks, **HELD),
    Kind("hooks", Copying, **HELD),
    Kind("user's", Noted, **HELD),
]
