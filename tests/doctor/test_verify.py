"""`verify`: a plan that changes nothing passes, and each possible difference is found, named and located."""

import json
import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from support.models import Made
from support.unchanged import unchanged
from torch_recompute import ArgumentError, Choice, Plan, no_recompute, recompute, verify
from torch_recompute.doctor.compare import NOISE, Difference, Noise, SideEffects, StepResult, distance
from torch_recompute.doctor.verify import Verification, compare_calls


class Layer(nn.Module):
    """A layer that may do something else every time it runs."""

    def __init__(self, other: Callable[[nn.Module, torch.Tensor, int], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.2)
        self.other, self.runs = other, [[0]]  # a list in a list is not put back

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))
        if self.other is None:
            return y
        self.runs[0][0] += 1
        return self.other(self, y, self.runs[0][0])


def model(*others: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(other) for other in (*others, *[None] * (4 - len(others)))))


def batch() -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)


def all_layers() -> Plan:
    return Plan(tuple(Choice((str(i),)) for i in range(4)), "by hand")


def test_shards_are_compared_where_they_are() -> None:
    """Of a weight that ranks share unevenly, a rank compares its own rows."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        one, other = (
            DTensor.from_local(rows, mesh, [Shard(0)], shape=torch.Size([5, 4]), stride=(4, 1), run_check=False)
            for rows in (torch.ones(3, 4), torch.full((3, 4), 1.5))
        )
        assert (distance(one, one), distance(one, other)) == (0.0, 0.5)
    finally:
        dist.destroy_process_group()


def test_a_plan_changes_nothing() -> None:
    """A plan of regions passes to the last bit, and model, gradients, random states and arguments are as before."""
    net, x = model(), batch()
    net(x).sum().backward()
    x.grad = None
    with unchanged(net, x):
        found = verify(net, (x,), plan=all_layers())
    assert found, found
    assert (found.ok, found.first, found.noise, found.regions, found.device) == (True, None, 0.0, 4, "cpu")
    assert found.counts == {"outputs": 2, "gradients": 4 * 6 + 1, "buffers": 4 * 3, "generators": 0, "routing": 0}
    assert " ".join(str(found).split()) == (
        "the same to the last bit: 2 outputs, 25 gradients, 12 buffers. Sequential on cpu, a step with the plan "
        "(4 regions) beside one without; two steps without it are the same"
    )


def scaled(layer: nn.Module, y: torch.Tensor, run: int) -> torch.Tensor:
    """Each run is another function; attributes are put back between steps, so two plain steps are the same."""
    return torch.tanh(y * (1 + run))


def test_a_wrong_replay_is_placed() -> None:
    """The first gradient of the backward that differs is named, with how much, and the region to blame is tried."""
    found = verify(model(None, None, scaled), (batch(),), plan=all_layers())
    assert not found
    gradients = [row.name for row in found.differences if row.kind == "gradients"]
    assert found.first is not None
    assert found.first.name == gradients[0]
    assert gradients[0].startswith("the gradient of 2.")
    assert not any(name.startswith("the gradient of 3.") for name in gradients)
    assert len(gradients) > 2 * 6
    assert found.first.distance > 0.1
    assert "differs by up to" in found.first.detail
    assert (found.likely, found.tried) == (("2",), True)
    assert "Likely: 2 (the step differs with this alone)." in str(found)
    assert json.loads(found.to_json())["likely"] == ["2"]
    # The list in which the layer counts its runs is not as the plain step leaves it.
    assert [row.name for row in found.differences if row.kind == "attributes"]


class Cached(nn.Module):
    """A model of a library: it computes otherwise where it keeps a cache, which a plan switches off in training."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.layer = SimpleNamespace(use_cache=True), nn.Linear(8, 8)

    def gradient_checkpointing_enable(self) -> None: ...

    def forward(self, x: torch.Tensor, use_cache: bool | None = None) -> torch.Tensor:
        cached = self.config.use_cache if use_cache is None else use_cache
        return self.layer(x).tanh() * (1 + 1e-6 * cached)


def test_what_every_plan_switches_is_no_fault_of_a_region() -> None:
    """Where the step differs without any region too, the setting is named that every plan switches."""
    found = verify(Cached(), (torch.randn(4, 8),), plan=Plan((Choice(("layer",)),)))
    assert not found
    assert found.likely == ("use_cache=False, which every plan sets in training",)
    assert verify(Cached(), (torch.randn(4, 8), False), plan=Plan((Choice(("layer",)),)))


