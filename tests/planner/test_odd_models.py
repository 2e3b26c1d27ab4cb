"""Odd models: laws over the table of `support/odd_models.py`, and what a simulation does where values would decide.

Each row is planned once, for a data sheet; its laws share the plans, and the steps that were run under them.
"""

from __future__ import annotations

import copy
import random
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from support.models import Made
from support.odd_models import ODD, WIDTH, Around, Converts, Forces, Odd, Reads, Shared, itself, made, mean_square
from support.training import gradients
from support.unchanged import unchanged
from torch_recompute import (
    ArgumentError,
    BudgetError,
    Choice,
    Plan,
    Profile,
    apply,
    make_plan,
    measure,
    profile,
    simulate,
    solve,
    verify,
)
from torch_recompute._torch.fakes import FakeTensor, FakeTensorMode
from torch_recompute.memory import workspaces
from torch_recompute.memory.cuda_kernels import kept_by_cublas
from torch_recompute.memory.operations import Operations
from torch_recompute.planner import options as planner_options
from torch_recompute.planner.cost import complaints, peak
from torch_recompute.planner.planner import Planner
from torch_recompute.planner.solve import choose
from torch_recompute.simulation.fake_mode import FakeMode
from torch_recompute.simulation.training_step import TrainingStep

pytestmark = pytest.mark.filterwarnings("ignore:.*, so what it decides is not carried:RuntimeWarning")


class Step(NamedTuple):
    """The FLOPs of a first step, and the measured peak and the gradients of the second."""

    flops: int
    peak: int
    gradients: list[torch.Tensor]


@dataclass
class Planned:
    """A row of the table, its plans for falling budgets, and what planning changed of the user's."""

    name: str
    odd: Odd
    plans: list[Plan] = field(default_factory=list)
    changed: str = ""

    def stepped(self, plan: Plan) -> Step:
        """Two steps under a plan."""
        model, x, loss = made(self.name)
        apply(model, plan)

        def step() -> None:
            model.zero_grad()
            torch.manual_seed(1)
            loss(model(x)).backward()

        counter = FlopCounterMode(display=False)
        with counter if self.odd.flops else nullcontext():
            step()
        with measure(model).track(x) as memory:
            step()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        return Step(counter.get_total_flops(), memory.peak_bytes, found)

    @cached_property
    def plain(self) -> Step:
        """The step without a plan."""
        return self.stepped(Plan())

    @cached_property
    def steps(self) -> list[Step]:
        """The step under each plan."""
        return [self.stepped(plan) for plan in self.plans]


@pytest.fixture(scope="module", params=ODD)
def planned(request: pytest.FixtureRequest) -> Planned:
    """A row with its plans."""
    row, (model, x, loss) = Planned(request.param, ODD[request.param]), made(request.param)
    try:
        with unchanged(model, x.values() if x.is_nested else x):
            for budget in row.odd.budgets:
                words = {"budget": budget, "device": "h100", "hold_output": False, **row.odd.options}
                row.plans.append(make_plan(model, (x,), loss=loss, **words))
    except AssertionError as error:
        row.changed = str(error)
    return row


def test_planning_changes_nothing_of_the_users(planned: Planned) -> None:
    """Weights, buffers, attributes, hooks, gradients, the batch and random numbers are as before."""
    assert planned.changed == ""


def test_a_plan_has_regions_where_they_help(planned: Planned) -> None:
    """There is a choice in each plan, or in none where no region frees anything."""
    assert [bool(plan.choices) for plan in planned.plans] == [planned.odd.chosen] * len(planned.odd.budgets)


def test_the_costs_obey_their_rules(planned: Planned) -> None:
    """No bytes or seconds are below 0, and a layer that saves nothing saves 0."""
    for plan in planned.plans:
        assert plan.profile is not None
        assert [*complaints(plan.profile.costs)] == []


