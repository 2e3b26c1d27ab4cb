"""`simulate`: a training step with a plan in it, on fake tensors; the step itself is `simulation/`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .. import errors
from ..memory.loop import Loop
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
    hold_output: bool = True,
    accumulate: int = 1,
    set_to_none: bool = True,
    rounding: int | None = None,
) -> Simulation:
    """Simulates a training step on fake tensors: its memory and its FLOPs, without running anything.

        result = simulate(model, (batch,), plan=plan, optimizer=torch.optim.AdamW)
        print(result)
        result.peak_bytes, result.by_category, result.saved_by_module, result.flops["replay"]

    The step is one from the middle of training, in the loop

        for batch in loader:
            out = model(**batch)
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    so the optimizer has its state from the start, the batch is on the device, and `out` holds the model's output (the
    logits) through backward, the optimizer's step and the next forward. Say `hold_output=False` for a loop that lets go
    of it, as `model(**batch).loss.backward()` does. It runs on a copy whose parameters are fake, so the model may lie
    on the meta device and be of any size; the model itself, its gradients and all random states are left as they were.
    Bytes are counted as `measure` counts them; `torch.autocast` around this call is around the step.

    What decides something is real: arguments of integers and booleans keep their values, so a model that looks at its
    attention mask (as those of transformers do, to leave out one that masks nothing) does what it would do in a real
    run. Where a value depends on a weight (which expert a token goes to), an even choice is assumed, and
    `result.assumed` says so. The kernels are those of the device: on a build without CUDA a simulation is of the CPU's,
    which save other things for attention and dropout. What kernels take while they run (convolutions, mostly) is found
    by running such an operation once, alone, on tensors of zeros; where that cannot be done, `result.assumed` says so.

    Args:
        model: The model. One with a plan in it is simulated with that; hooks are copied with it and run. Sharded
            parameters (`fully_shard`) are refused.
        args: The positional arguments of one call. Nothing in them is changed; they may lie on the meta device, where
            integers are taken to be ones.
        kwargs: Its keyword arguments.
        plan: A plan to apply to the copy.
        loss: From the model's output to a scalar. It may be left out where the output has a `.loss` or `["loss"]`, or
            where one scalar in it requires grad.
        optimizer: From a list of parameters to an optimizer (`torch.optim.AdamW`), or an optimizer of the model's
            parameters; without one the step ends after backward.
        device: Where the step is to run: "cpu", or the accelerator of this machine; by default where the model is, and
            for one on meta the accelerator if there is one, else the CPU.
        hold_output: Whether the output is alive until the next forward returns; else it is gone in backward.
        accumulate: How many forwards and backwards come before the optimizer's step. Bytes are those of the last, which
            finds the gradients of the others; FLOPs those of all.
        set_to_none: Whether the gradients are gone when forward begins; False for `zero_grad(set_to_none=False)`, and
            for a `zero_grad()` between forward and backward.
        rounding: What the size of each storage is rounded up to a multiple of, in bytes; by default 512 on CUDA, as its
            allocator does, and 1 elsewhere.

    Returns:
        The figures, as plain data.

    Raises:
        ArgumentError: An argument is not of its kind, the plan does not fit, a tensor cannot be copied as a fake, or
            there is no `loss` and the output does not tell.
        RecomputeError: The model reads values that a simulation cannot know, or its copy uses the model itself.
    """
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
        loop=Loop(hold_output, accumulate, set_to_none),
        rounding=rounding,
    )
