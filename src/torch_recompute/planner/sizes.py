"""A plan for calls of several sizes: each is planned by itself, for one budget.

The largest comes first, because a budget in words ("fit", or a share of what recomputation can free) is turned into
bytes by it; the others get the same bytes, and with "fit" each less where the allocator would run out of memory. Before
anything is planned, the shapes are looked at.

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

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from .. import errors
from .._torch import tensors_in
from .._torch.tensors import each_tensor
from ..memory.batch import Batch, ExampleCall, call_of
from ..memory.budget import Budget, Limit
from ..plan.plan import Plan, SizeClass, shape_in_words
from ..plan.sizes import parameters, size_of
from ..simulation.training_step import TrainingStep
from .hosts import NO_OPTIONS, PlanOptions, simulate_under
from .planner import Planner

FINENESS = 64
MOST = 5  # sizes shorter than the longest that are found


def plan_sizes(
    step: TrainingStep,
    sizes: Sequence[Batch | int] | str,
    budget: Budget | Limit,
    plan_options: PlanOptions = NO_OPTIONS,
) -> Plan:
    """The plan for calls of several sizes; see `make_plan`."""
    if not isinstance(sizes, str):
        return plan_calls(_planners(step, calls_of(sizes, step), plan_options), budget)
    if sizes != "all":
        raise errors.ArgumentError(
            f"sizes={sizes!r} is not a choice of sizes.\n"
            '  Write sizes="all" for every length up to that of the call that is given, or the lengths: '
            "sizes=[512, 2048]."
        )
    return _plan_all(step, budget, plan_options)


def calls_of(examples: Sequence[Batch | int], step: TrainingStep) -> list[ExampleCall]:
    """The calls that sizes are of, given as examples, or as lengths of the step's call."""
    if any(isinstance(length, (int, float)) for length in examples):
        wrong = next((length for length in examples if type(length) is not int or length < 1), None)
        if wrong is not None:
            raise errors.ArgumentError(
                f"sizes holds lengths of sequences and {errors.say(wrong)}; lengths are whole numbers above 0, and are "
                "not mixed with examples of calls.\n"
                "  Write one or the other:  make_plan(model, batch, budget=..., sizes=[512, 2048])\n"
                "                           make_plan(model, budget=..., sizes=[short, long])"
            )
        names = parameters(step.model)
        lengths = Lengths(names, *step.call)
        calls = [lengths(length) for length in sorted({length for length in examples if isinstance(length, int)})]
        return _rising(names, calls)
    if type(step.args) is not tuple or step.args:
        raise errors.ArgumentError(
            f"make_plan was given a batch ({errors.say(step.args)}) and sizes that are batches, too.\n"
            "  Write one or the other:  make_plan(model, budget=..., sizes=[short, long])"
        )
    calls = [call_of("make_plan", step.model, example, step.kwargs) for example in examples]
    return _rising(parameters(step.model), calls)


def _rising(names: Sequence[str], calls: list[ExampleCall]) -> list[ExampleCall]:
    """The calls, where each is larger than the one before."""
    Plan(sizes=tuple(SizeClass(size_of(names, *call) or ()) for call in calls))  # refuses what does not rise
    return calls


def plan_calls(planners: Iterable[Planner], budget: Budget | Limit, meant: Limit | None = None) -> Plan:
    """The plan for the calls of some planners, the largest first; `meant` are the bytes of the budget, if known."""
    largest: Plan | None = None
    sizes: list[SizeClass] = []
    for planner in planners:
        shape = size_of(parameters(planner.step.model), *planner.step.call) or ()
        try:
            plan = planner.plan(budget, meant)
        except errors.BudgetError as error:
            text = f"sizes: for calls of {shape_in_words(shape)}, {error!s}"
            raise errors.BudgetError(text, error.smallest, error.solution) from None
        assert plan.prediction is not None
        meant = meant or Limit(plan.prediction.budget_bytes, plan.prediction.budget)
        largest = largest or plan
        sizes.insert(0, SizeClass(shape, plan.choices, plan.prediction))
    assert largest is not None
    return replace(largest, sizes=tuple(sizes))


def _planners(step: TrainingStep, calls: Sequence[ExampleCall], plan_options: PlanOptions) -> Iterator[Planner]:
    """Makes the planners of a step with some calls that rise, the largest first, each when it is asked for."""
    return (
        Planner(replace(step, args=args, kwargs=kwargs), plan_options=plan_options) for args, kwargs in reversed(calls)
    )


def _plan_all(step: TrainingStep, budget: Budget | Limit, plan_options: PlanOptions) -> Plan:
    """The plan for every length up to that of the step's call."""
    names = parameters(step.model)
    lengths = Lengths(names, *step.call)
    top = Planner(step, plan_options=plan_options)
    largest = top.plan(budget)
    assert largest.prediction is not None
    allowed = Limit(largest.prediction.budget_bytes, largest.prediction.budget)

    def fits(plan: Plan, length: int) -> bool:
        args, kwargs = lengths(length)
        return simulate_under(replace(step, args=args, kwargs=kwargs), plan).peak_bytes <= allowed

    curve = top.curve(allowed, MOST) if largest.choices else []
    found = {longest(partial(fits, plan), lengths.length) for plan in curve}
    calls = [lengths(length) for length in sorted(found) if length]
    smaller = plan_calls(_planners(step, calls, plan_options), budget, allowed) if calls else Plan()
    last = SizeClass(size_of(names, *step.call) or (), largest.choices, largest.prediction)
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

    Attributes:
        dim: The dimension of the first tensor that is the length.
        length: The length of the call.

    Raises:
        ArgumentError: It cannot be told where the sequence is.
    """

    dim = 1

    def __init__(self, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._call = args, kwargs
        shape = size_of(names, args, kwargs)
        if shape is None:
            raise errors.ArgumentError(_no_sequence("no tensor"))
        if 0 in shape or (self.dim and len(shape) not in (2, 3)):
            raise errors.ArgumentError(_no_sequence(f"a first tensor of shape {shape}"))
        self.length = shape[self.dim]
        if self.dim and shape.count(self.length) > 1:
            raise errors.ArgumentError(_no_sequence(f"a first tensor of shape {shape}, in which it could be two"))

    def __call__(self, length: int) -> ExampleCall:
        """The call at another length."""
        if length == self.length:
            return self._call
        tokens = next(iter(tensors_in(self._call)), None)

        @functools.cache  # labels may be the tokens
        def at_length(tensor: torch.Tensor) -> torch.Tensor:
            return self._at(tensor, length, positions=tensor is not tokens)

        with torch.no_grad():
            return each_tensor(self._call, at_length)

    def _at(self, tensor: torch.Tensor, length: int, *, positions: bool) -> torch.Tensor:
        found, at = tensor, torch.arange(length, device=tensor.device)
        for dim, size in enumerate(tensor.shape):
            if size != self.length:
                continue
            places = found.index_select(dim, at % self.length)
            if positions and _counts(found, dim):  # which go on
                places += (at // self.length * self.length).view(-1, *[1] * (tensor.ndim - dim - 1))
            found = places
        return found.requires_grad_(tensor.requires_grad)


def _counts(tensor: torch.Tensor, dim: int) -> bool:
    """Whether each number of a tensor is one more than the one before it, along a dimension."""
    integer = not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype is not torch.bool
    return integer and not tensor.is_meta and tensor.shape[dim] > 1 and bool((tensor.diff(dim=dim) == 1).all())


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
