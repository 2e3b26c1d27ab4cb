"""Names that the author of a model gave to calls, as labels: a plan that lists one recomputes the calls."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from laws.watch import Tally
from support.training import assert_same
from torch_recompute import (
    Applied,
    ArgumentError,
    Choice,
    Plan,
    RecomputeConfig,
    apply,
    no_recompute,
    recompute,
    saved_activations,
)
from torch_recompute.plan.config import find

WIDTH, ROWS, LAYERS = 16, 4, 3
ROW = 4 * ROWS * WIDTH
FAT = 2 * ROW
"""Bytes that a call keeps besides its input: the exponential's result, and the mask of the dropout."""


class Mixer(nn.Module):
    """A layer with a call that may be recomputed and a region, each with a name."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.into, self.out, self.drop = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)
        self.register_buffer("seen", torch.zeros(()))
        self.by_hand = by_hand
        self.tally = Tally()

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        self.tally()
        self.seen += 1
        return self.drop(x.sin().exp())

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(no_recompute(self.scores, name="scores")(self.into(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (recompute(self.body, name="body")(x) if self.by_hand else self.body(x))


class Model(nn.Module):
    """Mixers in a loop."""

    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(Mixer(by_hand) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for mixer in self.mixers:
            x = mixer(x)
        return x


def model(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options)


def data() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2))


def step(m: nn.Module) -> dict[str, torch.Tensor]:
    """What one step leaves."""
    torch.manual_seed(1)
    m.zero_grad(set_to_none=True)
    m(data()).square().mean().backward()
    found = {name: p.grad.clone() for name, p in m.named_parameters()}
    return {**found, **{name: b.clone() for name, b in m.named_buffers()}}


def selective(*labels: str) -> RecomputeConfig:
    return RecomputeConfig(recompute_granularity="selective", recompute_modules=labels)


CALLS = Plan(tuple(Choice((f"mixers.{i}@scores",)) for i in range(LAYERS)))
PLANS = {
    "calls": CALLS,
    "one of them": Plan((CALLS.choices[1],)),
    "in a region": Plan((*CALLS, *(Choice((f"mixers.{i}",)) for i in range(LAYERS)))),
    "in a group": Plan((*CALLS, Choice(("mixers.0", "mixers.1")))),
    "in a saved module": Plan((*CALLS, Choice(("",), keep=("mixers.0", "mixers.1", "mixers.2")))),
    "of the whole model": Plan((Choice(("@scores",)),)),
    "products kept": Plan(tuple(Choice((f"mixers.{i}@scores",), keep=("@product",), carry=True) for i in range(2))),
}
RUNS = {"one of them": [1, 2, 1], "products kept": [2, 2, 1]}


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_training_is_the_same(name: str, by_hand: bool) -> None:
    """Gradients and buffers are the plain ones, in the author's own regions too; listed calls run twice a step."""
    plain, ours = model(by_hand=by_hand), model(by_hand=by_hand)
    expected = step(plain)
    handle = apply(ours, PLANS[name])
    assert_same(step(ours), expected)
    if not by_hand:  # else a region of the plan lies around one of the author's
        assert [mixer.tally.count for mixer in ours.mixers] == RUNS.get(name, [2] * LAYERS)
    handle.remove()
    assert not any("forward" in module.__dict__ for module in ours.modules())


def test_a_listed_name_is_a_region_around_each_call() -> None:
    """The label finds the modules that make the calls, and a forward keeps the call's input in place of its insides."""
    m = model()
    plan = selective("scores").plan(m, (data(),))
    assert plan.choices == tuple(Choice((f"mixers.{i}@scores",), labels=("scores",)) for i in range(LAYERS))
    plain = saved_activations(m, (data(),)).total_bytes
    apply(m, plan)
    freed = plain - saved_activations(m, (data(),)).total_bytes
    assert freed == LAYERS * (FAT - 4)  # a region keeps a copy of the buffer that it changes


