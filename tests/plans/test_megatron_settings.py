"""Megatron's settings: their regions in a model, and where they are read from. Refusals are in `test_messages.py`."""

import argparse
import dataclasses
import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from laws.watch import equal
from support.anatomy import ANATOMY
from support.training import gradients
from support.zoo import MIXTURE, _causal, build, scalar_loss
from torch_recompute import (
    ArgumentError,
    Choice,
    OnHost,
    Plan,
    RecomputeConfig,
    apply,
    measure,
    saved_activations,
)
from torch_recompute.plan.config import groups
from torch_recompute.plan.fields import FIELDS, Field
from torch_recompute.plan.labels import LABELS
from torch_recompute.plan.settings import INSIDE

WIDTH = 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (2, -1)).transpose(1, 2).chunk(3, -1)
        return self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gates, chosen = F.linear(x, self.weight).softmax(-1).topk(2)
        return gates, chosen


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = Router(), nn.ModuleList(MLP() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates, chosen = self.router(x)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            weight = (gates * (chosen == i)).sum(-1, keepdim=True)
            out = out + weight * expert(x)
        return out


class Block(nn.Module):
    def __init__(self, *, moe: bool = False) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = MoE() if moe else MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, layers: int = 5, *, moe: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.wte = nn.Embedding(16, WIDTH)
        self.h = nn.ModuleList(Block(moe=i in moe) for i in range(layers))
        self.ln_f = nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens)
        for block in self.h:
            x = block(x)
        return self.ln_f(x)


def gpt() -> nn.Module:
    return GPT()


def moe() -> nn.Module:
    return GPT(4, moe=(2, 3))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def encoder_and_decoder() -> nn.Module:
    return nn.Transformer(WIDTH, 2, num_encoder_layers=4, num_decoder_layers=2, dim_feedforward=16, batch_first=True)


def full(method: str, number: int, **others: Any) -> RecomputeConfig:
    return RecomputeConfig(recompute_granularity="full", recompute_method=method, recompute_num_layers=number, **others)


def selective(*labels: str) -> RecomputeConfig:
    return RecomputeConfig(recompute_granularity="selective", recompute_modules=list(labels))


def region(*paths: str, carry: bool = False) -> tuple[tuple[str, ...], bool]:
    return paths, carry


def regions(plan: Plan) -> list[tuple[tuple[str, ...], bool]]:
    """What is in a plan, save how it is explained and what is kept."""
    return [(choice.paths, choice.carry) for choice in plan]


WHOLE_LAYERS = [
    (gpt, RecomputeConfig(), []),
    (gpt, full("uniform", 1), [region(f"h.{i}") for i in range(5)]),
    (gpt, full("uniform", 2), [region("h.0", "h.1"), region("h.2", "h.3"), region("h.4")]),
    (gpt, full("uniform", 5), [region("h.0", "h.1", "h.2", "h.3", "h.4")]),
    (gpt, full("block", 2), [region("h.0"), region("h.1")]),
    (gpt, full("block", 5), [region(f"h.{i}") for i in range(5)]),
    (encoder, full("uniform", 2), [region("layers.0", "layers.1"), region("layers.2")]),
    (encoder, full("block", 1), [region("layers.0")]),
    # A region with a router inside carries what it decided, whole or not.
    (moe, full("block", 3), [region("h.0"), region("h.1"), region("h.2", carry=True)]),
    (moe, full("uniform", 3), [region("h.0", "h.1", "h.2", carry=True), region("h.3", carry=True)]),
    # Each stack by itself; the shorter one is one region, or recomputed as a whole.
    (
        encoder_and_decoder,
        full("uniform", 3),
        [
            region("encoder.layers.0", "encoder.layers.1", "encoder.layers.2"),
            region("encoder.layers.3"),
            region("decoder.layers.0", "decoder.layers.1"),
        ],
    ),
    (
        encoder_and_decoder,
        full("block", 3),
        [
            region("encoder.layers.0"),
            region("encoder.layers.1"),
            region("encoder.layers.2"),
            region("decoder.layers.0"),
            region("decoder.layers.1"),
        ],
    ),
]


@pytest.mark.parametrize(("model", "config", "expected"), WHOLE_LAYERS)
def test_whole_layers(model: Any, config: RecomputeConfig, expected: list[Any]) -> None:
    """Granularity None and "full" give exactly the regions of the row."""
    assert regions(config.plan(model())) == expected


@given(length=st.integers(1, 60), number=st.integers(1, 60))
def test_groups_of_layers(length: int, number: int) -> None:
    """Uniform groups hold each layer once and in order, all full but the last; block makes one of each first layer."""
    layers = [f"layers.{i}" for i in range(length)]
    made = groups(layers, "uniform", number)
    assert [layer for group in made for layer in group] == layers
    assert {len(group) for group in made[:-1]} <= {number}
    assert 1 <= len(made[-1]) <= number
    assert groups(layers, "block", number) == [(layer,) for i, layer in enumerate(layers) if i < number]


