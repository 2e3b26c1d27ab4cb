"""A batch for a model that transformers describes: what its forward takes, with labels, so that the step has a loss.

Token ids are real tensors, for a model on the meta device too: a model looks at their values (for padding), and they
are small. Their values are all the same, because no figure of a step depends on them.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from .. import errors

_OWN = (
    "a function pkg.module:name that returns (model, batch), or (model, batch, loss), the batch a tuple of arguments "
    "or a dict of keywords"
)

SEQUENCE = 4096


def _no_such_sequence(model: str, length: int, positions: int | None) -> str:
    """Text for a number of tokens that a model cannot take; it has no positions if it takes pictures."""
    if positions is None:
        return f"--sequence is a number of tokens, and {model} takes pixel_values. Leave it out."
    return f"--sequence is {length}, and {model} has {positions} positions. Write --sequence {positions} or less."


def batch_for(model: nn.Module, word: str, batch: int | None = None, sequence: int | None = None) -> dict[str, Any]:
    """The keyword arguments of one call.

    Args:
        model: A model of transformers.
        word: What the user called it.
        batch: How many sequences or pictures; 1 by default.
        sequence: How many tokens each; by default as many as the model has positions, and at most 4096.

    Returns:
        `input_ids` (batch, sequence), or `pixel_values` (batch, channels, height, width), and `labels` where the
        model takes them.

    Raises:
        ArgumentError: It is not known what the model takes, or it has no such positions.
    """
    config: Any = getattr(model, "config", None)
    takes = inspect.signature(model.forward).parameters
    size = 1 if batch is None else batch
    if getattr(model, "main_input_name", "") == "pixel_values" and isinstance(getattr(config, "image_size", 0), int):
        if sequence is not None:
            raise errors.ArgumentError(_no_such_sequence(word, sequence, None))
        shape = size, config.num_channels, config.image_size, config.image_size
        found: dict[str, Any] = {"pixel_values": torch.empty(shape, dtype=_dtype(model), device="meta")}
        labels = torch.zeros(size, dtype=torch.long)
    elif getattr(model, "main_input_name", "") == "input_ids" and "input_ids" in takes:
        positions = getattr(config, "max_position_embeddings", None) or SEQUENCE
        length = min(SEQUENCE, positions) if sequence is None else sequence
        if length > positions:
            raise errors.ArgumentError(_no_such_sequence(word, length, positions))
        found = {"input_ids": torch.ones(size, length, dtype=torch.long)}
        labels = found["input_ids"]
        if "SequenceClassification" in type(model).__name__:
            labels = torch.zeros(size, dtype=torch.long)
    else:
        raise errors.ArgumentError(
            f"MODEL is {word!r}, which is {type(model).__name__}: no model of transformers that takes input_ids or "
            f"pixel_values, so there is no batch for it. Write {_OWN}."
        )
    if "labels" in takes:
        found["labels"] = labels
    if "use_cache" in takes:
        found["use_cache"] = False
    return found


def _dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.dtype.is_floating_point), torch.float32)


def filled(batch: Any, model: nn.Module, device: str) -> Any:
    """A batch of the same shapes with random contents on a device, for a step that is really run.

    Args:
        batch: From `batch_for`.
        model: The model; token ids and classes are those that it knows.
        device: Where.
    """
    config: Any = model.config
    generator = torch.Generator().manual_seed(0)
    classes = config.num_labels if "pixel_values" in batch else config.vocab_size
    if "SequenceClassification" in type(model).__name__:
        classes = config.num_labels
    found: dict[str, Any] = {}
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            if value.is_floating_point():
                value = torch.randn(value.shape, generator=generator).to(value.dtype)
            else:
                ids = config.vocab_size if name == "input_ids" else classes
                value = torch.randint(ids, value.shape, generator=generator)
            found[name] = value.to(device)
        else:
            found[name] = value
    return found
