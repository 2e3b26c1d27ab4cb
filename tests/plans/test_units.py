"""What models are made of: roles by path for each architecture of the zoo, and what the search must not depend on.

`ANATOMY` was written by reading each model's source, not by running the search. A row names the stacks with their
numbers of layers, then, for one layer or more, which paths (from the layer) have which role. Roles that a row does not
name must not be found in that layer.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from support.zoo import ZOO, build
from support.zoo_handmade import ConvNeXtBlock, MegatronGPT, Mlp, VisionBlock
from torch_recompute.plan.units import Units, find_units, register


def roles(text: str) -> dict[str, str]:
    """Roles with their paths, written `role role: path path; role: path`."""
    return {role: paths for part in text.split("; ") for names, paths in [part.split(": ")] for role in names.split()}


QKVO = "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj"
GLU = "mlp.gate_proj mlp.up_proj mlp.down_proj"
PRE = "input_layernorm post_attention_layernorm"
QK_NORM = "self_attn.q_norm self_attn.k_norm"
LATENT = roles(
    "attention core_attention: self_attn; "
    "down_projection: self_attn.q_a_proj self_attn.kv_a_proj_with_mqa; "
    "up_projection: self_attn.q_b_proj self_attn.kv_b_proj; "
    f"inner_norm: self_attn.q_a_layernorm self_attn.kv_a_layernorm; norm: {PRE}"
)
LLAMA = roles(
    f"attention core_attention: self_attn; mlp: mlp; norm: {PRE}; product: {QKVO} {GLU}; activation: mlp.act_fn"
)
MIXTURE = roles(
    f"attention core_attention: self_attn; norm: {PRE}; product: {QKVO}; moe: mlp; router: mlp.gate; "
    "experts: mlp.experts; activation: mlp.experts.act_fn"
)
GEMMA = LLAMA | roles(f"norm: {PRE} pre_feedforward_layernorm post_feedforward_layernorm")
DEEPSEEK = {
    "model.layers.0": LATENT | roles(f"mlp: mlp; activation: mlp.act_fn; product: self_attn.o_proj {GLU}"),
    "model.layers.2": LATENT
    | roles(
        "moe: mlp; router: mlp.gate; experts: mlp.experts; shared_experts: mlp.shared_experts; "
        "activation: mlp.experts.act_fn mlp.shared_experts.act_fn; "
        "product: self_attn.o_proj mlp.shared_experts.gate_proj mlp.shared_experts.up_proj "
        "mlp.shared_experts.down_proj"
    ),
}
FLAT = roles(
    "attention core_attention: self_attn; mlp: fc1+fc2; norm: self_attn_layer_norm final_layer_norm; "
    "activation: activation_fn; "
    "product: self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj fc1 fc2"
)
TORCH = roles("attention core_attention: self_attn; mlp: linear1+linear2; norm: norm1 norm2; product: linear1 linear2")
MEGATRON = roles(
    "attention: self_attention; core_attention: self_attention.core_attention; "
    "norm: input_layernorm pre_mlp_layernorm; "
    "inner_norm: self_attention.q_layernorm self_attention.k_layernorm; mlp: mlp; "
    "product: self_attention.linear_qkv self_attention.linear_proj mlp.linear_fc1 mlp.linear_fc2"
)
TITAN = roles(
    "attention core_attention: attention; norm: attention_norm ffn_norm; "
    "product: attention.wq attention.wk attention.wv attention.wo"
)


LOCAL = " ".join(f"mlp.experts.local_experts.{e}.linear_fc{n}" for e in range(4) for n in (1, 2))


def t5_half(path: str, number: int) -> str:
    return " ".join(f"layer.{number}.{path}.{name}" for name in "qkvo")


@dataclass
class Row:
    """What is expected of one architecture.

    Attributes:
        stacks: The layers of each stack, by path.
        layers: Paths of layers with what is in each.
        outside: Roles that are not in a layer.
    """

    stacks: dict[str, int]
    layers: dict[str, dict[str, str]]
    outside: dict[str, str] = field(default_factory=dict)


def decoder(layer: dict[str, str], *, at: str = "model.layers") -> Row:
    """A Hugging Face decoder with Llama's names around the layers."""
    outside = roles("embedding: model.embed_tokens; norm: model.norm; head: lm_head")
    return Row({at: 3}, {f"{at}.1": layer}, outside)


