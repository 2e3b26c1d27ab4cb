"""Megatron's labels on other models: the regions of each label, the calls that these keep, and labels combined.

`PLACED` is written by hand for every architecture of the zoo: per label the number of regions, and one of them in full.
"""

import pytest

from support.zoo import ZOO, build
from torch_recompute.plan import Choice, Plan
from torch_recompute.plan.labels import LABELS, choices, matching, merge, routed
from torch_recompute.plan.roles import Unit, Units, inside
from torch_recompute.plan.units import find_units

# label -> number of regions, the path of one of them, what it keeps; a star behind the number: decisions are carried
Row = dict[str, tuple[int | str, str, str]]


def dense(at: str, attention: str = "self_attn", mlp: str = "mlp") -> Row:
    """Three layers of attention and an MLP, with two norms that the layer calls itself."""
    return {
        "core_attn": (3, f"{at}.{attention}", "@product @attention"),
        "mlp": (3, f"{at}.{mlp}", ""),
        "layernorm": (3, at, f"{attention} {mlp}"),
    }


MIXTURE: Row = {
    "core_attn": (3, "model.layers.1.self_attn", "@product @attention"),
    "moe": ("3*", "model.layers.1.mlp", ""),
    "moe_act": (3, "model.layers.1.mlp.experts", "@product"),
    "layernorm": ("3*", "model.layers.1", "self_attn mlp"),
}
DEEPSEEK: Row = {
    "core_attn": (3, "model.layers.1.self_attn", "@product @attention"),
    "mlp": (1, "model.layers.0.mlp", ""),
    "moe": ("2*", "model.layers.1.mlp", ""),
    "moe_act": (2, "model.layers.1.mlp.experts", "@product"),
    "shared_experts": (2, "model.layers.1.mlp.shared_experts", ""),
    "layernorm": ("2*", "model.layers.1", "self_attn mlp"),
    "mla_up_proj": (3, "model.layers.1.self_attn", "q_a_proj kv_a_proj_with_mqa o_proj @attention"),
}
TORCH: Row = {
    "core_attn": (3, "layers.2.self_attn", "@product @attention"),
    "mlp": (3, "layers.2", "self_attn norm1 norm2"),
    "layernorm": (3, "layers.2", "self_attn linear1 linear2"),
}
PLACED: dict[str, Row] = {
    **dict.fromkeys(
        ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "olmo", "phi", "lora_llama"], dense("model.layers.1")
    ),
    **dict.fromkeys(["mixtral", "olmoe"], MIXTURE),
    **dict.fromkeys(["deepseek_v2", "deepseek_v3"], DEEPSEEK),
    "qwen3_moe": {
        **MIXTURE,
        "mlp": (1, "model.layers.0.mlp", ""),
        "moe": ("2*", "model.layers.1.mlp", ""),
        "moe_act": (2, "model.layers.1.mlp.experts", "@product"),
        "layernorm": ("2*", "model.layers.1", "self_attn mlp"),
    },
    "gpt2": dense("transformer.h.0", "attn"),
    "gpt_neox": dense("gpt_neox.layers.0", "attention"),
    "falcon": dense("transformer.h.0", "self_attention"),
    "opt": {
        "core_attn": (3, "model.decoder.layers.0.self_attn", "@product @attention"),
        "mlp": (3, "model.decoder.layers.0", "self_attn self_attn_layer_norm final_layer_norm"),
        "layernorm": (3, "model.decoder.layers.0", "self_attn fc1 fc2"),
    },
    "mamba": {"layernorm": (3, "backbone.layers.0", "mixer")},
    "bert": {
        "core_attn": (3, "bert.encoder.layer.0.attention", "@product @attention"),
        "mlp": (3, "bert.encoder.layer.0", "attention output.LayerNorm"),
        "layernorm": (3, "bert.encoder.layer.0", "attention.self attention.output.dense intermediate output.dense"),
    },
    "t5": {
        "core_attn": (9, "decoder.block.1.layer.1.EncDecAttention", "@product @attention"),
        "mlp": (6, "decoder.block.1.layer.2.DenseReluDense", ""),
        "layernorm": (6, "decoder.block.1", "layer.0.SelfAttention layer.1.EncDecAttention layer.2.DenseReluDense"),
    },
    "vit": dense("vit.layers.0", "attention"),
    "whisper": {
        "core_attn": (9, "model.decoder.layers.0.encoder_attn", "@product @attention"),
        "mlp": (
            6,
            "model.decoder.layers.0",
            "self_attn self_attn_layer_norm encoder_attn encoder_attn_layer_norm final_layer_norm",
        ),
        "layernorm": (6, "model.decoder.layers.0", "self_attn encoder_attn fc1 fc2"),
    },
    **dict.fromkeys(["torch_encoder", "torch_encoder_prenorm"], TORCH),
    "torch_decoder": {
        "core_attn": (6, "layers.2.multihead_attn", "@product @attention"),
        "mlp": (3, "layers.2", "self_attn multihead_attn norm1 norm2 norm3"),
        "layernorm": (3, "layers.2", "self_attn multihead_attn linear1 linear2"),
    },
    "handmade_gpt": dense("h.0", "attn"),
    "megatron": dense("decoder.layers.0", "self_attention"),
    "megatron_moe": {
        "core_attn": (3, "decoder.layers.0.self_attention", "@product @attention"),
        "mlp": (1, "decoder.layers.0.mlp", ""),
        "moe": ("2*", "decoder.layers.1.mlp", ""),
        "moe_act": (2, "decoder.layers.1.mlp.experts", "@product"),
        "shared_experts": (2, "decoder.layers.1.mlp.shared_experts", ""),
        "layernorm": ("2*", "decoder.layers.1", "self_attention mlp"),
    },
    "torchtitan": dense("layers.0", "attention", "feed_forward"),
    "torchtitan_moe": {
        "core_attn": (3, "layers.0.attention", "@product @attention"),
        "moe": ("3*", "layers.0.moe", ""),
        "moe_act": (3, "layers.0.moe.experts", "@product"),
        "shared_experts": (3, "layers.0.moe.shared_expert", ""),
        "layernorm": ("3*", "layers.0", "attention moe"),
    },
    "timm_vit": dense("blocks.0", "attn"),
    "convnext": {"mlp": (5, "stages.1.blocks.0.mlp", ""), "layernorm": (5, "stages.1.blocks.0", "conv_dw mlp")},
}
# A layer's norms are recomputed in every layer, routed or not; the table counts the routed ones.
ALL_LAYERS = {"qwen3_moe": 3, "deepseek_v2": 3, "deepseek_v3": 3, "megatron_moe": 3}


