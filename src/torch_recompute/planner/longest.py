"""The longest sequence, or the largest batch, that a budget holds, with its plan and plans for shorter ones.

The peak of a step rises with its length, so the longest is found by bisection. Each length on the way is one
simulation, with the plan that keeps the fewest bytes; where bisection has two peaks it goes to where the line between
them meets the budget, since from some length on the peak is nearly a line. The length that is found is planned. If its
own least plan leaves room, as one that takes more or fewer layers together may, the search goes on with that. What
comes out is a plan of `SIZES` lengths, each planned and simulated by itself.

Rejected: planning each length on the way, which takes ten times as long and comes to the same end; a formula of bytes
per token, which knows nothing of what the loss or a kernel holds.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from .. import errors
from .._text import doing, listed
from ..memory.budget import Budget, Limit, bytes_meant, read_budget
from ..memory.free import free_bytes
from ..plan.apply import apply
from ..plan.plan import Plan
from ..plan.sizes import parameters
from ..simulation import simulate_step
from ..training_step import TrainingStep
from .alternatives import held_by
from .hosts import NO_LEAVE, Leave, stores_for
from .layout import LayoutPlanner, LayoutRanks, RankPlan
from .planner import Planner
from .sizes import Call, Lengths, plan_calls

SIZES = 5
ROUNDS = 3
FINE = 256  # the length is found to this part of itself
UNIT = 64  # lengths are multiples of it, from `FROM` on
FROM = 1024
Peak = tuple[int, str]  # in bytes, and what it is made of


class Batches(Lengths):
    """One call with other numbers of items than its own, in the first dimension of its tensors."""

    dim = 0

    def _at(self, tensor: torch.Tensor, length: int) -> torch.Tensor:
        if tensor.shape[:1] != (self.length,):
            return tensor
        found = tensor.index_select(0, torch.arange(length, device=tensor.device) % self.length)
        return found.requires_grad_(tensor.requires_grad)


@dataclass
class Search(ABC):
    """The search for the most that a budget holds.

    Attributes:
        budget: In bytes, or "fit"; as it was written.
        batch: Whether the size of the batch is looked for, instead of the length of the sequence.
        most: The most that the model takes; None for no limit.
        grain: What lengths are multiples of.
        best: The most that is known to fit so far.
        best_peak_bytes: Its peak.
        interrupted: Set from outside to end the search before its next simulation. Python drops a `KeyboardInterrupt`
            that comes while a weak reference calls back, of which a simulation has thousands.
    """

    budget: object
    batch: bool = False
    most: int | None = None
    grain: int = field(default=1, init=False)
    best: int = field(default=0, init=False)
    best_peak_bytes: int = field(default=0, init=False)
    interrupted: bool = field(default=False, init=False)

    def asked(self) -> Budget:
        """Reads the budget.

        Raises:
            ArgumentError: It is a share.
        """
        asked = read_budget(self.budget)
        if asked.share is not None:
            raise errors.ArgumentError(
                f"budget={asked.said} is a share of the activation memory, which rises with what is looked for.\n"
                '  Write bytes, such as budget="80GB", or "fit".'
            )
        return asked

    def _planned(self, start: int, plan: Plan, allowed: Limit) -> Any:
        """Searches from a length, under the plan that keeps the least there; returns plans for the most that fits.

        Raises:
            BudgetError: Not one token, or not one item, fits.
        """
        for _ in range(ROUNDS):
            before = self.best
            self.search(partial(self._peak, plan, start), allowed, start)
            if self.best <= before * (1 + 4 / FINE):
                break
            start = self.best
            plan = self._least_plan(start)
        while True:
            lengths = self.lengths()
            try:
                return self._plans(lengths, allowed)
            except errors.BudgetError:  # the least plan of this length itself may need a little more
                if self.best <= self.grain:
                    raise
                self.less()

    @abstractmethod
    def _peak(self, plan: Plan, made_at: int, length: int) -> Peak:
        """The peak of a length under a plan that was made at another."""

    @abstractmethod
    def _least_plan(self, length: int) -> Plan:
        """The plan with which a length needs the least."""

    @abstractmethod
    def _plans(self, lengths: Sequence[int], allowed: Limit) -> Any:
        """The plans of some lengths within a budget."""

    def search(self, peak_of: Callable[[int], Peak], allowed: int, length: int) -> None:
        """Raises `best` as far as the budget goes, from some length."""
        below, above = (self.best, self.best_peak_bytes), (0, 0)
        while True:
            doing(f"simulating {'a batch' if self.batch else 'a sequence'} of {length:,}")
            if self.interrupted:
                raise KeyboardInterrupt
            peak, held = peak_of(length)
            if peak <= allowed:
                below = self.best, self.best_peak_bytes = length, peak
            else:
                above = length, peak
            if above[0] and above[0] - below[0] <= max(self._unit(below[0]), below[0] // FINE):
                if not below[0]:
                    raise errors.BudgetError(self._nothing_fits(allowed, peak, held), peak, None)
                return
            if length == self.most and not above[0]:
                return
            length = self._next(below, above, allowed)

    def _next(self, below: tuple[int, int], above: tuple[int, int], allowed: int) -> int:
        """The next length to try, between one that fits and one that does not, or above one that fits."""
        if not above[0]:
            return min(2 * below[0], self.most or 2 * below[0])
        if not below[0]:
            return max(1, above[0] // 2 // self.grain) * self.grain
        (low, least), (high, most), unit = below, above, self._unit(below[0])
        edge = max(1, (high - low) // 16)  # so that the stretch gets shorter on either side
        met = low + (high - low) * (allowed - least) // max(1, most - least)
        length = min(max(met, low + edge), high - edge)
        return max(length // unit * unit, low + unit) if unit > 1 else length

    def _unit(self, length: int) -> int:
        return math.lcm(UNIT, self.grain) if length >= FROM and not self.batch else self.grain

    def lengths(self) -> list[int]:
        """Returns the most that fits, and parts of it."""
        unit = self._unit(self.best)
        parts = (self.best * part // SIZES // unit * unit for part in range(1, SIZES))
        return sorted({self.best, *filter(None, parts)})

    def less(self) -> None:
        """Takes a little less than the most that was found."""
        unit = self.grain
        self.best -= max(unit, self.best // FINE // unit * unit)

    def _nothing_fits(self, allowed: Limit | int, peak: int, held: str) -> str:
        said = allowed.said if isinstance(allowed, Limit) else errors.size(allowed)
        tokens = "one token" if self.grain == 1 else f"{self.grain} tokens"
        one = "a batch of one" if self.batch else f"a sequence of {tokens}"
        return (
            f"budget={said} is too small for {one}, whose peak is {errors.size(peak, up=True)} ({peak} bytes): "
            f"{held}.\n"
            "  Write a budget of more than that, or another optimizer."
        )


class LongestOnRanks(Search):
    """The search for the most that a budget of each rank holds.

    Attributes:
        make: Makes the ranks of a layout, of one of two kinds, for a length.
    """

    def __init__(self, make: Callable[[Any, int], Any], budget: object, batch: bool, most: int | None) -> None:
        super().__init__(budget, batch, most)
        self.make = make

    def plans(self, start: int) -> list[tuple[int, Sequence[RankPlan]]]:
        """Returns some lengths with the plans of all ranks; the last is the most that fits.

        Raises:
            BudgetError: Not one token, or not one item, fits.
            ArgumentError: The budget is a share.
        """
        asked = self.asked()
        planner = self.make(LayoutPlanner, start)
        allowed = bytes_meant(asked, lambda: 0, planner.plain_bytes, None)
        self.grain = 1 if self.batch else planner.layout.ranks.divides_tokens
        return self._planned(start, planner.planner.leanest, allowed)

    def _peak(self, plan: Plan, made_at: int, length: int) -> Peak:
        ranks = self.make(LayoutRanks, length).under(plan)
        fullest = max(ranks, key=lambda rank: rank.peak_bytes)
        parts = sorted(fullest.made_of.items(), key=lambda part: -part[1])
        held = listed([f"{errors.size(nbytes)} {name}" for name, nbytes in parts if 100 * nbytes >= fullest.peak_bytes])
        return fullest.peak_bytes, f"{held}, on rank {fullest.rank} {fullest.where}"

    def _least_plan(self, length: int) -> Plan:
        return self.make(LayoutPlanner, length).least_plan

    def _plans(self, lengths: Sequence[int], allowed: Limit) -> list[tuple[int, Sequence[RankPlan]]]:
        found = [self.make(LayoutPlanner, length).plans(self.budget) for length in reversed(lengths)]
        return [*zip(lengths, reversed(found), strict=True)]


class Longest(Search):
    """The search for the most that a budget holds, of one device.

    Attributes:
        step: A step of some length.
        leave: What the plan may use besides recomputation.
    """

    def __init__(
        self,
        step: TrainingStep,
        budget: object,
        leave: Leave = NO_LEAVE,
        batch: bool = False,
        most: int | None = None,
    ) -> None:
        super().__init__(budget, batch, most)
        self.step, self.leave = step, leave

    def plan(self) -> Plan:
        """Returns the plan; its last size is the most that fits.

        Raises:
            BudgetError: Not one token, or not one item, fits.
            ArgumentError: The budget is a share, or it cannot be told where the sequence is.
        """
        asked = self.asked()
        calls = self._calls = (Batches if self.batch else Lengths)(parameters(self.step.model), *self.step.call)
        planner = self._planner(calls.length)
        free = partial(free_bytes, self.step.model, planner.plain.device, self.step.optimizer, self.step.call)
        allowed = bytes_meant(asked, lambda: 0, planner.plain.peak_bytes, free)
        # The least peak may be the optimizer's, and then keeps more.
        return self._planned(calls.length, planner.leanest, allowed)

    def _planner(self, length: int) -> Planner:
        return Planner(self._step(self._calls(length)), leave=self.leave)

    def _least_plan(self, length: int) -> Plan:
        return self._planner(length).least_plan

    def _plans(self, lengths: Sequence[int], allowed: Limit) -> Plan:
        return plan_calls(self.step, [self._calls(length) for length in lengths], allowed, self.leave)

    def _step(self, call: Call) -> TrainingStep:
        return replace(self.step, args=call[0], kwargs=call[1])

    def _peak(self, plan: Plan, made_at: int, length: int) -> Peak:  # with tiles as large as where it was made
        step = self._step(self._calls(length))
        tiles = (-(-choice.tiles * length // made_at) for choice in plan)
        plan = Plan(tuple(replace(choice, tiles=count) for choice, count in zip(plan, tiles, strict=True)))
        found = simulate_step(step, prepare=partial(apply, plan=plan, stores=stores_for(plan, step)))
        return found.peak_bytes, held_by(found)
