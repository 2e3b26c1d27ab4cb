"""What else would do where no plan fits: each option with its peak, which is that of a step with it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from support.headed import TOKENS, batch, cross_entropy, model
from torch_recompute import BudgetError, errors, make_plan, simulate
from torch_recompute.memory.loop import Loop
from torch_recompute.plan.ranks import Ranks
from torch_recompute.planner.alternatives import Alternative, alternatives, held_by, in_words, on_more_ranks
from torch_recompute.planner.layout import Layout, LayoutPlanner, LayoutRanks
from torch_recompute.planner.planner import Planner
from torch_recompute.planner.states import OptimizerSpec
from torch_recompute.simulation.training_step import OPTIMIZERS, TrainingStep

STEPS: dict[str, dict[str, Any]] = {
    "over lists": {"optimizer": "adamw"},
    "fused": {"optimizer": "adamw-fused"},
    "without an optimizer": {},
    "zeroed": {"optimizer": "sgd", "loop": Loop(set_to_none=False)},
    "accumulated, and not held": {"optimizer": "adamw-fused", "loop": Loop(hold_output=False, accumulate=2)},
}


def planner_of(optimizer: str | None = None, loop: Loop | None = None) -> Planner:
    of = OPTIMIZERS.get(optimizer or "")
    return Planner(TrainingStep(model(2), (batch(),), {}, cross_entropy, of, "h100", loop or Loop()))


def changed(keyword: str, own: Any) -> tuple[int, dict[str, Any]]:
    """The batch and the keywords of a step with an alternative, as it is written in Python."""
    if keyword.startswith("a batch of "):
        return int(keyword.rpartition(" ")[2]), {}
    stated = {
        "moments of 8 bits": OptimizerSpec(None, "8bit"),
        "a step in backward": OptimizerSpec(own, in_backward=True),
        "states and step in host memory": OptimizerSpec(own, on_host=True),
    }
    optimizer = next((made for words, made in stated.items() if keyword.startswith(words)), None)
    return TOKENS, eval(f"dict({keyword})") if optimizer is None else {"optimizer": optimizer}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.nightly] * (name in ("over lists", "without an optimizer", "zeroed")))
        for name in STEPS
    ],
)
def test_each_has_the_peak_of_a_step_with_it(name: str) -> None:
    """What is said of an option is what a step simulated with it takes, with the plan that keeps the fewest bytes."""
    planner = planner_of(**STEPS[name])
    step, least = planner.step, planner.least[1].peak_bytes
    found = alternatives(planner)
    assert found == sorted(found, key=lambda one: one.peak_bytes)
    keywords = [one.keyword for one in found]
    assert f"a batch of {TOKENS // 2}" in keywords
    assert ("hold_output=False" in keywords) == step.loop.hold_output
    assert ("set_to_none=True" in keywords) == (not step.loop.set_to_none)
    assert ('optimizer="sgd"' in keywords) == (STEPS[name].get("optimizer") in ("adamw", "adamw-fused"))
    has_moments = STEPS[name].get("optimizer") in ("adamw", "adamw-fused")
    assert any(one.option.endswith("--states 8bit") for one in found) == has_moments
    assert any(one.option == "--optimizer-on-host" for one in found) == ("optimizer" in STEPS[name])
    assert step.loop.accumulate == 1 or "--optimizer-in-backward" not in [one.option for one in found]
    for one in found:
        assert one.peak_bytes < least
        if one.keyword in ("offload=True", "tiles=True"):  # of another plan; see test_tiling.py
            continue
        size, words = changed(one.keyword, step.optimizer)
        words = {"optimizer": step.optimizer, **step.loop.words, **words}
        x = batch()[:size]
        same = simulate(model(2), (x,), plan=planner.leanest, loss=cross_entropy, device="h100", **words)
        assert same.peak_bytes == one.peak_bytes


def test_an_option_that_fits_makes_a_plan() -> None:
    """With an option that is said to fit into a budget there is a plan for that budget."""
    planner = planner_of("adamw")
    budget = planner.least[1].peak_bytes * 9 // 10
    fitting = [one for one in alternatives(planner, budget) if one.peak_bytes <= budget]
    assert {"hold_output=False", 'optimizer="sgd"'} <= {one.keyword for one in fitting}
    for one in fitting:
        size, words = changed(one.keyword, torch.optim.AdamW)
        words = {"optimizer": "adamw", **words}
        plan = make_plan(model(2), batch()[:size], budget=budget, loss=cross_entropy, device="h100", **words)
        assert (plan.predicted_peak_bytes or 0) <= budget


def test_a_loss_that_holds_all_targets_has_no_smaller_batch(recwarn: pytest.WarningsRecorder) -> None:
    """Where half a batch would be compared with the targets of all, there is no such option, and no warning of it."""
    targets = torch.zeros(TOKENS, 1)
    step = TrainingStep(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1)), (torch.ones(TOKENS, 8),))
    step = replace(step, loss=lambda out: F.mse_loss(out, targets), device="h100")
    assert not [one for one in alternatives(Planner(step)) if "batch" in one.option]
    assert not recwarn.list


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("holds", [True, False])
def test_a_batch_of_one_is_not_compared_with_the_targets_of_all(count: int, holds: bool) -> None:
    """It would broadcast in a loss that subtracts them, without a warning; a loss without them has that option."""
    targets = torch.zeros(count, 512, 8) if holds else 0.0
    step = TrainingStep(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)), (torch.ones(count, 512, 8),))
    step = replace(step, loss=lambda out: (out - targets).square().mean(), device="h100")
    assert [one.option for one in alternatives(Planner(step)) if "batch" in one.option] == ["--batch 1"] * (not holds)


def test_a_batch_is_halved_until_it_fits() -> None:
    """The batch that is named is the largest of its halves that fits."""
    planner = planner_of("sgd")
    peaks = [
        simulate(model(2), batch()[:size], plan=planner.leanest, loss=cross_entropy, optimizer="sgd", device="h100")
        for size in (TOKENS // 2, TOKENS // 4)
    ]
    (one,) = (one for one in alternatives(planner, peaks[1].peak_bytes) if one.option.startswith("--batch"))
    assert one == Alternative(f"--batch {TOKENS // 4}", f"a batch of {TOKENS // 4}", peaks[1].peak_bytes)


def test_the_error_says_what_holds_the_peak_and_what_would_do() -> None:
    """`make_plan` says what the least peak is made of, which options fit, and which lower it but not enough."""
    planner = planner_of("adamw")
    least = planner.least[1]
    budget = least.peak_bytes * 9 // 10
    with pytest.raises(BudgetError) as raised:
        make_plan(model(2), batch(), budget=budget, loss=cross_entropy, optimizer="adamw", device="h100")
    text = str(raised.value)
    assert raised.value.smallest == least.peak_bytes
    assert f"That peak holds {held_by(least)}." in text
    for line in in_words(alternatives(planner, budget), budget, option=False):
        assert f"\n  {line}" in text
    figures = re.findall(r"\(([\d.]+ [KM]iB)\)", text.split("Each of these fits")[1])
    assert len(figures) >= 4
    assert in_words([], budget, option=True) == in_words([], None, option=True) == []


def test_what_holds_a_peak() -> None:
    """The parts of a peak are named with their bytes, the most first, and where it is."""
    net = model()
    result = simulate(net, batch(), loss=torch.mean, optimizer="adamw", device="h100")
    weights = sum(parameter.nbytes for parameter in net.parameters())
    states, loss = result.live_by_category["optimizer"], result.activations_by_use["loss"]
    assert held_by(result).startswith(f"{errors.size(loss)} loss, ")
    assert f"{errors.size(states)} states, {errors.size(weights)} weights" in held_by(result)
    assert held_by(result).endswith(f"in {result.peak.phase}")


def test_more_ranks_have_the_peak_of_a_step_on_them() -> None:
    """Twice as many ranks of a kind need what a step on them does; those that cannot share the model are left out."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4, head_dim=8)
    with torch.device("meta"):
        llama = transformers.LlamaForCausalLM(config)

    def words(ranks: Ranks, batch: int) -> tuple[Any, ...]:
        return llama, "MODEL", Layout(ranks, batch=batch), 32, "adamw", "cpu"

    own = Ranks(tp=4, pp=2, dp=2)
    planner = LayoutPlanner(*words(own, 8))
    found = on_more_ranks(planner)
    assert found == sorted(found, key=lambda one: one.peak_bytes)
    assert {one.option for one in found} == {"--pp 4", "--dp 4"}  # of heads of keys there are 4
    for one in found:
        ranks = replace(own, **eval(f"dict({one.keyword.removeprefix('Ranks(')}"))
        again = LayoutRanks(*words(ranks, 8 * ranks.dp // own.dp)).under(planner.least_plan)
        assert one.peak_bytes == max(rank.peak_bytes for rank in again) < planner.least_bytes
