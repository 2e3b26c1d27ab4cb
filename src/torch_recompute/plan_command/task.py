"""What a command line asks to be planned: the model, its batch, the optimizer and the device, and words for them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .._loop import COMMON, Loop
from .._models import OPTIMIZERS, asked, loop_of
from ..plan.plan import Plan
from ..plan.planned import planned
from ..plan.profile import Profile
from ..plan.solve import frontier
from ..planning.planner import Loss, Planner

POINTS = 10


@dataclass(frozen=True)
class Task:
    """A step to plan.

    Attributes:
        word: What the user called the model.
        model: The model.
        batch: A tuple of positional or a dictionary of keyword arguments.
        optimizer: Its word.
        device: What the seconds are of; None for where the model is.
        offload: Whether, or how much, host memory may be used.
        loss: From the model's output to a scalar, where that was said.
        loop: The training loop.
    """

    word: str
    model: nn.Module
    batch: tuple[Any, ...] | dict[str, Any]
    optimizer: str
    device: str | None
    offload: bool | str = False
    loss: Loss = None
    loop: Loop = COMMON

    @staticmethod
    def of(args: argparse.Namespace) -> Task:
        """The task of a command line.

        Raises:
            ArgumentError: The model cannot be had, or is not one that the options describe.
        """
        (model, batch, loss), _ = asked(args)
        assert batch is not None
        meta = all(parameter.is_meta for parameter in model.parameters())
        device = args.device or ("h100" if meta else None)
        optimizer = args.optimizer or "adamw"
        return Task(args.model, model, batch, optimizer, device, args.offload, loss, loop_of(args))

    def planner(self) -> Planner:
        """Knows what the step costs."""
        args, kwargs = (self.batch, None) if isinstance(self.batch, tuple) else ((), self.batch)
        how: dict[str, Any] = {"optimizer": OPTIMIZERS[self.optimizer], "loss": self.loss, "loop": self.loop}
        return Planner(self.model, args, kwargs, device=self.device, offload=self.offload, **how)

    @property
    def parameters(self) -> int:
        """How many there are."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def dtypes(self) -> list[str]:
        """Those of the parameters."""
        return sorted({str(parameter.dtype).removeprefix("torch.") for parameter in self.model.parameters()})

    @property
    def inputs(self) -> dict[str, list[int]]:
        """The shapes of the tensors in the batch."""
        named = self.batch.items() if isinstance(self.batch, dict) else enumerate(self.batch)
        return {str(name): list(value.shape) for name, value in named if isinstance(value, torch.Tensor)}

    def __str__(self) -> str:
        shapes = ", ".join(f"{name} {' x '.join(map(str, shape))}" for name, shape in self.inputs.items())
        return (
            f"{self.word}: {type(self.model).__name__}, {self.parameters:,} parameters in {' and '.join(self.dtypes)}; "
            f"{shapes or 'no tensors'}; optimizer {self.optimizer}"
        )

    def as_data(self) -> dict[str, Any]:
        """The task as plain data."""
        return {
            "model": self.word,
            "class": type(self.model).__name__,
            "parameters": self.parameters,
            "dtypes": self.dtypes,
            "inputs": self.inputs,
            "optimizer": self.optimizer,
            "offload": self.offload,
            **self.loop.words,
        }


def curve(profile: Profile, most: int = POINTS) -> list[Plan]:
    """So many plans at most along the whole curve of budget against seconds, the least budget first."""
    points = frontier(profile.costs, most)
    return [planned(profile, profile.costs, point, point.peak_bytes) for point in points]
