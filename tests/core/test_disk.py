"""Files as a store: what a full disk, a damaged one and a killed process leave.

What holds of any store is in `test_stores.py`.
"""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from core.store_kinds import LateDisk
from torch_recompute import ArgumentError, OnDisk, StoreError, recompute
from torch_recompute.stores import disk

SIZE = 2**14


@contextmanager
def files_up_to(size: int) -> Any:
    """The system refuses to make a file larger, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def regions(store: OnDisk) -> torch.Tensor:
    """What regions, called one after the other, return; each is given 64 KiB."""
    y = torch.linspace(0, 1, SIZE, requires_grad=True)
    for _ in range(6):
        y = recompute(lambda x: x.sin().exp(), inputs=store)(y)
    return y.sum()


@pytest.mark.parametrize("ahead", [0, 1])
def test_host_memory_on_the_way_is_few_tensors(ahead: int, tmp_path: Path) -> None:
    """From a device tensors travel through host memory that is free once they are written, and again once read."""
    store = LateDisk(str(tmp_path), ahead=ahead)
    loss = regions(store)
    assert sum(host() is not None for host in store.lane.hosts) <= ahead + 1
    loss.backward()
    assert store.lane.count("fetch") == 6 - ahead - 1
    assert not [host for host in store.lane.hosts if host() is not None]


def test_what_is_freed_is_used_again(tmp_path: Path) -> None:
    """The file grows to what is held at one time, whatever order tensors are dropped in."""
    store, held = OnDisk(tmp_path), []
    for n in range(40):
        held.append(store.put(torch.full((1024 * (1 + n % 3),), float(n))))
        if n >= 6:
            del held[n % 5]
    assert store.file_bytes <= 3 * 4096 * 9
    for handle in held:
        got = store.get(handle)
        assert torch.equal(got, got[:1].expand_as(got))
    held.clear()
    del handle, got
    assert (store.disk_bytes, store.file_bytes) == (0, 0)
    assert list(tmp_path.iterdir()) == []


def refuses(self: Any, view: memoryview, place: int) -> str:
    return self._failed("write", OSError(28, "No space left on device"))


@pytest.mark.parametrize(
    "full",
    [lambda: files_up_to(4 * SIZE * 4), lambda: mock.patch.object(disk.Disk, "write", refuses)],
    ids=["when space is reserved", "while it is written"],
)
def test_a_full_disk(full: Callable[[], AbstractContextManager[Any]], tmp_path: Path) -> None:
    """A full disk is an error of the forward; what was put before is whole, and the next step has room again."""
    store, early = OnDisk(tmp_path), torch.arange(1000.0)
    handle = store.put(early)
    store.get(handle)
    with full(), pytest.raises(StoreError, match=r"No space|File too large"):
        regions(store).backward()
    assert torch.equal(store.get(handle), early)
    assert store.disk_bytes == early.nbytes
    del handle
    regions(store).backward()
    assert (store.disk_bytes, store.file_bytes) == (0, 0)


def test_a_damaged_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that changed on the disk are an error of the backward, and no gradient is computed with them."""
    store, write = OnDisk(tmp_path, ahead=0), os.pwrite

    def flips(fd: int, view: memoryview, place: int) -> int:
        return write(fd, bytes([view[0] ^ 1]) + bytes(view[1:]), place)

    monkeypatch.setattr(os, "pwrite", flips)
    with pytest.raises(StoreError, match="checksum"):
        regions(store).backward()


KILLED = """
import os, signal, sys, torch
from torch_recompute import OnDisk, recompute
store, calls = OnDisk(sys.argv[1]), 0
def layer(x):
    global calls
    calls += 1
    if calls == 7:  # in the middle of backward
        print(store.file_bytes, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return x.sin().exp()
y = torch.linspace(0, 1, 100_000, requires_grad=True)
for _ in range(5):
    y = recompute(layer, inputs=store)(y)
y.sum().backward()
"""


def test_a_run_that_is_killed(tmp_path: Path) -> None:
    """A process that is killed in its backward leaves no file behind."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert int(done.stdout) >= 5 * 400_000
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [{"folder": "/no/such"}, {"folder": 3}, {"threads": 0}, {"at_most": "1GiB"}], ids=str)
def test_options(wrong: dict[str, Any], tmp_path: Path) -> None:
    """What is no folder, and no number, is refused; what is right is in the text of the store."""
    given = {"folder": tmp_path, **wrong}
    with pytest.raises(ArgumentError, match="OnDisk"):
        OnDisk(given.pop("folder"), **given)
    assert repr(OnDisk(tmp_path, ahead=2)) == f"OnDisk(folder={str(tmp_path)!r}, ahead=2)"
