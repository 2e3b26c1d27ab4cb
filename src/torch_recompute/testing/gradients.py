"""`assert_same_gradients`: `verify`, as an assertion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from .. import errors
from ..plan import Plan
from ..verifying import Verification, compare_calls, verify


def _same_as_what(both: bool) -> str:
    """Text for gradients that are to be the same as those of nothing, or of two things."""
    given = "both plan= and plain=" if both else "neither plan= nor plain="
    return (
        f"assert_same_gradients needs to know what to compare with, but got {given}.\n"
        "  Write assert_same_gradients(model, (x,), plan=plan) for a plan, or "
        "assert_same_gradients(with_regions, (x,), plain=without) for regions in the code."
    )


def assert_same_gradients(
    model: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    plan: Plan | None = None,
    plain: Callable[..., Any] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> Verification:
    """Fails if a step leaves another output, gradient, buffer or random state with regions than without.

        assert_same_gradients(model, (batch,), plan=plan)           # a model, and the plan to be applied
        assert_same_gradients(with_regions, (batch,), plain=block)  # a module or function with regions in its code

    On a CPU the same means the same bits; where two plain steps differ, no more than they do. Everything is left as it
    was.

    Args:
        model: The model without a plan in it, or with `plain` what has regions.
        args: The positional arguments of the call.
        kwargs: Its keyword arguments.
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
        raise errors.ArgumentError(_same_as_what(plan is not None))
    if plain is not None:
        found = compare_calls(model, plain, args, kwargs, loss=loss)
    else:
        found = verify(cast("nn.Module", model), args, kwargs, plan=cast("Plan", plan), loss=loss)
    if not found:
        raise AssertionError(str(found))
    return found
