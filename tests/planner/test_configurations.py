"""The peak of stated configurations: what is simulated, measured and printed is the same; words, and mistakes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.headed import batch, cross_entropy, model
from support.models import Made
from support.zoo import mean_loss
from torch_recompute import (
    ArgumentError,
    Choice,
    Plan,
    RecomputeConfig,
    apply,
    errors,
    make_plan,
    measure,
    no_recompute,
    peaks,
    simulate,
)
from torch_recompute.simulation import devices

LAYERS = tuple(Choice((f"layers.{i}",)) for i in range(4))


PLANS = {
    "none": Plan(),
    "full": Plan(LAYERS),
    "full:2": Plan(tuple(Choice((f"layers.{i}", f"layers.{i + 1}")) for i in (0, 2))),
    "block:1": Plan(LAYERS[:1]),
    "mlp": Plan(tuple(Choice((f"layers.{i}.mlp",)) for i in range(4))),
    "mlp,head": Plan((*(Choice((f"layers.{i}.mlp",)) for i in range(4)), Choice(("head",)))),
}
LOOPS: tuple[dict[str, Any], ...] = (
    {},
    {"hold_output": False, "optimizer": "adamw"},
    {"optimizer": "sgd", "set_to_none": False},
    {"optimizer": "adamw", "device": "h100", "accumulate": 2},
    {"optimizer": "adamw-fused", "device": "h100"},
)


@pytest.mark.parametrize(
    ("loss", "loop"),
    [
        *((cross_entropy, loop) for loop in LOOPS),
        (mean_loss, LOOPS[0]),
        *(pytest.param(mean_loss, loop, marks=pytest.mark.nightly) for loop in LOOPS[1:]),
    ],
)
def test_figures_are_those_of_simulate(loss: Callable[..., Any], loop: dict[str, Any]) -> None:
    """The peak is that of `simulate` with the plan that the words mean, and what it is made of sums to it."""
    found = peaks(model(), batch(), recompute=list(PLANS), loss=loss, **loop)
    assert [one.name for one in found] == list(PLANS)
    plain = found.named("none")
    for one in found:
        assert [choice.paths for choice in one.plan] == [choice.paths for choice in PLANS[one.name]]
        same = simulate(model(), batch(), plan=PLANS[one.name], loss=loss, **loop)
        assert one.peak_bytes == same.peak_bytes == sum(one.made_of.values())
        assert one.simulation.by_category == same.by_category
        parts = one.made_of
        assert parts["weights"] == sum(p.nbytes for p in model().parameters())
        assert parts["gradients"] == same.by_category["gradients"]
        assert parts["states"] == same.live_by_category["optimizer"]
        held = [parts[name] for name in ("states", "kept by layers", "loss", "transient")]
        assert sum(held) == same.by_category["optimizer"] + same.by_category["activations"]
        sizes = [block.nbytes for block in one.largest]
        assert len(sizes) == 3
        assert sizes == sorted(sizes, reverse=True)
        assert one.step_seconds == pytest.approx(plain.step_seconds + one.replay_seconds, rel=1e-6)
        assert (
            (one.replay_seconds > 0) == bool(one.plan.choices) == (one.simulation.flops["replay"] > 0 or bool(one.plan))
        )


@pytest.mark.parametrize("words", ["none", "full", "mlp"])
@pytest.mark.parametrize("held", [True, False])
def test_a_measured_step_has_that_peak(words: str, held: bool) -> None:
    """A real step under the configuration, measured on the CPU, peaks at these bytes, in these categories."""
    net, x = model(), batch()
    adam = torch.optim.AdamW(net.parameters())
    (one,) = peaks(net, x, recompute=words, loss=cross_entropy, optimizer=adam, hold_output=held)
    handle, out = apply(net, one.plan), None
    for _ in range(2):  # an optimizer makes its state in its first step
        with measure(net, adam).track(x) as memory:
            if held:
                out = net(x)
                value = cross_entropy(out)
            else:
                value = cross_entropy(net(x))
            value.backward()
            del value
            adam.step()
            adam.zero_grad()
    handle.remove()
    assert memory.peak_bytes == one.peak_bytes
    assert memory.by_category == one.simulation.by_category
    assert out is None or held


def test_seconds_are_those_of_a_plan() -> None:
    """On a data sheet the step takes what a plan of the same regions is promised to take."""
    found = peaks(model(), batch(), recompute="none,full", loss=mean_loss, optimizer="adamw", device="h100")
    plan = make_plan(model(), batch(), budget=0.5, loss=mean_loss, optimizer="adamw", device="h100")
    assert plan.prediction is not None
    assert found.named("none").step_seconds == pytest.approx(plan.prediction.plain_step_seconds)
    (again,) = peaks(model(), batch(), recompute=plan, loss=mean_loss, optimizer="adamw", device="h100")
    assert (again.name, again.peak_bytes) == (plan.source, plan.predicted_peak_bytes)
    assert again.step_seconds == pytest.approx(plan.predicted_step_seconds, rel=0.01)


def test_replays_cost_what_they_add_to_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host launches replays while the device computes the rest, they cost no more than the step is longer."""
    call: dict[str, Any] = {"recompute": "none,full", "loss": mean_loss, "device": "h100"}
    monkeypatch.setitem(devices.HOSTS, "typical", devices.Host(apart=True))
    alone = peaks(model(), batch(), **call).named("full").replay_seconds
    monkeypatch.setitem(devices.HOSTS, "typical", devices.Host(region=0.5 * alone, apart=True))
    found = peaks(model(), batch(), **call)
    none, full = found.named("none"), found.named("full")
    assert full.replay_seconds == pytest.approx(full.step_seconds - none.step_seconds)
    assert none.replay_seconds == 0


