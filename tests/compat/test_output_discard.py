"""`OutputDiscardCheckpoint`: a region whose output is dropped after its consumer has run."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from laws.table import for_each
from torch_recompute import (
    ArgumentError,
    ChangedError,
    OutputDiscardCheckpoint,
    checkpoint,
    measure,
    no_recompute,
    recompute,
)


def rand(*size: int, grad: bool = True, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).requires_grad_(grad)


class Plain:
    """The same two calls, doing nothing."""

    def checkpoint(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    def discard_output_and_register_recompute(self, hook: torch.Tensor) -> None:
        pass


class Weights(nn.Module):
    """What the programs below compute with."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other = nn.LayerNorm(8), nn.LayerNorm(8)
        self.up, self.down, self.square = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)


def simple(produce: Callable[..., Any], consume: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function of the weights and the input, and what its output is for."""

    def run(w: Weights, x: torch.Tensor, new: Callable[[], Any]) -> torch.Tensor:
        odc = new()
        y = consume(w, odc.checkpoint(lambda x: produce(w, x), x))
        odc.discard_output_and_register_recompute(y)
        return y

    return run


def attend(w: Weights, h: torch.Tensor) -> torch.Tensor:
    q, k, v = (w.square(h).view(2, 3, 2, 4).transpose(1, 2) for _ in range(3))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 3, 8)


def square(w: Weights, h: torch.Tensor) -> torch.Tensor:
    return w.square(h)


norm_attention = simple(lambda w, x: w.norm(x), attend)


def activation(w: Weights, x: torch.Tensor, new: Callable[[], Any]) -> torch.Tensor:
    return simple(lambda w, u: F.silu(u), lambda w, h: w.down(h))(w, w.up(x), new)


def autocast(w: Weights, x: torch.Tensor, new: Callable[[], Any]) -> torch.Tensor:
    odc = new()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = odc.checkpoint(w.up, x)
        y = w.down(F.gelu(h))
    odc.discard_output_and_register_recompute(y)
    return y.float()


def second_consumer(w: Weights, x: torch.Tensor, new: Callable[[], Any]) -> torch.Tensor:
    odc = new()
    h = odc.checkpoint(w.norm, x)
    y = w.square(h)
    odc.discard_output_and_register_recompute(y)
    return y + h.square().mean() * h  # an auxiliary loss, and a read after the discard


def consumer_outside(w: Weights, x: torch.Tensor, new: Callable[[], Any]) -> torch.Tensor:
    odc = new()
    h = odc.checkpoint(w.norm, x)
    aside = w.up(h)  # the hook tensor does not depend on this one
    y = w.square(h)
    odc.discard_output_and_register_recompute(y)
    return y * aside.square().mean()


def tuple_output(w: Weights, x: torch.Tensor, new: Callable[[], Any]) -> torch.Tensor:
    odc = new()

    def route(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        h = w.norm(x)
        values, indices = h.sort(-1)
        return h.exp(), values, indices

    a, b, order = odc.checkpoint(route, x)
    y = w.square(a * b) + a.gather(-1, order)
    odc.discard_output_and_register_recompute(y)
    return y


def keyword_with_grad(w: Weights, x: torch.Tensor, new: Callable[[], Any]) -> torch.Tensor:
    odc = new()
    scale = x.mean(-1, keepdim=True)
    h = odc.checkpoint(lambda x, *, scale: (x * scale).tanh(), x, scale=scale)
    y = w.square(h) * scale
    odc.discard_output_and_register_recompute(y)
    return y


def chain(reverse: bool, early: bool) -> Callable[..., torch.Tensor]:
    def run(w: Weights, x: torch.Tensor, new: Callable[[], Any]) -> torch.Tensor:
        first, second, third = new(), new(), new()
        a = first.checkpoint(w.norm, x)
        b = second.checkpoint(lambda a: w.square(a).tanh(), a)
        if early:
            first.discard_output_and_register_recompute(b)
        c = third.checkpoint(lambda b, a: w.up(b) * a.sum(-1, keepdim=True), b, a)
        y = w.down(c.sin())
        order = [second, third] if early else [first, second, third]
        for odc in reversed(order) if reverse else order:
            odc.discard_output_and_register_recompute(y)
        return y

    return run


def into_a_region(w: Weights, x: torch.Tensor, new: Callable[[], Any]) -> torch.Tensor:
    odc = new()
    h = odc.checkpoint(w.norm, x)
    consumer = recompute if new is OutputDiscardCheckpoint else lambda fn: fn
    y = consumer(lambda h: w.down(F.silu(w.up(h))))(h)
    odc.discard_output_and_register_recompute(y)
    return y


def views_of_output(w: Weights, x: torch.Tensor, new: Callable[[], Any]) -> torch.Tensor:
    odc = new()
    qk = odc.checkpoint(w.up, x)
    q, k = qk.chunk(2, -1)
    y = (q.transpose(1, 2) @ k).sin() * q[:, :1].sum()
    odc.discard_output_and_register_recompute(y)
    return w.square(y)


def used_again(w: Weights, x: torch.Tensor, new: Callable[[], Any]) -> torch.Tensor:
    odc = new()
    total = x * 0
    for norm in (w.norm, w.other, w.norm):
        y = w.square(odc.checkpoint(norm, x))
        odc.discard_output_and_register_recompute(y)
        total = total + y
    return total


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.stashed = x
        return x @ w

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        assert torch.equal(x, ctx.stashed)
        return grads[0] @ w.t(), (x.transpose(-1, -2) @ grads[0]).sum(0)


PROGRAMS: dict[str, Callable[..., torch.Tensor]] = {
    function.__name__: function
    for function in (
        activation,
        autocast,
        second_consumer,
        consumer_outside,
        tuple_output,
        keyword_with_grad,
        into_a_region,
        views_of_output,
        used_again,
    )
} | {
    "norm, attention": lambda w, x, new: norm_attention(w, x, new) + x,
    "dropout": simple(lambda w, x: F.dropout(w.norm(x), 0.5), lambda w, h: F.dropout(w.square(h), 0.3)),
    "cast": lambda w, x, new: simple(lambda w, x: x.float(), square)(w, x.bfloat16(), new),
    "softmax": simple(lambda w, x: x.float().softmax(-1), square),
    "alias": simple(lambda w, x: x.float(), square),
    "view of input": lambda w, x, new: simple(lambda w, x: x.flatten(0, 1), square)(w, x, new).view_as(x),
    "nested output": simple(
        lambda w, x: {"h": [w.norm(x), 1.5], "none": None}, lambda w, h: w.square(h["h"][0]) * h["h"][1]
    ),
    "custom function": simple(lambda w, x: w.norm(x), lambda w, h: Product.apply(h, w.square.weight)),
    "chain": chain(reverse=False, early=False),
    "chain discarded backwards": chain(reverse=True, early=False),
    "chain discarded as it goes": chain(reverse=False, early=True),
}

INSIDE: dict[str, Callable[..., torch.Tensor]] = {
    "alone": lambda program, w, x, new: program(w, x, new),
    "in a region": lambda program, w, x, new: recompute(lambda x: program(w, x.sin(), new).sin())(x),
    "in a saved call": lambda program, w, x, new: recompute(
        lambda x: no_recompute(lambda x: program(w, x, new))(x.sin()).sin()
    )(x),
    "under save_on_cpu": lambda program, w, x, new: on_cpu(lambda: program(w, x, new)),
    "without grad first": lambda program, w, x, new: (without_grad(lambda: program(w, x, new)), program(w, x, new))[1],
}


def on_cpu(fn: Callable[[], torch.Tensor]) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return fn()


def without_grad(fn: Callable[[], torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return fn()


def train(
    name: str, new: Callable[[], Any], *, inside: str = "alone", grad: bool = True, times: int = 1
) -> list[torch.Tensor]:
    """The result, and the gradients of each of `times` backward calls over one graph."""
    torch.manual_seed(7)
    w, x = Weights(), rand(2, 3, 8, grad=grad)
    y = INSIDE[inside](PROGRAMS[name], w, x, new)
    loss = y.square().mean()
    leaves = [leaf for leaf in (x, *w.parameters()) if leaf.requires_grad]
    found = [y.detach()]
    for i in range(times):
        grads = torch.autograd.grad(loss, leaves, retain_graph=i + 1 < times, allow_unused=True)
        found += [torch.zeros(()) if g is None else g for g in grads]
    return found


def assert_same(ours: list[torch.Tensor], plain: list[torch.Tensor]) -> None:
    assert len(ours) == len(plain)
    for a, b in zip(ours, plain, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", PROGRAMS)
@for_each(inside=INSIDE, grad=[True, False])
def test_gradients_are_those_of_the_plain_program(name: str, inside: str, grad: bool) -> None:
    """Results and gradients are the plain program's to the last bit, wherever it stands."""
    # the plain program goes through the same surroundings, so that random numbers are drawn alike
    assert_same(
        train(name, OutputDiscardCheckpoint, inside=inside, grad=grad), train(name, Plain, grad=grad, inside=inside)
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_retained_graph(name: str) -> None:
    """A second backward over the same graph gives the same gradients again."""
    assert_same(train(name, OutputDiscardCheckpoint, times=3), train(name, Plain, times=3))


@pytest.mark.parametrize("name", PROGRAMS)
def test_autograd_grad_touches_nothing_else(name: str) -> None:
    """`autograd.grad` for one parameter computes that one and writes no `.grad`."""
    torch.manual_seed(7)
    w, x = Weights(), rand(2, 3, 8)
    y = PROGRAMS[name](w, x, OutputDiscardCheckpoint)
    (got,) = torch.autograd.grad(y.square().mean(), [x])
    assert torch.equal(got, train(name, Plain)[1])
    assert all(p.grad is None for p in w.parameters())


@pytest.mark.parametrize("name", PROGRAMS)
@for_each(inside=["alone", "in a region", "in a saved call"], way=["backward", "dropped", "never discarded"])
def test_nothing_leaks(name: str, inside: str, way: str) -> None:
    """After backward, after a graph that is dropped, and without the discard, no byte is left; no collector needed."""

    class Undiscarded(OutputDiscardCheckpoint):
        def discard_output_and_register_recompute(self, hook_tensor: torch.Tensor) -> None:
            pass

    torch.manual_seed(7)
    w, x = Weights(), rand(2, 3, 8)
    new = Undiscarded if way == "never discarded" else OutputDiscardCheckpoint
    with measure() as watched:
        y = INSIDE[inside](PROGRAMS[name], w, x, new)
        if way != "dropped":
            y.sum().backward()
        del y
        x.grad = None
        w.zero_grad(set_to_none=True)
    assert watched.live_bytes == 0


@pytest.mark.parametrize(
    ("fn", "consumer", "kept"),
    [
        pytest.param(lambda x: x * 2, lambda h: h.sin(), 0, id="one tensor"),
        pytest.param(lambda x: (x * 2).sin().cos(), lambda h: h.sin() + h.cos(), 0, id="several saves of it"),
        pytest.param(lambda x: x.softmax(-1), lambda h: h.square(), 0, id="an operation that saves its output"),
        pytest.param(lambda x: x * 2, lambda h: h.view(-1).sin() + h.t().cos().t().reshape(-1), 0, id="views of it"),
        pytest.param(lambda x: (x * 2, x * 3), lambda h: h[0] * h[1], 0, id="two outputs"),
        pytest.param(lambda x: x * 2, lambda h: h.sin().sin(), 1, id="what the consumer makes itself"),
        pytest.param(lambda x: x.view(-1), lambda h: h.sin(), 0, id="a view of the input"),
    ],
)
def test_what_is_kept_between_forward_and_backward(fn: Any, consumer: Any, kept: int) -> None:
    """Between forward and backward the output costs nothing; what the consumer makes itself stays."""
    side = 64
    x = rand(side, side)
    with measure() as watched:
        odc = OutputDiscardCheckpoint()
        h = odc.checkpoint(fn, x)
        y = consumer(h)
        odc.discard_output_and_register_recompute(y)
        del h
        assert watched.live_bytes == y.nbytes + kept * 4 * side * side
        y.sum().backward()


def test_chain_keeps_its_first_input_only() -> None:
    """In a chain of discarded outputs none is kept, whatever the order of the discards."""
    x = rand(64, 64)
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        with measure() as watched:
            odcs = [OutputDiscardCheckpoint() for _ in range(3)]
            h = x
            for odc in odcs:
                h = odc.checkpoint(lambda h: (h * 2).sin(), h)
            y = h.sum(0).exp() + h.cos().sum(0)
            for i in order:
                odcs[i].discard_output_and_register_recompute(y)
            del h
            assert watched.live_bytes <= 3 * y.nbytes
            y.sum().backward()


def test_each_region_runs_once_more() -> None:
    """In a chain each function runs once in forward and once in backward; the consumers run once."""
    runs: list[str] = []
    x = rand(4, 4)

    def counting(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        def fn(h: torch.Tensor) -> torch.Tensor:
            runs.append(name)
            return (h * 2).sin()

        return fn

    first, second = OutputDiscardCheckpoint(), OutputDiscardCheckpoint()
    b = second.checkpoint(counting("b"), first.checkpoint(counting("a"), x))
    runs.append("consumer")
    y = b.cos()
    first.discard_output_and_register_recompute(y)
    second.discard_output_and_register_recompute(y)
    y.sum().backward()
    assert runs == ["a", "b", "consumer", "a", "b"]  # b's replay starts with what a's rebuilds


def test_peak_of_the_reference_block() -> None:
    """In backward the rebuilt output dies with the consumer's node: the peak is that of one region through both."""

    def stack(block: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> int:
        torch.manual_seed(0)
        layers = nn.ModuleList(
            nn.ModuleList([nn.Linear(16, 256, bias=False), nn.Linear(256, 16, bias=False)]) for _ in range(4)
        )
        x = rand(2, 64, 16)
        with measure(layers) as watched:
            y = x
            for layer in layers:
                y = block(layer, y)
            y.square().mean().backward()
        return watched.peak_bytes

    def ours(layer: Any, x: torch.Tensor) -> torch.Tensor:
        odc = OutputDiscardCheckpoint()
        y = layer[1](odc.checkpoint(lambda x: F.silu(layer[0](x)), x))
        odc.discard_output_and_register_recompute(y)
        return y

    together = stack(lambda layer, x: recompute(lambda x: layer[1](F.silu(layer[0](x))))(x))
    assert stack(ours) == together
    assert together < 0.6 * stack(lambda layer, x: layer[1](F.silu(layer[0](x))))


def test_input_of_a_plain_region_is_dropped_too() -> None:
    """The input of a region that follows is rebuilt as well: `checkpoint` after a discarded projection."""
    x = rand(64, 64)
    with measure() as watched:
        odc = OutputDiscardCheckpoint()
        h = odc.checkpoint(lambda x: x * 2, x)
        y = checkpoint(lambda h: h.sin().exp(), h)
        odc.discard_output_and_register_recompute(y)
        del h
        assert watched.live_bytes == y.nbytes
        y.sum().backward()
    expected = (2 * x).cos() * (2 * x).sin().exp() * 2
    torch.testing.assert_close(x.grad, expected.detach())


def test_subsequent_change_of_a_late_input_is_an_error() -> None:
    """An output that is not discarded in the end, and changed in place, is noticed by the region that took it."""
    odc, x = OutputDiscardCheckpoint(), rand(4)
    h = odc.checkpoint(lambda x: x * 2, x)
    y = recompute(lambda h: h.sin().exp())(h)
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(ChangedError, match=r"an argument of .*lambda.* has been changed in place"):
        y.sum().backward()


def test_change_of_an_output_before_it_is_discarded_is_an_error() -> None:
    """An output that was changed in place is not dropped: its rebuilt values are not those that its consumer saved."""
    odc, x = OutputDiscardCheckpoint(), rand(4)
    h = odc.checkpoint(lambda x: x * 2, x)
    with torch.no_grad():
        h.add_(1)
    y = h.sin()
    with pytest.raises(ChangedError, match=r"the output of .* has been changed in place since"):
        odc.discard_output_and_register_recompute(y)


def test_without_grad_the_function_is_called_plainly() -> None:
    """Under `no_grad`, and where nothing requires grad, both calls do nothing."""
    odc, x = OutputDiscardCheckpoint(), rand(3)
    with torch.no_grad():
        h = odc.checkpoint(torch.sin, x)
        odc.discard_output_and_register_recompute(h)
    frozen = x.detach()
    h = odc.checkpoint(torch.sin, frozen)
    odc.discard_output_and_register_recompute(h.cos())
    assert torch.equal(h, frozen.sin())


def test_clear_leaves_a_plain_region() -> None:
    """After `clear` the output is held by no one but its consumers, and gradients are right."""
    odc, x = OutputDiscardCheckpoint(), rand(3)
    h = odc.checkpoint(lambda x: x.sin().exp(), x)
    ref = weakref.ref(h)
    odc.clear()
    y = h.sum()
    del h
    assert ref() is None
    y.backward()
    torch.testing.assert_close(x.grad, (x.cos() * x.sin().exp()).detach())


def test_error_in_the_function_leaves_nothing() -> None:
    """An exception in the function passes through, and the object can be used again."""
    odc, x = OutputDiscardCheckpoint(), rand(3)
    with pytest.raises(ZeroDivisionError):
        odc.checkpoint(lambda x: x.sin() / (1 // 0), x)
    y = odc.checkpoint(torch.sin, x).exp()
    odc.discard_output_and_register_recompute(y)
    y.sum().backward()
    torch.testing.assert_close(x.grad, (x.cos() * x.sin().exp()).detach())


def test_failed_discard_leaves_a_right_region() -> None:
    """A hook tensor that does not depend on the output is refused, and the gradient is right all the same."""
    odc, x = OutputDiscardCheckpoint(), rand(3)
    y = odc.checkpoint(torch.sin, x).exp()
    with pytest.raises(ArgumentError, match="not computed from the output"):
        odc.discard_output_and_register_recompute(x * 2)
    y.sum().backward()
    torch.testing.assert_close(x.grad, (x.cos() * x.sin().exp()).detach())


def test_compiled_without_a_break() -> None:
    """Inside `torch.compile` both calls are traced: no graph break, the same gradients."""

    def run(x: torch.Tensor, new: Callable[[], Any]) -> torch.Tensor:
        odc = new()
        y = odc.checkpoint(lambda x: x.sin().exp(), x).cos()
        odc.discard_output_and_register_recompute(y)
        return y

    x = rand(3)
    compiled = torch.compile(lambda x: run(x, OutputDiscardCheckpoint), fullgraph=True, backend="aot_eager")
    (ours,) = torch.autograd.grad(compiled(x).sum(), [x])
    (plain,) = torch.autograd.grad(run(x, Plain).sum(), [x])
    torch.testing.assert_close(ours, plain)


class Twice(nn.Module):
    """A block used twice, and one that is not used at all."""

    def __init__(self, new: Callable[[], Any], unused: bool) -> None:
        super().__init__()
        self.w, self.new = Weights(), new
        if unused:
            self.unused = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            h = activation(self.w, x, self.new)
            x = norm_attention(self.w, h, self.new) + h
        return x + sum((n(x).mean() for n in (self.w.other,)), torch.zeros(()))


@pytest.fixture(scope="module")
def group() -> Any:
    """A process group of one rank: DDP's hooks and buckets are the same."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_ddp(group: Any, options: dict[str, bool]) -> None:
    """Under DDP, with a module used twice and with unused parameters, gradients are the plain model's."""
    torch.manual_seed(7)
    unused = "find_unused_parameters" in options
    model = Twice(OutputDiscardCheckpoint, unused)
    plain = copy.deepcopy(model)
    plain.new = Plain
    ddp = DistributedDataParallel(model, **options)
    x = rand(2, 3, 8)
    for _ in range(3):
        ddp(x).square().mean().backward()
        plain(x).square().mean().backward()
    for (name, a), (_, b) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        if not name.startswith("unused"):
            torch.testing.assert_close(a.grad, b.grad, msg=name)