def units_of(name: str) -> Units:
    return find_units(build(name)[0])


def every(units: Units) -> list[Choice]:
    return [choice for label in matching(units) for choice in choices(units, label)]


def test_every_architecture_has_a_row() -> None:
    """The table and the zoo hold the same architectures."""
    assert set(PLACED) == set(ZOO)


@pytest.mark.parametrize("name", ZOO)
def test_placements(name: str) -> None:
    """Each label places the regions written down for the architecture, and labels without a row place none."""
    units, row = units_of(name), PLACED[name]
    if "core_attn" in row:
        row = {**row, "attention_output": (*row["core_attn"][:2], "@attention")}
    for label in LABELS:
        found = choices(units, label)
        count, path, keep = row.get(label, (0, "", ""))
        carried = sum(choice.carry for choice in found)
        if str(count).endswith("*"):
            assert carried == int(str(count)[:-1])
            assert len(found) == (ALL_LAYERS.get(name, carried) if label == "layernorm" else carried)
        else:
            assert (len(found), carried) == (count, 0)
        if found:
            (one,) = [choice for choice in found if choice.paths == (path,)]
            assert set(one.keep) == set(keep.split())
            assert one.labels == (label,)
    assert matching(units) == {label: len(choices(units, label)) for label in LABELS if label in row}


