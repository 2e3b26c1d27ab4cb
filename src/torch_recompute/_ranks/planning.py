"""A plan for each rank of a pipeline, from one profile per kind of rank.

The middle ranks of a pipeline hold layers that differ in nothing but their numbers. They are profiled once; what
differs between them is how many microbatches they hold, so each has its own plan.

Seconds are those of operations on one rank: a microbatch's forward and backward with the collectives of its
tensor-parallel group, and the optimizer's step. From them follows a step of 1F1B, where a rank waits for the others
while the pipeline fills and drains: (microbatches + (ranks - 1) / chunks) times the slowest rank's microbatch. What is
sent between stages and between replicas is not counted; it overlaps, or does not depend on a plan.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from .. import errors
from .._compat.fakes import FakeTensorMode
from .._loop import Loop
from ..plan.cost import Option, Solution
from ..plan.inflight import one_f_one_b
from ..plan.plan import Plan
from ..plan.planned import bytes_of, choices_of, lines_of
from ..plan.prediction import Prediction
from ..planning.ops import Op, logging
from ..planning.planner import Planner
from ..planning.prices import sent_bytes
from ..planning.schedules import orders_named
from ..simulation.step import any_loss
from .flight import Instant, Taken, chosen, estimated, instants, seconds_at_least, taken
from .layout import Layout
from .model import Rank, ranks
from .optimizer import sharded

ROUNDS = 8
_STEP: dict[str, Any] = {"loss": any_loss, "loop": Loop(hold_output=False)}  # a rank sends its output, or its loss

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True)
class RankPlan:
    """What one rank of a pipeline is to do, and what it takes.

    Attributes:
        rank: Its place in the pipeline.
        layers: The numbers of its layers, by chunk.
        parameters: How many it holds.
        weight_bytes: Of these.
        gradient_bytes: Of the buffers that microbatches add to.
        optimizer_bytes: Of the optimizer's state, its share among the replicas.
        held: How many microbatches each chunk has in flight at the peak, the running one counted.
        activation_bytes: All else that lives at the peak.
        plain_peak_bytes: The peak with no region.
        microbatch_seconds: Of one microbatch with no region, forward and backward.
        replay_seconds: What the plan adds to it.
        optimizer_seconds: Of the optimizer's step.
        link_bytes: What the rank sends to its tensor-parallel group in one microbatch with no region.
        link_seconds: What that takes; counted in `microbatch_seconds`.
        plan: The plan, in the paths of the whole model.
    """

    rank: int
    layers: tuple[tuple[int, ...], ...]
    parameters: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    held: tuple[int, ...]
    activation_bytes: int
    plain_peak_bytes: int
    microbatch_seconds: float
    replay_seconds: float
    optimizer_seconds: float
    link_bytes: int
    link_seconds: float
    plan: Plan

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at any time."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes

    def as_data(self) -> dict[str, Any]:
        """The figures as plain data."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "plan"}
        return {**fields, "peak_bytes": self.peak_bytes}


def step_seconds(layout: Layout, plans: Sequence[RankPlan], *, plain: bool = False) -> float:
    """Seconds of a step of the pipeline; see the module's docstring."""
    each = [plan.microbatch_seconds + (0.0 if plain else plan.replay_seconds) for plan in plans]
    waits = (layout.pp - 1) / layout.vpp
    return (layout.microbatches + waits) * max(each) + max(plan.optimizer_seconds for plan in plans)


def _spread_does_not_fit(rank: int, budget: int, smallest: int, plain: int, fixed: int) -> str:
    """Text for a budget that a rank of a pipeline does not fit into."""
    return (
        f"budget={errors.size(budget)} is too small for rank {rank} of the pipeline, which needs the most: with the "
        f"plan that needs the least its peak is {errors.size(smallest, up=True)} ({smallest} bytes), with no region "
        f"{errors.size(plain)}; {errors.size(fixed)} of either are weights, gradients and optimizer state.\n"
        f"  Write --budget {errors.size(smallest, up=True).replace(' ', '')} or more, or spread the step over more "
        "ranks."
    )


