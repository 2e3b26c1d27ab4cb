"""Files as a store: where tensors wait when host memory is short, too.

What goes, when its memory is free and when it comes back is decided as for host memory (`host.py`, `transfers.py`).
This file is the way there: copies that are writes and reads on threads, block by block, each with a checksum.

All tensors of a store are in one file that has no name: it is unlinked while it is open, so the system frees it with
the process, however that ends, and there is nothing to sweep. Parts of it are used again, and it is cut to nothing when
the last tensor is dropped. Rejected: a file per tensor, of which a process may have too few open; files with names,
which a killed process leaves behind.

Invariants: space is reserved before a tensor is taken, so a full disk raises in the `put` that it is too full for. A
part of the file is given back once no thread writes to it or reads from it. What runs on the threads waits for no lock
that another thread holds while it waits for them; a collector that runs there may drop tensors, so dropping waits for
nothing there.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import os
import shutil
import sys
import tempfile
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from .. import errors
from .._torch.storages import is_fake
from .host import Sending
from .transfers import Direct, Streams, TransferQueue

BLOCK = 8 * 2**20
"""Bytes that one thread writes or reads at a time."""
_PAGE = 4096
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_view: Any = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype, _view.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


class _OnThread(threading.local):
    here = False


_thread = _OnThread()


def _enter() -> None:
    _thread.here = True


class Disk:
    """One file without a name, and the threads that write to it and read from it.

    Args:
        folder: Where it is.
        threads: How many threads.
    """

    def __init__(self, folder: str, threads: int) -> None:
        self.folder = folder
        self.process = os.getpid()
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        weakref.finalize(self, self._file.close).atexit = False
        self._threads = ThreadPoolExecutor(threads, "torch-recompute-disk", _enter)
        self._lock = threading.Lock()
        self._returned: deque[tuple[int, int]] = deque()
        self._holes: list[tuple[int, int]] = []
        self._end = 0

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self._file.fileno()).st_size

    def take(self, size: int) -> int:
        """Reserves a part of the file and returns where it begins."""
        size = -(-size // _PAGE) * _PAGE
        with self._lock:
            self._settle()
            for n, (start, stop) in enumerate(self._holes):
                if stop - start >= size:
                    self._holes[n : n + 1] = [(start + size, stop)] if stop - start > size else []
                    return start
            start = self._end
            reserve: Any = getattr(os, "posix_fallocate", None)  # elsewhere the write finds out
            try:
                if reserve is not None:
                    reserve(self._file.fileno(), start, size)
            except OSError as error:
                if error.errno in _FULL:
                    os.ftruncate(self._file.fileno(), start)
                    raise errors.StoreError(self._failed(f"take {size:,} bytes", error)) from None
            self._end = start + size
            return start

    def give_back(self, start: int, size: int) -> None:
        """Takes a part back. May be called while this thread holds the lock, by the collector."""
        self._returned.append((start, start + -(-size // _PAGE) * _PAGE))
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        while self._returned:
            start, stop = self._returned.popleft()
            n = bisect.bisect(self._holes, (start, stop))
            if n < len(self._holes) and self._holes[n][0] == stop:
                stop = self._holes.pop(n)[1]
            if n and self._holes[n - 1][1] == start:
                n, start = n - 1, self._holes.pop(n - 1)[0]
            self._holes.insert(n, (start, stop))
        if self._holes == [(0, self._end)]:
            os.ftruncate(self._file.fileno(), 0)
            self._holes, self._end = [], 0

    def run(self, job: Callable[..., Any], *args: Any) -> Future[Any]:
        """Has a job done on one of the threads, which holds nothing of it once it is done."""
        given = [(job, args)]
        future: Any = self._threads.submit(_emptied, given)
        future.given = given
        return future

    def write(self, view: memoryview, place: int) -> str:
        """Writes a block; returns what went wrong, if anything, in words."""
        done = 0
        try:
            while done < len(view):
                done += os.pwrite(self._file.fileno(), view[done:], place + done)
        except OSError as error:
            return self._failed(f"write {len(view):,} bytes", error)
        return ""

    def read(self, view: memoryview, place: int, checksum: int) -> str:
        """Reads a block; returns what went wrong, if anything, in words."""
        done, into = 0, getattr(os, "preadv", None)
        try:
            while done < len(view):
                if into is not None:
                    found = into(self._file.fileno(), [view[done:]], place + done)
                else:
                    data = os.pread(self._file.fileno(), len(view) - done, place + done)
                    found = len(data)
                    view[done : done + found] = data
                if not found:
                    break
                done += found
        except OSError as error:
            return self._failed(f"read {len(view):,} bytes back", error)
        if done == len(view) and zlib.crc32(view) == checksum:
            return ""
        return (
            f"OnDisk read other bytes from {self.folder} than it had written there: the checksum of {len(view):,} "
            "bytes is not the one that was noted. Nothing was computed with them.\n"
            "  Check that disk and its file system, and name a folder on another one."
        )

    def _failed(self, what: str, error: OSError) -> str:
        return (
            f"OnDisk could not {what} in {self.folder}: {error.strerror}. {shutil.disk_usage(self.folder).free:,} "
            f"bytes are free there, and the store has a file of {self._end:,}. Nothing is lost: the tensor is where "
            "it was, and what was written before is whole.\n"
            "  Make room there, name a folder on a larger disk, or send less:  OnDisk(folder, at_most=...)"
        )


def _emptied(given: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> Any:
    job, args = given.pop()
    return job(*args)


def _stop(job: Any) -> None:
    """Takes back a job that has not begun, or waits for its end."""
    if job.cancel():
        job.given.clear()
    elif not _thread.here:
        job.exception()


class Piece:
    """A part of the file, which holds one copy.

    Attributes:
        dtype: Of the elements.
        nbytes: Their size.
        sums: The checksum of each block.
    """

    def __init__(self, disk: Disk, source: torch.Tensor) -> None:
        self.dtype, self.nbytes = source.dtype, source.nbytes
        self.sums = [0] * -(-self.nbytes // BLOCK)
        self._disk = disk
        self._numel = source.numel()
        self._start = -1
        self._start = disk.take(self.nbytes)

    def __del__(self) -> None:
        if self._start >= 0 and not sys.is_finalizing():
            self._disk.give_back(self._start, self.nbytes)

    def numel(self) -> int:
        """The number of its elements."""
        return self._numel

    def _block(self, tensor: torch.Tensor, n: int, flags: int) -> tuple[memoryview, int]:
        first = n * BLOCK
        size = min(BLOCK, self.nbytes - first)
        return _view(tensor.data_ptr() + first, size, flags), self._start + first

    def same(self, source: torch.Tensor) -> bool:
        """Whether it holds the bytes of a tensor, by their checksums."""
        blocks = (self._block(source, n, 0x100)[0] for n in range(len(self.sums)))
        return source.nbytes == self.nbytes and self.sums == [*map(zlib.crc32, blocks)]

    def write(self, host: torch.Tensor, n: int, ready: Callable[[], Any] | None) -> str:
        """Writes block number `n` of a tensor once it is there."""
        if ready is not None:
            ready()
        view, place = self._block(host, n, 0x100)
        self.sums[n] = zlib.crc32(view)
        return self._disk.write(view, place)

    def read(self, host: torch.Tensor, n: int) -> str:
        """Reads block number `n` of a tensor."""
        view, place = self._block(host, n, 0x200)
        return self._disk.read(view, place, self.sums[n])


class Jobs(NamedTuple):
    """A copy under way: its blocks, what follows them on the device, and the mark of the copy to the host."""

    blocks: list[Future[Any]]
    last: Future[Any] | None
    mark: Any


def _wait(blocks: list[Future[Any]]) -> None:
    for text in [block.result() for block in blocks]:
        if text:
            raise errors.StoreError(text)


class Files(Direct):
    """Copies to the file of a store and back.

    A tensor on the CPU is written from a copy, since what changes it meanwhile need not say so (`.data`, statistics of
    a BatchNorm); one on a device through (pinned) host memory. Either is free again once it is written.
    """

    direct = False
    store, copied = "OnDisk", "written to the disk"

    def __init__(self, device: torch.device, disk: Disk) -> None:
        super().__init__(device)
        self._disk = disk
        self._pinned = device.type == "cuda"
        self._link = Streams(device) if self._pinned else None if device.type == "cpu" else Direct(device)

    def steady(self, source: torch.Tensor) -> torch.Tensor:
        """Copies what is in host memory, at once."""
        return source.clone() if self._link is None else source

    def same(self, held: Any, first: int, source: torch.Tensor) -> bool:
        """Compares the copy that is written, or the checksums once it is."""
        return held.same(source) if type(held) is Piece else super().same(held, first, source)

    def send(self, source: torch.Tensor) -> tuple[Any, Jobs]:
        """Starts to write."""
        piece = Piece(self._disk, source)
        host, mark = (source, None) if self._link is None else self._link.send(source)
        ready = None if mark is None else mark.done.synchronize
        return piece, Jobs([self._disk.run(piece.write, host, n, ready) for n in range(len(piece.sums))], None, mark)

    def wait_for_send(self, mark: Jobs) -> None:
        """Waits until all is written."""
        if self._link is not None:
            self._link.wait_for_send(mark.mark)
        _wait(mark.blocks)

    def fetch(self, host: Any, after: Jobs) -> tuple[torch.Tensor, Jobs]:
        """Starts to read, into memory that is taken now."""
        piece: Piece = host
        link = self._link
        tensor, room = (torch.empty(piece.numel(), dtype=piece.dtype, device="cpu"), None)
        target = tensor
        if link is not None:
            target = torch.empty(piece.numel(), dtype=piece.dtype, device="cpu", pin_memory=self._pinned)
            tensor, room = link.room(target)
        blocks = [self._disk.run(piece.read, target, n) for n in range(len(piece.sums))]
        last = None if link is None else self._disk.run(_fill, link, tensor, target, room, after.mark, blocks)
        return tensor, Jobs(blocks, last, None)

    def arrive(self, tensor: torch.Tensor, mark: Jobs) -> None:
        """Waits until all is read."""
        _wait(mark.blocks)
        if self._link is not None and mark.last is not None:
            self._link.arrive(tensor, mark.last.result())

    def abandon(self, tensor: torch.Tensor, mark: Jobs) -> None:
        """Stops what has not begun, and waits for the rest, which holds memory."""
        for job in (*mark.blocks, mark.last):
            if job is not None:
                _stop(job)
        if self._link is not None:
            self._link.abandon(tensor, mark.mark)


def _fill(link: Direct, tensor: torch.Tensor, host: torch.Tensor, room: Any, after: Any, blocks: list[Any]) -> Any:
    """Copies to the device what has been read; the blocks were begun before, so waiting for them ends."""
    for block in blocks:
        if block.cancelled() or block.exception() is not None:
            return None
    return link.fill(tensor, host, room, after)


class OnDisk(Sending):
    """Keeps tensors in a file.

        store = OnDisk("/scratch")
        y = recompute(layer, inputs=store)(x)                # the inputs of a region
        attend = no_recompute(attention, store=store)        # what a saved call keeps

    Threads write while the next region is computed, and read one region ahead of the replay that needs them. Where the
    tensors are on the CPU it is host memory that is freed; from a CUDA device they travel through pinned memory, as
    with `OnHost`. Each block is read with a checksum. Tensors that share memory are written once; strides are kept as
    by `OnHost`. One object may serve any number of regions, live microbatches and threads. Sparse and nested tensors
    stay where they are.

    The file has no name: it is gone when the process ends, killed or not, and is cut to nothing when the last tensor
    is dropped. Use a local NVMe disk; a folder in memory (tmpfs) frees nothing.

    A tensor on the CPU is copied at once and may be changed in place; its copy is free when it is written, which is
    when `ahead` + 1 more regions have been called. A tensor on a device may be changed from then on; a change before
    that is an error in backward.

    Args:
        folder: An existing folder on the disk.
        smallest: Tensors of fewer bytes stay where they are.
        at_most: Bytes on the disk for this object at any time; what is beyond stays where it is. None: no limit.
        fraction: The share of the bytes that is sent, in [0, 1]: whole tensors, chosen evenly.
        ahead: How many regions writes may lag behind in forward, and reads run ahead in backward.
        threads: How many threads write and read.

    Raises:
        ArgumentError: An option is none of the above, or `folder` cannot be written to.
        StoreError: There is no room on the disk for a tensor that is put, or what is read is not what was written.
        ChangedError: In backward, a tensor that stayed, or was not written yet, has been changed in place.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        smallest: int = 0,
        at_most: int | None = None,
        fraction: float = 1.0,
        ahead: int = 1,
        threads: int = 4,
    ) -> None:
        super().__init__(smallest=smallest, at_most=at_most, fraction=fraction, ahead=ahead)
        if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
            raise errors.ArgumentError(f"OnDisk(threads={threads!r}): threads must be a number of threads, 1 or more.")
        if not isinstance(folder, (str, os.PathLike)) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
            raise errors.ArgumentError(
                f"OnDisk({folder!r}): the first argument must be a folder that exists and can be written to, on the "
                "disk that is to hold the tensors.\n"
                '  Write OnDisk("/scratch"), or make the folder first: os.makedirs(folder, exist_ok=True).'
            )
        if not hasattr(os, "pwrite"):
            raise errors.ArgumentError(
                "OnDisk needs os.pread and os.pwrite, which Python has on Linux and macOS only.\n"
                "  Keep the tensors in host memory:  OnHost()"
            )
        self.folder = os.path.abspath(folder)
        self.threads = threads
        self._opening = threading.Lock()
        self._disk: Disk | None = None
        self._queues: dict[torch.device, TransferQueue] = {}

    def _options(self) -> dict[str, Any]:
        return {"folder": self.folder, **super()._options(), "threads": self.threads}

    @property
    def disk_bytes(self) -> int:
        """Bytes now on the disk for this object."""
        return self._bytes

    @property
    def file_bytes(self) -> int:
        """The size of the file, of which parts may be free."""
        return 0 if self._disk is None else self._disk.size

    def _unstrided(self, tensor: torch.Tensor) -> Any:
        return self._stays(tensor)

    def _queue(self, tensor: torch.Tensor) -> TransferQueue:
        if is_fake(tensor):
            return super()._queue(tensor)
        with self._opening:
            if self._disk is None or self._disk.process != os.getpid():  # threads do not go along with a fork
                self._disk, self._queues = Disk(self.folder, self.threads), {}
            if tensor.device not in self._queues:
                self._queues[tensor.device] = TransferQueue(Files(tensor.device, self._disk))
            return self._queues[tensor.device]
