"""A region per tile of tokens, so that what is fat inside exists for one tile at a time.

`recompute(mlp, tiles=8)(x)` cuts `x` along the token dimension, runs `mlp` as one region per tile and writes the
results into one output. Autograd runs the tiles' backward one after the other, latest first, because that is the
order of their nodes; so each tile is replayed, used and freed before the next. Nothing here calls backward.

What would cost memory elsewhere is written in place: the outputs (`_Place`), the tiles' share of the input's gradient
and the products that make a weight's gradient (`_sums.py`). Rejected: `torch.cat` of the results and of the input's
gradients, and autograd's own sum of weight gradients. They keep two of each alive: 2316 MiB where this reaches 2192
(eight layers of two 2048 x 8192 matrices in float32, 4096 tokens).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.autograd import Function

from . import _compat, errors
from ._sums import Sum, SummedProducts

Region = Callable[[tuple[Any, ...], dict[str, Any]], Any]


def check(tiles: Any, tile_dim: Any) -> None:
    """Raises an `ArgumentError` for `tiles=` and `tile_dim=` that cannot be."""
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


def run(region: Region, name: str, tiles: int, dim: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls `region` once per tile and puts the results together.

    Args:
        region: Makes one region of the arguments it is given.
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
        return _traced(region, dim, bounds, args, kwargs)
    cut = [_cutter(arg, dim) if isinstance(arg, torch.Tensor) else None for arg in args]
    whole = _Whole(name, dim, size)
    with SummedProducts():
        for start, stop in bounds:
            parts = [arg if take is None else take(start, stop - start) for arg, take in zip(args, cut, strict=True)]
            whole.add(region(tuple(parts), kwargs), start, stop - start)
    return whole.result()


def _traced(
    region: Region, dim: int, bounds: list[tuple[int, int]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The same for the compiler, which plans buffers itself: in-place writes would only hide the dataflow from it."""
    results: list[Any] = []
    for start, stop in bounds:
        parts = [arg.narrow(dim, start, stop - start) if isinstance(arg, torch.Tensor) else arg for arg in args]
        results.append(region(tuple(parts), kwargs))
    spec = _compat.tree_flatten(results[0])[1]
    columns = zip(*[_compat.tree_flatten(result)[0] for result in results], strict=True)
    return _compat.tree_unflatten([torch.cat(column, dim) for column in columns], spec)


def _nothing_to_tile(region: str, value: object, given: bool) -> str:
    """Text for a tiled region whose first argument is no tensor."""
    got = f"got {errors.say(value)}" if given else "was called without positional arguments"
    return (
        f"{region} is cut into tiles along its first argument, a tensor, but {got}.\n"
        "  Pass the tensor that holds the tokens first and by position. What every tile needs whole goes by keyword."
    )


def _tokens(name: str, dim: int, args: tuple[Any, ...]) -> tuple[int, int]:
    """The dimension that is cut, counted from the front, and its size."""
    if not args or not isinstance(args[0], torch.Tensor):
        raise errors.ArgumentError(_nothing_to_tile(name, args[0] if args else None, bool(args)))
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


def _cutter(tensor: torch.Tensor, dim: int) -> Callable[[int, int], torch.Tensor]:
    if not tensor.requires_grad:
        return lambda start, length: tensor.narrow(dim, start, length)
    total = Sum(tensor)
    return lambda start, length: total.part(dim, start, length)


class _Whole:
    """The results of all tiles, in one tensor for each that the function returns."""

    def __init__(self, name: str, dim: int, size: int) -> None:
        self._name, self._dim, self._size = name, dim, size
        self._leaves: list[torch.Tensor] = []
        self._spec: Any = None

    def add(self, result: Any, start: int, length: int) -> None:
        """Writes one tile's result to its place."""
        leaves, spec = _compat.tree_flatten(result)
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
        """What the function would have returned for the whole."""
        return _compat.tree_unflatten(self._leaves, self._spec)


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
