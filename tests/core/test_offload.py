"""Offload to host memory: which tensors are copied, which streams wait, and no buffer or event is left.

A machine without a CUDA device has no streams, so the order of copies is shown on `Lazy`: copies that happen as late
as their waits allow, into memory that holds NaN until then. Whoever forgets to wait reads NaN, or has his memory
changed under the copy.
"""

import contextlib
import copy
import pickle
import tempfile
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from laws.watch import equal, no_collector, on_threads
from torch_recompute import ArgumentError, ChangedError, OnDisk, OnHost, no_recompute, recompute
from torch_recompute.stores import Bandwidth, bandwidth, host
from torch_recompute.stores.transfers import TransferQueue


class Job:
    """One copy that has been asked for."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor, after: "Job | None") -> None:
        self.source = StorageWeakRef(source.untyped_storage())
        self.alias: torch.Tensor | None = source
        self.target = weakref.ref(target)
        self.after = after
        self.done = False

    def run(self) -> None:
        """Copies now, if not yet."""
        if self.done:
            return
        if self.after is not None:
            self.after.run()
        target = self.target()
        if target is not None:
            assert self.alias is not None
            target.copy_(self.alias)
        self.done, self.alias = True, None


class Lazy:
    """A lane whose copies happen as late as they may."""

    direct = False
    store, copied = "OnHost", "copied to the host"

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.jobs: list[Job] = []

    def _job(self, what: str, source: torch.Tensor, after: Job | None) -> tuple[torch.Tensor, Job]:
        target = torch.full_like(source, float("nan") if source.is_floating_point() else 77)
        self.log.append((what, source.numel()))
        job = Job(source, target, after)
        self.jobs.append(job)
        return target, job

    def steady(self, source: torch.Tensor) -> torch.Tensor:
        return source

    def same(self, held: torch.Tensor, first: int, source: torch.Tensor) -> bool:
        return True  # as on a device, where bytes are not compared

    def send(self, source: torch.Tensor) -> tuple[torch.Tensor, Job]:
        return self._job("send", source, None)

    def wait_for_send(self, mark: Job) -> None:
        self.log.append(("let go", 0))
        mark.run()

    def fetch(self, host: torch.Tensor, after: Job) -> tuple[torch.Tensor, Job]:
        return self._job("fetch", host, after)

    def arrive(self, tensor: torch.Tensor, mark: Job) -> None:
        mark.run()

    def abandon(self, tensor: torch.Tensor, mark: Job) -> None:
        self.log.append(("abandon", tensor.numel()))
        mark.run()

    def count(self, what: str) -> int:
        """How often something was asked for."""
        return sum(one == what for one, _ in self.log)


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> Lazy:
    """All tensors travel on a lazy lane."""
    lane = Lazy()
    queue = TransferQueue(lane)
    monkeypatch.setattr(host, "queue_of", lambda tensor: queue)
    return lane


def layers(count: int, width: int = 4) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)]


def run(blocks: list[nn.Module], wrap: Callable[[nn.Module], Any], x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = wrap(block)(x)
    return x.square().sum()


def grads(blocks: list[nn.Module]) -> list[torch.Tensor]:
    found = [p.grad for block in blocks for p in block.parameters() if p.grad is not None]
    for block in blocks:
        block.zero_grad()
    return found


def plain(blocks: list[nn.Module], x: torch.Tensor) -> list[torch.Tensor]:
    run(blocks, lambda block: block, x).backward()
    return grads(blocks)


# --- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
def test_copies_are_waited_for(lane: Lazy, ahead: int) -> None:
    """With copies as late as possible gradients are the plain ones, in the first step as in the next."""
    blocks, x, store = layers(6), torch.randn(3, 4), OnHost(ahead=ahead)
    expected = plain(blocks, x)
    for _ in range(2):
        run(blocks, lambda block: recompute(block, inputs=store), x).backward()
        assert equal(grads(blocks), expected)
        assert store.host_bytes == 0
    assert lane.count("send") == 12
    assert lane.count("fetch") == 2 * max(0, 6 - ahead - 1)  # what is still on the device is not fetched


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_tensors_leave_one_region_later(lane: Lazy, ahead: int) -> None:
    """While a region runs, the inputs of no more than `ahead` regions before it are still on the device."""
    alive: list[int] = []
    memories: list[StorageWeakRef] = []

    class Look(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            alive.append(sum(not memory.expired() for memory in memories))
            return x.sin().exp()

    x, store = torch.ones(3, requires_grad=True) * 2, OnHost(ahead=ahead)
    for _ in range(6):
        memories.append(StorageWeakRef(x.untyped_storage()))
        x = recompute(Look(), inputs=store)(x)
    assert alive == [min(n + 1, ahead + 1) for n in range(6)]


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_tensors_come_back_one_region_ahead(lane: Lazy, ahead: int) -> None:
    """While a region is replayed, the inputs of the `ahead` regions put before it are under way, and no others."""
    under_way: list[int] = []
    copies: list[Any] = []

    class Noting(OnHost):
        def put(self, tensor: torch.Tensor) -> Any:
            handle = super().put(tensor)
            copies.append(handle.host_copy)
            return handle

    class Look(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            under_way.append(sum(host_copy._coming is not None for host_copy in copies))
            return x.sin().exp()

    store = Noting(ahead=ahead)
    x = torch.ones(3, requires_grad=True) * 2
    for _ in range(8):
        x = recompute(Look(), inputs=store)(x)
    del under_way[:]
    x.sum().backward()
    copies.clear()
    # Replayed from the last to the first. The inputs of the last `ahead` + 1 regions have never left.
    left = range(8 - ahead - 1)
    assert under_way == [sum(before in left for before in range(n - ahead, n)) for n in reversed(range(8))]


def test_each_reader_waits_for_the_copy(lane: Lazy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader of memory that has come back already may be on another stream, and waits for the copy too."""
    arrived: list[int] = []
    monkeypatch.setattr(lane, "arrive", lambda tensor, mark: (mark.run(), arrived.append(tensor.data_ptr())))
    store = OnHost(ahead=0)
    handles = [store.put(torch.ones(1000))]
    for _ in range(2):
        recompute(torch.sin)(torch.ones(3, requires_grad=True))  # the next region, at which the tensor leaves
        handles.append(store.put(torch.ones(1000)))
    first, second = store.get(handles[0]), store.get(handles[0])
    assert first.data_ptr() == second.data_ptr()
    assert arrived == [first.data_ptr()] * 2


