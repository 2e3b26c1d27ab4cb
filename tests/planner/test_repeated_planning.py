"""A second plan reuses the simulations of the first where nothing has changed, and only there."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from support.zoo import mean_loss
from torch_recompute import Choice, Plan, apply, make_plan, profile
from torch_recompute.planner import planner
from torch_recompute.planner.hosts import NO_LEAVE
from torch_recompute.planner.known import MOST, digest, forget, known, made_for
from torch_recompute.simulation.training_step import TrainingStep

SCALE = 2
CONFIG = types.SimpleNamespace(factor=1)


class Settings:
    """A class that functions read."""

    repeats = 1


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * CONFIG.factor


def repeated(x: torch.Tensor) -> list[torch.Tensor]:
    return [scaled(x) for _ in range(Settings.repeats)]


class Layer(nn.Module):
    """A layer with an attribute, a nested one, a buffer, and globals that its forward and what this calls read."""

    sizes: ClassVar[list[int]] = [1]

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.register_buffer("mask", torch.ones(8))
        self.config = types.SimpleNamespace(sizes=[1, 2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(self.down(torch.tanh(self.up(y))) * SCALE for y in repeated(x))


def built() -> nn.Sequential:
    return nn.Sequential(Layer(), Layer())


def class_attribute(_model: nn.Sequential) -> None:
    Layer.sizes.append(2)


def set_global(_model: nn.Sequential) -> None:
    globals()["SCALE"] = 3


def new_forward(model: nn.Sequential) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))

    model[0].forward = types.MethodType(forward, model[0])


def doubling(_module: nn.Module, _args: Any, out: torch.Tensor) -> torch.Tensor:
    return out * 2


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "evaluation": lambda model: model.eval(),
    "a frozen weight": lambda model: model[0].up.weight.requires_grad_(False),
    "a dtype": lambda model: model.double(),
    "a module": lambda model: model.append(Layer()),
    "a nested attribute": lambda model: model[1].config.sizes.append(3),
    "values that the step may read": lambda model: model[1].mask.zero_(),
    "a hook": lambda model: model[0].register_forward_hook(doubling),
    "a method": new_forward,
    "a tied weight": lambda model: setattr(model[1].up, "weight", model[0].up.weight),
    "a plan": lambda model: apply(model, Plan((Choice(("0",)),))),
    "a global of the forward": set_global,
    "an object that a function reads which the forward calls": lambda _: setattr(CONFIG, "factor", 2),
    "a class that one reads": lambda _: setattr(Settings, "repeats", 2),
    "an attribute of the class": class_attribute,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_another(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a step can depend on is in the digest, and in a plan's file; the same model has the same."""
    monkeypatch.setitem(globals(), "SCALE", 2)
    monkeypatch.setattr(Layer, "sizes", [1])
    monkeypatch.setattr(CONFIG, "factor", 1)
    monkeypatch.setattr(Settings, "repeats", 1)

    def facts(model: nn.Module) -> dict[str, Any]:
        return made_for(TrainingStep(model, (torch.ones(2, 8),), loss=torch.sum), "fit", NO_LEAVE)

    model = built()
    assert (before := digest(model)) is not None
    assert digest(model) == digest(built()) == before
    assert (in_file := facts(model)) == facts(built())
    CHANGES[change](model)
    assert digest(model) not in (None, before)
    assert facts(model) != in_file or change == "values that the step may read"  # of which a file says nothing


def test_a_class_that_was_written_again_is_another() -> None:
    """As in a notebook, where it keeps its name: also a method that is decorated counts by its own code."""

    def decorated(fn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: fn(*args)

    def of(forward: Callable[..., Any]) -> nn.Module:
        return type("Written", (nn.Module,), {"forward": decorated(forward), "__module__": "__main__"})()

    first = digest(of(lambda self, x: x + 1))
    assert first == digest(of(lambda self, x: x + 1)) is not None
    assert first != digest(of(lambda self, x: x * 1))


def test_a_model_of_transformers_can_be_compared() -> None:
    """Nothing in its modules, decorators and configuration keeps it from having a digest, which a setting changes."""
    sizes = dict[str, Any](hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes))
    assert (before := digest(model)) is not None
    model.config.use_cache = not model.config.use_cache
    assert digest(model) not in (None, before)


