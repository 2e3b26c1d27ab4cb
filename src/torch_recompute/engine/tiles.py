"""A region per tile of tokens, so that what is wide inside exists for one tile at a time.

`recompute(mlp, tiles=8)(x)` cuts `x` along the token dimension, runs `mlp` as one region per tile and writes the
results into one output. Autograd runs the tiles' backward one after the other, latest first, because that is the
order of their nodes; so each tile is replayed, used and freed before the next. Nothing here calls backward.

Autograd adds up the gradients of a tensor that is used many times: each use delivers a tensor of the full size, so at
least two of them are alive at once. So outputs are written in place (`_Place`), and the input and the weights get an
*edge*: a node of its own between a tensor and its users. Users do not return their gradient, they add it to the edge's
buffer in place (a matrix product straight into it, a slice copied to its place), and the edge passes the finished
buffer on when all users have run. The parameter receives one gradient, from one node, in the same backward call:
gradient hooks and DDP see what they would see without tiles. Buffers belong to one graph task, so a retained graph and
concurrent backward calls are right. With `create_graph=True` the users return ordinary gradients. With eight layers of
two 2048 x 8192 matrices in float32 and 4096 tokens, that is a peak of 2192 MiB in place of 2316.

Which products are taken: `F.linear`, `matmul` and `addmm` with a two-dimensional parameter. Everything else that a
function does with a parameter goes through autograd's own sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any, cast

import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .. import _torch, errors
from .._torch.tensors import unviewed

Buffers = dict[int, torch.Tensor]
"""The sum of each backward call that runs now, by graph task."""


class Sum:
    """A tensor whose gradient is added up in one buffer.

    Attributes:
        edge: The tensor again, with the node that passes the sum on.
        buffers: Where users add their gradients.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.buffers: Buffers = {}
        self.edge = cast("torch.Tensor", _Edge.apply(tensor, self.buffers))


class _Edge(Function):
    """Passes the finished sum on."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, buffers: Buffers) -> torch.Tensor:
        ctx.buffers = buffers
        ctx.set_materialize_grads(False)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        (grad,) = grads
        total = ctx.buffers.pop(_torch.graph_task_id(), None)
        if total is None or grad is None:
            return (grad if total is None else total), None
        return total + grad, None


class _Part(Function):
    """Takes a slice of a tensor, whose gradient is copied to its place in the sum."""

    @staticmethod
    def forward(ctx: Any, edge: torch.Tensor, buffers: Buffers, dim: int, start: int, length: int) -> torch.Tensor:
        ctx.buffers, ctx.place, ctx.shape = buffers, (dim, start, length), edge.shape
        ctx.set_materialize_grads(False)
        return edge.detach().narrow(dim, start, length)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        (grad,) = grads
        of_edge = None
        if grad is not None and torch.is_grad_enabled():
            dim, start, length = ctx.place
            after = ctx.shape[dim] - start - length
            of_edge = F.pad(grad, [*[0, 0] * (len(ctx.shape) - 1 - dim), start, after])
        elif grad is not None:
            task = _torch.graph_task_id()
            if task not in ctx.buffers:
                ctx.buffers[task] = grad.new_zeros(ctx.shape)
            ctx.buffers[task].narrow(*ctx.place).copy_(grad)
        return of_edge, None, None, None, None


class _Held(Function):
    """Saves the left side of a product before the product is computed, so that a replay can end there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None


PLUMBING = frozenset(function.forward.__code__ for function in (_Edge, _Part, _Held))
"""Code of this file that computes nothing of the user's function."""