ANATOMY: dict[str, Row] = {
    "gpt2": Row(
        {"transformer.h": 3},
        {
            "transformer.h.2": roles(
                "attention core_attention: attn; mlp: mlp; norm: ln_1 ln_2; activation: mlp.act; "
                "product: attn.c_attn attn.c_proj mlp.c_fc mlp.c_proj"
            )
        },
        roles("embedding: transformer.wte transformer.wpe; norm: transformer.ln_f; head: lm_head"),
    ),
    "gpt_neox": Row(
        {"gpt_neox.layers": 3},
        {
            "gpt_neox.layers.0": roles(
                f"attention core_attention: attention; mlp: mlp; norm: {PRE}; activation: mlp.act; "
                "product: attention.query_key_value attention.dense mlp.dense_h_to_4h mlp.dense_4h_to_h"
            )
        },
        roles("embedding: gpt_neox.embed_in; norm: gpt_neox.final_layer_norm; head: lm_head"),
    ),
    **dict.fromkeys(["llama", "mistral", "qwen2", "olmo", "lora_llama"], decoder(LLAMA)),
    "qwen3": decoder(LLAMA | roles(f"inner_norm: {QK_NORM}")),
    "gemma2": decoder(GEMMA),
    "gemma3": decoder(GEMMA | roles(f"inner_norm: {QK_NORM}")),
    "mixtral": decoder(MIXTURE),
    "olmoe": decoder(MIXTURE | roles(f"inner_norm: {QK_NORM}")),
    "qwen3_moe": Row(
        {"model.layers": 3},
        {
            "model.layers.0": LLAMA | roles(f"inner_norm: {QK_NORM}"),
            "model.layers.1": MIXTURE | roles(f"inner_norm: {QK_NORM}"),
        },
    ),
    "deepseek_v2": Row({"model.layers": 3}, DEEPSEEK),
    "deepseek_v3": Row({"model.layers": 3}, DEEPSEEK),
    "phi": Row(
        {"model.layers": 3},
        {
            "model.layers.1": roles(
                "attention core_attention: self_attn; mlp: mlp; norm: input_layernorm; "
                "activation: mlp.activation_fn; "
                "product: self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.dense mlp.fc1 mlp.fc2"
            )
        },
    ),
    "opt": Row(
        {"model.decoder.layers": 3},
        {"model.decoder.layers.1": FLAT},
        roles(
            "embedding: model.decoder.embed_tokens model.decoder.embed_positions; "
            "norm: model.decoder.final_layer_norm; head: lm_head"
        ),
    ),
    "falcon": Row(
        {"transformer.h": 3},
        {
            "transformer.h.1": roles(
                "attention core_attention: self_attention; mlp: mlp; norm: input_layernorm; activation: mlp.act; "
                "product: self_attention.query_key_value self_attention.dense mlp.dense_h_to_4h mlp.dense_4h_to_h"
            )
        },
    ),
    "mamba": Row(
        {"backbone.layers": 3},
        {
            "backbone.layers.2": roles(
                "mixer: mixer; norm: norm; activation: mixer.act; "
                "product: mixer.conv1d mixer.in_proj mixer.x_proj mixer.dt_proj mixer.out_proj"
            )
        },
        roles("embedding: backbone.embeddings; norm: backbone.norm_f; head: lm_head"),
    ),
    "bert": Row(
        {"bert.encoder.layer": 3},
        {
            "bert.encoder.layer.1": roles(
                "attention: attention; core_attention: attention.self; mlp: intermediate.dense+output.dense; "
                "norm: attention.output.LayerNorm output.LayerNorm; activation: intermediate.intermediate_act_fn; "
                "product: attention.self.query attention.self.key attention.self.value attention.output.dense "
                "intermediate.dense output.dense"
            )
        },
        roles(
            "embedding: bert.embeddings; norm: bert.embeddings.LayerNorm cls.predictions.transform.LayerNorm; head: cls"
        ),
    ),
    "t5": Row(
        {"encoder.block": 3, "decoder.block": 3},
        {
            "encoder.block.0": roles(
                "attention core_attention: layer.0.SelfAttention; mlp: layer.1.DenseReluDense; "
                "norm: layer.0.layer_norm layer.1.layer_norm; activation: layer.1.DenseReluDense.act; "
                f"product: {t5_half('SelfAttention', 0)} layer.1.DenseReluDense.wi_0 layer.1.DenseReluDense.wi_1 "
                "layer.1.DenseReluDense.wo"
            ),
            "decoder.block.2": roles(
                "attention core_attention: layer.0.SelfAttention layer.1.EncDecAttention; "
                "mlp: layer.2.DenseReluDense; norm: layer.0.layer_norm layer.1.layer_norm layer.2.layer_norm; "
                "activation: layer.2.DenseReluDense.act; "
                f"product: {t5_half('SelfAttention', 0)} {t5_half('EncDecAttention', 1)} layer.2.DenseReluDense.wi_0 "
                "layer.2.DenseReluDense.wi_1 layer.2.DenseReluDense.wo"
            ),
        },
        roles(
            "embedding: shared encoder.embed_tokens decoder.embed_tokens; "
            "norm: encoder.final_layer_norm decoder.final_layer_norm; head: lm_head"
        ),
    ),
    "vit": Row(
        {"vit.layers": 3},
        {
            "vit.layers.0": roles(
                "attention core_attention: attention; mlp: mlp; norm: layernorm_before layernorm_after; "
                "activation: mlp.activation_fn; "
                "product: attention.q_proj attention.k_proj attention.v_proj attention.o_proj mlp.fc1 mlp.fc2"
            )
        },
        roles("embedding: vit.embeddings; norm: vit.layernorm; head: classifier"),
    ),
    "whisper": Row(
        {"model.encoder.layers": 3, "model.decoder.layers": 3},
        {
            "model.encoder.layers.1": FLAT,
            "model.decoder.layers.1": FLAT
            | roles(
                "attention core_attention: self_attn encoder_attn; "
                "norm: self_attn_layer_norm encoder_attn_layer_norm final_layer_norm; "
                f"product: {FLAT['product']} encoder_attn.q_proj encoder_attn.k_proj encoder_attn.v_proj "
                "encoder_attn.out_proj"
            ),
        },
        roles(
            "embedding: model.encoder.embed_positions model.decoder.embed_tokens model.decoder.embed_positions; "
            "norm: model.encoder.layer_norm model.decoder.layer_norm; head: proj_out"
        ),
    ),
    "torch_encoder": Row({"layers": 3}, {"layers.1": TORCH}, {}),
    "torch_encoder_prenorm": Row({"layers": 3}, {"layers.1": TORCH}, roles("norm: norm")),
    "torch_decoder": Row(
        {"layers": 3},
        {"layers.1": TORCH | roles("attention core_attention: self_attn multihead_attn; norm: norm1 norm2 norm3")},
    ),
    "handmade_gpt": Row(
        {"h": 3},
        {
            "h.1": roles(
                "attention core_attention: attn; mlp: mlp; norm: ln_1 ln_2; activation: mlp.1; "
                "product: attn.c_attn attn.c_proj mlp.0 mlp.2"
            )
        },
        roles("embedding: wte; norm: ln_f; head: lm_head"),
    ),
    "megatron": Row(
        {"decoder.layers": 3},
        {"decoder.layers.0": MEGATRON},
        roles("embedding: embedding.word_embeddings; norm: decoder.final_layernorm; head: output_layer"),
    ),
    "megatron_moe": Row(
        {"decoder.layers": 3},
        {
            "decoder.layers.0": MEGATRON,
            "decoder.layers.1": {role: paths for role, paths in MEGATRON.items() if role != "mlp"}
            | roles(
                "moe: mlp; router: mlp.router; experts: mlp.experts; shared_experts: mlp.shared_experts; "
                "product: self_attention.linear_qkv self_attention.linear_proj mlp.shared_experts.linear_fc1 "
                f"mlp.shared_experts.linear_fc2 {LOCAL}"
            ),
        },
    ),
    "torchtitan": Row(
        {"layers": 3},
        {
            "layers.2": TITAN
            | roles(f"mlp: feed_forward; product: {TITAN['product']} feed_forward.w1 feed_forward.w2 feed_forward.w3")
        },
        roles("embedding: tok_embeddings; norm: norm; head: output"),
    ),
    "torchtitan_moe": Row(
        {"layers": 3},
        {
            "layers.2": TITAN
            | roles(
                "moe: moe; router: moe.router; experts: moe.experts; shared_experts: moe.shared_expert; "
                f"product: {TITAN['product']} moe.shared_expert.w1 moe.shared_expert.w2 moe.shared_expert.w3"
            )
        },
    ),
    "timm_vit": Row(
        {"blocks": 3},
        {
            "blocks.1": roles(
                "attention core_attention: attn; mlp: mlp; norm: norm1 norm2; inner_norm: attn.q_norm attn.k_norm; "
                "activation: mlp.act; product: attn.qkv attn.proj mlp.fc1 mlp.fc2"
            )
        },
        roles("embedding: patch_embed; norm: norm; head: head"),
    ),
    "convnext": Row(
        {"stages.0.blocks": 2, "stages.1.blocks": 3},
        {"stages.1.blocks.2": roles("mlp: mlp; norm: norm; activation: mlp.act; product: conv_dw mlp.fc1 mlp.fc2")},
        roles("norm: stem.1 stages.1.downsample.0 head.norm; head: head.fc"),
    ),
}


