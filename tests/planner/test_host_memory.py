"""Plans that use host memory: what they promise, measured with a store whose host memory is out of sight."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from support.away import Away
from support.models import DEEP, Made, deep_is_made
from support.training import step
from torch_recompute import ArgumentError, Choice, Plan, Profile, apply, errors, measure, peaks, solve
from torch_recompute.memory.loop import Loop
from torch_recompute.planner.configurations import ConfiguredStep
from torch_recompute.planner.cost import HostMemory
from torch_recompute.planner.hosts import LINKS, PlanOptions, waited
from torch_recompute.planner.planner import Planner
from torch_recompute.planner.prices import Roofline
from torch_recompute.simulation.training_step import TrainingStep
from torch_recompute.stores import Bandwidth

pytestmark = pytest.mark.usefixtures("few_choices")

X = torch.randn(512, 16)
INPUT = X.nbytes
FAST = Roofline("fast link", {1: 1e9}, 1e18, 1e-12, host_link=1e15, kind="cuda")
SLOW = replace(FAST, name="slow link", host_link=1e3)


@functools.cache
def planner(device: str = "h100", **options: Any) -> Planner:
    model, _ = deep_is_made()
    loss, loop = (lambda y: y.square().mean()), Loop(hold_output=False)
    offload, where = options.pop("offload", False), {link.name: link for link in (FAST, SLOW)}.get(device, device)
    return Planner(
        TrainingStep(model, (X,), loss=loss, loop=loop, device=where, **options), plan_options=PlanOptions(offload)
    )


def promise_is_kept(fresh: Callable[[], tuple[nn.Module, Callable[[], torch.Tensor]]], plan: Plan) -> None:
    """Runs the step plainly and with the plan, and compares gradients, the peak, and what lay in host memory."""
    assert plan.prediction is not None
    model, call = fresh()
    step(model, call)
    wanted = [p.grad for p in model.parameters()]
    model, call = fresh()
    store = Away()
    apply(model, plan, stores={"host": store} if any(choice.store for choice in plan) else {})
    with measure(model).track(DEEP) as m:
        step(model, call)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), wanted, strict=True))
    assert m.peak_bytes == plan.predicted_peak_bytes <= plan.prediction.budget_bytes
    assert store.most == plan.prediction.host_bytes
    assert store.host_bytes == 0


def test_the_promise_is_kept_with_host_memory() -> None:
    """Inputs in host memory lower the least peak; the device's peak and the host's are those that were predicted."""
    with_host, without = planner(offload=True), planner()
    assert with_host.least[1].peak_bytes < without.least[1].peak_bytes
    plans = [with_host.plan(with_host.least[1].peak_bytes), with_host.plan(0.2)]
    for plan in plans:
        promise_is_kept(deep_is_made, plan)
    assert any(choice.store == "host" for choice in plans[0])
    assert "inputs in host memory" in str(plans[0])
    assert "in host memory, " in plans[0].summary
    assert Plan.from_json(plans[0].to_json()) == plans[0]


@pytest.mark.parametrize("budget", [0.3, pytest.param(0.2, marks=pytest.mark.nightly)])
def test_layers_are_offloaded_where_that_is_cheaper_than_a_replay(budget: float) -> None:
    """Over a fast link what layers save leaves instead of being recomputed; the peak is kept, the step is shorter."""
    with_host, without = planner(FAST.name, offload=True), planner(FAST.name)
    plan = with_host.plan(budget)
    promise_is_kept(deep_is_made, plan)
    assert plan.prediction is not None
    other = without.plan(plan.prediction.budget_bytes)
    assert other.prediction is not None
    assert plan.prediction.step_seconds < other.prediction.step_seconds
    assert plan.prediction.replay_flops < other.prediction.replay_flops
    away = [choice for choice in plan if choice.offload]
    assert away
    assert f"{len(away)} offloaded" in plan.summary
    assert "offloaded in host memory" in str(plan)
    assert "offloaded" in plan.explain()
    assert Plan.from_json(plan.to_json()) == plan
    assert Profile.from_json(with_host.profile.to_json()) == with_host.profile


def stated(words: str, **options: Any) -> ConfiguredStep:
    """The step of the deep model for an H100, under a configuration that is stated."""
    model, _ = deep_is_made()
    options = {"hold_output": False, "device": "h100", **options}
    (found,) = peaks(model, X, recompute=words, loss=lambda y: y.square().mean(), **options)
    return found


def test_a_stated_configuration_may_use_host_memory() -> None:
    """The inputs of all its regions are there: a real step peaks at these bytes, and this is what the host holds."""
    here, there = stated("full"), stated("full", offload=True)
    assert [replace(choice, store="") for choice in there.plan] == list(here.plan)
    model, call = deep_is_made()
    store = Away()
    apply(model, there.plan, stores={"host": store})
    with measure(model).track(DEEP) as m:
        step(model, call)
    assert m.peak_bytes == there.peak_bytes < here.peak_bytes
    assert store.most == there.host_bytes == len(there.plan) * INPUT
    assert (there.waited_seconds, here.waited_seconds) == (0.0, None)
    assert 1 <= there.step_seconds / here.step_seconds < 1.05  # what comes back is new memory, an operation for each
    assert f"in host memory, with full: {errors.size(there.host_bytes)} of regions' inputs" in str(there).splitlines()


def test_an_input_of_all_regions_is_sent_once() -> None:
    """A tensor that each layer is given, as rotary positions are, is in host memory once and comes back once."""

    def made() -> nn.Module:
        def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
            shared = x.sin()
            return functools.reduce(lambda y, layer: layer(y, shared), model.layers, x)

        layers = [Made(lambda m, y, z: m.up(y * z).sin(), up=nn.Linear(16, 16)) for _ in range(6)]
        return Made(forward, layers=nn.ModuleList(layers))

    plan = Plan(tuple(Choice((f"layers.{n}",)) for n in range(6)))
    options: dict[str, Any] = {"loss": lambda y: y.square().mean(), "hold_output": False, "device": "h100"}
    (found,) = peaks(made(), X, recompute=plan, offload=True, **options)
    model, store = made(), Away()
    apply(model, found.plan, stores={"host": store})
    with measure(model).track(X) as m:
        step(model, lambda: model(X).square().mean())
    assert m.peak_bytes == found.peak_bytes
    assert store.most == found.host_bytes == 7 * INPUT  # the batch, five results of layers, and what they share


def test_a_stated_configuration_waits_for_its_copies() -> None:
    """What copies take longer than forward and backward is in the step's seconds, in each of its microbatches."""
    free = stated("full", offload=True, accumulate=2)
    slow = stated("full", offload=True, accumulate=2, host_bandwidth=(10**4, 10**5))
    assert slow.waited_seconds is not None
    assert slow.step_seconds == pytest.approx(free.step_seconds + slow.waited_seconds)
    copies = 2 * (slow.host_bytes / 10**4 + slow.host_bytes / 10**5)
    assert slow.waited_seconds == pytest.approx(copies - free.step_seconds)  # there is no optimizer
    assert f"of the step {1000 * slow.waited_seconds:,.1f} ms wait for copies" in str(slow)