PARTS = [
    (gpt, selective("core_attn"), [region(f"h.{i}.attn") for i in range(5)]),
    (gpt, selective("mlp"), [region(f"h.{i}.mlp") for i in range(5)]),
    # The region is the layer; what is not norm or residual is saved.
    (gpt, selective("layernorm"), [region(f"h.{i}") for i in range(5)]),
    (gpt, selective("mlp", "core_attn"), [region(f"h.{i}.{part}") for i in range(5) for part in ("attn", "mlp")]),
    (gpt, selective("h.2"), [region("h.2")]),
    (gpt, selective("h.1.mlp", "h.0.attn"), [region("h.0.attn"), region("h.1.mlp")]),
    (gpt, selective("h.[13].mlp"), [region("h.1.mlp"), region("h.3.mlp")]),
    (gpt, selective("mlp", "mlp", "h.*.mlp"), [region(f"h.{i}.mlp") for i in range(5)]),
    (encoder, selective("core_attn"), [region(f"layers.{i}.self_attn") for i in range(3)]),
    # The dense layers have the one, the others the other.
    (moe, selective("mlp"), [region("h.0.mlp"), region("h.1.mlp")]),
    (moe, selective("moe"), [region("h.2.mlp", carry=True), region("h.3.mlp", carry=True)]),
    (moe, selective("h.*.mlp"), [region(f"h.{i}.mlp", carry=i >= 2) for i in range(4)]),
    (
        moe,
        selective("moe", "h.0.mlp"),
        [region("h.0.mlp"), region("h.2.mlp", carry=True), region("h.3.mlp", carry=True)],
    ),
]


@pytest.mark.parametrize(("model", "config", "expected"), PARTS)
def test_parts(model: Any, config: RecomputeConfig, expected: list[Any]) -> None:
    """Labels, paths and patterns give exactly the regions of the row, in the model's order, none of them twice."""
    assert regions(config.plan(model())) == expected


def test_parts_are_explained_by_their_labels() -> None:
    """Each region says which of the labels asked for it."""
    plan = selective("mlp", "core_attn", "h.0.mlp").plan(GPT(1))
    assert {choice.paths[0]: choice.labels for choice in plan} == {
        "h.0.attn": ("core_attn",),
        "h.0.mlp": ("mlp", "h.0.mlp"),
    }


@pytest.mark.parametrize("name", ["gpt2", "deepseek_v3", "bert", "megatron_moe"])
def test_every_label_that_matches_makes_a_plan(name: str) -> None:
    """What an error lists as matching does match, with as many regions as it says; the other labels do not."""
    model, _ = build(name)
    with pytest.raises(ArgumentError) as caught:
        selective("no such label").plan(model)
    listed = dict(re.findall(r"^ {6}(\w+) +(\d+) places?$", str(caught.value), re.MULTILINE))
    assert len(listed) >= 3
    for label in LABELS:
        if label in listed:
            assert len(selective(label).plan(model)) == int(listed[label])
        else:
            with pytest.raises(ArgumentError):
                selective(label).plan(model)


# From this layer on, layers have a router.
ROUTED = {
    **dict.fromkeys(["mixtral", "olmoe", "torchtitan_moe"], 0),
    **dict.fromkeys(["deepseek_v2", "deepseek_v3", "qwen3_moe", "megatron_moe"], 1),
}


@pytest.mark.parametrize("name", ANATOMY)
def test_whole_layers_of_known_models(name: str) -> None:
    """In models of libraries, the layers of each stack are counted from its first, and routed ones carry decisions."""
    model, _ = build(name)
    routed = ROUTED.get(name, 99)
    for method, number in itertools.product(("uniform", "block"), (1, 2, 3)):
        expected = [
            region(*(f"{stack}.{i}" for i in group), carry=max(group) >= routed)
            for stack, length in ANATOMY[name].stacks.items()
            for group in groups(range(length), method, number)
        ]
        assert regions(full(method, number).plan(model)) == expected


def test_plan_says_what_it_was_made_from() -> None:
    """The plan's source is the settings, and each choice carries the word that asked for it."""
    config = full("block", 1)
    plan = config.plan(gpt())
    assert plan.source == repr(config)
    assert [choice.labels for choice in plan] == [("full/block",)]


def test_planning_leaves_the_model_alone() -> None:
    """A plan is made without a change to the model's modules, parameters, hooks or attributes."""

    def state(model: nn.Module) -> list[Any]:
        return [(path, id(module), sorted(vars(module))) for path, module in model.named_modules()]

    model = moe()
    before = state(model)
    for config in (full("uniform", 2), selective("mlp")):
        config.plan(model)
    assert state(model) == before


def test_a_stage_counts_its_own_layers() -> None:
    """What a pipeline leaves of a model is counted from its first layer there, whatever that layer is called."""
    stage, _ = build("torchtitan")
    del stage.layers["0"]
    assert regions(full("block", 1).plan(stage)) == [region("layers.1")]
    assert regions(full("uniform", 2).plan(stage)) == [region("layers.1", "layers.2")]
    with pytest.raises(ArgumentError, match=r"layers, has 2\."):
        full("uniform", 3).plan(stage)
    # Others leave something empty in the place of a layer.
    chunk = GPT(4)
    chunk.h[0] = nn.Identity()
    assert regions(full("block", 2).plan(chunk)) == [region("h.1"), region("h.2")]