def roles_in(units: Units, layer: str) -> dict[str, set[str]]:
    """Role to paths below a layer, as the table writes them."""
    found: dict[str, set[str]] = {}
    for unit in units.by_role(*{unit.role for unit in units}, within=layer):
        if unit.role == "layer":
            continue
        called = not unit.parts or unit.parts == ("@attention",)
        name = "+".join((unit.path if called else part)[len(layer) + 1 :] for part in ([""] if called else unit.parts))
        found.setdefault(unit.role, set()).add(name)
    return found


def as_sets(roles: dict[str, str]) -> dict[str, set[str]]:
    return {role: set(paths.split()) for role, paths in roles.items()}


def test_every_architecture_has_a_row() -> None:
    """The table and the zoo hold the same architectures."""
    assert set(ANATOMY) == set(ZOO)


@pytest.mark.parametrize("name", ZOO)
def test_roles(name: str) -> None:
    """Every role is found where the model's source has it, and nowhere else in that layer."""
    units, row = find_units(build(name)[0]), ANATOMY[name]
    layers = [layer.path for layer in units.layers]
    assert list(units.stacks) == list(row.stacks)
    assert layers == [f"{stack}.{number}" for stack, count in row.stacks.items() for number in range(count)]
    for layer, inside in row.layers.items():
        assert roles_in(units, layer) == as_sets(inside)
    for role, paths in row.outside.items():
        assert {unit.path for unit in units.by_role(role) if unit.layer is None} == set(paths.split())


