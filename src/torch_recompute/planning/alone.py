"""Operations that can be run alone, to time them, and the inputs that are made up for them.

Problem. An operation is timed on inputs that nobody computed. Many operations expect more of their inputs than shapes:
`mkldnn_rnn_layer_backward` reads a workspace that its forward wrote, memory-efficient attention reads the seed of its
dropout through a pointer, `bernoulli` and `binary_cross_entropy` assert on the device that their inputs are
probabilities. Made-up inputs then end the process, or leave a CUDA context in which every later call fails. No schema
says which operations are like that.

Idea. Only operations that are known to be safe are run: pointwise ones and those of the core of ATen, by PyTorch's own
tags, and those that are named below, which are the backwards, norms, losses and optimizers of training. None of them
draws random numbers, so no generator moves, and none has results whose size depends on values. Any other operation, a
user's own included, is priced by the roofline. Attention is run where it drops nothing.

The inputs are valid: floats lie in (0.01, 0.99), indices are spread evenly over what they index, offsets cut a batch
into equal groups, booleans alternate. A tensor that lay on the CPU stays there. The numbers come from a generator of
their own.

Rejected: a list of operations that are not run. It ends the process at the first operation that it lacks. A process
for the operations: it costs seconds, a second CUDA context, and the memory of one.
"""

from __future__ import annotations

from typing import Any

import torch

from .._compat.fakes import taken_by
from .ops import Meta, Op, metas

_NAMED = frozenset(
    {
        # products
        *("addbmm", "addmv", "addr", "baddbmm", "dot", "linear", "mv", "vdot"),
        *("_addmm_activation", "_grouped_mm", "_int_mm", "_scaled_mm"),
        # norms
        *("native_batch_norm", "native_batch_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward"),
        *("linalg_vector_norm", "_weight_norm_interface", "_weight_norm_interface_backward"),
        # activations
        *("_log_softmax_backward_data", "_safe_softmax", "_softmax_backward_data"),
        *("_prelu_kernel", "_prelu_kernel_backward", "elu_backward", "glu", "glu_backward", "hardsigmoid_backward"),
        *("hardswish", "hardswish_backward", "hardtanh_backward", "leaky_relu_backward", "log_sigmoid_backward"),
        *("log_sigmoid_forward", "mish_backward", "softplus_backward", "softshrink_backward"),
        # losses
        *("huber_loss", "huber_loss_backward", "mse_loss", "mse_loss_backward", "nll_loss2d_backward"),
        *("nll_loss2d_forward", "nll_loss_backward", "nll_loss_forward", "smooth_l1_loss", "smooth_l1_loss_backward"),
        # pictures
        *("_adaptive_avg_pool3d_backward", "avg_pool3d_backward", "grid_sampler_2d_backward", "im2col"),
        *("pixel_shuffle", "pixel_unshuffle", "native_channel_shuffle"),
        *(f"{kind}_pad{n}d_backward" for kind in ("reflection", "replication") for n in (1, 2, 3)),
        *(f"upsample_{kind}{back}" for kind in ("bicubic2d", "linear1d", "trilinear3d") for back in ("", "_backward")),
        *(f"upsample_nearest{n}d{back}" for n in (1, 2, 3) for back in ("", "_backward")),
        "upsample_bilinear2d_backward",
        # sums
        *("all", "cumprod", "logcumsumexp", "logsumexp", "std", "std_mean", "var_mean"),
        # moving, filling
        *(
            "_unsafe_index",
            "_unsafe_view",
            "index_add",
            "index_copy",
            "index_fill",
            "new_full",
            "new_ones",
            "new_zeros",
        ),
        *("ones", "ones_like", "roll", "select_backward", "slice_backward", "stack", "tril", "triu", "zero", "zeros"),
        *("zeros_like", "_fft_c2c"),
        # optimizers
        *("_fused_adagrad", "_fused_adam", "_fused_adamw", "_fused_sgd"),
    }
)
_ATTENTION = frozenset(
    f"_scaled_dot_product_{kernel}attention{place}{back}"
    for kernel, place in (("flash_", ""), ("efficient_", ""), ("cudnn_", ""), ("flash_", "_for_cpu"))
    for back in ("", "_backward")
)
_UNSAFE = frozenset({"_embedding_bag", "masked_scatter", "resize"})  # of the core, and their inputs have to fit
_FROM_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded)
_SAFE = (torch.Tag.core, torch.Tag.pointwise)
_ENDS = frozenset({"offs", "cum_seq_q", "cum_seq_k"})
NUMBERS = 2**12  # floats that are drawn; a tensor repeats them