@pytest.mark.parametrize("config", [full("uniform", 3), full("block", 1), selective("core_attn", "mlp", "layernorm")])
def test_adapters_above_a_frozen_embedding_train(config: RecomputeConfig) -> None:
    """Where no region's input requires grad, every adapter has the gradient that it has without regions."""
    model, inputs = build("lora_llama")
    assert not model.get_input_embeddings().weight.requires_grad
    wanted = gradients(model, loss=scalar_loss, **inputs)
    apply(model, config.plan(model))
    got = gradients(model, loss=scalar_loss, **inputs)
    assert len(got) == 1 + sum(p.requires_grad for p in model.parameters())
    assert all(map(torch.equal, got, wanted))


class Core(nn.Module):
    """What is between the projections, as a module of its own: fused, or written out."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v


class SelfAttention(Attention):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.core_attention = Core(fused)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (2, -1)).transpose(1, 2).chunk(3, -1)
        return self.proj(self.core_attention(q, k, v).transpose(1, 2).flatten(2))


class Runs(TorchDispatchMode):
    """Counts the forwards of attentions and products with a parameter's matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.attentions, self.products = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.attentions += name == "_softmax" or ("attention" in name and "backward" not in name)
        self.products += name == "addmm"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("fused", "label", "attentions", "products"),
    [
        (True, "core_attn", 4, 16),
        (True, "attention_output", 4, 20),  # q, k and v again
        (False, "core_attn", 8, 16),
        (False, "attention_output", 8, 20),
    ],
)
def test_fused_attention_runs_once(fused: bool, label: str, attentions: int, products: int) -> None:
    """A label for attention never runs a fused one twice and says so; scores written out are run again and freed."""
    model, tokens = GPT(4), torch.randint(0, 16, (2, 64))
    for block in model.h:
        block.attn = SelfAttention(fused)
    wanted, plain = gradients(model, tokens), saved_activations(model, tokens).total_bytes
    config = selective(label)
    plan = config.plan(model)
    assert str(plan).splitlines()[-1].strip().startswith("where attention is fused" if label == "core_attn" else label)
    handle = apply(model, plan)
    with Runs() as runs:
        got = gradients(model, tokens)
    assert all(map(torch.equal, got, wanted))
    assert (runs.attentions, runs.products) == (attentions, products)
    freed = plain - saved_activations(model, tokens).total_bytes
    handle.remove()
    if fused and label == "core_attn":
        assert freed == 0
        with pytest.raises(ArgumentError, match="attention_output frees q, k and v"):
            config.plan(model, tokens)
    else:
        # q, k and v; without a fused attention its scores, and here what makes them, as well.
        assert freed >= (4 * 3 * 2 * 64 * WIDTH * 4 if fused else 4 * 2 * 2 * 64 * 64 * 4)
        assert config.plan(model, tokens) == plan


class FlashAttnFunc(torch.autograd.Function):
    """Attention as other packages write it: a function that saves what it is given, its result and sums of rows."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The fused kernel of PyTorch, where nothing sees it."""
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        ctx.save_for_backward(q, k, v, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Its gradients."""
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(grad, *ctx.saved_tensors, 0.0, True)


class Fused(FlashAttnFunc):
    """The same under a name that does not say so."""


@torch.library.custom_op("rows::mixed", mutates_args=())
def mixed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention as an operation of a library's own."""
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    return out.clone(memory_format=torch.preserve_format), sums.clone()


def _mixed_backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> Any:
    return FlashAttnFunc.backward(ctx, grad)


mixed.register_autograd(
    _mixed_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output)
)
KERNELS: dict[str, Any] = {
    "FlashAttnFunc": FlashAttnFunc.apply,
    "Fused": Fused.apply,
    "rows_mixed": lambda q, k, v: mixed(q, k, v)[0],
    "ScaledDotProduct": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
}