@pytest.mark.parametrize("name", ZOO)
def test_all_labels_together_are_a_plan(name: str) -> None:
    """All labels of a model merge into one plan: no path twice, every label kept, and each kept path in its region."""
    units = units_of(name)
    merged = merge(units, every(units))
    plan = Plan(merged)
    assert {label for choice in plan for label in choice.labels} == set(matching(units))
    for choice in plan:
        (path,) = choice.paths
        for word in choice.keep:
            assert word.startswith("@") or f"{path}.{word}".lstrip(".") in units.modules
        assert choice.carry == routed(units, path)


@pytest.mark.parametrize("name", ZOO)
def test_nothing_is_replayed_twice(name: str) -> None:
    """In a merged plan a region inside another one lies in a call that the other one saves."""
    units = units_of(name)
    merged = merge(units, every(units))
    for outer in merged:
        for inner in merged:
            (top,), (low,) = outer.paths, inner.paths
            if outer is not inner and inside(low, top):
                assert any(inside(low, f"{top}.{word}") for word in outer.keep)


@pytest.mark.parametrize("name", ZOO)
def test_order_of_labels_does_not_matter(name: str) -> None:
    """Labels in any order make the same regions with the same saved calls."""
    units = units_of(name)

    def regions(found: list[Choice]) -> list[tuple[object, ...]]:
        return [(choice.paths, set(choice.keep), choice.carry) for choice in merge(units, found)]

    assert regions(every(units)) == regions(every(units)[::-1])


def keeps(found: tuple[Choice, ...], path: str) -> set[str]:
    (one,) = [choice for choice in found if choice.paths == (path,)]
    return set(one.keep)


@pytest.mark.parametrize(
    ("name", "labels", "path", "keep"),
    [
        # One path: what both keep. The products that core_attn keeps are less the up-projections.
        (
            "deepseek_v3",
            "core_attn mla_up_proj",
            "model.layers.1.self_attn",
            "q_a_proj kv_a_proj_with_mqa o_proj @attention",
        ),
        ("llama", "core_attn attention_output", "model.layers.1.self_attn", "@attention"),
        ("opt", "mlp layernorm", "model.decoder.layers.1", "self_attn"),
        ("bert", "mlp layernorm", "bert.encoder.layer.1", "attention.self attention.output.dense"),
        # The attention of BERT holds a norm of the layer, so the layer's region replays it: one region.
        (
            "bert",
            "core_attn layernorm",
            "bert.encoder.layer.1",
            "attention.self.query attention.self.key attention.self.value attention.output.dense intermediate "
            "output.dense @attention",
        ),
        # A region in a saved call stays as it is.
        ("llama", "core_attn layernorm", "model.layers.1", "self_attn mlp"),
        ("llama", "core_attn layernorm", "model.layers.1.self_attn", "@product @attention"),
        # The whole block is replayed anyway.
        ("deepseek_v3", "moe moe_act shared_experts", "model.layers.1.mlp", ""),
        ("mixtral", "moe model.layers.*.mlp.experts", "model.layers.1.mlp", ""),
        # A module path that is a label's path, too.
        ("llama", "core_attn *.self_attn", "model.layers.1.self_attn", ""),
        ("torchtitan", "core_attn layers.1.attention.wq", "layers.1.attention", "wk wv wo @attention"),
        ("torch_encoder", "layernorm layers.1.linear2", "layers.1", "self_attn linear1 linear2"),
    ],
)
def test_labels_meet(name: str, labels: str, path: str, keep: str) -> None:
    """A call is saved only if all labels save it, and a region that another one replays is part of that one."""
    units = units_of(name)
    found = merge(units, [choice for label in labels.split() for choice in choices(units, label)])
    assert keeps(found, path) == set(keep.split())


def test_merged_regions_are_fewer() -> None:
    """Where labels meet in one region there is one choice, which says all their names."""
    units = units_of("deepseek_v3")
    found = merge(units, [c for label in ("moe", "moe_act", "shared_experts") for c in choices(units, label)])
    assert [(choice.paths[0], choice.carry) for choice in found] == [
        ("model.layers.1.mlp", True),
        ("model.layers.2.mlp", True),
    ]
    assert {choice.labels for choice in found} == {("moe", "moe_act", "shared_experts")}


