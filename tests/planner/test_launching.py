"""What the host of a device costs: one rule for guesses, options, plans and stated configurations."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support import zoo
from support.zoo import build, scalar_loss
from torch_recompute import ArgumentError, Choice, Plan, Profile, Stages, make_plan, profile, solve
from torch_recompute.memory.loop import Loop
from torch_recompute.plan.plan import Prediction
from torch_recompute.planner.configurations import peaks_of
from torch_recompute.planner.cost import Costs, Kind, Option, Segment, launched_by
from torch_recompute.planner.options import SegmentOptions
from torch_recompute.planner.planner import Planner
from torch_recompute.simulation.devices import HOST_FIGURES, SLOW, TYPICAL, Host, Work, read_host, typical
from torch_recompute.simulation.training_step import TrainingStep


@pytest.fixture(autouse=True)
def few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models have two layers."""
    monkeypatch.setattr(zoo, "LAYERS", 2)


def planner(name: str) -> Planner:
    """What a model of the zoo costs on a device by name with the slow host."""
    model, inputs = build(name)
    loop = Loop(hold_output=False)
    return Planner(TrainingStep(model, (), inputs, loss=scalar_loss, device="h100", loop=loop, host=SLOW))


def test_a_part_takes_the_longer_of_both_sides() -> None:
    """A device and its host work at the same time; a processor that launches for itself does both in turn."""
    host = Host(operation=1.0, replayed=2.0, region=10.0, call=100.0, watched=1000.0, apart=True)
    plain, more = Work(device=5.0, launched=4), Work(3.0, 0, 1, 2, 3, 4)
    assert host.launches(more) == 2 + 20 + 300 + 4000
    assert (host.seconds(plain), host.waited(plain)) == (5.0, 0.0)
    assert (host.seconds(plain.plus(more)), host.waited(plain.plus(more))) == (4326.0, 4318.0)
    assert host.added(plain, more) == 4321.0
    assert host.added(plain.times(3), more.times(3)) == 3 * 4321.0
    itself = replace(host, apart=False)
    assert (itself.seconds(plain), itself.added(plain, more), itself.waited(plain)) == (9.0, 4325.0, 0.0)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_an_option_costs_what_its_trial_does_and_a_plan_what_its_step_does(name: str) -> None:
    """Record, trial, solution and the simulated step count the same work, so one rule makes the same seconds of it."""
    found = planner(name)
    host, tried = found.price.host, 0
    for kind in found.costs.kinds:
        number, plain = found._kinds.index(kind), found.costs.kinds[kind].work
        segment = SegmentOptions(found._captured, number, found.price, host, frees=False)
        for option in found.costs.kinds[kind].options[1:]:
            assert option.seconds == pytest.approx(host.added(plain.times(option.span), option.work))
            if option.span == 1:
                trial, tried = segment.tried(option.regions), tried + 1
                assert trial is not None
                assert replace(trial.work, device=0) == replace(option.work, device=0)
                assert trial.seconds == pytest.approx(option.seconds)
    assert tried
    for share in (0.0, 0.5):
        plan = found.plan(share)
        promise = plan.prediction
        (stated,) = peaks_of(found.step, {"the plan": plan})
        assert promise is not None
        assert stated.step_seconds == pytest.approx(promise.step_seconds, rel=1e-3)
        assert stated.step_seconds - stated.replay_seconds == pytest.approx(promise.plain_step_seconds, rel=1e-9)
        assert promise.step_seconds > promise.plain_step_seconds


# --- host= ---

FIGURES = {f"{name}_seconds": value for name, value in zip(HOST_FIGURES, (4e-5, 5e-5, 2e-3, 1e-4, 5e-6), strict=True)}


