"""Stores: one set of laws for all kinds of them (`store_kinds.py`), then what is asked of a store, and what it may do.

What is host memory's alone is in `test_offload.py`, and what is a disk's in `test_disk.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from core.store_kinds import KINDS, Kind, Noted
from laws.placements import chain
from laws.table import for_each
from laws.watch import equal, no_collector, on_threads
from support.training import gradients
from torch_recompute import ChangedError, Store, StoreError, no_recompute, recompute
from torch_recompute.stores import Hooks, Stored, disk


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kind]:
    """Each kind of store, in the context that it needs; on a disk a tensor has many blocks."""
    monkeypatch.setattr(disk, "BLOCK", 1000)
    with request.param.around():
        yield request.param


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


DENSE = {"matrix", "transposed", "channels last"}


@for_each(name=TENSORS)
def test_what_is_put_comes_back(kind: Kind, name: str) -> None:
    """Shape, strides, dtype, device and values are those that were put, each time; no graph hangs on the tensor."""
    tensor, store = TENSORS[name](), kind.make()
    assert isinstance(store, Store)
    handle = store.put(tensor)
    for _ in range(2):
        got = store.get(handle)
        assert (got.shape, got.dtype, got.device) == (tensor.shape, tensor.dtype, tensor.device)
        assert torch.equal(got, tensor.detach())
        assert got.stride() == tensor.stride() or name not in DENSE
        assert got.grad_fn is None
        assert not got.requires_grad


@for_each(grad=[False, True])
def test_kept_restores_requires_grad(kind: Kind, grad: bool) -> None:
    """A tensor opened again is a leaf that requires grad exactly if the one put did."""
    tensor = torch.arange(3.0).requires_grad_(grad)
    tensor = tensor.exp() if grad else tensor
    opened = Stored(kind.make(), tensor, "layer 3").open()
    assert opened.requires_grad is grad
    assert opened.is_leaf


# --- regions and saved calls whose tensors lie in a store -------------------------------------------------------------

WIDTH = 64  # of which a part for each of two ranks is kept, and not the whole
X = torch.linspace(-1, 1, 16 * WIDTH).view(16, WIDTH)
WAYS: dict[str, Callable[[Any, nn.Module], Any]] = {
    "inputs": lambda store, layer: recompute(layer, inputs=store),
    "a saved call": lambda store, layer: recompute(no_recompute(layer, store=store)),
    "a saved call outside of regions": lambda store, layer: no_recompute(layer, store=store),
}
ways = pytest.mark.parametrize("way", WAYS)


def four_layers() -> nn.Sequential:
    """Four layers, each of which saves its input and its output."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))


def stored(layers: nn.Sequential, store: Any, way: str = "inputs") -> Callable[[torch.Tensor], torch.Tensor]:
    """The layers, each with its tensors in a store."""
    return chain(*(WAYS[way](store, layer) for layer in layers))