@pytest.mark.parametrize("name", ZOO)
def test_places(name: str) -> None:
    """Every unit knows its layer's number and stack, and every path is a module of the model."""
    model = build(name)[0]
    units = find_units(model)
    for unit in units:
        assert type(model.get_submodule(unit.path)).__name__ == unit.cls
        around = [layer for layer in units.layers if f"{unit.path}.".startswith(f"{layer.path}.")]
        assert [(layer.stack, layer.layer) for layer in around] == ([(unit.stack, unit.layer)] if unit.stack else [])
    for layer in units.layers:
        assert layer.path == f"{layer.stack}.{layer.layer}"


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "t5", "torch_decoder", "megatron_moe"])
def test_meta_device(name: str) -> None:
    """A model without weights has the same units as one with them."""
    model = build(name)[0]
    assert find_units(model) == find_units(model.to("meta"))


def test_nothing_runs_and_nothing_is_changed() -> None:
    """Looking at a model calls no forward, and leaves weights, hooks and attributes as they are."""
    model = build("megatron_moe")[0]
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model was called"))
    before = {path: set(vars(module)) for path, module in model.named_modules()}
    versions = [parameter._version for parameter in model.parameters()]
    find_units(model)
    assert {path: set(vars(module)) for path, module in model.named_modules()} == before
    assert [parameter._version for parameter in model.parameters()] == versions


def test_adapters_are_part_of_their_product() -> None:
    """The linear layers inside an adapter are no units, and the search finds the same paths with and without."""
    with_adapter, plain = (find_units(build(name)[0]) for name in ("lora_llama", "llama"))
    assert [(unit.path, unit.role) for unit in with_adapter] == [(unit.path, unit.role) for unit in plain]


@functools.cache
def class_named(name: str) -> type[nn.Module]:
    return type(name, (nn.Module,), {})


def part(cls: str, **inside: nn.Module) -> nn.Module:
    """A module of a class of this name, with these parts."""
    module = class_named(cls)()
    for name, child in inside.items():
        setattr(module, name, child)
    return module


