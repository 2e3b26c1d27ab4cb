"""The functional collectives of torch, which say what they return without a process group."""

from __future__ import annotations

import importlib
from typing import Any

import torch


def functional() -> Any:
    """The operations; what they return on fake tensors is defined where torch calls them."""
    importlib.import_module("torch.distributed._functional_collectives")
    return torch.ops._c10d_functional
