"""The data of a report: every figure is that of a simulation."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from support.models import deep_is_made
from support.report_cases import BY_HAND, INPUT, TO_HOST, clock, pair, seen
from support.zoo import mean_loss
from torch_recompute import Choice, Plan, SizeClass, make_plan, simulate
from torch_recompute.commands.report_data import LAYERS, Clock, Reported, collect, in_force, sampled
from torch_recompute.memory.loop import Loop
from torch_recompute.simulation import Moment, devices
from torch_recompute.simulation.training_step import TrainingStep

PHASES = {"forward", "loss", "backward", "replay", "optimizer"}


@pytest.fixture(scope="module")
def by_hand() -> Reported:
    """A report on a plan that has promised nothing."""
    return seen()


def named(found: Reported, name: str) -> dict[str, Any]:
    return next(step for step in found.data["steps"] if step["name"] == name)


def test_layers_sum_to_the_timeline(by_hand: Reported) -> None:
    """A sample's layers sum to what was alive then, by category too, and the sample of the peak is the peak."""
    model, args = pair()
    step = named(by_hand, "the plan")
    found = simulate(model, args, plan=BY_HAND, optimizer=torch.optim.AdamW, loss=mean_loss)
    layers, at = step["samples"]["layers"], step["peak"]
    totals = [sum(column) for column in zip(*layers.values(), strict=True)]
    assert totals == [moment.live_bytes for moment in found.timeline]  # which is short enough to be there as a whole
    assert max(totals) == totals[at] == step["peak_bytes"] == found.peak_bytes
    here = {layer: series[at] for layer, series in layers.items()}
    activations = sum(here.get(layer, 0) for layer in ("activations", "rebuilt", "backward"))
    assert activations == found.by_category["activations"]
    for category in ("parameters", "buffers", "optimizer", "gradients", "other"):
        assert here.get(category, 0) == found.by_category[category]
    assert set(layers) == set(LAYERS)
    assert step["kept_bytes"] == found.saved_bytes
    assert step["replay_flops"] == found.flops["replay"] > 0


def test_samples_say_where_they_are(by_hand: Reported) -> None:
    """A sample has its phase, module and operation, as the simulation says them."""
    names = by_hand.data["names"]
    step = named(by_hand, "the plan")
    for key in ("phase", "module", "op"):
        said = [names[number] for number in step["samples"][key]]
        assert said == [getattr(moment, key).removesuffix(".default") for moment in by_hand.chosen.timeline]
    assert len(set(names)) == len(names)


def test_phases_cover_the_step(by_hand: Reported) -> None:
    """One phase begins where another ends, from the beginning to the end, and replays take what is said of them."""
    for step in by_hand.data["steps"]:
        phases = step["phases"]
        assert {phase for phase, _, _ in phases} <= PHASES
        assert [start for _, start, _ in phases] == [0.0, *(end for _, _, end in phases[:-1])]
        assert phases[-1][2] == step["step_seconds"]
        replays = sum(end - start for phase, start, end in phases if phase == "replay")
        assert replays == pytest.approx(step["replay_seconds"])
        ends = step["samples"]["ends"]
        assert ends == sorted(ends)
        assert ends[-1] <= step["step_seconds"]
    assert named(by_hand, "without recomputation")["replay_seconds"] == 0.0


@pytest.mark.usefixtures("free_launches_here")
def test_the_clock_is_the_planners() -> None:
    """For a plan from a budget the clock shows the seconds that it promises, its own rows, and its peak."""
    model, args = pair()
    plan = make_plan(model, args, budget=0.4, optimizer=torch.optim.AdamW, device="h100", loss=mean_loss)
    found = seen(plan)
    step = named(found, "the plan")
    promised = plan.prediction
    assert promised is not None
    assert step["step_seconds"] == pytest.approx(promised.step_seconds)
    assert step["promised"]["peak_bytes"] == step["peak_bytes"] == promised.peak_bytes
    assert [(row["where"], row["count"], row["why"]) for row in step["placements"]] == [
        (line.where, line.count, line.why) for line in promised.lines
    ]
    assert found.data["notes"] == []
    assert found.data["device"] == "h100"
    for other in found.data["steps"]:
        if other["name"] == "another budget":
            assert other["step_seconds"] == pytest.approx(other["promised"]["step_seconds"])