def two_layers(make: Callable[[], dict[str, nn.Module]]) -> Units:
    """The units of two layers with these parts."""
    return find_units(nn.Sequential(part("Layer", **make()), part("Layer", **make())))


def test_experts_in_a_list() -> None:
    """Experts as a list of MLPs beside a linear gate are experts, though their parent is not called so."""

    def mixture() -> nn.Module:
        return part("Mixture", gate=nn.Linear(8, 3), branches=nn.ModuleList(Mlp(8, 16) for _ in range(3)))

    units = two_layers(lambda: {"norm": nn.LayerNorm(8), "ffn": mixture()})
    found = [(unit.path, unit.role) for unit in units.by_role("moe", "router", "experts", "mlp", within="1")]
    assert found == [("1.ffn", "moe"), ("1.ffn.gate", "router"), ("1.ffn.branches", "experts")]


def test_a_router_without_known_experts() -> None:
    """What is called a router is one even where its experts are not understood, so that its choices are carried."""
    units = two_layers(lambda: {"attn": nn.MultiheadAttention(8, 2), "indexer": part("Indexer", keys=nn.Linear(8, 4))})
    assert [unit.path for unit in units.by_role("router")] == ["0.indexer", "1.indexer"]
    assert units.by_role("moe", "experts") == ()


def test_a_gate_projection_is_no_router() -> None:
    """The gate of a gated MLP beside the experts is not taken for their router, whatever its name."""

    def layer() -> dict[str, nn.Module]:
        names = {"gate_proj": (8, 16), "up_proj": (8, 16), "down_proj": (16, 8)}
        dense = part("Gated", **{name: nn.Linear(*size) for name, size in names.items()})
        experts = part("Experts")
        experts.up, experts.down = nn.Parameter(torch.ones(3, 8, 16)), nn.Parameter(torch.ones(3, 16, 8))
        return {"dense": dense, "experts": experts, "chooser": nn.Linear(8, 3)}

    units = two_layers(layer)
    found = [(unit.path, unit.role, unit.parts) for unit in units.by_role("moe", "router", within="0")]
    assert found == [("0", "moe", ("0.chooser", "0.experts")), ("0.chooser", "router", ())]


def test_alike_mlps_without_a_router_are_no_experts() -> None:
    """A list of alike MLPs that no router chooses from is not a mixture of experts."""
    units = two_layers(
        lambda: {"attn": nn.MultiheadAttention(8, 2), "ffn": nn.ModuleList(Mlp(8, 16) for _ in range(3))}
    )
    assert units.by_role("moe", "router", "experts") == ()
    assert [unit.path for unit in units.by_role("mlp", within="0")] == ["0.ffn.0", "0.ffn.1", "0.ffn.2"]


def test_one_layer_as_the_model() -> None:
    """A layer given by itself is read as a layer."""
    units = find_units(nn.TransformerEncoderLayer(8, 2, 16))
    assert [(unit.path, unit.role) for unit in units][:3] == [("", "layer"), ("", "mlp"), ("self_attn", "attention")]
    assert units.stacks == ()


def test_missing_layers_keep_their_numbers() -> None:
    """A pipeline stage that holds `Identity` for the layers of others counts the layers as the whole model does."""
    model = build("handmade_gpt")[0]
    model.h[0] = nn.Identity()  # type: ignore[operator]
    assert [(layer.path, layer.layer) for layer in find_units(model).layers] == [("h.1", 1), ("h.2", 2)]


def test_nothing_is_guessed() -> None:
    """A model without repeated structure has no layers, and its parts no roles that it does not show."""
    units = find_units(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.LayerNorm(4)))
    assert {unit.role for unit in units} == {"norm"}
    assert units.layers == ()
    assert len(find_units(nn.Identity())) == 0


def test_a_class_is_known_by_its_bases() -> None:
    """A subclass made at run time, as FSDP2 makes one for every module, has the role of its base."""
    model = build("timm_vit")[0]
    expected = [(unit.path, unit.role) for unit in find_units(model)]
    for module in model.modules():
        module.__class__ = type(f"Sharded{type(module).__name__}", (type(module),), {})
    assert [(unit.path, unit.role) for unit in find_units(model)] == expected