def test_a_change_on_the_way_is_an_error(lane: Lazy) -> None:
    """A tensor changed in place before its copy is done cannot be trusted: backward says so; later changes harm not."""
    for later in (False, True):
        x, store = torch.ones(3, requires_grad=True), OnHost()
        inner = x * 2
        y = recompute(lambda x: x.sin().exp(), inputs=store)(inner)
        if later:
            for _ in range(2):
                y = recompute(lambda x: x.sin().exp(), inputs=store)(y)
        with torch.no_grad():
            inner.add_(1)
        if not later:
            with pytest.raises(ChangedError, match="while it was being copied"):
                y.sum().backward()
            continue
        y.sum().backward()
        z = torch.ones(3, requires_grad=True)
        plain = z * 2
        for _ in range(3):
            plain = plain.sin().exp()
        plain.sum().backward()
        assert torch.equal(x.grad, z.grad)


def test_a_change_is_noticed_after_the_tensor_has_left(lane: Lazy) -> None:
    """The change is found out when the copy is waited for, although the tensor is gone when backward opens it."""
    x, store = torch.ones(3, requires_grad=True), OnHost()
    inner = x * 2
    y = recompute(lambda x: x.sin().exp(), inputs=store)(inner)
    with torch.no_grad():
        inner.add_(1)
    for _ in range(3):
        y = recompute(lambda x: x.sin().exp(), inputs=store)(y)
    with pytest.raises(ChangedError, match=r"version 0 then, 1 now"):
        y.sum().backward()
    del y
    assert store.host_bytes == 0


