"""Saved calls chosen by kind: products and attention are kept, routing decisions are carried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import BaseTorchFunctionMode, TorchFunctionMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from torch_recompute import Choice, Plan, apply, doing_recompute, no_recompute, recompute
from torch_recompute.plan.calls import Carry, KeepCalls, kind_of


def rand(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(4)).requires_grad_()


W, STACK, KERNEL, FEW = (nn.Parameter(torch.randn(*size)) for size in ((4, 4), (2, 4, 4), (4, 4, 1), (2, 4)))


class Count(TorchFunctionMode):
    """Counts the calls of one function that reach torch, in forward and in replays."""

    def __init__(self, func: Callable[..., Any]) -> None:
        super().__init__()
        self.func, self.calls = func, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is self.func
        return func(*args, **(kwargs or {}))


KEPT = {
    "linear": ("product", lambda x: F.linear(x, W), F.linear),
    "matmul": ("product", lambda x: torch.matmul(x, W), torch.matmul),
    "at sign": ("product", lambda x: x @ W, torch.Tensor.matmul),
    "method": ("product", lambda x: x.matmul(W), torch.Tensor.matmul),
    "addmm": ("product", lambda x: torch.addmm(x[0], x, W), torch.addmm),
    "stacked": ("product", lambda x: torch.bmm(x.expand(2, 4, 4), STACK), torch.bmm),
    "one of a stack": ("product", lambda x: x @ STACK[1], torch.Tensor.matmul),
    "transposed": ("product", lambda x: torch.mm(x, W.t()), torch.mm),
    "convolution": ("product", lambda x: F.conv1d(x[None], KERNEL), F.conv1d),
    "einsum": ("product", lambda x: torch.einsum("ab,bc->ac", x, W), torch.einsum),
    "to fewer": ("down", lambda x: F.linear(x, FEW), F.linear),
    "to fewer, by columns": ("down", lambda x: x @ FEW.t(), torch.Tensor.matmul),
    "to fewer, as a product": ("product", lambda x: F.linear(x, FEW), F.linear),
    "scores": ("matmul", lambda x: x @ x.cos(), torch.Tensor.matmul),
    "attention": (
        "attention",
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
        F.scaled_dot_product_attention,
    ),
}


@pytest.mark.parametrize(
    ("kind", "func", "counts"),
    [
        ("product", torch.nn.functional.linear, (2, 0)),
        ("attention", F.scaled_dot_product_attention, (1, 0)),
        ("attention", torch.nn.functional.linear, (2, 2)),
        ("matmul", torch.nn.functional.linear, (2, 2)),
    ],
)
def test_calls_inside_multi_head_attention_are_kept(kind: str, func: Any, counts: tuple[int, int]) -> None:
    """`nn.MultiheadAttention` is one function to torch; the products and the attention in it are found all the same."""
    torch.manual_seed(0)
    attention, x = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True), rand(2, 3, 8)
    seen: list[int] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        h = x.sin()
        with Count(func) as count, KeepCalls([kind]):
            try:
                y, _ = attention(h, h, h, need_weights=False)
            finally:
                seen.append(count.calls)
        return y.sin()

    grads = []
    for call in (recompute(body), body):
        torch.manual_seed(1)
        grads.append(torch.autograd.grad(call(x).square().sum(), [x, *attention.parameters()]))
    assert all(map(torch.equal, *grads))
    assert tuple(seen[:2]) == counts


@pytest.mark.parametrize("name", KEPT)
def test_a_kept_call_runs_once(name: str) -> None:
    """Inside a region a call of the kind runs in forward only, and gradients are the plain ones."""
    kind, call, func = KEPT[name]
    x = rand(4, 4)

    def body(x: torch.Tensor, kinds: tuple[str, ...] = (kind,)) -> torch.Tensor:
        with Count(func) as count, KeepCalls(kinds):
            y = call(x.sin()).cos()
        seen.append((doing_recompute(), count.calls))
        return y.sin().exp()

    for kinds, calls in (((kind,), 0), ((), 1)):
        seen: list[tuple[bool, int]] = []
        y = recompute(lambda x, kinds=kinds: body(x, kinds))(x)
        (ours,) = torch.autograd.grad(y.sum(), [x])
        (plain,) = torch.autograd.grad(call(x.sin()).cos().sin().exp().sum(), [x])
        assert torch.equal(ours, plain)
        assert seen == [(False, 1), (True, calls)]


@pytest.mark.parametrize(
    ("narrows", "call"),
    [
        (True, lambda x: F.linear(x, FEW)),
        (True, lambda x: F.linear(input=x, weight=FEW)),
        (True, lambda x: torch.addmm(x[0, :2], x, FEW.t())),
        (True, lambda x: torch.bmm(x.expand(2, 4, 4), STACK[:, :, :2])),
        (True, lambda x: FEW @ x),
        (False, lambda x: F.linear(x[:, :2], FEW.t())),
        (False, lambda x: x[:, :2] @ FEW),
        (False, lambda x: FEW.t() @ x[:2]),
        (False, lambda x: F.linear(x, W)),
        (False, lambda x: F.conv1d(x[None], KERNEL[:2])),
        (False, lambda x: torch.einsum("ab,cb->ac", x, FEW)),
        (False, lambda x: F.linear(x, FEW[0])),
        (False, lambda x: x @ FEW.detach().t()),
    ],
)
def test_a_product_that_narrows_is_known_by_its_matrix(narrows: bool, call: Callable[[torch.Tensor], Any]) -> None:
    """Of linear layers and products with a matrix those are meant whose result is narrower than what goes through."""

    class Seen(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kinds.append(kind_of(func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    kinds: list[str | None] = []
    with Seen():
        call(rand(4, 4))
    assert ("down" in kinds) == narrows


def test_a_product_without_a_parameter_is_not_kept() -> None:
    """Products of activations, such as attention written by hand, are not of the kind `@product`."""
    x = rand(4, 4)

    def body(x: torch.Tensor) -> torch.Tensor:
        with Count(torch.Tensor.matmul) as count, KeepCalls(["product"]):
            y = x.sin() @ x.cos()
        calls.append(count.calls)
        return y.sin().exp()

    calls: list[int] = []
    recompute(body)(x).sum().backward()
    assert calls == [1, 1]


def carried(fn: Callable[[torch.Tensor], Any]) -> tuple[Any, Any, torch.Tensor]:
    """What a decision gives in forward and in a replay whose scores are others, and the gradient of the scores."""
    found: list[Any] = []
    noise = [0.0, 5.0]
    x = torch.tensor([[0.1, 0.2, 0.3, 0.15], [3.0, 1.0, 2.0, 2.5]], requires_grad=True)
    tilt = torch.tensor([1.0, 0.0, -1.0, 0.5])

    def body(x: torch.Tensor) -> torch.Tensor:
        with Carry():
            scores = x + tilt * noise.pop(0)
            decided = fn(scores)
            found.append(decided)
            values = decided[0] if isinstance(decided, tuple) else scores
            return (values * values).exp()

    y = recompute(body, check="metadata")(x)
    (grad,) = torch.autograd.grad(y.sum(), [x])
    return found[0], found[1], grad


@pytest.mark.parametrize(
    "fn",
    [
        lambda s: s.argmax(-1),
        lambda s: torch.argmin(s, -1),
        lambda s: s.argsort(dim=-1, descending=True),
        lambda s: torch.multinomial(s.detach().softmax(-1), 2),
        lambda s: (s > 1).nonzero(),
        lambda s: torch.where(s > 1),
        lambda s: torch.bincount((s > 1).flatten().long()),
        lambda s: torch.unique((s.detach() * 10).round()),
        lambda s: s.sum().item(),
        lambda s: s.tolist(),
        lambda s: bool(s.sum() > 6),
        lambda s: int(s.argmax()),
        lambda s: s.topk(2).indices,
        lambda s: torch.topk(s, 2, dim=0)[1],
        lambda s: torch.sort(s, dim=0, descending=True)[1],
    ],
)
def test_a_decision_is_that_of_the_forward(fn: Callable[[torch.Tensor], Any]) -> None:
    """A replay whose scores are far from the forward's decides as the forward did."""
    then, now, _ = carried(lambda s: fn(s) if not isinstance(fn(s), tuple) else list(fn(s)))
    for a, b in zip(then, now, strict=True) if isinstance(then, list) else [(then, now)]:
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize(
    "fn",
    [
        lambda s: torch.topk(s, 2),
        lambda s: s.topk(2, -1, True, False),
        lambda s: torch.topk(input=s, k=1, dim=0),
        lambda s: s.topk(3, largest=False),
        lambda s: torch.sort(s),
        lambda s: s.sort(0, True),
        lambda s: s.sort(dim=1, stable=True),
    ],
)
def test_scores_keep_their_gradient(fn: Callable[[torch.Tensor], Any]) -> None:
    """Values, names and the gradient of the scores are those of the plain call, to the last bit."""

    def run(mode: Callable[[], Any]) -> tuple[Any, torch.Tensor]:
        x = rand(3, 5)
        with mode():
            result = fn(x.sin())
        (grad,) = torch.autograd.grad(
            (result.values * torch.arange(1.0, 1 + result.values.numel()).view_as(result.values)).sum(), [x]
        )
        return result, grad

    (ours, of_ours), (plain, of_plain) = run(Carry), run(BaseTorchFunctionMode)
    assert torch.equal(ours.values, plain.values)
    assert torch.equal(ours.indices, plain.indices)
    assert torch.equal(of_ours, of_plain)
    assert type(ours) is type(plain)