class Odd(nn.Module):
    """Attention by names that nothing knows."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)


class Scale(nn.Module):
    """A norm that is not called one."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))


class OddLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.mix, self.mlp = Scale(), Odd(), Mlp(8, 16)


@pytest.mark.parametrize("match", [Odd, "Od?", lambda module: isinstance(module, Odd)], ids=["class", "glob", "call"])
def test_register(match) -> None:
    """A registered class, glob or predicate comes before what the search would find, until it is forgotten."""
    model = nn.Sequential(OddLayer(), OddLayer())

    def at(path: str) -> list[str]:
        return [unit.role for unit in find_units(model) if unit.path == path]

    before = at("0.mix"), at("0.scale")
    forget = register("attention", match), register("norm", "Scale")
    try:
        assert (at("0.mix"), at("0.scale")) == (["attention", "core_attention"], ["norm"])
    finally:
        for undo in forget:
            undo()
    assert (at("0.mix"), at("0.scale")) == before == (["mlp"], [])


def test_register_what_has_no_known_shape() -> None:
    """Router, experts, MLP, product and activation can be registered, and the block around a router follows."""
    roles = {"Picks": "router", "Many": "experts", "Feeds": "mlp", "Times": "product", "Bends": "activation"}
    block = part("Block", mix=part("Mix", picks=part("Picks"), many=part("Many")), norm=nn.LayerNorm(4))
    for name in ("Feeds", "Times", "Bends"):
        block.add_module(name.lower(), part(name))
    forget = [register(role, name) for name, role in {**roles, "Block": "layer"}.items()]
    try:
        found = [(unit.path, unit.role) for unit in find_units(nn.Sequential(block))]
    finally:
        for undo in forget:
            undo()
    assert found == [
        ("0", "layer"),
        ("0.mix", "moe"),
        ("0.mix.picks", "router"),
        ("0.mix.many", "experts"),
        ("0.norm", "norm"),
        ("0.feeds", "mlp"),
        ("0.times", "product"),
        ("0.bends", "activation"),
    ]


def test_register_a_layer() -> None:
    """Registered layers need no list: the module that holds them is the stack."""

    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.then = ConvNeXtBlock(4), VisionBlock(4, 2)

    forget = register("layer", ConvNeXtBlock), register("layer", VisionBlock)
    try:
        units = find_units(nn.ModuleDict({"tower": Tower()}))
    finally:
        for undo in forget:
            undo()
    assert [(layer.path, layer.stack, layer.layer) for layer in units.layers] == [
        ("tower.first", "tower", 0),
        ("tower.then", "tower", 1),
    ]


def test_tree() -> None:
    """Printed, alike layers are one line, parts are indented below what holds them, and notes stand behind."""
    units = find_units(MegatronGPT(8, 8, 2, 3, experts=2))
    assert units.tree({"decoder.layers.0.mlp": "mlp"}).split("\n") == [
        "MegatronGPT",
        "  embedding.word_embeddings: embedding (Embedding)",
        "  decoder.layers.0: layer (TransformerLayer)",
        "    input_layernorm: norm (LayerNorm)",
        "    self_attention: attention (SelfAttention)",
        "      core_attention: core attention (DotProductAttention)",
        "      linear_proj: product (Linear)",
        "      linear_qkv: product (Linear)",
        "      q_layernorm: inner norm (LayerNorm)",
        "      k_layernorm: inner norm (LayerNorm)",
        "    pre_mlp_layernorm: norm (LayerNorm)",
        "    mlp: mlp (MLP)  [mlp]",
        "      linear_fc1: product (Linear)",
        "      linear_fc2: product (Linear)",
        "  decoder.layers.1 x 2: layer (TransformerLayer)",
        "    input_layernorm: norm (LayerNorm)",
        "    self_attention: attention (SelfAttention)",
        "      core_attention: core attention (DotProductAttention)",
        "      linear_proj: product (Linear)",
        "      linear_qkv: product (Linear)",
        "      q_layernorm: inner norm (LayerNorm)",
        "      k_layernorm: inner norm (LayerNorm)",
        "    pre_mlp_layernorm: norm (LayerNorm)",
        "    mlp: moe (MoELayer)",
        "      router: router (TopKRouter)",
        "      experts: experts (SequentialMLP)",
        "  decoder.final_layernorm: norm (LayerNorm)",
        "  output_layer: head (Linear)",
    ]
