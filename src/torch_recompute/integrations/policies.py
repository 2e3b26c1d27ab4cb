"""Makes the regions of a policy of a configuration file, and measures what they drop and cost for a training's log.

A policy is a string such as "full", or a mapping of Megatron's fields; `plan_of` says which. `apply` makes its regions;
`StepFigures` measures them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from torch import nn

from .. import errors, plan
from ..memory.budget import read_budget
from ..memory.elastic import Elastic
from ..memory.loop import Loop
from ..memory.meter import Stamp, between, stamp
from ..plan import Applied, Plan
from ..plan.apply import not_applicable
from ..plan.config import Policy, plan_of
from ..stores import Store

__all__ = ["Applied", "Policy", "StepFigures", "apply", "check_loop", "held_for", "one_of", "plan_of"]

WATCHED = 2  # steps at a time: bytes, FLOPs and decisions are those of the first, seconds those of the second


def apply(
    model: nn.Module, policy: Policy, *, stores: Mapping[str, Store] | None = None, elastic: Elastic | None = None
) -> Applied:
    """Makes the regions of a plan in a model.

        handle = apply(model, "full")

    Args:
        model: The model, before a trainer, `torch.compile` or a wrapper for several devices takes it.
        policy: A `Plan`, a `RecomputeConfig`, its fields as a mapping, or a string as above.
        stores: The store for each word that a plan's choices name.
        elastic: The `Elastic` that the regions share, as for `torch_recompute.apply`.

    Returns:
        A handle; its `remove()` undoes it all.

    Raises:
        ArgumentError: The policy cannot be met by this model, or the model is recomputed already.
    """
    if not isinstance(model, nn.Module):
        raise errors.ArgumentError(not_applicable(model, policy))
    return plan.apply(model, plan_of(policy, model), stores=stores, elastic=elastic)


Budget = int | float | str


def one_of(what: str, policy: object, budget: Budget | None, *, must: bool = False) -> Budget | None:
    """Returns the budget of a callback, which takes a policy or a budget.

    Args:
        what: The callback.
        policy: Its policy, or None.
        budget: Its budget, or None.
        must: Whether there has to be one of them.

    Raises:
        ArgumentError: There are both, or neither, or the budget is none.
    """
    if (budget is None) == (policy is None) and (must or budget is not None):
        raise errors.ArgumentError(
            f"{what} takes a policy, which says what to recompute, or a budget, for which it plans; but got "
            f"{'neither' if budget is None else f'{errors.say(policy)} and budget={budget!r}'}.\n"
            f'  Write {what}("full"), or {what}(budget="24GiB").'
        )
    if budget is not None:
        read_budget(budget)
    return budget


def held_for(model: nn.Module, handle: Applied | None) -> Applied | None:
    """Returns the handle of a callback that is used again; None where its plan is in no part of this model."""
    return handle if handle is not None and any(module is handle.model for module in model.modules()) else None


class StepFigures:
    """Figures of a plan for a log, from two steps that are watched now and then; all other steps are left alone.

    Args:
        every: The number of steps from one watching to the next; None to watch the first two steps only.

    Raises:
        ArgumentError: `every` is not a number of at least 3.
    """

    def __init__(self, every: int | None) -> None:
        if every is not None and (type(every) is not int or every <= WATCHED):
            raise errors.ArgumentError(
                "every= is the number of steps from one taking of figures to the next, at least 3, but got "
                f"{errors.say(every)}. Two steps are watched each time.\n"
                "  Write every=100, or leave it out: then the first two steps are watched, and no other."
            )
        self._every = every
        self._steps = self._at = 0
        self._watch = ExitStack()
        self._start: Stamp | None = None
        self._handle: Applied | None = None
        self._times: tuple[Stamp, Stamp] | None = None

    @property
    def watching(self) -> bool:
        """Returns whether the present step is watched."""
        return self._start is not None

    def begin(self, handle: Applied) -> None:
        """Begins to watch a step that is to be watched; call it before each step."""
        self._at = self._steps if self._every is None else self._steps % self._every
        self._steps += 1
        if self._at == 0:
            self._handle = handle
            self._watch.enter_context(handle.watch())
        if self._at < WATCHED:
            self._start = stamp()

    def end(self) -> None:
        """Ends the watching after two steps; call it after each step."""
        if self._start is not None and self._at == WATCHED - 1:
            self._times = self._start, stamp()
            self._watch.close()
        self._start = None

    def close(self) -> None:
        """Ends the watching at once."""
        self._start = None
        self._watch.close()

    def taken(self) -> dict[str, float]:
        """Returns the figures of steps that were watched since the last call, if any."""
        if self._handle is None or self._times is None:
            return {}
        report, times, self._times = self._handle.report(), self._times, None
        figures: dict[str, float] = {}
        if any(row.saved_bytes is not None for row in report.rows):
            figures["recompute_saved_bytes"] = report.saved_bytes
        replays = sum((row.seconds or 0.0) * row.replays for row in report.rows) / WATCHED
        if replays:
            figures["recompute_replay_share"] = round(replays / between(*times), 4)
        carrying = sum(row.choice.carry for row in report.rows)
        if carrying or report.decisions:
            figures["recompute_routing_flips"] = report.flips
            figures["recompute_regions_carrying"] = carrying
        return figures


def check_loop(planned: Plan, words: Mapping[str, Any]) -> None:
    """Warns if a plan promises the peak of a loop that holds less than the trainer's.

    Args:
        planned: The plan.
        words: The trainer's loop, as `make_plan` takes it.
    """
    known, own = None if planned.prediction is None else planned.prediction.loop, Loop(**words)
    if known is not None and own.keeps_gradients and not known.keeps_gradients:
        options = ", ".join(f"{name}={value}" for name, value in own.words.items())
        warnings.warn(
            "The plan promises the peak of a loop in which gradients are gone when forward begins. In this trainer "
            "they are alive then, so the peak is higher by up to their bytes. Make the plan for its loop: "
            f"make_plan(..., {options}), which `training_loop` of this integration gives.",
            RuntimeWarning,
            stacklevel=4,
        )
