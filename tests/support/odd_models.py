"""Models that a planner may stumble over, each with its call and what is special about it.

`ODD` is the table of `tests/planner/test_odd_models.py`: a row gains every law that stands there. Layers are small and
do what their originals do: sizes that depend on values, kernels that keep memory of their own, weights that are
computed in every forward, layers that are called several times, or whose result is not what they return.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from support.models import InTurn, Made
from torch_recompute import no_recompute, replay

WIDTH = 16
Loss = Callable[[Any], torch.Tensor]
Built = tuple[nn.Module, torch.Tensor, Loss]


def itself(out: torch.Tensor) -> torch.Tensor:
    """The loss of a model that returns it."""
    return out


def mean_square(out: torch.Tensor) -> torch.Tensor:
    """A loss of any output; a nested tensor's is that of its values."""
    return (out.values() if out.is_nested else out).square().mean()


@dataclass(frozen=True)
class Odd:
    """A row of the table.

    Attributes:
        make: Returns the model, the tensor of its call, and the loss of its output.
        budgets: Shares for which plans are made.
        options: Of `make_plan`, beside the usual ones.
        chosen: Whether a plan has regions.
        within: The share of a peak by which bytes may differ, where torch's shape-only kernels differ from real ones.
        flops: Whether the plan names the FLOPs of its replays, and PyTorch's counter can count them.
        assumed: How each sentence begins of what a simulation says that it assumes.
        says: What the printed plan must say.
    """

    make: Callable[[], Built]
    budgets: tuple[float, ...] = (0.3,)
    options: dict[str, Any] = field(default_factory=dict)
    chosen: bool = True
    within: float = 0.0
    flops: bool = True
    assumed: tuple[str, ...] = ()
    says: str = ""


class Around(nn.Module):
    """Two linear layers around something."""

    def __init__(self, middle: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(WIDTH, WIDTH), middle, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.middle(self.first(x))
        return self.last(made[0] if isinstance(made, tuple) else made).square().mean()


def around(middle: Callable[[torch.Tensor], Any] | partial[Any], *shape: int, **special: Any) -> Odd:
    """A row of something between two linear layers: a function, or a partial that makes a module."""

    def make() -> Built:
        return Around(middle() if isinstance(middle, partial) else middle), torch.randn(shape), itself

    return Odd(make, **{"chosen": False, **special})


def in_turn(layer: Callable[[], nn.Module], *shape: int, **special: Any) -> Odd:
    """A row of three layers of one kind, one after the other."""
    return Odd(lambda: (nn.Sequential(*(layer() for _ in "abc")), torch.randn(shape), mean_square), **special)


# --- sizes that depend on values, and kernels with memory of their own ---


def batched() -> nn.Module:
    """A batch norm over a view with the channels in front."""
    return Made(lambda m, x: m.norm(x.transpose(1, 2)).transpose(1, 2), norm=nn.BatchNorm1d(WIDTH))


def every_other(x: torch.Tensor) -> torch.Tensor:
    """Picks by a mask made of an activation, which holds for every other one."""
    with torch.no_grad():
        wanted = x.detach().argsort(-1).argsort(-1) % 2 == 0
    return x[wanted].view(*x.shape[:-1], -1).repeat(1, 1, 2)


def unpadded(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Rows that are kept, with as much padding as the longest needs, as Longformer's global attention."""
    lengths = kept.long().sum(1)
    inside = torch.arange(lengths.max()) < lengths[:, None]
    made = x.new_zeros(*inside.shape, x.shape[2])
    made[inside.nonzero(as_tuple=True)] = x[kept.nonzero(as_tuple=True)]
    return made


def first_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows by a mask that is added to scores, made of lengths."""
    mask = (torch.arange(x.shape[1]) < torch.tensor([[300], [40], [512], [7]])).long()
    return unpadded(x, (1.0 - mask) * torch.finfo(x.dtype).min == 0)


def alternating_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows by a mask of unknown values, which holds for every other one."""
    return unpadded(x, (torch.arange(float(4 * 512)) % 2 == 0).view(4, 512))


def matched(x: torch.Tensor) -> torch.Tensor:
    """Rows in an order that a library other than PyTorch chooses."""
    order = x.detach().cpu().numpy().sum((1, 2)).argsort()
    return x[torch.as_tensor(order.copy())]


def positive(x: torch.Tensor) -> torch.Tensor:
    """Matrices that are positive definite."""
    return x @ x.mT + 4 * torch.eye(x.shape[-2])


def complex_layer() -> nn.Module:
    """A layer that takes and returns complex numbers, of a magnitude below one."""
    return nn.Sequential(
        *(nn.Linear(WIDTH, WIDTH, dtype=torch.cfloat) for _ in "ab"), Made(lambda _, x: x / (1 + x.abs()))
    )


def complex_layers() -> Built:
    layers = InTurn(complex_layer() for _ in "abc")
    return (
        Made(lambda m, x: m.layers(x.to(torch.cfloat)).abs().square().mean(), layers=layers),
        torch.randn(4, 8, WIDTH),
        itself,
    )


def narrow() -> nn.Module:
    """A layer that is wide inside."""
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))


