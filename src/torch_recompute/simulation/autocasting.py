"""CUDA's autocast for fake tensors that lie on the CPU.

Problem. A step for a GPU by name is simulated with fakes on the CPU. CUDA's autocast does nothing there, and the CPU's
casts for another list of operations: norms, softmax, powers and sums are computed in 32 bits on CUDA, and keep what
they keep in 32 bits, while on the CPU they stay in 16.

Idea. What is in CUDA's list and not in the CPU's, by torch's own register of both, gets a kernel in the CPU's autocast
for as long as the step is simulated. All but those named below are computed in 32 bits. In the simulating thread the
two autocasts are one, so that it does not matter which of them the model or its caller names, nor which of them a
region takes down for its replay.

What the CPU's list alone has keeps its cast to 32 bits: pooling and padding in three dimensions, factorisations and
Fourier transforms. Such a step is promised a little more than it takes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from .._compat.autocasting import autocast_as_one, below_autocast, casting, only_on_cuda
from .._tree import mapped

_LOWER = frozenset(
    {
        *("_convolution", "convolution", "cudnn_convolution", "cudnn_convolution_transpose"),
        *("addmv", "addr", "chain_matmul", "einsum", "linalg_multi_dot", "mv", "_scaled_dot_product_flash_attention"),
        *("_thnn_fused_gru_cell", "_thnn_fused_lstm_cell", "gru_cell", "lstm_cell", "rnn_relu_cell", "rnn_tanh_cell"),
    }
)
_WIDEST = frozenset(
    {
        *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "index_put", "scatter_add", "tensordot", "vdot"),
    }
)
_BY_DTYPE = frozenset(
    {"cumprod", "cumsum", "linalg_matrix_norm", "linalg_vector_norm", "log_softmax", "softmax", "sum"}
)
"""Operations that are told the type of their result, where the caller has not, instead of getting a cast input."""


@contextmanager
def autocast_of_cuda() -> Generator[None]:
    """A context in which autocast on the CPU is that of CUDA, for the thread that enters it."""
    here, known = threading.get_ident(), ExitStack()

    def know() -> None:
        if not cast:  # takes 13 ms, which most steps can do without
            cast.append(True)
            known.enter_context(casting((overload, _kernel(overload, here)) for overload in only_on_cuda()))

    cast: list[bool] = []
    with known, autocast_as_one(know):
        yield


def as_wide(*tensors: torch.Tensor | None) -> list[Any]:
    """The tensors as an operation that is computed in 32 bits gets them under autocast."""
    return [x if x is None else _cast(x, torch.float32) for x in tensors]


def as_narrow(*tensors: torch.Tensor | None) -> list[Any]:
    """The tensors as a product gets them under autocast."""
    dtype = torch.get_autocast_dtype("cpu")
    return [x if x is None else _cast(x, dtype) for x in tensors]


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if _eligible(tensor) else tensor


def _eligible(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point and tensor.dtype is not torch.float64


def _kernel(overload: Any, here: int) -> Callable[..., Any]:
    name = overload.overloadpacket.__name__

    def run(*args: Any, **kwargs: Any) -> Any:
        with below_autocast():
            if threading.get_ident() != here:
                return overload(*args, **kwargs)
            if name in _BY_DTYPE:
                told = any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values()))
                if _eligible(args[0]) and not told:
                    kwargs = {**kwargs, "dtype": torch.float32}
                return overload(*args, **kwargs)
            dtype = torch.float32
            if name in _LOWER or (name in _WIDEST and not _any_wide((args, kwargs))):
                dtype = torch.get_autocast_dtype("cpu")
            args, kwargs = mapped((args, kwargs), lambda tensor: _cast(tensor, dtype))
            return overload(*args, **kwargs)

    return run


def _any_wide(arguments: Any) -> bool:
    found: list[bool] = []
    mapped(arguments, lambda tensor: found.append(tensor.dtype is torch.float32))
    return any(found)