def test_a_simulation_has_the_peak_of_the_step(planned: Planned) -> None:
    """What is simulated without a plan is what is measured; it is what plans are compared with."""
    model, x, loss = made(planned.name)
    simulated = simulate(model, (x,), loss=loss, hold_output=False)
    assert simulated.peak_bytes == pytest.approx(planned.plain.peak, rel=planned.odd.within, abs=0)
    assert {plan.prediction and plan.prediction.plain_peak_bytes for plan in planned.plans} == {simulated.peak_bytes}
    assert len(simulated.assumed) == len(planned.odd.assumed)
    assert all(map(str.startswith, simulated.assumed, planned.odd.assumed))


def test_the_promised_peak_is_measured(planned: Planned) -> None:
    """A step under a plan takes what the plan promises, and no more than its budget."""
    for plan, step in zip(planned.plans, planned.steps, strict=True):
        assert plan.prediction is not None
        assert plan.prediction.peak_bytes <= plan.prediction.budget_bytes
        assert step.peak == pytest.approx(plan.prediction.peak_bytes, rel=planned.odd.within, abs=0)


def test_a_plan_replays_the_flops_that_it_says(planned: Planned) -> None:
    """By PyTorch's counter a step does so many more than without the plan."""
    for plan, step in zip(planned.plans, planned.steps, strict=True):
        assert step.flops - planned.plain.flops == plan.predicted_replay_flops or not planned.odd.flops


def test_gradients_are_those_of_the_plain_step(planned: Planned) -> None:
    """They are equal to the last bit; in tiles the order of sums is another."""
    same = torch.allclose if planned.odd.options.get("tiles") else torch.equal
    for step in planned.steps:
        assert len(step.gradients) == len(planned.plain.gradients)
        assert all(map(same, step.gradients, planned.plain.gradients))


def test_a_plan_says_what_is_odd(planned: Planned) -> None:
    """The table of a plan says which layers allow no region, and why none helps."""
    assert all(planned.odd.says in str(plan) for plan in planned.plans)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ODD)
def test_it_is_planned_with_prices_of_this_machine(name: str) -> None:
    """Its operations can be run alone, or the plan does without; what is promised is measured then, too."""
    model, x, loss = made(name)
    words = {"budget": ODD[name].budgets[0], "hold_output": False, **ODD[name].options}
    plan = make_plan(model, (x,), loss=loss, **words)
    assert bool(plan.choices) == ODD[name].chosen
    assert plan.prediction is not None
    assert plan.prediction.peak_bytes <= plan.prediction.budget_bytes
    assert Planned(name, ODD[name]).stepped(plan).peak == pytest.approx(
        plan.prediction.peak_bytes, rel=ODD[name].within, abs=0
    )


FIVE = "one block called five times"


@pytest.mark.parametrize(
    "planned", [FIVE, f"{FIVE}, and nothing else", "an attending block called five times"], indirect=True
)
def test_a_layer_that_is_called_several_times_has_a_region_per_call(planned: Planned) -> None:
    """The peak falls, as the promise says, and the plan names the layer once for all calls."""
    for plan in planned.plans:
        inside = [path for choice in plan.choices for path in choice.paths if path.startswith("block")]
        assert len(inside) == len(set(inside)) > 0
        assert "attending" in planned.name or inside == ["block"]
        assert plan.prediction is not None
        assert sum(line.count for line in plan.prediction.lines if line.where.startswith("block")) == 5
    larger, smaller = (step.peak for step in planned.steps)
    assert planned.plain.peak > larger >= smaller
    assert smaller < 0.6 * planned.plain.peak


@pytest.mark.parametrize("planned", ["a checkpoint of its own"], indirect=True)
def test_no_trial_keeps_a_call_within_other_hooks(planned: Planned) -> None:
    """A layer with a checkpoint of its own is planned without a warning, and no call that is in it is kept."""
    assert planned.plans[0].profile is not None
    options = [option for kind in planned.plans[0].profile.costs.kinds.values() for option in kind.options]
    assert any(option.regions for option in options)
    assert not any(choice.keep for option in options for choice in option.regions)