def draws(layer: nn.Module, y: torch.Tensor, run: int) -> torch.Tensor:
    """The second run draws from a generator that no region is told of."""
    return (y if run == 1 else y + 0 * random.random()).sin()


def routed(layer: nn.Module, y: torch.Tensor, run: int) -> torch.Tensor:
    """The second run sends tokens elsewhere."""
    chosen = (y.detach() * (1 if run == 1 else -1)).topk(2, dim=-1).indices
    return y + torch.zeros_like(y).scatter(-1, chosen, 1.0) * y.sin()


def shorter(layer: nn.Module, y: torch.Tensor, run: int) -> torch.Tensor:
    """The second run saves one tensor less."""
    return y.sin().exp() if run == 1 else y.sin()


CASES = [
    (draws, "generators", "the random state random is left in another state than by the plain step", ("1",)),
    (routed, "routing", "decisions came out otherwise in the replay. Write Choice(..., carry=True)", ("1",)),
    (shorter, "error", "raises MismatchError: ", ()),
]


@pytest.mark.parametrize(("fault", "kind", "words", "likely"), CASES, ids=[case[1] for case in CASES])
def test_what_a_replay_may_change_is_found(fault: Any, kind: str, words: str, likely: tuple[str, ...]) -> None:
    """Random states, routing and a failing replay each have a row that says what happened, and where; also in JSON."""
    net = model(None, fault)
    with unchanged(net):
        found = verify(net, (batch(),), plan=all_layers())
    assert any(row.kind == kind and words in str(row) for row in found.differences), found
    assert found.likely == likely
    json.loads(found.to_json(), parse_constant=pytest.fail)


def test_several_regions_may_be_to_blame() -> None:
    """Each region that differs alone is named, the one nearest to the loss first."""
    found = verify(model(scaled, None, scaled), (batch(),), plan=all_layers())
    assert (found.likely, found.tried) == (("2", "0"), True)


def test_a_loss_of_ones_own() -> None:
    """The loss that is passed is the one of both steps; an output without one is refused."""
    net = model()
    found = verify(net, (batch(),), plan=all_layers(), loss=lambda y: y.square().sum())
    assert found
    with pytest.raises(ArgumentError, match="loss"):
        verify(nn.Sequential(nn.Linear(2, 2), Nothing()), (torch.ones(2),), plan=Plan((Choice(("0",)),)))


class Nothing(nn.Module):
    def forward(self, x: torch.Tensor) -> str:
        return "nothing"


def test_keywords_and_nested_arguments() -> None:
    """Tensors in any place of the call are copied, and those that require grad compared."""

    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, pair: dict[str, torch.Tensor], *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
            pair["x"].data.add_(1)
            return {"loss": (self.inner(pair["x"]).tanh() * scale).sum()}

    x, scale = torch.zeros(2, 3, requires_grad=True), torch.ones(3, requires_grad=True)
    found = verify(Takes(), ({"x": x},), {"scale": scale}, plan=Plan((Choice(("inner",)),)))
    assert found, found
    assert found.counts["gradients"] == 4
    assert torch.equal(x, torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: verify(torch.sin, plan=Plan()), "a model is a torch.nn.Module and its plan is a Plan"),  # type: ignore[arg-type]
        (lambda: verify(model(), 3, plan=Plan()), "takes the arguments of one call"),  # type: ignore[arg-type]
        (lambda: verify(model(), (), [1], plan=Plan()), "as a dict of names to values"),  # type: ignore[arg-type]
        (lambda: verify(model(), (batch(),), plan=Plan((Choice(("9",)),))), "has no module '9'"),
        (
            lambda: verify(model().requires_grad_(False), batch().detach(), plan=Plan()),
            "requires grad, nor does the batch",
        ),
        (lambda: verify(model().to("meta"), batch(), plan=Plan()), "on the meta device, where no step can be run"),
        (lambda: verify(model(), (batch(),), plan=Plan(), loss=lambda out: out.detach().sum()), "that requires none"),
        (lambda: verify(model(), (batch(),), plan=Plan(), loss=lambda out: out), "with one element that requires grad"),
    ],
)
def test_misuse(call: Callable[[], object], message: str) -> None:
    """What is no model, no plan, no call or no plan of this model is refused before anything runs."""
    with pytest.raises(ArgumentError, match=message):
        call()


