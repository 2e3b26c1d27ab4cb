"""A plan for calls of several sizes: each is planned by itself, for one budget.

The largest comes first, because a budget in words ("fit", or a share of what recomputation can free) is turned into
bytes by it; the others get the same bytes. Before anything is planned, the shapes are looked at.

Rejected: one profile, with bytes as a polynomial of the length. A step is planned in seconds, there are few sizes, and
the simulation of each keeps the promise where a fit would only come near it (a mask that is made from some length on,
another kernel of attention).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import nn

from .. import errors
from ..plan.plan import Plan, SizeClass, shape_in_words
from ..plan.sizes import parameters, size_of

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Planning(Protocol):
    """What plans one size."""

    def plan(self, budget: int | float | str, solver: str = "auto") -> Plan:
        """The plan for a budget."""
        ...


def calls_of(examples: Sequence[tuple[Any, ...] | dict[str, Any]], kwargs: dict[str, Any]) -> list[Call]:
    """The calls that examples are of.

    Args:
        examples: Tuples of positional arguments, or dictionaries of keyword arguments.
        kwargs: Keyword arguments of every call.
    """
    calls: list[Call] = []
    for example in examples:
        if isinstance(example, tuple):
            calls.append((example, kwargs))
        elif isinstance(example, dict):
            calls.append(((), kwargs | example))
        else:
            raise errors.ArgumentError(errors.bad_example(example))
    return calls


def plan_sizes(
    model: nn.Module,
    calls: Sequence[Call],
    planner: Callable[[tuple[Any, ...], dict[str, Any]], Planning],
    budget: int | float | str,
    solver: str,
) -> Plan:
    """The plan for some calls, from small to large.

    Args:
        model: The model.
        calls: The arguments of each.
        planner: Makes what plans a call.
        budget: See `make_plan`.
        solver: See `make_plan`.
    """
    names = parameters(model)
    shapes = [size_of(names, *call) or () for call in calls]
    Plan(sizes=tuple(SizeClass(shape) for shape in shapes))  # refuses what does not rise
    largest: Plan | None = None
    sizes: list[SizeClass] = []
    for shape, call in zip(reversed(shapes), reversed(calls), strict=True):
        try:
            plan = planner(*call).plan(budget, solver)
        except errors.BudgetError as error:
            text = errors.size_does_not_fit(shape_in_words(shape), str(error))
            raise errors.BudgetError(text, error.smallest, error.solution) from None
        assert plan.prediction is not None
        budget = plan.prediction.budget_bytes
        largest = largest or plan
        sizes.insert(0, SizeClass(shape, plan.choices, plan.prediction))
    assert largest is not None
    return replace(largest, sizes=tuple(sizes))