class Kernel(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return KERNELS[self.name](q, k, v)


def with_kernel(name: str) -> nn.Module:
    model = GPT(4)
    for block in model.h:
        block.attn = SelfAttention(True)
        block.attn.core_attention = Kernel(name)
    return model


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("by_hand", [True, False])
def test_a_region_around_a_fused_attention_is_named(kernel: str, by_hand: bool) -> None:
    """Of whatever package a fused attention is, a region around it alone is said once to run it again for nothing."""
    model, tokens = with_kernel(kernel), torch.randint(0, 16, (2, 64))
    wanted = gradients(model, tokens)
    path = "h.*.attn.core_attention"
    paths = [path.replace("*", str(layer)) for layer in range(4)]
    apply(model, Plan(tuple(Choice((one,)) for one in paths)) if by_hand else selective(path).plan(model))
    with pytest.warns(RuntimeWarning, match=rf"h\.\*\.attn\.core_attention is one fused attention \({kernel}") as said:
        got = gradients(model, tokens)
    assert len(said) == 1
    assert all(map(torch.equal, gradients(model, tokens), got))  # without another word
    assert all(map(torch.equal, got, wanted))


def test_attention_that_a_plan_cannot_keep_is_named() -> None:
    """A label that keeps attention names a kernel of another package that it runs again; kept by path it runs once."""
    model, tokens = with_kernel("FlashAttnFunc"), torch.randint(0, 16, (2, 64))
    plan = selective("attention_output").plan(model)
    handle = apply(model, plan)
    with pytest.warns(RuntimeWarning, match="FlashAttnFunc there is run again"), Runs() as runs:
        gradients(model, tokens)
    assert runs.attentions == 8
    handle.remove()
    apply(model, Plan(tuple(replace(one, keep=("core_attention", *one.keep)) for one in plan)))
    with Runs() as runs:
        gradients(model, tokens)
    assert runs.attentions == 4


@pytest.mark.parametrize(
    "config", [full("uniform", 1), selective("h.*.attn"), selective("layernorm"), selective("core_attn", "mlp")]
)
def test_other_regions_with_a_fused_attention_go_without_a_word(config: RecomputeConfig) -> None:
    """A region that frees more than the result of its attention, or keeps it, is nothing to warn of."""
    model = with_kernel("ScaledDotProduct")
    apply(model, config.plan(model))
    gradients(model, torch.randint(0, 16, (2, 64)))


@pytest.mark.parametrize(("model", "routed"), [(gpt, 0), (moe, 2)])
def test_uniform_keeps_one_input_per_region(model: Any, routed: int) -> None:
    """To the byte, a forward keeps each region's input and routing, and the last norm; gradients are the same."""
    module, tokens = model(), torch.randint(0, 16, (2, 6))
    wanted, layers, hidden = gradients(module, tokens), len(module.h), 2 * 6 * WIDTH * 4
    # Of the norm its input and two statistics per token; of each router two indices per token.
    rest = hidden + 2 * 6 * 2 * 4 + routed * 2 * 6 * 2 * 8
    for number in range(1, layers + 1):
        applied = apply(module, full("uniform", number).plan(module))
        kept = saved_activations(module, (tokens,)).total_bytes
        got = gradients(module, tokens)
        applied.remove()
        assert kept == math.ceil(layers / number) * hidden + rest
        assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))


@pytest.mark.parametrize("model", [gpt, moe])
def test_block_keeps_the_other_layers_as_they_are(model: Any) -> None:
    """Each further layer of "block" saves the same bytes, as long as layers are alike, and gradients are the same."""
    module, tokens = model(), torch.randint(0, 16, (2, 6))
    wanted = gradients(module, tokens)
    kept = [saved_activations(module, (tokens,)).total_bytes]
    for number in range(1, len(module.h) + 1):
        applied = apply(module, full("block", number).plan(module))
        kept.append(saved_activations(module, (tokens,)).total_bytes)
        got = gradients(module, tokens)
        applied.remove()
        assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))
    saved = [before - after for before, after in itertools.pairwise(kept)]
    assert min(saved) > 0
    assert len(set(saved)) == len({type(block.mlp) for block in module.h})


# --- settings as data -----------------------------------------------------------------------------------------------

CONFIGS = [
    RecomputeConfig(),
    RecomputeConfig(recompute_granularity="selective"),
    RecomputeConfig(sequence_parallel=True),
    selective(),
    selective("mlp", "layers.*.attn"),
    full("uniform", 2),
    full("block", 3, sequence_parallel=True),
]


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_settings_print_and_compare(config: RecomputeConfig) -> None:
    """What is printed makes an equal object, the hash agrees, and nothing can be assigned."""
    again = eval(repr(config), {"RecomputeConfig": RecomputeConfig})
    assert again == config
    assert hash(again) == hash(config)
    assert [other for other in CONFIGS if other == config] == [config]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.recompute_num_layers = 1  # type: ignore[misc]


def test_selective_without_modules_is_core_attn() -> None:
    """None stands for ["core_attn"], as in Megatron; [] stands for nothing at all, and is another setting."""
    assert RecomputeConfig(recompute_granularity="selective") == selective("core_attn")
    assert RecomputeConfig(recompute_granularity="selective") != selective()
    assert list(selective().plan(gpt())) == []


