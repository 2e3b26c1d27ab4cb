"""PyTorch's own activation checkpointing: its process-wide settings, and what it calls."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any, cast

import torch
import torch.utils.checkpoint as _checkpoint


def early_stop_override() -> bool | None:
    """The value of `torch.utils.checkpoint.set_checkpoint_early_stop` around; None outside of it."""
    return cast("Any", _checkpoint)._enable_checkpoint_early_stop


def debug_override() -> bool | None:
    """The value of `torch.utils.checkpoint.set_checkpoint_debug_enabled` around; None outside of it."""
    return cast("Any", _checkpoint)._checkpoint_debug_enabled


@contextlib.contextmanager
def checkpoints_run_by(run: Callable[..., Any]) -> Generator[None]:
    """A context in which `torch.utils.checkpoint.checkpoint(...)` is `run(original, ...)`, however it was imported.

    That function only looks up which function to call, and here it finds another one. Where a release of torch looks
    up nothing, nothing changes.
    """
    inner: Any = getattr(_checkpoint.checkpoint, "__wrapped__", None)
    if inner is None:
        yield
        return
    before = vars(inner).get("__dynamo_disable")

    def through(*args: Any, **kwargs: Any) -> Any:
        return run(before or torch.compiler.disable(inner), *args, **kwargs)

    inner.__dynamo_disable = through
    try:
        yield
    finally:
        inner.__dynamo_disable = before


def respect_hooks(context: Any, respect: bool) -> bool:
    """Sets whether what a selective context stores passes through the user's hooks; False if torch cannot do so."""
    if not isinstance(context, _checkpoint._CachingTorchDispatchMode):
        return True
    selective: Any = context
    selective.respect_saved_tensors_hooks = respect
    return not respect or hasattr(_checkpoint, "_current_user_saved_tensors_hooks")
