"""The step that the tests of reports look at: small, with every layer of the picture, and two kinds of placement."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from support.models import Residual
from support.zoo import mean_loss
from torch_recompute import Choice, Plan
from torch_recompute.commands.report_data import Clock, Reported, collect
from torch_recompute.simulation.training_step import TrainingStep


def pair() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return nn.Sequential(*(Residual(32) for _ in range(4)), nn.BatchNorm1d(32)), (torch.ones(512, 32),)


def task() -> tuple[nn.Module, tuple[torch.Tensor], Callable[[Any], torch.Tensor]]:
    """For the command line: the pair and its loss."""
    return *pair(), mean_loss


BY_HAND = Plan(
    (Choice(("0",), labels=("block",)), Choice(("1",), labels=("block",)), Choice(("2",), keep=("up",))), "a hand"
)

TO_HOST = Plan((Choice(("0",), store="host"), Choice(("1",), store="host"), Choice(("2",))), "a hand")
INPUT = 512 * 32 * 4  # bytes of what each block of the pair is given


def clock(**changes: Any) -> Clock:
    model, args = pair()
    said = {"optimizer": torch.optim.AdamW, "device": "h100", **changes}
    return Clock(TrainingStep(model, args, loss=mean_loss, **said))


def seen(plan: Plan = BY_HAND, points: int = 4, title: str = "") -> Reported:
    """A report on a plan, on a data sheet's device."""
    timer = clock()
    return collect(plan, timer.frontier(plan, points), timer, title=title)
