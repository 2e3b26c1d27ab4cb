"""The model of one rank: a model of transformers with a slice of every layer, and only some of the layers.

Problem. What a rank of a tensor- and pipeline-parallel job holds has other shapes than the model, and the job is not
running where it is planned.

Idea. A slice of a layer has fewer heads, a narrower MLP and a part of the vocabulary, and is else the same layer: the
model's own class, built from a smaller configuration, with the shapes that column- and row-parallel products have. It
is compared with the whole model weight by weight (`placing.divided`), so a class that takes its sizes from elsewhere is
refused and not planned wrongly. Layers that lie on other ranks are taken out, and those that stay keep their numbers;
a rank without the embedding is called with what the rank before sends, one without the head returns what it sends.

Rejected: DTensor and `parallelize_module` on a pretended process group. Its layouts know none of the models with
experts, it keeps what was gathered where Megatron keeps the share, and a plan would be for its modules.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .. import errors
from ..plan.units import find_units
from .layout import Layout
from .placing import divided, wire

WIDTHS = (
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)


@dataclass(frozen=True)
class Rank:
    """What one rank of a pipeline holds; the ranks of a tensor-parallel group hold alike.

    Attributes:
        number: Its place in the pipeline.
        chunks: The layers of each of its chunks.
        model: On meta.
        batch: The keyword arguments of one call, one microbatch.
        sent_bytes: Of what is sent from one chunk to the next.
    """

    number: int
    chunks: tuple[tuple[int, ...], ...]
    model: nn.Module
    batch: dict[str, Any]
    sent_bytes: int

    @property
    def received(self) -> list[int]:
        """Bytes of the gradient that each chunk is sent; that of the last is part of the simulated microbatch."""
        return [self.sent_bytes] * (len(self.chunks) - 1) + [0]

    @property
    def parameters(self) -> int:
        """How many it holds."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def _cannot_divide(model: str, name: str, value: int, ranks: int) -> str:
    """Text for a size that a tensor-parallel group cannot share."""
    return (
        f"--tp is {ranks}, and {name} of {model} is {value}, which {ranks} ranks cannot share. Write a divisor of it."
    )


def ranks(model: nn.Module, word: str, layout: Layout, tokens: int) -> list[Rank]:
    """The model of each rank of a pipeline.

    Args:
        model: The whole model, of transformers and on meta.
        word: What the user called it.
        layout: How the step is spread.
        tokens: In a sequence.

    Raises:
        ArgumentError: The model is of no kind that can be sliced, or its sizes cannot be divided so.
    """
    if layout.sequence_parallel and tokens % layout.tp:
        raise errors.ArgumentError(_cannot_divide(word, "--sequence", tokens, layout.tp))
    part, slices = _sliced(model, word, layout.tp)
    paths = [unit.path for unit in find_units(part).layers]
    if not paths or not hasattr(model, "get_input_embeddings"):
        raise errors.ArgumentError(errors.no_pipeline(word, type(model).__name__))
    found: list[Rank] = []
    for number, chunks in enumerate(layout.chunks(len(paths))):
        own = copy.deepcopy(part) if layout.pp > 1 else part
        kept = [paths[layer] for chunk in chunks for layer in chunk]
        first, last = number == 0, number == layout.pp - 1
        if layout.pp > 1:
            _take_out(own, word, paths, kept, first=first, last=last)
        if layout.tp > 1:
            held = {name for name, _ in own.named_parameters()} & slices
            wire(own, kept, held, layout.tp, layout.sequence_parallel)
        batch = _batch(own, layout, tokens, first=first, last=last)
        found.append(Rank(number, tuple(map(tuple, chunks)), own, batch, _hidden(own, layout, tokens).nbytes))
    return found


def _sliced(model: nn.Module, word: str, size: int) -> tuple[nn.Module, set[str]]:
    """The model of a rank of a tensor-parallel group, with all layers, and which of its parameters are slices."""
    if size == 1:
        return model, set()
    whole: Any = getattr(model, "config", None)
    build: Any = getattr(type(model), "_from_config", None)
    heads = getattr(whole, "num_attention_heads", None)
    if build is None or not heads or not hasattr(whole, "head_dim"):
        raise errors.ArgumentError(
            f"--tp: {word} is {type(model).__name__}, whose configuration does not say how wide a head is, so a rank's "
            "slice of it cannot be built. Use it without --tp, or a model of transformers with head_dim, such as "
            "those of Llama's kind."
        )
    config = copy.deepcopy(whole)
    config.head_dim = whole.head_dim or whole.hidden_size // heads
    for name in WIDTHS:
        width = getattr(whole, name, None)
        if width is None:
            continue
        if width % size:
            raise errors.ArgumentError(_cannot_divide(word, name, width, size))
        setattr(config, name, width // size)
    config.vocab_size = -(-whole.vocab_size // size)
    with torch.device("meta"):
        part = build(config)
    return part, divided(model, part, size, word)


def _take_out(model: Any, word: str, paths: Sequence[str], kept: Sequence[str], *, first: bool, last: bool) -> None:
    """Leaves a rank its own layers, the first the embedding, the last what comes after the layers."""
    holder, _, stack = paths[0].rpartition(".")[0].rpartition(".")
    layers: Any = model.get_submodule(f"{holder}.{stack}".strip("."))
    for path in set(paths) - set(kept):
        del layers._modules[path.rpartition(".")[2]]
    body: Any = model.get_submodule(holder)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = [name for name, _ in body.named_children()]
    for name in names:
        child = getattr(body, name)
        if child is embedding:
            if not first:
                setattr(body, name, None)
        elif child is layers or not any(True for _ in child.parameters()):
            continue
        elif names.index(name) < names.index(stack):
            raise errors.ArgumentError(
                f"--pp: {word} holds {name} before its layers, besides the embedding, so it is not known what a rank "
                "without them is called with. Use it without --pp."
            )
        elif not last:
            setattr(body, name, nn.Identity())
    if head is not None and not last:
        model.set_output_embeddings(nn.Identity())


def _batch(model: Any, layout: Layout, tokens: int, *, first: bool, last: bool) -> dict[str, Any]:
    """What a rank is called with in one microbatch."""
    ids = torch.ones(layout.mbs, tokens, dtype=torch.long)
    batch: dict[str, Any] = {"use_cache": False, "position_ids": torch.arange(tokens)[None]}
    if first:
        batch["input_ids"] = ids
    else:
        batch["inputs_embeds"] = _hidden(model, layout, tokens).requires_grad_()
    if last:
        batch["labels"] = ids
    return batch


def _hidden(model: Any, layout: Layout, tokens: int) -> torch.Tensor:
    """What is sent from one rank to the next."""
    own = tokens // layout.tp if layout.sequence_parallel else tokens
    dtype = next(parameter.dtype for parameter in model.parameters())
    return torch.empty(layout.mbs, own, model.config.hidden_size, dtype=dtype, device="meta")
