"""A head with its loss in tiles: whatever is written between them, the loss and the gradients are the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torch_recompute import Choice, Plan, apply, errors, measure, saved_activations

CLASSES, WIDTH, TOKENS, TILES = 400, 8, (2, 51), 7
PLAN = Plan((Choice(("out",), tiles=TILES, with_loss=True),))


class Net(nn.Module):
    """An embedding, an MLP, and a head whose logits are scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        self.out = nn.Linear(WIDTH, CLASSES)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.shift = nn.Parameter(torch.randn(CLASSES))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.mlp(self.embed(ids))) * self.scale


torch.manual_seed(0)
NET, IDS, WEIGHT = Net(), torch.randint(1, CLASSES, TOKENS), torch.rand(CLASSES)
LABELS = IDS.roll(-1, 1).index_fill(1, torch.arange(5), -100)
FLAT = LABELS.flatten()
CAP = 3.0
LOSSES: dict[str, Callable[[Any], torch.Tensor]] = {
    "flattened": lambda out: F.cross_entropy(out.flatten(0, 1), FLAT),
    "viewed": lambda out: nn.CrossEntropyLoss()(out.float().view(-1, out.size(-1)), FLAT),
    "shifted": lambda out: F.cross_entropy(out[:, :-1].reshape(-1, CLASSES), LABELS[:, 1:].flatten(), reduction="sum"),
    "picked": lambda out: F.cross_entropy(out[LABELS != -100], LABELS[LABELS != -100]),
    "turned": lambda out: F.cross_entropy(out.transpose(1, 2), LABELS),
    "permuted": lambda out: F.cross_entropy(out.permute(0, 2, 1), LABELS, reduction="none").sum() / 100,
    "weighted": lambda out: F.cross_entropy(out.flatten(0, 1), FLAT, WEIGHT, label_smoothing=0.1),
    "weighted sum": lambda out: F.cross_entropy(out.flatten(0, 1), FLAT, weight=WEIGHT, reduction="sum"),
    "ignored": lambda out: F.cross_entropy(input=out.flatten(0, 1), target=FLAT.clamp(min=0), ignore_index=0),
    "capped": lambda out: F.cross_entropy(
        (CAP * torch.tanh(out[..., :-1, :] / CAP)).flatten(0, 1), IDS[:, 1:].flatten()
    ),
    "biased": lambda out: F.cross_entropy((out + NET.shift.detach()).flatten(0, 1), FLAT),
}
WHOLE: dict[str, Callable[[Any], torch.Tensor]] = {
    "log_softmax": lambda out: F.nll_loss(F.log_softmax(out.flatten(0, 1), -1), FLAT),
    "logsumexp": lambda out: F.cross_entropy(out.flatten(0, 1), FLAT) + out.logsumexp(-1).square().mean(),
    "mul_": lambda out: F.cross_entropy(out.mul_(2).flatten(0, 1), FLAT),
}


def _step(
    loss: Callable[[Any], torch.Tensor], plan: Plan | None, autocast: bool = False
) -> tuple[Any, dict[str, Any], int]:
    """The loss of a step, its gradients, and its peak."""
    net = copy.deepcopy(NET)
    if plan is not None:
        apply(net, plan)
    with measure() as m:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = net(IDS)
            value = loss(out)
        del out
        value.backward()
    return value.detach(), {name: p.grad for name, p in net.named_parameters() if p.grad is not None}, m.peak_bytes


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_in_tiles_is_the_loss(name: str) -> None:
    """Loss and gradients are those without tiles up to the order of sums, and the logits never exist at once."""
    whole, tiled = _step(LOSSES[name], None), _step(LOSSES[name], PLAN)
    torch.testing.assert_close(tiled[0], whole[0])
    torch.testing.assert_close(tiled[1], whole[1])
    logits = 4 * CLASSES * IDS.numel()
    assert whole[2] > 3 * logits > logits > tiled[2] - 2 * 4 * CLASSES * 2 * WIDTH  # weights' gradients aside


