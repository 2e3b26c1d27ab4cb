"""A module recorded alone, as the planner records a segment of a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from torch_recompute._torch import tree_flatten, tree_unflatten
from torch_recompute._torch.fakes import FakeTensorMode
from torch_recompute.planner.alone import SegmentCall
from torch_recompute.planner.ops import Op
from torch_recompute.planner.options import SegmentOptions
from torch_recompute.planner.segments import CapturedCall
from torch_recompute.simulation.copies import Faker
from torch_recompute.simulation.devices import ITSELF, Host
from torch_recompute.simulation.fake_mode import FakeMode


def flops(op: Op) -> float:
    """A price of an operation by its FLOPs."""
    return float(op.flops)


def segment_options(
    module: nn.Module, *given: torch.Tensor, host: Host = ITSELF, price: Callable[[Op], float] = flops
) -> SegmentOptions:
    """The options of a module that is called with some tensors."""
    fakes = FakeTensorMode()
    faker = Faker(fakes, torch.device("cpu"))
    copied: nn.Module = faker.copy(module)
    args, _ = faker.arguments(given, {})
    captured = CapturedCall(FakeMode(fakes, lambda: ""), ())
    leaves, spec = tree_flatten((args, {}))
    captured.calls.append(SegmentCall(((copied, tuple(leaves), partial(tree_unflatten, spec=spec)),)))
    captured.paths.append("")
    captured.kinds.append("0")
    captured.chained.append(False)
    return SegmentOptions(captured, 0, price, host, frees=False)