@pytest.mark.parametrize("planned", ["a router in a checkpoint"], indirect=True)
def test_a_router_within_another_checkpoint_is_planned(planned: Planned) -> None:
    """A trial carries none of its decisions, which that checkpoint makes again and compares."""
    assert any(choice.carry for choice in planned.plans[0])


def test_a_layer_that_converts_its_own_module_in_forward() -> None:
    """A conversion that changes something is named, with what to write."""
    model, x = nn.Sequential(Converts(torch.float64)), torch.randn(256, WIDTH)
    with pytest.raises(ArgumentError, match=r"parameter weight of a module.*float32 on cpu to float64 on cpu"):
        make_plan(model, x, loss=mean_square, budget=0.2, device="h100")


def test_gradients_that_the_forward_takes() -> None:
    """Regions in it change no gradient and free nothing, and a budget that is too small says why."""
    model, x = Forces(), torch.randn(64, WIDTH)
    regions_by_hand = Plan(tuple(Choice((f"layers.{i}",)) for i in range(4)))
    assert verify(model, x, plan=regions_by_hand, loss=mean_square).ok
    words: dict[str, Any] = {"loss": mean_square, "device": "h100"}
    with pytest.raises(BudgetError, match="create_graph=True"):
        make_plan(model, x, budget=1000, **words)
    assert "create_graph" not in str(make_plan(model.layers, x, budget=0.2, **words))


@pytest.mark.parametrize(("way", "seed"), [("Python's draw", 1), ("torch's draw", 0), ("torch's draw", 1)])
def test_a_layer_that_draws_is_planned_as_it_drew(way: str, seed: int) -> None:
    """Where layers leave themselves out at random there is a plan, also for the fewest bytes."""
    for budget in (0.5, 0.01):
        random.seed(seed)
        torch.manual_seed(seed)
        model, x = Reads(*([way] * 3), "its result"), torch.randn(128, WIDTH)
        plan = make_plan(model, (x,), budget=budget, optimizer="sgd", device="h100")
        assert plan.prediction is not None
        assert plan.prediction.replay_flops >= 0  # one region around two may do less than twice one


def test_a_profile_knows_that_calls_share_a_choice() -> None:
    """What solves a profile without the model gives all calls of a layer one choice, too."""
    model, x = Shared(alone=False), torch.randn(64, WIDTH)
    found = profile(model, (x,), loss=itself, device="h100")
    assert [segment.path for segment in found.costs.segments] == ["first", *["block"] * 5, "last"]
    plan = solve(Profile.from_json(found.to_json()), budget=0.3)
    assert [choice.paths for choice in plan.choices if "block" in choice.paths[0]] == [("block",)]


