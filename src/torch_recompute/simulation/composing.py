"""Operations that PyTorch puts together in another way on CUDA than on the CPU, as they are put together there.

Problem. A model on meta is planned for a GPU on a machine without one, and its fakes then lie on the CPU. What
PyTorch makes of a function may depend on where its arguments lie: an RMS norm is one kernel on CUDA, which keeps its
input and a number per row, and six operations on the CPU, which in 16 bits keep four times as much; dropout keeps a
byte per element on CUDA and an element on the CPU. A plan made of the CPU's operations buys memory back that the step
it is for never takes.

Idea. A function mode meets these functions before PyTorch takes them apart, and calls the operation that CUDA's way
leads to. Both are in every build as names with shapes; only their kernels are not.

    F.rms_norm    aten::_fused_rms_norm, which has no autograd formula for the CPU's tensors, so the one that it has on
                  CUDA is written down here: input, weight and reciprocal deviation are kept
    F.dropout     aten::native_dropout
    attention     that drops out: aten::_scaled_dot_product_flash_attention, where the CPU multiplies matrices of
                  scores. What drops nothing keeps the same on both

The conditions are PyTorch's own (`rms_norm_symint` in layer_norm.cpp, `is_fused_kernel_acceptable` in Dropout.cpp,
`sdp_utils.cpp`); of attention those shapes and types count that every GPU of the last years takes. Under autocast,
which casts the arguments first, nothing is done.

Rejected: fakes that say they lie on CUDA; a build without it aborts where it asks for their stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .. import _compat
from .._compat.fakes import below_autograd
from .._compat.functions import attention_in_parts

aten: Any = torch.ops.aten
_WIDTHS = frozenset(range(8, 257, 8))  # of heads; others are padded to one of these
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class AsOnCuda(TorchFunctionMode):
    """Calls what CUDA's way leads to, in the place of functions whose ways differ."""

    def __torch_function__(
        self, func: Callable[..., Any], kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.multi_head_attention_forward:
            with self:
                return attention_in_parts(*args, **(kwargs or {}))
        here = _HERE.get(func)
        result = NotImplemented if here is None else here(*args, **(kwargs or {}))
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
    mixed = weight is not None and weight.dtype is not input.dtype
    if mixed or input.is_complex() or _compat.autocast_on(input.device.type) or _channels_last(input):
        return NotImplemented
    return _RmsNorm.apply(input, tuple(normalized_shape), weight, eps)


def _channels_last(x: torch.Tensor) -> bool:
    kind = _CHANNELS_LAST.get(x.dim())
    return kind is not None and x.is_contiguous(memory_format=kind) and not x.is_contiguous()


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if inplace or not training or not 0 < p < 1 or not input.numel():
        return NotImplemented
    return torch.native_dropout(input, p, True)[0]


def _plain_dropout(input: torch.Tensor, p: float, train: bool) -> Any:
    return _dropout(input, p, train)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    heads = {x.shape[:-2] for x in (query, key, value)}
    widths = {x.shape[-1] for x in (query, key, value)}
    square = not is_causal or query.shape[-2] == key.shape[-2]
    known = query.dim() == 4 and len(heads) == len(widths) == 1 and widths <= _WIDTHS and square
    plain = attn_mask is None and not enable_gqa and not _compat.autocast_on(query.device.type)
    if not (0 < dropout_p < 1 and known and plain and query.dtype in (torch.float16, torch.bfloat16)):
        return NotImplemented
    return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]


_HERE: dict[Callable[..., Any], Callable[..., Any]] = {
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    F.dropout: _dropout,
    torch.dropout: _plain_dropout,
    F.scaled_dot_product_attention: _attention,
}
