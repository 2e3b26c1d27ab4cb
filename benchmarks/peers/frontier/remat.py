"""torch_remat as a peer of `peers frontier`: layers that are checkpointed, with parts whose activations are kept.

Its user marks the parts in the model's code, and the results of them that a replay needs; this does the same from
outside. It restores random states by hooks that its user writes; without one, dropout would be drawn again.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
from torch import nn

from .models import skeleton, stacks

PARTS = ((), ("attention",), ("cross",), ("mlp",), ("moe",), ("attention", "cross", "mlp", "moe"))
"""Settings: parts of a layer that are kept, where it has them."""


def settings(name: str, layers: int) -> list[tuple[str, ...]]:
    """The settings that differ for a model."""
    there = {part for stack in skeleton(name, layers) for layer in stack for part, _ in layer.named_children()}
    return list(dict.fromkeys(tuple(name for name in parts if name in there) for parts in PARTS))


class _Generator:
    """What its user writes for dropout on a CPU."""

    def snapshot(self) -> Any:
        return torch.get_rng_state()

    def restore(self, state: Any) -> None:
        torch.set_rng_state(state)


def prepare(model: nn.Module, parts: tuple[str, ...]) -> None:
    """Checkpoints every layer of a model, and keeps these parts of it."""
    remat: Any = importlib.import_module("torch_remat")
    for number, layer in enumerate(layer for stack in stacks(model) for layer in stack):
        for name in parts:
            if hasattr(layer, name):
                part = getattr(layer, name)
                part.forward = partial(_kept, remat, remat.region(part.forward, name, recompute=False))
        layer.forward = partial(_checkpointed, remat, f"layer{number}", layer.forward)


def _kept(remat: Any, part: Any, *args: Any) -> Any:
    result = part(*args)
    remat.recompute_needs_tensor(result)
    return result


def _checkpointed(remat: Any, name: str, forward: Any, *args: Any) -> Any:
    return remat.checkpoint(region_name=name, recompute_state_hooks=(_Generator(),))(forward)(*args)
