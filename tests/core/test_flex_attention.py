"""Operators of functions: eager `flex_attention` in regions, plans, simulations and audits.

It has no backward on the CPU except for a check of the device, which is taken away here; what runs is PyTorch's own
eager implementation. The operator is called as such where torch cannot compile it, which is under any mode.
"""

import re
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from support.training import gradients
from torch_recompute import (
    Choice,
    MismatchError,
    Plan,
    apply,
    audit,
    checkpoint,
    make_plan,
    measure,
    saved_activations,
    simulate,
)
from torch_recompute._torch.flops import flops
from torch_recompute.planner.ops import logging
from torch_recompute.simulation.devices import DEVICES

TOKENS, HEADS, HEAD = 128, 2, 16
WIDTH = HEADS * HEAD
OPERATOR: Any = torch.ops.higher_order.flex_attention
PLAN = Plan(tuple(Choice((f"layers.{i}",)) for i in range(2)))


class Block(nn.Module):
    """Attention with a causal mask, by the operator or by the function around it."""

    def __init__(self, function: bool) -> None:
        super().__init__()
        self.function = function
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mask = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, TOKENS, TOKENS, device="cpu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(1, TOKENS, 3, HEADS, HEAD).permute(2, 0, 3, 1, 4)
        if self.function:
            seen: Any = flex.flex_attention(q, k, v, block_mask=self.mask)
        else:
            seen = OPERATOR(q, k, v, flex._identity, self.mask.as_tuple(), 0.25, {}, (), ())[0]
        return x + self.out(seen.transpose(1, 2).reshape(1, TOKENS, WIDTH))


