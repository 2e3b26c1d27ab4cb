"""Assertions for tests of your own: gradients are the same with regions, and the peak is below a limit.

The pytest plugin (`torch_recompute_pytest`) makes fixtures and a marker of these; they raise `AssertionError`, know
nothing of pytest, and serve in any framework. A failure names the gradient, how much it differs, and the region; or the
categories of memory, and the operation at the peak.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn

from . import errors
from .doctor.verify import Verification, compare_calls, verify
from .memory.batch import Batch, call_of
from .memory.budget import read_budget
from .memory.measurement import Measurement
from .plan import Plan
from .simulation.training_step import with_labels

__all__ = ["assert_same_gradients", "check_peak", "read_limit"]


def assert_same_gradients(
    model: Callable[..., Any],
    args: Batch = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    plan: Plan | None = None,
    plain: Callable[..., Any] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> Verification:
    """Fails if a step leaves another output, gradient, buffer or random state with regions than without.

        assert_same_gradients(model, batch, plan=plan)           # a model, and the plan to be applied
        assert_same_gradients(with_regions, batch, plain=block)  # a module or function with regions in its code

    On a CPU the same means the same bits; where two plain steps differ, no more than they do. Everything is left as it
    was.

    Args:
        model: The model without a plan in it, or with `plain` what has regions.
        args: A batch, see `make_plan`.
        kwargs: More keyword arguments of the call.
        plan: The plan that is to change nothing.
        plain: The same as `model`, without regions: another object with the same names of parameters, or one that
            shares them.
        loss: From the output to a scalar; by default the output's `.loss`, else the mean of its first floating tensor.

    Returns:
        What was compared.

    Raises:
        AssertionError: Something differs; the text names the first gradient, how much, and the likely regions.
        ArgumentError: Neither a plan nor `plain` is given, or both, or an argument is not of its kind.
    """
    __tracebackhide__ = True
    if (plan is None) == (plain is None):
        raise errors.ArgumentError(
            "assert_same_gradients needs to know what to compare with, but got "
            f"{'neither plan= nor plain=' if plan is None else 'both plan= and plain='}.\n"
            "  Write assert_same_gradients(model, x, plan=plan) for a plan, or "
            "assert_same_gradients(with_regions, x, plain=without) for regions in the code."
        )
    args, kwargs, loss = with_labels("assert_same_gradients", model, args, kwargs, loss)
    call = call_of("assert_same_gradients", model, args, kwargs)
    if plain is not None:
        found = compare_calls(model, plain, *call, loss=loss)
    else:
        found = verify(cast("nn.Module", model), *call, plan=cast("Plan", plan), loss=loss)
    if not found:
        raise AssertionError(str(found))
    return found


def read_limit(*args: object, **kwargs: object) -> int:
    """Returns the bytes that the arguments of the marker mean.

    Args:
        *args: One of them: "200MiB", "1.5GB", or an int, which is bytes.
        **kwargs: None.

    Raises:
        ArgumentError: There is none, or more, or it is no number of bytes: a share of something, or "fit".
    """
    found = read_budget(args[0]).bytes if len(args) == 1 and not kwargs else None
    if found is None:
        raise errors.ArgumentError(
            "@pytest.mark.peak_below takes one number of bytes, but got "
            f"{args!r}{f' and {kwargs!r}' if kwargs else ''}.\n"
            '  Write @pytest.mark.peak_below("200MiB"), with KB, MB, GB or KiB, MiB, GiB; or an int, which is bytes.'
        )
    return found


def check_peak(memory: Measurement, limit: int) -> None:
    """Fails if a measurement's peak is above a limit.

    Args:
        memory: The measurement.
        limit: The most bytes that are allowed.

    Raises:
        AssertionError: It is; the text says how much each category has of it, and at which operation it was.
    """
    reading = memory.on()
    if reading.peak_bytes <= limit:
        return
    at = max(reading.timeline, key=lambda sample: sample.live_bytes, default=None)
    parts = sorted(((name, count) for name, count in reading.by_category.items() if count), key=lambda part: -part[1])
    listed = "".join(f"\n  {name:12} {errors.size(count):>12}" for name, count in parts)
    write = "Most are no activations, which alone recomputation can spare: a smaller model, or a higher limit."
    if parts[0][0] == "activations":
        write = "Most are activations: put recompute(fn) around what makes them, or apply make_plan(model, args, ...)."
    raise AssertionError(
        f"peak memory is {errors.size(reading.peak_bytes)} on {reading.device}, and {errors.size(limit)} are allowed: "
        f"{errors.size(reading.peak_bytes - limit)} too many, at {(at and at.op) or 'the start'}.{listed}\n  {write}"
    )
