"""Layers that are compiled one by one in a simulated step: what they keep is what compiled layers keep."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from support.training import kept_in
from torch_recompute import Plan
from torch_recompute.compiling.layers import compile_layers
from torch_recompute.errors import ArgumentError
from torch_recompute.memory.ledger import CountedOnce
from torch_recompute.plan.apply import apply
from torch_recompute.plan.config import plan_of
from torch_recompute.plan.ranks import Ranks
from torch_recompute.simulation import Simulation, simulate_step
from torch_recompute.training_step import TrainingStep, any_loss

transformers = pytest.importorskip("transformers")

TOKENS, WIDTH, LAYERS = 64, 64, 3
SIZES = {"vocab_size": 64, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "intermediate_size": 96, "head_dim": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": TOKENS}
ALONE = Ranks()
kept = partial(kept_in, path="model.layers.1")


def llama(device: str = "meta") -> Any:
    """A small model, on meta or elsewhere."""
    config = transformers.LlamaConfig(**SIZES, **HEADS, dtype=torch.bfloat16)
    with torch.device(device):
        return transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa")


def simulated(model: nn.Module, words: str = "none", device: str = "cpu") -> Simulation:
    """A step of a model under a configuration."""
    ids = torch.ones(1, TOKENS, dtype=torch.long)
    step = TrainingStep(model, (), {"input_ids": ids, "labels": ids, "use_cache": False}, any_loss, device=device)
    return simulate_step(step, prepare=lambda copy: apply(copy, plan_of(words, copy)), rounding=1)


def measured() -> int:
    """The bytes that a layer keeps which torch compiles for a CPU, but for its input."""
    model = llama("cpu")
    layer = model.model.layers[1]
    x = torch.randn(1, TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    positions = model.model.rotary_emb(x.detach(), torch.arange(TOKENS)[None])
    held: list[Any] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor)
        return tensor

    compiled = torch.compile(layer, backend="aot_eager_decomp_partition", fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = compiled(x, position_embeddings=positions)
    found = CountedOnce()
    found.add([*model.parameters(), *positions, x])
    others = found.nbytes
    found.add([held, out])
    return found.nbytes - others


def test_a_compiled_layer_keeps_what_torch_keeps() -> None:
    """What a layer keeps in a simulated step, its output with it, is to the byte what one that torch compiles keeps."""
    model = llama()
    found = compile_layers(model, ALONE)
    assert found.as_data() == {"run": "compiled", "compiled": {"LlamaDecoderLayer": LAYERS}}
    assert kept(simulated(model)) == measured() < kept(simulated(llama()))


def test_a_region_around_a_compiled_layer_keeps_its_input() -> None:
    """With every layer recomputed, compiled layers keep what eager ones do; on a GPU, too, by its own kernels."""
    model, plain = llama(), llama()
    compile_layers(model, ALONE)
    for device in ("cpu", "a100"):
        found = simulated(model, "full", device)
        assert kept(found) == kept(simulated(plain, "full", device)) == TOKENS * WIDTH * 2
        assert found.flops["replay"] > 0
        assert kept(simulated(model, "none", device)) < kept(simulated(plain, "none", device))


def test_what_a_compiled_layer_cannot_do_is_refused() -> None:
    """Regions within a layer, ranks that share one, and models without layers are refused."""
    model = llama()
    layers = compile_layers(model, ALONE)
    layers.check({"full": plan_of("full", model), "none": Plan()})
    for words in ("mlp", "core_attn"):
        with pytest.raises(ArgumentError, match=f"in which {words} can neither recompute nor keep a part"):
            layers.check({words: plan_of(words, model)})
    with pytest.raises(ArgumentError, match="does not go with --tp 2"):
        compile_layers(llama(), Ranks(tp=2))
    with pytest.raises(ArgumentError, match="has no layers that are known"):
        compile_layers(nn.Linear(2, 2), ALONE)
