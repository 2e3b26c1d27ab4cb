"""What a command line asks to be planned: the model, its batch, the optimizer and the device, and words for them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from .. import errors
from .._models import batch_for, load
from ..plan.plan import Plan
from ..plan.planned import planned
from ..plan.profile import Profile
from ..plan.solve import frontier
from ..planning.planner import Planner

POINTS = 10

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
)
OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer] | None] = MappingProxyType(
    {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "none": None}
)


@dataclass(frozen=True)
class Task:
    """A step to plan.

    Attributes:
        word: What the user called the model.
        model: The model.
        batch: A tuple of positional or a dictionary of keyword arguments.
        optimizer: Its word.
        device: What the seconds are of; None for where the model is.
    """

    word: str
    model: nn.Module
    batch: tuple[Any, ...] | dict[str, Any]
    optimizer: str
    device: str | None

    @staticmethod
    def of(args: argparse.Namespace) -> Task:
        """The task of a command line.

        Raises:
            ArgumentError: The model cannot be had, or is not one that the options describe.
        """
        for option in ("batch", "sequence"):
            value = getattr(args, option)
            if value is not None and value < 1:
                raise errors.ArgumentError(errors.not_a_size(f"--{option}", value))
        model, batch = load(args.model, None if args.dtype is None else DTYPES[args.dtype])
        if batch is None:
            batch = batch_for(model, args.model, args.batch, args.sequence)
        else:
            for option in ("batch", "sequence"):
                if getattr(args, option) is not None:
                    raise errors.ArgumentError(errors.made_by_a_function(f"--{option}", args.model))
        meta = all(parameter.is_meta for parameter in model.parameters())
        return Task(args.model, model, batch, args.optimizer or "adamw", args.device or ("h100" if meta else None))

    def planner(self) -> Planner:
        """Knows what the step costs."""
        args, kwargs = (self.batch, None) if isinstance(self.batch, tuple) else ((), self.batch)
        return Planner(self.model, args, kwargs, optimizer=OPTIMIZERS[self.optimizer], device=self.device)

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
        }


def curve(profile: Profile, most: int = POINTS) -> list[Plan]:
    """So many plans at most along the whole curve of budget against seconds, the least budget first."""
    points = frontier(profile.costs, most)
    return [planned(profile, profile.costs, point, point.peak_bytes) for point in points]
