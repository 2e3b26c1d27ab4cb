"""Stores: tensors come back as they were put, for region inputs and saved calls; a store is empty after backward."""

import tempfile
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from laws.watch import equal, on_threads
from torch_recompute import ChangedError, OnDevice, OnDisk, OnHost, Store, StoreError, no_recompute, recompute
from torch_recompute.stores import Hooks, Kept


class Noted:
    """A store that copies, and notes what it is asked for."""

    def __init__(self) -> None:
        self.put_shapes: list[tuple[int, ...]] = []
        self.gets = 0
        self.handles: list[weakref.ref[Any]] = []

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        self.put_shapes.append(tuple(tensor.shape))
        copy = tensor.detach().clone()
        self.handles.append(weakref.ref(copy))
        return copy

    def get(self, handle: torch.Tensor) -> torch.Tensor:
        self.gets += 1
        return handle


STORES: dict[str, Callable[[], Store]] = {
    "OnDevice": OnDevice,
    "OnHost": OnHost,
    "OnDisk": lambda: OnDisk(tempfile.gettempdir()),
    "Hooks": lambda: Hooks(lambda t: t.detach().clone(), lambda t: t),
    "user's": Noted,
}

TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "vector": lambda: torch.arange(6.0),
    "matrix": lambda: torch.arange(6.0).view(2, 3),
    "number": lambda: torch.tensor(3.0),
    "nothing": lambda: torch.empty(0, 4),
    "integers": lambda: torch.arange(6),
    "flags": lambda: torch.tensor([True, False]),
    "half": lambda: torch.arange(6).bfloat16(),
    "complex": lambda: torch.complex(torch.arange(3.0), torch.ones(3)),
    "conjugate": lambda: torch.complex(torch.arange(3.0), torch.ones(3)).conj(),
    "transposed": lambda: torch.arange(6.0).view(2, 3).mT,
    "every other": lambda: torch.arange(12.0)[1::2],
    "channels last": lambda: torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.arange(3.0).expand(4, 3),
    "requires grad": lambda: torch.arange(6.0).requires_grad_(),
    "result": lambda: torch.arange(6.0).requires_grad_().exp(),
    "parameter": lambda: nn.Parameter(torch.arange(6.0)),
}


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS.keys())
@pytest.mark.parametrize("store", STORES.values(), ids=STORES.keys())
def test_what_is_put_comes_back(store: Callable[[], Store], make: Callable[[], torch.Tensor]) -> None:
    """Shape, dtype, device and values are those that were put, as often as they are asked for; no graph hangs on it."""
    tensor, place = make(), store()
    assert isinstance(place, Store)
    handle = place.put(tensor)
    for _ in range(2):
        got = place.get(handle)
        assert (got.shape, got.dtype, got.device) == (tensor.shape, tensor.dtype, tensor.device)
        assert torch.equal(got, tensor.detach())
        assert got.grad_fn is None
        assert not got.requires_grad


@pytest.mark.parametrize("name", ["matrix", "transposed", "channels last", "expanded"])
def test_on_host_keeps_strides(name: str) -> None:
    """A dense tensor comes back from the host laid out as it was, so that the replay runs the same kernels."""
    tensor = TENSORS[name]()
    store = OnHost()
    assert store.get(store.put(tensor)).stride() == tensor.stride()


def test_on_host_copies_an_expanded_tensor_once() -> None:
    """An expanded tensor takes the memory of what it was expanded from, not of what it seems to be."""
    store = OnHost()
    handle = store.put(torch.arange(3.0).expand(1000, 3))
    assert store.host_bytes == 12
    assert store.get(handle).untyped_storage().nbytes() == 12


