"""Tiles: a region per tile of tokens, and gradients summed in one buffer."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from support.models import Made
from support.training import gradients
from torch_recompute import ArgumentError, measure, no_recompute, recompute

WIDTH, FAT, TOKENS = 6, 16, 11


class Mlp(nn.Module):
    """Two products with a bias, the down one without."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, FAT, dtype=dtype)
        self.down = nn.Linear(FAT, WIDTH, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(x)))


class Gated(nn.Module):
    """A gated unit after a norm, with the residual inside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, dtype=torch.float64)
        self.gate = nn.Linear(WIDTH, FAT, bias=False, dtype=torch.float64)
        self.up = nn.Linear(WIDTH, FAT, bias=False, dtype=torch.float64)
        self.down = nn.Linear(FAT, WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Products(nn.Module):
    """Every product that is taken, and some that are not."""

    def __init__(self) -> None:
        super().__init__()
        square = [nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64)) for _ in range(6)]
        self.a, self.b, self.c, self.d, self.e, self.f = square
        self.bias = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        self.matrices = nn.Parameter(torch.randn(2, WIDTH, WIDTH, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = (x @ self.a).sin()
        h = torch.matmul(h, self.b).sin()
        h = h.matmul(self.c).sin()
        h = torch.addmm(self.bias, h.flatten(0, 1), self.d).view_as(h).sin()
        h = torch.mm(h.flatten(0, 1), self.e).view_as(h).sin()
        h = F.linear(h, self.f + self.a).sin()  # a weight that is computed
        h = F.linear(h, self.a).sin()  # a weight used twice, turned the other way
        h = torch.matmul(h, self.matrices).sin()  # one matrix per sequence: not taken
        return h @ self.frozen


def tied() -> nn.Module:
    """One weight up and down."""
    weight = nn.Parameter(torch.randn(FAT, WIDTH, dtype=torch.float64))
    return Made(lambda m, x: torch.tanh(F.linear(x, m.weight)) @ m.weight, weight=weight)


def adapted() -> nn.Module:
    """A frozen weight and a low-rank adapter."""
    base = nn.Linear(WIDTH, WIDTH, dtype=torch.float64).requires_grad_(False)
    a, b = (nn.Linear(*size, bias=False, dtype=torch.float64) for size in ((WIDTH, 2), (2, WIDTH)))
    return Made(lambda m, x: torch.sigmoid(m.base(x) + m.b(m.a(x))), base=base, a=a, b=b)


def inner() -> nn.Module:
    """Saved calls and a region inside a tile."""
    return Made(lambda m, x: recompute(m.second)(no_recompute(m.first)(x).sin()), first=Mlp(), second=Mlp())


def viewed() -> nn.Module:
    """A view of the tokens, as GPT-2's products of `transformers` make one, and of the layout that they have."""
    return Made(lambda m, x: m.mlp(x.view(-1, x.shape[-1])).view(x.shape), mlp=Mlp())


def in_place() -> nn.Module:
    """Activations that change what a product has made."""
    layers = nn.Linear(WIDTH, FAT), nn.ReLU(inplace=True), nn.Linear(FAT, WIDTH, bias=False), nn.SiLU(inplace=True)
    return nn.Sequential(*layers).double()


MODULES: dict[str, Callable[[], nn.Module]] = {
    "changed in place": in_place,
    "a view of the tokens": viewed,
    "mlp": Mlp,
    "gated": Gated,
    "products": Products,
    "tied": tied,
    "adapter": adapted,
    "saved call and region inside": inner,
    "no parameters": nn.Tanh,
}
WRAPPERS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "alone": lambda fn: fn,
    "in a region": lambda fn: recompute(lambda x: fn(x.sin()).sin()),
    "in a saved call": lambda fn: recompute(lambda x: no_recompute(fn)(x.sin()).sin()),
}


