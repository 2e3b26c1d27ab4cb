"""Saved calls whose output is marked `values_unused`: nothing is kept or repeated, and gradients are right.

Also where the word is wrong: what needs values gets them, by a second replay, and it is said.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from laws.watch import Tally, equal
from support.zoo import mean_loss
from torch_recompute import (
    ArgumentError,
    Choice,
    MismatchError,
    Plan,
    apply,
    audit,
    make_plan,
    measure,
    no_recompute,
    recompute,
    simulate,
)
from torch_recompute.engine import shape_only

Tail = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Block(nn.Module):
    """A norm, two products and what comes after them."""

    def __init__(self, tail: Tail, values_unused: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.tail = tail
        self.tally = Tally()
        self.last = no_recompute(self.product, values_unused=True) if values_unused else self.product

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """The last product, counted."""
        self.tally()
        return self.down(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Runs them."""
        return self.tail(self.last(F.gelu(self.up(self.norm(x)))), x)


def in_place(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = F.dropout(y, 0.3, inplace=True)
    y += x
    return y


def dropped_path(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x + y.div(0.7) * y.new_empty(y.shape[0], 1).bernoulli_(0.7)


def drawn_mask(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x + torch.where(torch.rand_like(y) < 0.5, y, 0.0)


def views(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x + F.dropout(y.view(2, -1).to(torch.float64), 0.3).view(y.shape).float()


def fused(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x + torch.native_dropout(y, 0.3, True)[0]


def dropped_inside(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x + recompute(F.dropout)(F.dropout(x, 0.2) * 0 + x, 0.3) + F.dropout(y, 0.3)


CASES_UNUSED: dict[str, Tail] = {
    "dropout": lambda y, x: x + F.dropout(y, 0.3),
    "dropout twice": lambda y, x: F.dropout(x + F.dropout(y, 0.3), 0.2),
    "dropout in place": in_place,
    "dropped paths": dropped_path,
    "a mask drawn by hand": drawn_mask,
    "views and types": views,
    "rows moved about": lambda y, x: (
        x + F.dropout(torch.stack([y, y.flip(0)]).transpose(1, 2).reshape(2, 8, 8)[0], 0.3).t()
    ),
    "fused dropout": fused,
    "a region inside": dropped_inside,
}
compiled: Any = torch.compile(lambda y, x: x + y.div(0.7), backend="eager")
READ: dict[str, Tail] = {
    "saved by autograd": lambda y, x: F.silu(F.dropout(y, 0.3)),
    "a product": lambda y, x: F.dropout(y, 0.3) @ x.t(),
    "a reduction": lambda y, x: F.silu(x * F.dropout(y, 0.3).sum(0)),
    "a choice by values": lambda y, x: F.silu(x * 2) + y if y.sum() > -1e9 else x,
    "a choice in Python": lambda y, x: y * (len(y.tolist()) > 0) + F.silu(x * 2),
    "an address": lambda y, x: y * (y.data_ptr() != 0) + F.silu(x * 2),
    "written into a tensor": lambda y, x: F.silu(torch.zeros_like(x).copy_(y)),
    "compiled code": lambda y, x: F.dropout(compiled(y, x), 0.3),
    "an input of a region": lambda y, x: recompute(F.silu)(F.dropout(y, 0.3)),
    "an input of a saved call": lambda y, x: F.silu(no_recompute(F.silu)(F.dropout(y, 0.3))),
    "drawn by values": lambda y, x: x + F.dropout(y, 0.3) * torch.bernoulli(y.detach().sigmoid()),
}


def gradients(tail: Tail, values_unused: bool, check: str = "metadata") -> tuple[list[torch.Tensor], int]:
    """Of the input and the weights, bit for bit, and how often the last product ran."""
    torch.manual_seed(0)
    block = Block(tail, values_unused)
    x = torch.randn(8, 8, requires_grad=True)
    torch.manual_seed(1)
    (recompute(block, name="block", check=check) if values_unused else block)(x).square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in block.parameters())], block.tally.count


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has been said yet."""
    monkeypatch.setattr(shape_only, "_said", set())


@pytest.mark.parametrize("check", ["metadata", "values"])
@pytest.mark.parametrize("name", CASES_UNUSED)
def test_what_is_unread_is_not_repeated(name: str, check: str) -> None:
    """Gradients are those of the plain call to the bit, the product runs once, and nothing is said."""
    plain, _ = gradients(CASES_UNUSED[name], values_unused=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, runs = gradients(CASES_UNUSED[name], values_unused=True, check=check)
    assert equal(plain, found)
    assert runs == 1


class Wrapped(torch.Tensor):
    """A tensor that is not plain, as a DTensor is."""


@pytest.mark.parametrize(
    "made", [torch.Tensor.to_sparse, lambda x: x.sin().as_subclass(Wrapped)], ids=["sparse", "subclass"]
)
def test_what_no_shape_can_stand_in_for_is_kept(made: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A sparse result, or one of a subclass, is kept: the call runs once, gradients are the same."""

    def gradient(values_unused: bool) -> tuple[torch.Tensor, int]:
        tally, x = Tally(), torch.arange(1.0, 5.0).requires_grad_()
        product = no_recompute(lambda x: (tally(), made(x))[1], values_unused=values_unused)
        out = recompute(lambda x: product(x.exp()).to_dense().exp())(x)
        out.as_subclass(torch.Tensor).sum().backward()
        assert x.grad is not None
        return x.grad.as_subclass(torch.Tensor), tally.count

    (kept, _), (marked, runs) = gradient(values_unused=False), gradient(values_unused=True)
    assert torch.equal(kept, marked)
    assert runs == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile looks at it
@pytest.mark.parametrize("name", READ)
def test_what_is_read_is_repeated_and_said(name: str) -> None:
    """Where a replay needs the values, it gets them; gradients are right, and one warning names the call."""
    plain, _ = gradients(READ[name], values_unused=False)
    with pytest.warns(RuntimeWarning, match=r"In .* the output of Block.product is marked values_unused") as said:
        found, runs = gradients(READ[name], values_unused=True)
    assert equal(plain, found)
    assert runs == 2
    assert sum(one.category is RuntimeWarning for one in said) == 1


def test_nothing_of_it_is_kept() -> None:
    """The region keeps what it keeps when the product is recomputed: its input."""

    def kept(values_unused: bool | None) -> int:
        block = Block(CASES_UNUSED["dropout"], values_unused=False)
        if values_unused is not None:
            block.last = no_recompute(block.product, values_unused=values_unused)
        x = torch.randn(64, 8, requires_grad=True)
        with measure() as m:
            y = recompute(block)(x)
            return m.live_bytes - y.nbytes

    again, without, with_output = kept(None), kept(True), kept(False)
    assert again == without
    assert with_output == without + 64 * 8 * 4  # whose output the replay needs to get to the mask


def test_a_second_backward_and_halves() -> None:
    """A graph that is retained is replayed again without the product."""
    torch.manual_seed(0)
    block = Block(CASES_UNUSED["dropout"], values_unused=True)
    x = torch.randn(8, 8, requires_grad=True)
    y = recompute(block)(x).square().sum()
    first = torch.autograd.grad(y, x, retain_graph=True)
    second = torch.autograd.grad(y, [x, *block.parameters()])
    assert torch.equal(first[0], second[0])
    assert block.tally.count == 1


def test_hollow_tensors_end_with_their_replay() -> None:
    """None of them is left when the step is over, and nothing waits for the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        gradients(CASES_UNUSED["dropout"], values_unused=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gradients(READ["saved by autograd"], values_unused=True)
        assert not [one for one in gc.get_objects() if type(one) is shape_only.ShapeOnly]
    finally:
        gc.enable()


def test_what_is_taken_out_of_a_replay_is_refused() -> None:
    """A tensor without values that user code has put somewhere says whose it is when it is read."""
    held: list[torch.Tensor] = []

    def tail(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        held.append(y)
        return x + F.dropout(y, 0.3)

    gradients(tail, values_unused=True)
    with pytest.raises(MismatchError, match=r"aten\.sum\.default needs the values of what Block.product returned"):
        held[-1].sum()
    assert repr(held[-1]) == "<a tensor without values, from Block.product>"


def test_an_audit_repeats_the_call() -> None:
    """An audit, which runs regions to their end, finds nothing in such a region, and leaves it as it was."""
    torch.manual_seed(0)
    block, runs = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Dropout(0.1)), []
    block[2].register_forward_hook(lambda *_: runs.append(1))
    x = torch.randn(8, 8, requires_grad=True)
    last = no_recompute(block[2], values_unused=True)
    region = recompute(lambda x: block[3](last(block[:2](x))), name="block")
    found = audit(region, (x,))
    assert found, str(found)
    assert len(runs) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        region(x).sum().backward()
    assert len(runs) == 3


# --- plans --------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A layer whose dropout lies inside its MLP."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds the MLP."""
        return x + self.mlp(self.norm(x))


def model(layers: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(layers)))


def step(net: nn.Module, plan: Plan) -> tuple[list[Any], int]:
    """Gradients, and FLOPs of forward and backward."""
    handle = apply(net, plan)
    net.zero_grad()
    torch.manual_seed(1)
    with FlopCounterMode(display=False) as counter:
        net(torch.linspace(-1, 1, 8 * 4 * 16).view(8, 4, 16)).square().sum().backward()
    handle.remove()
    return [parameter.grad.clone() for parameter in net.parameters()], counter.get_total_flops()


PLACES = {
    "the layer": (("0",), "mlp.2@values_unused"),
    "the MLP": (("0.mlp",), "2@values_unused"),
    "the MLP with its norm": (("0.norm", "0.mlp"), "2@values_unused"),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_plan_says_it(name: str) -> None:
    """A word in `keep` does it, in one region and in several under one; one product is replayed, not two."""
    paths, word = PLACES[name]
    net = model(1)
    plain, flops = step(net, Plan())
    both, twice = step(net, Plan((Choice(paths),)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, once = step(net, Plan((Choice(paths, keep=(word,)),)))
    assert equal(plain, both)
    assert equal(plain, found)
    assert twice - flops == 2 * (once - flops) > 0


def test_a_word_that_no_region_of_several_has() -> None:
    """It is refused with the nearest paths."""
    with pytest.raises(ArgumentError, match=r"0\.norm\.9"):
        apply(model(1), Plan((Choice(("0.norm", "0.mlp"), keep=("9@values_unused",)),)))


def unread_words(plan: Plan) -> list[str]:
    return [word for choice in plan for word in choice.keep if word.endswith("@values_unused")]


def test_planned() -> None:
    """Plans use it where a dropout ends a part, keep their promise, and replay what they say."""
    net, x = model(), torch.randn(8, 4, 16)
    plan = make_plan(net, (x,), budget=1e-9, loss=mean_loss, hold_output=False)
    assert unread_words(plan), plan
    assert plan.prediction is not None
    plain, flops = step(net, Plan())
    found, more = step(net, plan)
    assert equal(plain, found)
    assert more - flops == plan.prediction.replay_flops
    handle = apply(net, plan)
    net.zero_grad()
    with measure(net).track(x) as m:
        net(x).mean().backward()
    handle.remove()
    simulated = simulate(net, (x,), plan=plan, loss=mean_loss, hold_output=False)
    assert m.peak_bytes == plan.prediction.peak_bytes == simulated.peak_bytes


def test_planned_where_something_looks() -> None:
    """Where code in front of the dropout reads the values for itself, plans do not say that nothing does."""
    net, x = model(), torch.randn(8, 4, 16)
    assert unread_words(make_plan(net, (x,), budget=1e-9, loss=mean_loss))
    for layer in net:
        layer.mlp[2].register_forward_hook(lambda module, args, y: setattr(module, "seen", y.detach().abs().mean()))
    plan = make_plan(net, (x,), budget=1e-9, loss=mean_loss)
    assert plan.choices
    assert not unread_words(plan)
    plain, _ = step(net, Plan())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, _ = step(net, plan)
    assert equal(plain, found)
