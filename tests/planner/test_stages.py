"""Plans for the stages of a pipeline: more is recomputed where more is in flight, within each rank's budget."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from distributed.staged import Net, planner, plans_for
from support.zoo import mean_loss
from torch_recompute import ArgumentError, BudgetError, Plan, StagePlans, Stages, apply, make_plan
from torch_recompute.plan.ranks import Ranks
from torch_recompute.planner.cost import Costs, Kind, Option, Segment
from torch_recompute.planner.layout import Layout
from torch_recompute.planner.ops import StepLog
from torch_recompute.planner.pipeline import PipelinePlanner, plan_stages
from torch_recompute.planner.planner import Planner
from torch_recompute.planner.rank_memory import RankMemory, StageBytes
from torch_recompute.planner.schedules import one_f_one_b, schedule_steps
from torch_recompute.planner.stage_runs import StageRun, StageRunner
from torch_recompute.simulation import Moment
from torch_recompute.simulation.devices import DEVICES
from torch_recompute.simulation.training_step import TrainingStep

PATHS = [f"layers.{i}" for i in range(8)]


@pytest.fixture(scope="module")
def plans() -> StagePlans:
    """For four ranks under one budget in bytes, which the first does not fit into and the last does."""
    return plans_for("1F1B", "0.7 MiB", ranks=4)


def test_first_stages_recompute_more(plans: StagePlans) -> None:
    """Under one budget for all ranks, a stage with more microbatches spends more on replays, and the last one least."""
    assert [stage.in_flight for stage in plans.stages] == [4, 3, 2, 1]
    promises = [plan.prediction for plan in plans if plan.prediction]
    spent = [promise.step_seconds - promise.plain_step_seconds for promise in promises]
    kept = [sum(line.count * line.saved_bytes for line in promise.lines) for promise in promises]
    assert spent == sorted(spent, reverse=True)
    assert kept == sorted(kept)
    assert spent[0] > spent[-1]
    for plan in plans:
        assert plan.prediction is not None
        assert plan.prediction.peak_bytes <= plan.prediction.budget_bytes < 2**20
        assert plan.prediction.bound_seconds <= plan.prediction.step_seconds


def test_plans_are_data(plans: StagePlans) -> None:
    """Written as JSON and read back they are equal, choose the same, and print a line per stage."""
    read = StagePlans.from_json(plans.to_json())
    assert read == plans
    assert read.digest() == plans.digest()
    assert plans.diff(read) == ""
    assert len(str(plans).splitlines()) == 2 + len(plans) == 6
    assert all(line.startswith("stage 0: layers.") for line in [plans._whole().choices[0].paths[0]])
    for text in ("{", "[]", '{"version": 1, "source": ""}'):
        with pytest.raises(ArgumentError):
            StagePlans.from_json(text)


def test_a_plan_fits_its_stage_under_other_names(plans: StagePlans) -> None:
    """A stage's plan applies to the stage alone; renamed, to a module whose layers are numbered again."""
    apply(Net(range(2)), plans[0]).remove()
    stage = nn.ModuleDict({"blocks": nn.ModuleList(Net(range(2, 4)).layers.values())})
    stage.forward = lambda x: x  # type: ignore[method-assign]
    moved = plans.renamed(1, {"layers.2": "blocks.0", "layers.3": "blocks.1"})
    assert [path.split(".")[0] for choice in moved for path in choice.paths] == ["blocks"] * len(moved)
    assert len(moved) == len(plans[1]) > 0
    apply(stage, moved).remove()


def test_each_rank_may_have_a_budget_of_its_own(plans: StagePlans) -> None:
    """What a rank does follows from its own budget alone."""
    again = plans_for("1F1B", ["0.7 MiB", "10 MiB", "0.7 MiB", "10 MiB"], ranks=4)
    assert [again[i].choices == plans[i].choices for i in (0, 2)] == [True, True]
    assert [len(again[i]) for i in (1, 3)] == [0, 0]


def test_too_small_a_budget_names_the_rank_and_what_it_needs() -> None:
    """The error carries the least of the first rank that does not fit, and its plans; that budget is then kept."""
    with pytest.raises(BudgetError, match="rank 0 of the pipeline: budget=1,000 bytes is too small") as caught:
        plans_for("1F1B", [1000, "10 MiB"])
    again = plans_for("1F1B", [caught.value.smallest, "10 MiB"])
    assert again[0].predicted_peak_bytes == caught.value.smallest