class _Product(Function):
    """Computes `x @ weight`, or `x @ weight.T`, plus a bias."""

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
        made = F.linear(x, weight if turned else weight.t(), None if bias is None else bias.to(x.dtype))
        return unviewed(made)  # the function may change it in place

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
            a, b = (rows, x.reshape(-1, x.shape[-1])) if ctx.turned else (x.reshape(-1, x.shape[-1]), rows)
            if torch.is_grad_enabled():
                of_weight = a.t().mm(b).to(weight.dtype)
            else:
                _add_product(ctx.buffers, a.t(), b, weight.dtype)
            del a, b
        if ctx.held is not None and not torch.is_grad_enabled():
            del x  # what it takes to make the weight's gradient is not needed for the other one
            ctx.held.maybe_clear_saved_tensors()
        of_x = None
        if needs_x:
            of_x = grad.matmul(weight.to(grad.dtype) if ctx.turned else weight.t().to(grad.dtype))
        return of_x, of_weight, of_bias, None, None, None


def _add_product(buffers: Buffers, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> None:
    task = _torch.graph_task_id()
    total = buffers.get(task)
    if total is None:
        buffers[task] = a.mm(b).to(dtype)
    elif total.dtype == a.dtype:
        torch.addmm(total, a, b, out=total)  # as `addmm_`, but FLOP counters know this name
    else:
        total.add_(a.mm(b))


class SummedProducts(TorchFunctionMode):
    """Has products with a parameter add its gradient to one buffer per parameter."""

    def __init__(self) -> None:
        super().__init__()
        self._sums: dict[int, Sum] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
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
        if _torch.autocast_on(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return cast("torch.Tensor", _Product.apply(x, total.edge, bias, _Held.apply(x), total.buffers, turned))


def _is_ours(x: Any, weight: Any, bias: Any) -> bool:
    if not isinstance(weight, torch.nn.Parameter) or not _torch.is_plain(weight):
        return False
    if not weight.requires_grad or not weight.is_leaf or weight.dim() != 2:
        return False
    if not _torch.is_plain(x) or x.dim() < 2 or x.device != weight.device or not x.is_floating_point():
        return False
    if bias is not None and (not isinstance(bias, torch.Tensor) or bias.shape != weight.shape[:1]):
        return False
    wide = torch.float64 in (x.dtype, weight.dtype)
    return not wide if _torch.autocast_on(x.device.type) else x.dtype == weight.dtype


Product = tuple[Any, Any, Any, bool]


def _matmul(input: Any, other: Any, **options: Any) -> Product:
    return (None if options else input), other, None, False


def _addmm(input: Any, mat1: Any, mat2: Any, **options: Any) -> Product:
    plain = not options and isinstance(mat2, torch.Tensor) and getattr(input, "shape", None) == mat2.shape[1:]
    return (mat1 if plain else None), mat2, input, False


_PRODUCTS: dict[Any, Callable[..., Product]] = {
    F.linear: lambda input, weight, bias=None: (input, weight, bias, True),
    torch.matmul: _matmul,
    torch.mm: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.mm: _matmul,
    torch.addmm: _addmm,
}


Region = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class _Dense(functools.partial[Any]):
    """Calls a function with a tile that is laid out as the whole is, but without gaps, as `view` and kernels want it.

    The copy is made within the region, so it exists for one tile at a time.
    """

    def __call__(self, *parts: Any, **kwargs: Any) -> Any:
        return super().__call__(*map(_without_gaps, parts), **kwargs)


def _without_gaps(part: Any) -> Any:
    if not isinstance(part, torch.Tensor) or part.layout is not torch.strided:
        return part
    reach = 1 + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
    return part if reach <= part.numel() else part.clone()


TOKENS = -2
"""The dimension of tokens in a plan's tiles."""
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def _mixes(module: nn.Module, dim: int) -> bool:
    """Whether a module of torch computes an entry of a dimension from several."""
    if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
        return dim in ((1, -2) if module.batch_first else (0, -3))
    return isinstance(module, _BATCH_NORMS)


def refuse_mixing(fn: object, dim: int, also: Collection[str] = ()) -> None:
    """Raises an `ArgumentError` for a module in tiles in which something is known to compute from several tokens.

    Args:
        fn: What is to be called in tiles; of a function nothing is known.
        dim: The dimension that is cut.
        also: The paths below `fn` of other modules that mix tokens.
    """
    for path, module in fn.named_modules() if isinstance(fn, nn.Module) else ():
        if _mixes(module, dim) or path in also:
            where = f"{path} ({type(module).__name__})" if path else type(module).__name__
            raise errors.ArgumentError(
                f"tiles= is for what acts on each token on its own, and {where} computes from several: in tiles each "
                "would see those of its tile alone, and results would be others.\n"
                "  Call the parts in tiles that do not mix tokens, such as the MLP, and leave tiles out of the rest."
            )


def check(fn: object, tiles: Any, tile_dim: Any) -> None:
    """Raises an `ArgumentError` for `tiles=` and `tile_dim=` that cannot be, or not of this function."""
    if tiles is not None:
        refuse_mixing(fn, tile_dim)
    if tiles is None and type(tile_dim) is int and tile_dim != 1:
        raise errors.ArgumentError(
            f"tile_dim={tile_dim} has no effect without tiles=: the region is not cut.\n"
            f"  Write recompute(fn, tiles=8, tile_dim={tile_dim}), or leave it out."
        )
    if type(tile_dim) is not int or (tiles is not None and (type(tiles) is not int or tiles < 1)):
        raise errors.ArgumentError(
            f"tiles={tiles!r}, tile_dim={tile_dim!r}: tiles is how many parts to cut the tokens into, 1 or more; "
            "tile_dim is the dimension that holds them.\n"
            "  Write recompute(mlp, tiles=8) for [batch, tokens, width], with tile_dim=0 for [tokens, width]."
        )


def run(
    region: Region,
    fn: Callable[..., Any],
    name: str,
    tiles: int,
    dim: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Calls `fn` as one region per tile and puts the results together.

    Args:
        region: Calls a function as a region, with the arguments that are given to it.
        fn: The function.
        name: The region's name, for errors.
        tiles: How many tiles, at most one per token; their sizes differ by one at the most.
        dim: Which dimension holds the tokens.
        args: Positional arguments; tensors among them are cut.
        kwargs: Keyword arguments, passed whole.

    Raises:
        ArgumentError: The arguments cannot be cut so, or a result does not have its tile's length.
    """
    dim, size = _tokens(name, dim, args)
    count = max(1, min(tiles, size))
    bounds = [(size * tile // count, size * (tile + 1) // count) for tile in range(count)]
    if torch.compiler.is_compiling():
        return _traced(region, fn, dim, bounds, args, kwargs)
    of_tile = _Dense(fn)
    sums = [Sum(arg) if isinstance(arg, torch.Tensor) and arg.requires_grad else None for arg in args]
    whole = _Whole(name, dim, size)
    with SummedProducts():
        for start, stop in bounds:
            place = dim, start, stop - start
            parts = tuple(
                _Part.apply(total.edge, total.buffers, *place)
                if total is not None
                else (arg.narrow(*place) if isinstance(arg, torch.Tensor) else arg)
                for arg, total in zip(args, sums, strict=True)
            )
            whole.add(region(of_tile, parts, kwargs), start, stop - start)
    return whole.result()


def _traced(
    region: Region,
    fn: Callable[..., Any],
    dim: int,
    bounds: list[tuple[int, int]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Does the same for the compiler, which plans buffers itself: in-place writes would hide the dataflow from it."""

    def of_tile(*parts: Any, **kwargs: Any) -> Any:
        return fn(*map(_without_gaps, parts), **kwargs)

    results: list[Any] = []
    for start, stop in bounds:
        parts = [arg.narrow(dim, start, stop - start) if isinstance(arg, torch.Tensor) else arg for arg in args]
        results.append(region(of_tile, tuple(parts), kwargs))
    spec = _torch.tree_flatten(results[0])[1]
    columns = zip(*[_torch.tree_flatten(result)[0] for result in results], strict=True)
    return _torch.tree_unflatten([torch.cat(column, dim) for column in columns], spec)


def _tokens(name: str, dim: int, args: tuple[Any, ...]) -> tuple[int, int]:
    """Returns the dimension that is cut, counted from the front, and its size."""
    if not args or not isinstance(args[0], torch.Tensor):
        got = f"got {errors.say(args[0])}" if args else "was called without positional arguments"
        raise errors.ArgumentError(
            f"{name} is cut into tiles along its first argument, a tensor, but {got}.\n"
            "  Pass the tensor that holds the tokens first and by position. What every tile needs whole goes by "
            "keyword."
        )
    first = args[0]
    if not -first.dim() <= dim < first.dim():
        raise errors.ArgumentError(
            f"{name}: tile_dim={dim}, but its first argument has shape {tuple(first.shape)}, dimensions "
            f"{-len(first.shape)} to {len(first.shape) - 1}.\n"
            "  tile_dim is the dimension that holds the tokens: 1 in [batch, tokens, width], 0 in [tokens, width]."
        )
    dim %= first.dim()
    for index, arg in enumerate(args):
        if isinstance(arg, torch.Tensor) and (arg.dim() <= dim or arg.shape[dim] != first.shape[dim]):
            raise errors.ArgumentError(
                f"{name} cuts every positional tensor along dimension {dim}: argument {index} has shape "
                f"{tuple(arg.shape)}, argument 0 has {tuple(first.shape)}.\n"
                "  Pass what every tile needs whole by keyword: it is not cut."
            )
    return dim, first.shape[dim]


class _Whole:
    """Puts the results of all tiles into one tensor for each that the function returns."""

    def __init__(self, name: str, dim: int, size: int) -> None:
        self._name, self._dim, self._size = name, dim, size
        self._leaves: list[torch.Tensor] = []
        self._spec: Any = None

    def add(self, result: Any, start: int, length: int) -> None:
        """Writes one tile's result to its place."""
        leaves, spec = _torch.tree_flatten(result)
        dim = self._dim
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                raise errors.ArgumentError(
                    f"{self._name} is called once per tile, and what it returns is put together along the token "
                    f"dimension; it returned {errors.say(leaf)}, which cannot be.\n"
                    "  Return tensors that hold one entry per token. What is not per token (a loss, a count) belongs "
                    "outside, or in a region without tiles=."
                )
            if leaf.dim() <= dim or leaf.shape[dim] != length:
                raise errors.ArgumentError(
                    f"{self._name} returned a tensor of shape {tuple(leaf.shape)} for a tile of {length} tokens, whose "
                    f"dimension {dim} should be {length}.\n"
                    "  tiles= is for functions that act on each token on its own and return one entry per token; a "
                    "function that mixes, drops or sums tokens needs a region without tiles=."
                )
        if start == 0:
            self._spec = spec
            self._leaves = [leaf.new_empty([*leaf.shape[:dim], self._size, *leaf.shape[dim + 1 :]]) for leaf in leaves]
        for i, leaf in enumerate(leaves):
            if leaf.requires_grad:
                self._leaves[i] = cast("torch.Tensor", _Place.apply(self._leaves[i], leaf, dim, start))
            else:
                with torch.no_grad():
                    self._leaves[i].narrow(dim, start, length).copy_(leaf)

    def result(self) -> Any:
        """Returns what the function would have returned for the whole."""
        return _torch.tree_unflatten(self._leaves, self._spec)


class _Place(Function):
    """Writes a tile into the whole, in place."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, tile: torch.Tensor, dim: int, start: int) -> torch.Tensor:
        length = tile.shape[dim]
        ctx.place = dim, start, length
        ctx.set_materialize_grads(False)
        whole.narrow(dim, start, length).copy_(tile)
        ctx.mark_dirty(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        (grad,) = grads
        return grad, None if grad is None else grad.narrow(*ctx.place), None, None
