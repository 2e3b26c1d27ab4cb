"""Operations that PyTorch puts together in another way on CUDA than on the CPU, as they are put together there.

A model on meta is planned for a GPU on a machine without one, and its fakes are then on the CPU. There an RMS norm is
six operations, on CUDA one kernel, which in 16 bits keeps a quarter as much; dropout keeps an element on the CPU and a
byte on CUDA; attention may keep all scores. So a function mode meets these functions before PyTorch takes them apart,
and calls the operation that CUDA's way leads to; both are in every build as names with shapes. Fakes that say they are
on CUDA would not do: a build without it aborts where it asks for their stream. The conditions are PyTorch's own
(`rms_norm_symint` in layer_norm.cpp, `is_fused_kernel_acceptable` in Dropout.cpp, `cuda/sdp_utils.cpp`), among the
kernels of attention that the user has enabled; what cuDNN takes is by the release of torch that simulates. Arguments
are cast first where autocast is on.

CUDA's autocast casts for another list of operations than the CPU's: norms, softmax, powers and sums are computed in 32
bits. So what is in CUDA's list and not in the CPU's, by torch's own register of both, gets a kernel in the CPU's
autocast for as long as the step is simulated. In the simulating thread the two autocasts are one, so that it does not
matter which of them the model, its caller or a region names. What the CPU's list alone has keeps its cast to 32 bits:
pooling and padding in three dimensions, factorisations and Fourier transforms; such a step is promised a little more
than it takes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .. import _torch
from .._torch.cuda import (
    autocast_as_one,
    below_autocast,
    cast_on_cuda,
    casting,
    enabled_backends,
    only_on_cuda,
    release,
)
from .._torch.fakes import below_autograd
from .._torch.graphs import attention_in_parts
from .._torch.tensors import each_tensor

aten: Any = torch.ops.aten
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def capability_of(target: str) -> tuple[int, int] | None:
    """The capability of "cuda 9.0"; 8.0 where no number is said, None for another device."""
    kind, _, number = target.partition(" ")
    major, _, minor = (number or "8.0").partition(".")
    return (int(major), int(minor)) if kind == "cuda" else None


class AsOnCuda(TorchFunctionMode):
    """Replaces functions whose decomposition differs on CUDA, for a device of a capability."""

    def __init__(self, capability: tuple[int, int]) -> None:
        super().__init__()
        self.capability = capability
        self._ways = {**_WAYS, F.scaled_dot_product_attention: partial(_attention, capability)}

    def __torch_function__(
        self, func: Callable[..., Any], kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.multi_head_attention_forward:
            with self:
                return attention_in_parts(*args, **(kwargs or {}))
        way = self._ways.get(func)
        result = NotImplemented if way is None else way(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if result is NotImplemented else result


class _RmsNorm(torch.autograd.Function):
    """The norm as one operation, with its formula of derivatives.yaml."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, eps: Any) -> Any:
        with below_autograd():
            result, deviation = aten._fused_rms_norm.default(input, shape, weight, eps)
        ctx.shape = shape
        ctx.save_for_backward(input, weight, deviation)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        input, weight, deviation = ctx.saved_tensors
        mask = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        with below_autograd():
            of_input, of_weight = aten._fused_rms_norm_backward.default(
                gradients[0], input, ctx.shape, deviation, weight, mask
            )
        return of_input, None, of_weight, None


def _rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> Any:
    if _torch.autocast_on(input.device.type) and cast_on_cuda("rms_norm"):
        input, weight = _all_cast(torch.float32, input, weight)
    mixed = weight is not None and weight.dtype is not input.dtype
    if mixed or input.is_complex() or _channels_last(input):
        return NotImplemented
    return _RmsNorm.apply(input, tuple(normalized_shape), weight, eps)


def _channels_last(x: torch.Tensor) -> bool:
    kind = _CHANNELS_LAST.get(x.dim())
    return kind is not None and x.is_contiguous(memory_format=kind) and not x.is_contiguous()


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if inplace or not training or not 0 < p < 1 or not input.numel():
        return NotImplemented
    return torch.native_dropout(input, p, True)[0]


