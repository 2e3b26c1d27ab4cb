"""A simulated step on a clock: when each operation ends, and what each phase and each module's replays take.

A simulation orders operations and does not time them. A device's prices do, one operation after the other, so the
clock is the sum of what ran before: seconds of operations, without gaps between them. For a device by its data sheet
that is `Prediction.step_seconds`; where operations are timed on this machine a plan's seconds are also scaled to whole
steps that were run, which cannot be said of a single moment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from .._loop import COMMON, Loop
from ..plan.apply import apply
from ..plan.plan import Plan
from ..planning.hosts import stores_for
from ..planning.ops import Op, op_of
from ..planning.planner import Loss, MakeOptimizer
from ..planning.prices import Measured, Roofline, prices_for, where
from ..simulation import Simulation, simulate_step


class Span(NamedTuple):
    """A stretch of the step in one phase.

    Attributes:
        phase: "forward", "loss", "backward", "replay" or "optimizer".
        start: Seconds since the step began.
        end: Likewise.
    """

    phase: str
    start: float
    end: float


@dataclass(frozen=True)
class Timed:
    """A step and its clock.

    Attributes:
        simulation: The step.
        ends: When each event ended, in seconds since the step began; 0 for what was there before.
        spans: The phases in order.
        replayed: Seconds of replays, by path of the module that ran again.
        hosted: Bytes in host memory after each event; empty where nothing is sent there.
        sent: Bytes that went there, by path of the module that was about to run.
    """

    simulation: Simulation
    ends: dict[int, float]
    spans: tuple[Span, ...]
    replayed: dict[str, float]
    hosted: dict[int, int]
    sent: dict[str, int]

    def in_host(self, event: int) -> int:
        """Bytes in host memory after an event; one that is no operation changes nothing."""
        return self.hosted.get(event, self.hosted.get(event - 1, 0))

    def end(self, event: int) -> float:
        """When an event ended; one that is no operation ends with the operation before it."""
        return self.ends.get(event, self.ends.get(event - 1, 0.0))

    @property
    def seconds(self) -> float:
        """What all operations take."""
        return self.spans[-1].end if self.spans else 0.0


class Clock:
    """Simulates steps of one model with different plans, and times them.

    Args:
        model: The model.
        args: The positional arguments of one call.
        kwargs: Its keyword arguments.
        loss: From the model's output to a scalar.
        optimizer: From a list of parameters to an optimizer, or an optimizer of the model's parameters.
        device: What the seconds are of, as for `make_plan`.
        loop: The training loop around the call.

    Attributes:
        model: As given.
        args: As given.
        kwargs: As given.
        device: What the device is called; known after the first step.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        *,
        loss: Loss = None,
        optimizer: MakeOptimizer = None,
        device: torch.device | str | None = None,
        loop: Loop = COMMON,
    ) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs or {}
        self._asked = device
        self._price: Roofline | Measured | None
        place = where(device, model)
        self._price = place.roofline
        self.device = ""
        self._step: dict[str, Any] = {"loss": loss, "optimizer": optimizer, "loop": loop, **place.step}

    def timed(self, plan: Plan) -> Timed:
        """The step with a plan."""
        ran: list[Op | None] = []
        held: list[int] = []
        stores = stores_for(plan, self.model, self._asked)

        def watch(phase: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            ran.append(op_of(func, args, kwargs, out))
            held.append(sum(store.host_bytes for store in stores.values()))

        simulation = simulate_step(
            *(self.model, self.args, self.kwargs),
            prepare=lambda copy: apply(copy, plan, stores=stores),
            watch=watch,
            **self._step,
        )
        if self._price is None:
            self._price = prices_for(self.model, simulation.device)
        self.device = self._price.name
        return _timed(simulation, ran, held if stores else [], self._price)


def _timed(simulation: Simulation, ran: list[Op | None], held: list[int], price: Callable[[Op], float]) -> Timed:
    now = 0.0
    ends = {0: now}
    spans: list[Span] = []
    replayed: dict[str, float] = {}
    for place, op in zip(simulation.operations, ran, strict=True):
        seconds = 0.0 if op is None else price(op)
        if spans and spans[-1].phase == place.phase:
            spans[-1] = spans[-1]._replace(end=now + seconds)
        else:
            spans.append(Span(place.phase, now, now + seconds))
        now += seconds
        ends[place.event] = now
        if place.phase == "replay":
            replayed[place.module] = replayed.get(place.module, 0.0) + seconds
    sent: dict[str, int] = {}
    for place, before, after in zip(simulation.operations, [0, *held], held, strict=False):
        if after > before:
            sent[place.module] = sent.get(place.module, 0) + after - before
    hosted = {place.event: nbytes for place, nbytes in zip(simulation.operations, held, strict=False)}
    return Timed(simulation, ends, tuple(spans), replayed, hosted, sent)
