"""Host memory as a store: which tensors are copied, in which pieces, and when.

What holds of any store is in `test_stores.py`. A machine without a CUDA device has no streams, so the order of copies
is shown on copies that happen as late as they may (`store_kinds.Late`).
"""

import copy
import pickle
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from core.store_kinds import Late
from laws.watch import on_threads
from torch_recompute import ArgumentError, ChangedError, OnDisk, OnHost, no_recompute, recompute
from torch_recompute.stores import Bandwidth, bandwidth, host
from torch_recompute.stores.transfers import TransferQueue


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> Late:
    """All copies are late."""
    lane = Late()
    queue = TransferQueue(lane)
    monkeypatch.setattr(host, "queue_of", lambda tensor: queue)
    return lane


# --- order ------------------------------------------------------------------------------------------------------------


def through(count: int, store: Any) -> torch.Tensor:
    """What regions, called one after the other, return."""
    x = torch.ones(3, requires_grad=True) * 2
    for _ in range(count):
        x = recompute(lambda x: x.sin().exp(), inputs=store)(x)
    return x


@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
def test_what_is_still_on_the_device_is_not_fetched(lane: Late, ahead: int) -> None:
    """Every input is sent, and those of the last regions, which have not left yet, do not come back."""
    for steps in (1, 2):
        through(6, OnHost(ahead=ahead)).sum().backward()
        assert lane.count("send") == 6 * steps
        assert lane.count("fetch") == steps * max(0, 6 - ahead - 1)


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5), (5, 4, 3, 2, 1, 0), (5, 3, 1, 4, 2, 0)], ids=str)
def test_few_copies_wait_unopened(lane: Late, ahead: int, order: tuple[int, ...]) -> None:
    """In whatever order microbatches go backward, no more copies wait on the device than are fetched ahead."""
    store = OnHost(ahead=ahead)
    losses = [through(4, store).sum() for _ in order]
    for n in order:
        losses[n].backward()
        assert lane.waiting("fetch") <= ahead


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_tensors_leave_one_region_later(lane: Late, ahead: int) -> None:
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
def test_tensors_come_back_one_region_ahead(lane: Late, ahead: int) -> None:
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


def test_each_reader_waits_for_the_copy(lane: Late, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_change_after_the_copy_does_no_harm(lane: Late) -> None:
    """A tensor may be changed in place once its copy is done, two regions later."""
    x, store = torch.ones(3, requires_grad=True), OnHost()
    inner = x * 2
    y = inner
    for _ in range(3):
        y = recompute(lambda x: x.sin().exp(), inputs=store)(y)
    with torch.no_grad():
        inner.add_(1)
    (wanted,) = torch.autograd.grad((x * 2).sin().exp().sin().exp().sin().exp().sum(), x)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], wanted)


def test_a_change_is_noticed_after_the_tensor_has_left(lane: Late) -> None:
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


def test_what_saved_calls_keep_travels_as_one_piece(lane: Late) -> None:
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
        queue = TransferQueue(Late())
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


def test_a_tensor_of_all_regions_is_copied_once(lane: Late) -> None:
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
    handles.append(store.put(torch.zeros(5)))
    assert store.host_bytes == 100


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


def test_threads_share_what_is_sent(lane: Late) -> None:
    """Several threads at once put tensors into one store that sends a part of them; its count is right afterwards."""
    store = OnHost(fraction=0.7)
    on_threads(lambda _: [through(6, store).sum().backward() for _ in range(5)], *range(4))
    assert 0 < lane.count("send") < 4 * 5 * 6
    assert store.host_bytes == 0


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


def test_a_put_that_fails_counts_nothing(lane: Late, monkeypatch: pytest.MonkeyPatch) -> None:
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
