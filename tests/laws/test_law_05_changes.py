"""Law 5, errors: a change since forward that a replay cannot undo is an error, never a wrong gradient."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from laws.placements import chain
from laws.watch import ones
from torch_recompute import ChangedError, Choice, Plan, apply, recompute

HANDED = {
    "positional": (lambda run, x, t: run(lambda x, t: (x * t).sin().exp())(x, t), "argument 1 of"),
    "keyword": (lambda run, x, t: run(lambda x, *, t: (x * t).sin().exp())(x, t=t), "argument 't' of"),
    "in a dict": (
        lambda run, x, t: run(lambda x, d: (x * d["k"][0]).sin().exp())(x, {"k": [t]}),
        "an element of argument 1 of",
    ),
    "added only": (lambda run, x, t: run(lambda x, t: (x + t).sin().exp())(x, t), "argument 1 of"),
    "closure": (lambda run, x, t: run(lambda x: (x * t).sin().exp())(x), "closure variable 't'"),
    "closure, added only": (lambda run, x, t: run(lambda x: (x + t).sin().exp())(x), "closure variable 't'"),
    "closure of a closure": (
        lambda run, x, t: run((lambda inner: lambda x: inner(x).exp())(lambda x: (x * t).sin()))(x),
        "closure variable 't'",
    ),
    "closure in a tuple": (
        lambda run, x, t: run(chain(lambda x: (x * t).sin(), torch.exp))(x),
        "closure variable 'stages'",
    ),
    "partial": (
        lambda run, x, t: run(functools.partial(lambda t, x: (x * t).sin().exp(), t))(x),
        "argument 0 of a partial|closure variable 'fn'",
    ),
    "default": (lambda run, x, t: run(lambda x, t=t: (x * t).sin().exp())(x), "a default of <lambda>"),
    "module buffer": (lambda run, x, t: run(Holder(buffer=t))(x), "buffer 'b' of Holder"),
    "parameter": (lambda run, x, t: run(Holder(parameter=t))(x), "parameter 'p' of Holder"),
    "bound object": (lambda run, x, t: run(Bound(t).call)(x), "attribute 't'"),
}
"""How a tensor comes into a region, and what the error calls it there."""
LEAVES = ("module buffer", "parameter")
PUT_BACK = {"closure in a tuple", "partial", "default", "module buffer", "bound object"}
"""Ways of such a tensor whose values the replay finds again."""


class Holder(nn.Module):
    def __init__(self, buffer=None, parameter=None):
        super().__init__()
        self.register_buffer("b", buffer)
        self.p = None if parameter is None else nn.Parameter(parameter.detach())

    def forward(self, x):
        return (x * (self.b if self.p is None else self.p)).sin().exp()


class Bound:
    def __init__(self, t):
        self.t = t

    def call(self, x):
        return (x * self.t).sin().exp()


@pytest.mark.parametrize("handed", HANDED)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_an_input_changed_in_place_before_backward(handed, grad, nested):
    """However a tensor came into the region: changed in place, it is named, or the gradient is right."""
    hand, name = HANDED[handed]

    def run(wrap, change):
        t, x = torch.ones(3), ones(3)
        if grad:
            t = t.requires_grad_() if handed in LEAVES else t.requires_grad_() * 1
        y = hand(wrap, x, t)
        if change:
            with torch.no_grad():
                t.add_(1)
        y.sum().backward()
        return x.grad

    def wrap(fn):
        return recompute(fn) if not nested else recompute(lambda *a, **k: recompute(fn)(*a, **k).cos())

    wanted = run((lambda fn: fn) if not nested else (lambda fn: lambda *a, **k: fn(*a, **k).cos()), False)
    assert torch.equal(run(wrap, False), wanted)
    if not grad and (handed in PUT_BACK or handed == "closure, added only"):
        assert torch.equal(run(wrap, True), wanted)
        return
    if not grad and handed.startswith("closure"):
        name = "a tensor saved in a region"  # which is the tensor itself, and whose reader compares its version
    with pytest.raises(ChangedError, match=f"(?s)({name}).*(changed in place since the forward|at version 1)"):
        run(wrap, True)


@pytest.mark.parametrize("kind", ["module", "closure", "method", "nested"])
def test_a_weight_changed_before_backward(kind):
    """An optimizer step between forward and backward is an error, however the region came to the weight."""
    layer = nn.Linear(3, 3)
    fn = {
        "module": layer,
        "closure": lambda x: layer(x.sin()).exp(),
        "method": layer.forward,
        "nested": recompute(lambda x: layer(x.sin())),
    }[kind]
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    y = recompute(fn)(ones(2, 3).sin()).exp()
    layer(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    name = (
        "a tensor saved in a region is at version" if kind in ("module", "method") else "parameter 'weight' of Linear"
    )
    with pytest.raises(ChangedError, match=name):
        y.sum().backward()


class Context:
    """A user's own object, which layers read and write."""

    def __init__(self, h, scale=2.0):
        self.h, self.scale, self.seen = h, scale, []


class Reads(nn.Module):
    """Reads a context, and may write to it."""

    def __init__(self, writes):
        super().__init__()
        self.up, self.writes = nn.Linear(3, 3), writes

    def forward(self, x, context):
        y = torch.tanh(self.up(x + context.h * context.scale)) + sum(seen.sin() for seen in context.seen)
        if self.writes:
            context.h = torch.tanh(context.h * y)
            context.seen.append(y)
        return y.exp()


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("planned", [False, True])
def test_an_object_that_is_changed_between_forward_and_backward(writes, planned):
    """A replay gets an object with the attributes that the forward found, and writes to that alone."""
    torch.manual_seed(3)
    layers, encoder, x = nn.ModuleList(Reads(writes) for _ in range(3)), nn.Linear(3, 3), torch.randn(2, 3)

    def gradients(wrap):
        context, y = Context(encoder(x)), x
        for layer in layers:
            y = wrap(layer)(y, context)
            context.h, context.scale = context.h * 0.5, context.scale + 1
        found = torch.autograd.grad(y.sum(), [*layers.parameters(), *encoder.parameters()])
        return found, len(context.seen)

    plain, count = gradients(lambda layer: layer)
    handle = apply(layers, Plan((Choice(("0", "1", "2")),))) if planned else None
    again, same = gradients((lambda layer: layer) if planned else recompute)
    assert count == same == 3 * writes
    assert all(map(torch.equal, plain, again))
    if handle is not None:
        handle.remove()