def test_inputs_with_gaps_on_the_host() -> None:
    """An input with gaps, whose copy has none, gives the plain gradients; in a saved call's arguments as well."""
    for inner in (torch.sin, no_recompute(torch.sin), no_recompute(lambda x: x.mT.sin())):
        grads = []
        for wrap in (lambda fn: recompute(fn, inputs=OnHost()), lambda fn: fn):
            x = torch.linspace(0, 1, 24).view(4, 6).requires_grad_()
            wrap(lambda x, inner=inner: inner(x).exp().sin())(x[:, ::2]).sum().backward()
            grads.append(x.grad)
        assert torch.equal(*grads)


def test_on_host_holds_a_copy() -> None:
    """What happens to the tensor afterwards does not reach the copy, also where both lie on the CPU."""
    tensor, store = torch.zeros(3), OnHost()
    handle = store.put(tensor)
    tensor.add_(1)
    assert torch.equal(store.get(handle), torch.zeros(3))


def test_on_device_holds_the_tensor() -> None:
    """`OnDevice` copies nothing: the memory is shared."""
    tensor, store = torch.zeros(3), OnDevice()
    assert store.get(store.put(tensor)).data_ptr() == tensor.data_ptr()


@pytest.mark.gpu
def test_on_host_frees_the_device() -> None:
    """A tensor on a CUDA device is copied to pinned host memory and back to the same device."""
    tensor, store = torch.arange(6.0, device="cuda"), OnHost()
    handle = store.put(tensor)
    assert handle.host_copy.host.is_pinned()
    assert torch.equal(store.get(handle), tensor)
    assert store.get(handle).device == tensor.device


@pytest.mark.parametrize("grad", [False, True])
def test_kept_restores_requires_grad(grad: bool) -> None:
    """A tensor opened again is a leaf that requires grad exactly if the one put did."""
    tensor = torch.arange(3.0).requires_grad_(grad)
    tensor = tensor.exp() if grad else tensor
    opened = Kept(Noted(), tensor, "layer 3").open()
    assert opened.requires_grad is grad
    assert opened.is_leaf


# --- regions ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A layer with a mask by keyword and a scale by closure."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
        return x + (self.linear(x).exp() * mask).sin().exp()


