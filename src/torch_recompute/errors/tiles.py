"""Texts for arguments and results that cannot be cut into tiles."""

from __future__ import annotations

from collections.abc import Sequence

from ._say import say


def bad_tiles(tiles: object, tile_dim: object) -> str:
    """Text for `tiles=` and `tile_dim=` that are no numbers, or no tile at all."""
    return (
        f"tiles={tiles!r}, tile_dim={tile_dim!r}: tiles is how many parts to cut the tokens into, 1 or more; tile_dim "
        "is the dimension that holds them.\n"
        "  Write recompute(mlp, tiles=8) for [batch, tokens, width], with tile_dim=0 for [tokens, width]."
    )


def tile_dim_alone(tile_dim: int) -> str:
    """Text for `tile_dim=` without `tiles=`."""
    return (
        f"tile_dim={tile_dim} has no effect without tiles=: the region is not cut.\n"
        f"  Write recompute(fn, tiles=8, tile_dim={tile_dim}), or leave it out."
    )


def nothing_to_tile(region: str, value: object, given: bool) -> str:
    """Text for a tiled region whose first argument is no tensor."""
    got = f"got {say(value)}" if given else "was called without positional arguments"
    return (
        f"{region} is cut into tiles along its first argument, a tensor, but {got}.\n"
        "  Pass the tensor that holds the tokens first and by position. What every tile needs whole goes by keyword."
    )


def no_such_dim(region: str, dim: int, shape: Sequence[int]) -> str:
    """Text for a `tile_dim` that the first argument does not have."""
    return (
        f"{region}: tile_dim={dim}, but its first argument has shape {tuple(shape)}, dimensions {-len(shape)} to "
        f"{len(shape) - 1}.\n  tile_dim is the dimension that holds the tokens: 1 in [batch, tokens, width], 0 in "
        "[tokens, width]."
    )


def cannot_cut(region: str, index: int, dim: int, shape: Sequence[int], first: Sequence[int]) -> str:
    """Text for a positional tensor that does not have the length of the first one."""
    return (
        f"{region} cuts every positional tensor along dimension {dim}: argument {index} has shape {tuple(shape)}, "
        f"argument 0 has {tuple(first)}.\n"
        "  Pass what every tile needs whole by keyword: it is not cut."
    )


def tile_not_a_tensor(region: str, value: object) -> str:
    """Text for a tiled function that returns something else than tensors."""
    return (
        f"{region} is called once per tile, and what it returns is put together along the token dimension; it returned "
        f"{say(value)}, which cannot be.\n"
        "  Return tensors that hold one entry per token. What is not per token (a loss, a count) belongs outside, or "
        "in a region without tiles=."
    )


def tile_of_other_length(region: str, shape: Sequence[int], dim: int, length: int) -> str:
    """Text for a tiled function whose result does not have its tile's length."""
    return (
        f"{region} returned a tensor of shape {tuple(shape)} for a tile of {length} tokens, whose dimension {dim} "
        f"should be {length}.\n"
        "  tiles= is for functions that act on each token on its own and return one entry per token; a function that "
        "mixes, drops or sums tokens needs a region without tiles=."
    )
