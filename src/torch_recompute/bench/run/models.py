"""From the word MODEL to a model that runs, with a batch of random tokens or pictures for it.

As for `torch-recompute plan`, but with weights and values, on the device. Two small models can be run where nothing
else is installed and nothing larger fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from ... import errors
from ..._compat import tree_flatten, tree_leaves, tree_unflatten
from ..._models import DTYPES, batch_for, load
from ..models import MODELS, VOCABULARY
from .settings import Workload

SMALL: Mapping[str, str] = MappingProxyType({"gpt-tiny": "gpt", "llama-tiny": "llama"})
"""Four layers of width 128."""
LAYERS, WIDTH, TOKENS, BATCH = 4, 128, 128, 4
SEED = 0


class Ready(NamedTuple):
    """A model in training, and one call of it.

    Attributes:
        model: The model.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Of the call."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor)]

    @property
    def items(self) -> tuple[str, int]:
        """What a step is counted in: the tokens of the first tensor of integers, else the samples of the first."""
        for tensor in self.tensors:
            if not tensor.dtype.is_floating_point and tensor.ndim > 1:
                return "tokens", tensor.numel()
        return "samples", next((len(tensor) for tensor in self.tensors if tensor.ndim), 1)

    @property
    def nbytes(self) -> int:
        """Of parameters, buffers and batch."""
        tensors = (*self.model.parameters(), *self.model.buffers(), *self.tensors)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())


def ready(workload: Workload, rank: int, device: torch.device) -> Ready:
    """The model of a workload, with the same weights each time, and a batch of the rank's own.

    Raises:
        ArgumentError: There is no such model, or it is not one that the options describe.
    """
    torch.manual_seed(SEED)
    dtype = None if workload.dtype is None else DTYPES[workload.dtype]
    call: tuple[Any, ...] | dict[str, Any] | None
    if workload.model in SMALL:
        tokens, batch = workload.sequence or TOKENS, workload.batch or BATCH
        model, text = MODELS[SMALL[workload.model]].build(LAYERS, WIDTH, tokens, batch)
        model, call = model.to(dtype), (_filled(text, VOCABULARY, rank),)
    else:
        model, call, _ = load(workload.model, dtype, device)
        if call is None:
            described = batch_for(model, workload.model, workload.batch, workload.sequence)
            config: Any = model.config
            vocabulary = getattr(config, "vocab_size", 1)
            random = {id(value): _filled(value, vocabulary, rank) for value in described.values()}
            call = {name: random[id(value)] for name, value in described.items()}  # labels may be the tokens
        else:
            for option, value in (("--batch", workload.batch), ("--sequence", workload.sequence)):
                if value is not None:
                    raise errors.ArgumentError(errors.made_by_a_function(option, workload.model))
    leaves, spec = tree_flatten(call)
    moved = [leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    call = tree_unflatten(moved, spec)
    model.to(device).train()
    return Ready(model, call, {}) if isinstance(call, tuple) else Ready(model, (), dict(call or {}))


def _filled(value: Any, vocabulary: int, rank: int) -> Any:
    """Random tokens or pictures in place of such a tensor; anything else, a class to predict for one, is left alone."""
    if not isinstance(value, torch.Tensor) or value.ndim < 2:
        return value
    draw = torch.Generator().manual_seed(SEED + rank)
    if value.dtype.is_floating_point:
        return torch.randn(value.shape, generator=draw).to(value.dtype)
    return torch.randint(vocabulary, value.shape, generator=draw)
