"""The ways to run a block, one line each in `FORMS`; the first is what the others are compared with.

Problem. Recomputing `inner` frees what is inside it, but its result stays, because the consumer saves it. The
published method frees it by resizing its storage to nothing and runs a second backward to fill it again.

Idea. A region from `inner` through its consumer, the consumer a saved call: the consumer is not repeated, and what it
saves of its input is rebuilt by the replay. Nothing needs to be freed by hand. The same two words give the other
points: where the matrix products of `inner` are saved calls too, only what is cheap is repeated; where the region is
cut into tiles of tokens, the fat intermediate exists for one tile at a time. One tile is a point of its own: a tiled
region makes a weight's gradient first and lets go of what that took before it makes the input's, at no cost in FLOPs.

Rejected. A region around the whole block without a saved call needs as many bytes and as many FLOPs on these blocks,
because a replay ends before the last matrix product; it is not a column. It would differ where the consumer saves
something of its own, as attention does.

The torch form is as published: `torch.utils.checkpoint` around `inner` only, and plain where `inner` does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torch_recompute import no_recompute, recompute

from .blocks import Block, FP32Cast, Run

TILES = 16
TOKENS = 1
"""The dimension of `x` that holds the tokens of a sequence."""


@dataclass(frozen=True)
class Form:
    """A way to run a block.

    Attributes:
        name: How options and JSON call it.
        title: How the table calls it.
        run: The block's output for an input.
        fits: Whether it is a way of its own for this block.
        same_bits: Whether its gradients are those of the plain block to the last bit; else up to the order of sums.
    """

    name: str
    title: str
    run: Run
    fits: Callable[[Block], bool]
    same_bits: bool = True


def _always(block: Block) -> bool:
    return True


def _baseline(block: Block, x: Tensor) -> Tensor:
    return block(x)


def _torch_checkpoint(block: Block, x: Tensor) -> Tensor:
    if isinstance(block, FP32Cast) and x.dtype is torch.float32:
        return block(x)
    return block.outer(checkpoint(block.inner, x, use_reentrant=False), x)


def _saved_call(block: Block, x: Tensor) -> Tensor:
    return recompute(partial(block, outer=no_recompute), name="block")(x)


def _no_extra_gemm(block: Block, x: Tensor) -> Tensor:
    return recompute(partial(block, inner=no_recompute, outer=no_recompute), name="block")(x)


def _one_tile(block: Block, x: Tensor) -> Tensor:
    return recompute(block, name="block", tiles=1, tile_dim=TOKENS)(x)


def _tiled(block: Block, x: Tensor) -> Tensor:
    return recompute(block, name="block", tiles=TILES, tile_dim=TOKENS)(x)


FORMS = (
    Form("baseline", "baseline", _baseline, _always),
    Form("torch", "torch checkpoint", _torch_checkpoint, _always),
    Form("saved_call", "ours", _saved_call, _always),
    Form("no_extra_gemm", "ours, no extra GEMM", _no_extra_gemm, lambda block: block.gemm_before_pointwise),
    Form("one_tile", "ours, 1 tile", _one_tile, lambda block: block.fat, same_bits=False),
    Form("tiled", f"ours, {TILES} tiles", _tiled, lambda block: block.fat, same_bits=False),
)