def test_a_router_may_change_what_was_decided() -> None:
    """Indices and values may be changed in place, as routers do when they normalise."""

    def body(x: torch.Tensor) -> torch.Tensor:
        with Carry():
            values, indices = torch.topk(x.softmax(-1), 2)
            values /= values.sum(-1, keepdim=True)
            indices += 1
            return values * indices.exp()

    x = rand(3, 5)
    (ours,) = torch.autograd.grad(recompute(body)(x).sum(), [x])
    (plain,) = torch.autograd.grad(body(x).sum(), [x])
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("flips", [True, False])
def test_a_flipped_expert_is_what_carrying_prevents(flips: bool) -> None:
    """A router whose scores tie and differ a little in the replay sends tokens elsewhere, unless it is carried."""
    torch.manual_seed(0)
    experts = nn.Parameter(torch.randn(4, 6, 6))
    x, gate = rand(8, 6), nn.Parameter(torch.zeros(6, 4))
    noise = [torch.zeros(4), torch.tensor([0.0, 1e-3, 2e-3, 3e-3])]

    def moe(x: torch.Tensor) -> torch.Tensor:
        weights, chosen = torch.topk((x @ gate + noise.pop(0)).softmax(-1), 1)
        return torch.bmm(x[:, None], experts[chosen[:, 0]])[:, 0] * weights

    def body(x: torch.Tensor) -> torch.Tensor:
        if flips:
            return moe(x)
        with Carry():
            return moe(x)

    plain_noise, noise = noise, [torch.zeros(4)]
    plain = torch.autograd.grad(moe(x).sin().sum(), [experts])[0]
    noise = plain_noise
    ours = torch.autograd.grad(recompute(body)(x).sin().sum(), [experts])[0]
    error = float((ours - plain).norm() / plain.norm())
    assert error > 0.5 if flips else error < 0.01


