"""The collectives of tensor parallelism, as operations of a simulated step: their bytes, their prices, no peers.

Problem. A rank of a tensor-parallel group holds slices of weights, and what its activations are depends on what is
gathered and reduced, where, and what autograd keeps of it. A simulation has one process and no process group.

Idea. Torch's functional collectives say what they return without a group, so on fake tensors they run
as they are. Around them are the autograd functions that Megatron has: at the entry of an attention or an MLP an
identity whose backward is an all-reduce, at its exit an all-reduce whose backward is an identity; with sequence
parallelism an all-gather of tokens and a reduce-scatter.

What autograd keeps at the entry is the point. Megatron's column-parallel product keeps its share of the tokens and
gathers them again in backward. So with sequence parallelism what enters a module is a *promise*: a tensor with the
shape of all tokens over the memory of this rank's own. A product that takes it (`gathered_linear`) gathers, multiplies,
keeps the promise, and gathers again in backward. No other operation may read a promise; its values are not there.

Queries, keys and values, or gate and up, share one gathering, as Megatron's fused products do: the first is `first`
and pays for it, the others allocate the same bytes without it.

A group is called by its size, `tensor-4`, which is where prices find it (`planning/prices.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from .._compat.collectives import functional
from ..plan.calls import declare_product

_collectives = functional()


def _all_reduced(x: torch.Tensor, size: int) -> torch.Tensor:
    return _collectives.all_reduce(x, "sum", f"tensor-{size}")


def _gathered(shard: torch.Tensor, size: int) -> torch.Tensor:
    batch, tokens, width = shard.shape
    return _collectives.all_gather_into_tensor(shard, size, f"tensor-{size}").view(batch, tokens * size, width)


def _scattered(full: torch.Tensor, size: int) -> torch.Tensor:
    batch, tokens, width = full.shape
    flat = full.reshape(batch * tokens, width)
    return _collectives.reduce_scatter_tensor(flat, "sum", size, f"tensor-{size}").view(batch, tokens // size, width)


class Enter(torch.autograd.Function):
    """All tokens go into a module that every rank has a slice of: its gradients are summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, size: int) -> torch.Tensor:
        ctx.size = size
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _collectives.all_reduce_(grads[0].contiguous(), "sum", f"tensor-{ctx.size}"), None


class Leave(torch.autograd.Function):
    """The partial sums of the ranks come out of a module and are added up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, size: int) -> torch.Tensor:
        return _all_reduced(x, size)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class Gather(torch.autograd.Function):
    """The ranks' shares of the tokens become all tokens, and are kept so."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, size: int) -> torch.Tensor:
        ctx.size = size
        return _gathered(x, size)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _scattered(grads[0], ctx.size), None


class Scatter(torch.autograd.Function):
    """The partial sums of the ranks are added up, and each rank gets its share of the tokens."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, size: int) -> torch.Tensor:
        ctx.size = size
        return _scattered(x, size)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _gathered(grads[0].contiguous(), ctx.size), None


class Promise(torch.autograd.Function):
    """This rank's share of the tokens, in the shape of all of them; see the module's docstring."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, size: int) -> torch.Tensor:
        ctx.size = size
        batch, tokens, width = x.shape
        return x[:, :1].expand(batch, tokens * size, width)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _scattered(grads[0], ctx.size), None


def is_promise(x: torch.Tensor) -> bool:
    """Whether a tensor is what `Promise` made."""
    return x.dim() == 3 and x.shape[1] > 1 and x.stride(1) == 0


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, size: int, first: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.size, ctx.first, ctx.bias = size, first, bias is not None
        return F.linear(_kept(x, size, first), weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        grad = grads[0]
        full = _kept(x, ctx.size, ctx.first).flatten(0, 1)
        flat = grad.flatten(0, 1)
        of_x = grad @ weight if ctx.needs_input_grad[0] else None
        of_weight = flat.t() @ full if ctx.needs_input_grad[1] else None
        return of_x, of_weight, flat.sum(0) if ctx.bias else None, None, None


def _kept(x: torch.Tensor, size: int, first: bool) -> torch.Tensor:
    """What a promise says."""
    batch, tokens, width = x.shape
    if not first:
        return x.new_empty(batch, tokens, width)
    own = tokens // size
    return _gathered(x.as_strided((batch, own, width), (own * width, width, 1)), size)


def gathered_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, size: int, first: bool
) -> torch.Tensor:
    """A product of a promise with a slice of a weight; a plan may keep its result as that of any product.

    Args:
        x: The promise (batch, tokens, width).
        weight: (outputs, width).
        bias: (outputs), or None.
        size: Of the group.
        first: Whether it pays for the gathering.
    """
    if has_torch_function((x, weight)):
        return handle_torch_function(gathered_linear, (x, weight), x, weight, bias, size, first)
    return _GatheredLinear.apply(x, weight, bias, size, first)  # pyright: ignore[reportReturnType]


declare_product(gathered_linear)