def gradients(call: Callable[..., torch.Tensor], module: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(4, 6, requires_grad=True)
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    return list(torch.autograd.grad(call(x * 2, mask=mask).square().sum(), [x, *module.parameters()]))


@pytest.mark.parametrize("store", STORES.values(), ids=STORES.keys())
def test_gradients_with_inputs_in_a_store(store: Callable[[], Store]) -> None:
    """Gradients are those of the plain call, wherever the region's inputs lie meanwhile."""
    block = Block()
    assert equal(gradients(recompute(block, inputs=store()), block), gradients(block, block))


@pytest.mark.parametrize("store", STORES.values(), ids=STORES.keys())
def test_gradients_with_a_saved_call_in_a_store(store: Callable[[], Store]) -> None:
    """Gradients are those of the plain call, wherever lies what a saved call keeps."""
    block = Block()
    product = no_recompute(torch.exp, store=store())

    def region(x: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
        return x + (product(block.linear(x)) * mask).sin().exp()

    assert equal(gradients(recompute(region), block), gradients(block, block))


@pytest.mark.parametrize("inside", [True, False], ids=["in a region", "outside"])
@pytest.mark.parametrize("store", STORES.values(), ids=STORES)
def test_what_a_kernel_writes_after_it_is_saved_is_stored(store: Callable[[], Store], inside: bool) -> None:
    """`rrelu` draws its slopes into a tensor that autograd has saved before: the store has the slopes."""

    def slopes(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rrelu(x - 1, training=True)

    def gradient(fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        torch.manual_seed(0)
        x = torch.linspace(-1, 1, 64, requires_grad=True)
        return torch.autograd.grad(fn(x).sin().sum(), x)[0]

    stored = no_recompute(slopes, store=store())
    ours = recompute(lambda x: stored(x.exp()).square()) if inside else lambda x: stored(x.exp()).square()
    assert torch.equal(gradient(ours), gradient(lambda x: slopes(x.exp()).square()))


@pytest.mark.parametrize("inside", [True, False], ids=["in a region", "outside"])
@pytest.mark.parametrize("store", STORES.values(), ids=STORES)
def test_what_a_call_changes_after_it_is_saved_raises(store: Callable[[], Store], inside: bool) -> None:
    """A saved tensor that the call itself changes in place is no other gradient: backward raises, as plain PyTorch."""

    def changing(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        return y.add_(y.cos()).sin()

    stored = no_recompute(changing, store=store())
    x = torch.linspace(-1, 1, 64, requires_grad=True)
    for fn in (changing, recompute(lambda x: stored(x.exp())) if inside else stored):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            fn(x).sum().backward()


def test_every_input_is_put_once() -> None:
    """Positional, keyword and nested tensors and those in closures are put once each; parameters are not."""
    store, weight = Noted(), nn.Parameter(torch.ones(2))
    scale = torch.ones(5, 1, 1)

    def fn(x: torch.Tensor, more: dict[str, torch.Tensor], *, mask: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x.sin() * more["a"] * mask * scale * w.sum()).exp()

    x = torch.ones(3, requires_grad=True)
    y = recompute(fn, inputs=store)(x, {"a": torch.ones(1, 3)}, mask=torch.ones(4, 1, 1, 1), w=weight)
    assert sorted(store.put_shapes) == [(1, 3), (3,), (4, 1, 1, 1), (5, 1, 1)]
    assert store.gets == 0
    y.sum().backward()
    assert store.gets >= 4
    assert weight.grad is not None


def test_an_input_that_is_passed_twice_is_got_once() -> None:
    """`attention(q, h, h)`: one tensor is put once and fetched once, for a second fetch may be a replay."""
    store, x = Noted(), torch.ones(3, requires_grad=True)
    recompute(lambda a, b: (a.sin() * b).exp().sin(), inputs=store)(x, x).sum().backward()
    assert (len(store.put_shapes), store.gets) == (1, 1)


def test_inputs_in_a_store_are_not_kept() -> None:
    """With its inputs in a store a region holds none of their memory."""
    x = torch.ones(3, requires_grad=True)
    for store, held in ((None, True), (OnHost(), False)):
        inner = x * 2
        memory = StorageWeakRef(inner.untyped_storage())
        y = recompute(lambda x: x.sin().exp(), inputs=store)(inner)
        del inner
        assert memory.expired() is not held
        del y


def test_handles_are_dropped() -> None:
    """What `put` returned is freed when the graph is dropped, and after backward when its output is."""
    for backward in (False, True):
        store = Noted()
        x = torch.ones(3, requires_grad=True)
        call = no_recompute(torch.exp, store=store)
        loss = recompute(lambda x, call=call: call(x.sin()).sin().exp(), inputs=store)(x).sum()
        assert any(ref() is not None for ref in store.handles)
        if backward:
            loss.backward()
        del loss
        assert all(ref() is None for ref in store.handles)


def test_a_copying_store_does_not_mind_changes() -> None:
    """Where the store holds a copy, an input changed in place after the forward does no harm: gradients are right."""
    for store in (OnHost(), Noted()):
        x, mask = torch.ones(3, requires_grad=True), torch.ones(3)
        y = recompute(lambda x, mask: (x * mask).sin().exp(), inputs=store)(x, mask)
        mask.add_(1)
        y.sum().backward()
        one = torch.ones(3)
        assert torch.allclose(x.grad, one.cos() * one.sin().exp())


def test_on_device_minds_changes() -> None:
    """`OnDevice` is the default written out: an input changed in place is an error there as well."""
    for store in (None, OnDevice()):
        x, mask = torch.ones(3, requires_grad=True), torch.ones(3)
        y = recompute(lambda x, mask: (x * mask).sin().exp(), inputs=store)(x, mask)
        mask.add_(1)
        with pytest.raises(ChangedError):
            y.sum().backward()


def test_saved_tensor_hooks_around_a_region_are_its_store() -> None:
    """Hooks of the caller see the region's inputs as they would see what autograd keeps, and nothing from inside."""
    block = Block()
    packed: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tuple(tensor.shape))
        return tensor.detach().clone()

    def call(x: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            return recompute(block)(x, mask=mask)

    assert equal(gradients(call, block), gradients(block, block))
    assert sorted(packed) == [(4, 6), (6,)]


def test_save_on_cpu_around_a_region() -> None:
    """`torch.autograd.graph.save_on_cpu` offloads a region's inputs."""
    block = Block()

    def call(x: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return recompute(block)(x, mask=mask)

    assert equal(gradients(call, block), gradients(block, block))


def test_a_store_is_asked_from_backward_threads() -> None:
    """`get` may come from a thread other than that of `put`, several at a time."""
    region = recompute(lambda x: x.sin().exp().sin(), inputs=OnHost())
    inputs = [torch.full((3,), float(i), requires_grad=True) for i in range(4)]
    losses = [region(x).sum() for x in inputs]
    on_threads(torch.Tensor.backward, *losses)
    for x in inputs:
        y = x.detach().requires_grad_()
        y.sin().exp().sin().sum().backward()
        assert torch.equal(x.grad, y.grad)


# --- stores that fail -------------------------------------------------------------------------------------------------


def broken(get: Callable[[torch.Tensor], Any]) -> Any:
    store = Noted()
    store.get = get  # type: ignore[method-assign]
    return store


WRONG: dict[str, Callable[[torch.Tensor], Any]] = {
    "nothing": lambda t: None,
    "a number": lambda t: 3,
    "another shape": lambda t: t[:1],
    "another dtype": lambda t: t.double(),
    "another device": lambda t: t.to("meta"),
    "a handle": lambda t: (t, t.device),
}


@pytest.mark.parametrize("get", WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("saved_call", [False, True])
def test_a_store_that_returns_something_else(get: Callable[[torch.Tensor], Any], saved_call: bool) -> None:
    """What is not the tensor that was put is an error that names the store, before anything is computed with it."""
    call = no_recompute(torch.exp, store=broken(get) if saved_call else None)
    region = recompute(lambda x: call(x.sin()).sin().exp(), inputs=None if saved_call else broken(get))
    loss = region(torch.ones(3, requires_grad=True)).sum()
    with pytest.raises(StoreError, match=r"the store Noted of .* was given a tensor"):
        loss.backward()


def test_a_store_that_raises() -> None:
    """An exception of `put` comes out of the forward, one of `get` out of backward, and the next step is right."""

    def refuse(tensor: torch.Tensor) -> Any:
        raise OSError("the disk is full")

    full = Noted()
    full.put = refuse  # type: ignore[method-assign]
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(OSError, match="the disk is full"):
        recompute(lambda x: x.sin().exp(), inputs=full)(x)
    with pytest.raises(OSError, match="the disk is full"):
        recompute(lambda x: x.sin().exp(), inputs=broken(refuse))(x).sum().backward()
    recompute(lambda x: x.sin().exp())(x).sum().backward()
    assert torch.equal(x.grad, x.detach().sin().exp() * x.detach().cos())


@pytest.mark.parametrize("saved_call", [False, True])
@pytest.mark.parametrize("handle", [lambda t: t, lambda t: (t.device, t)], ids=["itself", "in a tuple"])
def test_a_store_that_does_not_copy(handle: Callable[[torch.Tensor], Any], saved_call: bool) -> None:
    """What hooks pass on as it is, as those that move large tensors only, is watched for changes in place."""
    store = Hooks(handle, lambda held: held[-1] if isinstance(held, tuple) else held)
    x = torch.ones(3, requires_grad=True)
    h = x * 1
    if saved_call:
        y = out = no_recompute(torch.exp, store=store)(h)
    else:
        y = recompute(lambda h: (h * 2).sin(), inputs=store)(h)
        out = h
    y.sum().backward(retain_graph=True)
    with torch.no_grad():
        out += 1
    with pytest.raises(ChangedError, match="modified by an inplace operation"):
        y.sum().backward()
