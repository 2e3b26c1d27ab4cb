"""How much `torch.compile` keeps from forward to backward: a private setting, which a build of torch may lack."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
from __future__ import annotations

from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any


def activation_memory_budget(share: float) -> AbstractContextManager[Any] | None:
    """A context in which what is compiled keeps at most a share of what it would keep; None where torch has no such.

    Args:
        share: From 0 to 1, of the bytes that are kept without the setting.
    """
    try:
        config: Any = import_module("torch._functorch.config")
    except ImportError:
        return None
    return config.patch(activation_memory_budget=share) if hasattr(config, "activation_memory_budget") else None
