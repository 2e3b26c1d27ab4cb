"""Files as a store: what a full disk, a damaged one and a killed process leave, and tensors in many blocks."""

import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from laws.watch import equal, no_collector, on_threads
from torch_recompute import ArgumentError, OnDisk, StoreError, no_recompute, recompute
from torch_recompute.stores import disk

WIDTH = 64


@contextmanager
def files_up_to(size: int) -> Any:
    """The system refuses to make a file larger, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def layers(count: int = 6) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]


def gradients(blocks: list[nn.Module], wrap: Callable[[nn.Module], Any]) -> list[torch.Tensor]:
    y = torch.linspace(0, 1, 256 * WIDTH).view(256, WIDTH)
    for block in blocks:
        y = wrap(block)(y)
    return list(torch.autograd.grad(y.square().sum(), [p for block in blocks for p in block.parameters()]))


WAYS: dict[str, Callable[[OnDisk], Callable[[nn.Module], Any]]] = {
    "inputs": lambda store: lambda block: recompute(block, inputs=store),
    "a saved call": lambda store: lambda block: recompute(no_recompute(block, store=store)),
    "a saved call outside of regions": lambda store: lambda block: no_recompute(block, store=store),
}


class Copied:
    """A copy that is made when somebody waits for it; until then its target is NaN."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._lock = threading.Lock()
        self._both: tuple[torch.Tensor, torch.Tensor] | None = (target, source)

    @property
    def done(self) -> "Copied":
        """What is waited for."""
        return self

    def synchronize(self) -> None:
        """Waits."""
        with self._lock:
            if self._both is not None:
                self._both[0].copy_(self._both[1])
            self._both = None


class Link:
    """The way from a device to host memory and back, acted with copies as late as their waits allow."""

    def __init__(self) -> None:
        self.hosts: list[weakref.ref[torch.Tensor]] = []
        self.filled = 0

    def send(self, source: torch.Tensor) -> tuple[torch.Tensor, Copied]:
        host = torch.full_like(source, float("nan"))
        self.hosts.append(weakref.ref(host))
        return host, Copied(host, source)

    def wait_for_send(self, mark: Copied) -> None:
        mark.synchronize()

    def room(self, host: torch.Tensor) -> tuple[torch.Tensor, None]:
        self.hosts.append(weakref.ref(host))
        return torch.full_like(host, float("nan")), None

    def fill(self, tensor: torch.Tensor, host: torch.Tensor, room: None, after: Copied) -> Copied:
        after.synchronize()
        self.filled += 1
        return Copied(tensor, host)

    def arrive(self, tensor: torch.Tensor, mark: Copied) -> None:
        mark.synchronize()

    def abandon(self, tensor: torch.Tensor, mark: Copied | None) -> None:
        if mark is not None:
            mark.synchronize()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ahead", [0, 1, 9])
