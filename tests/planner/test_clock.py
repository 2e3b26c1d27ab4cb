"""The clock runs whole steps and scales prices to them, within the budget, and leaves the model unchanged."""

from __future__ import annotations

import copy
import random
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from support.models import gpt, ids_of
from support.zoo import mean_loss
from torch_recompute import Choice, Plan, Profile, make_plan, measure, profile, saved_activations, simulate, verify
from torch_recompute.doctor import examine
from torch_recompute.doctor.verify import Verification
from torch_recompute.planner import clock as clock_module
from torch_recompute.planner import planner
from torch_recompute.planner.clock import Clocked, Replays, Scale, clock, spread_of, why_not_timed
from torch_recompute.planner.cost import Costs, Graph, Kind, Node, Option, Segment, Solution
from torch_recompute.planner.planner import Planner
from torch_recompute.planner.prices import Measured
from torch_recompute.simulation.training_step import TrainingStep, loss_of
from torch_recompute.state.observer import Running, running

CPU = torch.device("cpu")


class Counting(nn.Module):
    """A block with a norm that keeps statistics, dropout, a count of its calls, and weights that are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.again = nn.Linear(8, 32)
        self.again.weight = self.up.weight
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x.add_(1)  # the caller's own tensor
        return self.down(torch.dropout(self.up(self.norm(x)).relu() + self.again(x), 0.1, True)).square().mean()


class Drawing(nn.Module):
    """Layers that draw from Python's generator, NumPy's and PyTorch's in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + random.random() + float(np.random.rand())
        return torch.dropout(self.layers(x), 0.1, True).square().mean()


RUNS: dict[str, Callable[[nn.Module, torch.Tensor], object]] = {
    "make_plan": lambda model, x: make_plan(model, x, budget=0.5),
    "profile": profile,
    "simulate": simulate,
    "saved_activations": saved_activations,
}


@pytest.mark.parametrize("name", RUNS)
def test_generators_are_put_back(name: str) -> None:
    """What runs a model to know about it leaves Python's generator, NumPy's and PyTorch's where they were."""
    model, x = Drawing(), torch.randn(4, 8)
    before = random.getstate(), np.random.get_state()[1:], torch.get_rng_state()
    RUNS[name](model, x)
    assert random.getstate() == before[0]
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state()[1:], before[1], strict=True))
    assert torch.equal(torch.get_rng_state(), before[2])


class Momentum(nn.Module):
    """An encoder beside its moving average, which each forward updates in place."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.average = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.average.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The distance of the two."""
        with torch.no_grad():
            for mean, weight in zip(self.average.parameters(), self.online.parameters(), strict=True):
                mean.lerp_(weight, 0.5)
        return (self.online(x) - self.average(x)).square().mean()


EXAMINED: dict[str, Callable[[nn.Module, torch.Tensor], object]] = {
    **RUNS,
    "verify": lambda model, x: verify(model, x, plan=Plan((Choice(("online",)),))),
    "examine": examine,
}


@pytest.mark.parametrize("name", EXAMINED)
def test_weights_that_a_forward_writes_to_are_as_before(name: str) -> None:
    """What runs a model to know about it leaves also those weights as they were, with their versions."""
    model, x = Momentum(), torch.randn(4, 8)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    versions = [weight._version for weight in model.parameters()]
    found = EXAMINED[name](model, x)
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert [weight._version for weight in model.parameters()] == versions
    assert not isinstance(found, Verification) or found.noise == 0


def test_a_step_is_run_and_nothing_is_changed() -> None:
    """After it, weights, gradients, buffers, attributes, arguments and random states are what they were."""
    model, x = Counting(), torch.randn(4, 8)
    model(x.clone()).backward()
    seen: list[object] = []
    model.up.weight.register_hook(lambda grad: seen.append(grad))
    model.up.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight))
    before = copy.deepcopy(model.state_dict()), [p.grad.clone() for p in model.parameters() if p.grad is not None]
    given, state = x.clone(), torch.get_rng_state()
    grads = [p.grad for p in model.parameters()]
    found = clock(model, (x,), {}, loss_of, Plan(), CPU)
    assert found.forward > 0
    assert found.backward > 0
    assert found.replays == 0
    assert all(torch.equal(value, before[0][name]) for name, value in model.state_dict().items())
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), before[1], strict=True))
    assert torch.equal(x, given)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.calls == 1
    assert seen == []