def grads(layers: nn.Sequential, x: torch.Tensor, run: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The gradients of a step; nothing is accumulated, so that threads may share the layers."""
    return torch.autograd.grad(run(x).square().sum(), list(layers.parameters()))


@ways
def test_gradients(kind: Kind, way: str) -> None:
    """In each step they are the plain ones to the bit, and nothing is left in the store."""
    layers, store = four_layers(), kind.make()
    wanted = grads(layers, X, layers)
    with no_collector():
        for _ in range(2):
            assert equal(grads(layers, X, stored(layers, store, way)), wanted)
            assert kind.held(store) == 0


@ways
def test_a_graph_that_is_retained(kind: Kind, way: str) -> None:
    """With `retain_graph=True` what is in the store stays for the next backward, and goes with the graph."""
    layers, store = four_layers(), kind.make()
    wanted = grads(layers, X, layers)
    loss, parameters = stored(layers, store, way)(X).square().sum(), list(layers.parameters())
    held = kind.held(store)
    assert held > 0 or kind.name == "device"
    for _ in range(3):
        assert equal(torch.autograd.grad(loss, parameters, retain_graph=True), wanted)
        assert kind.held(store) == held
    assert equal(torch.autograd.grad(loss, parameters), wanted)
    del loss
    assert kind.held(store) == 0


class Fails(Exception):
    """Raised by a layer."""


@pytest.mark.parametrize("end", ["backward", "dropped", "exception", "exception in backward"])
def test_nothing_is_left(kind: Kind, end: str) -> None:
    """After backward, a dropped graph or an exception no byte is left, in the store or of what it was given."""
    memories: list[StorageWeakRef] = []
    fails_at = {"exception": 4, "exception in backward": 7}.get(end)

    def layer(x: torch.Tensor) -> torch.Tensor:
        memories.append(StorageWeakRef(x.untyped_storage()))
        if len(memories) == fails_at:
            raise Fails
        return x.sin().exp()

    store = kind.make()
    region = recompute(layer, inputs=store)
    with no_collector():
        x = torch.ones(300, requires_grad=True)
        y = x * 2
        with contextlib.suppress(Fails):
            for _ in range(5):
                y = region(y)
            assert memories[1].expired() is kind.frees
            if end != "dropped":
                y.sum().backward()
        del y
        assert kind.held(store) == 0
        assert all(memory.expired() for memory in memories)


ORDERS = {
    "first in, first out": [*range(5), *range(5)],
    "last in, first out": [*range(5), *reversed(range(5))],
    "1F1B": [0, 1, 2, 0, 3, 1, 4, 2, 3, 4],
}


@pytest.mark.parametrize("order", ORDERS)
def test_live_microbatches(kind: Kind, order: str) -> None:
    """Many microbatches share one store, in whatever order their backwards come."""
    layers, store = four_layers(), kind.make()
    parameters, run = list(layers.parameters()), stored(layers, store)
    losses: dict[int, torch.Tensor] = {}
    for n in ORDERS[order]:
        if n not in losses:
            losses[n] = run(X * (n + 1)).square().sum()
        else:
            assert equal(torch.autograd.grad(losses.pop(n), parameters), grads(layers, X * (n + 1), layers))
    assert kind.held(store) == 0


def test_threads(kind: Kind) -> None:
    """Forwards and backwards on several threads at once, over one store, also of another thread's forward."""
    layers, store = four_layers(), kind.make()
    parameters, run = list(layers.parameters()), stored(layers, store)
    wanted = grads(layers, X, layers)

    def work(loss: torch.Tensor) -> bool:
        found = [torch.autograd.grad(loss, parameters), *(grads(layers, X, run) for _ in range(2))]
        return all(equal(one, wanted) for one in found)

    assert on_threads(work, *[run(X).square().sum() for _ in range(4)]) == [True] * 4
    assert kind.held(store) == 0


def test_a_changed_tensor_is_another_one(kind: Kind) -> None:
    """The same memory at another version is put again, and what was put before is as it was."""
    if kind.name == "device":
        return
    tensor, store, x = torch.zeros(300), kind.make(), torch.ones(2, requires_grad=True)
    first = store.put(tensor)
    for _ in range(11):  # further regions, until the copy is done
        x = recompute(torch.sin, inputs=store)(x)
    tensor.add_(1)
    second = store.put(tensor)
    assert torch.equal(store.get(first), torch.zeros(300))
    assert torch.equal(store.get(second), torch.ones(300))


CHANGES = [lambda mask: mask.add_(1), lambda mask: mask.data.add_(1)]


def test_a_change_after_the_forward(kind: Kind) -> None:
    """Where a copy is held, a change in place does no harm, also past the version; else it is an error."""
    for change in CHANGES[:1] if kind.changed else CHANGES:
        x, mask = torch.linspace(0, 1, 300).requires_grad_(), torch.full((300,), 0.5)
        (wanted,) = torch.autograd.grad((x * mask).sin().exp().sum(), x)
        y = recompute(lambda x, mask: (x * mask).sin().exp(), inputs=kind.make())(x, mask)
        change(mask)
        if kind.changed:
            with pytest.raises(ChangedError, match=kind.changed):
                y.sum().backward()
        else:
            assert torch.equal(torch.autograd.grad(y.sum(), x)[0], wanted)


@pytest.mark.parametrize("inside", [True, False], ids=["in a region", "outside"])
def test_what_a_kernel_writes_after_it_is_saved_is_stored(kind: Kind, inside: bool) -> None:
    """`rrelu` draws its slopes into a tensor that autograd has saved before: the store has the slopes."""

    def slopes(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rrelu(x - 1, training=True)

    def gradient(fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        torch.manual_seed(0)
        x = torch.linspace(-1, 1, 64, requires_grad=True)
        return torch.autograd.grad(fn(x).sin().sum(), x)[0]

    stored = no_recompute(slopes, store=kind.make())
    ours = recompute(lambda x: stored(x.exp()).square()) if inside else lambda x: stored(x.exp()).square()
    assert torch.equal(gradient(ours), gradient(lambda x: slopes(x.exp()).square()))


@pytest.mark.parametrize("inside", [True, False], ids=["in a region", "outside"])
def test_what_a_call_changes_after_it_is_saved_raises(kind: Kind, inside: bool) -> None:
    """A saved tensor that the call itself changes in place is no other gradient: backward raises, as plain PyTorch."""

    def changing(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        return y.add_(y.cos()).sin()

    stored = no_recompute(changing, store=kind.make())
    x = torch.linspace(-1, 1, 64, requires_grad=True)
    for fn in (changing, recompute(lambda x: stored(x.exp())) if inside else stored):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            fn(x).sum().backward()


# --- what is asked of a store --------------------------------------------------------------------------------------


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
    wanted = torch.autograd.grad(fn(x, {"a": torch.ones(1, 3)}, mask=torch.ones(4, 1, 1, 1), w=weight).sum(), weight)
    assert equal(torch.autograd.grad(y.sum(), weight), wanted)
    assert store.gets >= 4


def test_an_input_that_is_passed_twice_is_got_once() -> None:
    """`attention(q, h, h)`: one tensor is put once and fetched once, for a second fetch may be a replay."""
    store, x = Noted(), torch.ones(3, requires_grad=True)
    recompute(lambda a, b: (a.sin() * b).exp().sin(), inputs=store)(x, x).sum().backward()
    assert (len(store.put_shapes), store.gets) == (1, 1)


class Masked(nn.Module):
    """A layer with a mask by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
        return x + (self.linear(x).exp() * mask).sin().exp()


@pytest.mark.parametrize("by", ["hooks", "save_on_cpu"])
def test_saved_tensor_hooks_around_a_region_are_its_store(by: str) -> None:
    """Hooks of the caller see the region's inputs as they would see what autograd keeps, and nothing from inside."""
    layer, store = Masked(), Noted()
    x, mask = torch.linspace(0, 1, 24).view(4, 6).requires_grad_(), torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])

    def around(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hooks = torch.autograd.graph.saved_tensors_hooks(store.put, store.get)
        with hooks if by == "hooks" else torch.autograd.graph.save_on_cpu():
            return recompute(layer)(x, mask=mask)

    assert equal(gradients(layer, x, mask=mask, run=around), gradients(layer, x, mask=mask))
    assert sorted(store.put_shapes) == ([(4, 6), (6,)] if by == "hooks" else [])


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