@pytest.mark.parametrize(
    ("others", "spelled"),
    [
        ({}, ["core_attn", "moe"]),
        ({"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, ["mlp", "moe"]),
        ({"recompute_granularity": "selective", "recompute_modules": ["moe", "mlp"]}, ["moe", "mlp"]),
        ({"recompute_granularity": "selective", "recompute_modules": []}, ["moe"]),
    ],
)
def test_moe_layer_recompute_is_spelled_out(others: dict[str, Any], spelled: list[str]) -> None:
    """The deprecated field warns with what to write, at the line that wrote it, and is equal to that."""
    with pytest.warns(DeprecationWarning, match="moe_layer_recompute") as caught:
        config = RecomputeConfig(moe_layer_recompute=True, **others)
    assert config == selective(*spelled)
    [warning] = caught
    assert warning.filename == __file__
    assert f'write recompute_granularity="selective", recompute_modules={spelled}' in str(warning.message)


def test_every_field_is_listed_as_documented() -> None:
    """The docstring describes each field, in order."""
    described = [line.strip().split(":")[0] for line in (RecomputeConfig.__doc__ or "").splitlines() if ": " in line]
    names = [field.name for field in dataclasses.fields(RecomputeConfig)]
    assert [name for name in described if name in names] == names


def test_the_table_has_a_row_for_each_field() -> None:
    """In their order; switches are off, and what belongs to one that is not on is refused."""
    defaults = {field.name: field.default for field in dataclasses.fields(RecomputeConfig)}
    assert [field.name for field in FIELDS] == [*defaults]
    for field in FIELDS:
        assert f"\n    {field.name}: {field.means}" in (RecomputeConfig.__doc__ or "")
        if field.switch:
            assert defaults[field.switch] is False
            with pytest.raises(ArgumentError, match=f"{field.switch} is False"):
                RecomputeConfig(**{field.name: other_than(defaults[field.name])})


def other_than(default: Any) -> Any:
    """A value that is not the default, nor what Megatron's default once was."""
    if isinstance(default, bool):
        return 2 if default is False else False  # False and True were both a default of cpu_offloading_weights
    return ["core_attn"] if default is None else default + 1


@pytest.mark.parametrize("field", [field for field in FIELDS if not field.effect], ids=lambda field: field.name)
def test_a_field_without_effect_is_always_refused(field: Field) -> None:
    """Also with its switch and all that this needs."""
    parts = {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]}
    layers = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    layers |= {"cpu_offloading": True, "cpu_offloading_num_layers": 1}
    rest = layers if field.switch == "cpu_offloading" else parts
    value = other_than(getattr(RecomputeConfig, field.name))
    RecomputeConfig(**rest)
    with pytest.raises(ArgumentError, match=re.escape(f"{field.name}={value} would have no effect")):
        RecomputeConfig(**rest, **{field.name: value})


# --- offloading without recomputation -------------------------------------------------------------------------------


@pytest.mark.parametrize("label", ["qkv_linear", "core_attn", "attn_norm", "mlp_norm", "h.*.mlp"])
def test_offload_modules_that_are_not_recomputed(label: str) -> None:
    """What these parts save is in host memory and runs once; gradients are the plain ones, and nothing is left."""
    torch.manual_seed(0)
    model, tokens = GPT(3), torch.randint(16, (2, 6))
    plain = torch.autograd.grad(model(tokens).square().sum(), list(model.parameters()))
    before = saved_activations(model, (tokens,)).total_bytes
    plan = RecomputeConfig(fine_grained_activation_offloading=True, offload_modules=[label]).plan(model)
    assert len(plan) in (3, 9)
    assert Plan.from_json(plan.to_json()) == plan
    assert all(choice.offload and choice.store == "host" for choice in plan)
    store = OnHost()
    handle = apply(model, plan, stores={"host": store})
    with handle.watch():
        loss = model(tokens).square().sum()
    assert 0 < store.host_bytes < before
    report = handle.report()
    assert [row.choice for row in report.rows] == list(plan)
    assert all(row.saved_bytes and row.modules and not (row.replays or row.flops) for row in report.rows)
    assert (report.saved_bytes, report.moved_bytes >= store.host_bytes) == (0, True)
    assert "MiB offloaded, " in str(report)
    found = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    del loss
    assert store.host_bytes == 0
    handle.remove()


@pytest.mark.parametrize(
    ("label", "path"), [("attn_norm", "input_layernorm"), ("mlp_norm", "pre_feedforward_layernorm")]
)
def test_a_norm_is_the_one_in_front(label: str, path: str) -> None:
    """Where layers have norms in front of their parts and behind them, the one in front is offloaded."""
    model, _ = build("gemma2")
    plan = RecomputeConfig(fine_grained_activation_offloading=True, offload_modules=[label]).plan(model)
    assert [choice.paths for choice in plan] == [(f"model.layers.{i}.{path}",) for i in range(3)]


def test_offload_modules_of_layers_that_block_leaves() -> None:
    """The first layers are regions, and of the others parts are offloaded; gradients are the plain ones."""
    torch.manual_seed(0)
    model, tokens, store = GPT(3), torch.randint(16, (2, 6)), OnHost()
    plain = torch.autograd.grad(model(tokens).square().sum(), list(model.parameters()))
    config = full("block", 2, fine_grained_activation_offloading=True, offload_modules=["core_attn", "h.*.mlp"])
    plan = config.plan(model)
    assert [(choice.paths[0], choice.offload) for choice in plan] == [
        *(("h.0", False), ("h.1", False)),
        *(("h.2.attn@attention", True), ("h.2.mlp", True)),
    ]
    handle = apply(model, plan, stores={"host": store})
    loss = model(tokens).square().sum()
    assert store.host_bytes > 0
    assert equal(list(torch.autograd.grad(loss, list(model.parameters()))), list(plain))
    handle.remove()


def qwen2_moe() -> tuple[nn.Module, dict[str, Any]]:
    """Experts that are stacked in one module, beside one that all tokens go through."""
    pytest.importorskip("transformers")
    return _causal("Qwen2MoeConfig", **MIXTURE, num_experts=4, shared_expert_intermediate_size=WIDTH)


MIXTURES: dict[str, Any] = {
    "mixtral": lambda: build("mixtral"),
    "qwen2_moe": qwen2_moe,
    "megatron_moe": lambda: build("megatron_moe"),
    "handmade": lambda: (moe(), {"tokens": torch.arange(12).view(2, 6)}),
}
STACKED = "model.layers.*.mlp.experts"


@pytest.mark.parametrize(
    ("name", "label", "count"),
    [
        ("mixtral", STACKED, 3),
        ("mixtral", f"{STACKED}@product", 3),
        ("qwen2_moe", STACKED, 3),
        ("qwen2_moe", f"{STACKED}@product", 3),
        ("megatron_moe", "expert_fc1", 8),
        ("handmade", "moe_act", 8),
    ],
)
def test_offloaded_experts(name: str, label: str, count: int) -> None:
    """What experts save, modules of their own or stacked, is freed to the byte; gradients are the plain ones."""
    torch.manual_seed(0)
    model, inputs = MIXTURES[name]()
    weights, store = [p for p in model.parameters() if p.requires_grad], OnHost()

    def step() -> tuple[int, list[torch.Tensor | None]]:
        torch.manual_seed(1)
        with measure() as memory:
            loss = scalar_loss(model(**inputs))
            held = memory.live_bytes - store.host_bytes
        return held, list(torch.autograd.grad(loss, weights, allow_unused=True))

    before, plain = step()
    plan = RecomputeConfig(fine_grained_activation_offloading=True, offload_modules=[label]).plan(model)
    assert len(plan) == count
    handle, sent = apply(model, plan, stores={"host": store}), list[int]()
    store.put = lambda tensor, put=store.put: (put(tensor), sent.append(store.host_bytes))[0]  # type: ignore[method-assign]
    after, found = step()
    assert before - after == max(sent) > 0
    assert equal([g for g in plain if g is not None], [g for g in found if g is not None])
    assert store.host_bytes == 0
    handle.remove()


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
@pytest.mark.parametrize("label", ["expert_fc1", "moe_act"])
def test_labels_of_experts_where_they_are_stacked(name: str, label: str) -> None:
    """A label for a part that no module is says so, and what it says to write is a plan."""
    model, _ = MIXTURES[name]()
    with pytest.raises(ArgumentError, match="stacked in one module") as error:
        RecomputeConfig(fine_grained_activation_offloading=True, offload_modules=[label]).plan(model)
    written = re.findall(r"\['([^']*)'\] for", str(error.value))
    assert written == [f"{STACKED}@product", STACKED]
    for pattern in written:
        assert RecomputeConfig(fine_grained_activation_offloading=True, offload_modules=[pattern]).plan(model)


def test_megatron_attention_products_by_their_calls() -> None:
    """The output projection is the last product called, though Megatron's attention makes its module first."""
    model, _ = build("megatron_moe")
    for label, product in {"qkv_linear": "linear_qkv", "attn_proj": "linear_proj"}.items():
        config = RecomputeConfig(fine_grained_activation_offloading=True, offload_modules=[label, "core_attn"])
        paths = [choice.paths[0] for choice in config.plan(model) if label in choice.labels]
        assert paths == [f"decoder.layers.{n}.self_attention.{product}" for n in range(3)]


# --- offloading -----------------------------------------------------------------------------------------------------


def offloaded(config: RecomputeConfig, model: nn.Module) -> list[str]:
    """The modules whose inputs the plan keeps in host memory."""
    return [choice.paths[0] for choice in config.plan(model) if choice.store == "host"]


@pytest.mark.parametrize(
    ("config", "paths"),
    [
        (full("uniform", 1, cpu_offloading=True, cpu_offloading_num_layers=2), ["h.0", "h.1"]),
        (full("uniform", 2, cpu_offloading=True, cpu_offloading_num_layers=3), ["h.0", "h.2"]),
        (full("uniform", 5, cpu_offloading=True, cpu_offloading_num_layers=5), ["h.0"]),
        (full("block", 3, cpu_offloading=True, cpu_offloading_num_layers=3), ["h.0", "h.1", "h.2"]),
        (
            RecomputeConfig(
                recompute_granularity="selective",
                recompute_modules=["core_attn", "mlp"],
                fine_grained_activation_offloading=True,
                offload_modules=["mlp"],
            ),
            [f"h.{n}.mlp" for n in range(5)],
        ),
    ],
    ids=repr,
)
def test_offload_fields_put_inputs_into_host_memory(config: RecomputeConfig, paths: list[str]) -> None:
    """The regions meant keep their inputs in host memory, so many bytes of it, and gradients are the plain ones."""
    torch.manual_seed(0)
    model, tokens = GPT(5), torch.randint(16, (2, 6))
    assert offloaded(config, model) == paths
    assert RecomputeConfig.from_dict(config.to_dict()) == config
    plain = torch.autograd.grad(model(tokens).square().sum(), list(model.parameters()))
    store = OnHost()
    handle = apply(model, config.plan(model), stores={"host": store})
    loss = model(tokens).square().sum()
    assert store.host_bytes == len(paths) * 2 * 6 * WIDTH * 4
    found = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    del loss
    assert store.host_bytes == 0
    handle.remove()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"cpu_offloading_num_layers": 0}, "cpu_offloading_num_layers"),
        ({"cpu_offloading_num_layers": True}, "cpu_offloading_num_layers"),
        ({"cpu_offloading_num_layers": 6}, "cpu_offloading_num_layers"),
        ({"recompute_method": "block", "recompute_num_layers": 2}, "cpu_offloading_num_layers"),
        ({"cpu_offloading_activations": False}, "cpu_offloading_activations"),
        ({"cpu_offloading_weights": True}, "cpu_offloading_weights"),
        ({"recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None}, "cpu_offloading"),
    ],
)
def test_offload_fields_without_effect(fields: dict[str, Any], field: str) -> None:
    """A field that would move nothing, or more than there is, is refused by name."""
    settings = {**UNIFORM, "cpu_offloading": True, "cpu_offloading_num_layers": 3, **fields}
    with pytest.raises(ArgumentError, match=rf"^{field}(=| is )"):
        RecomputeConfig(**settings).plan(GPT(5))


