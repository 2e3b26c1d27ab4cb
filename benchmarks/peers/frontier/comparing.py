"""The comparison while it runs: peers first, then our plans for budgets and for the peers' own peaks, then the clock.

A peer that fails is left out with its error: compilers do not take every model.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor, nn

from torch_recompute import Plan
from torch_recompute.errors import BudgetError
from torch_recompute.memory.loop import Loop
from torch_recompute.planner.planner import Planner
from torch_recompute.simulation.training_step import TrainingStep

from .config import PRICES, Config
from .measuring import Seen, Step, clock, difference, ratio
from .models import build
from .result import MATCHED, OURS, Failure, Match, Point, Promise, Result
from .ways import PLAIN, Way, peers, planned

SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Our budgets, as shares of the way between the least peak and the plain step's."""


class _Run:
    """The comparison while it runs: points and the steps that they were measured on, side by side."""

    def __init__(self, model: nn.Module, batch: Tensor) -> None:
        self.model, self.batch = model, batch
        self.steps: list[Step] = []
        self.points: list[Point] = []
        self._plain: Seen | None = None
        self._known: dict[str, int] = {}

    def add(self, way: Way, promise: Promise | None = None) -> int:
        """Measures what is not noisy; gives the point's number."""
        step = Step(self.model, self.batch, way)
        seen = step.seen()
        self._plain = plain = self._plain or seen
        more = seen.flops - plain.flops
        apart = difference(plain.gradients, seen.gradients)
        self.steps.append(step)
        self.points.append(
            Point(way.family, way.setting, seen.peak_bytes, more, 100 * more / plain.flops, apart, promise=promise)
        )
        return len(self.points) - 1

    def add_plan(self, family: str, setting: str, plan: Plan) -> int:
        """Measures a plan; one that chooses as another is not measured twice."""
        made = plan.prediction
        assert made is not None
        promise = Promise(
            made.budget_bytes,
            made.peak_bytes,
            made.replay_flops,
            made.step_seconds / made.plain_step_seconds - 1,
            made.bound_seconds / made.plain_step_seconds - 1,
        )
        digest = plan.digest()
        if digest not in self._known:
            self._known[digest] = self.add(planned(family, setting, plan), promise)
        else:
            number = self._known[digest]
            self.points.append(replace(self.points[number], setting=setting, family=family, promise=promise))
            self.steps.append(self.steps[number])
        return len(self.points) - 1

    def clock(self, pairs: list[tuple[int, int | None]], rounds: int, tick: Callable[[], None]) -> list[list[float]]:
        """Seconds by point and round, the plain step's second turn last.

        A plan runs right after the peer that it is compared with, because the pace of a machine drifts.
        """
        again = Step(self.model, self.batch, Way(PLAIN, "again"))
        beside = [self.steps[number] for pair in pairs for number in pair if number is not None]
        different = list(dict.fromkeys([self.steps[0], again, *beside, *self.steps]))
        taken = dict(zip(different, clock(different, rounds, tick), strict=True))
        return [taken[step] for step in [*self.steps, again]]


def ticks(config: Config) -> int:
    """How often `run` reports progress."""
    found = len(peers(config))
    return found + len(SHARES) + found - 1 + config.rounds + 1


def run(config: Config, progress: Callable[[str], None] | None = None) -> Result:
    """Compare all peers and our planner.

    Args:
        config: What is asked for.
        progress: Called after each of the `ticks(config)` pieces of work, with a word on it.

    Returns:
        What was seen.
    """
    config.check()
    size = config.layers, config.width, config.tokens, config.batch
    return compare(config, *build(config.model, *size, config.dropout), peers(config), SHARES, progress)


def compare(
    config: Config,
    model: nn.Module,
    batch: Tensor,
    ways: Sequence[Way],
    shares: Sequence[float] = (),
    progress: Callable[[str], None] | None = None,
    slack: float = 0.0,
) -> Result:
    """Compare some ways to run a step of a model, the plain one first, with our plans at shares and at their peaks.

    A plan may be above a peak by a share of `slack`.
    """
    tick = progress or _quiet
    work = _Run(model, batch)
    others: list[int] = []
    failures: list[Failure] = []
    for way in ways:
        try:
            others.append(work.add(way))
        except Exception as error:  # a peer may raise what it likes, and the comparison goes on without it
            if way.family == PLAIN:
                raise
            failures.append(Failure(way.title, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"))
        tick(way.title)
    planner = Planner(
        TrainingStep(work.model, (work.batch,), device=PRICES[config.price], loop=Loop(hold_output=False))
    )
    ours: list[int] = []
    for share in shares:
        ours.append(work.add_plan(OURS, f"{share:.0%}", planner.plan(share)))
        tick(f"{OURS} {share:.0%}")
    for failure in failures:
        tick(f"{failure.title} is left out")
    pairs: list[tuple[int, int | None]] = []
    plans: dict[int, Plan] = {}
    for peer in others[1:]:
        point = work.points[peer]
        try:
            if point.peak_bytes not in plans:
                plans[point.peak_bytes] = planner.plan(int(point.peak_bytes * (1 + slack)))
            pairs.append((peer, work.add_plan(MATCHED, point.title, plans[point.peak_bytes])))
        except BudgetError:
            pairs.append((peer, None))
        tick(f"{MATCHED} {point.title}")
    taken = work.clock(pairs, config.rounds, lambda: tick("timing"))
    plain, again = taken[0], taken[-1]
    points = [
        replace(point, seconds=statistics.median(seconds), time_ratio=ratio(seconds, plain))
        for point, seconds in zip(work.points, taken, strict=False)
    ]
    matches = [
        Match(
            points[peer],
            None if number is None else points[number],
            None if number is None else ratio(taken[number], taken[peer]),
        )
        for peer, number in pairs
    ]
    noise = statistics.median(abs(a / b - 1) for a, b in zip(again, plain, strict=True))
    return Result(config, [points[i] for i in others], [points[i] for i in ours], matches, noise, tuple(failures))


def _quiet(_: str) -> None:
    pass
