"""`apply` for policies in words, and figures of a plan for a training's log."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from torch import nn

from .. import errors, plan
from ..memory.loop import Loop
from ..plan import Applied
from ..plan.observe import Stamp, between, stamp
from ..stores import Store
from .policies import Policy, plan_of

__all__ = ["Applied", "StepFigures", "apply", "check_loop"]

WATCHED = 2  # steps at a time: bytes, FLOPs and decisions are those of the first, seconds those of the second


def apply(model: nn.Module, policy: Policy, *, stores: Mapping[str, Store] | None = None) -> Applied:
    """Makes the regions of a plan in a model.

        handle = apply(model, "full")

    Args:
        model: The model, before a trainer, `torch.compile` or a wrapper for several devices takes it.
        policy: A `Plan`, a `RecomputeConfig`, its fields as a mapping, or a string as in
            `torch_recompute.integrations.policies`.
        stores: The store for each word that a plan's choices name.

    Returns:
        A handle; its `remove()` undoes it all.

    Raises:
        ArgumentError: The policy cannot be met by this model, or the model is recomputed already.
    """
    if not isinstance(model, nn.Module):
        raise errors.ArgumentError(errors.not_applicable(model, policy))
    return plan.apply(model, plan_of(policy, model), stores=stores)


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
        """Called before each step."""
        self._at = self._steps if self._every is None else self._steps % self._every
        self._steps += 1
        if self._at == 0:
            self._handle = handle
            self._watch.enter_context(handle.watch())
        if self._at < WATCHED:
            self._start = stamp()

    def end(self) -> None:
        """Called after each step."""
        if self._start is not None and self._at == WATCHED - 1:
            self._times = self._start, stamp()
            self._watch.close()
        self._start = None

    def close(self) -> None:
        """Ends what is being watched."""
        self._start = None
        self._watch.close()

    def taken(self) -> dict[str, float]:
        """The figures of steps that were watched since the last call, if any."""
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


def check_loop(planned: plan.Plan, words: Mapping[str, Any]) -> None:
    """Warns if a plan promises the peak of a loop that holds less than the trainer's.

    Args:
        planned: The plan.
        words: The trainer's loop, as `make_plan` takes it.
    """
    known, own = None if planned.prediction is None else planned.prediction.loop, Loop(**words)
    if known is not None and own.keeps_gradients and not known.keeps_gradients:
        said = ", ".join(f"{name}={value}" for name, value in own.words.items())
        warnings.warn(
            "The plan promises the peak of a loop in which gradients are gone when forward begins. In this trainer "
            "they are alive then, so the peak is higher by up to their bytes. Make the plan for its loop: "
            f"make_plan(..., {said}), which `training_loop` of this integration gives.",
            RuntimeWarning,
            stacklevel=4,
        )
