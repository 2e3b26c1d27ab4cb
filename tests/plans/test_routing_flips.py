"""Routing flips: decisions that a replay makes otherwise than its forward, counted where they are not carried."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torch_recompute import Applied, Choice, Plan, apply, doing_recompute, recompute, replay

TOKENS, WIDTH, EXPERTS, LAYERS = 32, 8, 4, 2


def topk(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, indices = torch.topk(scores, 2, dim=-1)
    values /= values.sum(-1, keepdim=True)  # as routers do
    return values, indices


def topk_unsorted(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return scores.topk(2, -1, True, False)


def argmax(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    indices = scores.argmax(-1, keepdim=True)
    return scores.gather(-1, indices), indices


class Moe(nn.Module):
    """Experts behind a router whose scores are others in a replay, by `tilt`, as from kernels that are not exact."""

    def __init__(self, route: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH)
        self.route, self.tilt = route, torch.zeros(EXPERTS)
        self.chosen: list[list[torch.Tensor]] = [[]]  # a list in a list is not put back

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = (self.gate(x) + (self.tilt if doing_recompute() else 0)).softmax(-1)
        weights, indices = self.route(scores)
        self.chosen[0].append(torch.sort(indices, -1).values)
        made = torch.einsum("ti,tkio->tko", x, self.experts[indices]).tanh()
        return x + (made * weights[..., None]).sum(1)

    def moved(self) -> int:
        """How many tokens went to other experts in the last run than in the one before."""
        then, now = self.chosen[0][-2:]
        return int((then != now).any(-1).sum())


def model(route: Any = topk, tilt: float = 0.3) -> nn.Sequential:
    torch.manual_seed(0)
    m = nn.Sequential(*(Moe(route) for _ in range(LAYERS)))
    for layer in m:
        layer.tilt = tilt * torch.tensor([1.0, -1.0, 0.5, 0.0])
    return m


def data(seed: int = 1) -> torch.Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))


def layers(**options: Any) -> Plan:
    return Plan(tuple(Choice((str(i),), **options) for i in range(LAYERS)))


@pytest.mark.parametrize("route", [topk, topk_unsorted, argmax])
def test_flips_are_counted(route: Any) -> None:
    """The report says how many tokens the replay sent to other experts, of how many, and what to do about it."""
    m = model(route)
    handle = apply(m, layers())
    with handle.watch():
        m(data()).square().sum().backward()
    report = handle.report()
    assert [row.flips for row in report.rows] == [layer.moved() for layer in m]
    assert 0 < report.flips < report.decisions == LAYERS * TOKENS
    text = f"{report.rows[0].flips} of {TOKENS} decisions came out differently in the replay: carry them (carry=True)"
    assert report.remark(report.rows[0]) == text
    assert text in str(report)


@pytest.mark.parametrize("route", [topk, argmax])
def test_without_a_flip_there_is_none(route: Any) -> None:
    """A router that decides the same again has no flips, and comparing changes no gradient."""
    found = []
    for plan in (Plan(), layers()):
        m = model(route, tilt=0.0)
        handle = apply(m, plan)
        with handle.watch():
            m(data()).square().sum().backward()
        report = handle.report()
        assert (report.flips, report.decisions) == (0, len(plan) * TOKENS)
        found.append([p.grad for p in m.parameters()])
    assert all(map(torch.equal, *found))


def test_what_is_carried_cannot_flip() -> None:
    """With decisions carried nothing is compared, and every token goes where it went."""
    m = model()
    handle = apply(m, layers(carry=True))
    with handle.watch():
        m(data()).square().sum().backward()
    assert [layer.moved() for layer in m] == [0] * LAYERS
    report = handle.report()
    assert (report.flips, report.decisions) == (0, 0)


class Checkpointed(Moe):
    """Experts in a checkpoint of torch's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = checkpoint(super().forward, x.sin(), use_reentrant=False)
        assert isinstance(made, torch.Tensor)
        return made.tanh()


@pytest.mark.filterwarnings("ignore:.* calls sort within:RuntimeWarning")
def test_decisions_within_another_checkpoint_are_left_to_it() -> None:
    """It runs them again outside of the region, and compares what is saved; a warning names the call."""
    grads = []
    for planned in (False, True):
        torch.manual_seed(0)
        m = nn.Sequential(*(Checkpointed(topk) for _ in range(LAYERS)))
        if planned:
            apply(m, layers(carry=True))
        with pytest.warns(RuntimeWarning, match=r"^[01] calls topk within torch") if planned else nullcontext():
            m(data()).square().sum().backward()
        grads.append([p.grad for p in m.parameters()])
    assert all(map(torch.equal, *grads))


def test_one_call_is_looked_at() -> None:
    """Of several watched forwards the first is compared, whichever backward comes first."""
    m = model()
    handle = apply(m, layers())
    with handle.watch():
        first, second = m(data(1)), m(data(2))
        second.square().sum().backward()
        first.square().sum().backward()
    assert handle.report().decisions == LAYERS * TOKENS


@pytest.mark.parametrize("outside", ["the forward", "the backward", "both"])
def test_watching_half_a_step_changes_nothing(outside: str) -> None:
    """A step of which only a part is watched has its gradients, also where the model carries choices of its own."""

    class Chooses(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = x.softmax(-1)
            picked = scores.topk(2, -1).indices
            again = replay(lambda s: s.argmax(-1))(scores)
            return x.sin() * scores.gather(-1, picked).sum(-1, keepdim=True) + again[:, None].sin()

    def step(watched: bool) -> torch.Tensor:
        x = data().requires_grad_()
        m = nn.Sequential(Chooses(), Chooses())
        handle = apply(m, layers())
        during = handle.watch if watched else nullcontext
        with during() if outside == "the backward" else nullcontext():
            y = recompute(m)(x)
        with during() if outside == "the forward" else nullcontext():
            y.square().sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(step(watched=True), step(watched=False))


@pytest.mark.parametrize("plan", [Plan((Choice(("0", "1")),)), Plan((Choice(("",)),))], ids=["group", "the model"])
def test_groups_are_compared_too(plan: Plan) -> None:
    """The layers of one region are compared as each by itself is."""
    m = model()
    handle: Applied = apply(m, plan)
    with handle.watch():
        m(data()).square().sum().backward()
    assert handle.report().decisions == LAYERS * TOKENS


def test_inside_a_region_of_the_user() -> None:
    """A plan in a model that is itself called in a region: each decision is compared once."""
    m = model()
    handle = apply(m, layers())
    with handle.watch():
        recompute(m)(data().requires_grad_()).square().sum().backward()
    assert handle.report().decisions == LAYERS * TOKENS
