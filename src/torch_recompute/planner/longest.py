"""The longest sequence, or the largest batch, that a budget holds, with its plan and plans for shorter ones.

The peak of a step rises with its length, so the longest is found by bisection. Each length on the way is one
simulation, with the plan that needs the least at a length that was planned before; where bisection has two peaks it
goes to where the line between them meets the budget, since from some length on the peak is nearly a line. The length
that is found is planned as a whole. If its own least plan leaves room, as one that takes more layers together does for
long sequences, the search goes on with that. What comes out is a plan of `SIZES` lengths, each planned and simulated by
itself.

Rejected: planning each length on the way, which takes ten times as long and comes to the same end; a formula of bytes
per token, which knows nothing of what the loss or a kernel holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from .. import errors
from .._text import doing
from ..memory.budget import Limit, bytes_meant, read_budget
from ..memory.free import free_bytes
from ..plan.apply import apply
from ..plan.plan import Plan
from ..plan.sizes import parameters
from ..simulation import Simulation, simulate_step
from ..training_step import TrainingStep
from .alternatives import held_by
from .hosts import stores_for
from .planner import Planner
from .sizes import Call, Lengths, plan_calls

SIZES = 5
ROUNDS = 3
FINE = 256  # the length is found to this part of itself
UNIT = 64  # lengths are multiples of it, from `FROM` on
FROM = 1024


class Batches(Lengths):
    """One call with other numbers of items than its own, in the first dimension of its tensors."""

    dim = 0

    def _at(self, tensor: torch.Tensor, length: int) -> torch.Tensor:
        if tensor.shape[:1] != (self.length,):
            return tensor
        found = tensor.index_select(0, torch.arange(length, device=tensor.device) % self.length)
        return found.requires_grad_(tensor.requires_grad)


@dataclass
class Longest:
    """The search for the most that a budget holds.

    Attributes:
        step: A step of some length.
        budget: In bytes, or "fit"; as it was written.
        offload: See `make_plan`.
        batch: Whether the size of the batch is looked for, instead of the length of the sequence.
        most: The most that the model takes; None for no limit.
        best: The most that is known to fit so far.
        best_peak_bytes: Its peak.
    """

    step: TrainingStep
    budget: object
    offload: bool | int | str = False
    batch: bool = False
    most: int | None = None
    best: int = field(default=0, init=False)
    best_peak_bytes: int = field(default=0, init=False)

    def plan(self) -> Plan:
        """Returns the plan; its last size is the most that fits.

        Raises:
            BudgetError: Not one token, or not one item, fits.
            ArgumentError: The budget is a share, or it cannot be told where the sequence is.
        """
        asked = read_budget(self.budget)
        if asked.share is not None:
            raise errors.ArgumentError(
                f"budget={asked.said} is a share of the activation memory, which rises with what is looked for.\n"
                '  Write bytes, such as budget="80GB", or "fit".'
            )
        calls = (Batches if self.batch else Lengths)(parameters(self.step.model), *self.step.call)
        planner = Planner(self._step(calls(calls.length)), offload=self.offload)
        free = partial(free_bytes, self.step.model, planner.plain.device, self.step.optimizer, self.step.call)
        allowed = bytes_meant(asked, lambda: 0, planner.plain.peak_bytes, free)
        start = calls.length
        for _ in range(ROUNDS):
            before = self.best
            self._search(partial(self._simulated, calls, planner.least_plan), allowed, start)
            if self.best <= before * (1 + 4 / FINE):
                break
            start = self.best
            planner = Planner(self._step(calls(start)), offload=self.offload)
        while True:
            unit = self._unit(self.best)
            parts = (self.best * part // SIZES // unit * unit for part in range(1, SIZES))
            lengths = sorted({self.best, *filter(None, parts)})
            try:
                return plan_calls(self.step, [calls(length) for length in lengths], allowed, self.offload)
            except errors.BudgetError:  # the least plan of this length itself may need a little more
                if self.best == 1:
                    raise
                self.best -= max(1, self.best // FINE)

    def _step(self, call: Call) -> TrainingStep:
        return replace(self.step, args=call[0], kwargs=call[1])

    def _simulated(self, calls: Lengths, plan: Plan, length: int) -> Simulation:
        step = self._step(calls(length))
        return simulate_step(step, prepare=partial(apply, plan=plan, stores=stores_for(plan, step)))

    def _search(self, simulated: Callable[[int], Simulation], allowed: int, length: int) -> None:
        """Raises `best` as far as the budget goes, from some length."""
        below, above = (self.best, self.best_peak_bytes), (0, 0)
        while True:
            doing(f"simulating {'a batch' if self.batch else 'a sequence'} of {length:,}")
            found = simulated(length)
            if found.peak_bytes <= allowed:
                below = self.best, self.best_peak_bytes = length, found.peak_bytes
            else:
                above = length, found.peak_bytes
            if above[0] and above[0] - below[0] <= max(self._unit(below[0]), below[0] // FINE):
                if not below[0]:
                    raise errors.BudgetError(self._nothing_fits(allowed, found), found.peak_bytes, None)
                return
            if length == self.most and not above[0]:
                return
            length = self._next(below, above, allowed)

    def _next(self, below: tuple[int, int], above: tuple[int, int], allowed: int) -> int:
        """The next length to try, between one that fits and one that does not, or above one that fits."""
        if not above[0]:
            return min(2 * below[0], self.most or 2 * below[0])
        if not below[0]:
            return max(1, above[0] // 2)
        (low, least), (high, most), unit = below, above, self._unit(below[0])
        edge = max(1, (high - low) // 16)  # so that the stretch gets shorter on either side
        met = low + (high - low) * (allowed - least) // max(1, most - least)
        length = min(max(met, low + edge), high - edge)
        return max(length // unit * unit, low + unit) if unit > 1 else length

    def _unit(self, length: int) -> int:
        return UNIT if length >= FROM and not self.batch else 1

    def _nothing_fits(self, allowed: Limit | int, found: Simulation) -> str:
        said = allowed.said if isinstance(allowed, Limit) else errors.size(allowed)
        one = "a batch of one" if self.batch else "a sequence of one token"
        return (
            f"budget={said} is too small for {one}, whose peak is {errors.size(found.peak_bytes, up=True)} "
            f"({found.peak_bytes} bytes): {held_by(found)}.\n"
            "  Write a budget of more than that, or another optimizer."
        )