def test_larger_budgets_never_cost_more() -> None:
    """Along the budgets of two chunks per rank, peaks stay below each, and seconds fall."""
    seconds: list[float] = []
    for share in (0.2, 0.5, 0.9):
        plan = plans_for("Interleaved1F1B", share)[0]
        assert plan.prediction is not None
        assert plan.prediction.peak_bytes <= plan.prediction.budget_bytes
        seconds.append(plan.prediction.step_seconds)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1]


@pytest.mark.parametrize(
    ("split", "bounds"),
    [
        ((), [(0, 3), (3, 6), (6, 8)]),
        ((1, 4, 3), [(0, 1), (1, 5), (5, 8)]),
        (("", "layers.2", "layers.7"), [(0, 2), (2, 7), (7, 8)]),
    ],
)
def test_layers_are_split(split: tuple[int, ...], bounds: list[tuple[int, int]]) -> None:
    """Evenly, by numbers of layers, or by the first layer of each stage."""
    assert Stages("1F1B", 3, 8, split=split).bounds(3, PATHS) == bounds


@pytest.mark.parametrize(
    "split", [(4, 4), (3, 3, 3), (0, 4, 4), ("", "layers.9", "layers.2"), ("", "layers.4", "layers.2")]
)
def test_a_split_that_does_not_fit_is_refused(split: tuple[int, ...]) -> None:
    """Another number of stages or layers, none in a stage, a path that is no layer, and layers out of order."""
    with pytest.raises(ArgumentError, match="does not fit"):
        Stages("1F1B", 3, 8, split=split).bounds(3, PATHS)


def test_a_schedule_of_torch_says_the_same_as_its_name(plans: StagePlans) -> None:
    """A schedule object gives the plans that its name and numbers give; with it a split may be said."""
    from torch.distributed.pipelining import Schedule1F1B

    stage = SimpleNamespace(num_stages=4, group_size=4, group_rank=0, stage_index=0)
    schedule = Schedule1F1B(stage, 4)  # type: ignore[arg-type]
    again = plan_stages(planner().step, schedule, "0.7 MiB")
    assert again.digest() == plans.digest()
    split = Stages(schedule, split=(1, 1, 1, 5))
    other = plan_stages(planner().step, split, "10 MiB")
    assert [len(stage.layers) for stage in other.stages] == [1, 1, 1, 5]


def test_make_plan_hands_over() -> None:
    """The public call gives what the planner gives, without an optimizer fewer bytes, and a plan without `stages`."""
    with torch.device("meta"):
        whole, batch = Net(), torch.empty(1, 64, dtype=torch.long)
    stages = Stages("GPipe", 2, 4)
    found = make_plan(whole, (batch,), budget="10 MiB", device="h100", stages=stages, loss=mean_loss)
    adam = plans_for("GPipe", "10 MiB")
    assert [len(plan) for plan in found] == [0, 0]
    for plain, with_adam in zip(found, adam, strict=True):
        assert (plain.predicted_peak_bytes or 0) < (with_adam.predicted_peak_bytes or 0)


def test_stages_may_use_host_memory_of_each_rank() -> None:
    """Where it may, a stage keeps inputs in host memory, for each microbatch in flight, within the limit of a rank."""
    with torch.device("meta"):
        whole, batch = Net(), torch.empty(1, 64, dtype=torch.long)
    stages, words = Stages("1F1B", 2, 4), {"device": "h100", "loss": mean_loss}

    def least(**plan_options: Any) -> list[int]:
        with pytest.raises(BudgetError) as caught:
            make_plan(whole, (batch,), budget="1000B", stages=stages, **words, **plan_options)
        return [caught.value.smallest]

    far, near = least(offload=True), least()
    assert far < near
    found = make_plan(whole, (batch,), budget=[0.0, 0.0], stages=stages, offload="100 KiB", **words)
    promises = [plan.prediction for plan in found if plan.prediction]
    assert any(choice.store == "host" for plan in found for choice in plan)
    for stage, promise in zip(found.stages, promises, strict=True):
        each = sum(line.count * line.host_bytes for line in promise.lines)
        assert promise.host_bytes == stage.in_flight * each <= 100 * 2**10
        assert promise.peak_bytes <= promise.budget_bytes