def layers() -> nn.Module:
    """Six equal layers, too small for a device to be slower than its host."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(6)))


HOW: dict[str, Any] = {"loss": torch.sum, "device": "h100"}


def promised(**options: Any) -> Prediction:
    """What the plan of small layers at half of their memory is promised to take."""
    plan = make_plan(layers(), torch.ones(64, 16), **{"budget": 0.5, **HOW, **options})
    assert plan.prediction is not None
    return plan.prediction


def test_a_host_is_a_word_or_a_file(tmp_path: Path) -> None:
    """Seconds are those of the host that is named: the typical one by default, the slow one, or that of a file."""
    file = tmp_path / "host.json"
    file.write_text(json.dumps({**FIGURES, "note": "anything else"}))
    assert read_host("typical") == TYPICAL == typical()
    assert read_host("slow") == SLOW
    assert read_host(file) == read_host(str(file)) == Host(str(file), 4e-5, 5e-5, 2e-3, 1e-4, 5e-6, apart=True)
    default, named, slow, measured = (
        promised(**how) for how in ({}, {"host": "typical"}, {"host": "slow"}, {"host": file})
    )
    assert default == named
    assert (default.host, slow.host, measured.host) == ("typical", "slow", str(file))
    assert default.plain_step_seconds < measured.plain_step_seconds < slow.plain_step_seconds


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nothing", "is a file that is no JSON"),
        ("[]", "has no operation_seconds, replayed_seconds, region_seconds, call_seconds and watched_seconds"),
        (
            json.dumps({**FIGURES, "call_seconds": "fast"}),
            "has call_seconds 'fast' in place of a number of seconds",
        ),
        (json.dumps({**FIGURES, "region_seconds": 0}), "has region_seconds 0 in place of"),
        (json.dumps({name: value for name, value in FIGURES.items() if name[0] != "w"}), "has no watched_seconds"),
    ],
)
def test_a_file_that_holds_no_host(text: str, said: str, tmp_path: Path) -> None:
    """A file without one of the figures, or with something else in its place, is refused with what is wrong with it."""
    file = tmp_path / "host.json"
    file.write_text(text)
    with pytest.raises(ArgumentError, match=said):
        read_host(file)
    with pytest.raises(ArgumentError, match=r"host='slo' is neither .* Close to it: slow"):
        read_host("slo")


def test_a_cpu_has_no_other_host() -> None:
    """A CPU launches its operations itself, so a host that is named for it would have no effect."""
    for model, device in ((layers(), None), (layers().to("meta"), "cpu")):
        with pytest.raises(ArgumentError, match="host='slow' would have no effect"):
            profile(model, torch.ones(64, 16), loss=torch.sum, device=device, host="slow")


def test_a_profile_keeps_its_host() -> None:
    """Another budget is solved with the prices of the profile's host, also where it was read from a file."""
    costs = profile(layers(), torch.ones(64, 16), **HOW, host="slow")
    read = Profile.from_json(costs.to_json())
    assert (read, read.costs.host) == (costs, SLOW)
    again = solve(read, budget=0.5)
    assert again == costs.solve(budget=0.5)
    assert again.prediction is not None
    assert (again.prediction.host, again.prediction.step_seconds) == ("slow", promised(host="slow").step_seconds)
    assert Plan.from_json(again.to_json()).prediction == again.prediction


def test_costs_of_one_host_are_those_of_another_after_all() -> None:
    """Costs that are priced for another host have the seconds that it takes to profile the step with it."""
    one, other = (profile(layers(), torch.ones(64, 16), **HOW, host=host).costs for host in ("typical", "slow"))
    found = launched_by(one, SLOW)
    assert found.step_seconds == pytest.approx(other.step_seconds)
    for kind, options in ((kind.options, other.kinds[name].options) for name, kind in found.kinds.items()):
        seconds = {(option.regions, option.span): option.seconds for option in kind}
        for option in options:
            if (option.regions, option.span) in seconds:
                assert seconds[option.regions, option.span] == pytest.approx(option.seconds)


def test_a_plan_says_when_the_host_decides() -> None:
    """Small layers wait for their host for most of the step, which the plan says; large ones do not, nor does a CPU."""
    text = str(promised())
    share = promised().waiting_seconds / promised().step_seconds
    assert share > 0.5
    line = next(line for line in text.splitlines() if line.startswith("host: "))
    assert line.startswith(f"host: the device waits for its host (typical) for {share:.0%} of the step: ")
    with torch.device("meta"):
        large = nn.Sequential(
            *(nn.Sequential(nn.Linear(2**13, 2**15), nn.GELU(), nn.Linear(2**15, 2**13)) for _ in "abc")
        )
        found = make_plan(large, torch.ones(2**12, 2**13), budget=0.5, **HOW).prediction
    assert found is not None
    assert found.waiting_seconds < 0.01 * found.step_seconds
    assert "host:" not in str(found)
    assert "host:" not in str(promised(device=None))
    stages = Stages("1F1B", pipeline=2, microbatches=4)
    for plan in make_plan(layers(), torch.ones(64, 16), budget="90%", stages=stages, **HOW):
        assert plan.prediction is not None
        assert 0.5 < plan.prediction.waiting_seconds / plan.prediction.step_seconds < 1


@pytest.mark.parametrize(("regions", "said"), [(5, "+32%, and recomputing every layer +20%"), (1, "")])
def test_a_plan_that_a_slow_host_puts_behind_recomputing_every_layer(regions: int, said: str) -> None:
    """A plan of many small regions says what it would take on a slow host, beside a region around each layer."""

    def option(paths: tuple[str, ...], saved: int, device: float) -> Option:
        work = Work(device, 0, len(paths), len(paths))
        return Option(tuple(Choice((path,)) for path in paths), saved, 10, 10, device, work=work)

    parts = option(tuple(map(str, range(regions))), 2, 1e-3)
    layer, host = Work(device=1e-2, launched=100), Host("fast", apart=True)
    kind = Kind((option((), 10, 0.0), parts, option(("",), 1, 2e-3)), work=layer)
    segments = tuple(Segment(path, "layer", 0, 0) for path in "ab")
    costs = Costs({"layer": kind}, segments, (), 2e-2, host=host, parts=(layer, layer))
    promise = solve(Profile("Net", "h100", costs, 100), budget="13B").prediction
    assert promise is not None
    assert promise.step_seconds == 2.1e-2  # one layer is recomputed in parts, and one is not
    assert promise.on_slow_host.endswith(said)
    assert ("host: on a slow one" in str(promise)) == bool(said)
