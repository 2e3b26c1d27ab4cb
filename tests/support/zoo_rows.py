"""What is found of a model of the zoo once, and serves the tests of several files: its steps without a plan.

A test takes the fixture `row` by `each_row` of `zoo.py`; all tests of a row run one after the other, in one worker.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from allocated import levels_in
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from support.zoo import Built, build, plans, scalar_loss, step
from torch_recompute import Plan, measure
from torch_recompute.memory import Measurement


def tensors_in(*values: Any) -> list[Tensor]:
    """The tensors in some nests."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class Steps:
    """Steps in a loop that holds the output until the next one has its own, as most loops do, or in one that does not.

    An optimizer steps in each, if there is one.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        *,
        hold: bool = True,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.model, self.inputs, self.hold, self.optimizer = model, inputs, hold, optimizer
        self.out: Any = None
        self.loss: Any = None

    def __call__(self) -> None:
        torch.manual_seed(1)
        if self.hold:
            self.out = self.model(**self.inputs)
            self.loss = scalar_loss(self.out)
            self.loss.backward()
        else:
            scalar_loss(self.model(**self.inputs)).backward()
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad()

    def measured(self) -> Measurement:
        """What `measure` says of the second step."""
        self()
        with measure(self.model, self.optimizer).track(*tensors_in(self.inputs, self.out, self.loss)) as memory:
            self()
        return memory


def allocated(make: Callable[[], Built], hold: bool = True) -> int:
    """The peak of the second of two steps, by the allocator's events from before the model is built."""
    gc.collect()  # what is freed inside counts, too
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        steps = Steps(*make(), hold=hold)
        steps()
        second = time.time_ns()
        steps()
    return max(level for when, level in levels_in(profiler) if when > second)


class Row:
    """A model of the zoo, and what is found of its step without a plan."""

    def __init__(self, name: str) -> None:
        self.name = name

    def build(self) -> Built:
        """The model and its inputs, made again."""
        return build(self.name)

    @cached_property
    def plans(self) -> dict[str, Plan]:
        """Every plan of Megatron's words that fits the model."""
        return plans(self.build()[0])

    @cached_property
    def plain(self) -> dict[str, Tensor]:
        """Loss, gradients and buffers of the first step."""
        return step(*self.build())

    @cached_property
    def measured(self) -> Measurement:
        """What is measured of the second step."""
        return Steps(*self.build()).measured()
