"""Another budget of one step: a profile keeps its planner, and the next plan pays for its own simulations alone."""

from __future__ import annotations

import copy
import gc
import pickle
import types
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from support.zoo import mean_loss
from torch_recompute import ArgumentError, BudgetError, Profile, Ranks, apply, make_plan, profile, solve
from torch_recompute.planner import options, planner


class Layer(nn.Module):
    """A layer that keeps more than its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.register_buffer("mask", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def built(layers: int = 4) -> nn.Sequential:
    return nn.Sequential(*(Layer() for _ in range(layers)))


X = torch.randn(64, 8)
STEP: dict[str, Any] = {"loss": mean_loss, "optimizer": "adamw"}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The parts of the planner that ran, in their order."""
    found: list[str] = []
    for name in ("simulate_step", "record", "capture", "clock"):
        place = options if name == "record" else planner
        plain = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *a, _f=plain, _n=name, **k: found.append(_n) or _f(*a, **k))
    return found


def test_a_profile_serves_another_budget(ran: list[str]) -> None:
    """Its plans are simulated, nothing is captured or recorded again, and the same budget costs nothing."""
    costs = profile(built(), X, **STEP)
    assert {*ran} == {"simulate_step", "record", "capture", "clock"}
    ran.clear()
    plans = [costs.solve(budget=share) for share in (0.2, 0.6)]
    assert {*ran} == {"simulate_step", "clock"}
    assert plans[0].choices != plans[1].choices
    ran.clear()
    assert costs.solve(budget=0.2) == plans[0] == solve(costs, budget=0.2)
    assert ran == []


def test_a_second_plan_is_made_again(ran: list[str]) -> None:
    """`make_plan` keeps nothing for the next call: both do the same."""
    model, parts = built(), list[list[str]]()
    for _ in range(2):
        ran.clear()
        make_plan(model, X, budget=0.4, device="h100", **STEP)
        parts.append([*ran])
    assert parts[0] == parts[1]
    assert {"simulate_step", "record", "capture"} <= {*parts[0]}


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "host memory": {"offload": True},
    "tiles": {"tiles": True},
    "a loop": {"accumulate": 2, "hold_output": False},
    "a slow host": {"host": "slow"},
    "ranks": {"ranks": Ranks(fsdp=2)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_profile_plans_as_make_plan_does(name: str) -> None:
    """With the same options the plan for any kind of budget is the same, and so is the error where none fits."""
    how = {**STEP, "device": "h100", **OPTIONS[name]}
    costs = profile(built(2), X, **how)
    for budget in (0, 0.3) if OPTIONS[name] else (0, "90%", "fit", "100KB"):
        assert costs.solve(budget=budget) == make_plan(built(2), X, budget=budget, **how)


def test_an_error_of_a_profile_says_what_would_do() -> None:
    """As that of `make_plan` does: the least peak, what it holds, and what lowers it."""
    how = {**STEP, "device": "h100"}
    with pytest.raises(BudgetError, match="Each of these") as one:
        profile(built(2), X, **how).solve(budget="1KB")
    with pytest.raises(BudgetError) as other:
        make_plan(built(2), X, budget="1KB", **how)
    assert str(one.value) == str(other.value)


COPIES: dict[str, Callable[[Profile], Profile]] = {
    "read": lambda costs: Profile.from_json(costs.to_json()),
    "copied": copy.copy,
    "copied with all it holds": copy.deepcopy,
    "pickled": lambda costs: pickle.loads(pickle.dumps(costs)),
    "changed": lambda costs: replace(costs, advice=""),
    "of a plan": lambda costs: costs.solve(budget=0.5).profile,  # type: ignore[dict-item, return-value]
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_a_profile_is_data(name: str, ran: list[str]) -> None:
    """It has no planner, equals the profile, and plans from its costs alone."""
    costs = profile(built(), X, device="h100", **STEP)
    data = COPIES[name](costs)
    assert data == costs
    assert costs._planner is not None
    assert data._planner is None
    ran.clear()
    assert data.solve(budget=0.3).choices
    assert ran == []


def test_a_profile_of_a_model_with_a_plan_in_it_says_so() -> None:
    """The planner simulates the model as it is then, so the plan before has to be removed."""
    model = built()
    costs = profile(model, X, device="h100", **STEP)
    handle = apply(model, costs.solve(budget=0.2))
    with pytest.raises(ArgumentError, match="plan"):
        costs.solve(budget=0.6)
    handle.remove()
    assert costs.solve(budget=0.6).choices


def test_no_plan_keeps_a_model_alive() -> None:
    """What a plan and its profile hold refers to no model and no tensor, though loss and optimizer do."""
    model, x = built(), torch.randn(64, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    loss = types.MethodType(lambda model, out: (out + model[0].mask).mean(), model)
    plan = make_plan(model, (x,), loss=loss, optimizer=optimizer, budget=0.5)
    gone = [weakref.ref(model), weakref.ref(x), weakref.ref(model[0].up.weight), weakref.ref(optimizer)]
    del model, x, optimizer, loss
    gc.collect()
    assert plan.choices
    assert plan.profile is not None
    assert [ref() for ref in gone] == [None] * 4
