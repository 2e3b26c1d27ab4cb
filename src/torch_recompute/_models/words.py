"""What the commands call dtypes and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
)
OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer] | None] = MappingProxyType(
    {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "none": None}
)
