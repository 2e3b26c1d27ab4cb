"""What PyTorch's settings make of an operation on CUDA, asked on any machine."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from typing import Any

import torch

_C: Any = torch._C
_NAMES = ("math", "flash", "efficient", "cudnn")  # by the number that PyTorch knows them by
_DEFAULT = (1, 2, 0, 3, 4)
PREFERRING_CUDNN = (9, 10)
"""Major capabilities whose first choice is cuDNN: torch moves it to the front there at its first attention."""


def enabled_backends(capability: tuple[int, int]) -> list[str]:
    """The kernels that the user has enabled, in the order in which they are tried on a device of a capability."""
    order = tuple(map(int, _C._get_sdp_priority_order()))
    if order[: len(_DEFAULT)] == _DEFAULT[: len(order)] and capability[0] in PREFERRING_CUDNN:
        order = (3, 1, 2, 0)
    backends = torch.backends.cuda
    on = {
        "math": backends.math_sdp_enabled(),
        "flash": backends.flash_sdp_enabled(),
        "efficient": backends.mem_efficient_sdp_enabled(),
        "cudnn": backends.cudnn_sdp_enabled(),
    }
    names = [_NAMES[number] for number in order if number < len(_NAMES)]
    return [name for name in names if on[name]]


def tf32(op: str) -> bool:
    """Whether an operation in 32 bits may be computed in TF32 on CUDA: by default a convolution may, a product not."""
    get: Any = getattr(_C, "_get_fp32_precision_getter", None)
    convolves = "convolution" in op
    if get is None:
        return bool(torch.backends.cudnn.allow_tf32 if convolves else torch.backends.cuda.matmul.allow_tf32)
    asked = (("cuda", "conv" if convolves else "matmul"), ("cuda", "all"), ("generic", "all"))
    return next((found for found in (get(*one) for one in asked) if found != "none"), "ieee") == "tf32"