def test_of_tensors_that_a_loss_reaches_those_it_writes_to_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A running mean is as before; a data set beside it is not copied for that."""
    data, mean, copied = torch.randn(4096, 8), torch.zeros(8), list[int]()
    clone = torch.UntypedStorage.clone

    def counted(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        copied.append(storage.nbytes())
        return clone(storage)

    def loss(output: torch.Tensor) -> torch.Tensor:
        mean.add_(output.detach().mean(0))
        return (output - data[:4] - mean).square().mean()

    monkeypatch.setattr(torch.UntypedStorage, "clone", counted)
    found = clock(nn.Linear(8, 8), (torch.randn(4, 8),), {}, loss, Plan(), CPU)
    assert found.backward > 0
    assert not mean.any()
    assert copied == [mean.nbytes]


def test_forwards_with_and_without_regions_are_compared_under_the_same_conditions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both build a graph, as a step's does, and keep nothing in it, so that only what regions take is between them."""
    monkeypatch.setattr(clock_module, "ENOUGH", 1e9)
    model, seen = gpt(1), list[tuple[bool, bool]]()
    inner = next(module for module in model.blocks[0].modules() if isinstance(module, nn.Linear))
    note = seen.append  # a list that the hook reached would be as before afterwards
    inner.register_forward_hook(lambda *_: note((torch.is_grad_enabled(), bool(running()))))
    found = clock(model, (ids_of(8),), {}, loss_of, Plan((Choice(("blocks.0",)),)), CPU, region=100.0)
    assert 100 <= found.regions < 101  # its price, for one region
    assert {grads for grads, _ in seen} == {True}
    # After the warm-up and a first comparison: the step and its replay, then forwards.
    assert [inside for _, inside in seen[6:10]] == [True, True, False, False]


# The seconds of a forward, the share of them in which the thread runs, and how many forwards of the model are run.
FORWARDS = {
    "short, until three are the same": (0.001, 1.0, 1 + 3 + 3 + 3),
    "long: two, and one comparison": (0.3, 1.0, 1 + 3 + 1),
    "longer than all that it may take": (15.0, 1.0, 1 + 3),
    "short, and waiting": (0.1, 0.2, 1 + 3),
    "long, and waiting": (1.0, 0.2, 1),
}