class Net(nn.Module):
    """Two such blocks."""

    def __init__(self, function: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(function) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean()


@pytest.fixture(autouse=True)
def trainable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the CPU train through it, and keeps the hint on its speed to itself."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex, "_warn_once", lambda *_, **__: None)


def x() -> torch.Tensor:
    return torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("keep", [(), ("@collective",), ("@product",)])
def test_an_applied_plan_runs_it(keep: tuple[str, ...]) -> None:
    """No mode that a placed region enters stops at an operator of functions; gradients stay the same."""
    model = Net()
    plain = gradients(model, x())
    handle = apply(model, Plan(tuple(Choice((f"layers.{i}",), keep=keep) for i in range(2))))
    for _ in range(2):
        assert all(map(torch.equal, plain, gradients(model, x())))
    handle.remove()


def test_the_debug_mode_of_checkpoint_runs_it() -> None:
    """`debug=True` writes it down as an operation, in forward and replay, and the gradients stay the same."""
    block, y, turns = Block(False), x().requires_grad_(), iter((slice(None), slice(1)))

    def call(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=False, debug=True)

    assert all(map(torch.equal, gradients(block, y, run=call), gradients(block, y)))

    def attend(q: torch.Tensor) -> torch.Tensor:
        return OPERATOR(q, q, q, flex._identity, block.mask.as_tuple(), 0.25, {}, (), ())[0][:, next(turns)].exp()

    out = checkpoint(attend, torch.ones(1, HEADS, TOKENS, HEAD, requires_grad=True), use_reentrant=False, debug=True)
    with pytest.raises(MismatchError) as caught:
        out.sum().backward()
    assert len(re.findall(r"\n +\d+: flex_attention\(", str(caught.value))) == 2, caught.value


@pytest.mark.parametrize("function", [False, True])
@pytest.mark.parametrize("device", [None, "h100"])
def test_it_is_planned(function: bool, device: str | None) -> None:
    """A model that calls it is simulated and planned, for this machine and for a device by name."""
    plan = make_plan(Net(function), (x(),), loss=lambda out: out, budget=0.5, device=device)
    assert plan.predicted_peak_bytes
    assert plan.choices


def test_a_simulation_keeps_what_the_step_keeps() -> None:
    """It keeps the measured bytes; what it takes, which runs functions of the caller, is said not to be known."""
    model, batch = Net(), x()
    simulated = simulate(model, (batch,), loss=lambda out: out)
    with measure(model).track(batch) as seen:
        out = model(batch)
        assert simulated.saved_bytes == pytest.approx(seen.live_by_category["activations"], rel=0.001)
        out.backward()
    assert simulated.peak_bytes < seen.peak_bytes
    assert simulated.uncounted.startswith("not counted: what flex_attention takes while it runs, perhaps ")
    assert simulated.flops["forward"] > 2 * 2 * 2 * HEADS * TOKENS * TOKENS * HEAD


def test_what_looks_at_a_model_runs_it() -> None:
    """`saved_activations` and `audit` look at a step with it."""
    model = Net()
    plain = saved_activations(model, (x(),)).total_bytes
    handle = apply(model, PLAN)
    assert 0 < saved_activations(model, (x(),)).total_bytes < plain
    found = audit(model, (x(),))
    assert found.ok, found
    assert len(found.regions) == 2
    handle.remove()


def test_its_price_is_that_of_its_products() -> None:
    """It is no operation that runs alone, and is priced by its FLOPs and bytes."""
    seen: list[Any] = []
    with logging(lambda op, _: seen.append(op)), torch.no_grad():
        Block(False)(x())
    (op,) = [op for op in seen if op.func is OPERATOR]
    assert op.all_flops == 4 * HEADS * TOKENS * TOKENS * HEAD
    assert op.bytes > 4 * 4 * TOKENS * WIDTH
    assert DEVICES["h100"](op) > 0


def test_it_is_counted_where_pytorch_has_no_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.13: forward and backward count as many FLOPs as PyTorch's own formulas say."""
    seen: list[Any] = []
    with logging(lambda op, _: seen.append(op)):
        Net(False)(x()).backward()
    monkeypatch.setattr("torch_recompute._torch.flops._formulas", dict)
    counted = [flops(op.func, op.args, op.kwargs, None) for op in seen if "Flex" in type(op.func).__name__]
    product = 2 * HEADS * TOKENS * TOKENS * HEAD
    assert sorted(counted) == [2 * product] * (len(counted) // 2) + [5 * product] * (len(counted) // 2) != []


class Raising(TorchDispatchMode):
    """Refuses to read values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value was read"
        return func(*args, **(kwargs or {}))


def test_a_formula_that_raises_counts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step under a plan goes on where PyTorch's formula raises, as torch 2.11's does for grouped heads."""

    def raises(*_: Any, **__: Any) -> int:
        raise AssertionError("sdpa_flop_count: query/key/value shapes are incompatible")

    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(2))})
    net = nn.Sequential(*model["layers"])
    plan = Plan((Choice(("0",)), Choice(("1",))))
    handle = apply(net, plan)
    monkeypatch.setitem(torch.utils.flop_counter.flop_registry, torch.ops.aten.addmm, raises)
    net(torch.ones(2, 4, requires_grad=True)).sum().backward()
    handle.remove()
    assert simulate(net, (torch.ones(2, 4),), loss=torch.sum).flops["backward"] > 0
    assert make_plan(net, (torch.ones(2, 4),), budget=0.5, device="h100", loss=torch.sum).predicted_peak_bytes


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_grouped_heads_are_counted(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Attention is counted from its shapes, whatever PyTorch's formula says of grouped heads."""
    q, k, v = (torch.empty(2, heads, 8, width, device="meta") for heads, width in ((4, 6), (2, 6), (2, 10)))
    forward, backward = (
        getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention{end}") for end in ("", "_backward")
    )
    for func in (forward, backward):
        monkeypatch.setitem(torch.utils.flop_counter.flop_registry, func, lambda *_, **__: 1 / 0)
    products = 2 * 2 * 4 * 8 * 8
    assert flops(forward.default, (q, k, v), {}, None) == products * (6 + 10)
    assert flops(backward.default, (q, q, k, v), {}, None) == products * (3 * 6 + 2 * 10)


def test_packed_sequences_are_counted_without_reading_their_lengths() -> None:
    """Counting waits for no device: lengths of packed sequences are not read."""
    tokens, starts = torch.empty(10, 2, 4), torch.tensor([0, 4, 10])
    with Raising():
        found = flops(
            torch.ops.aten._flash_attention_forward.default,
            (tokens, tokens, tokens, starts, starts, 6, 6, 0.0, True, False),
            {},
            None,
        )
    assert found == 2 * 2 * 10 * 6 * (4 + 4)