def test_an_optimizer_of_a_stage_takes_what_one_of_a_model_takes() -> None:
    """For a CUDA device it goes over lists of parameters, which keeps something for all of them at once."""
    with torch.device("meta"):
        model, batch = Net(), torch.empty(1, 64, dtype=torch.long)
    whole = Planner(TrainingStep(model, (batch,), loss=mean_loss, optimizer=torch.optim.AdamW, device="h100"))
    moments = [moment.live_bytes for moment in whole.plain.timeline if moment.phase == "optimizer"]
    names = [name for name, _ in model.named_parameters()]
    (_, more), _ = StageRunner(whole.step, whole.paths, [(0, len(whole.paths))], release=False).optimizer(
        torch.optim.AdamW, names
    )
    assert more == max(moments) - moments[0] >= 4 * sum(p.numel() for p in model.parameters())


class Imagined(PipelinePlanner):
    """Layers of one kind, whose stages take what their options say, without a model."""

    runner: Any = SimpleNamespace(held=0)

    def _described(self, stage: int) -> tuple[object, ...]:
        return (len(self.segments(stage)),)

    def run(self, stage: int, options: tuple[Option, ...], kinds: frozenset[str]) -> StageRun:
        levels = [*accumulate((option.saved_bytes for option in options), initial=0)]
        forward = [level + option.forward_bytes for level, option in zip(levels, options, strict=False)]
        backward = [level + option.backward_bytes for level, option in zip(levels, options, strict=False)]
        paths = [segment.path for segment in self.segments(self.alike[stage])]
        steps = [("forward", *step) for step in zip(paths, forward, strict=True)]
        steps += [("backward", *step) for step in reversed([*zip(paths, backward, strict=True)])]
        moments = tuple(Moment(i, "", n, phase, path, ()) for i, (phase, path, n) in enumerate(steps))
        own = {(kind, had): max(forward if kind == "F" else backward) for kind in "FB" for had in (False, True)}
        taken = StageBytes(50 * len(options), 0, 0, 5, 5, 5, 5, levels[-1], 0, 0, own)
        return StageRun(taken, moments, StepLog((), Plan()), ())


@pytest.mark.parametrize("layers", [29, *(pytest.param(n, marks=pytest.mark.nightly) for n in range(30, 34))])
def test_every_layout_has_a_plan_or_a_sentence(layers: int) -> None:
    """Whatever the ranks and chunks, of which some have more layers than others, each rank is given what it can."""
    options = tuple(Option((), saved, saved + 5, 130, seconds) for saved, seconds in ((100, 0.0), (30, 0.5), (10, 1.0)))
    costs = Costs({"a": Kind(options)}, tuple(Segment(f"layers.{i}", "a", 0, 0) for i in range(layers)))
    profile = SimpleNamespace(costs=costs)
    for pp, vpp in product(range(2, 6), range(1, 5)):
        known = SimpleNamespace(profile=profile, step=SimpleNamespace(ranks=Ranks()), paths=[], price=DEVICES["h100"])
        pipeline = Layout(Ranks(pp=pp, vpp=vpp)).pipeline(layers)
        for rank in Imagined(known, pipeline, None, megatron=True).ranks:  # type: ignore[arg-type]
            seconds: list[float] = []
            for budget in ("1B", "10%", "70%", 2**40):
                tried, wanted = rank.fitted(budget)
                assert tried.peak.bytes <= wanted or budget == "1B"
                seconds += [tried.seconds]
            assert rank.least.seconds == seconds[0] >= seconds[1] > seconds[2] > seconds[3] == 0


def test_what_a_rank_holds_is_a_sum() -> None:
    """By hand: the first of two stages under 1F1B at its fullest, and the optimizer's step where that is more."""
    own = {("F", False): 7, ("F", True): 7, ("B", False): 30, ("B", True): 20}
    stage = StageBytes(
        100,
        2,
        40,
        0,
        output_bytes=3,
        returned_bytes=3,
        back_bytes=0,
        whole_bytes=10,
        half_bytes=0,
        through_bytes=0,
        own=own,
    )
    rank = RankMemory(schedule_steps(one_f_one_b(2, 4)[0]), 4, False, optimizer=(50, 5))
    # Always 100 + 50, four parts of 2 of the batch, four buffers of 3; gradients, one that waits, what was sent first,
    # and the backward's own.
    peak = rank.peak({0: stage})
    assert peak.bytes == 100 + 50 + 4 * 2 + 4 * 3 + 40 + 10 + 3 + 20
    assert "a backward of stage 0" in peak.where
    assert (
        rank.peak({0: replace(stage, returned_bytes=0)}).bytes == peak.bytes - 4 * 3
    )  # its outputs require no gradient
    light = replace(stage, whole_bytes=0, own=dict.fromkeys(own, 0))
    assert RankMemory(rank.steps, 4, False, optimizer=(50, 500)).peak({0: light}).step is None