def test_attention_calls_are_kept_only_where_all_keep_them() -> None:
    """`@attention` survives a merge where every label saves the call, and is left out where a saved module holds it."""
    units = Units(
        "M",
        (
            Unit("", "layer", "M", 0),
            Unit("", "attention", "M"),
            Unit("", "core_attention", "M", parts=("@attention",)),
            Unit("q", "product", "Linear"),
            Unit("o", "product", "Linear"),
        ),
        (),
        ("", "q", "o"),
    )
    one, two = Choice(("",), ("@attention", "q")), Choice(("",), ("@attention", "@product"))
    assert [set(choice.keep) for choice in merge(units, [one, two])] == [{"@attention", "q"}]
    assert [set(choice.keep) for choice in merge(units, [one, Choice(("",), ("@product",))])] == [{"q"}]
    assert [set(choice.keep) for choice in merge(units, [two, two])] == [{"@attention", "@product"}]


@pytest.mark.parametrize(
    ("label", "paths"),
    [
        ("model.layers.1.mlp", ["model.layers.1.mlp"]),
        ("model.layers.[02].mlp.act_fn", ["model.layers.0.mlp.act_fn", "model.layers.2.mlp.act_fn"]),
        ("*.self_attn", [f"model.layers.{n}.self_attn" for n in range(3)]),
        ("model.layers.*", [f"model.layers.{n}" for n in range(3)]),
        ("model.layers", []),
        ("model.layers.1.mpl", []),
        ("selective", []),
    ],
)
def test_paths_and_globs(label: str, paths: list[str]) -> None:
    """A path or glob is a region around each module that it matches, the outermost ones, and never a bare list."""
    found = choices(units_of("llama"), label)
    assert [choice.paths for choice in found] == [(path,) for path in paths]
    assert all(choice.keep == () and choice.labels == (label,) for choice in found)


def test_routed() -> None:
    """Decisions are made wherever a router is inside, and nowhere else."""
    units = units_of("qwen3_moe")
    yes = ["", "model", "model.layers.1", "model.layers.1.mlp", "model.layers.1.mlp.gate"]
    no = ["model.layers.0", "model.layers.1.self_attn", "model.layers.1.mlp.experts", "lm_head"]
    assert [routed(units, path) for path in yes + no] == [True] * len(yes) + [False] * len(no)
    assert [choice.carry for choice in choices(units, "model.layers.*")] == [False, True, True]


def test_experts_that_cannot_be_called() -> None:
    """Where the experts are a bare list, `moe_act` is placed around the block that calls them, decisions carried."""
    units = Units(
        "M",
        (
            Unit("l.0", "layer", "Layer", 0, "l"),
            Unit("l.0.moe", "moe", "MoE", 0, "l"),
            Unit("l.0.moe.gate", "router", "Linear", 0, "l"),
            Unit("l.0.moe.experts", "experts", "ModuleList", 0, "l"),
        ),
        ("l",),
        ("", "l.0", "l.0.moe", "l.0.moe.gate", "l.0.moe.experts.0", "l.0.moe.experts.1"),
    )
    assert choices(units, "moe_act") == (Choice(("l.0.moe",), ("@product",), True, ("moe_act",)),)


def test_a_router_that_the_layer_calls_itself() -> None:
    """Where router and experts lie in the layer itself, `moe` is the layer with all but these two saved."""
    units = Units(
        "M",
        (
            Unit("l.0", "layer", "Layer", 0, "l"),
            Unit("l.0", "moe", "Layer", 0, "l", parts=("l.0.router", "l.0.experts")),
            Unit("l.0.norm", "norm", "LayerNorm", 0, "l"),
            Unit("l.0.attn", "attention", "Attention", 0, "l"),
            Unit("l.0.attn", "core_attention", "Attention", 0, "l", parts=("@attention",)),
            Unit("l.0.router", "router", "Router", 0, "l"),
            Unit("l.0.experts", "experts", "Experts", 0, "l"),
        ),
        ("l",),
        ("", "l.0", "l.0.norm", "l.0.attn", "l.0.router", "l.0.experts"),
    )
    assert choices(units, "moe") == (Choice(("l.0",), ("norm", "attn"), True, ("moe",)),)