def jagged(residual: bool) -> Built:
    """Layers over a batch of sequences of several lengths in one nested tensor."""
    layers = (narrow() for _ in range(6 if residual else 3))
    if residual:
        layers = (Made(lambda m, x: x + m.inner(x), inner=inner) for inner in layers)
    x = torch.nested.nested_tensor_from_jagged(torch.randn(96, WIDTH), torch.tensor([0, 20, 96]))
    return nn.Sequential(*layers), x, mean_square


SQUARE = (4, WIDTH, WIDTH)
LU_SOLVE = "what aten.linalg_lu_solve takes while it runs is not known"
VALUES: dict[str, Odd] = {
    "lstm": around(partial(nn.LSTM, WIDTH, WIDTH, batch_first=True), 4, 8, WIDTH),
    # the gradients of its biases are one tensor for fakes, and two for the kernel
    "lstm of two layers, both ways": around(
        partial(nn.LSTM, WIDTH, WIDTH // 2, 2, bidirectional=True), 8, 4, WIDTH, within=0.005
    ),
    "gru": around(partial(nn.GRU, WIDTH, WIDTH), 8, 4, WIDTH, chosen=True),
    "mask of an activation": around(every_other, 4, 8, WIDTH, assumed=("aten.sort chooses evenly",)),
    "unpadded by lengths": around(first_rows, 4, 512, WIDTH),
    "unpadded by unknown values": around(
        alternating_rows,
        *(4, 512, WIDTH),
        assumed=("aten._to_copy finds every other one true", "aten.nonzero finds every other one true"),
    ),
    "matcher": around(matched, 4, 8, WIDTH, assumed=("Tensor.numpy finds ones",)),
    "cholesky": around(lambda x: torch.linalg.cholesky(positive(x)), *SQUARE),
    "inverse": around(lambda x: torch.linalg.inv(positive(x)), *SQUARE),
    "solve": around(
        lambda x: torch.linalg.solve(positive(x), x),
        *SQUARE,
        assumed=("aten._linalg_solve_ex finds ones", LU_SOLVE),
    ),
    "determinant": around(
        lambda x: x * torch.linalg.slogdet(positive(x))[1][:, None, None],
        *SQUARE,
        assumed=("aten._linalg_slogdet finds ones", LU_SOLVE),
    ),
    "complex layers": Odd(complex_layers),
    "batch norm of a view": around(partial(batched), 4, 50, WIDTH),
    "spectral norm": around(
        partial(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))),
        *(4, 8, WIDTH),
        chosen=True,
        assumed=("aten.div.out finds ones in middle.parametrizations.weight.0",),
    ),
    "spectral norm by hooks": around(
        partial(lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))),
        *(4, 8, WIDTH),
        chosen=True,
        assumed=("aten.div.out finds ones in middle",),
    ),
    "jagged batch": Odd(partial(jagged, False), flops=False),
    "jagged batch between residual layers": Odd(partial(jagged, True), flops=False),
}


# --- layers that are called in unusual ways ---


