"""Gradients that many calls contribute to, added up in one buffer.

Autograd adds up the gradients of a tensor that is used many times: each use delivers a tensor of the full size, so
at least two of them are alive at once, the sum and the newest part. For a weight used by every tile of a tiled call
that is one weight too many, and for the tiles of an input it is a full-size tensor of zeros per tile.

Idea. The tensor gets an *edge*: a node of its own between it and its users. Users do not return their gradient, they
add it to the edge's buffer in place (a matrix product straight into it, a slice copied to its place), and the edge
hands the finished buffer on when autograd reaches it, which is when all users have run. So the parameter receives one
gradient, from one node, in the same backward call: gradient hooks and DDP see what they would see without tiles.

Buffers belong to one backward call (its graph task), so a retained graph and concurrent backward calls are right.
With `create_graph=True` the users return ordinary gradients, which autograd can differentiate again.

Which products are taken: `F.linear`, `matmul` and `addmm` with a two-dimensional parameter. Everything else that a
function does with a parameter works as ever, through autograd's own sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.autograd import Function
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from . import _compat

Buffers = dict[int, torch.Tensor]
"""The sum of each backward call that runs now, by graph task."""


class Sum:
    """A tensor whose gradient is added up in one buffer.

    Attributes:
        edge: The tensor again, with the node that hands the sum on.
        buffers: Where users add their gradients.
    """

    __slots__ = ("buffers", "edge")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.buffers: Buffers = {}
        self.edge = cast("torch.Tensor", _Edge.apply(tensor, self.buffers))

    def part(self, dim: int, start: int, length: int) -> torch.Tensor:
        """A slice of the tensor, whose gradient is copied to its place in the sum."""
        return cast("torch.Tensor", _Part.apply(self.edge, self.buffers, dim, start, length))


class _Edge(Function):
    """Hands the finished sum on."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, buffers: Buffers) -> torch.Tensor:
        ctx.buffers = buffers
        ctx.set_materialize_grads(False)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        (grad,) = grads
        total = ctx.buffers.pop(_compat.graph_task_id(), None)
        if total is None or grad is None:
            return (grad if total is None else total), None
        return total + grad, None


class _Part(Function):
    """A slice."""

    @staticmethod
    def forward(ctx: Any, edge: torch.Tensor, buffers: Buffers, dim: int, start: int, length: int) -> torch.Tensor:
        ctx.buffers, ctx.place, ctx.shape = buffers, (dim, start, length), edge.shape
        ctx.set_materialize_grads(False)
        return edge.detach().narrow(dim, start, length)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        (grad,) = grads
        nothing = None, None, None, None
        if grad is None:
            return None, *nothing
        if torch.is_grad_enabled():
            dim, start, length = ctx.place
            after = ctx.shape[dim] - start - length
            return F.pad(grad, [*[0, 0] * (len(ctx.shape) - 1 - dim), start, after]), *nothing
        task = _compat.graph_task_id()
        if task not in ctx.buffers:
            ctx.buffers[task] = grad.new_zeros(ctx.shape)
        ctx.buffers[task].narrow(*ctx.place).copy_(grad)
        return None, *nothing


class _Held(Function):
    """Saves the left side of a product before the product is computed, so that a replay can end there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None


class _Product(Function):
    """`x @ weight`, or `x @ weight.T`, plus a bias."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        edge: torch.Tensor,
        bias: torch.Tensor | None,
        held: torch.Tensor,
        buffers: Buffers,
        turned: bool,
    ) -> torch.Tensor:
        ctx.buffers, ctx.turned, ctx.held = buffers, turned, held.grad_fn
        ctx.save_for_backward(edge, *(() if held.grad_fn is not None else (x,)))
        weight = edge.to(x.dtype)
        return F.linear(x, weight if turned else weight.t(), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = grads
        weight, *rest = ctx.saved_tensors
        (x,) = rest or ctx.held.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        rows = grad.reshape(-1, grad.shape[-1])
        of_bias = rows.sum(0) if needs_bias else None
        of_weight = None
        if needs_weight:
            sides = (rows, x.reshape(-1, x.shape[-1])) if ctx.turned else (x.reshape(-1, x.shape[-1]), rows)
            if torch.is_grad_enabled():
                of_weight = sides[0].t().mm(sides[1]).to(weight.dtype)
            else:
                _add_product(ctx.buffers, sides[0].t(), sides[1], weight.dtype)
            del sides
        if ctx.held is not None and not torch.is_grad_enabled():
            del x  # what it takes to make the weight's gradient is not needed for the other one
            ctx.held.maybe_clear_saved_tensors()
        of_x = None
        if needs_x:
            of_x = grad.matmul(weight.to(grad.dtype) if ctx.turned else weight.t().to(grad.dtype))
        return of_x, of_weight, of_bias, None, None, None


def _add_product(buffers: Buffers, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> None:
    task = _compat.graph_task_id()
    total = buffers.get(task)
    if total is None:
        buffers[task] = a.mm(b).to(dtype)
    elif total.dtype == a.dtype:
        torch.addmm(total, a, b, out=total)  # as `addmm_`, but FLOP counters know this name
    else:
        total.add_(a.mm(b))


class SummedProducts(TorchFunctionMode):
    """While it is active, products with a parameter add its gradient to one buffer per parameter."""

    def __init__(self) -> None:
        super().__init__()
        self._sums: dict[int, Sum] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        take = _PRODUCTS.get(func)
        if take is not None and torch.is_grad_enabled():
            x, weight, bias, turned = take(*args, **kwargs)
            if _is_ours(x, weight, bias):
                return self._product(x, weight, bias, turned)
        return func(*args, **kwargs)

    def _product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, turned: bool) -> torch.Tensor:
        total = self._sums.get(id(weight))  # its edge keeps the weight alive
        if total is None:
            total = self._sums[id(weight)] = Sum(weight)
        if _compat.autocast_on(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return cast("torch.Tensor", _Product.apply(x, total.edge, bias, _Held.apply(x), total.buffers, turned))


def _is_ours(x: Any, weight: Any, bias: Any) -> bool:
    if not isinstance(weight, torch.nn.Parameter) or not _compat.is_plain(weight):
        return False
    if not weight.requires_grad or not weight.is_leaf or weight.dim() != 2:
        return False
    if not _compat.is_plain(x) or x.dim() < 2 or x.device != weight.device or not x.is_floating_point():
        return False
    if bias is not None and (not isinstance(bias, torch.Tensor) or bias.shape != weight.shape[:1]):
        return False
    wide = torch.float64 in (x.dtype, weight.dtype)
    return not wide if _compat.autocast_on(x.device.type) else x.dtype == weight.dtype


Product = tuple[Any, Any, Any, bool]


def _linear(input: Any, weight: Any, bias: Any = None) -> Product:
    return input, weight, bias, True


def _matmul(input: Any, other: Any, **options: Any) -> Product:
    return (None if options else input), other, None, False


def _addmm(input: Any, mat1: Any, mat2: Any, **options: Any) -> Product:
    plain = not options and isinstance(mat2, torch.Tensor) and getattr(input, "shape", None) == mat2.shape[1:]
    return (mat1 if plain else None), mat2, input, False


_PRODUCTS: dict[Any, Callable[..., Product]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.mm: _matmul,
    torch.addmm: _addmm,
}
