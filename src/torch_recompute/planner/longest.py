"""The longest sequence, or the largest batch, that a budget holds, with its plan and plans for shorter ones.

The peak of a step rises with its length, so the longest is found by bisection. Each length on the way is one
simulation, with the plan that keeps the fewest bytes; where bisection has two peaks it goes to where the line between
them meets the budget, since from some length on the peak is nearly a line. The length that is found is planned. If its
own least plan leaves room, as one that takes more or fewer layers together may, the search goes on with that. What
comes out is a plan of `SIZES` lengths, each planned and simulated by itself. Of a configuration that is stated nothing
is planned: each length is the step under it.

Rejected: planning each length on the way, which takes ten times as long and comes to the same end; a formula of bytes
per token, which knows nothing of what the loss or a kernel holds.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, ClassVar

import torch

from .. import errors
from ..errors.text import doing
from ..memory.budget import FIT, Budget, Limit, bytes_meant, read_budget
from ..memory.reserved import expands
from ..plan.plan import Plan
from ..plan.sizes import parameters
from ..simulation import Simulation
from ..simulation.training_step import TrainingStep
from .alternatives import held_by
from .configurations import ConfiguredStep, peaks_of
from .hosts import NO_OPTIONS, PlanOptions, simulate_under
from .layout import ConfiguredLayout, LayoutPlanner, LayoutRanks, RankPlan
from .planner import Planner
from .sizes import Lengths, plan_calls

SIZES = 5
ROUNDS = 3
FINE = 256  # the length is found to this part of itself
UNIT = 64  # lengths are multiples of it, from `FROM` on
FROM = 1024
FAR = 16  # times a length that fits is the most that is tried next
Peak = tuple[int, str]  # in bytes, and what it is made of


class Batches(Lengths):
    """One call with other numbers of items than its own, in the first dimension of its tensors."""

    dim = 0

    def _at(self, tensor: torch.Tensor, length: int, *, positions: bool) -> torch.Tensor:
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
        shared: How many ranks share a sequence; lengths are of what one of them holds.
        grain: What lengths are multiples of.
        best: The most that is known to fit so far.
        best_peak_bytes: Its peak.
        interrupted: Set from outside to end the search before its next simulation. Python drops a `KeyboardInterrupt`
            that comes while a weak reference calls back, of which a simulation has thousands.
        steps: Of configurations, those that are done: the step under each, with the most that the budget holds.
    """

    budget: object
    batch: bool = False
    most: int | None = None
    shared: int = field(default=1, init=False)
    grain: int = field(default=1, init=False)
    best: int = field(default=0, init=False)
    best_peak_bytes: int = field(default=0, init=False)
    interrupted: bool = field(default=False, init=False)
    steps: tuple[Any, ...] = field(default=(), init=False)
    of_a_batch: ClassVar[str] = "items in a batch"

    @property
    def what(self) -> str:
        """The thing that is looked for, in words."""
        return self.of_a_batch if self.batch else "tokens in a sequence"

    @property
    def found(self) -> int:
        """The tokens of a whole sequence, or the items of a batch, that are known to fit so far."""
        return self.best * self.shared

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

    def _stated(self, plans: Mapping[str, Plan], start: int, allowed: Limit) -> tuple[Any, ...]:
        """Searches from a length under each configuration; returns the steps with the most that fits, their `most`.

        Raises:
            BudgetError: Not one token, or not one item, fits under one of them.
        """
        for name, plan in plans.items():
            self.best = self.best_peak_bytes = 0
            fits: list[Any] = []

            def peak_of(length: int, name: str = name, plan: Plan = plan, fits: list[Any] = fits) -> Peak:
                one, taken, held = self._configured(name, plan, length)
                if taken <= allowed:
                    fits[:] = [one]
                return taken, f"{held}, with {name}"

            self.search(peak_of, allowed, start)
            self.steps += (replace(fits[0], most=self.found),)
        return self.steps

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
        needs: list[tuple[int, int]] = []
        while True:
            lengths = self.lengths()
            try:
                return self._plans(lengths, allowed)
            except errors.BudgetError as error:  # the least plan of this length itself may need more
                if self.best <= self.grain:
                    raise
                needs.append((self.best, error.smallest))
                self.less(needs, allowed)

    @abstractmethod
    def _peak(self, plan: Plan, made_at: int, length: int) -> Peak:
        """The peak of a length under a plan that was made at another."""

    @abstractmethod
    def _least_plan(self, length: int) -> Plan:
        """The plan with which a length needs the least."""

    @abstractmethod
    def _plans(self, lengths: Sequence[int], allowed: Limit) -> Any:
        """The plans of some lengths within a budget."""

    @abstractmethod
    def _configured(self, name: str, plan: Plan, length: int) -> tuple[Any, int, str]:
        """The step under a configuration at a length, the bytes that it takes, and what these are, in words."""

    def search(self, peak_of: Callable[[int], Peak], allowed: int, length: int) -> None:
        """Raises `best` as far as the budget goes, from some length."""
        below, above, before = (self.best, self.best_peak_bytes), (0, 0), (0, 0)
        while True:
            doing(f"simulating {'a batch' if self.batch else 'a sequence'} of {length * self.shared:,}")
            if self.interrupted:
                raise KeyboardInterrupt
            peak, held = peak_of(length)
            if peak <= allowed:
                before, below = below, (length, peak)
                self.best, self.best_peak_bytes = below
            else:
                above = length, peak
            if above[0] and above[0] - below[0] <= max(self._unit(below[0]), below[0] // FINE):
                if not below[0]:
                    raise errors.BudgetError(self._nothing_fits(allowed, peak, held), peak, None)
                return
            if length == self.most and not above[0]:
                return
            length = self._next(before, below, above, allowed)

    def _next(self, before: tuple[int, int], below: tuple[int, int], above: tuple[int, int], allowed: int) -> int:
        """The next length to try, between one that fits and one that does not, or above one or two that fit."""
        if not above[0]:
            wanted, unit = 2 * below[0], self._unit(below[0])
            if before[0]:  # where the line through both meets the budget, or far above where it is flat
                met = below[0] + (below[0] - before[0]) * (allowed - below[1]) // max(1, below[1] - before[1])
                wanted = max(min(met, FAR * below[0]), below[0] + below[0] // 8 + unit) // unit * unit
            return min(wanted, self.most or wanted)
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

    def less(self, needs: Sequence[tuple[int, int]], allowed: int) -> None:
        """Takes less than the most that was found: so much as the line through the last two needs says.

        Args:
            needs: Lengths that do not fit, each with the least that it needs; the last is the most that was found.
            allowed: The bytes of the budget.
        """
        unit, (length, need) = self.grain, needs[-1]
        step = length * (need - allowed) // need  # of one alone, as if nothing of it were there at any length
        if len(needs) > 1 and needs[-2][1] > need:
            step = (needs[-2][0] - length) * (need - allowed) // (needs[-2][1] - need)
        self.best -= max(unit, length // FINE // unit * unit, min(step, length - unit) // unit * unit)

    def _nothing_fits(self, allowed: Limit | int, peak: int, held: str) -> str:
        said = allowed.said if isinstance(allowed, Limit) else errors.size(allowed)
        least = self.grain * self.shared
        tokens = "one token" if least == 1 else f"{least} tokens"
        one = "a batch of one" if self.batch else f"a sequence of {tokens}"
        return (
            f"budget={said} is too small for {one}, whose peak is {errors.size(peak, up=True)} ({peak} bytes): "
            f"{held}.\n"
            "  Write a budget of more than that, or another optimizer."
        )


def _allowed(asked: Budget, step: TrainingStep) -> Limit:
    """The bytes of a budget; "fit" is of the device where a step runs."""
    return bytes_meant(asked, lambda: 0, 0, step.free_bytes)


class LongestOnRanks(Search):
    """The search for the most that a budget of each rank holds.

    Attributes:
        make: Makes the ranks of a layout, of one of two kinds, for a length.
    """

    of_a_batch = "sequences in a microbatch"

    def __init__(self, make: Callable[[Any, int], Any], budget: object, batch: bool, most: int | None) -> None:
        super().__init__(budget, batch, most)
        self.make = make
        self._planner = cache(partial(make, LayoutPlanner))

    def plans(self, start: int) -> list[tuple[int, Sequence[RankPlan]]]:
        """Returns some lengths with the plans of all ranks; the last is the most that fits.

        Raises:
            BudgetError: Not one token, or not one item, fits.
            ArgumentError: The budget is a share.
        """
        planner = self._planner(start)
        allowed = self._begun(planner)
        return self._planned(start, planner.planner.leanest, allowed)

    def stated(self, plans: Mapping[str, Plan], start: int) -> tuple[ConfiguredLayout, ...]:
        """Returns the ranks under each configuration at the most that fits; its `most` says how much that is.

        Raises:
            BudgetError: Not one token, or not one item, fits under one of them.
            ArgumentError: The budget is a share.
        """
        return self._stated(plans, start, self._begun(self.make(LayoutRanks, start)))

    def _begun(self, ranks: LayoutRanks) -> Limit:
        """The bytes of the budget on each rank."""
        self.grain = 1 if self.batch else ranks.layout.ranks.divides_tokens
        return _allowed(self.asked(), ranks.step)

    def _configured(self, name: str, plan: Plan, length: int) -> tuple[ConfiguredLayout, int, str]:
        one = self.make(LayoutRanks, length).configured(name, plan)
        return one, one.peak_bytes, one.fullest.held_words

    def _peak(self, plan: Plan, made_at: int, length: int) -> Peak:
        ranks = self.make(LayoutRanks, length).under(plan)
        fullest = max(ranks, key=lambda rank: rank.peak_bytes)
        return fullest.peak_bytes, fullest.held_words

    def _least_plan(self, length: int) -> Plan:
        return self._planner(length).least_plan

    def _plans(self, lengths: Sequence[int], allowed: Limit) -> list[tuple[int, Sequence[RankPlan]]]:
        found = [self._planner(length).plans(self.budget) for length in reversed(lengths)]
        return [*zip(lengths, reversed(found), strict=True)]


class Longest(Search):
    """The search for the most that a budget holds, of one device.

    Attributes:
        step: A step of some length.
        plan_options: What the plan may use besides recomputation.
        dashes: Before the names of options in errors.
    """

    def __init__(
        self,
        step: TrainingStep,
        budget: object,
        plan_options: PlanOptions = NO_OPTIONS,
        batch: bool = False,
        most: int | None = None,
        dashes: str = "",
    ) -> None:
        super().__init__(budget, batch, most)
        self.step, self.plan_options = step, plan_options
        self.dashes = dashes
        self._planner: Callable[[int], Planner] = cache(
            lambda length: Planner(self._step(length), plan_options=plan_options)
        )
        if not batch:
            self.shared, self.grain = step.ranks.cp, step.ranks.divides_tokens // step.ranks.cp
            self.most = most and most // step.ranks.cp

    def plan(self) -> Plan:
        """Returns the plan; its last size is the most that fits.

        Raises:
            BudgetError: Not one token, or not one item, fits.
            ArgumentError: The budget is a share, or it cannot be told where the sequence is.
        """
        allowed, start = self._begun()
        # The least peak may be the optimizer's, and then keeps more.
        return self._planned(start, self._planner(start).leanest, allowed)

    def stated(self, plans: Mapping[str, Plan]) -> tuple[ConfiguredStep, ...]:
        """Returns the step under each configuration at the most that fits; its `most` says how much that is.

        Raises:
            BudgetError: Not one token, or not one item, fits under one of them.
            ArgumentError: As `plan`.
        """
        allowed, start = self._begun()
        return self._stated(plans, start, allowed)

    def _begun(self) -> tuple[Limit, int]:
        """The bytes of the budget, and the length to begin with."""
        asked = self.asked()
        self._calls = (Batches if self.batch else Lengths)(parameters(self.step.model), *self.step.call)
        return _allowed(asked, self.step), self._calls.length

    def _configured(self, name: str, plan: Plan, length: int) -> tuple[ConfiguredStep, int, str]:
        (one,) = peaks_of(self._step(length), {name: plan}, self.plan_options, self.dashes)
        taken, limited = self._taken(one.simulation)
        return replace(one, limited=limited), taken, held_by(one.simulation)

    def _taken(self, found: Simulation) -> tuple[int, dict[str, int | None]]:
        """The bytes to compare with the budget, and what the allocator may reserve.

        The peak; with "fit" more than that, where the allocator would run out of what the device has.
        """
        asked = self.asked()
        if not found.on_cuda:
            return found.peak_bytes, {}
        if asked.bytes is not None:
            return found.peak_bytes, {"room_bytes": asked.bytes}
        free, spare = self.step.memory
        held = found.reserved(expands(), limit=free + spare)
        taken = max(found.peak_bytes, held.reserved_bytes - spare) if held.ran_out else found.peak_bytes
        return taken, held.within(free + spare)

    def _least_plan(self, length: int) -> Plan:
        return self._planner(length).least_plan

    def _plans(self, lengths: Sequence[int], allowed: Limit) -> Plan:
        asked = FIT if self.asked() == FIT else allowed  # which then also thinks of what the allocator reserves
        return plan_calls(map(self._planner, reversed(lengths)), asked)

    def _step(self, length: int) -> TrainingStep:
        args, kwargs = self._calls(length)
        return replace(self.step, args=args, kwargs=kwargs)

    def _peak(self, plan: Plan, made_at: int, length: int) -> Peak:  # with tiles as large as where it was made
        tiles = (-(-choice.tiles * length // made_at) for choice in plan)
        plan = Plan(tuple(replace(choice, tiles=count) for choice, count in zip(plan, tiles, strict=True)))
        found = simulate_under(self._step(length), plan)
        return self._taken(found)[0], held_by(found)