def test_a_label_inside_of_regions_that_stay() -> None:
    """A label whose regions are part of others, which are not moved, moves nothing: an error."""
    config = RecomputeConfig(
        recompute_granularity="selective",
        recompute_modules=["h.*", "mlp"],
        fine_grained_activation_offloading=True,
        offload_modules=["mlp"],
    )
    with pytest.raises(ArgumentError, match="inside of other regions, whose inputs stay"):
        config.plan(GPT(2))


# --- files and nested keys ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_written_and_read_back(config: RecomputeConfig, tmp_path: Path) -> None:
    """What is written to a dict, to a section of a JSON or YAML file, or as flags is read back."""
    yaml = pytest.importorskip("yaml", reason="YAML files need PyYAML")
    data = config.to_dict()
    assert RecomputeConfig.from_dict(data) == RecomputeConfig.from_dict(json.loads(json.dumps(data))) == config
    for suffix in (".json", ".yaml", ".yml", ".YAML"):
        path = tmp_path / f"train{suffix}"
        dump = json.dumps if suffix == ".json" else yaml.safe_dump
        path.write_text(dump({"lr": 0.1, "model": {"num_layers": 4, **data}}), encoding="utf-8")
        assert RecomputeConfig.from_file(path) == RecomputeConfig.from_file(str(path)) == config
    words: list[str] = []
    for name, value in data.items():
        values = value if isinstance(value, list) else [] if value is True else [str(value)]
        words += [f"--{name}", *values]
    assert RecomputeConfig.from_args(words) == config


UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.mark.parametrize(
    "data",
    [
        UNIFORM,
        {"recompute": UNIFORM},
        {"trainer": {"model": {"config": UNIFORM}}},
        {"stages": [{"name": "pretrain"}, {"name": "tune", **UNIFORM}]},
        # In two places, and the same.
        {"model": UNIFORM, "resume": {"recompute_method": "uniform"}},
        # None stands for the default, for every field.
        {**dict.fromkeys(RecomputeConfig().names()), **UNIFORM},
        # As Megatron fills its configuration in.
        {**UNIFORM, "recompute_modules": ["core_attn"], "offload_modules": [], "cpu_offloading_weights": False},
        {**UNIFORM, **{field: default for field, (default, _) in INSIDE.items()}},
        # Other keys are none of ours, even with like names.
        {
            **UNIFORM,
            "sequence_parallelism": 2,
            "activation_checkpointing": True,
            "optimizer_cpu_offload": True,
            3: None,
        },
    ],
)
def test_fields_are_found_anywhere(data: dict[Any, Any]) -> None:
    """The fields are found among other keys, in sections, and beside Megatron's own defaults."""
    assert RecomputeConfig.from_dict(data) == full("uniform", 1)


def test_a_whole_default_configuration_means_nothing() -> None:
    """All fields at Megatron's defaults, the filled in `recompute_modules` too, are the settings that do nothing."""
    defaults = {field.name: field.default for field in dataclasses.fields(RecomputeConfig)}
    defaults |= {"recompute_modules": ["core_attn"], "offload_modules": []}
    assert RecomputeConfig.from_dict(defaults) == RecomputeConfig()


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("recompute_module", "recompute_modules"),
        ("recompute-granularity", "recompute_granularity"),
        ("Recompute_Method", "recompute_method"),
        ("recompute", "recompute_granularity"),
        ("num_recompute_layers", "recompute_num_layers"),
        ("distribute_saved_activation", "distribute_saved_activations"),
        ("activations_checkpoint_method", "recompute_method"),
        ("activations_checkpoint_num_layers", "recompute_num_layers"),
        ("checkpoint_activations", "recompute_granularity"),
        ("recompute_activations", "recompute_granularity"),
        ("cpu_offloading_num_layer", "cpu_offloading_num_layers"),
    ],
)
def test_misspelled_keys_name_the_nearest_field(key: str, nearest: str) -> None:
    """A key that can only be meant for us is refused, and the field that was probably meant is named."""
    with pytest.raises(ArgumentError) as caught:
        RecomputeConfig.from_dict({"model": {"recompute_granularity": None, key: 1}})
    assert str(caught.value).startswith(f"{key!r} in model is not a field")
    assert f"the nearest is {nearest!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", "{", "a.json is not a configuration: no JSON (Expecting"),
        ("a.yaml", "a: [1", "a.yaml is not a configuration: no YAML (while parsing"),
        ("a.yaml", "!!python/name:os.system", "a.yaml is not a configuration: no YAML (could not determine"),
        ("a.json", "[1]", "the content of a.json is list: [1], where keys and values are expected"),
        ("a.yml", "", "the content of a.yml is NoneType: None, where keys and values are expected"),
        ("a", "", "a is not a configuration: its name has no ending"),
    ],
)
def test_files_that_hold_something_else(
    name: str, text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is no JSON or YAML, or holds no keys, is refused by name, and the parser's reason is given."""
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text, encoding="utf-8")
    with pytest.raises(ArgumentError) as caught:
        RecomputeConfig.from_file(name)
    assert str(caught.value).startswith(said)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """A missing file is Python's own error."""
    with pytest.raises(FileNotFoundError):
        RecomputeConfig.from_file(tmp_path / "train.json")