@pytest.mark.parametrize("name", ["a product that is changed in place", "an argument that is changed in place"])
def test_choices_that_the_engine_refuses_are_planned_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a record does not know that the engine refuses a choice, its simulation does, and another one is taken."""
    model, x, loss = made(name)
    plain = planner_options.evaluate

    def free(*given: Any) -> Any:
        """What is refused is neither known to be, nor costs anything."""
        found = plain(*given)
        return replace(found, is_refused=False, saved_bytes=0, replayed={}) if found.is_refused else found

    monkeypatch.setattr(planner_options, "evaluate", free)
    refused = list[int]()
    asked = Planner._refused
    monkeypatch.setattr(Planner, "_refused", lambda *a: refused.append(len(found := asked(*a))) or found)
    planner = Planner(TrainingStep(model, (x,), {}, loss=loss, device="h100"))
    plans = [planner.plan(share) for share in (0.0, 0.2, 0.5, 0.8)]
    assert any(refused)
    for plan in plans:
        assert simulate(model, (x,), plan=plan, loss=loss).peak_bytes == plan.predicted_peak_bytes


def test_no_choice_for_all_calls_is_better() -> None:
    """Of all choices that are the same in every call, the one that fits and costs the fewest seconds is taken."""
    model, x = Shared(alone=True), torch.randn(64, WIDTH)
    costs = profile(model, (x,), loss=itself, device="h100").costs
    by_kind = [{o.regions: o for o in costs.kinds[segment.kind].options} for segment in costs.segments]
    every = [[options[regions] for options in by_kind] for regions in by_kind[0]]
    peaks = [peak(costs, options).bytes for options in every]
    assert len(set(peaks)) > 1
    for budget in peaks:
        fitting = [options for options, most in zip(every, peaks, strict=True) if most <= budget]
        best = min(sum(option.seconds for option in options) for options in fitting)
        assert choose(costs, budget).seconds == pytest.approx(best)


@pytest.mark.parametrize("tensors", [False, True])
def test_a_loss_of_sequences_in_an_applied_region(tensors: bool) -> None:
    """Lengths as tensors or as numbers: a plan's region around `ctc_loss` replays the kernel that its forward ran."""

    class Spoken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, 20)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            lengths: Any = ([12] * 4, [5] * 4)
            if tensors:
                lengths = [torch.tensor(each) for each in lengths]
            targets = torch.arange(20).view(4, 5) % 19 + 1
            return F.ctc_loss(self.head(x).log_softmax(-1), targets, *lengths)

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), Spoken())
    x = torch.randn(12, 4, WIDTH)
    wanted = gradients(model, x)
    apply(model, Plan((Choice(("3",)),)))
    assert all(map(torch.equal, gradients(model, x), wanted))


def test_lengths_of_sequences_are_read_on_the_host() -> None:
    """What is seen is the kernel that a plain step runs, with numbers: CUDA's takes no tensors of lengths of the host.

    While a mode is on, PyTorch calls the kernel with these tensors.
    """
    layer, targets = nn.Linear(WIDTH, 20), torch.arange(20).view(4, 5) % 19 + 1
    lengths = torch.tensor([12] * 4), torch.tensor([5] * 4)
    ran: list[Any] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss(layer(x).log_softmax(-1), targets, *lengths)

    x = torch.randn(12, 4, WIDTH)
    with Operations(lambda one: ran.append(one.func)):
        step(x).backward()
    assert {one for one in ran if "ctc" in str(one)} == {
        torch.ops.aten._ctc_loss.default,
        torch.ops.aten._ctc_loss_backward.default,
    }
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), layer)
    loss = partial(F.ctc_loss, targets=targets, input_lengths=lengths[0], target_lengths=lengths[1])
    for device in ("h100", None):
        plan = make_plan(model, (x,), loss=lambda out: loss(out.log_softmax(-1)), budget="1GiB", device=device)
        assert plan.prediction is not None
        assert plan.prediction.assumed == ("aten._ctc_loss finds ones",)


# --- values that would decide ---


