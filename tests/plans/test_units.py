"""The search for the parts of a model: roles by path for each architecture, and names that it must not depend on."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from support.anatomy import ANATOMY
from support.zoo import ZOO, build
from support.zoo_handmade import ConvNeXtBlock, MegatronGPT, Mlp, VisionBlock
from torch_recompute.plan.units import Units, find_units, register


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


def test_one_layer_in_the_model() -> None:
    """One layer between an embedding and a head is the layer, not the model around it."""
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    ends = {"embed": nn.Linear(4, 8), "head": nn.Linear(8, 2)}
    for path, model in {
        "layer": part("Model", **ends, layer=layer),
        "body.layer": part("Model", **ends, body=part("Body", layer=layer)),
        "": part("Model", attend=part("Attend", norm=nn.LayerNorm(8), attn=layer.self_attn), up=ends["embed"], **ends),
    }.items():
        assert [unit.path for unit in find_units(model).layers] == [path]


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