def test_saved_calls_on_a_lazy_lane(lane: Lazy) -> None:
    """What saved calls keep travels too, q, k and v of one product as one piece."""

    def block(x: torch.Tensor, attend: Any) -> torch.Tensor:
        q, k, v = (x @ weight).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return x + attend(q.tanh(), k.tanh(), v.tanh()).transpose(1, 2).flatten(2)

    torch.manual_seed(0)
    weight, store = torch.randn(8, 24, requires_grad=True), OnHost()
    x = torch.randn(2, 5, 8)
    found = []
    for attend in (F.scaled_dot_product_attention, no_recompute(F.scaled_dot_product_attention, store=store)):
        y = x
        for _ in range(3):
            y = recompute(lambda y, attend=attend: block(y, attend))(y)
        y.square().sum().backward()
        found.append(weight.grad)
        weight.grad = None
    assert torch.equal(*found)
    assert lane.count("send") > 0
    assert store.host_bytes == 0


# --- one piece of memory ----------------------------------------------------------------------------------------------


def views() -> dict[str, Callable[[torch.Tensor], list[torch.Tensor]]]:
    return {
        "the tensor twice": lambda base: [base, base],
        "detached": lambda base: [base, base.detach()],
        "transposed": lambda base: [base, base.mT],
        "q, k, v": lambda base: list(base.chunk(3, dim=-1)),
        "heads": lambda base: [
            part.unflatten(-1, (2, 2)).transpose(1, 2) for part in base.unflatten(0, (1, 4)).chunk(3, -1)
        ],
        "whole, then rows": lambda base: [base, base[1:3]],
        "expanded": lambda base: [base.expand(5, *base.shape), base],
        "every other": lambda base: [base[:, ::2], base[:, 1::2]],
    }


