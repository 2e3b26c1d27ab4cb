"""Says what kernels of CUDA take while they run, and what cuBLAS keeps, by their sources; no device is asked.

It counts for a GPU that is not at hand, and where an operation alone draws random numbers or would take too long. Each
formula was compared with the allocator of an H100, to its rounding; those of sums suppose the most multiprocessors that
a device of a capability has, since the more there are, the more blocks share a sum, each with a part of the result.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_SDPA = "_scaled_dot_product"

Capability = tuple[int, int]
_Formula = Callable[[Sequence[Any], Mapping[str, Any], Capability | None], int | None]
_MULTIPROCESSORS: dict[Capability | None, tuple[int, int]] = {  # and the threads of each
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


def taken_on_cuda(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], capability: Capability | None
) -> int | None:
    """Returns the bytes that a kernel takes on a CUDA device; None where no formula is known.

    Args:
        func: The operation's overload.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        capability: Of the device; None for what is the same on all, so that the rest can be asked of a device.
    """
    formula = _FORMULAS.get(_name(func))
    if formula is None:
        return attention(func, args) if capability else None
    return formula(args, kwargs, capability)


def has_formula(func: Any) -> bool:
    """Whether what an operation takes depends on sizes, by a formula here."""
    return _name(func) in _FORMULAS


def attention(func: Any, args: Sequence[Any]) -> int | None:
    """Returns the bytes that an attention kernel takes on CUDA; None for what is no such kernel.

    Each backward sums the queries' gradient in 32 bits and has a number per query; with fewer heads of keys than of
    queries, flash's and cuDNN's have gradients of keys and values for all heads as well:

    - flash (`flash_api.cpp`, `mha_bwd`): rows of a multiple of 128 and widths of a multiple of 32, or 256 above 192
    - efficient (`attention_backward.cu`): rows and widths of multiples of 64 where the type has 16 bits, else only the
      number per query; its forward sums the result in 32 bits where values are wider than 128
    - cuDNN from 9.0 on (`scaled_dot_product_flash_attention.h` of its frontend): rows and widths as they are, and 256
      bytes with fewer heads of keys
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
    spread += 256 if grouped and "flash" not in name else 0
    return 4 * batch * heads * accumulated + spread


def _sum(args: Sequence[Any], kwargs: Mapping[str, Any], capability: Capability | None) -> int | None:
    """The bytes of a sum or a mean, and of a copy of what has another type than the result, but for 16 bits."""
    given, dims = args[0], args[1] if len(args) > 1 else None
    made = kwargs.get("dtype") or (given.dtype if given.is_floating_point() else torch.int64)
    inside = made == given.dtype or (given.dtype.itemsize == 2 and made == torch.float32)
    shared = _shared(given, dims, capability, 8 if made.itemsize == 8 else 4)
    return shared if inside or shared is None else shared + given.numel() * made.itemsize


def _most(args: Sequence[Any], _: Mapping[str, Any], capability: Capability | None) -> int | None:
    """The bytes of the largest or smallest value: along one dimension with its place, or of all."""
    given, *dims = args
    if dims and isinstance(dims[0], torch.Tensor):
        return 0
    return _shared(given, dims[0] if dims else None, capability, 16 if dims else given.dtype.itemsize)


def _reduction(least: int, most: int, place: int = 1) -> _Formula:
    """The bytes of a reduction whose parts are as large as a value, within bounds; `place` is where dimensions are."""

    def formula(args: Sequence[Any], _: Mapping[str, Any], capability: Capability | None) -> int | None:
        dims = args[place] if len(args) > place else None
        return _shared(args[0], dims, capability, min(max(args[0].dtype.itemsize, least), most))

    return formula


def _shared(given: Any, dims: Any, capability: Capability | None, size: int) -> int | None:
    """The bytes of a reduction over some dimensions of a dense tensor, by PyTorch's kernel (Reduce.cuh).

    A block has `width` times `height` threads: side by side along the last dimension in memory, and one above the other
    along the values of a result. Where each thread has many values and the device has room for more blocks, several
    share a result, and each has its part of it in memory, of `size` bytes: of all its threads, where these make
    neighbouring results. The 4 bytes for each block that counts them have memory of their own, and are left out.
    """
    given_dims = dims if isinstance(dims, Sequence) else () if dims is None else (dims,)
    order = sorted(range(given.dim()), key=lambda dim: -given.stride(dim) if given.shape[dim] > 1 else -math.inf)
    if capability not in _MULTIPROCESSORS or not (given.numel() and order and given.permute(order).is_contiguous()):
        return None
    shape = [given.shape[dim] for dim in order]
    summed = {order.index(dim % len(shape)) for dim in given_dims or order}
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
    return size * outputs * share * neighbours * vector if share > 1 else 0


