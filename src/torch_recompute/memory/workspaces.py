"""Workspaces: the memory that one operation takes and gives back while it runs.

What a kernel takes besides what it returns may be most of a step's peak: on the CPU a convolution writes every patch of
its input out as a column, a norm copies what is not contiguous, attention has a block of scores for each thread. So the
operation runs once alone, on tensors of zeros with the same layouts, under the allocator's events; how far these rise
above what is left at the end is its workspace. It depends on the operation, the layouts, the other arguments and the
number of threads, so it is measured once per process, by `measure` and `simulate` alike. Only operations of the kinds
below are measured, those that had any among all operations of the models of the tests, and of the same families.

Two things are known without measuring: attention on CUDA (`attention_on_cuda`; the sources say how much, which counts
for a GPU that is not at hand, with dropout, and where the operation alone would take too long), and `kept_by_cublas`.

The operation runs on a thread of its own, on which no mode, no autocast and no profiler of the caller is active, and on
no tensor of the caller. Nothing is run that draws random numbers, that could not be alive twice in the memory that is
free, or that would take longer than some seconds.
"""

from __future__ import annotations

import functools
import math
import os
import re
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, cast

import torch

from .. import _torch, errors
from .._torch.devices import cpu_allocations
from .._torch.fakes import FakeTensor, device_of
from ..arguments import mapped
from . import allocator
from .free import host_memory

SDPA = "_scaled_dot_product"

TAKING = frozenset(
    {
        # inputs and weights in the layout of the kernel, or all patches of the input as columns
        *("convolution", "convolution_backward"),
        # sums of each thread, statistics, copies of what is not contiguous
        *("native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward"),
        *("native_batch_norm", "native_batch_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward"),
        # scores of a block of queries for each thread, or which rows are all masked
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        *(f"{SDPA}_{kind}_attention{end}" for kind in ("cudnn", "efficient", "flash") for end in ("", "_backward")),
        "_safe_softmax",
        # the maximum and the differences from it; a copy; sums so far of each thread
        *("logsumexp", "sort", "cumsum"),
        # weights and indices of the points between
        *("upsample_bilinear2d", "upsample_bicubic2d", "upsample_linear1d"),
    }
)
"""Operations that may take a workspace whatever their arguments are."""

COPYING = frozenset(
    {
        *("gelu_backward", "embedding_dense_backward", "avg_pool2d", "avg_pool2d_backward", "upsample_nearest2d"),
        *("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"),
    }
)
"""Operations that copy arguments that are not contiguous, and take nothing where all are."""

aten: Any = torch.ops.aten
_CUDNN: Any = aten._cudnn_rnn.default
_DROPOUT = 11  # which of its arguments
RECURRENT: dict[Any, int] = {aten.mkldnn_rnn_layer.default: 3, _CUDNN: 3}
"""Operations that keep for their backward what the kernel alone knows the size of, and which result that is."""

MOST_WORK = 10**11
"""Multiplications of an operation that is run alone, per thread: some five seconds."""
DRAWS = "it draws random numbers"
NO_MEMORY = "there is no memory to run it alone"

_known: dict[Any, int | str] = {}


def workspace(func: Any, inputs: Any) -> int | str:
    """Returns the most bytes that an operation takes while it runs, beyond its arguments and its results.

    Args:
        func: Its overload.
        inputs: Its positional and its keyword arguments; tensors may be fake.

    Returns:
        The bytes, or why they are not known, in words. 0 for real tensors that are not on the CPU, whose allocator
        says what was taken.
    """
    copying = _name(func) in COPYING
    if not takes(func) and not copying:
        return 0
    tensors = _torch.tensors_in(inputs)
    if not tensors or (copying and all(tensor.is_contiguous() for tensor in tensors)):
        return 0
    device = device_of(tensors[0])
    if device.type != "cpu" and type(tensors[0]) is not FakeTensor:
        return 0
    threads = torch.get_num_threads()
    key = (func, _layout(inputs), str(device), threads, torch.backends.mkldnn.enabled)
    if key in _known:
        return _known[key]
    formula = attention_on_cuda(func, inputs[0])
    drops_out = any(isinstance(value, float) and 0 < value < 1 for value in inputs[0])  # of attention's the only such
    found = DRAWS if formula is not None and drops_out else _asked(func, inputs, tensors, device, threads)
    if isinstance(found, str) and formula is not None:
        found = formula
    if found != NO_MEMORY:  # which may be different the next time
        _known[key] = found
    return found


