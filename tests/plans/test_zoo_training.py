"""Whole models under every kind of plan: the same training to the last bit, less memory, and replays as planned.

The models are those of `zoo.py`: real library code with tiny configurations. A plan is what `RecomputeConfig` makes of
Megatron's words. The first step is compared, dropout and all: the loss, every gradient, every buffer.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from support.zoo import FEW, ZOO, build, each_row, step
from support.zoo_rows import Row
from torch_recompute import ArgumentError, RecomputeConfig, apply, saved_activations
from torch_recompute.plan.labels import LABELS, matching
from torch_recompute.plan.roles import inside
from torch_recompute.plan.units import find_units

# Frozen matrices do not save the norm's output, and each adapter saves a copy of its own (dropped out).
# Attention that is fused stores no scores. In models as small as these what a region keeps of generators may be more
# than the queries, keys and values that it drops.
NOTHING_TO_FREE = {
    **{
        name: {"core_attn"}
        for name in (
            *("gpt2", "deepseek_v2", "deepseek_v3", "bert", "whisper", "torch_encoder", "torch_encoder_prenorm"),
            *("torch_decoder", "torchtitan", "torchtitan_moe"),
        )
    },
    **{
        name: {"core_attn", "attention_output"}
        for name in (
            *("gpt_neox", "llama", "mistral", "qwen2", "phi", "opt", "falcon", "mixtral", "olmo", "t5", "vit"),
            "handmade_gpt",
        )
    },
    "lora_llama": {"core_attn", "layernorm"},
}


def flops(model: nn.Module, inputs: dict[str, Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        step(model, inputs)
    return counter.get_total_flops()


def kept(model: nn.Module, inputs: dict[str, Any]) -> int:
    torch.manual_seed(1)
    return saved_activations(model, (), inputs).total_bytes


@each_row
def test_training_is_the_same_under_every_plan(row: Row) -> None:
    """Loss, gradients and buffers equal those without a plan to the last bit; every plan keeps less and replays more.

    Between forward and backward it keeps fewer bytes than none, and larger groups fewer than small ones. PyTorch's
    counter finds in a step with the plan exactly the FLOPs more that the plan's report names.
    """
    model, inputs = row.build()
    plain_bytes, plain_flops = kept(model, inputs), flops(model, inputs)
    bytes_of: dict[str, int] = {}
    for kind, plan in row.plans.items():
        other, inputs = row.build()
        handle = apply(other, plan)
        ours = step(other, inputs)
        assert ours.keys() == row.plain.keys(), kind
        different = [key for key in row.plain if not torch.equal(ours[key], row.plain[key])]
        assert different == [], f"{kind}: {different[:3]}"
        bytes_of[kind] = kept(other, inputs)
        # Regions in regions: what the inner one repeats is in the outer one's row as well. A block is as uniform is.
        if kind in ("all labels", "block"):
            continue
        with handle.watch():
            more = flops(other, inputs) - plain_flops
        assert handle.report().flops == more, kind
        assert (more == 0) if kind in ("moe_act", "layernorm") else (more >= 0)
    assert {kind for kind, n in bytes_of.items() if n >= plain_bytes} == NOTHING_TO_FREE.get(row.name, set())
    assert bytes_of["uniform 1"] < bytes_of["block"] or len(find_units(model).layers) <= 2
    assert bytes_of["uniform 2"] <= bytes_of["uniform 1"]


@pytest.mark.parametrize(
    "name",
    [
        "lora_llama",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("llama", "deepseek_v3", "torch_decoder")),
    ],
)
def test_label_that_frees_nothing_is_refused(name: str) -> None:
    """With an example call, a label under which nothing is freed is an error; the others give the plan without one."""
    model, inputs = build(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for label in matching(find_units(model)):
        config = RecomputeConfig(recompute_granularity="selective", recompute_modules=[label])
        if label in NOTHING_TO_FREE.get(name, set()):
            with pytest.raises(ArgumentError, match=r"would cost time and free nothing.*\n(.*\n)?  These free some"):
                config.plan(model, kwargs=inputs)
        else:
            assert config.plan(model, kwargs=inputs) == config.plan(model)
    full = RecomputeConfig(recompute_granularity="full", recompute_method="block", recompute_num_layers=1)
    assert full.plan(model, kwargs=inputs) == full.plan(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all("forward" not in module.__dict__ for module in model.modules())


def parts_of(name: str) -> set[Any]:
    """The roles and labels of a model, and its kinds of layers: which roles are in one, and which by the layer's calls.

    Also how many stacks it has, and whether some of its parameters are frozen or have two names.
    """
    model = build(name)[0]
    units = find_units(model)
    found: set[Any] = {unit.role for unit in units} | {label for label, count in matching(units).items() if count}
    for layer in units.layers:
        within = [unit for unit in units if inside(unit.path, layer.path) and unit.role not in ("layer", "activation")]
        found.add(frozenset((unit.role, bool(unit.parts) and unit.parts != ("@attention",)) for unit in within))
    parameters = [parameter for _, parameter in model.named_parameters(remove_duplicate=False)]
    frozen, tied = not all(one.requires_grad for one in parameters), len({*map(id, parameters)}) < len(parameters)
    return found | {f"{len(units.stacks)} stacks", f"frozen: {frozen}", f"tied: {tied}"}


def test_few_models_have_every_part_of_the_zoo() -> None:
    """At least thirty architectures, mostly real library code; every label, and ten of them have every kind of part."""
    assert len(ZOO) >= 30
    assert len(FEW) <= 10
    few, every = (set().union(*map(parts_of, names)) for names in (FEW, ZOO))
    assert few == every
    assert set(LABELS) <= every
