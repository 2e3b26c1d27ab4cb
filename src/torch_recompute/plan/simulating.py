"""`simulate`: a training step with a plan in it, on fake tensors; the step itself is `simulation/`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .. import errors
from ..simulation import Simulation, simulate_step
from .apply import apply
from .plan import Plan


def simulate(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    plan: Plan | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | torch.optim.Optimizer | None = None,
    device: torch.device | str | None = None,
    accumulate: int = 1,
    rounding: int | None = None,
) -> Simulation:
    """Simulates a training step on fake tensors: its memory and its FLOPs, without running anything."""
    if plan is not None and not isinstance(plan, Plan):
        raise errors.ArgumentError(errors.not_applicable(model, plan))
    return simulate_step(
        model,
        args,
        kwargs,
        prepare=None if plan is None else lambda copy: apply(copy, plan),
        loss=loss,
        optimizer=optimizer,
        device=device,
        accumulate=accumulate,
        rounding=rounding,
    )