# --- command lines --------------------------------------------------------------------------------------------------

COMMAND_LINES = [
    ("", RecomputeConfig()),
    ("--recompute_granularity selective --recompute_modules core_attn layernorm", selective("core_attn", "layernorm")),
    ("--recompute-granularity selective --recompute-modules core_attn,layernorm", selective("core_attn", "layernorm")),
    ("--recompute_granularity=selective --recompute_modules=mlp,moe --lr 1", selective("mlp", "moe")),
    (
        "--recompute-granularity selective --recompute_modules mlp, moe,layers.*.attn",
        selective("mlp", "moe", "layers.*.attn"),
    ),
    ("--recompute-granularity selective --recompute-modules", selective()),
    ("--recompute-granularity selective", selective("core_attn")),
    ("--recompute-activations", selective("core_attn")),
    ("--recompute_activations --recompute_modules mlp", selective("mlp")),
    ("--recompute-activations --recompute-granularity selective", selective("core_attn")),
    ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 2", full("uniform", 2)),
    ("--recompute_granularity full --recompute_method block --recompute_num_layers 2 -v x", full("block", 2)),
    ("--lr 1e-4 --recompute-activations --steps 3 --resume", selective("core_attn")),
    ("-rl 4", full("block", 4)),
    ("-rl 4 --recompute_method block", full("block", 4)),
    ("--sequence-parallel -rl 4", full("block", 4, sequence_parallel=True)),
]


@pytest.mark.parametrize(("line", "config"), COMMAND_LINES)
def test_command_line(line: str, config: RecomputeConfig) -> None:
    """A line gives the settings of the row among flags of others, and the same through a program's own parser."""
    assert RecomputeConfig.from_args(line.split()) == config
    parser = argparse.ArgumentParser()
    parser.add_argument("--sequence-parallel", action="store_true")
    for flag in ("--lr", "--steps", "-v"):
        parser.add_argument(flag)
    parser.add_argument("--resume", action="store_true")
    RecomputeConfig.add_arguments(parser)
    assert RecomputeConfig.from_args(parser.parse_args(line.split())) == config


def test_command_line_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an argument, the words of the process are read."""
    monkeypatch.setattr("sys.argv", ["train.py", "--recompute-activations"])
    assert RecomputeConfig.from_args() == selective("core_attn")


def test_arguments_of_megatron_are_read() -> None:
    """Megatron's parsed arguments can be passed: flags that were not given are no settings."""
    args = argparse.Namespace(
        lr=0.1,
        recompute_activations=False,
        recompute_granularity="full",
        recompute_method="block",
        recompute_num_layers=2,
        recompute_modules=None,
        checkpoint_activations=False,
        mhc_recompute_layer_num=None,
        gdp_num_chunk_states_to_recompute=2,
        sequence_parallel=True,
        cpu_offloading_activations=True,
    )
    assert RecomputeConfig.from_args(args) == full("block", 2, sequence_parallel=True)