def test_what_is_in_host_memory() -> None:
    """Inputs that a plan keeps in host memory are seen beside the stack: how much, from when until when, and whose."""
    found = seen(TO_HOST, points=0)
    step = named(found, "the plan")
    samples, names = step["samples"], found.data["names"]
    assert step["host_bytes"] == max(samples["host"]) == 2 * INPUT
    assert [(row["where"], row["host_bytes"]) for row in step["placements"]] == [("*", INPUT), ("2", 0)]
    assert step["placements"][0]["what"] == "recomputed; inputs in host memory"
    phases = [names[number] for number in samples["phase"]]
    assert samples["host"][0] == samples["host"][-1] == 0
    steps = list(zip(samples["host"], samples["host"][1:], phases[1:], strict=False))
    assert {phase for before, after, phase in steps if after > before} == {"forward"}
    assert {phase for before, after, phase in steps if after < before} <= {"replay", "backward"}
    plain = named(found, "without recomputation")
    assert (plain["host_bytes"], plain["samples"]["host"]) == (0, [])


@pytest.mark.usefixtures("free_launches_here")
def test_a_plan_with_host_memory_is_the_one_that_was_promised() -> None:
    """Where a budget's plan sends inputs to host memory, its step has the promised peak and the planner's own rows."""
    model, args = deep_is_made()[0], (torch.ones(512, 16),)
    plan = make_plan(model, args, budget=0.02, offload=True, device="h100", loss=mean_loss)
    found = collect(plan, [], Clock(TrainingStep(model, args, device="h100", loss=mean_loss)))
    step = named(found, "the plan")
    assert plan.prediction is not None
    assert step["peak_bytes"] == plan.prediction.peak_bytes
    assert step["host_bytes"] == plan.prediction.host_bytes > 0
    assert sum(row["count"] * row["host_bytes"] for row in step["placements"]) == step["host_bytes"]
    assert not found.data["notes"]
    slow = replace(plan, prediction=replace(plan.prediction, step_seconds=0.25))
    (note,) = collect(slow, [], Clock(TrainingStep(model, args, device="h100", loss=mean_loss))).data["notes"]
    assert "250.00 ms, in which copies to and from host memory are waited for" in note


def test_a_host_that_is_slower_than_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where launches take longer than what is launched, the promise is of these, and a note says so."""
    monkeypatch.setitem(devices.HOSTS, "typical", devices.Host(operation=1e-3, replayed=1e-3, apart=True))
    model, args = pair()
    plan = make_plan(model, args, budget=0.4, optimizer=torch.optim.AdamW, device="h100", loss=mean_loss)
    (note,) = seen(plan, points=0).data["notes"]
    assert "in which the host takes longer to launch operations than the device to run them" in note


def test_several_backwards() -> None:
    """Of a step with more than one backward the report shows the last, and says so."""
    (note,) = collect(BY_HAND, [], clock(loop=Loop(accumulate=4))).data["notes"]
    assert note == "The pictures are of the last of 4 forwards and backwards, and of the optimizer's step."


def test_another_step_than_the_planned_one() -> None:
    """Of a plan that was made for another step its promise is not believed: that is said, and the rows are counted."""
    model, args = pair()
    plan = make_plan(model, args, budget=0.4, optimizer=torch.optim.SGD, device="h100", loss=mean_loss)
    assert plan.prediction is not None
    found = seen(plan, points=0)
    (note,) = found.data["notes"]
    assert f"{plan.prediction.peak_bytes:,} bytes" in note
    rows = named(found, "the plan")["placements"]
    assert sum(row["count"] for row in rows) == len(plan)


def test_seconds_that_were_scaled() -> None:
    """Where a plan's seconds are not sums of operations, the report says that its own are."""
    model, args = pair()
    plan = make_plan(model, args, budget=0.4, optimizer=torch.optim.AdamW, device="h100", loss=mean_loss)
    assert plan.prediction is not None
    longer = replace(plan, prediction=replace(plan.prediction, step_seconds=0.25, device="cpu"))
    (note,) = seen(longer, points=0).data["notes"]
    assert note.startswith("The plan has promised a step of 250.00 ms, scaled to whole steps")


