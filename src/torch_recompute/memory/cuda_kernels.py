"""Says what kernels of CUDA take while they run, and what cuBLAS keeps, by their sources; no device is asked.

It counts for a GPU that is not at hand, and where an operation alone draws random numbers or would take too long. Each
formula but that of chunks was compared with the allocator of an H100, to its rounding; those of sums suppose the most
multiprocessors that a device of a capability has, since the more there are, the more blocks share a sum, each with a
part of the result.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_SDPA = "_scaled_dot_product"

_MULTIPROCESSORS: dict[tuple[int, int], tuple[int, int]] = {  # and the threads of each
    (7, 0): (80, 2048),
    (7, 5): (40, 1024),
    (8, 0): (108, 2048),
    (8, 6): (84, 1536),
    (8, 9): (142, 1536),
    (9, 0): (132, 2048),
    (10, 0): (148, 2048),
    (12, 0): (170, 1536),
}


@functools.cache
def _name(func: Any) -> str:
    """The name of an operation without its overload."""
    return str(getattr(func, "overloadpacket", "")).removeprefix("aten.")


def taken_on_cuda(func: Any, args: Sequence[Any], capability: tuple[int, int]) -> int | None:
    """Returns the bytes that a kernel takes on a CUDA device of a capability; None where no formula is known.

    `args` are its positional arguments, and behind them where it writes to.
    """
    formula = _FORMULAS.get(_name(func))
    return attention(func, args) if formula is None else formula(args, capability)


def attention(func: Any, args: Sequence[Any]) -> int | None:
    """Returns the bytes that an attention kernel takes on CUDA; None for what is no such kernel.

    Each backward sums the queries' gradient in 32 bits and has a number per query; with fewer heads of keys than of
    queries, flash's and cuDNN's have gradients of keys and values for all heads as well:

    - flash (`flash_api.cpp`, `mha_bwd`): rows of a multiple of 128 and widths of a multiple of 32, or 256 above 192
    - efficient (`attention_backward.cu`): rows and widths of multiples of 64 where the type has 16 bits, else only the
      number per query; its forward sums the result in 32 bits where values are wider than 128
    - cuDNN from 9.0 on (`scaled_dot_product_flash_attention.h` of its frontend): rows and widths as they are
    """
    name = _name(func)
    if not name.startswith(_SDPA) or "for_cpu" in name or "math" in name:
        return None
    back = name.endswith("_backward")
    query, key, value = args[back : back + 3]
    batch, heads, rows, width = query.shape
    half = query.dtype.itemsize == 2
    if not back:
        wide = "efficient" in name and half and value.shape[-1] > 128
        return 4 * batch * heads * rows * value.shape[-1] if wide else 0
    if "flash" in name:
        accumulated = _up(rows, 128) * ((_up(width, 32) if width <= 192 else 256) + 1)
    elif "efficient" in name:
        accumulated = (_up(rows, 64) * _up(width, 64) if half else 0) + rows
    else:
        accumulated = rows * (width + 1)
    grouped = "efficient" not in name and key.shape[1] != heads
    spread = batch * heads * key.shape[-2] * (width + value.shape[-1]) * query.dtype.itemsize if grouped else 0
    return 4 * batch * heads * accumulated + spread


def _sum(args: Sequence[Any], capability: tuple[int, int]) -> int | None:
    """The bytes of a sum or a mean over some dimensions of a contiguous tensor, by PyTorch's kernel of reductions.

    A block has `width` times `height` threads: side by side along the last dimension, and one above the other along
    the values of a result. Where each thread has many values and the device has room for more blocks, several share a
    result, and each has its part of it in memory: of all its threads, where these make neighbouring results.
    """
    given, dims = args[0], args[1] if len(args) > 1 else None
    shape = tuple(given.shape)
    if capability not in _MULTIPROCESSORS or not (given.is_contiguous() and given.numel() and shape):
        return None
    summed = {dim % len(shape) for dim in dims or range(len(shape))}
    values = math.prod(shape[dim] for dim in summed)
    outputs = given.numel() // values
    last = max((dim for dim, size in enumerate(shape) if size > 1), default=0)
    runs = [dim for dim in summed if shape[dim] > 1 and dim + 1 not in summed]
    vector = 1 if last in summed else next(size for size in (4, 2, 1) if shape[last] % size == 0)
    most = 512 // vector
    across, down = (values, outputs) if last in summed else (outputs // vector, values)
    if last in summed and values >= 128 and len(runs) == 1:  # which are read four at a time
        across //= 4
    across, down = (min(most, 1 << max(0, size.bit_length() - 1)) for size in (across, down))
    width = min(across, 32)
    height = min(down, most // width)
    width = min(across, most // height)
    each, neighbours = (-(-values // width), 1) if last in summed else (values, width)
    if each < min(16 * height, 256):
        return 0
    each = -(-each // height)
    processors, threads = _MULTIPROCESSORS[capability]
    room, blocks = processors * (threads // (width * height)), -(-(outputs // vector) // neighbours)
    if each < 256 or blocks > room:
        return 0
    share = max(min(-(-room // blocks), -(-each // 16)), -(-each // 256))
    size = 8 if given.dtype.itemsize == 8 else 4
    return size * outputs * share * neighbours * vector + 4 * blocks if share > 1 else 0


def _embedding(args: Sequence[Any], _: tuple[int, int]) -> int | None:
    """The bytes of an embedding's gradient (`Embedding.cu`): indices that are sorted, and sums of parts in 32 bits."""
    gradient, indices, rows, *_rest, by_frequency = args
    count = indices.numel()
    if count <= 3072 and not by_frequency:
        return 0
    return 48 * count + 4 * (count // 10 + min(count, rows)) * _up(gradient.shape[-1], 32)


def _chunk_cat(args: Sequence[Any], _: tuple[int, int]) -> int | None:
    """The bytes of what tells blocks of 2,048 bytes what to copy (`TensorShape.cu`), as gradients are for FSDP2."""
    tensors, dim, chunks, out = (*args, args[0][0])[:4]
    types = {str(one.dtype) for one in (tensors[0], out)}
    if types not in ({str(out.dtype)}, {"torch.bfloat16", "torch.float32"}) or not all(
        x.is_contiguous() for x in tensors
    ):
        return None
    rows = [(-(-one.shape[dim] // chunks), math.prod(one.shape[dim + 1 :])) for one in tensors]
    blocks = sum(-(-size * each * out.dtype.itemsize // 2048) for size, each in rows)
    return 8 * (6 * len(tensors) + 2 + blocks)


_FORMULAS: Mapping[str, Callable[[Sequence[Any], tuple[int, int]], int | None]] = {
    "sum": _sum,
    "mean": _sum,
    "embedding_dense_backward": _embedding,
    "_chunk_cat": _chunk_cat,
}


def kept_by_cublas(capability: tuple[int, int]) -> int:
    """Returns the bytes that cuBLAS keeps on a device: a workspace for the forward's thread, one for the backward's.

    It is allocated at a thread's first product, as a tensor is, and stays (`CublasHandlePool.cpp`).
    `CUBLAS_WORKSPACE_CONFIG` says how large, as kilobytes and counts.
    """
    said = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")) or (
        [("4096", "8")] if capability[0] in (9, 10, 12) else [("4096", "2"), ("16", "8")]
    )
    return 2 * sum(1024 * int(size) * int(count) for size, count in said)


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
