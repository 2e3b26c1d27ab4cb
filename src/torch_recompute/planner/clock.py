"""A whole step by the clock, so that the prices of single operations add up to what a step really takes.

An operation that is run alone finds its inputs in the cache, its memory at hand and nothing else to do, so sums of
single operations come out too small: by a little for large products, by half for small ones. So the step that the plan
is for is run, and all replays are scaled by one number: the choice does not depend on it and comes first, and what is
run never needs more memory than was asked for. The step without recomputation would, so it is this one less its replays
and less what regions take besides: the difference of two forwards that keep no tensor, with regions and without, and
the price of a region for each in backward, where their tensors are read. What all that takes over the sum of the prices
is the scale.

That step came out 1 % too short to 6 % too long for three models at three budgets. Put together from a forward without
gradients it was 2 to 6 % too short where steps are long; less replays alone, 28 % too long where they are short. Of the
differences the smallest counts, since those of long steps are mostly noise.

The step is that of a copy: its parameters are new ones over the same memory, so that gradients and hooks of parameters
are not touched, and everything else is copied, as are parameters that the forward writes to (a momentum encoder's). The
optimizer's step is not run, since it would change the weights; its operations stay priced one by one. Random states are
put back. Nothing is run where other ranks could be waited for.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import _torch
from .._torch.compiler import all_uncompiled
from .._torch.tensors import each_tensor
from ..memory.batch import fresh
from ..memory.meter import Stamp, between, stamp
from ..memory.saved import generators_as_before
from ..plan.apply import apply
from ..plan.plan import Plan
from ..simulation.copies import others_as_before, over_copies, reach_copies, reached_as_before
from ..state.observer import Observer, Running, observing
from .cost import Costs, Kind, Option, Solution, paid
from .prices import now, on

TIMES, MOST_TIMES = 3, 20
STEADY = 0.03  # as soon as the last TIMES steps took the same time except for this share, no more are run
BUSY = 0.15  # repeats that differ by more are of a busy machine
ENOUGH, LONGEST = 0.25, 30.0  # seconds: after the one no more than FEW are run, after the other none
FEW = 2
WAITING = 0.5  # a step whose thread waited for more of its time says little of it, and is not run again

Loss = Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class Clocked:
    """Seconds of a step that was run: the fewest of the runs, as for single operations, since noise only adds."""

    forward: float  # the forward and the loss
    backward: float  # the backward, replays included
    replays: float  # the replays in it, with all that the engine does around them
    regions: float = 0.0  # what regions take besides
    spread: float = 0.0  # see `spread_of`
    waited: float = 0.0  # the share of the time in which the thread did not run, on a CPU

    @property
    def step(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward

    def times(self, count: int) -> Clocked:
        """So many of these steps."""
        names = "forward", "backward", "replays", "regions"
        return replace(self, **{name: count * getattr(self, name) for name in names})


@dataclass(frozen=True)
class Scale:
    """Turns prices of single operations into seconds of whole steps."""

    replays: float  # the factor for what is run again
    step_seconds: float  # of the step without recomputation
    ran: str  # which steps were run, in words
    spread: float = 0.0  # see `Clocked`
    waited: float = 0.0

    @staticmethod
    def of(regions: Clocked | None, plain: Clocked | None, added: float, optimizer: float) -> Scale:
        """From a step that was run with regions, a plain one, or both, and the prices of what the regions add."""
        if regions is None:
            assert plain is not None
            return Scale(1.0, plain.step + optimizer, "without regions", plain.spread, plain.waited)
        without = regions.step - regions.replays - regions.regions if plain is None else plain.step
        more = max(regions.step - without, regions.replays)  # times are noisy, and replays are not free
        ran = "with these regions" if plain is None else "without regions and with those of the smallest peak"
        ways = [way for way in (regions, plain) if way is not None]
        spread, waited = max(way.spread for way in ways), max(way.waited for way in ways)
        return Scale(more / added if added and more else 1.0, without + optimizer, ran, spread, waited)

    def __str__(self) -> str:
        why = f"its repeats differed by {self.spread:.0%}" if self.spread > BUSY else ""
        if self.waited > WAITING:
            why = f"its threads waited for {self.waited:.0%} of the time, for one another or for other processes"
        noise = why and f" on a busy machine: {why}, so plan again on one that is idle"
        return f"replays scaled by {self.replays:.2f} to match a step that was run {self.ran}{noise}"

    def __call__(self, costs: Costs) -> Costs:
        """The costs in these seconds."""
        scaled = ((name, self._options(kind.options), kind.graph) for name, kind in costs.kinds.items())
        kinds = {name: Kind(options, paid(graph, self.replays)) for name, options, graph in scaled}
        return replace(costs, kinds=kinds, step_seconds=self.step_seconds)

    def solution(self, solution: Solution) -> Solution:
        """A solution in these seconds."""
        return replace(solution, options=self._options(solution.options), seconds=solution.seconds * self.replays)

    def _options(self, options: tuple[Option, ...]) -> tuple[Option, ...]:
        return tuple(replace(option, seconds=option.seconds * self.replays) for option in options)


def why_not_timed(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> str:
    """Why a step of a model cannot be run here; empty where it can."""
    group = torch.distributed
    if group.is_available() and group.is_initialized() and group.get_world_size() > 1:
        return "other ranks could be waited for"
    for tensor in (*model.parameters(), *model.buffers(), *_torch.tensors_in((args, kwargs))):
        if tensor.device.type != device.type:
            return f"a tensor is on {tensor.device.type} and not on {device.type}"
    return ""


def clock(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Loss,
    plan: Plan,
    device: torch.device,
    region: float = 0.0,
    written: Collection[str] = (),
) -> Clocked:
    """Runs forward and backward of a copy of a model under a plan, once to warm up and then some times.

    Long steps are run twice, the forwards to compare once; one that mostly waits for other processes is not run again.
    The model's tensors are on the device; of the arguments copies are used, and of the weights that the forward has
    `written`, by name. `region` is the price of a region.
    """
    with (
        generators_as_before(),
        reached_as_before(model, loss) as reached,
        torch.inference_mode(False),
        torch.enable_grad(),
        on(device),
    ):
        losses = dict(_copy(model, loss, written) for _ in range(2))
        bare, same = losses
        apply(same, plan)

        def forward(model: nn.Module) -> torch.Tensor:
            return losses[model](model(*each_tensor(args, fresh), **each_tensor(kwargs, fresh)))  # which it may change

        if reached.waiting:
            with all_uncompiled(), reached:  # sees what a step writes to, in one that is not timed
                _step(same, (), forward, device)
        began = time.perf_counter()
        both = (bare, same) if plan.choices else ()
        found = [_step(same, (), forward, device)]  # warms up
        while not _are_enough(found, time.perf_counter() - began):
            cheap = len(found) == 1 or time.perf_counter() - began <= ENOUGH
            found.append(_step(same, both if cheap else (), forward, device))
    timed = found[1:] or found
    forward_seconds, backward, replays = map(min, zip(*(step[:3] for step in timed), strict=True))
    added = min((step.added for step in timed if step.added is not None), default=0.0)
    regions = max(0.0, added) + region * timed[0].replayed
    spread, waited = spread_of([step.whole for step in timed]), min(step.waited for step in timed)
    return Clocked(forward_seconds, backward, replays, regions, spread, waited)


class _Step(NamedTuple):
    """Seconds of a step that was run, and the number of replays in it."""

    forward: float
    backward: float
    replays: float
    replayed: int
    waited: float
    added: float | None  # how far two forwards differ, where they were run

    @property
    def whole(self) -> float:
        return self.forward + self.backward


def _are_enough(found: Sequence[_Step], spent: float) -> bool:
    """Whether no more steps are run after some, of which the first warms up."""
    if spent > ENOUGH and (len(found) > FEW or found[-1].waited > WAITING):
        return True
    if len(found) > MOST_TIMES or (len(found) > 1 and spent >= LONGEST):
        return True
    steps = [step.whole for step in found[1:][-TIMES:]]
    return len(steps) == TIMES and max(steps) <= (1 + STEADY) * min(steps)


def spread_of(steps: Sequence[float]) -> float:
    """By what share the median of some repeats took longer than the fastest: one slow repeat is no busy machine."""
    return statistics.median(steps) / min(steps) - 1


def _copy(model: nn.Module, loss: Loss, written: Collection[str]) -> tuple[nn.Module, Loss]:
    """A copy of a model and its loss, which may reach the model; weights that are not written to share its memory."""
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        weight = parameter.detach().clone() if name in written else parameter.detach()
        made = memo[id(parameter)] = nn.Parameter(weight, parameter.requires_grad)
        for attribute, value in vars(parameter).items():
            setattr(made, attribute, value)
    made = copy.deepcopy(model, memo)
    reach_copies(made, memo)
    return made, over_copies(loss, memo)


def _step(
    model: nn.Module, both: Sequence[nn.Module], forward: Callable[[nn.Module], torch.Tensor], device: torch.device
) -> _Step:
    """Runs a forward and its backward, and `both` forwards to compare."""
    replays = Replays(device)
    ran, start = time.thread_time(), now(device)
    with observing(replays):
        value = forward(model)
    turn = now(device)
    with others_as_before(value, {*model.parameters()}):
        began = now(device)
        value.backward()
        end, ran = now(device), time.thread_time() - ran
    waited = max(0.0, 1 - ran / (end - start)) if device.type == "cpu" and end > start else 0.0
    del value
    model.zero_grad()
    moments = [now(device)]
    for each in both:
        with torch.autograd.graph.saved_tensors_hooks(_dropped, _dropped):
            forward(each)
        moments.append(now(device))
    without, with_regions = (b - a for a, b in pairwise(moments)) if both else (0.0, 0.0)
    added = with_regions - without if both else None
    return _Step(turn - start, end - began, replays.seconds(), replays.count, waited, added)


def _dropped(_: object) -> Any:
    """Keeps nothing of a tensor that a forward saves."""


class Replays(Observer):
    """Takes the time of all replays of the regions that it observes; one inside another counts once."""

    def __init__(self, device: torch.device) -> None:
        # On CUDA events are taken, so that a replay is not waited for.
        self._now: Callable[[], Stamp] = stamp if device.type == "cuda" else partial(now, device)
        self._moments: list[tuple[Stamp, Stamp]] = []
        self._inside = False

    def around(self, running: Running) -> AbstractContextManager[Any]:
        """Takes the time of a replay."""
        return self._timed() if running.kind == "rebuild" and not self._inside else nullcontext()

    @contextmanager
    def _timed(self) -> Generator[None]:
        self._inside, start = True, self._now()
        try:
            yield
        finally:
            self._inside = False
            self._moments.append((start, self._now()))

    @property
    def count(self) -> int:
        """The number of replays."""
        return len(self._moments)

    def seconds(self) -> float:
        """Of all replays so far."""
        return sum(between(*moments) for moments in self._moments)
