"""Outputs dropped by a region that ends with their consumer as a saved call: bytes dropped, bytes kept, gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torch_recompute import no_recompute, recompute, saved_activations

B, T, H, D = 2, 32, 4, 16
W = H * D
ROWS = 4 * B * T * W
"""Bytes of one [B, T, W] tensor in float32."""

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class Rotary(nn.Module):
    """Rotary position embedding, with its table in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(T), 10000.0 ** (-torch.arange(D // 2) / (D // 2)))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * self.cos - b * self.sin, a * self.sin + b * self.cos], -1)


class FusedNorm(torch.autograd.Function):
    """A norm in the style of fused kernels: what backward needs is stashed on `ctx`, past every hook."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.scale = x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
        ctx.normed = x * ctx.scale
        ctx.save_for_backward(x, weight)
        return ctx.normed * weight

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        _, weight = ctx.saved_tensors
        (grad,) = grads
        g = grad * weight
        of_x = ctx.scale * (g - ctx.normed * (g * ctx.normed).mean(-1, keepdim=True))
        return of_x, (grad * ctx.normed).sum((0, 1))


class Parts(nn.Module):
    """The modules that the programs below are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.rope = nn.LayerNorm(W), Rotary().eval()  # in training mode its buffers would be copied
        self.qkv, self.out = nn.Linear(W, 3 * W, bias=False), nn.Linear(W, W, bias=False)
        self.up, self.down = nn.Linear(W, 4 * W, bias=False), nn.Linear(4 * W, W, bias=False)
        self.weight = nn.Parameter(torch.ones(W))


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def heads(x: torch.Tensor) -> list[torch.Tensor]:
    return [t.unflatten(-1, (H, D)).transpose(1, 2) for t in x.chunk(3, -1)]


def norm(p: Parts, x: torch.Tensor, keep: Wrap) -> torch.Tensor:
    return keep(lambda h: p.out(attention(*heads(p.qkv(h)))))(p.norm(x)) + x


def activation(p: Parts, x: torch.Tensor, keep: Wrap) -> torch.Tensor:
    return keep(p.down)(F.silu(p.up(x)))


def up_projection_and_rope(p: Parts, x: torch.Tensor, keep: Wrap) -> torch.Tensor:
    q, k, v = heads(p.qkv(x))
    return keep(attention)(p.rope(q), p.rope(k), v)


def cast(p: Parts, x: torch.Tensor, keep: Wrap) -> torch.Tensor:
    return keep(p.out)(x.to(torch.bfloat16).float())


def cast_that_is_none(p: Parts, x: torch.Tensor, keep: Wrap) -> torch.Tensor:
    return keep(p.out)(x.float())


def softmax(p: Parts, x: torch.Tensor, keep: Wrap) -> torch.Tensor:
    return keep(p.out)(x.float().softmax(-1))


def chain(p: Parts, x: torch.Tensor, keep: Wrap) -> torch.Tensor:
    h = p.norm(x)
    return keep(p.out)(keep(p.down)(F.silu(p.up(h))).tanh())


def several_consumers(p: Parts, x: torch.Tensor, keep: Wrap) -> torch.Tensor:
    h = p.norm(x)
    return keep(p.out)(h) * keep(lambda h: p.down(p.up(h)))(h)


def read_later(p: Parts, x: torch.Tensor, keep: Wrap) -> torch.Tensor:
    h = p.norm(x)
    return keep(p.out)(h) + h.square().mean() * h


def views(p: Parts, x: torch.Tensor, keep: Wrap) -> torch.Tensor:
    h = p.norm(x)
    return keep(lambda t, u: p.out(t.transpose(0, 1)) * u.unsqueeze(1))(h.transpose(0, 1), h[:, 0])


def fused_norm(p: Parts, x: torch.Tensor, keep: Wrap) -> torch.Tensor:
    return keep(p.out)(FusedNorm.apply(x, p.weight))


# Program, and what its graph keeps between forward and backward, in tensors of [B, T, W]: plainly, and dropped.
PROGRAMS: list[tuple[Callable[..., torch.Tensor], float, float]] = [
    (activation, 8, 0),  # u and silu(u)
    (cast, 1, 0),
    (cast_that_is_none, 0, 0),
    (softmax, 1, 0),
    (fused_norm, 2, 1),  # the output, which the product saves; the normed input on ctx, which escapes
]
ALL = [program for program, _, _ in PROGRAMS] + [
    norm,
    up_projection_and_rope,
    chain,
    several_consumers,
    read_later,
    views,
]


def plainly(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


def gradients(program: Callable[..., torch.Tensor], dropped: bool, times: int = 1) -> list[torch.Tensor]:
    torch.manual_seed(3)
    parts, x = Parts(), torch.randn(B, T, W, requires_grad=True)
    call = recompute(lambda x: program(parts, x, no_recompute)) if dropped else lambda x: program(parts, x, plainly)
    y = call(x)
    leaves = [x, *parts.parameters()]
    found = [y.detach()]
    for i in range(times):
        grads = torch.autograd.grad(y.square().sum(), leaves, retain_graph=i + 1 < times, allow_unused=True)
        found += [torch.zeros(()) if g is None else g for g in grads]
    return found


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("program", ALL, ids=lambda f: f.__name__)
def test_gradients_are_those_of_the_plain_program(program: Callable[..., torch.Tensor], times: int) -> None:
    """Dropping outputs changes no bit of a result or a gradient, with a retained graph too."""
    ours, plain = gradients(program, True, times), gradients(program, False, times)
    assert all(map(torch.equal, ours, plain))


def kept(program: Callable[..., torch.Tensor], dropped: bool) -> float:
    """What the graph keeps, in tensors of [B, T, W]."""
    torch.manual_seed(3)
    parts, x = Parts(), torch.randn(B, T, W, requires_grad=True)
    call = recompute(lambda x: program(parts, x, no_recompute)) if dropped else lambda x: program(parts, x, plainly)
    return saved_activations(call, (x,)).total_bytes / ROWS


@pytest.mark.parametrize(("program", "plain", "dropped"), PROGRAMS, ids=lambda p: getattr(p, "__name__", None))
def test_what_the_graph_keeps(program: Callable[..., torch.Tensor], plain: float, dropped: float) -> None:
    """Between forward and backward exactly these bytes are kept."""
    small = 0.1  # a row's norm or log-sum-exp
    assert 0 <= kept(program, False) - plain < small
    assert 0 <= kept(program, True) - dropped < small


def test_discarding_a_norm_keeps_what_attention_needs() -> None:
    """The norm's output goes; what attention itself saves stays, for it is not run again."""
    assert kept(norm, False) - kept(norm, True) == pytest.approx(1, abs=0.1)


def test_discarding_an_up_projection_keeps_the_output_of_attention_alone() -> None:
    """Queries, keys and values are rebuilt; what attention saves of its own making is its output."""
    assert kept(up_projection_and_rope, True) == pytest.approx(1, abs=0.1)
    assert kept(up_projection_and_rope, False) >= 4


def test_what_escapes_is_named() -> None:
    """A tensor that a fused norm stashes on `ctx` escapes saved-tensor hooks: it is kept, and the lens names it."""
    parts, x = Parts(), torch.randn(B, T, W, requires_grad=True)
    rows = saved_activations(lambda x: no_recompute(p_out(parts))(FusedNorm.apply(x, parts.weight)), (x,)).rows
    escaped = {row.held_by for row in rows if row.kind == "escaped"}
    assert any("ctx.normed of FusedNormBackward" in str(where) for where in escaped)


def p_out(parts: Parts) -> Callable[[torch.Tensor], torch.Tensor]:
    return parts.out