class Shared(nn.Module):
    """A block that is called several times, in between two linear layers or not."""

    def __init__(self, *, alone: bool, attends: bool = False) -> None:
        super().__init__()
        self.first, self.last = (nn.Identity() if alone else nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.block = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        if attends:
            self.block = nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(5):
            x = x + self.block(x)
        return self.last(x).square().mean()


def shared(**how: bool) -> Odd:
    return Odd(lambda: (Shared(**{"alone": False, **how}), torch.randn(4, 16, WIDTH), itself), budgets=(0.6, 0.05))


class Mapped(nn.Module):
    """Maps over matrices, or a layer over a batch."""

    def __init__(self, layer: bool) -> None:
        super().__init__()
        self.weights, self.layer = nn.Parameter(torch.randn(4, 16, 16)), layer
        self.inner, self.outer = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.layer:
            return self.outer(torch.vmap(self.inner)(x).tanh())
        return self.outer(torch.vmap(lambda weight: (x @ weight).tanh(), out_dims=-1)(self.weights).flatten(-2))


class Differentiates(Mapped):
    """Asks for a gradient by `torch.func`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(torch.func.grad(lambda x: x.sin().sum())(x)).tanh()).square().mean()


class Checkpointed(nn.Module):
    """Runs a part of itself twice, the second time in a checkpoint of PyTorch's."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.run, self.run(x), use_reentrant=False)  # pyright: ignore[reportReturnType]

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh())


class Routed(nn.Module):
    """Two experts behind a router, all in a checkpoint of PyTorch's."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2, bias=False)
        experts = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(2))
        self.experts = nn.ModuleList(experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self.run, x.sin().cos(), use_reentrant=False)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        scores, picked = self.router(x).softmax(-1).topk(1)
        made = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (picked[:, 0] == number).nonzero()[:, 0]
            made = made.index_add(0, rows, expert(x[rows]) * scores[rows])
        return made


class Converts(nn.Module):
    """Sees to the type of its own classifier in each forward, as that of transformers' SwitchTransformers does."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.classifier, self.mlp, self.dtype = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.classifier = self.classifier.to(self.dtype)
        chances = self.classifier(x.to(self.dtype)).softmax(-1).to(x.dtype)
        return x + torch.tanh(self.mlp(x)) * chances


class Forces(nn.Module):
    """A potential of positions: the loss is of its gradient, which its forward takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Made(lambda m, x: x + m.inner(x), inner=narrow()) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.layers(x).sum(), x, create_graph=True)[0]


class TwoResiduals(nn.Module):
    """A layer of two halves, each with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.second = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(x)
        return x + self.second(x)


def one_is_wrapped() -> Built:
    """Layers, one of which is in a module of its own, as libraries put around one of several."""
    model = nn.Sequential(*(TwoResiduals() for _ in range(4)))
    model[2] = Made(lambda m, x: m.inside(x), inside=model[2])
    return model, torch.randn(128, 16), mean_square


class Caught(nn.Module):
    """Layers whose results a function of the model's own collects; `loss` may read them from the model."""

    layers: nn.ModuleList

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3))
        self.caught: dict[int, torch.Tensor] = {}
        self.calls: Any = [lambda x: self.layers[0](x)] if how == "a list" else None
        self.call: Any = (lambda x: self.layers[0](x)) if how == "an attribute" else None
        for i, layer in enumerate(self.layers):
            layer.register_forward_hook(self.hook(i, how))

    def hook(self, i: int, how: str) -> Any:
        def closure(module: nn.Module, args: Any, out: torch.Tensor) -> None:
            self.caught[i] = out

        def default(module: nn.Module, args: Any, out: torch.Tensor, self: Any = self) -> None:
            self.caught[i] = out

        def given(self: Any, module: nn.Module, args: Any, out: torch.Tensor) -> None:
            self.caught[i] = out

        return {"a default": default, "a partial": partial(given, self)}.get(how, closure)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        call = self.call or (self.calls[0] if self.calls else self.layers[0])
        x = x + call(x)
        for layer in self.layers[1:]:
            x = x + layer(x)
        return x.square().mean() + self.penalty()

    def penalty(self) -> torch.Tensor:
        return torch.stack([x.square().mean() for x in self.caught.values()]).sum()


def caught(how: str) -> Built:
    model = Caught(how)

    def loss(out: torch.Tensor) -> torch.Tensor:
        return out + (model.penalty() if how == "the loss" else 0)

    return model, torch.randn(16, 8), loss


class Masked(nn.Module):
    """Attention that leaves its mask out where nothing is masked, after a look at its values."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.register_buffer("mask", torch.arange(16) >= hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.project(x)
        return h if bool(self.mask.all()) else h.masked_fill(~self.mask[..., None], 0.0)


class Emptied(nn.Linear):
    """Holds a tensor whose storage it has emptied: only the storage's size says so."""

    held: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Goes on without it."""
        with torch.no_grad():
            self.held = x.repeat(1, 8)
        self.held.untyped_storage().resize_(0)
        return super().forward(x).sin()


def moved(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Puts tensors over the memory of others, each time."""
    made = m.up(x)
    for _ in range(3):
        made = made + torch.empty_like(made).set_(made.detach())
    return made