@pytest.mark.parametrize(
    ("words", "options", "says"),
    [
        ("none", {"offload": True}, "none has no region"),
        ("full", {"offload": "1MiB"}, "offload=1MiB is the most that a plan may keep in host memory"),
        ("full", {"offload": True, "device": "cpu"}, "so offloading would free nothing"),
        ("full", {"host_bandwidth": "1GB"}, "host_bandwidth= goes with offload="),
    ],
)
def test_what_cannot_be_stated(words: str, options: dict[str, Any], says: str) -> None:
    """Host memory without effect is refused, and so is a limit where nothing is chosen."""
    with pytest.raises(ArgumentError, match=says):
        stated(words, **options)


def test_waiting_for_copies_is_a_price_of_an_option() -> None:
    """Over a slow link each option that uses host memory costs more than over a fast one."""
    fast, slow = (
        {
            option.regions: option.seconds
            for kind in planner(link.name, offload=True).costs.kinds.values()
            for option in kind.options
        }
        for link in (FAST, SLOW)
    )
    away = {regions for regions in fast if any(choice.store or choice.offload for choice in regions)}
    assert away
    assert all(slow[regions] > fast[regions] for regions in away & slow.keys())


def test_a_slow_link_makes_no_plan_worse() -> None:
    """Where copies cost more than replays, a plan that may offload is no slower than one that may only recompute."""
    for budget in (2**21, 2_600_000, 3_400_000, 4_300_000):
        with_host, without = planner(offload=True).plan(budget), planner().plan(budget)
        assert with_host.predicted_step_seconds <= without.predicted_step_seconds


@pytest.mark.parametrize("inputs", [0, 7])
def test_a_limit_on_host_memory_is_kept(inputs: int) -> None:
    """No plan keeps more there than was allowed, and the first layers have it."""
    limited = planner(offload=inputs * INPUT + 1000)
    plan = limited.plan(limited.least[1].peak_bytes)
    promise_is_kept(deep_is_made, plan)
    assert plan.prediction is not None
    assert plan.prediction.host_bytes <= inputs * INPUT + 1000
    sent = [int(choice.paths[0].split(".")[0]) for choice in plan if choice.store]
    assert all(number <= inputs for number in sent)
    assert bool(sent) == bool(inputs)


def test_nothing_is_sent_without_leave() -> None:
    """Host memory is used only where the user has said so."""
    found = planner()
    assert found.costs.host_memory is None
    assert not any(option.store for kind in found.costs.kinds.values() for option in kind.options)


def test_a_profile_knows_what_may_be_sent() -> None:
    """A profile with options in host memory is data, too, and solving it keeps the limit."""
    taken = planner(offload="100 KiB").profile
    assert taken.costs.host_memory == HostMemory(100 * 2**10, LINKS["h100"].to_host)
    read = Profile.from_json(taken.to_json())
    assert read == taken
    plan = solve(read, budget=0.02)
    assert plan.prediction is not None
    assert plan.prediction.host_bytes <= 100 * 2**10


def test_what_computing_does_not_hide_is_waited_for() -> None:
    """Copies take their bytes over the speed of each way, less what is computed meanwhile."""
    link = Bandwidth(100.0, 50.0)
    assert waited(1000, link, 20.0, 30.0) == 0.0
    assert waited(1000, link, 4.0, 30.0) == 6.0
    assert waited(1000, link, 4.0, 15.0) == 11.0