@pytest.mark.parametrize("case", views().values(), ids=views().keys())
@pytest.mark.parametrize("lazy", [False, True])
def test_memory_is_copied_once(case: Callable[..., Any], lazy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Views of one storage are one copy, and come back as views of one tensor, laid out as they were."""
    if lazy:
        queue = TransferQueue(Lazy())
        monkeypatch.setattr(host, "queue_of", lambda tensor: queue)
    base, store = torch.arange(48.0).view(4, 12), OnHost()
    tensors = case(base)
    handles = [store.put(tensor) for tensor in tensors]
    assert store.host_bytes == 48 * 4
    values = [tensor.clone() for tensor in tensors]
    strides = [tensor.stride() for tensor in tensors]
    for _ in range(3):  # further groups, so that the first one leaves
        recompute(torch.sin, inputs=store)(torch.ones(2, requires_grad=True))
    got = [store.get(handle) for handle in handles]
    assert [tensor.stride() for tensor in got] == strides
    assert all(torch.equal(a, b) for a, b in zip(got, values, strict=True))
    assert len({tensor.untyped_storage()._cdata for tensor in got}) == 1
    del handles, got
    assert store.host_bytes == 0


def test_a_small_part_of_a_large_tensor_travels_alone() -> None:
    """Elements with gaps that are a small part of their memory are gathered; neighbours are cut out."""
    base = torch.arange(1000.0).view(10, 100)
    for part, size in ((base[:, :3], 30), (base[2:4], 200), (base[:, 5].expand(7, 10), 10)):
        store = OnHost()
        handle = store.put(part)
        assert store.host_bytes == 4 * size
        assert torch.equal(store.get(handle), part)
        assert store.put(part).host_copy is handle.host_copy


def test_a_changed_tensor_is_another_one() -> None:
    """The same memory at another version is copied again."""
    tensor, store = torch.zeros(3), OnHost()
    first = store.put(tensor)
    tensor.add_(1)
    second = store.put(tensor)
    assert torch.equal(store.get(first), torch.zeros(3))
    assert torch.equal(store.get(second), torch.ones(3))


@pytest.mark.parametrize("between", [0, 3], ids=["at once", "once it has left"])
@pytest.mark.parametrize("store", [OnHost, lambda: OnDisk(tempfile.gettempdir())], ids=["host", "disk"])
def test_a_tensor_changed_unseen_is_another_one(store: Callable[[], Any], between: int) -> None:
    """On the CPU a write that no version counts, between two calls, reaches the second call's copy; else they share."""
    tensor, kept = torch.zeros(1000), store()
    first = kept.put(tensor)
    y = torch.ones(2, requires_grad=True)
    for _ in range(between):  # further groups, so that the first one leaves
        y = recompute(torch.sin, inputs=kept)(y)
    assert kept.put(tensor).host_copy is first.host_copy
    tensor.data.add_(1)
    second = kept.put(tensor)
    assert torch.equal(kept.get(first), torch.zeros(1000))
    assert torch.equal(kept.get(second), torch.ones(1000))


def test_a_tensor_of_all_regions_is_copied_once(lane: Lazy) -> None:
    """A mask that every region gets lies in host memory once, also where each region has a store of its own."""
    mask, x = torch.ones(100), torch.ones(3, requires_grad=True)
    for _ in range(5):
        x = recompute(lambda x, mask: x.sin().exp() * mask.sum(), inputs=OnHost())(x, mask)
    assert lane.log.count(("send", 100)) == 1
    x.sum().backward()


# --- what stays -------------------------------------------------------------------------------------------------------


def test_small_tensors_stay() -> None:
    """Tensors below `smallest` stay, and are watched for changes."""
    store = OnHost(smallest=16)
    small, large = torch.zeros(3), torch.zeros(4)
    stayed = store.put(small)
    sent = store.put(large)
    assert store.host_bytes == 16
    large.add_(1)
    assert torch.equal(store.get(sent), torch.zeros(4))
    assert store.get(stayed).data_ptr() == small.data_ptr()
    small.add_(1)
    with pytest.raises(ChangedError, match="left on the device"):
        store.get(stayed)


def test_the_budget_is_kept() -> None:
    """No more than `at_most` bytes lie in host memory, and what is freed can be used again."""
    store = OnHost(at_most=100)
    handles = [store.put(torch.zeros(10)) for _ in range(5)]
    assert store.host_bytes == 80
    handles.pop(0)
    assert store.host_bytes == 40
    handles.append(store.put(torch.zeros(10)))
    assert store.host_bytes == 80


@pytest.mark.parametrize("fraction", [0, 0.1, 0.25, 1 / 3, 0.5, 0.75, 0.9, 1])
@pytest.mark.parametrize("sizes", [[10] * 60, [1, 5, 30] * 20])
def test_a_share_of_the_bytes_is_sent(fraction: float, sizes: list[int]) -> None:
    """The bytes sent are the share asked for, except for one tensor, evenly, and the same tensors in every step."""
    steps: list[list[bool]] = []
    store = OnHost(fraction=fraction)
    for _ in range(2):
        before, sent, handles = 0, [], []
        for n, size in enumerate(sizes):
            handles.append(store.put(torch.zeros(size)))
            sent.append(store.host_bytes > before)
            before = store.host_bytes
            assert abs(before - 4 * fraction * sum(sizes[: n + 1])) <= 4 * max(sizes)
        steps.append(sent)
        del handles
    assert steps[0] == steps[1]


@pytest.mark.parametrize(
    "options",
    [
        {"smallest": -1},
        {"smallest": 1.5},
        {"smallest": True},
        {"at_most": "24GiB"},
        {"at_most": -3},
        {"fraction": 1.5},
        {"fraction": "half"},
        {"ahead": -1},
        {"ahead": 0.5},
    ],
)
def test_bad_options(options: dict[str, Any]) -> None:
    """An option out of range is refused by name."""
    with pytest.raises(ArgumentError, match=rf"OnHost\({next(iter(options))}="):
        OnHost(**options)


def test_a_store_is_printed_copied_and_pickled_by_its_options() -> None:
    """Its options are all that a store is; what it holds stays with the original."""
    store = OnHost(smallest=8, fraction=0.5)
    assert repr(store) == "OnHost(smallest=8, fraction=0.5)"
    held = store.put(torch.zeros(100)), store.put(torch.zeros(100))
    for other in (copy.deepcopy(store), pickle.loads(pickle.dumps(store))):
        assert repr(other) == repr(store)
        assert other.host_bytes == 0
    assert store.host_bytes == 400
    del held


# --- nothing is left behind -------------------------------------------------------------------------------------------


class Fails(Exception):
    """Raised by a layer."""


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("end", ["backward", "dropped", "exception", "exception in backward"])
def test_nothing_is_left(lazy: bool, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After backward, a dropped graph or an exception no byte is left on the host or the device, without gc."""
    lane = Lazy()
    queue = TransferQueue(lane)
    if lazy:
        monkeypatch.setattr(host, "queue_of", lambda tensor: queue)
    memories: list[StorageWeakRef] = []
    calls = 0

    def layer(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        memories.append(StorageWeakRef(x.untyped_storage()))
        if end == "exception" and calls == 4:
            raise Fails
        if end == "exception in backward" and calls == 7:
            raise Fails
        return x.sin().exp()

    store = OnHost()
    region = recompute(layer, inputs=store)
    with no_collector():
        x = torch.ones(8, requires_grad=True)
        y = x * 2
        with contextlib.suppress(Fails):
            for _ in range(5):
                y = region(y)
            assert store.host_bytes == 5 * 32
            if end != "dropped":
                y.sum().backward()
        del y
        assert store.host_bytes == 0
        assert all(memory.expired() for memory in memories)
        if lazy:
            assert not queue._known
            assert all(job.done or job.target() is None for job in lane.jobs)


def test_a_graph_that_is_kept_is_opened_twice(lane: Lazy) -> None:
    """With `retain_graph` both backward calls give the plain gradients."""
    blocks, x, store = layers(5), torch.randn(3, 4), OnHost()
    expected = plain(blocks, x)
    loss = run(blocks, lambda block: recompute(block, inputs=store), x)
    loss.backward(retain_graph=True)
    assert equal(grads(blocks), expected)
    loss.backward()
    assert equal(grads(blocks), expected)
    del loss
    assert store.host_bytes == 0


@pytest.mark.parametrize("order", ["first in, first out", "last in, first out", "1F1B"])
def test_live_microbatches(lane: Lazy, order: str) -> None:
    """Many microbatches share one store, in whatever order their backwards come; copies unopened stay bounded."""
    blocks, store = layers(4), OnHost()
    inputs = [torch.randn(3, 4) for _ in range(6)]
    expected = [plain(blocks, x) for x in inputs]
    losses: list[tuple[int, torch.Tensor]] = []

    def back(at: int) -> None:
        n, loss = losses.pop(at)
        loss.backward()
        assert equal(grads(blocks), expected[n])
        waiting = sum(ref() is not None and ref()._coming is not None for group in queue._called for ref in group)
        assert waiting <= store.ahead

    queue = host.queue_of(inputs[0])
    for n, x in enumerate(inputs):
        losses.append((n, run(blocks, lambda block: recompute(block, inputs=store), x)))
        if order == "1F1B" and n >= 2:
            back(0)
    while losses:
        back(0 if order != "last in, first out" else -1)
    assert store.host_bytes == 0


def test_threads(lane: Lazy) -> None:
    """Forwards and backwards on several threads at once, over one store."""
    blocks, store = layers(4), OnHost(fraction=0.7)
    x = torch.randn(3, 4)
    expected = torch.autograd.grad(run(blocks, lambda block: block, x), list(blocks[0].parameters()))
    wrong: list[int] = []

    def work(n: int) -> None:
        for _ in range(5):
            loss = run(blocks, lambda block: recompute(block, inputs=store), x)
            found = torch.autograd.grad(loss, list(blocks[0].parameters()))
            if not equal(list(found), list(expected)):
                wrong.append(n)

    on_threads(work, *range(4))
    assert not wrong
    assert store.host_bytes == 0


def test_a_put_that_fails_counts_nothing(lane: Lazy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no host memory is to be had, the error comes out of the forward, and nothing is counted as held."""

    def send(source: torch.Tensor) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    store = OnHost()
    monkeypatch.setattr(lane, "send", send)
    with pytest.raises(RuntimeError, match="out of memory"):
        recompute(torch.sin, inputs=store)(torch.ones(3, requires_grad=True))
    assert store.host_bytes == 0


# --- without a device -------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="the warning is for machines without a CUDA device")
def test_without_a_device_it_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without a CUDA device the first tensor brings a warning, and no other does."""
    monkeypatch.setattr(host, "_said", [])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            store = OnHost()
            store.put(torch.ones(3))
            recompute(torch.sin, inputs=store)(torch.ones(3, requires_grad=True)).sum().backward()
    assert [warning.category for warning in caught] == [RuntimeWarning]
    assert "torch sees no CUDA device" in str(caught[0].message)


def test_the_driver_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether there is a device is asked for the first tensor, not for each one."""
    asked: list[int] = []
    monkeypatch.setattr(host, "_said", [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: not asked.append(1))
    for _ in range(3):
        OnHost().put(torch.ones(3))
    assert len(asked) == 1


class Pair(torch.Tensor):
    """A tensor made of two others."""

    @staticmethod
    def __new__(cls, left: torch.Tensor, right: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, left.shape, dtype=left.dtype, device=left.device)

    def __init__(self, left: torch.Tensor, right: torch.Tensor) -> None:
        self.left, self.right = left, right

    def __tensor_flatten__(self) -> Any:
        return ["left", "right"], "context"

    @staticmethod
    def __tensor_unflatten__(parts: Any, context: Any, size: Any, stride: Any) -> Any:
        assert context == "context"
        return Pair(parts["left"], parts["right"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Pair(args[0].left, args[0].right)
        raise NotImplementedError(func)


def test_tensors_made_of_others() -> None:
    """A tensor subclass that can be taken apart is sent in parts and put together again."""
    store = OnHost()
    left, right = torch.arange(4.0), torch.arange(4.0) + 10
    handle = store.put(Pair(left, right))
    assert store.host_bytes == 32
    got = store.get(handle)
    assert type(got) is Pair
    assert torch.equal(got.left, left)
    assert torch.equal(got.right, right)


# --- bandwidth --------------------------------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    """A cache of its own, and a small measurement that is counted."""
    module = __import__("sys").modules[bandwidth.__module__]
    monkeypatch.setenv("TORCH_RECOMPUTE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "SIZE", 1 << 16)
    monkeypatch.setattr(module, "_known", {})
    counted = []
    measure = module._measure_cpu
    monkeypatch.setattr(module, "_measure_cpu", lambda: counted.append(1) or measure())
    return module, counted, tmp_path / "cache"


def test_bandwidth_is_measured_once(measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second question is answered from the process, that of another process from the device's file of prices."""
    module, counted, folder = measured
    first = bandwidth("cpu")
    assert isinstance(first, Bandwidth)
    assert min(first) > 1e6
    assert bandwidth(torch.device("cpu")) == first
    assert [file.name for file in folder.iterdir()] == [
        module.PriceFile(module.full_name(torch.device("cpu"))).path.name
    ]
    monkeypatch.setattr(module, "_known", {})  # as another process would begin
    assert bandwidth("cpu") == first
    assert len(counted) == 1


@pytest.mark.parametrize("device", ["meta", "no such device", 3.5, "cuda:99"])
def test_bandwidth_of_something_else(device: Any) -> None:
    """What is no device of this machine is refused."""
    with pytest.raises(ArgumentError, match="expected a CUDA device"):
        bandwidth(device)


# --- on a device ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_bandwidth_of_a_device(measured: Any) -> None:
    """A CUDA device is measured each way."""
    module, _, _ = measured
    module.SIZE = 1 << 26
    found = bandwidth("cuda")
    assert min(found) > 1e9
