"""The comparison and its result: points of memory and cost, the peers' and ours, and the verdict in numbers.

Two questions are asked. At each peer's own point: what does our plan replay if the peer's measured peak is its budget?
And between these points, at ten budgets: what does the best peer's setting replay that still fits?

What is replayed is exact; times on a CPU are noisy. How noisy says the plain step, which takes part twice: a time
counts as no longer if the median over rounds of the ratio of both is within twice what the plain steps are apart.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ... import Plan, __version__
from ..._face import document
from ...errors import BudgetError
from ...planning.planner import Planner
from .config import PRICES, Config
from .measuring import Seen, Step, clock, difference, ratio
from .models import build
from .ways import PLAIN, Way, peers, planned

SCHEMA_VERSION = 1
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Our budgets, as shares of what lies between the least peak and the plain step's."""
NEAR = 0.005
"""How far a predicted peak may be off."""
OURS, MATCHED = "ours", "ours at"


@dataclass(frozen=True)
class Promise:
    """What the plan of a point of ours was made for, and predicts.

    Attributes:
        budget_bytes: Of the step's peak.
        peak_bytes: Predicted.
        replay_flops: Predicted.
        added: Seconds added to the step, as a share of the plain step; FLOPs where they are the price.
        least_added: No schedule adds less within the budget, likewise.
    """

    budget_bytes: int
    peak_bytes: int
    replay_flops: int
    added: float
    least_added: float


@dataclass(frozen=True)
class Point:
    """One way to run the step.

    Attributes:
        family: Whose it is.
        setting: Which of the family's.
        peak_bytes: Measured.
        replay_flops: FLOPs of products that the plain step does not have.
        replay_percent: The same in percent of the plain step's.
        gradient_difference: 0 if they are the plain step's to the last bit; else see `measuring.difference`.
        seconds: The median step.
        time_ratio: The median over rounds of its time to the plain step's.
        promise: Of ours, what was predicted.
    """

    family: str
    setting: str
    peak_bytes: int
    replay_flops: int
    replay_percent: float
    gradient_difference: float
    seconds: float = 0.0
    time_ratio: float = 1.0
    promise: Promise | None = None

    @property
    def title(self) -> str:
        """Whose and which, in words."""
        return f"{self.family} {self.setting}".strip()

    @property
    def fits(self) -> bool:
        """Whether the measured peak is within the budget."""
        return self.promise is None or self.peak_bytes <= self.promise.budget_bytes

    @property
    def peak_error(self) -> float:
        """How far the predicted peak is from the measured one, as a share."""
        return 0.0 if self.promise is None else abs(self.promise.peak_bytes / self.peak_bytes - 1)


@dataclass(frozen=True)
class Match:
    """A peer's point, and ours with that peak as budget.

    Attributes:
        peer: The peer's.
        ours: Ours; None if no plan of ours fits.
        time_ratio: The median over rounds of our time to the peer's.
    """

    peer: Point
    ours: Point | None
    time_ratio: float | None

    @property
    def no_more_flops(self) -> bool:
        """Whether ours replays no more."""
        return self.ours is not None and self.ours.replay_flops <= self.peer.replay_flops


@dataclass(frozen=True)
class Between:
    """A budget of ours, and the best that a peer has for it.

    Attributes:
        ours: Our point.
        peer: The peers' point that fits and replays least; None if none fits.
        less_percent: How much less ours replays, in percent of the peer's; None if that replays nothing.
    """

    ours: Point
    peer: Point | None
    less_percent: float | None