def test_steps_from_a_device(way: str, ahead: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a device tensors travel through host memory that is free once they are written, and again once read."""
    monkeypatch.setattr(disk, "BLOCK", 1000)
    link, files = Link(), disk.Files

    def from_device(*given: Any) -> disk.Files:
        made = files(*given)
        made._link = link  # type: ignore[assignment]
        return made

    monkeypatch.setattr(disk, "Files", from_device)
    blocks, store = layers(), OnDisk(tmp_path, ahead=ahead, threads=2)
    wanted = gradients(blocks, lambda block: block)
    most: list[int] = []
    if ahead < 9:
        blocks[-1].register_forward_pre_hook(lambda *_: most.append(sum(host() is not None for host in link.hosts)))
    with no_collector():
        for _ in range(2):
            assert equal(gradients(blocks, WAYS[way](store)), wanted)
            assert store.disk_bytes == store.file_bytes == 0
            assert not [host for host in link.hosts if host() is not None]
    assert (link.filled > 0) == (ahead < 9)
    assert all(count <= (ahead + 1) * 2 for count in most[:1])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ahead", [0, 1, 9])
def test_steps_by_way_of_a_disk(way: str, ahead: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tensors of many blocks, and threads that are behind, gradients are the plain ones and nothing is left."""
    monkeypatch.setattr(disk, "BLOCK", 1000)
    blocks, store = layers(), OnDisk(tmp_path, ahead=ahead, threads=2)
    wanted = gradients(blocks, lambda block: block)
    with no_collector():
        for _ in range(2):
            assert equal(gradients(blocks, WAYS[way](store)), wanted)
            assert store.disk_bytes == store.file_bytes == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ahead", [0, 9])
def test_a_graph_that_is_retained(way: str, ahead: int, tmp_path: Path) -> None:
    """With retain_graph=True what is on the disk stays for the next backward, and goes with the graph."""
    blocks, store = layers(), OnDisk(tmp_path, ahead=ahead, threads=2)
    wanted = gradients(blocks, lambda block: block)
    parameters = [p for block in blocks for p in block.parameters()]
    y = torch.linspace(0, 1, 256 * WIDTH).view(256, WIDTH)
    for block in blocks:
        y = WAYS[way](store)(block)(y)
    loss = y.square().sum()
    held = store.disk_bytes
    assert held >= 5 * 256 * WIDTH * 4
    for _ in range(3):
        assert equal(list(torch.autograd.grad(loss, parameters, retain_graph=True)), wanted)
        assert store.disk_bytes == held
    assert equal(list(torch.autograd.grad(loss, parameters)), wanted)
    del y, loss
    assert (store.disk_bytes, store.file_bytes) == (0, 0)


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


def refuses(self: Any, view: memoryview, place: int) -> str:
    return self._failed("write", OSError(28, "No space left on device"))


@pytest.mark.parametrize(
    "full",
    [lambda: files_up_to(4 * 256 * WIDTH * 4), lambda: mock.patch.object(disk.Disk, "write", refuses)],
    ids=["when space is reserved", "while it is written"],
)
def test_a_full_disk(full: Callable[[], AbstractContextManager[Any]], tmp_path: Path) -> None:
    """A full disk is an error of the forward; what was put before is whole, and the next step is right."""
    blocks, store = layers(), OnDisk(tmp_path)
    wanted, early = gradients(blocks, lambda block: block), torch.arange(1000.0)
    handle = store.put(early)
    store.get(handle)
    with full(), pytest.raises(StoreError, match=r"No space|File too large"):
        gradients(blocks, WAYS["inputs"](store))
    assert torch.equal(store.get(handle), early)
    assert store.disk_bytes == early.nbytes
    del handle
    assert equal(gradients(blocks, WAYS["inputs"](store)), wanted)
    assert (store.disk_bytes, store.file_bytes) == (0, 0)


def test_a_damaged_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that changed on the disk are an error of the backward, and no gradient is computed with them."""
    store, write = OnDisk(tmp_path, ahead=0), os.pwrite

    def flips(fd: int, view: memoryview, place: int) -> int:
        return write(fd, bytes([view[0] ^ 1]) + bytes(view[1:]), place)

    monkeypatch.setattr(os, "pwrite", flips)
    blocks = layers()
    with pytest.raises(StoreError, match="checksum"):
        gradients(blocks, WAYS["inputs"](store))


@pytest.mark.parametrize("change", [lambda mask: mask.add_(1), lambda mask: mask.data.add_(1)], ids=["seen", "unseen"])
def test_a_change_before_it_is_written(change: Callable[[torch.Tensor], object], tmp_path: Path) -> None:
    """What changes a tensor on the CPU after the call, also past its version, reaches neither its copy nor backward."""
    mask, x = torch.full((2**20,), 0.5), torch.ones(2**20, requires_grad=True)
    y = recompute(lambda x, mask: (x * mask).sin().exp(), inputs=OnDisk(tmp_path))(x, mask)
    change(mask)
    (found,) = torch.autograd.grad(y.sum(), x)
    wanted = torch.ones(1, requires_grad=True)
    (wanted * 0.5).sin().exp().backward()
    assert wanted.grad is not None
    assert torch.equal(found, wanted.grad.expand_as(found))


def test_threads(tmp_path: Path) -> None:
    """Forwards and backwards on several threads share one file."""
    blocks, store = layers(4), OnDisk(tmp_path)
    wanted = gradients(blocks, lambda block: block)
    wrong: list[int] = []

    def work(n: int) -> None:
        if not all(equal(gradients(blocks, WAYS["inputs"](store)), wanted) for _ in range(3)):
            wrong.append(n)

    on_threads(work, *range(3))
    assert not wrong
    assert store.disk_bytes == 0


KILLED = """
import os, signal, sys, torch
from torch_recompute import OnDisk, recompute
store, calls = OnDisk(sys.argv[1]), 0
def layer(x):
    global calls
    calls += 1
    if calls == 7 and sys.argv[2] == "kill":  # in the middle of backward
        print(store.file_bytes, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return x.sin().exp()
x = torch.linspace(0, 1, 100_000, requires_grad=True)
y = x
for _ in range(5):
    y = recompute(layer, inputs=store)(y)
y.sum().backward()
y, found = x, x.grad
for _ in range(5):
    y = y.sin().exp()
print(torch.equal(found, *torch.autograd.grad(y.sum(), [x])), store.file_bytes)
"""


def test_a_run_that_is_killed(tmp_path: Path) -> None:
    """A process killed in its backward leaves no file behind, and a run that is started again is a whole one."""

    def run(how: str) -> tuple[int, str]:
        done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), how], capture_output=True, text=True)
        return done.returncode, done.stdout

    code, said = run("kill")
    assert code == -signal.SIGKILL
    assert int(said) >= 5 * 400_000
    assert list(tmp_path.iterdir()) == []
    assert run("go") == (0, "True 0\n")


@pytest.mark.parametrize("wrong", [{"folder": "/no/such"}, {"folder": 3}, {"threads": 0}, {"at_most": "1GiB"}], ids=str)
def test_options(wrong: dict[str, Any], tmp_path: Path) -> None:
    """What is no folder, and no number, is refused; what is right is in the text of the store."""
    given = {"folder": tmp_path, **wrong}
    with pytest.raises(ArgumentError, match="OnDisk"):
        OnDisk(given.pop("folder"), **given)
    assert repr(OnDisk(tmp_path, ahead=2)) == f"OnDisk(folder={str(tmp_path)!r}, ahead=2)"
