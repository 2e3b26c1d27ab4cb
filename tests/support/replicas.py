"""Replicas of a module as `nn.DataParallel` makes them, on a CPU: torch's own `replicate`, without its broadcast."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

FACTORS = (1.0, 0.5)
"""What the weights of each replica are multiplied by, so that it shows whose weights are used."""


def replicas(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replicas whose weights are those of the model times one of `FACTORS`; gradients reach the model's."""
    replicating = importlib.import_module("torch.nn.parallel.replicate")

    def broadcast(tensors: Sequence[torch.Tensor], devices: Sequence[int], detach: bool = False) -> Any:
        copies = [[tensor * factor for tensor in tensors] for factor in FACTORS]
        return [[tensor.detach() for tensor in some] for some in copies] if detach else copies

    monkeypatch.setattr(replicating, "_get_device_index", lambda device, optional=False: device)
    monkeypatch.setattr(replicating, "_broadcast_coalesced_reshape", broadcast)
    return replicating.replicate(model, range(len(FACTORS)))
