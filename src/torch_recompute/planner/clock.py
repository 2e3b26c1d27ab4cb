"""A whole step by the clock, so that the prices of single operations add up to what a step really takes.

Problem. An operation that is run alone finds its inputs in the cache, its memory at hand and nothing else to do; in a
step it does not, and between operations Python runs. Sums of single operations come out too small: by a little for
large products, by half for small ones and for what only moves memory.

Idea. Run the step that the plan is for, and scale. All replays are scaled by one number, so the choice does not depend
on it and comes first, and what is run never needs more memory than was asked for. Where the step without recomputation
would, it is put together from parts that do not: the forward without gradients, and the backward less all that replays
take, the engine's part included. What the plan adds is the difference, and that over the sum of the prices is the
scale: so the cost of the engine is in it, too.

Invariants. The step is that of a copy: its parameters are new ones over the same memory, so that gradients and hooks of
parameters are not touched, and everything else is copied, buffers and the batch with memory of their own. The
optimizer's step is not run, since it would change the weights; its operations stay priced one by one. Random states are
put back. Nothing is run where other ranks could be waited for.

Rejected: one scale for everything, from the step without recomputation. It says nothing of how much larger a plan's
step is, and that step often does not fit. Running each segment alone, which needs inputs that are made up.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from .. import _torch
from ..observer import Observer, Running, observing
from ..plan.apply import apply
from ..plan.cost import Costs, Graph, Kind, Option, Solution
from ..plan.observe import Stamp, between, stamp
from ..plan.plan import Plan
from ..state import DEFAULT
from .prices import now, on

TIMES, MOST_TIMES = 5, 20
ENOUGH, LONGEST = 1.0, 30.0  # seconds: after the one no more than TIMES are run, after the other none


@dataclass(frozen=True)
class Clocked:
    """Seconds of a step that was run: medians over the runs.

    Attributes:
        plain: The forward with neither gradients nor regions.
        forward: The forward and the loss.
        backward: The backward, replays included.
        replays: The replays in it, with all that the engine does around them.
    """

    plain: float
    forward: float
    backward: float
    replays: float

    @property
    def step(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward

    def times(self, count: int) -> Clocked:
        """So many of these steps."""
        return Clocked(self.plain * count, self.forward * count, self.backward * count, self.replays * count)

    @property
    def without_regions(self) -> float:
        """Forward and backward without regions, put together."""
        return min(self.plain, self.forward) + self.backward - self.replays


@dataclass(frozen=True)
class Scale:
    """What prices of single operations are multiplied by.

    Attributes:
        replays: For what is run again.
        step_seconds: What the step without recomputation takes.
        ran: What was run, in words.
    """

    replays: float
    step_seconds: float
    ran: str

    @staticmethod
    def of(regions: Clocked | None, plain: Clocked | None, added: float, optimizer: float) -> Scale:
        """From a step that was run with regions, one that was run without, or both.

        Args:
            regions: The one with regions.
            plain: The one without.
            added: What the prices say that the regions add.
            optimizer: The price of the optimizer's step.
        """
        if regions is None:
            assert plain is not None
            return Scale(1.0, plain.step + optimizer, "without regions")
        without = regions.without_regions if plain is None else plain.step
        more = max(regions.step - without, regions.replays)  # times are noisy, and replays are not free
        ran = "with these regions" if plain is None else "without regions and with those of the smallest peak"
        return Scale(more / added if added and more else 1.0, without + optimizer, ran)

    def __str__(self) -> str:
        return f"scaled to a step that was run {self.ran}: what regions add x {self.replays:.2f}"

    def __call__(self, costs: Costs) -> Costs:
        """The costs in these seconds."""
        kinds = {
            name: Kind(tuple(map(self._option, kind.options)), kind.graph and self._graph(kind.graph))
            for name, kind in costs.kinds.items()
        }
        return replace(costs, kinds=kinds, step_seconds=self.step_seconds)

    def solution(self, solution: Solution) -> Solution:
        """A solution in these seconds."""
        options = tuple(map(self._option, solution.options))
        return replace(solution, options=options, seconds=solution.seconds * self.replays)

    def _option(self, option: Option) -> Option:
        return replace(option, seconds=option.seconds * self.replays)

    def _graph(self, graph: Graph) -> Graph:
        return replace(graph, nodes=tuple(replace(node, seconds=node.seconds * self.replays) for node in graph.nodes))


def obstacle(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> str:
    """Why a step of a model cannot be run here; empty where it can."""
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        return "other ranks could be waited for"
    leaves = [x for x in _torch.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    for tensor in (*model.parameters(), *model.buffers(), *leaves):
        if tensor.device.type != device.type:
            return f"a tensor is on {tensor.device.type} and not on {device.type}"
    return ""


def clock(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Callable[[Any], torch.Tensor],
    plan: Plan,
    device: torch.device,
) -> Clocked:
    """Runs forward and backward of a copy of a model, once to warm up and then some times, and takes the time.

    Args:
        model: The model, whose tensors lie on the device.
        args: The positional arguments of one call; copies of them are used.
        kwargs: Its keyword arguments.
        loss: From the model's output to a scalar.
        plan: What the copy gets.
        device: Where it runs.
    """
    states = [(ambient, ambient.capture()) for ambient in DEFAULT]
    try:
        with torch.inference_mode(False), torch.enable_grad(), on(device):
            same = _copy(model)
            apply(same, plan)
            began = time.perf_counter()
            found = [_step(same, args, kwargs, loss, device)]  # warms up
            while len(found) < 2 or _go_on(len(found), time.perf_counter() - began):
                found.append(_step(same, args, kwargs, loss, device))
    finally:
        for ambient, state in states:
            ambient.restore(state)
    return Clocked(*(median(times) for times in zip(*found[1:], strict=True)))


def _go_on(times: int, spent: float) -> bool:
    return times <= (TIMES if spent > ENOUGH else MOST_TIMES) and spent < LONGEST


def _copy(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters are new ones over the same memory."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        made = memo[id(parameter)] = nn.Parameter(parameter.detach(), parameter.requires_grad)
        for attribute, value in vars(parameter).items():
            setattr(made, attribute, value)
    return copy.deepcopy(model, memo)


def _step(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Callable[[Any], torch.Tensor],
    device: torch.device,
) -> tuple[float, float, float, float]:
    """Seconds of one forward without gradients, of one with them, of its backward, and of the replays in that."""
    with torch.no_grad():
        early = now(device)
        loss(model(*_fresh(args), **_fresh(kwargs)))
    replays = Replays(device)
    start = now(device)
    with observing(replays):
        value = loss(model(*_fresh(args), **_fresh(kwargs)))
    turn = now(device)
    value.backward()
    end = now(device)
    model.zero_grad()
    return start - early, turn - start, end - turn, replays.seconds()


class Replays(Observer):
    """Takes the time of all replays of the regions that it observes; one inside another counts once.

    Args:
        device: Where they run; on CUDA events are taken, so that a replay is not waited for.
    """

    def __init__(self, device: torch.device) -> None:
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

    def seconds(self) -> float:
        """Of all replays so far."""
        return sum(between(*moments) for moments in self._moments)


def _fresh(arguments: Any) -> Any:
    """Copies of the tensors in some arguments, which the model may change."""
    leaves, spec = _torch.tree_flatten(arguments)
    made = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in leaves]
    return _torch.tree_unflatten(made, spec)