def test_every_printed_figure_is_one_of_the_simulation() -> None:
    """The table has the bytes and the seconds of each configuration, and the lines below its place and its tensors."""
    found = peaks(model(), batch(), recompute="none,full", loss=cross_entropy, optimizer="adamw", device="h100")
    text = str(found)
    unit, name = errors.unit_of(max(one.peak_bytes for one in found))
    title = next(line for line in text.splitlines() if f"peak {name}" in line)
    for one in found:
        row = next(line for line in text.splitlines() if line.startswith(f"{one.name} "))
        cells = iter(re.split(r" {2,}", row)[1:])
        assert next(cells) == f"{one.peak_bytes / unit:,.2f}"
        for part, nbytes in one.made_of.items():
            if f"  {part}  " in title:
                assert next(cells) == f"{nbytes / unit:,.2f}"
            else:
                assert all(other.made_of[part] < 0.01 * unit for other in found)
        assert next(cells) == f"{1000 * one.step_seconds:,.1f}"
        assert next(cells) == f"{1000 * one.replay_seconds:,.1f}"
        assert next(cells) == f"{one.simulation.flops['replay'] / 1e9:,.1f}"
        assert f"{errors.size(one.peak_bytes)} with {one.name}" in text.splitlines()[0]
        for block in one.largest:
            assert errors.size(block.nbytes) in text
        assert str(one).splitlines()[0] in f"at the peak: {errors.size(one.peak_bytes)} with {one.name}"
        assert json.loads(json.dumps(one.as_data()))["made_of"]["loss_bytes"] == one.made_of["loss"]


def test_words(tmp_path: Path) -> None:
    """Commas separate configurations, but not labels from each other; files hold plans or settings."""
    saved, settings = tmp_path / "plan.json", tmp_path / "settings.json"
    saved.write_text(PLANS["full:2"].to_json())
    settings.write_text(json.dumps({"recompute_granularity": "selective", "recompute_modules": ["mlp"]}))
    config = RecomputeConfig(recompute_granularity="full", recompute_method="block", recompute_num_layers=3)
    cases: dict[str, tuple[Any, dict[str, int]]] = {
        "one": ("full", {"full": 4}),
        "two": ("none,full", {"none": 0, "full": 4}),
        "spaces": (" none , full ", {"none": 0, "full": 4}),
        "labels of one": ("mlp,head", {"mlp,head": 5}),
        "labels between": ("none,mlp,head,full", {"none": 0, "mlp,head": 5, "full": 4}),
        "labels of two": (["mlp", "head"], {"mlp": 4, "head": 1}),
        "paths": ("layers.0.mlp,layers.*.norm", {"layers.0.mlp,layers.*.norm": 5}),
        "twice": ("full,full", {"full": 4}),
        "a plan's file": (f"none,{saved}", {"none": 0, str(saved): 2}),
        "a file of settings": (str(settings), {str(settings): 4}),
        "flags": (
            "--recompute_granularity full --recompute_method block --recompute_num_layers 2",
            {"--recompute_granularity full --recompute_method block --recompute_num_layers 2": 2},
        ),
        "settings": (config, {repr(config): 3}),
        "of all kinds": ([PLANS["full"], "none", Plan()], {"plan": 4, "none": 0, "plan (3)": 0}),
    }
    for case, (recompute, regions) in cases.items():
        found = peaks(model(), batch(), recompute=recompute, loss=mean_loss)
        assert {one.name: len(one.plan) for one in found} == regions, case


def test_names_of_calls() -> None:
    """A name that the author gave to calls is a label, where the model can be called."""
    act = no_recompute(lambda x: nn.functional.gelu(x).tanh().sin(), name="act")
    net = nn.Sequential(*(Made(lambda m, x: act(m.up(x)), up=nn.Linear(8, 8)) for _ in range(2)))
    (one,) = peaks(net, torch.randn(4, 8), recompute="act", loss=mean_loss)
    assert [choice.paths for choice in one.plan] == [("0@act",), ("1@act",)]
    with pytest.raises(ArgumentError, match="'actt' matches nothing in Sequential"):
        peaks(net, torch.randn(4, 8), recompute="actt", loss=mean_loss)


@pytest.mark.parametrize(
    ("recompute", "says"),
    [
        ("", "which says no configuration"),
        ("none,,full", "which says no configuration"),
        ([], "which says no configuration"),
        (3, "which says no configuration"),
        ("ful", "of which 'ful' matches nothing in Made. Close to it: full."),
        ("mpl", "Close to it: mlp"),
        ("mlp,core_attn", "of which 'core_attn' matches nothing"),
        ("selective", "of which 'core_attn' matches nothing"),
        ("full:9", "recompute_num_layers=9"),
        ("no/such.json", "no such file"),
        (Plan((Choice(("nowhere",)),)), "nowhere"),
    ],
)
def test_mistakes(recompute: Any, says: str) -> None:
    """What says no configuration, or matches nothing, is refused with what would match."""
    with torch.device("meta"):
        net = model()
    with pytest.raises(ArgumentError, match=re.escape(says)) as raised:
        peaks(net, batch(), recompute=recompute, loss=mean_loss)
    if "which" in says:
        assert "mlp (4 places)" in str(raised.value)
        assert "Commas separate configurations" in str(raised.value)
