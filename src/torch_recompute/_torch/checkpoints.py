"""PyTorch's own activation checkpointing, its settings and what it calls; and Functions that are checkpoints."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any, cast

import torch
import torch.utils.checkpoint as _checkpoint
from torch import _C
from torch.overrides import TorchFunctionMode

from . import ambient_hooks


def early_stop_override() -> bool | None:
    """The value of `torch.utils.checkpoint.set_checkpoint_early_stop` around; None outside of it."""
    return cast("Any", _checkpoint)._enable_checkpoint_early_stop


def debug_override() -> bool | None:
    """The value of `torch.utils.checkpoint.set_checkpoint_debug_enabled` around; None outside of it."""
    return cast("Any", _checkpoint)._checkpoint_debug_enabled


def in_checkpoint() -> bool:
    """Whether `torch.utils.checkpoint` without `use_reentrant` drops what is saved now, and will make it again."""
    hooks = ambient_hooks()
    return hooks is not None and getattr(hooks[0], "__qualname__", "").startswith(_checkpoint._checkpoint_hook.__name__)


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


@contextlib.contextmanager
def functions_run_by(run: Callable[..., Any]) -> Generator[None]:
    """A context in which `apply(...)` of an autograd Function is `run(original, its class, ...)`.

    It is a class method that torch 2.14 has written in C.
    """
    base: Any = torch.autograd.Function
    before = vars(base)["apply"]

    def through(kind: type, *args: Any, **kwargs: Any) -> Any:
        return run(before.__get__(None, kind), kind, *args, **kwargs)

    base.apply = classmethod(through)
    try:
        yield
    finally:
        base.apply = before


class _GradStaysOn(TorchFunctionMode):
    """Takes no notice of the first `torch.no_grad()`."""

    def __init__(self) -> None:
        super().__init__()
        self._first = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._first and func is _C._set_grad_enabled and not args[0]:
            self._first = False
            return None
        return func(*args, **(kwargs or {}))


def forward_with_grad(kind: Any, *args: Any) -> Any:
    """Runs the forward of an autograd Function without the `torch.no_grad()` that is in it, as any other code."""
    ctx: Any = torch.autograd.function.FunctionCtx()
    ctx.needs_input_grad = tuple(isinstance(one, torch.Tensor) and one.requires_grad for one in args)
    apart = kind.setup_context is not torch.autograd.Function.setup_context
    with _GradStaysOn():
        return kind.forward(*args) if apart else kind.forward(ctx, *args)