class PipelinePlanner:
    """A model whose step is spread over ranks, and what is known of each.

    Args:
        model: The whole model, of transformers and on meta.
        word: What the user called it.
        layout: How the step is spread.
        tokens: In a sequence.
        optimizer: "adamw", "sgd" or "none".
        device: See `profile`.
    """

    def __init__(
        self, model: nn.Module, word: str, layout: Layout, tokens: int, optimizer: str, device: str | None
    ) -> None:
        self.layout = layout
        self._optimizer = optimizer
        orders = (
            orders_named("Interleaved1F1B", layout.pp, layout.microbatches, layout.vpp)
            if layout.vpp > 1
            else one_f_one_b(layout.pp, layout.microbatches)
        )
        known: dict[Any, RankPlanner] = {}
        self.ranks: list[RankPlanner] = []
        for rank in ranks(model, word, layout, tokens):
            key = _shape(rank)
            alike = known.get(key)
            found = RankPlanner(rank, instants(orders[rank.number], layout.pp), layout, optimizer, device, alike)
            known.setdefault(key, found)
            self.ranks.append(found)

    def plans(self, budget: int | float | str) -> list[RankPlan]:
        """A plan for each rank; the budget is that of each.

        Raises:
            BudgetError: A rank does not fit; it carries the least budget of the rank that needs the most.
        """
        found = [rank.plan(budget) for rank in self.ranks]
        worst = max(found, key=lambda plan: plan.peak_bytes)
        allowed = worst.plan.prediction
        assert allowed is not None
        if worst.peak_bytes > allowed.budget_bytes:
            fixed = worst.peak_bytes - worst.activation_bytes
            figures = allowed.budget_bytes, worst.peak_bytes, worst.plain_peak_bytes, fixed
            text = _spread_does_not_fit(worst.rank, *figures)
            raise errors.BudgetError(text, worst.peak_bytes, worst.plan)
        return found


def _shape(rank: Rank) -> tuple[Any, ...]:
    """What a rank holds and is called with, but for the numbers of its layers; equal for ranks that are alike."""
    sizes = tuple(map(len, rank.chunks))
    weights = tuple((tuple(parameter.shape), parameter.dtype) for parameter in rank.model.parameters())
    return sizes, weights, tuple(sorted(rank.batch)), rank.number == 0