def test_arguments_and_settings_count() -> None:
    """Shapes of all tensors count, values of integers, what a loss encloses, and the flags of PyTorch."""

    def loss(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda out: factor * out.mean()

    ids = torch.tensor([1, 2])
    x, optim = torch.randn(2, 8), torch.optim
    found = [*map(digest, (x, x.t(), torch.randn(4, 8), ids, ids + 1, loss(1.0), loss(2.0), optim.AdamW, optim.SGD))]
    with torch.autocast("cpu"):
        found.append(digest(x))
    assert None not in found
    assert len(set(found)) == len(found)
    assert digest(loss(1.0)) == digest(loss(1.0))
    assert digest(torch.zeros(2000)) == digest(torch.ones(2000))  # of large floating tensors no step knows the values


def test_what_nobody_can_compare_is_looked_at_anew() -> None:
    """What cannot be pickled has no digest, and neither has a step under modes and hooks of the whole process."""
    assert digest(open) is not None
    assert digest(i for i in range(3)) is None
    with TorchDispatchMode():
        assert digest(1) is None
    handle = nn.modules.module.register_module_forward_hook(doubling)
    assert digest(1) is None
    handle.remove()
    with torch.autograd.graph.save_on_cpu():
        assert digest(1) is None
    assert known(i for i in range(3)) is not known(i for i in range(3))


def test_a_second_plan_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same plan comes without a simulation, a trial or a step; another budget pays for its own simulations."""
    ran: list[str] = []
    for module, name in ((planner, "simulate_step"), (planner, "attempt"), (planner, "capture"), (planner, "clock")):
        plain = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, _f=plain, _n=name, **k: ran.append(_n) or _f(*a, **k))
    model, x = nn.Sequential(*(Layer() for _ in range(4))), torch.randn(64, 8)

    def plan(budget: float) -> Plan:
        return make_plan(model, (x,), loss=mean_loss, optimizer=torch.optim.AdamW, budget=budget)

    first = plan(0.7)
    assert {*ran} == {"simulate_step", "attempt", "capture", "clock"}
    ran.clear()
    assert plan(0.7) == first
    assert ran == []
    other = plan(0.2)
    assert other.choices != first.choices
    assert {*ran} <= {"simulate_step", "clock"}
    ran.clear()
    one, two = (profile(model, (x,), loss=mean_loss, optimizer=torch.optim.AdamW) for _ in range(2))
    assert one.costs == two.costs
    assert "attempt" not in ran
    model[0].down = nn.Linear(32, 8, bias=False)
    ran.clear()
    plan(0.5)
    assert {*ran} == {"simulate_step", "attempt", "capture", "clock"}


def test_a_first_layer_tries_what_was_best_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that differs by its input's gradient alone tries the ways kept for the others, and plans are the same."""
    layers = (nn.TransformerEncoderLayer(8, 2, 32, dropout=0.0, batch_first=True) for _ in range(3))
    model, x = nn.Sequential(*layers), torch.randn(2, 16, 8)
    tries: list[int] = []
    plain_attempt = planner.attempt
    monkeypatch.setattr(
        planner,
        "attempt",
        lambda call, *rest, **how: tries.append(len(call.steps)) or plain_attempt(call, *rest, **how),
    )

    def plans() -> tuple[int, list[Plan]]:
        forget()
        tries.clear()
        step = TrainingStep.of("make_plan", model, x, None, mean_loss, device="h100")
        made = planner.Planner(step)
        found = [made.plan(budget) for budget in (0.1, 0.4, 0.7)]
        return tries.count(1), found

    shared, found = plans()
    capture = planner.capture

    def apart(*args: object) -> object:
        captured = capture(*args)
        captured.likes = {kind: kind for kind in captured.likes}
        return captured

    monkeypatch.setattr(planner, "capture", apart)
    alone, wanted = plans()
    assert found == wanted
    assert shared < alone


def test_a_plan_that_was_interrupted_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ran is counted when its simulation has ended, so a second try counts nothing twice."""
    step = (built(), (torch.randn(64, 8),))
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(planner, "simulate_step", lambda *a, _f=planner.simulate_step, **k: _f(*a, **k) and 1 / 0)
        planner.Planner(TrainingStep(*step, loss=mean_loss, device="h100"))
    again = planner.Planner(TrainingStep(*step, loss=mean_loss, device="h100")).costs.step_seconds
    assert again == planner.Planner(TrainingStep(*step, loss=torch.mean, device="h100")).costs.step_seconds


def test_no_model_is_kept_alive() -> None:
    """What is kept refers to no model and no tensor, though loss and optimizer do."""
    model, x = built(), torch.randn(64, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    loss = types.MethodType(lambda model, out: (out + model[0].mask).mean(), model)
    plan = make_plan(model, (x,), loss=loss, optimizer=optimizer, budget=0.5)
    gone = [weakref.ref(model), weakref.ref(x), weakref.ref(model[0].up.weight), weakref.ref(optimizer)]
    del model, x, optimizer, loss
    gc.collect()
    assert plan.choices
    assert [ref() for ref in gone] == [None] * 4


def test_the_oldest_goes_first() -> None:
    """As many steps are kept as a process plans in turns, and no more."""
    first = known("first")
    assert known("first") is first
    list(map(known, range(MOST - 1)))
    assert known("first") is first
    list(map(known, range(MOST, 2 * MOST)))
    assert known("first") is not first