def test_two_functions() -> None:
    """A function with regions is compared with one without, by the names of what they reach."""
    weight = torch.randn(4, 4, requires_grad=True)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ weight)

    def regions(x: torch.Tensor) -> torch.Tensor:
        return recompute(lambda x: torch.tanh(no_recompute(torch.matmul)(x, weight)))(x)

    def wrong(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ (weight * 2))

    x = torch.randn(3, 4, requires_grad=True)
    found = compare_calls(regions, plain, (x,))
    assert found, found
    assert found.counts["gradients"] == 2
    assert not compare_calls(wrong, plain, (x,))


def test_a_wrapper_shares_parameters() -> None:
    """A module around the plain one has its parameters and buffers, whatever their paths are in it."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    wrapper = Made(lambda m, x: recompute(m.inner)(x), inner=plain)
    assert (found := compare_calls(wrapper, plain, (torch.randn(3, 4),))), found
    assert (found := compare_calls(plain, wrapper, (torch.randn(3, 4),))), found


def test_two_modules_that_write_to_their_own_weights() -> None:
    """Each, as a momentum encoder, is left with the weights that it had."""

    def layer(run: Callable[..., torch.Tensor]) -> nn.Module:
        def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                m.slow.weight.lerp_(m.fast.weight, 0.5)
            return run(m.fast, x) * m.slow(x)

        return Made(forward, fast=nn.Linear(4, 4), slow=nn.Linear(4, 4).requires_grad_(False))

    tested, plain = layer(lambda fast, x: recompute(fast)(x)), layer(lambda fast, x: fast(x))
    tested.load_state_dict(plain.state_dict())
    before = {name: value.clone() for name, value in tested.state_dict().items()}
    assert compare_calls(tested, plain, (torch.ones(3, 4),))
    assert all(torch.equal(value, before[name]) for name, value in tested.state_dict().items())


def test_no_more_differ_than_there_are() -> None:
    """Attributes, which nobody has counted, and gradients that only one step has are among the things compared."""
    extra = [Difference("gradients", f"g{n}", math.inf) for n in range(3)]
    rows = (*extra, *(Difference("attributes", f"a{n}", math.inf) for n in range(4)))
    assert "7 of 8 differ (1 " in str(Verification("Net", "cpu", 1, {"outputs": 1, "gradients": 2}, 0.0, rows))


def test_distance() -> None:
    """The distance is relative to the largest element, 0 for the same bits, and infinite where there is no number."""
    a = torch.tensor([1.0, -4.0])
    assert distance(a, torch.tensor([1.0, -3.0])) == 0.25
    nan = torch.tensor([float("nan"), 1.0])
    assert (distance(a, a), distance(nan, nan.clone())) == (0.0, 0.0)
    assert distance(a, nan) == distance(a, None) == distance(a, a.double()) == distance(a, a[:1]) == float("inf")
    assert distance(torch.zeros(2), torch.ones(2)) == float("inf")


def test_noise_is_allowed() -> None:
    """A tensor may be `NOISE` times as far off as two plain steps are, at least as is usual; without noise, not."""
    quiet = {f"g{i}": torch.ones(4) for i in range(4)}
    noisy = {**quiet, "g0": torch.ones(4) * 1.001, "g1": torch.ones(4) * 1.01, "g2": torch.ones(4) * 1.02}
    first, second = (StepResult({"gradients": one}, SideEffects()) for one in (quiet, noisy))
    noise = Noise(first, second)
    assert noise.largest == pytest.approx(0.02)
    assert [noise.allowed(f"g{i}") for i in range(4)] == pytest.approx(
        [NOISE * d for d in (0.01, 0.01, 0.02, 0.01)], 1e-3
    )
    assert Noise(first, first).allowed("g0") == 0.0


def test_a_model_with_noise_of_its_own() -> None:
    """What differs from plain step to plain step is noise, is said, and is not taken for the plan's fault."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * (1 + 1e-4 * (next(COUNTER) % 2))

    found = verify(Noisy(), (torch.ones(2, 3),), plan=Plan((Choice(("inner",)),)))
    assert found, found
    assert 5e-5 < found.noise < 2e-4
    assert "two steps without it differ by 0.0001" in " ".join(str(found).split())


COUNTER = iter(range(10**6))