def test_the_frontier(by_hand: Reported) -> None:
    """Steps come by rising peak; those along the curve get cheaper, and the last is the one without recomputation."""
    steps = by_hand.data["steps"]
    assert [step["peak_bytes"] for step in steps] == sorted(step["peak_bytes"] for step in steps)
    curve = [step for step in steps if step["name"] != "the plan"]
    assert len(curve) >= 3
    seconds = [step["step_seconds"] for step in curve]
    assert seconds == sorted(seconds, reverse=True)
    assert steps[by_hand.data["plain"]] is curve[-1]
    assert curve[-1]["regions"] == 0
    assert steps[by_hand.data["chosen"]]["regions"] == 3


def test_rows_of_a_plan_by_hand(by_hand: Reported) -> None:
    """A row's bytes are those of the modules in its regions, less than without, and its seconds are its replays'."""
    alike, single = named(by_hand, "the plan")["placements"]
    assert (alike["where"], alike["count"], alike["what"]) == ("*", 2, "recomputed (block)")
    assert (single["where"], single["count"], single["what"]) == ("2", 1, "recomputed, up kept")
    plain = simulate(*pair(), optimizer=torch.optim.AdamW, loss=mean_loss).saved_by_module
    saved = by_hand.chosen.saved_by_module
    inside = [sum(n for path, n in by.items() if path.split(".")[0] == "2") for by in (saved, plain)]
    assert (single["saved_bytes"], single["freed_bytes"]) == (inside[0], inside[1] - inside[0])
    assert 0 < single["freed_bytes"] < alike["freed_bytes"]
    replays = named(by_hand, "the plan")["replay_seconds"]
    assert 2 * alike["seconds"] + single["seconds"] == pytest.approx(replays)


def test_a_plan_without_regions() -> None:
    """A plan of nothing is the plain step, which is then shown once."""
    found = seen(Plan(), points=0)
    (step,) = found.data["steps"]
    assert (step["name"], found.data["chosen"], found.data["plain"]) == ("the plan", 0, 0)
    assert step["placements"] == []


def test_a_plan_of_sizes() -> None:
    """Of a plan with sizes the choices that hold for this batch are shown."""
    model, args = pair()
    plan = Plan((Choice(("0",)),), sizes=(SizeClass((8, 32)), SizeClass((512, 32), (Choice(("1",)), Choice(("2",))))))
    assert in_force(plan, model, args, {})[0] == plan.sizes[1].choices
    assert in_force(plan, model, (torch.ones(4, 32),), {})[0] == ()
    assert in_force(plan, model, (torch.ones(513, 32),), {})[0] == plan.choices
    (row,) = named(seen(plan, points=0), "the plan")["placements"]
    assert (row["count"], row["what"]) == (2, "recomputed")


def test_sampling_keeps_the_peak() -> None:
    """However few samples there are, the first moment, the last and the highest are among them, in order."""
    timeline = [Moment(i, "op", (i * 7919) % 1009, "forward", "") for i in range(1000)]
    for most in (1, 3, 10, 999, 1000, 5000):
        found = sampled(timeline, most)
        assert len(found) <= most + 2
        assert found == sorted(set(found))
        assert {timeline[0], timeline[-1], max(timeline, key=lambda moment: moment.live_bytes)} <= set(found)
    assert sampled(timeline, 1000) == timeline


def test_the_document_is_plain(by_hand: Reported) -> None:
    """The document goes through JSON without a change."""
    assert json.loads(json.dumps(by_hand.data, allow_nan=False)) == by_hand.data


def test_seconds_of_this_machine() -> None:
    """Without a device's name the seconds are those of the machine that the model is on."""
    timer = clock(device=None)
    timed = timer.timed(replace(BY_HAND))
    assert timer.device == "cpu"
    assert timed.seconds > 0
    assert timed.after(0) == (0.0, 0)
