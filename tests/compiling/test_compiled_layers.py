"""Layers that are compiled one by one in a simulated step: what they keep is what compiled layers keep."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from support.training import kept_by_compiled, kept_in
from torch_recompute import Choice, Plan
from torch_recompute.compiling.layers import compile_layers
from torch_recompute.errors import ArgumentError
from torch_recompute.plan.apply import apply
from torch_recompute.plan.config import plan_of
from torch_recompute.plan.ranks import Ranks
from torch_recompute.planner.configurations import ConfiguredStep, configurations, peaks_of
from torch_recompute.planner.planner import Planner
from torch_recompute.simulation import Simulation, simulate_step
from torch_recompute.simulation.training_step import TrainingStep, any_loss

transformers = pytest.importorskip("transformers")

TOKENS, WIDTH, LAYERS = 64, 64, 3
SIZES = {"vocab_size": 64, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "intermediate_size": 96, "head_dim": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": TOKENS}
ALONE = Ranks()
kept = partial(kept_in, path="model.layers.1")
kept_adapted = partial(kept_in, path="base_model.model.model.layers.1")


def llama(device: str = "meta") -> Any:
    """A small model, on meta or elsewhere."""
    config = transformers.LlamaConfig(**SIZES, **HEADS, dtype=torch.bfloat16)
    with torch.device(device):
        return transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa")


def adapted(model: Any) -> Any:
    """A model whose products have adapters."""
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))


def step_of(model: nn.Module, device: str = "cpu", tokens: int = TOKENS, ranks: Ranks = ALONE) -> TrainingStep:
    """A step of a model."""
    ids = torch.ones(1, tokens, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(tokens)[None], "use_cache": False}
    return TrainingStep(model, (), batch, any_loss, device=device, ranks=ranks)


def simulated(model: nn.Module, words: str = "none", device: str = "cpu", tokens: int = TOKENS) -> Simulation:
    """A step of a model under a configuration."""
    step = step_of(model, device, tokens)
    return simulate_step(step, prepare=lambda copy: apply(copy, plan_of(words, copy)), rounding=1)


def measured(tokens: int, *, adapters: bool = False) -> int:
    """The bytes that a layer keeps which torch compiles for a CPU, but for its input."""
    model = llama("cpu")
    layer = model.model.layers[1]
    if adapters:
        adapted(model)
    x = torch.randn(1, tokens, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    positions = model.model.rotary_emb(x.detach(), torch.arange(tokens)[None])
    return kept_by_compiled(layer, x, position_embeddings=positions)


@pytest.mark.parametrize("tokens", [TOKENS, 8])
def test_a_compiled_layer_keeps_what_torch_keeps(tokens: int) -> None:
    """What a layer keeps in a simulated step, its output with it, is to the byte what one that torch compiles keeps.

    With few tokens, too, of which a simulated step knows the values elsewhere.
    """
    model = llama()
    found = compile_layers(model, ALONE)
    assert found.as_data() == {"run": "compiled", "compiled": {"LlamaDecoderLayer": LAYERS}}
    assert kept(simulated(model, tokens=tokens)) == measured(tokens) < kept(simulated(llama(), tokens=tokens))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_a_compiled_layer_with_adapters_keeps_what_torch_keeps() -> None:
    """With adapters in its products, as `--lora` makes them, too."""
    model = adapted(llama())
    compile_layers(model, ALONE)
    assert kept_adapted(simulated(model)) == measured(TOKENS, adapters=True) < kept_adapted(simulated(adapted(llama())))


@pytest.mark.parametrize(
    ("kind", "device"),
    [
        ("all-gather", "h100"),
        ("ring", "a100"),
        pytest.param("all-gather", "a100", marks=pytest.mark.nightly),
        pytest.param("ring", "h100", marks=pytest.mark.nightly),
    ],
)
def test_compiled_layers_that_share_tokens_send_what_written_ones_do(kind: str, device: str) -> None:
    """Layers that ranks share send the same bytes whether they are compiled or not, and keep no more than alone."""
    ranks, found = Ranks(cp=2, zero=0, cp_kind=kind), list[ConfiguredStep]()
    for shared, compiled in ((ranks, True), (ranks, False), (ALONE, True)):
        model = llama()
        if compiled:
            compile_layers(model, ranks)
        step = step_of(model, device, ranks=shared)
        found += peaks_of(step, configurations("recompute", "none,full", step))
    rows = list(zip(found[::2], found[1::2], strict=True))
    assert [[one.bytes for one in row[0].sent] for row in rows] == [[one.bytes for one in rows[1][0].sent]] * 2 + [[]]
    assert rows[0][1].sent[0].bytes > rows[0][0].sent[0].bytes > 0  # a replay sends again
    assert kept(rows[0][0].simulation) == kept(rows[2][0].simulation) < kept(rows[1][0].simulation)


def test_a_region_around_a_compiled_layer_keeps_its_input() -> None:
    """With every layer recomputed, compiled layers keep what eager ones do; on a GPU, too, by its own kernels."""
    model, plain = llama(), llama()
    compile_layers(model, ALONE)
    for device in ("cpu", "a100"):
        found = simulated(model, "full", device)
        assert kept(found) == kept(simulated(plain, "full", device)) == TOKENS * WIDTH * 2
        assert found.flops["replay"] > 0
        assert kept(simulated(model, "none", device)) < kept(simulated(plain, "none", device))


def test_no_plan_keeps_a_part_of_a_compiled_layer() -> None:
    """A plan has regions around compiled layers, and keeps nothing in them: what torch keeps there is not simulated."""
    model = llama()
    compile_layers(model, ALONE)
    step = step_of(model, "h100")
    found = Planner(step).plan(0.5)
    assert len(found) > 0
    assert not any(choice.kept for choice in found)
    plans = [Plan((Choice(("model.layers.1",), keep=keep),)) for keep in ((), ("@product",))]
    every, products = (simulate_step(step, prepare=partial(apply, plan=plan)) for plan in plans)
    assert (every.saved_bytes, every.flops) == (products.saved_bytes, products.flops)


def test_what_a_compiled_layer_cannot_do_is_refused() -> None:
    """Regions within a layer, ranks that share one, and models without layers are refused."""
    model = llama()
    layers = compile_layers(model, ALONE)
    layers.check({"full": plan_of("full", model), "none": Plan()})
    for words in ("mlp", "core_attn"):
        with pytest.raises(ArgumentError, match=f"in which {words} can neither recompute nor keep a part"):
            layers.check({words: plan_of(words, model)})
    for ranks, why in {Ranks(tp=2): "--tp 2", Ranks(cp=2, cp_kind="ulysses", zero=0): "--cp-kind ulysses"}.items():
        with pytest.raises(ArgumentError, match=f"does not go with {why}"):
            compile_layers(llama(), ranks)
    with pytest.raises(ArgumentError, match="has no layers that are known"):
        compile_layers(nn.Linear(2, 2), ALONE)