@dataclass
class Result:
    """What a layer returns."""

    hidden: Any


class Returns(nn.Module):
    """A layer that returns its result in some way, or what it was given."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.inside, self.way = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)), way
        self.out: Any = None

    def forward(self, x: torch.Tensor, into: list[torch.Tensor]) -> Any:
        draws = {"Python's draw": random.random, "torch's draw": lambda: torch.rand([])}
        skips = draws.get(self.way, lambda: 1)() < 0.5
        y = x if skips or self.way == "nothing new" else x + self.inside(x)
        if self.way == "an attribute":
            self.out = y
            return None
        if self.way == "a list that it is given":
            into.append(y)
            return None
        return Result(y) if self.way == "a dataclass" else y


class Reads(nn.Module):
    """Runs layers, and reads their results."""

    def __init__(self, *ways: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Returns, ways))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            into: list[torch.Tensor] = []
            y = layer(x, into)
            x = layer.out if layer.way == "an attribute" else into[0] if into else getattr(y, "hidden", y)
        return x.square().mean()


def reads(way: str) -> Built:
    return Reads(*([way] * 3), "its result"), torch.randn(128, 16), itself


class Replayed(nn.Module):
    """A part of a reversible block, which keeps the random state of its forward for the run in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, WIDTH)
        self.state: torch.Tensor | None = None  # which is made without an operation

    def forward(self, x: torch.Tensor, again: bool = False) -> torch.Tensor:
        if not again:
            self.state = torch.get_rng_state()
            return self.net(x)
        assert self.state is not None
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.state)
            return self.net(x)


class ReversibleBlock(nn.Module):
    """A block whose input follows from its output, as in RevNet and Reformer."""

    def __init__(self) -> None:
        super().__init__()
        self.f = Replayed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x1, x2 = x.chunk(2, -1)
        with torch.no_grad():
            return torch.cat([x2, x1 + self.f(x2)], -1)

    def backward_pass(self, y: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The input and its gradient, from the output and that of it."""
        (x2, y2), (d2, d1) = y.chunk(2, -1), dy.chunk(2, -1)
        x2 = x2.detach().requires_grad_()
        with torch.enable_grad():
            added = self.f(x2, again=True)
        torch.autograd.backward(added, d1)
        assert x2.grad is not None
        return torch.cat([y2 - added.detach(), x2.detach()], -1), torch.cat([d1, d2 + x2.grad], -1)


class RunsBackwards(torch.autograd.Function):
    """Keeps the output of reversible blocks alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, blocks: list[ReversibleBlock]) -> torch.Tensor:
        ctx.blocks = blocks
        for block in blocks:
            x = block(x)
        ctx.y = x.detach()
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        y, dy = ctx.y, grads[0]
        for block in reversed(ctx.blocks):
            y, dy = block.backward_pass(y, dy)
        return dy, None


def reversible() -> Built:
    """Reversible blocks behind a layer."""
    first, blocks = nn.Linear(2 * WIDTH, 2 * WIDTH), [ReversibleBlock() for _ in range(3)]
    model = Made(
        lambda m, x: RunsBackwards.apply(m.first(x), list(m.blocks)), first=first, blocks=nn.ModuleList(blocks)
    )
    return model, torch.randn(64, 2 * WIDTH), mean_square