class Differentiates(nn.Module):
    """Asks for the gradient of its own input, as layers of energies do."""

    def __init__(self) -> None:
        super().__init__()
        self.energy, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (grad,) = torch.autograd.grad(self.energy(x).tanh().square().sum(), x, create_graph=True)
        return self.out(grad) + x


class Checkpoints(Differentiates):
    """Has a checkpoint of torch's inside."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch_checkpoint(lambda x: self.energy(x).tanh().exp(), x, use_reentrant=False)
        assert isinstance(inner, torch.Tensor)
        return self.out(inner).sin()


@pytest.mark.parametrize("keep", ["energy", "out", "@product", "energy@product"])
@pytest.mark.filterwarnings("ignore:.* within saved-tensor hooks that it enters:RuntimeWarning")
@pytest.mark.parametrize("kind", [Differentiates, Checkpoints])
def test_layers_that_run_backward_or_a_checkpoint_themselves(kind: type[nn.Module], keep: str) -> None:
    """A kept call through which a gradient is asked for is made again; one in another checkpoint is left to that."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), kind(), nn.Tanh())
    found: list[list[torch.Tensor | None]] = []
    for planned in (False, True):
        if planned:
            apply(model, Plan((Choice(("1",), (keep,)),)))
        x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        model(x).square().sum().backward()
        found.append([x.grad, *(p.grad for p in model.parameters())])
        model.zero_grad()
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.filterwarnings("ignore:.* within saved-tensor hooks that it enters:RuntimeWarning")
def test_hooks_that_the_function_enters_itself() -> None:
    """What is saved under saved-tensor hooks inside a region goes to them, in forward and replay."""
    packed: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(0)
        return tensor.clone()

    def body(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            z = no_recompute(torch.exp)(y).tanh()
        return z.cos()

    x, y = (torch.linspace(0, 1, 8).requires_grad_() for _ in "xy")
    recompute(body)(x).sum().backward()
    assert len(packed) == 4
    body(y).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    assert torch.equal(x.grad, y.grad)


def tangent_and_gradient(f: Any, x: torch.Tensor) -> torch.Tensor:
    """Forward-mode differentiation, whose tangents have a graph too, with a backward of the result alone after it."""
    with forward_ad.dual_level():
        value, tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x))))
    assert tangent is not None
    seen = tangent.detach()
    del tangent
    return torch.cat([torch.autograd.grad(value.sum(), x)[0].flatten(), seen.flatten()])