def test_a_name_that_is_not_listed_stays_as_written() -> None:
    """A plan for one name leaves calls of another as they are: plain outside of a region."""
    m = model()
    apply(m, Plan((Choice(("@others",)),)))
    step(m)
    assert [mixer.tally.count for mixer in m.mixers] == [1] * LAYERS


def test_paths_and_labels_come_first() -> None:
    """A word that is a label or a path of a module means that, and a name is looked for only if it is neither."""
    m = model()
    m.mixers[0].scores = nn.Identity()
    assert selective("mixers.0.scores").plan(m).choices[0].paths == ("mixers.0.scores",)
    with pytest.raises(ArgumentError, match="given an example call"):
        selective("scores").plan(m)


def test_looking_leaves_the_model_as_it_was() -> None:
    """Hooks, buffers and generators are as before the example call, and the calls' modules are named in order."""
    m = model()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    found = find(m, (data(),), None)
    assert found.calls == {"scores": [f"mixers.{i}" for i in range(LAYERS)]}
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in m.modules())
    assert all(float(mixer.seen) == 0 for mixer in m.mixers)
    assert find(model(by_hand=True), (), {"x": data()}).regions == {"body": [f"mixers.{i}" for i in range(LAYERS)]}


def test_labels_and_names_make_one_plan() -> None:
    """A name beside a label that puts a region around the call is a choice of its own, and is run twice, not thrice."""
    m = model()
    m.mixers[1].also = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1))
    m.mixers[1].out = nn.Sequential(m.mixers[1].out, m.mixers[1].also)
    plan = selective("scores", "mixers.1").plan(m, (data(),))
    assert [choice.paths[0] for choice in plan] == ["mixers.0@scores", "mixers.1", "mixers.1@scores", "mixers.2@scores"]
    handle = apply(m, plan)
    before = [mixer.tally.count for mixer in m.mixers]  # of the example calls
    with handle.watch():
        step(m)
    assert [mixer.tally.count - n for mixer, n in zip(m.mixers, before, strict=True)] == [2] * LAYERS
    rows = {row.choice.paths[0]: row for row in handle.report().rows}
    assert [rows[f"mixers.{i}@scores"].replays for i in range(LAYERS)] == [1, 0, 1]
    assert rows["mixers.0@scores"].saved_bytes == FAT


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_are_recomputed_too(copied: Callable[[Model], Model]) -> None:
    """A copy has the plan, and shares nothing with the original."""
    m = model()
    apply(m, CALLS)
    twin = copied(m)
    assert_same(step(twin), step(model()))
    assert [mixer.tally.count for mixer in twin.mixers] == [2] * LAYERS
    assert [mixer.tally.count for mixer in m.mixers] == [0] * LAYERS


def test_compiled_without_a_break() -> None:
    """Named calls compile in one graph, with and without a plan, with the plain gradients."""

    class Pure(nn.Module):
        """A named call without effects, which the compiler refuses in anything that is checkpointed."""

        def __init__(self) -> None:
            super().__init__()
            self.into = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + no_recompute(lambda t: t.sin().exp(), name="scores")(self.into(x))

    def grads(plan: Plan, compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        m = Pure()
        handle: Applied = apply(m, plan)
        call = torch.compile(m, fullgraph=True, backend="aot_eager") if compiled else m
        call(data()).square().mean().backward()
        handle.remove()
        return [p.grad for p in m.parameters()]

    expected = grads(Plan(), compiled=False)
    for plan in (Plan(), Plan((Choice(("@scores",)),))):
        for found, wanted in zip(grads(plan, compiled=True), expected, strict=True):
            torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    "choice",
    [Choice(("a@b", "c")), Choice(("a@b",), keep=("c",)), Choice(("a", "c@b"))],
    ids=["first", "keep", "second"],
)
def test_calls_are_no_modules(choice: Choice) -> None:
    """Calls cannot be grouped with other regions, nor modules be kept in them."""
    with pytest.raises(ArgumentError, match="are calls"):
        Plan((choice,))