@pytest.mark.parametrize("kind", [torch.long, torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [8, 4096])
def test_a_mask_is_counted_as_it_is_indexed(kind: torch.dtype, rows: int) -> None:
    """Every other entry of a mask of unknown values holds, in whatever type it is summed."""
    counted: list[tuple[int, int, float]] = []
    note = counted.append  # a list that the loss reached would be as before afterwards

    def hits(x: torch.Tensor) -> torch.Tensor:
        hit = x[:, 0] > 0
        note((int(hit.to(kind).sum().long()), len(x[hit]), float(hit.to(torch.float32).mean())))
        return x.sum()

    for _ in range(2):  # the second time operations are answered from what is remembered
        simulate(nn.Linear(WIDTH, WIDTH), (torch.ones(rows, WIDTH),), loss=hits)
    assert set(counted) == {(rows // 2, rows // 2, 0.5)}


def guarded(out: torch.Tensor) -> torch.Tensor:
    """A loss that refuses what is not finite, and leaves it out."""
    value = out[~out.isnan()].square().mean()
    if out.isinf().any() or value.isnan() or value.isinf():
        raise ValueError("the loss is not finite")
    return value


@pytest.mark.parametrize("detects", [False, True])
def test_no_element_is_found_to_be_not_a_number(detects: bool) -> None:
    """A guard against values that are not finite passes, that of anomaly detection too, and a mask of them is empty."""
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(64, WIDTH)
    with torch.autograd.set_detect_anomaly(detects):
        found = simulate(model, x, loss=guarded, hold_output=False)
        for _ in range(2):
            with measure(model).track(x) as real:
                guarded(model(x)).backward()
            model.zero_grad()
    assert found.peak_bytes == real.peak_bytes
    assert "aten.isnan holds nowhere" in found.assumed


def test_a_deep_copy_in_a_forward_takes_one_copy_of_each_storage() -> None:
    """A simulated tensor is copied as a real one: once, with its views, its flag and its class."""

    def copied(m: Any, x: torch.Tensor) -> torch.Tensor:
        part, one, other, layer = copy.deepcopy([x[:, :4], x, x, m.up])
        assert one is other
        assert not one.requires_grad
        assert isinstance(layer.weight, nn.Parameter)
        assert layer.weight.requires_grad
        return part.sum() + layer(one.mul_(2)).sum()

    def cloned(m: Any, x: torch.Tensor) -> torch.Tensor:
        weight, bias = (nn.Parameter(p.detach().clone()) for p in (m.up.weight, m.up.bias))
        one = x.clone()
        return one[:, :4].sum() + F.linear(one.mul_(2), weight, bias).sum()

    peaks = [simulate(Made(does, up=nn.Linear(8, 8)), (torch.ones(4096, 8),)).peak_bytes for does in (copied, cloned)]
    assert peaks[0] == peaks[1]


def test_what_is_assumed_of_values_is_said() -> None:
    """Values that leave PyTorch, as numbers or as text, are ones, and the simulation names who read them."""
    layers = [Made(lambda m, x: m.up(x) * float(x.detach().numpy().max()), up=nn.Linear(8, 8)) for _ in range(3)]
    # the values of the batch itself are known
    several = simulate(nn.Sequential(*layers), (torch.ones(4, 8),), loss=torch.mean).assumed
    assert several == ("Tensor.numpy finds ones in * (2 times)",)
    said: list[str] = []
    note = said.append  # a list that the forward reached would be as before afterwards
    logged = Made(lambda m, x: note(f"{m.up(x).mean():.3f}") or m.up(x), up=nn.Linear(8, 8))
    assert simulate(logged, (torch.ones(4, 8),), loss=torch.mean).assumed == ("Tensor.__format__ finds ones",)
    assert said == ["1.000"]


@pytest.mark.parametrize("place", ["numpy", "__array__"])
def test_a_gradient_is_asked_about_as_ever(place: str) -> None:
    """A tensor with a gradient does not leave PyTorch, in a simulation as in a step."""
    model = Around(lambda x: x * float(getattr(x, place)().max()))
    with pytest.raises(RuntimeError, match="requires grad"):
        simulate(model, (torch.ones(4, WIDTH),), loss=itself)


def test_what_a_long_lstm_keeps_is_extrapolated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an LSTM is too long to be run alone, what it keeps for backward follows from fewer steps, within 2 %."""
    model, x = Around(nn.LSTM(WIDTH, 64)), torch.randn(400, 8, WIDTH)
    model.last = nn.Linear(64, WIDTH)
    exact = simulate(model, (x,), loss=itself).peak_bytes
    workspaces._known.clear()  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(workspaces, "MOST_WORK", 8 * 64 * 4 * 64 * 100 // torch.get_num_threads())
    assert simulate(model, (x,), loss=itself).peak_bytes == pytest.approx(exact, rel=0.02)
    workspaces._known.clear()  # pyright: ignore[reportPrivateUsage]


def test_an_lstm_for_a_gpu_by_name_says_what_it_stands_on() -> None:
    """What cuDNN keeps for backward cannot be asked without one: the CPU's is counted, and the simulation says so."""
    model, x = Around(nn.LSTM(WIDTH, WIDTH)), torch.ones(8, 4, WIDTH)
    here = simulate(model, (x,), loss=itself)
    there = Planner(TrainingStep(model.to("meta"), (x.to("meta"),), loss=itself, device="h100")).plain
    assert there.saved_bytes == here.saved_bytes > 50_000
    assert "aten.mkldnn_rnn_layer keeps as much for its backward on a GPU as on the CPU" in there.assumed


def test_a_tensor_without_elements_can_be_put_over_a_weight() -> None:
    """`torch.empty(0).set_(memory)` of a weight that is simulated is simulated, too, and takes nothing."""
    ways = (
        lambda m, x: x + torch.empty(0).set_(m.inner.weight.untyped_storage())[:WIDTH],
        lambda m, x: x + m.inner.weight.detach().view(-1)[:WIDTH],
    )
    models = [Around(Made(way, inner=nn.Linear(WIDTH, WIDTH))) for way in ways]
    over, view = (simulate(model, (torch.ones(4, WIDTH),), loss=itself) for model in models)
    assert over.peak_bytes == view.peak_bytes


def test_cudnn_finds_the_memory_of_weights() -> None:
    """What torch asks before it calls cuDNN's LSTM, acted: one tensor over all weights, and where dropout stands."""
    fakes, cuda, seen = FakeTensorMode(), torch.device("cuda", 0), []
    weight = FakeTensor(fakes, torch.empty(64, device="meta"), cuda)
    mode = FakeMode(fakes, lambda: "")
    with torch.no_grad(), mode, mode.showing(lambda ran: seen.append(ran.func)):
        whole = torch.ops.aten.empty.memory_format([0], device=cuda)
        whole.set_(weight.untyped_storage())
        assert whole.narrow(0, 0, 48).shape == (48,)
        # It is run, as torch keeps the result for good; a torch that is built for CUDA has it, and no device here.
        with pytest.raises(RuntimeError, match=r"'CUDA' backend|no NVIDIA driver|no CUDA-capable device"):
            torch.ops.aten._cudnn_init_dropout_state(0.1, True, 3, dtype=torch.uint8, device=cuda)
    assert type(whole) is FakeTensor
    assert whole.untyped_storage()._cdata == weight.untyped_storage()._cdata
    assert torch.ops.aten._cudnn_init_dropout_state.default not in seen


# With torch 2.11, torch asks cuDNN where in the memory of the weights each of them lies, and finds no addresses in a
# simulation. It warns of that, and that the weights are not one piece; neither is said of a step with data.
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:RNN module weights are not part", "ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_cudnn_keeps_is_asked_of_it(dropout: float) -> None:
    """On a GPU an LSTM's reserve is that of cuDNN, or at most a mask per layer more where it drops out.

    What cuBLAS keeps is in a prediction alone, as no operation's; the state of cuDNN's dropout, which torch keeps for
    the process, is in a measurement alone.
    """
    model = Around(nn.LSTM(WIDTH, WIDTH, 2, dropout=dropout)).cuda()
    x = torch.randn(64, 8, WIDTH, device="cuda")
    predicted = simulate(model, (x,), loss=itself).peak_bytes - kept_by_cublas(torch.cuda.get_device_capability())
    state = torch._cudnn_init_dropout_state(dropout, True, 0, dtype=torch.uint8, device=x.device) if dropout else x[:0]
    with measure(model).track(x) as memory:
        model(x).backward()
    measured = memory.peak_bytes - state.nbytes
    assert measured <= predicted * 1.005
    assert predicted <= measured * 1.05 + (2 * x.nbytes if dropout else 0)