class RankPlanner:
    """One rank.

    Args:
        rank: What it holds.
        found: The actions of its schedule that hold the most.
        layout: How the step is spread.
        optimizer: See `PipelinePlanner`.
        device: See `PipelinePlanner`.
        alike: A rank that is the same but for the numbers of its layers; it is not profiled again.
    """

    def __init__(
        self,
        rank: Rank,
        found: tuple[Instant, ...],
        layout: Layout,
        optimizer: str,
        device: str | None,
        alike: RankPlanner | None = None,
    ) -> None:
        self._rank = rank
        self._found = found
        self._layout = layout
        self._sizes = [len(chunk) for chunk in rank.chunks]
        if alike is None:
            make = sharded(optimizer, layout.dp)
            ran: Counter[tuple[str, Op]] = Counter()
            self.planner = Planner(rank.model, (), rank.batch, optimizer=make, device=device, ran=ran, **_STEP)
            self._optimizer_seconds = update_seconds(rank.model, make, self.planner.price)
            links = [(op, count) for (_, op), count in ran.items() if sent_bytes(op) is not None]
            self._link_bytes = sum((sent_bytes(op) or 0) * count for op, count in links)
            self._link_seconds = sum(self.planner.price(op) * count for op, count in links)
        else:
            self.planner = alike.planner
            self._optimizer_seconds = alike._optimizer_seconds
            self._link_bytes, self._link_seconds = alike._link_bytes, alike._link_seconds
        costs = self.planner.costs
        self._plain = tuple(costs.kinds[segment.kind].options[0] for segment in costs.segments)
        self._plain_taken = self._taken(self.planner.plain, self._plain)

    @property
    def profile(self) -> Any:
        """What is known of the rank."""
        return self.planner.profile

    def _taken(self, simulation: Any, options: Sequence[Option]) -> Taken:
        paths = [segment.path for segment in self.planner.costs.segments]
        return taken(simulation, paths, options, self._sizes, self._rank.received)

    def plan(self, budget: int | float | str) -> RankPlan:
        """The plan for a budget; one that does not fit is the one that needs the least."""
        plain_peak = self._plain_taken.peak(self._found)[0]
        wanted = bytes_of(budget, lambda: self._least[1].peak(self._found)[0], plain_peak, None)
        options, used = self._fitted(wanted)
        if used.peak(self._found)[0] > wanted:
            options, used = self._least
        return self._planned(options, used, wanted, plain_peak)

    @cached_property
    def _least(self) -> tuple[tuple[Option, ...], Taken]:
        """The choice that needs the least: one that fits into less than the one before, as long as there is one."""
        best = self._fitted(0)
        while True:
            peak = best[1].peak(self._found)[0]
            other = self._fitted(peak - 1)
            if other[1].peak(self._found)[0] >= peak:
                return best
            best = other

    def _fitted(self, budget: int) -> tuple[tuple[Option, ...], Taken]:
        """The choice for a budget by its simulation; the one that needs the least if none fits."""
        if self._plain_taken.peak(self._found)[0] <= budget:
            return self._plain, self._plain_taken
        costs, target = self.planner.costs, budget
        tried: dict[tuple[Option, ...], Taken] = {}
        for _ in range(ROUNDS):
            options, fits = chosen(costs, self._sizes, self._found, target)
            if options in tried:
                break
            simulation, costs = self.planner.simulated(options)
            tried[options] = self._taken(simulation, options)
            peak = tried[options].peak(self._found)[0]
            target = budget - max(0, peak - estimated(costs, options, self._sizes).peak(self._found)[0])
            if not fits and peak > budget:
                break
        fitting = [(options, used) for options, used in tried.items() if used.peak(self._found)[0] <= budget]
        if fitting:
            return min(fitting, key=lambda pair: sum(option.seconds for option in pair[0]))
        return min(tried.items(), key=lambda pair: pair[1].peak(self._found)[0])

    def _planned(self, options: tuple[Option, ...], used: Taken, wanted: int, plain_peak: int) -> RankPlan:
        layout, rank, profile = self._layout, self._rank, self.planner.profile
        peak, instant = used.peak(self._found)
        replays = sum(option.seconds for option in options)
        costs = profile.costs
        live = self.planner.plain.live_by_category
        weights, gradients = live["parameters"], live["gradients"]
        always = weights + gradients + live["optimizer"]
        between = always + live["activations"]  # what cuBLAS keeps
        least = seconds_at_least(costs, self._sizes, self._found, max(wanted, peak), between)
        microbatch = costs.step_seconds - self._optimizer_seconds
        step = layout.microbatches * microbatch + self._optimizer_seconds
        solution = Solution(options, peak, replays)
        prediction = Prediction(
            budget_bytes=wanted,
            peak_bytes=peak,
            plain_peak_bytes=plain_peak,
            step_seconds=step + layout.microbatches * replays,
            plain_step_seconds=step,
            replay_flops=layout.microbatches * sum(option.flops for option in options),
            bound_seconds=step + layout.microbatches * least,
            device=profile.device,
            solver="prices of bytes in flight",
            lines=lines_of(costs, solution, range(len(options))),
        )
        words = f"rank {rank.number} of a pipeline of {layout.pp}, tensor parallel {layout.tp}, {wanted:,} bytes"
        plan = self._renamed(Plan(choices_of(profile, solution), words, prediction))
        held = [0] * len(rank.chunks) if instant is None else list(instant.held)
        if instant is not None:
            held[instant.chunk] += 1
        return RankPlan(
            rank=rank.number,
            layers=rank.chunks,
            parameters=rank.parameters,
            weight_bytes=weights,
            gradient_bytes=gradients,
            optimizer_bytes=live["optimizer"],
            held=tuple(held),
            activation_bytes=peak - always,
            plain_peak_bytes=plain_peak,
            microbatch_seconds=microbatch,
            replay_seconds=replays,
            optimizer_seconds=self._optimizer_seconds,
            link_bytes=self._link_bytes,
            link_seconds=self._link_seconds,
            plan=plan,
        )

    def _renamed(self, plan: Plan) -> Plan:
        """The plan in the paths of this rank's layers, which may not be those that were profiled."""
        profiled = [segment.path for segment in self.planner.costs.segments]
        numbers = [layer for chunk in self._rank.chunks for layer in chunk]
        names = {old: f"{old.rpartition('.')[0]}.{number}" for old, number in zip(profiled, numbers, strict=True)}

        def renamed(path: str) -> str:
            old = next(name for name in names if path == name or path.startswith(name + "."))
            return names[old] + path[len(old) :]

        choices = tuple(dataclasses.replace(choice, paths=tuple(map(renamed, choice.paths))) for choice in plan.choices)
        return dataclasses.replace(plan, choices=choices)


def update_seconds(model: nn.Module, make: MakeOptimizer, price: Callable[[Op], float]) -> float:
    """Seconds of the optimizer's step for the parameters of a model.

    Args:
        model: The model.
        make: From a list of parameters to an optimizer.
        price: Seconds of an operation.
    """
    ran: Counter[Op] = Counter()
    with FakeTensorMode():
        fakes = [torch.empty(p.shape, dtype=p.dtype).requires_grad_(p.requires_grad) for p in model.parameters()]
        optimizer = make(fakes)
        optimizer.step()
        with logging(lambda op, *_: ran.update([op])):
            optimizer.step()
            optimizer.zero_grad()
    return sum(price(op) * count for op, count in ran.items())