@dataclass(frozen=True)
class Result:
    """What the comparison showed.

    Attributes:
        config: What was asked for.
        peers: The plain step first.
        ours: At our budgets.
        matches: At the peers' peaks.
        noise: How far the times of two plain steps are apart, as a share: the median over rounds.
    """

    config: Config
    peers: list[Point]
    ours: list[Point]
    matches: list[Match]
    noise: float

    @property
    def between(self) -> list[Between]:
        """Our budgets against the peers."""
        return [_between(point, self.peers) for point in self.ours]

    @property
    def own(self) -> list[Point]:
        """All points of ours."""
        return [*self.ours, *(match.ours for match in self.matches if match.ours is not None)]

    @property
    def passed(self) -> bool:
        """Whether all points of ours keep their promise: budget, peak, FLOPs, gradients."""
        return not self.broken

    @property
    def broken(self) -> list[Point]:
        """The points of ours that do not keep their promise."""
        return [point for point in self.own if not _kept(point)]

    @property
    def verdict(self) -> list[str]:
        """The answers, a sentence each."""
        matches, between, own = self.matches, self.between, self.own
        timed = [match.time_ratio for match in matches if match.time_ratio is not None]
        less = [entry.less_percent for entry in between if entry.less_percent is not None]
        wrong = [point for point in self.peers if point.gradient_difference]
        none = sum(entry.peer is None for entry in between)
        lines = [
            f"With a peer's peak as budget ours replays no more FLOPs at {sum(m.no_more_flops for m in matches)} of "
            f"{len(matches)} peers' points, and takes no more time at "
            f"{sum(ratio <= 1 + 2 * self.noise for ratio in timed)}, within noise: two plain steps differ by "
            f"{self.noise:.1%}, twice that is allowed.",
            f"At {len(between)} budgets: at {none} of them no setting of a peer fits"
            + (
                f"; at {len(less)} the best one that fits replays something, and ours {statistics.median(less):.0f} % "
                f"less (median; from {min(less):.0f} to {max(less):.0f} %)."
                if less
                else "."
            ),
            f"Of {len(own)} points of ours {sum(point.fits for point in own)} are within their budget, the worst "
            f"predicted peak is {max((point.peak_error for point in own), default=0.0):.2%} off, and "
            f"{sum(not point.gradient_difference for point in own)} have the plain step's gradients to the last bit.",
        ]
        if wrong:
            names = ", ".join(point.title for point in wrong)
            lines.append(f"Other gradients than the plain step's, dropout masks being drawn again: {names}.")
        return lines

    @property
    def how(self) -> dict[str, str]:
        """How each kind of figure was obtained."""
        return {
            "peak": "the sum of the CPU allocator's events in one step, parameters included",
            "replay": "FLOPs of a step less those of the plain step, by PyTorch's counter; of compiled code, by its "
            "formulas on the shapes that ran",
            "times": f"median of {self.config.rounds} rounds, all taking turns (threads: {torch.get_num_threads()})",
            "gradients": "one step from the same seed, with dropout, against the plain step",
            "price": {"measured": "our plans spare time, measured here", "flops": "our plans spare FLOPs"}[
                self.config.price
            ],
        }

    def to_json(self) -> str:
        """One JSON document; bytes and FLOPs are integers."""
        data: dict[str, Any] = {
            "torch_recompute": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "config": asdict(self.config),
            "how": self.how,
            "verdict": self.verdict,
            "passed": self.passed,
            "noise": self.noise,
            "peers": [asdict(point) for point in self.peers],
            "ours": [
                {
                    **asdict(entry.ours),
                    "best_peer": None if entry.peer is None else entry.peer.title,
                    "less_percent": entry.less_percent,
                }
                for entry in self.between
            ],
            "matches": [
                {
                    "peer": match.peer.title,
                    "ours": None if match.ours is None else asdict(match.ours),
                    "time_ratio": match.time_ratio,
                    "no_more_flops": match.no_more_flops,
                }
                for match in self.matches
            ],
        }
        return document("bench frontier", SCHEMA_VERSION, data)


def _kept(point: Point) -> bool:
    assert point.promise is not None
    exact = point.promise.replay_flops == point.replay_flops and not point.gradient_difference
    return point.fits and exact and point.peak_error <= NEAR


def _between(ours: Point, everybody: list[Point]) -> Between:
    assert ours.promise is not None
    fitting = [point for point in everybody if point.peak_bytes <= ours.promise.budget_bytes]
    best = min(fitting, key=lambda point: (point.replay_flops, point.peak_bytes), default=None)
    less = None if best is None or not best.replay_flops else 100 * (1 - ours.replay_flops / best.replay_flops)
    return Between(ours, best, less)


class _Run:
    """The comparison while it runs: points and the steps that they were measured on, side by side."""

    def __init__(self, config: Config, tick: Callable[[str], None]) -> None:
        self._config, self._tick = config, tick
        self.model, self.text = build(config.model, config.layers, config.width, config.tokens, config.batch)
        self.steps: list[Step] = []
        self.points: list[Point] = []
        self._plain: Seen | None = None
        self._known: dict[str, int] = {}

    def add(self, way: Way, promise: Promise | None = None) -> int:
        """Measures what is not noisy; gives the point's number."""
        step = Step(self.model, self.text, way)
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

    def clock(self) -> list[list[float]]:
        """Seconds by point and round, the plain step's second turn last."""
        again = Step(self.model, self.text, Way(PLAIN, "again"))
        different = list(dict.fromkeys([*self.steps, again]))
        taken = dict(zip(different, clock(different, self._config.rounds, lambda: self._tick("timing")), strict=True))
        return [taken[step] for step in [*self.steps, again]]


def ticks(config: Config) -> int:
    """How often `run` reports progress."""
    found = len(peers(config.layers))
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
    tick = progress or _quiet
    work = _Run(config, tick)
    others: list[int] = []
    for way in peers(config.layers):
        others.append(work.add(way))
        tick(way.title)
    planner = Planner(work.model, (work.text,), None, device=PRICES[config.price])
    ours: list[int] = []
    for share in SHARES:
        ours.append(work.add_plan(OURS, f"{share:.0%}", planner.plan(share)))
        tick(f"{OURS} {share:.0%}")
    pairs: list[tuple[int, int | None]] = []
    plans: dict[int, Plan] = {}
    for peer in others[1:]:
        point = work.points[peer]
        try:
            if point.peak_bytes not in plans:
                plans[point.peak_bytes] = planner.plan(point.peak_bytes)
            pairs.append((peer, work.add_plan(MATCHED, point.title, plans[point.peak_bytes])))
        except BudgetError:
            pairs.append((peer, None))
        tick(f"{MATCHED} {point.title}")
    taken = work.clock()
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
    return Result(config, [points[i] for i in others], [points[i] for i in ours], matches, noise)


def _quiet(_: str) -> None:
    pass
