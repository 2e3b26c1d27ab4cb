"""A plan for calls of several sizes: each is planned by itself, for one budget.

The largest comes first, because a budget in words ("fit", or a share of what recomputation can free) is turned into
bytes by it; the others get the same bytes. Before anything is planned, the shapes are looked at.

Where the sequence is. The first tensor of a call is its tokens, [batch, sequence], or their embeddings, [batch,
sequence, width]. Any dimension of another tensor that is as long as the sequence is taken to be the sequence: labels,
masks of one dimension or two, places. Where the length is also that of another dimension this cannot be told, and is
refused. A call is shortened by leaving out its end, and lengthened by repeating it, so ids stay valid.

Which lengths ("all"). Whatever a step keeps is a polynomial of the length, at most of degree two (scores that are
written out). So the peak under given choices is nearly quadratic, and a parabola through the three nearest lengths that
are known says where it meets the budget. That length is simulated, and becomes one of the three, until the longest
length that fits is known to a sixty-fourth of the longest of all. The choices are taken from the curve of the longest
call, from those that just fit there to none at all. So there is a class for each length at which a call begins to need
more, and nothing is left to be learned when a length appears that was not foreseen. A parabola only proposes: what fits
is known by simulation, and each length that was found is planned by itself. A mask that is made from some length on, or
another kernel, costs some simulations more.

Rejected: planning a length when it first appears. Its step would wait for the planner, on every rank at another time,
and compiled models would be compiled again. One profile for all lengths, with bytes as a polynomial of the length: the
simulation of each size keeps the promise where a fit would only come near it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .. import _torch, errors
from ..plan.plan import Plan, SizeClass, shape_in_words
from ..plan.sizes import parameters, size_of
from .planner import Planner

Call = tuple[tuple[Any, ...], dict[str, Any]]

FINENESS = 64
TRUSTED = 8  # as many peaks are enough for a parabola; where they are not, halves are tried
MOST = 5  # sizes shorter than the longest that are found


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
    planner: Callable[[tuple[Any, ...], dict[str, Any]], Planner],
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
    planner: Callable[[tuple[Any, ...], dict[str, Any]], Planner],
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


# --- calls of several lengths from one example ---


def _no_sequence(given: str) -> str:
    """Text for a call whose sequence cannot be found."""
    return (
        f"sizes are lengths, but the call has {given}, so it cannot be told where its sequence is: the first tensor is "
        "expected to be tokens [batch, sequence] or embeddings [batch, sequence, width], and no other dimension of it "
        "to be as long as the sequence.\n"
        "  Give an example of each size instead:  make_plan(model, budget=..., sizes=[(short,), (long,)])"
    )


class Lengths:
    """One call at other lengths.

    Args:
        names: The names of the model's arguments, in their order.
        args: The positional arguments of the call.
        kwargs: Its keyword arguments.

    Attributes:
        length: Of the call itself.

    Raises:
        ArgumentError: It cannot be told where the sequence is.
    """

    def __init__(self, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._call = args, kwargs
        shape = size_of(names, args, kwargs)
        if shape is None:
            raise errors.ArgumentError(_no_sequence("no tensor"))
        if len(shape) not in (2, 3) or 0 in shape:
            raise errors.ArgumentError(_no_sequence(f"a first tensor of shape {shape}"))
        self.length = shape[1]
        if shape.count(self.length) > 1:
            raise errors.ArgumentError(_no_sequence(f"a first tensor of shape {shape}, in which it could be two"))

    def __call__(self, length: int) -> Call:
        """The call at another length."""
        if length == self.length:
            return self._call
        leaves, spec = _torch.tree_flatten(self._call)
        with torch.no_grad():
            made = [self._at(leaf, length) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return _torch.tree_unflatten(made, spec)

    def _at(self, tensor: torch.Tensor, length: int) -> torch.Tensor:
        found = tensor
        for dim, size in enumerate(tensor.shape):
            if size == self.length:
                found = found.index_select(dim, torch.arange(length, device=tensor.device) % self.length)
        return found.requires_grad_(tensor.requires_grad)


def longest(peak: Callable[[int], int], budget: int, most: int) -> int:
    """The longest length whose step fits into a budget, or one that is shorter by less than a share of `most`.

    Args:
        peak: Bytes at a length; does not fall with it.
        budget: In bytes.
        most: A length that does not fit.

    Returns:
        A length that was tried and fits; 0 if none does.
    """
    fits, exceeds = 0, most
    known = {length: peak(length) for length in {max(1, most // 4), max(1, most // 2)}}
    while True:
        fits = max([fits, *(length for length, found in known.items() if found <= budget)])
        exceeds = min([exceeds, *(length for length, found in known.items() if found > budget)])
        if exceeds - fits <= max(1, most // FINENESS):
            return fits
        length = _proposed(known, budget, fits, exceeds) if len(known) < TRUSTED else (fits + exceeds) // 2
        known[length] = peak(length)


def _proposed(known: dict[int, int], budget: int, fits: int, exceeds: int) -> int:
    """Where a parabola through the three nearest points meets the budget, or the middle; between the two lengths."""
    near = sorted(known, key=lambda length: abs(known[length] - budget))[:3]
    middle = (fits + exceeds) // 2
    if len(near) < 3:
        return middle
    a, b, c = near
    slope = (known[b] - known[a]) / (b - a)
    bend = ((known[c] - known[a]) / (c - a) - slope) / (c - b)
    # known[a] + slope (x - a) + bend (x - a)(x - b) = budget, as a quadratic in x - a
    linear, rest = slope + bend * (a - b), known[a] - budget
    under = linear * linear - 4 * bend * rest
    if linear <= 0 or under < 0:
        return middle
    root = a - 2 * rest / (linear + math.sqrt(under))
    margin = (exceeds - fits) // 8  # so that a bracket shrinks from both sides
    return min(max(math.floor(root), fits + max(1, margin // 4)), exceeds - max(1, margin // 4))