def _embedding(args: Sequence[Any], *_: Any) -> int | None:
    """The bytes of an embedding's gradient (`Embedding.cu`): indices that are sorted, and sums of parts in 32 bits."""
    gradient, indices, rows, *_rest, by_frequency = args
    count = indices.numel()
    if count <= 3072 and not by_frequency:
        return 0
    return 48 * count + 4 * (count // 10 + min(count, rows)) * _up(gradient.shape[-1], 32)


def _put(args: Sequence[Any], *_: Any) -> int | None:
    """The bytes of values that are put at indices, or added there (`Indexing.cu`): then the indices are sorted."""
    indices = [index for index in args[1] if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
        return None
    count = math.prod(torch.broadcast_shapes(*(index.shape for index in indices)))
    return 0 if len(args) < 4 or not args[3] else 48 * count + _sorting(count, 6144)


def _sort(args: Sequence[Any], kwargs: Mapping[str, Any], _: Capability | None) -> int | None:
    """The bytes of a sort of rows of at most 4,096 values, whose places are one row, or of a single row (CUB)."""
    given = args[0]
    dim = kwargs.get("dim", next((value for value in args[1:] if type(value) is int), -1))
    rows = given.shape[dim] if given.dim() else 1
    if not given.is_contiguous() or (given.dim() and dim % given.dim() != given.dim() - 1):
        return None
    if rows <= 4096:
        return 8 * rows
    size = given.dtype.itemsize
    return (16 + size) * rows + _sorting(rows, 2176 * size) if given.dim() == 1 else None


def _sorting(count: int, counts: int) -> int:
    """The bytes that CUB's sort keeps beside keys and values: a kilobyte for each 4,600 of them, and its counts."""
    return count * 1024 // 4600 + counts if count > 4096 else 0


def _cumsum(args: Sequence[Any], kwargs: Mapping[str, Any], _: Capability | None) -> int | None:
    """The bytes of a running sum (`ScanKernels.cpp`): a copy in the type of the result, and CUB's of a single row."""
    given, dim = args[:2]
    made = kwargs.get("dtype") or (given.dtype if given.is_floating_point() else torch.int64)
    cast = 0 if made == given.dtype and given.is_contiguous() else given.numel() * made.itemsize
    one = given.dim() and given.shape[dim] == given.numel()
    return cast + (1024 + 16 * -(-given.numel() // (896 if made.itemsize == 8 else 3840)) if one else 0)


def _topk(args: Sequence[Any], *_: Any) -> int | None:
    """The bytes of the largest of each row (`TensorTopK.cu`), which several blocks look for where rows are long."""
    given = args[0]
    rows = given.numel() // max(1, given.shape[-1]) if given.dim() else 1
    long = next(size for most, size in _LONG_ROWS if rows <= most)
    if not given.dim() or given.shape[-1] < long:
        return 0
    return 1564 * rows if rows > 4000 and given.shape[-1] <= 1024 else None


_LONG_ROWS = (20, 20000), (40, 10000), (80, 8000), (199, 5000), (799, 3000), (4000, 800), (math.inf, 400)


def _histc(args: Sequence[Any], *_: Any) -> int | None:
    """Nothing, where the ends of the histogram are given."""
    return 0 if len(args) == 4 and args[2] != args[3] else None


def _softmax_backward(args: Sequence[Any], *_: Any) -> int | None:
    """The bytes of the gradient times the result, and of copies of what is not contiguous (`SoftMax.cu`)."""
    return args[0].nbytes + _copies(args[:2])


def _logsumexp(args: Sequence[Any], *_: Any) -> int | None:
    """The bytes of the exponentials, and of the largest values."""
    dims = {dim % args[0].dim() for dim in args[1]}
    outputs = math.prod(size for dim, size in enumerate(args[0].shape) if dim not in dims)
    return (args[0].numel() + outputs) * args[0].dtype.itemsize


def _grouped(args: Sequence[Any], _: Mapping[str, Any], capability: Capability | None) -> int | None:
    """The bytes of products of groups in bfloat16 on Hopper: what tells CUTLASS the operands of each (`GroupMM.cu`)."""
    first, second, *rest = args
    groups = rest[0].shape[0] if rest and rest[0] is not None else first.shape[0]
    if capability != (9, 0) or {first.dtype, second.dtype} != {torch.bfloat16}:
        return None
    return 60 * groups + 512 * _MULTIPROCESSORS[capability][0]


def _norm_backward(args: Sequence[Any], _: Mapping[str, Any], capability: Capability | None) -> int | None:
    """The bytes of copies; sums of parts, which many rows of few values have, are unknown (`layer_norm_kernel.cu`)."""
    width = math.prod(args[2])
    processors = _MULTIPROCESSORS.get(capability, (math.inf,))[0]
    split = args[1].numel() > 65536 * width and width // 32 < processors // 2
    return None if split else _copies(args[:2])


def _product(args: Sequence[Any], *_: Any) -> int | None:
    """The bytes of copies of matrices that cuBLAS cannot read: whose rows and columns both have gaps (`Blas.cpp`)."""
    pair = [one for one in args if isinstance(one, torch.Tensor)][-2:]
    return sum(one.nbytes for one in pair if not _for_cublas(one))


def _for_cublas(matrix: Any) -> bool:
    (rows, columns), (down, across) = matrix.shape[-2:], matrix.stride()[-2:]
    return (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))


def _copies(tensors: Sequence[Any]) -> int:
    return sum(one.nbytes for one in tensors if not one.is_contiguous())


def _chunk_cat(args: Sequence[Any], kwargs: Mapping[str, Any], _: Capability | None) -> int | None:
    """The bytes of what tells blocks of 2,048 bytes what to copy (`TensorShape.cu`), as gradients are for FSDP2."""
    tensors, dim, chunks = args[:3]
    out = kwargs.get("out", tensors[0])
    types = {str(one.dtype) for one in (tensors[0], out)}
    if types not in ({str(out.dtype)}, {"torch.bfloat16", "torch.float32"}) or _copies(tensors):
        return None
    rows = [(-(-one.shape[dim] // chunks), math.prod(one.shape[dim + 1 :])) for one in tensors]
    blocks = sum(-(-size * each * out.dtype.itemsize // 2048) for size, each in rows)
    return 8 * (6 * len(tensors) + 2 + blocks)


_FORMULAS: Mapping[str, _Formula] = {
    **dict.fromkeys(("sum", "mean"), _sum),
    **dict.fromkeys(("max", "min"), _most),
    **dict.fromkeys(("all", "any"), _reduction(1, 1)),
    **dict.fromkeys(("amax", "amin"), _reduction(1, 8)),
    "prod": _reduction(4, 8),
    "linalg_vector_norm": _reduction(4, 8, place=2),
    **dict.fromkeys(("argmax", "argmin", "var", "std", "var_mean", "std_mean"), _reduction(16, 16)),
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm"), _product),
    "embedding_dense_backward": _embedding,
    "index_put_": _put,
    "sort": _sort,
    "cumsum": _cumsum,
    "topk": _topk,
    "histc": _histc,
    "_softmax_backward_data": _softmax_backward,
    "logsumexp": _logsumexp,
    "_grouped_mm": _grouped,
    "native_layer_norm": lambda args, *_: _copies(args[:1]),
    "native_layer_norm_backward": _norm_backward,
    "_chunk_cat": _chunk_cat,
}


def kept_by_cublas(capability: Capability) -> int:
    """Returns the bytes that cuBLAS keeps on a device: a workspace for the forward's thread, one for the backward's.

    It is allocated at a thread's first product, as a tensor is, and stays (`CublasHandlePool.cpp`).
    `CUBLAS_WORKSPACE_CONFIG` says how large, as kilobytes and counts. cuBLASLt has another for products with a bias,
    of `CUBLASLT_WORKSPACE_SIZE` kilobytes.
    """
    said = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")) or (
        [("4096", "8")] if capability[0] in (9, 10, 12) else [("4096", "2"), ("16", "8")]
    )
    light = 1024 * int(os.environ.get("CUBLASLT_WORKSPACE_SIZE", "1024"))
    return light + 2 * sum(1024 * int(size) * int(count) for size, count in said)


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