TRANSFORMS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).square().sum())(x),
    "vmap of grad": lambda f, x: torch.vmap(torch.func.grad(lambda x: f(x).square().sum()))(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,))[1],
    "jacrev": lambda f, x: torch.func.jacrev(f)(x[0]),
    "vmap": lambda f, x: torch.autograd.grad(torch.vmap(f)(x.requires_grad_()).exp().sum(), x)[0],
    "a dual level": lambda f, x: tangent_and_gradient(f, x.requires_grad_()),
}
PLANNED = [Choice(("0",)), Choice(("0",), ("@product",)), Choice(("0",), ("0",)), Choice(("0", "1"))]
PLANNED += [Choice(("0",), store="host"), Choice(("0",), offload=True)]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("choice", PLANNED, ids=str)
def test_transforms_of_torch_func(choice: Choice, name: str) -> None:
    """Under `torch.func` a planned model computes what it computes without a plan, and a warning says so."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 8), nn.Tanh())
    x = torch.linspace(-1, 1, 32).view(4, 8)
    wanted = TRANSFORMS[name](model, x.clone())
    apply(model, Plan((choice,)))
    with pytest.warns(RuntimeWarning, match="inside a transform of torch.func"):
        got = TRANSFORMS[name](model, x.clone())
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("by_name", [True, False], ids=["by name", "by position"])
def test_a_kept_attention_with_dropout_leaves_the_generator_as_it_did(by_name: bool) -> None:
    """A dropout behind it draws the same mask in the replay, however the attention was told of its own dropout."""

    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)[None, None]
            dropout = {"dropout_p": 0.3} if by_name else {}
            args = () if by_name else (None, 0.3)
            return F.dropout(F.scaled_dot_product_attention(y, y, y, *args, **dropout).exp(), 0.5)[0, 0]

    torch.manual_seed(0)
    model = nn.Sequential(Layer(4, 4))
    found: list[torch.Tensor] = []
    for plan in (Plan(()), Plan((Choice(("0",), ("@attention",)),))):
        handle = apply(model, plan)
        torch.manual_seed(1)
        found.append(torch.autograd.grad(model(rand(8, 4)).sum(), model[0].weight)[0])
        handle.remove()
    assert torch.equal(*found)