@pytest.mark.parametrize("name", WHOLE)
def test_what_else_reads_the_logits_gets_them(name: str) -> None:
    """A loss that is made by something else is the same without tiles, and the first of its functions is said once."""
    with pytest.warns(RuntimeWarning, match=f"{name} reads the logits of all tokens"):
        tiled = _step(WHOLE[name], PLAN)
    whole = _step(WHOLE[name], None)
    torch.testing.assert_close(tiled[:2], whole[:2])


def test_autocast_of_the_head_holds_in_its_tiles() -> None:
    """Under autocast the head runs in bfloat16 in tiles, too, also where the loss is computed outside of it."""

    def outside(out: Any) -> torch.Tensor:
        assert out.dtype == torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            return F.cross_entropy(out.float().flatten(0, 1), FLAT)

    whole, tiled = _step(outside, None, True), _step(outside, PLAN, True)
    torch.testing.assert_close(tiled[0], whole[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(tiled[1], whole[1], atol=1e-3, rtol=2e-2)


class OwnLoss(torch.autograd.Function):
    """A loss that takes the logits apart by itself."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits.square().mean()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return torch.ones(*TOKENS, CLASSES)


@pytest.mark.filterwarnings("ignore:The plan makes")
def test_what_cannot_be_tiled_is_an_error() -> None:
    """A custom function that reads logits, and logits that are read after a change of weights, are refused."""
    with pytest.raises(errors.RecomputeError, match=r"logits of out are computed in tiles"):
        _step(OwnLoss.apply, PLAN)
    net = copy.deepcopy(NET)
    apply(net, PLAN)
    out = net(IDS)
    LOSSES["flattened"](out).backward()
    torch.optim.SGD(net.parameters(), 0.1).step()
    with pytest.raises(errors.ChangedError, match=r"argmax reads the logits of out"):
        out.argmax(-1)


def test_without_gradients_it_is_the_plain_head() -> None:
    """Where no gradient is recorded the head returns its result."""
    net = copy.deepcopy(NET)
    handle = apply(net, PLAN)
    with torch.no_grad():
        assert torch.equal(net(IDS), NET(IDS))
    handle.remove()
    assert type(net(IDS)) is torch.Tensor
    assert "with its loss in 7 tiles" in str(PLAN)
    assert Plan.from_json(PLAN.to_json()) == PLAN


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tiles": -1}, "number of tiles"),
        ({"with_loss": True}, "number of tiles"),
        ({"tiles": 2, "offload": True}, "in tiles"),
        ({"tiles": 2, "elastic": True}, "in tiles"),
        ({"tiles": 2, "with_loss": True, "keep": ("@product",)}, "head with its loss"),
    ],
)
def test_choices_that_cannot_be_are_refused(options: dict[str, Any], text: str) -> None:
    """A choice with tiles that says something else, too, is refused in a sentence."""
    with pytest.raises(errors.ArgumentError, match=text):
        Plan((Choice(("out",), **options),))


def test_a_module_in_tiles() -> None:
    """A plan that makes an MLP in tiles has its gradients up to the order of sums, and less of it at once."""
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 256), nn.GELU(), nn.Linear(256, 4)))
    found: list[Any] = []
    for plan in (Plan(), Plan((Choice(("1",), tiles=5),))):
        net = copy.deepcopy(wide)
        apply(net, plan)
        x = torch.randn(2, 64, 4, generator=torch.Generator().manual_seed(1))
        with measure() as m:
            net(x).square().sum().backward()
        found.append(([p.grad for p in net.parameters()], m.peak_bytes))
    torch.testing.assert_close(found[1][0], found[0][0], atol=1e-5, rtol=1e-5)
    assert found[1][1] < found[0][1] / 2


def test_what_it_keeps_can_be_looked_at() -> None:
    """The node that stands for logits which are not computed is one that others can ask for its name."""
    model = copy.deepcopy(NET)
    apply(model, PLAN)
    with pytest.warns(RuntimeWarning, match="reads the logits of all tokens"):
        assert saved_activations(model, IDS).total_bytes > 0