def make(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODULES[name]()


def tokens(grad: bool = True, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(2, TOKENS, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(5)).requires_grad_(grad)


def assert_close(ours: list[torch.Tensor], plain: list[torch.Tensor]) -> None:
    assert len(ours) == len(plain)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("tiles", [1, 2, 4, TOKENS, 100])
@pytest.mark.parametrize("name", MODULES)
def test_gradients_are_those_of_the_plain_call(name: str, tiles: int, wrap: str) -> None:
    """Results and gradients equal the plain call's to the order of a sum, also where tiles are uneven."""
    module, wrapped = make(name), WRAPPERS[wrap]
    plain = gradients(module, tokens(), run=wrapped(module) if wrap == "alone" else lambda x: module(x.sin()).sin())
    assert_close(gradients(module, tokens(), run=wrapped(recompute(module, tiles=tiles))), plain)


@pytest.mark.parametrize("name", MODULES)
def test_input_without_grad_trains_the_parameters(name: str) -> None:
    """An input that needs no gradient is cut all the same, and every parameter gets its own."""
    module = make(name)
    if not any(p.requires_grad for p in module.parameters()):
        assert not recompute(module, tiles=3)(tokens(grad=False)).requires_grad
        return
    assert_close(
        gradients(module, tokens(grad=False), run=recompute(module, tiles=3)), gradients(module, tokens(grad=False))
    )


@pytest.mark.parametrize("dim", [0, 1, -2, -3])
def test_tile_dim_counts_from_either_end(dim: int) -> None:
    """Tokens may lie in any dimension but the one that is mixed."""
    module, x = make("gated"), tokens()
    assert_close(gradients(module, x, run=recompute(module, tiles=2, tile_dim=dim)), gradients(module, tokens()))


def test_second_derivatives_are_those_of_the_plain_call() -> None:
    """`create_graph=True` goes through products, slices and results."""

    def second(fn: Callable[..., Any], module: nn.Module) -> list[torch.Tensor]:
        x = tokens()
        leaves = [x, *module.parameters()]
        first = torch.autograd.grad(fn(x).sin().sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))

    module = make("mlp")
    assert_close(second(recompute(module, tiles=3), module), second(module, module))


def test_retained_graph_gives_the_same_gradients_again() -> None:
    """Buffers belong to one backward call: the second starts from nothing."""
    module, x = make("gated"), tokens()
    leaves = [x, *module.parameters()]
    loss = recompute(module, tiles=4)(x).square().sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    again = torch.autograd.grad(loss, leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert_close(list(again), gradients(module, tokens())[1:])


@pytest.mark.parametrize("wanted", [0, 1, 2, 3])
def test_one_gradient_alone(wanted: int) -> None:
    """`autograd.grad` for one leaf gives that one and leaves `.grad` of the others alone."""
    module, x = make("mlp"), tokens()
    leaves = [x, *module.parameters()]
    (got,) = torch.autograd.grad(recompute(module, tiles=3)(x).square().sum(), [leaves[wanted]])
    assert_close([got], [gradients(module, tokens())[1 + wanted]])
    assert all(leaf.grad is None for leaf in leaves)


def test_each_parameter_receives_one_gradient() -> None:
    """A hook on a parameter runs once per backward, whatever the number of tiles: DDP counts on it."""
    module, x = make("gated"), tokens()
    counts: dict[str, int] = {}

    def counting(name: str) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            counts[name] = counts.get(name, 0) + 1

        return hook

    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(counting(name))
    for _ in range(2):
        recompute(module, tiles=5)(x).sum().backward()
    assert counts == dict.fromkeys(dict(module.named_parameters()), 2)


def test_several_arguments_and_results() -> None:
    """Positional tensors are cut, keyword ones are whole, every result is put together, integers included."""

    def fn(x: torch.Tensor, gate: torch.Tensor, factor: float, *, table: torch.Tensor) -> dict[str, Any]:
        y = (x @ table) * gate * factor
        return {"y": y, "both": (y.sum(-1), y.argmax(-1))}

    x, gate, table = tokens(), tokens(grad=False), torch.randn(WIDTH, WIDTH, dtype=torch.float64, requires_grad=True)
    plain, ours = fn(x, gate, 2.0, table=table), recompute(fn, tiles=4)(x, gate, 2.0, table=table)
    assert_close([ours["y"], *ours["both"]], [plain["y"], *plain["both"]])
    assert not ours["both"][1].requires_grad
    for result in (plain, ours):
        result["loss"] = result["y"].sin().sum() + result["both"][0].square().sum()
    assert_close(
        list(torch.autograd.grad(ours["loss"], [x, table])), list(torch.autograd.grad(plain["loss"], [x, table]))
    )


def test_unused_result_is_no_harm() -> None:
    """A result that the loss does not use sends no gradient back."""
    module, x = make("mlp"), tokens()
    y, _ = recompute(lambda x: (module(x), module(x.sin())), tiles=3)(x)
    assert_close(list(torch.autograd.grad(y.square().sum(), [x])), gradients(module, tokens())[1:2])


def test_dropout_is_drawn_again_as_it_was() -> None:
    """The replay of each tile draws its own masks: the gradient is that of the mask that was used."""
    x = tokens()
    torch.manual_seed(1)
    y = recompute(lambda x: F.dropout(x.sin().exp(), 0.5), tiles=4)(x)
    kept = y.detach() != 0
    (grad,) = torch.autograd.grad(y.sum(), [x])
    expected = torch.where(kept, 2 * x.detach().sin().exp() * x.detach().cos(), 0.0)
    torch.testing.assert_close(grad, expected)
    assert 0 < int(kept.sum()) < kept.numel()


@pytest.mark.parametrize("cache", [True, False])
def test_autocast(cache: bool) -> None:
    """Under autocast the products run in bfloat16, and weights get float32 gradients that are summed in float32."""
    torch.manual_seed(0)
    module = Mlp(torch.float32)
    x = tokens(dtype=torch.float32)
    seen: list[torch.dtype] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = module(x)
        seen.append(y.dtype)
        return y

    def run(wrapped: Callable[..., Any]) -> list[torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
            return gradients(module, x, run=wrapped)

    plain, ours = run(fn), run(recompute(fn, tiles=4))
    assert set(seen) == {torch.bfloat16}
    for a, b in zip(ours, plain, strict=True):
        assert a.dtype == b.dtype
        assert (a - b).norm() <= 0.02 * b.norm()
    assert torch.equal(ours[0], plain[0])


def test_runs_and_flops() -> None:
    """Each tile runs once in forward and once in backward, and the last product is not computed again."""
    module, x = make("mlp"), tokens()
    runs: list[int] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        runs.append(x.shape[1])
        return module(x)

    def flops(fn: Callable[..., Any]) -> int:
        with FlopCounterMode(display=False) as counter:
            fn(x).square().sum().backward()
        return counter.get_total_flops()

    plain = flops(module)
    product = 2 * 2 * TOKENS * WIDTH * FAT
    assert plain == 6 * product
    assert flops(recompute(fn, tiles=4)) == 7 * product
    assert runs == [2, 3, 3, 3, 3, 3, 3, 2]


def test_peak_holds_one_tile_and_one_gradient_of_each_weight() -> None:
    """What is fat lives for one tile; no weight gradient is ever alive twice."""
    width, fat, length, tiles = 32, 1024, 1024, 8
    up, down = nn.Linear(width, fat, bias=False), nn.Linear(fat, width, bias=False)
    weights = nn.ModuleList([up, down])
    x = torch.randn(1, length, width, requires_grad=True)
    with measure(weights) as watched:
        watched.track(x)
        y = recompute(lambda x: down(up(x)), tiles=tiles)(x)
        y.sum().backward(torch.tensor(1.0))
    weight, row, tile = 4 * width * fat, 4 * width * length, 4 * fat * length // tiles
    # weights and gradients; x, y and their gradients; one tile of h and its gradient; the loss and the like
    assert watched.peak_bytes <= 4 * weight + 4 * row + 2 * tile + 64
    assert watched.by_category["gradients"] == 2 * weight


def test_a_partial_in_tiles() -> None:
    """What a partial holds is not cut, and its closure is that of forward."""
    weight, scale = torch.randn(WIDTH, dtype=torch.float64), 2.0
    fn = functools.partial(lambda weight, x, *, power: (x * weight * scale).sin() ** power, weight, power=2)
    x = tokens()
    y = recompute(fn, tiles=4)(x)
    plain = fn(x)
    scale = 3.0
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(plain.sum(), x)[0])


@pytest.mark.parametrize("layout", ["channels last", "transposed"])
def test_a_tile_is_laid_out_as_the_whole(layout: str) -> None:
    """A tile is copied where it has gaps, and its dimensions keep their order in memory."""
    x = torch.randn(2, 4, 6, 8)
    x = x.to(memory_format=torch.channels_last) if layout == "channels last" else x.transpose(0, 2)
    seen: list[tuple[bool, tuple[int, ...]]] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        seen.append((x.stride() == torch.empty_like(x).stride(), tuple(x.stride())))
        return x.sin()

    for dim in range(4):
        seen.clear()
        recompute(fn, tiles=2, tile_dim=dim)(x.clone().requires_grad_()).sum().backward()
        order = sorted(range(4), key=x.stride().__getitem__)
        assert seen == [(True, stride) for _, stride in seen]
        assert {tuple(sorted(range(4), key=stride.__getitem__)) for _, stride in seen} == {tuple(order)}


def test_a_copied_tile_exists_for_one_tile_at_a_time() -> None:
    """The copy that gives a tile no gaps is not kept for backward: the peak holds one."""
    x = torch.randn(2, 1024, 256, requires_grad=True)
    with measure() as figures:
        recompute(torch.sin, tiles=64, tile_dim=1)(x).sum().backward()
    assert figures.peak_bytes < 3.2 * x.nbytes  # the tokens, the results and their gradient


def test_no_grad_is_the_plain_call() -> None:
    """Without grad nothing is cut: the function is called once, with what it was given."""
    calls: list[Any] = []
    x = tokens()
    with torch.no_grad():
        recompute(lambda x: calls.append(x) or x, tiles=4)(x)
    assert len(calls) == 1
    assert calls[0] is x


def test_nothing_leaks() -> None:
    """After backward, and after a graph that is dropped, no tensor of the call is alive, without the collector."""
    for backward in (True, False):
        module, x = make("gated"), tokens()
        made: list[weakref.ref[torch.Tensor]] = []

        def fn(x: torch.Tensor, module: nn.Module = module, made: list[Any] = made) -> torch.Tensor:
            y = module(x)
            made.append(weakref.ref(y))
            return y

        with measure() as watched:
            y = recompute(fn, tiles=4)(x)
            if backward:
                y.sum().backward()
            del y
            x.grad = None
            module.zero_grad(set_to_none=True)
        assert watched.live_bytes == 0
        assert all(ref() is None for ref in made)


def test_failed_backward_leaves_the_next_one_right() -> None:
    """An exception half way through the tiles leaves nothing in the buffers of the next backward call."""
    module, x = make("mlp"), tokens()
    fail = [True]

    class Trip(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            if fail.pop() if fail else False:
                raise ZeroDivisionError
            return grads[0]

    loss = recompute(lambda x: module(Trip.apply(x)), tiles=3)(x).square().sum()
    leaves = [x, *module.parameters()]
    with pytest.raises(ZeroDivisionError):
        torch.autograd.grad(loss, leaves, retain_graph=True)
    assert_close(list(torch.autograd.grad(loss, leaves)), gradients(module, tokens())[1:])


@pytest.mark.parametrize("length", [0, 1])
def test_few_tokens(length: int) -> None:
    """Fewer tokens than tiles make fewer tiles; none at all is one empty tile."""
    module = make("mlp")
    x = torch.ones(2, length, WIDTH, dtype=torch.float64, requires_grad=True)
    assert_close(gradients(module, x, run=recompute(module, tiles=8)), gradients(module, x))


def test_compiled_without_a_break() -> None:
    """Inside `torch.compile` tiles are traced: no graph break, the same gradients."""
    module, x = make("mlp"), tokens()
    tiled = recompute(module, tiles=3)
    compiled = torch.compile(lambda x: tiled(x), fullgraph=True, backend="aot_eager")
    assert_close(gradients(module, x, run=compiled), gradients(module, tokens()))


@dataclass(frozen=True)
class Store:
    """A store that counts."""

    put_bytes: list[int]

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        self.put_bytes.append(tensor.nbytes)
        return tensor.detach().clone()

    def get(self, handle: torch.Tensor) -> torch.Tensor:
        return handle


def test_inputs_store_gets_the_tiles() -> None:
    """A store for inputs is given each tile, not the whole once per tile."""
    module, x, store = make("mlp"), tokens(), Store([])
    assert_close(gradients(module, x, run=recompute(module, tiles=3, inputs=store)), gradients(module, tokens()))
    assert sum(store.put_bytes) == x.nbytes


MIXING: dict[str, tuple[Callable[[], nn.Module], int, bool]] = {
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, batch_first=True, dropout=0.0), 1, True),
    "attention, tokens first": (lambda: nn.TransformerEncoderLayer(8, 2, dropout=0.0), 0, True),
    "attention, in tiles of sequences": (
        lambda: nn.TransformerEncoderLayer(8, 2, batch_first=True, dropout=0.0),
        0,
        False,
    ),
    "recurrence": (lambda: nn.GRU(8, 8, batch_first=True), 1, True),
    "batch norm": (lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(4)), 0, True),
    "an MLP": (lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)), 1, False),
}


@pytest.mark.parametrize("kind", MIXING)
def test_what_mixes_tokens_is_refused_in_tiles(kind: str) -> None:
    """Modules known to compute from several entries of the dimension are refused; others have their gradients."""
    build, dim, mixes = MIXING[kind]
    module = build()
    if mixes:
        with pytest.raises(ArgumentError, match=r"computes from several"):
            recompute(module, tiles=2, tile_dim=dim)
        return
    found = []
    for fn in (module, recompute(module, tiles=2, tile_dim=dim)):
        module.zero_grad()
        fn(torch.linspace(-1, 1, 4 * 6 * 8).view(4, 6, 8)).square().sum().backward()
        found.append([p.grad for p in module.parameters()])
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(*found, strict=True))