def _attention(
    capability: tuple[int, int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if _torch.autocast_on(query.device.type):
        query, key, value, attn_mask = _all_cast(torch.get_autocast_dtype("cpu"), query, key, value, attn_mask)
    call = _Attention(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, capability)
    backend = next((name for name in enabled_backends(capability) if name == "math" or getattr(call, name)), "math")
    if backend == "math":
        return aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
    width = query.shape[-1]
    if backend == "flash":
        scale = width**-0.5 if scale is None else scale
        query, key, value = (F.pad(x, (0, -width % 8)) if width % 8 else x for x in (query, key, value))
        flash = aten._scaled_dot_product_flash_attention
        result = flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return result[..., :width] if width % 8 else result
    bias = None if attn_mask is None else _as_bias(attn_mask, query, key)
    sums = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if backend == "efficient":
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, sums, dropout_p, is_causal, scale=scale
        )[0]
    return aten._scaled_dot_product_cudnn_attention(
        query, key, value, bias, sums, dropout_p, is_causal, False, scale=scale
    )[0]


class _Attention(NamedTuple):
    """One call of attention, and which kernels take it on CUDA."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    grouped: bool
    capability: tuple[int, int]

    @property
    def _dense(self) -> bool:
        """Whether any fused kernel takes it."""
        tensors = (self.query, self.key, self.value)
        return (
            all(x.dim() == 4 and x.dtype is self.query.dtype and x.stride(-1) == 1 for x in tensors)
            and len({x.shape[0] for x in tensors}) == 1
            and 0 not in (self.query.shape[-2], self.key.shape[-2])
        )

    @property
    def _heads(self) -> int:
        """Heads of queries for each of keys; 0 where they do not fit."""
        queries, keys, values = (x.shape[1] for x in (self.query, self.key, self.value))
        return queries // keys if keys == values and queries % keys == 0 else 0

    @property
    def _widths(self) -> tuple[int, int]:
        """Returns the width of queries and keys, and that of values; 0 where queries and keys differ."""
        query, key, value = (x.shape[-1] for x in (self.query, self.key, self.value))
        return query if query == key else 0, value

    @property
    def _half(self) -> bool:
        return self.query.dtype in ((torch.float16, torch.bfloat16) if self.capability >= (8, 0) else (torch.float16,))

    @property
    def _trains(self) -> bool:
        return any(x.requires_grad for x in (self.query, self.key, self.value))

    @property
    def flash(self) -> bool:
        """Equal widths of at most 256, in 16 bits, without a mask."""
        width, of_values = self._widths
        large = width > 192 and not (width > 224 and not self.dropout)
        too_large = self._trains and large and self.capability in _SMALL_SHARED_MEMORY
        return (
            self._dense
            and self._half
            and self.capability >= (8, 0)
            and self.mask is None
            and 0 < width == of_values <= 256
            and not too_large
            and (self._heads == 1 or (self.grouped and self._heads > 1))
            and (not self.causal or self.query.shape[-2] == self.key.shape[-2])
        )

    @property
    def efficient(self) -> bool:
        """Widths that are multiples of 16 bytes, which may differ, as many heads of each."""
        width, of_values = self._widths
        half = self.query.dtype in (torch.float16, torch.bfloat16)
        step = (8 if half else 4) if self.capability >= (8, 0) else (8 if half and self.capability >= (7, 0) else 1)
        return (
            self._dense
            and (self._half or self.query.dtype is torch.float32)
            and self._heads == 1
            and min(width, of_values) > 0
            and width % step == of_values % step == 0
        )

    @property
    def _fits_cudnn(self) -> bool:
        """Widths of at most 128, and wider ones by device and release of torch.

        - 2.11 and 2.12, with cuDNN 9.19 and 9.20: up to 256 on 9.0 (an H100 ran 2.11's); 192 with values of 128 on 10.
        - 2.13, with a cuDNN of at most 9.22: 192 with values of 128 on both.
        - 2.14, with 9.24: those, and 256 with values of 256; up to 256 where no gradient is asked for.
        """
        width, of_values = self._widths
        most, hopper = max(width, of_values), self.capability == (9, 0)
        if not width or width % 8 or of_values % 8:
            return False
        if most <= 128 or (hopper and most <= 256 and release() < (2, 13)):
            return True
        known = (width, of_values) == (192, 128) and (hopper or self.capability[0] == 10)
        if release() < (2, 14) or not (hopper or self.capability[0] == 10):
            return known
        return known or (most <= 256 and (not self._trains or width == of_values == 256))

    @property
    def cudnn(self) -> bool:
        """Widths that fit it, and from torch 2.12 on a share dropped of whole sixteenths."""
        return (
            self._dense
            and self._half
            and self.capability >= (8, 0)
            and (self._heads == 1 or (self.grouped and self._heads > 1))
            and self._fits_cudnn
            and self.key.shape[-2] != 1
            and not (self.dropout and self.query.shape[-2] == 1)
            and ((self.dropout * 16).is_integer() or release() < (2, 12))
            and (
                not torch.are_deterministic_algorithms_enabled()
                or torch.is_deterministic_algorithms_warn_only_enabled()
            )
        )


_SMALL_SHARED_MEMORY = frozenset({(8, 6), (8, 7), (8, 8), (8, 9), (12, 0), (12, 1)})


def _as_bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A mask as fused kernels read it: of the queries' type, rows of a multiple of 16 bytes, one for each head."""
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), float("-inf"))
    last = mask.shape[-1]
    if last % 8:
        mask = F.pad(mask, (0, -last % 8))[..., :last]
    return mask.expand(*query.shape[:-1], key.shape[-2])