@pytest.mark.parametrize("case", FORWARDS)
def test_long_steps_are_run_twice_and_one_that_waits_is_not_run_again(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with regions is run as often as its seconds say something, and the comparison of forwards once."""
    seconds, runs, expected = FORWARDS[case]
    ran: list[None] = []
    note = ran.append  # a list that the hook reached would be as before afterwards

    def passed(*_: object) -> float:
        return seconds * len(ran)

    clocks = types.SimpleNamespace(perf_counter=passed, thread_time=lambda: runs * passed())
    monkeypatch.setattr(clock_module, "time", clocks)
    monkeypatch.setattr(clock_module, "now", passed)
    model = gpt(1)
    model.register_forward_pre_hook(lambda *_: note(None))
    found = clock(model, (ids_of(8),), {}, loss_of, Plan((Choice(("blocks.0",)),)), CPU)
    assert len(ran) == expected
    assert found.forward == pytest.approx(seconds)
    assert found.waited == pytest.approx(1 - runs)
    said = str(Scale.of(found, None, 0.5, 0.5))
    assert ("its threads waited for 80% of the time" in said) is (runs < 0.5)


def test_replays_are_timed_once() -> None:
    """All that a replay takes counts, one inside another with the outer one; nothing counts any more afterwards."""
    ticks = iter(range(100))

    def inner() -> int:
        next(ticks)
        return 7

    def outer() -> int:
        next(ticks)
        return replay(inner)

    def replay(fn: Callable[[], int]) -> int:
        with replays.around(Running("rebuild", "region", None)):
            return fn()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch_recompute.planner.clock.now", lambda device: float(next(ticks)))
        replays = Replays(CPU)
        assert replay(outer) == 7  # from tick 0 to 3
        assert replay(inner) == 7  # from tick 4 to 6
        assert replays.seconds() == 5.0
    model, ids = gpt(2), ids_of(32)
    found = clock(model, (ids,), {}, loss_of, Plan((Choice(("blocks.0", "blocks.1"), nested=True),)), CPU)
    assert 0 < found.replays < found.backward


def test_it_needs_no_more_than_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for a budget is timed by its own step: what is alive meanwhile stays under the budget."""
    torch.manual_seed(0)
    model, ids = gpt(2), ids_of(32)
    peaks: list[int] = []

    def watched(*args: Any, **kwargs: Any) -> Clocked:
        with measure(model) as m:
            found = clock(*args, **kwargs)
        peaks.append(m.peak_bytes)
        return found

    monkeypatch.setattr(planner, "clock", watched)
    made = Planner(TrainingStep(model, (ids,), loss=mean_loss))
    plan = made.plan(0.2)
    assert plan.prediction is not None
    assert len(peaks) == 1
    assert peaks[0] <= plan.prediction.budget_bytes + ids.nbytes < made.plain.peak_bytes  # and a copy of the batch
    assert "to match a step that was run with these regions" in plan.prediction.timing
    assert plan.prediction.timing in str(plan)
    assert plan.prediction.step_seconds > plan.prediction.plain_step_seconds > 0
    assert Plan.from_json(plan.to_json()) == plan

    found = made.profile
    assert len(peaks) == 3  # the smallest, and with room for it the plain one
    assert "without regions and with those of the smallest peak" in found.timing
    assert max(peaks) <= made.plain.peak_bytes + ids.nbytes
    assert Profile.from_json(found.to_json()) == found

    monkeypatch.setattr(planner, "free_bytes", lambda *_: 1)
    assert (
        "not scaled to a whole step: there is no memory for one"
        in Planner(TrainingStep(model, (ids,), loss=mean_loss)).profile.timing
    )
    assert len(peaks) == 3


def test_what_is_not_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A data sheet, weights elsewhere, other ranks, a step that raises: no run, and the profile says why."""
    model, ids = gpt(1), ids_of(8)

    def refuse(*_: object, **__: object) -> Clocked:
        raise ValueError("a step was run")

    monkeypatch.setattr(planner, "clock", refuse)
    assert profile(model, (ids,), device="h100", loss=mean_loss).timing == ""
    assert "not scaled to a whole step: one raised ValueError" in profile(model, (ids,), loss=mean_loss).timing
    assert why_not_timed(model, (ids,), {}, CPU) == ""
    assert why_not_timed(model, (ids.to("meta"),), {}, CPU) == "a tensor is on meta and not on cpu"
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert why_not_timed(model, (ids,), {}, CPU) == "other ranks could be waited for"


def test_the_scale_is_what_regions_add_over_what_prices_say() -> None:
    """Seconds of replays, of the bound and of the step follow the run; the optimizer's price is added to the step."""
    plain, regions = Clocked(2.5, 4.0, 0.0), Clocked(3.0, 6.0, 1.5)
    assert Scale.of(None, plain, 0.0, 0.5).step_seconds == 7.0
    assert Scale.of(None, plain, 0.0, 0.5).replays == 1.0
    both = Scale.of(regions, plain, 0.5, 0.5)
    assert (both.replays, both.step_seconds) == (5.0, 7.0)  # 9 s against 6.5 s
    alone = Scale.of(regions, None, 0.5, 0.0)
    assert (alone.replays, alone.step_seconds) == (3.0, 7.5)  # without what the replays took
    entered = Scale.of(Clocked(3.0, 6.0, 1.5, 0.25), None, 0.5, 0.0)
    assert (entered.replays, entered.step_seconds) == (3.5, 7.25)  # and without what regions took besides
    noisy = Scale.of(Clocked(2.0, 3.0, 1.5), plain, 0.5, 0.0)
    assert noisy.replays == 3.0  # never less than the replays themselves
    option = Option((Choice(("",)),), 1, 1, 1, 0.2, 7)
    costs = Costs({"a": Kind((option,), Graph((Node(0.1, 4, (-1,)),), 0, 4))}, (Segment("x", "a", 0, 0),), (), 1.0)
    scaled = both(costs)
    assert scaled.step_seconds == 7.0
    assert scaled.kinds["a"].options[0].seconds == 1.0
    assert scaled.kinds["a"].graph == Graph((Node(0.5, 4, (-1,)),), 0, 4)
    assert both.solution(Solution((option,), 9, 0.2)) == Solution(scaled.kinds["a"].options, 9, 1.0)


def test_a_plan_without_regions_is_timed_as_it_is() -> None:
    """Where all fits, the step without recomputation is the one that is run, and the optimizer's price is added."""
    model, ids = gpt(1), ids_of(8)
    plan = make_plan(model, (ids,), budget="1GiB", optimizer=torch.optim.AdamW, loss=mean_loss)
    assert plan.prediction is not None
    assert "a step that was run without regions" in plan.prediction.timing
    assert plan.prediction.step_seconds == plan.prediction.plain_step_seconds
    assert all(p.grad is None for p in model.parameters())


class Devices:
    """Two CUDA devices of which one is the current one, as far as a clock looks at them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.seen = 0, Counter[tuple[str, int]]()
        devices = self

        class Device:
            def __init__(self, device: torch.device) -> None:
                self.index = device.index

            def __enter__(self) -> None:
                self.before, devices.current = devices.current, self.index

            def __exit__(self, *_: object) -> None:
                devices.current = self.before

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                devices.saw("event")

            def synchronize(self) -> None:
                devices.saw("event")

            def elapsed_time(self, other: Any) -> float:
                return 1000.0

        monkeypatch.setattr(torch.cuda, "device", Device)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: self.saw("wait"))
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def saw(self, what: str) -> None:
        self.seen[what, self.current] += 1


def test_operations_are_timed_on_their_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are recorded on the stream of the device that is asked about, not of the current one."""
    devices = Devices(monkeypatch)
    prices = object.__new__(Measured)
    prices._device = torch.device("cuda", 1)
    assert prices._times(lambda: devices.saw("run")) == [1.0] * 3
    assert devices.seen == {("event", 1): 9, ("run", 1): 4}
    assert devices.current == 0


def test_a_step_is_timed_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is waited for, and the stream that replays are timed on, are those of the step's device."""
    devices = Devices(monkeypatch)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    clock(model, (torch.ones(2, 4),), {}, torch.sum, Plan((Choice(("0",)),)), torch.device("cuda", 1))
    assert devices.seen["wait", 1] > 0
    assert devices.seen["event", 1] > 0
    assert devices.seen["wait", 0] == 0


@pytest.mark.parametrize("kind", ["xpu", "mps"])
def test_an_accelerator_is_waited_for(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where work is queued, the clock is read when it is done; MPS knows one device, and no context."""
    waited: list[str] = []
    monkeypatch.setattr(
        torch, "get_device_module", lambda device: types.SimpleNamespace(synchronize=lambda: waited.append(device.type))
    )
    prices = object.__new__(Measured)
    prices._device = torch.device(kind)
    assert len(prices._times(lambda: None)) == 3
    assert waited == [kind] * 6
    with Replays(torch.device(kind)).around(Running("rebuild", "region", None)):
        pass
    assert waited == [kind] * 8


def test_seconds_of_a_busy_machine_are_said_to_be_so() -> None:
    """Repeats of a step that differ by over 15 % are in the plan's text; one slow repeat among others is not."""
    assert spread_of([1.0, 1.3, 1.2, 1.4]) == pytest.approx(0.25)
    assert spread_of([1.0, 1.01, 1.02, 3.0, 1.0]) < 0.02
    for spread in (0.14, 0.4):
        scale = Scale.of(Clocked(3.0, 6.0, 1.5, 0.0, spread).times(2), None, 0.5, 0.5)
        busy = "on a busy machine: its repeats differed by 40%" in str(scale)
        assert busy == (spread > 0.15)