def runs_alone(op: Op) -> bool:
    """Whether an operation can be run on inputs that are made up."""
    space, _, name = op.func.name().partition("::")
    name, _, overload = name.partition(".")
    if space != "aten":
        return False
    given = _given(op)
    if name in _ATTENTION:
        return not given.get("dropout_p")
    if name in ("index", "index_put", "index_put_"):  # by a mask the size of the result depends on values
        return not any(meta.dtype in (torch.bool, torch.uint8) for meta in metas(given["indices"]))
    if any(tag in op.func.tags for tag in _FROM_VALUES):
        return False
    plain = name.removesuffix("_")
    same = getattr(getattr(torch.ops.aten, plain, None), overload or "default", op.func)  # of what works in place
    safe = any(tag in func.tags for tag in _SAFE for func in (op.func, same))
    return (safe or plain in _NAMED or name.startswith("_foreach_")) and plain not in _UNSAFE


def made_up(op: Op, device: torch.device) -> tuple[list[Any], dict[str, Any]]:
    """Inputs for an operation on a device: the positional and the keyword arguments."""
    given = _given(op)

    def made(name: str, value: Any, place: int | None = None) -> Any:
        if isinstance(value, Meta):
            return _tensor(value, name, _count(given, name, place), device)
        if isinstance(value, tuple):
            return [made(name, item, i) for i, item in enumerate(value)]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        return device if isinstance(value, torch.device) and value.type == device.type else value

    args = [made(name, value) for name, value in zip(taken_by(op.func), op.args, strict=False)]
    return args, {name: made(name, value) for name, value in op.kwargs}


def _given(op: Op) -> dict[str, Any]:
    """The arguments by the names of the schema."""
    return {**dict(zip(taken_by(op.func), op.args, strict=False)), **dict(op.kwargs)}


def _count(given: dict[str, Any], name: str, place: int | None) -> int:
    """How much an integer argument may index, or what its offsets end at; the smallest dimension where nothing says."""
    tensors = [meta for meta in metas(given) if meta.shape]
    first = tensors[0].shape if tensors else (1,)
    dim = given.get("dim")
    if name in _ENDS:
        return _total(given, name)
    if name == "index" and isinstance(dim, int):
        return first[dim]
    if name == "indices" and place is not None:
        return first[place]
    if name == "indices" and "weight" in given:
        return first[0]
    if name == "indices" and "num_weights" in given:
        return given["num_weights"]
    if name == "target" and isinstance(given.get("self"), Meta):
        return given["self"].shape[min(1, len(given["self"].shape) - 1)]
    return min((size for meta in tensors for size in meta.shape), default=1)


def _total(given: dict[str, Any], name: str) -> int:
    """What offsets of groups end at: the rows or columns that a grouped product cuts, or the tokens of a batch."""
    if name != "offs":
        return given["query" if name == "cum_seq_q" else "key"].shape[0]
    a, b = given["self"], given["mat2"]
    if len(a.shape) == 2:
        return a.shape[0 if len(b.shape) == 3 else 1]
    return b.shape[1]


def _tensor(meta: Meta, name: str, count: int, device: torch.device) -> torch.Tensor:
    here = device if meta.device == device.type else torch.device(meta.device)
    made = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=here)
    flat = made.as_strided((made.untyped_storage().nbytes() // made.itemsize,), (1,))  # some of it may repeat
    if meta.dtype.is_floating_point or meta.dtype.is_complex:
        flat = torch.view_as_real(flat).flatten() if meta.dtype.is_complex else flat
        numbers = torch.rand(NUMBERS, generator=torch.Generator().manual_seed(0), device="cpu") * 0.98 + 0.01
        rows = flat.numel() // NUMBERS
        flat[: rows * NUMBERS].view(-1, NUMBERS).copy_(numbers)
        flat[rows * NUMBERS :].copy_(numbers[: flat.numel() % NUMBERS])
    elif name in _ENDS:
        starts = name != "offs"  # those of sequences begin with 0
        ends = torch.arange(meta.shape[0], device=here) + (not starts)
        made.copy_(ends * count // max(1, meta.shape[0] - starts))
    else:
        flat.copy_(torch.arange(flat.numel(), device=here) % (2 if meta.dtype is torch.bool else max(1, count)))
    return made