_WAYS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    F.dropout: _dropout,
    torch.dropout: lambda input, p, train: _dropout(input, p, train),
}


# --- autocast ---------------------------------------------------------------------------------------------------------

_LOWER = frozenset(
    {
        *("_convolution", "convolution", "cudnn_convolution", "cudnn_convolution_transpose"),
        *("addmv", "addr", "chain_matmul", "einsum", "linalg_multi_dot", "mv", "_scaled_dot_product_flash_attention"),
        *("_thnn_fused_gru_cell", "_thnn_fused_lstm_cell", "gru_cell", "lstm_cell", "rnn_relu_cell", "rnn_tanh_cell"),
    }
)
_WIDEST = frozenset(
    ("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "index_put", "scatter_add", "tensordot", "vdot")
)
_BY_DTYPE = frozenset(
    {"cumprod", "cumsum", "linalg_matrix_norm", "linalg_vector_norm", "log_softmax", "softmax", "sum"}
)
"""Operations that get the type of their result, where the caller has not given it, instead of a cast input."""


@contextmanager
def autocast_of_cuda() -> Generator[None]:
    """A context in which autocast on the CPU is that of CUDA, for the thread that enters it."""
    here, known = threading.get_ident(), ExitStack()

    @cache
    def know() -> None:  # takes 13 ms, which most steps can do without
        known.enter_context(casting((overload, _kernel(overload, here)) for overload in only_on_cuda()))

    with known, autocast_as_one(know):
        yield


def _all_cast(dtype: torch.dtype, *tensors: torch.Tensor | None) -> list[Any]:
    """The tensors as an operation gets them under autocast that is computed in a dtype."""
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
                given = any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values()))
                if _eligible(args[0]) and not given:
                    kwargs = {**kwargs, "dtype": torch.float32}
                return overload(*args, **kwargs)
            wide: list[bool] = []
            each_tensor((args, kwargs), lambda tensor: wide.append(tensor.dtype is torch.float32))
            dtype = torch.float32
            if name in _LOWER or (name in _WIDEST and not any(wide)):
                dtype = torch.get_autocast_dtype("cpu")
            args, kwargs = each_tensor((args, kwargs), lambda tensor: _cast(tensor, dtype))
            return overload(*args, **kwargs)

    return run
