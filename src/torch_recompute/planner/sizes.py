"""A plan for calls of several sizes: each is planned by itself, for one budget.

The largest comes first, because a budget in words ("fit", or a share of what recomputation can free) is turned into
bytes by it; the others get the same bytes. Before anything is planned, the shapes are looked at.

The first tensor of a call is its tokens, [batch, sequence], or their embeddings, [batch, sequence, width]. Any
dimension of another tensor that is as long as the sequence is taken to be the sequence: labels, masks, positions. A
call is shortened by leaving out its end, and lengthened by repeating it, so ids stay valid.

For sizes="all", choices are taken from the curve of the longest call, from those that just fit there to none at all,
and for each the longest length that fits is found by bisection, to a sixty-fourth of the longest of all. So there is a
class for each length at which a call begins to need more. Rejected: planning a length when it first appears, for which
its step would wait, on every rank at another time; one profile for all lengths, with bytes as a polynomial of the
length, which would only come near the promise that the simulation of each size keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .. import _torch, errors
from ..memory.batch import Batch, call_of
from ..plan.budget import Limit
from ..plan.plan import Plan, SizeClass, shape_in_words
from ..plan.sizes import parameters, size_of
from .planner import Planner

Call = tuple[tuple[Any, ...], dict[str, Any]]

FINENESS = 64
MOST = 5  # sizes shorter than the longest that are found


def calls_of(
    examples: Sequence[Batch | int],
    args: Any,
    kwargs: dict[str, Any],
    model: nn.Module,
) -> list[Call]:
    """The calls that sizes are of, given as examples, or as lengths of the call with `args` and `kwargs`."""
    if any(type(length) is int for length in examples):
        wrong = next((length for length in examples if type(length) is not int or length < 1), None)
        if wrong is not None:
            raise errors.ArgumentError(
                f"sizes holds lengths of sequences and {errors.say(wrong)}; lengths are whole numbers above 0, and are "
                "not mixed with examples of calls.\n"
                "  Write one or the other:  make_plan(model, batch, budget=..., sizes=[512, 2048])\n"
                "                           make_plan(model, budget=..., sizes=[short, long])"
            )
        lengths = Lengths(parameters(model), args, kwargs)
        return [lengths(length) for length in examples if isinstance(length, int)]
    if type(args) is not tuple or args:
        raise errors.ArgumentError(
            f"make_plan was given a batch ({errors.say(args)}) and sizes that are batches, too.\n"
            "  Write one or the other:  make_plan(model, budget=..., sizes=[short, long])"
        )
    return [call_of("make_plan", model, example, kwargs) for example in examples]


def plan_sizes(
    model: nn.Module,
    calls: Sequence[Call],
    planner: Callable[[tuple[Any, ...], dict[str, Any]], Planner],
    budget: int | float | str,
    solver: str,
) -> Plan:
    """The plan for some calls, from small to large; `planner` makes what plans a call."""
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
        budget = Limit(plan.prediction.budget_bytes, plan.prediction.budget)
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
    """The plan for every length up to that of a call; `peak` gives the bytes of a call's step with a plan."""
    names = parameters(model)
    lengths = Lengths(names, *call)
    top = planner(*call)
    largest = top.plan(budget, solver)
    assert largest.prediction is not None
    allowed = Limit(largest.prediction.budget_bytes, largest.prediction.budget)
    curve = top.curve(allowed, MOST) if largest.choices else []
    found = {
        longest(lambda length, plan=plan: peak(plan, lengths(length)) <= allowed, lengths.length) for plan in curve
    }
    calls = [lengths(length) for length in sorted(found) if length]
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
        "  Give an example of each size instead:  make_plan(model, budget=..., sizes=[short, long])"
    )


class Lengths:
    """One call at other lengths than its own, given the names of the model's arguments in their order.

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


def longest(fits: Callable[[int], bool], most: int) -> int:
    """The longest length that fits, or one that is shorter by less than a share of `most`, which does not; 0 if none.

    A length that fits is one that was tried, and whatever is shorter than it fits too.
    """
    found, exceeds = 0, most
    while exceeds - found > max(1, most // FINENESS):
        middle = (found + exceeds) // 2
        if fits(middle):
            found = middle
        else:
            exceeds = middle
    return found
