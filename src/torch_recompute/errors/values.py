"""Texts for values carried from forward to replay."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from ._say import kind

if TYPE_CHECKING:
    import torch


def value_requires_grad(region: str, index: int, tensor: torch.Tensor) -> str:
    """Text for a saved value that requires grad."""
    return (
        f"save_for_recompute in {region}: tensor {index} ({tuple(tensor.shape)}, {tensor.dtype}, "
        f"grad_fn={kind(tensor.grad_fn)}) requires grad. A saved value is a constant in the replay, so its gradient "
        "would be lost.\n"
        "  Save what was decided (indices, counts, masks), not what is differentiated; keep a differentiable result "
        "with no_recompute(fn)."
    )


def choice_requires_grad(region: str, index: int, tensor: torch.Tensor) -> str:
    """Text for a choice that requires grad."""
    return (
        f"replay(fn) in {region} returned a tensor that requires grad: tensor {index} ({tuple(tensor.shape)}, "
        f"{tensor.dtype}, grad_fn={kind(tensor.grad_fn)}). Its result is a constant in the replay, so its gradient "
        "would be lost.\n"
        "  Return indices, masks or sizes only: replay(lambda s: s.topk(2).indices); keep a differentiable result "
        "with no_recompute(fn)."
    )


def saved_twice(region: str, key: Hashable) -> str:
    """Text for a second save under one key."""
    under = "without a key" if key is None else f"under key={key!r}"
    return (
        f"save_for_recompute was called twice {under} in one call of {region}; the second would overwrite the first.\n"
        '  Give each its own key:  save_for_recompute(indices, key="router")  ...  get_recompute_data(key="router")\n'
        "  or wrap the choice in one word:  indices = replay(choose)(scores)"
    )


def not_recomputing() -> str:
    """Text for `get_recompute_data` outside of a replay."""
    return (
        "get_recompute_data() was called while nothing is being recomputed: there is no data to hand out.\n"
        "  Ask first:  if doing_recompute(): (indices,) = get_recompute_data()\n"
        "              else: indices = choose(scores); save_for_recompute(indices)\n"
        "  or say it in one word:  indices = replay(choose)(scores)"
    )


def no_such_key(region: str, key: Hashable, keys: Sequence[Hashable]) -> str:
    """Text for a key that was not saved."""
    saved = ", ".join(repr(k) for k in keys) or "nothing"
    return (
        f"get_recompute_data(key={key!r}): the forward of {region} saved nothing under this key; it saved {saved}.\n"
        "  Call save_for_recompute(..., key=...) in the forward of the same region."
    )