def reserve(func: Any, inputs: Any) -> int | str:
    """Returns the bytes that a recurrent layer keeps for its backward, or why they are not known.

    It is run alone, as for a workspace. Where that takes too long it is run on fewer steps of the sequence, and the
    bytes grow with their number.

    Args:
        func: Its overload, of `RECURRENT`.
        inputs: Its positional and its keyword arguments; tensors may be fake.
    """
    args: Any = inputs[0]
    kwargs = inputs[1]
    device, threads = device_of(args[0]), torch.get_num_threads()
    masks = 0
    if func is _CUDNN and args[_DROPOUT]:  # it is run without, so as to draw nothing; a mask has the size of its layer
        masks = args[0].shape[0] * args[0].shape[1] * args[4].numel() // args[4].shape[1] * args[0].itemsize
        args = (*args[:_DROPOUT], 0.0, *args[_DROPOUT + 1 : -1], None)
    tensors = _torch.tensors_in(args)
    steps = int(args[0].shape[0])
    work = tensors[0].numel() // tensors[0].shape[-1] * sum(tensor.numel() for tensor in tensors[1:])
    fewer = max(2, min(steps, MOST_WORK * threads * steps // max(1, work)))

    def bytes_of(steps: int) -> int | str:
        first = torch.empty((steps, *args[0].shape[1:]), dtype=args[0].dtype, device="meta")
        key = (func, _layout(((first, *args[1:]), kwargs)), str(device), threads)
        if key not in _known:
            _known[key] = _alone(func, ((first, *args[1:]), kwargs), device, threads, nbytes)
        return _known[key]

    def nbytes(call: Callable[[], Any]) -> int:
        with torch.enable_grad():  # without, the CPU's keeps nothing
            return int(call()[RECURRENT[func]].nbytes)

    one, two = (0, bytes_of(steps)) if steps <= fewer else (bytes_of(fewer // 2), bytes_of(fewer))
    if isinstance(one, str) or isinstance(two, str):
        return two
    return two + (two - one) * max(0, steps - fewer) // (fewer - fewer // 2) + masks


@functools.cache
def _name(func: Any) -> str:
    return str(getattr(func, "overloadpacket", "")).removeprefix("aten.")


def takes(func: Any) -> bool:
    """Whether an operation is of a kind that may take a workspace whatever its arguments are."""
    return _name(func) in TAKING


def attention_on_cuda(func: Any, args: Sequence[Any]) -> int | None:
    """Returns the bytes that an attention kernel takes on CUDA, by its sources; None for what is no such kernel.

    Each backward sums the queries' gradient in 32 bits and has a number per query:

    - flash (`flash_api.cpp`, `mha_bwd`): rows of a multiple of 128 and widths of a multiple of 32, or 256 above 192;
      with fewer heads of keys than of queries, gradients of keys and values for all heads as well
    - efficient (`attention_backward.cu`): rows and widths of multiples of 64 where the type has 16 bits, else only the
      number per query; its forward sums the result in 32 bits where values are wider than 128
    - cuDNN from 9.0 on (`scaled_dot_product_flash_attention.h` of its frontend): rows and widths as they are
    """
    name = _name(func)
    if not name.startswith(SDPA) or name not in TAKING or "for_cpu" in name:
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
    grouped = "flash" in name and key.shape[1] != heads
    spread = batch * heads * key.shape[-2] * (width + value.shape[-1]) * query.dtype.itemsize if grouped else 0
    return 4 * batch * heads * accumulated + spread


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


def _asked(func: Any, inputs: Any, tensors: list[torch.Tensor], device: torch.device, threads: int) -> int | str:
    """Runs an operation alone, if it can be; returns its workspace, or why it is not known."""
    if any(type(x) is not FakeTensor and not _torch.is_plain_kind(type(x)) for x in tensors):
        return "a tensor is of a class of its own"
    if device.type not in ("cpu", "cuda"):
        return f"{device.type} does not say what it allocates"
    free = _free_bytes(device)
    if free is None:
        return "what is free here is not known"
    if 2 * sum(tensor.untyped_storage().nbytes() for tensor in tensors) > free:
        return NO_MEMORY
    if _work(str(func), inputs[0], tensors) > MOST_WORK * threads:
        return "it would take too long to run it alone"
    ask = _on_cpu if device.type == "cpu" else partial(_on_cuda, device=device)
    return _alone(func, inputs, device, threads, ask)


def _alone(
    func: Any, inputs: Any, device: torch.device, threads: int, ask: Callable[[Callable[[], Any]], int]
) -> int | str:
    """Measures an operation that runs on zeros, on a thread of its own."""
    found: list[int] = []
    on_cpu = torch.device("cpu")  # where arguments stay that a kernel reads on the host

    def run() -> None:
        try:
            torch.set_num_threads(threads)  # a new thread has the environment's number until it is set
            with torch.no_grad():
                args, kwargs = mapped(
                    inputs, lambda tensor: _zeros(tensor, on_cpu if device_of(tensor).type == "cpu" else device)
                )
                found.append(ask(lambda: func(*args, **(kwargs or {}))))
        except (RuntimeError, NotImplementedError):  # no memory after all, or no kernel: the caller says so
            pass

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0] if found else "it cannot be run alone"


def _work(name: str, args: tuple[Any, ...], tensors: list[torch.Tensor]) -> int:
    """Estimates the multiplications of an operation; of a convolution's backward those of either gradient."""
    back = "backward" in name
    if "convolution" in name:
        x, weight = tensors[back : back + 2]
        stride, transposed = args[3 + back], args[6 + back]
        places = x.numel() // max(1, x.shape[1]) // (1 if transposed else math.prod(stride))
        return places * weight.numel()
    if "attention" in name:
        query, key = tensors[back : back + 2]
        return 2 * query.numel() * key.shape[-2]
    return max(tensor.numel() for tensor in tensors)


def _on_cpu(call: Callable[[], object]) -> int:
    levels = list(accumulate(cpu_allocations(call), initial=0))
    return max(levels) - levels[-1]


def _on_cuda(call: Callable[[], object], device: torch.device) -> int:
    call()  # what libraries keep for good is made now
    peaks: dict[int, allocator.Peak] = {}
    torch.cuda.synchronize(device)
    allocator.begin(peaks)
    result = call()
    torch.cuda.synchronize(device)
    allocator.end(peaks)
    left = torch.cuda.memory_allocated(device)
    del result
    return peaks[device.index or 0].allocated - left


def _free_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        return host_memory()[0]
    except errors.ArgumentError:
        return None


def _layout(value: Any) -> Any:
    """Returns the part of an argument that a workspace depends on."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, dict):
        return tuple((name, _layout(item)) for name, item in cast("dict[str, Any]", value).items())
    if isinstance(value, (list, tuple)):
        return tuple(_layout(item) for item in cast("tuple[Any, ...]", value))
    return type(value), value


def _zeros(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    made = torch.empty_strided(tuple(like.shape), like.stride(), dtype=like.dtype, device=device)
    made.as_strided((made.untyped_storage().nbytes() // made.itemsize,), (1,)).zero_()  # some of it may repeat
    return made
