"""Saved-tensor hooks, pushed without a context manager, and what lies beneath this library's own."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint as _checkpoint

_C: Any = torch._C
_autograd: Any = _C._autograd
_Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
_Pack = TypeVar("_Pack", bound=Callable[..., Any])

push_hooks: Callable[[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]], None]
push_hooks = _autograd._push_saved_tensors_default_hooks
pop_hooks: Callable[[], None] = _autograd._pop_saved_tensors_default_hooks
ambient_hooks: Callable[[], _Hooks | None] = partial(_autograd._top_saved_tensors_default_hooks, True)
"""The innermost saved-tensor hooks now active on this thread, or None."""


class _Beneath:
    """What torch finds when it asks one of this library's pack hooks for the hooks around it: the user's."""

    _checkpoint_internal = True

    @property
    def _user_hooks(self) -> _Hooks | None:
        ours: list[_Hooks] = []
        while (hooks := ambient_hooks()) is not None and getattr(hooks[0], "_user_hooks", None) is _BENEATH:
            ours.append(hooks)
            pop_hooks()
        for hook in reversed(ours):
            push_hooks(*hook)
        return hooks


_BENEATH = (_Beneath(), None)


def see_through(pack: _Pack) -> _Pack:
    """Marks a pack hook as torch 2.14 marks its own: the user's are those beneath it.

    The selective contexts of `torch.utils.checkpoint` store tensors outside the graph. They pass them through the
    user's saved-tensor hooks if asked to, else they warn that they do not; neither is meant for a hook of ours.
    """
    marked: Any = pack
    marked._checkpoint_internal, marked._user_hooks = True, _BENEATH
    return pack


def respect_hooks(context: Any, respect: bool) -> bool:
    """Tells a selective context whether what it stores passes through the user's hooks; False if torch cannot do so."""
    if not isinstance(context, _checkpoint._CachingTorchDispatchMode):
        return True
    selective: Any = context
    selective.respect_saved_tensors_hooks = respect
    return not respect or hasattr(_checkpoint, "_current_user_saved_tensors_hooks")