class UNet(nn.Module):
    """Convolutions with skips: no two parts alike, and bytes that live across the middle."""

    def __init__(self) -> None:
        super().__init__()

        def part(a: int, b: int) -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.Conv2d(b, b, 1))

        self.down1, self.down2, self.middle = part(3, 8), part(8, 16), part(16, 16)
        self.up2, self.up1 = part(32, 8), part(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        d = self.up2(torch.cat([F.interpolate(c, scale_factor=2.0), b], 1))
        return self.up1(torch.cat([F.interpolate(d, scale_factor=2.0), a], 1)).square().mean()


def tied() -> Built:
    """An embedding whose weight is the head's, and two layers that are one module under two names."""
    embed, inner = nn.Embedding(64, WIDTH), narrow()
    head = nn.Linear(WIDTH, 64, bias=False)
    head.weight = embed.weight
    model = nn.Sequential(embed, inner, Made(lambda m, x: x + m.inner(x), inner=inner), narrow(), head)
    return model, torch.arange(256).view(4, 64) % 64, mean_square


def differentiating() -> Built:
    """Layers, and one that calls `torch.func.grad`, which allows no region."""
    return nn.Sequential(*(narrow() for _ in "abc"), Differentiates(layer=True)), torch.randn(64, 16), itself


REFUSED = "Differentiates calls torch.func.grad or one of its kind"
POOLED = ("aten.max_pool2d_with_indices finds ones",)


class Told(nn.Module):
    """Layers that read what the model has set as their attribute, which is made of its input."""

    def __init__(self) -> None:
        super().__init__()
        up, down = partial(nn.Linear, WIDTH, 64), partial(nn.Linear, 64, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            Made(lambda m, x: x + m.down(torch.tanh(m.up(x * m.context))), up=up(), down=down()) for _ in "abc"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        context = self.first(x).tanh()
        for layer in self.layers:
            layer.context = context
            x = layer(x)
        return x.square().mean()


CALLS: dict[str, Odd] = {
    "layers are told by an attribute": Odd(lambda: (Told(), torch.randn(128, WIDTH), itself), (0.5, 0.1)),
    "one block called five times": shared(),
    "one block called five times, and nothing else": shared(alone=True),
    "an attending block called five times": shared(attends=True),
    "weights with two names": Odd(tied, (0.0,)),
    "vmap over weights": in_turn(partial(Mapped, False), 8, 16, 16),
    "vmap of a layer": in_turn(partial(Mapped, True), 8, 16, 16),
    "torch.func.grad": Odd(differentiating, (0.0,), says=REFUSED),
    "torch.func.grad, in tiles": Odd(differentiating, (0.0,), {"tiles": True}, says=REFUSED),
    "a checkpoint of its own": in_turn(Checkpointed, 256, WIDTH),
    # how many rows an expert gets is not known before the step runs
    "a router in a checkpoint": in_turn(
        Routed, 256, WIDTH, budgets=(0.0,), within=0.1, assumed=("aten.topk chooses evenly in * (3 times)",)
    ),
    "a module that is converted in forward": in_turn(Converts, 256, WIDTH),
    "forces": Odd(lambda: (Forces(), torch.randn(64, WIDTH), mean_square), flops=False, says="create_graph=True"),
    "one layer of several in a wrapper": Odd(one_is_wrapped, (0.1,)),
    # the counter of FLOPs fails on modules in a Function; a block keeps nothing that a region could free
    "reversible blocks": Odd(reversible, chosen=False, flops=False),
    "u-net": Odd(lambda: (UNet(), torch.randn(2, 3, 16, 16), itself), (0.7, 0.02), assumed=POOLED),
    **{f"results are caught by {how}": Odd(partial(caught, how)) for how in ("a closure", "a default", "a partial")},
    **{f"a layer is called by {how}": Odd(partial(caught, how)) for how in ("an attribute", "a list")},
    "results are read by the loss": Odd(partial(caught, "the loss")),
    "a mask that hides nothing": Odd(lambda: (Masked(0), torch.randn(16, 8), mean_square), chosen=False),
    "a mask that hides": Odd(lambda: (Masked(3), torch.randn(16, 8), mean_square), chosen=False),
    "storages that are emptied": in_turn(partial(Emptied, 64, 64), 512, 64),
    "memory of another tensor": in_turn(lambda: Made(moved, up=nn.Linear(8, 8)), 16, 8),
    "layers that return nothing new": Odd(partial(reads, "nothing new"), (0.5, 0.01), chosen=False),
    # a trial of one has no result to go backward from, and foresees no FLOPs
    "layers that return an attribute": Odd(partial(reads, "an attribute"), (0.5, 0.01), flops=False),
    "layers that return a list that it is given": Odd(partial(reads, "a list that it is given"), (0.5, 0.01)),
    "layers that return a dataclass": Odd(partial(reads, "a dataclass"), (0.5, 0.01)),
}


# --- layers that hold something, change something, or are more than their operations ---


def holds(does: Callable[..., torch.Tensor], *, evaluates: bool = False, rows: int = 256, **parts: Any) -> Odd:
    """A row of three layers that do something around two linear ones; a function makes new parts for each."""

    def layer() -> nn.Module:
        made = {name: part() for name, part in parts.items()}
        buffers = {name: made.pop(name) for name in [*made] if name.startswith("buffer")}
        module = Made(does, buffers, up=nn.Linear(WIDTH, 64), down=nn.Linear(64, WIDTH), **made)
        return module.eval() if evaluates else module

    return in_turn(layer, rows, WIDTH)


def changes_product(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Changes the result of a product in place, as many a ReLU does."""
    return x + m.down(F.relu(m.up(x), inplace=True))


def changes_argument(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Gives a part what it then changes in place."""
    h = x * 2
    y = m.part(h)
    h += 1
    return x + y


def replaces_buffer(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Has a new buffer after each call."""
    h = m.up(x)
    m.buffer_mean = m.buffer_mean * 0.9 + h.detach().mean(0) * 0.1
    return x + m.down((h * m.buffer_mean.sigmoid()).tanh())


def differentiates_itself(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Takes a gradient in its forward."""
    with torch.enable_grad():
        at = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(m.up(at).tanh().sum(), at)
    return x + m.down(m.up(x).tanh()) * slope


def casts(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Enters autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        h = m.down(F.gelu(m.up(x)))
    return x + h.float()


class KeepsItsResult(torch.autograd.Function):
    """Keeps its result in an attribute of its context, which leads back to it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.y = x.exp()
        return ctx.y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * ctx.y


class RunsAgain(torch.autograd.Function):
    """Runs a module in its forward without grad, and in its backward with."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: nn.Module, *_: torch.Tensor) -> torch.Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.module(x)
        torch.autograd.backward(y, grads)
        return x.grad, None, *(None for _ in ctx.module.parameters())


class Hooked(nn.Module):
    """A part with hooks that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = narrow()
        self.mlp.register_forward_pre_hook(lambda _, given: (given[0].tanh(),))
        self.mlp.register_forward_hook(lambda _, given, out: out * 1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x)


def scaled() -> nn.Module:
    """A product with two tables in attributes, which share their memory."""
    tables = torch.rand(2, 64)
    return Made(
        lambda m, x: m.down((m.up(x) * m.first * m.second).tanh()),
        up=nn.Linear(WIDTH, 64),
        down=nn.Linear(64, WIDTH),
        first=tables[0],
        second=tables[1],
    )


HOLDS: dict[str, Odd] = {
    "a product that is changed in place": holds(changes_product),
    "an argument that is changed in place": holds(
        changes_argument, part=lambda: Made(lambda m, x: m.inner(x + 1), inner=narrow())
    ),
    "tables in attributes": in_turn(lambda: Made(lambda m, x: x + m.a(x) + m.b(x), a=scaled(), b=scaled()), 256, WIDTH),
    "a large buffer": holds(
        lambda m, x: x + m.down((m.up(x) * m.buffer_table).tanh()), rows=600, buffer_table=lambda: torch.rand(600, 64)
    ),
    "buffers in evaluation": holds(
        lambda m, x: x + m.down(m.norm(m.up(x)).relu()), evaluates=True, norm=lambda: nn.BatchNorm1d(64)
    ),
    "a buffer that is replaced": holds(replaces_buffer, buffer_mean=lambda: torch.zeros(64)),
    # the counter of FLOPs fails on it
    "a gradient in the forward": replace(holds(differentiates_itself), flops=False),
    "autocast in layers": holds(casts),
    "a branch that leads nowhere": holds(lambda m, x: (m.part(x), x + m.down(m.up(x).tanh()))[1], part=narrow),
    "a part without grad": holds(lambda m, x: x + m.down(m.up(x).tanh()) * torch.no_grad()(m.part)(x), part=narrow),
    "a saved call of its own": holds(lambda m, x: x + m.part(x) + no_recompute(m.other)(x), part=narrow, other=narrow),
    "a choice of its own": replace(
        holds(lambda m, x: x + m.down(m.up(x.gather(-1, replay(lambda x: x.argsort(-1))(x))).tanh())),
        assumed=("aten.sort chooses evenly",),
    ),
    # which is never freed, nor is that of a replay
    "a function that keeps its result": replace(
        holds(lambda m, x: x + m.down(KeepsItsResult.apply(m.up(x)))), chosen=False
    ),
    "a backward that runs a part": holds(
        lambda m, x: x + RunsAgain.apply(x, m.part, *m.part.parameters()) + m.down(m.up(x).tanh()), part=narrow
    ),
    "hooks of a part": in_turn(Hooked, 256, WIDTH),
}
ODD = {**VALUES, **CALLS, **HOLDS}


def made(name: str) -> Built:
    """A row's model, its input and its loss, the same every time."""
    torch.manual_seed(0)
    return ODD[name].make()
