"""A plan for calls of several sizes: each is planned by itself, for one budget.

The largest comes first, because a budget in words ("fit", or a share of what recomputation can free) is turned into
bytes by it; the others get the same bytes. Before anything is planned, the shapes are looked at.

With "all", the sizes are found (`lengths.py`): the lengths of the one example at which a step begins to need more.

Rejected: one profile, with bytes as a polynomial of the length, for all of it. The simulation of each size keeps the
promise where a fit would only come near it (a mask that is made from some length on, another kernel of attention). A
fit is good for finding the lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import nn

from .. import errors
from ..plan.plan import Plan, SizeClass, shape_in_words
from ..plan.sizes import parameters, size_of
from .lengths import Call, Lengths, longest

MOST = 5  # sizes shorter than the longest that are found


class Planning(Protocol):
    """What plans one size."""

    def plan(self, budget: int | float | str, solver: str = "auto") -> Plan:
        """The plan for a budget."""
        ...

    def curve(self, budget: int, most: int) -> list[Plan]:
        """Plans whose peaks lie above a budget, from those that replay the most to that without regions."""
        ...


def calls_of(
    examples: Sequence[tuple[Any, ...] | dict[str, Any] | int],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    model: nn.Module,
) -> list[Call]:
    """The calls that sizes are of.

    Args:
        examples: Tuples of positional arguments, or dictionaries of keyword arguments; or lengths of one call.
        args: The positional arguments of the one call.
        kwargs: Its keyword arguments, or keyword arguments of every call.
        model: What is called.
    """
    if any(type(length) is int for length in examples):
        wrong = next((length for length in examples if type(length) is not int or length < 1), None)
        if wrong is not None:
            raise errors.ArgumentError(
                f"sizes holds lengths of sequences and {errors.say(wrong)}; lengths are whole numbers above 0, and are "
                "not mixed with examples of calls.\n"
                "  Write one or the other:  make_plan(model, (batch,), budget=..., sizes=[512, 2048])\n"
                "                           make_plan(model, budget=..., sizes=[(short,), (long,)])"
            )
        lengths = Lengths(parameters(model), args, kwargs)
        return [lengths(length) for length in examples if isinstance(length, int)]
    if args:
        raise errors.ArgumentError(
            f"make_plan was given {len(args)} positional arguments of the model and sizes, which are examples of whole "
            "calls.\n"
            "  Write one or the other:  make_plan(model, budget=..., sizes=[(short,), (long,)])"
        )
    calls: list[Call] = []
    for example in examples:
        if isinstance(example, tuple):
            calls.append((example, kwargs))
        elif isinstance(example, dict):
            calls.append(((), kwargs | example))
        else:
            raise errors.ArgumentError(
                f"sizes holds {errors.say(example)}, where an example of a call is expected.\n"
                "  Write a tuple of positional arguments or a dictionary of keyword arguments for each size, with "
                "tensors of that size:\n"
                "      sizes=[(batch[:, :length],) for length in (512, 2048, 8192)]"
            )
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
            text = f"sizes: for calls of {shape_in_words(shape)}, {error!s}"
            raise errors.BudgetError(text, error.smallest, error.solution) from None
        assert plan.prediction is not None
        budget = plan.prediction.budget_bytes
        largest = largest or plan
        sizes.insert(0, SizeClass(shape, plan.choices, plan.prediction))
    assert largest is not None
    return replace(largest, sizes=tuple(sizes))


def plan_all_sizes(
    model: nn.Module,
    call: Call,
    planner: Callable[[tuple[Any, ...], dict[str, Any]], Planning],
    peak: Callable[[Plan, Call], int],
    budget: int | float | str,
    solver: str,
) -> Plan:
    """The plan for every length up to that of a call.

    Args:
        model: The model.
        call: The arguments of the longest call.
        planner: Makes what plans a call.
        peak: The bytes of a call's step with a plan.
        budget: See `make_plan`.
        solver: See `make_plan`.
    """
    names = parameters(model)
    lengths = Lengths(names, *call)
    top = planner(*call)
    largest = top.plan(budget, solver)
    assert largest.prediction is not None
    allowed = largest.prediction.budget_bytes

    def at(plan: Plan) -> Callable[[int], int]:
        return lambda length: peak(plan, lengths(length))

    curve = top.curve(allowed, MOST) if largest.choices else []
    found = {longest(at(plan), allowed, lengths.length) for plan in curve}
    calls = [lengths(length) for length in sorted(found) if 0 < length < lengths.length]
    smaller = plan_sizes(model, calls, planner, allowed, solver) if calls else Plan()
    last = SizeClass(size_of(names, *call) or (), largest.choices, largest.prediction)
    return replace(largest, sizes=(*smaller.sizes, last))
