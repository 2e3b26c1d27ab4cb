"""What the comparison showed: points of memory and cost, the peers' and ours, and the verdict in numbers.

Two questions are asked. At each peer's own point: what does our plan replay if the peer's measured peak is its budget?
And between these points, at ten budgets: what does the best peer's setting replay that still fits?
Each question is a goal that is reached or not, with the number of points at which it held. A peer with other gradients
than the plain step's does not do what was asked of it; its points are counted apart.

What is replayed is exact; times on a CPU are noisy. How noisy says the plain step, which takes part twice: a time
counts as no longer if the median over rounds of the ratio of both is within twice what the plain steps are apart.
"""

from __future__ import annotations

import math
import platform
import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch

from torch_recompute import __version__
from torch_recompute.commands.output import document

from .config import Config

SCHEMA_VERSION = 1
NEAR = 0.005
"""How far a predicted peak may be off."""
LESS = 20.0
"""What ours is to replay less than the best peer that fits, in percent: the median."""
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
        """Whether ours fits and replays no more."""
        ours = self.ours
        return ours is not None and ours.fits and ours.replay_flops <= self.peer.replay_flops


@dataclass(frozen=True)
class Failure:
    """A peer that is left out: its package is missing, or it does not run this model or at this setting.

    Attributes:
        title: Whose and which setting.
        error: The first line of what it raised.
    """

    title: str
    error: str


@dataclass(frozen=True)
class Between:
    """A budget of ours, and the best that a peer has for it.

    Attributes:
        ours: Our point.
        peer: The peers' point that fits, has the plain step's gradients and replays least; None if none does.
        less_percent: How much less ours replays, in percent of the peer's; None if that replays nothing.
    """

    ours: Point
    peer: Point | None
    less_percent: float | None

    @property
    def advantage(self) -> float | None:
        """The same, endlessly negative for a loss; None where no peer fits or neither replays.

        It is a loss if only ours replays, and if ours is over its budget.
        """
        if self.peer is None:
            return None
        lost = not self.ours.fits or (not self.peer.replay_flops and self.ours.replay_flops)
        return -math.inf if lost else self.less_percent


@dataclass(frozen=True)
class Goal:
    """What is to hold, and where it did.

    Attributes:
        name: For programs.
        text: In words.
        held: Points at which it did.
        of: Points in all.
        seen: The figure that decides, in words; empty if the points do.
        reached: Whether it is.
    """

    name: str
    text: str
    held: int
    of: int
    seen: str
    reached: bool

    def __str__(self) -> str:
        figure = f"; {self.seen}" if self.seen else ""
        return f"{'Reached' if self.reached else 'NOT reached'}: {self.text}. Held at {self.held} of {self.of}{figure}."


@dataclass(frozen=True)
class Result:
    """What the comparison showed.

    Attributes:
        config: What was asked for.
        peers: The plain step first.
        ours: At our budgets.
        matches: At the peers' peaks.
        noise: How far the times of two plain steps are apart, as a share: the median over rounds.
        failures: The peers that do not run.
    """

    config: Config
    peers: list[Point]
    ours: list[Point]
    matches: list[Match]
    noise: float
    failures: tuple[Failure, ...] = ()

    @property
    def between(self) -> list[Between]:
        """Our budgets against the peers."""
        return [_between(point, self.peers) for point in self.ours]

    @property
    def own(self) -> list[Point]:
        """All points of ours."""
        return [*self.ours, *(match.ours for match in self.matches if match.ours is not None)]

    @property
    def reached(self) -> bool:
        """Whether every goal is reached, and every point of ours keeps its promise."""
        return all(goal.reached for goal in self.goals) and not self.broken

    @property
    def broken(self) -> list[Point]:
        """The points of ours that do not keep their promise: budget, peak, FLOPs, gradients."""
        return [point for point in self.own if not _kept(point)]

    @property
    def goals(self) -> list[Goal]:
        """The questions with their answers."""
        right = [match for match in self.matches if not match.peer.gradient_difference]
        less = [entry.advantage for entry in self.between if entry.advantage is not None]
        median = statistics.median(less) if less else math.inf
        off = [point.peak_error for point in self.own]
        return [
            _everywhere(
                "flops",
                "with a peer's peak as budget ours replays no more FLOPs",
                [match.no_more_flops for match in right],
            ),
            _everywhere(
                "time",
                f"with a peer's peak as budget ours takes no more time, within noise (two plain steps differ by "
                f"{self.noise:.1%}, twice that is allowed)",
                [self._no_longer(match) for match in right],
            ),
            Goal(
                "between",
                f"between the peers' points ours replays at least {LESS:.0f} % less than the best peer that fits, in "
                "the median",
                sum(entry >= LESS for entry in less),
                len(less),
                _spread(less),
                median >= LESS,
            ),
            _everywhere(
                "peak",
                f"the predicted peak is within {NEAR:.1%} of the measured one",
                [error <= NEAR for error in off],
                f"the worst is {max(off, default=0.0):.2%} off",
            ),
        ]

    def _no_longer(self, match: Match) -> bool:
        fits = match.ours is not None and match.ours.fits
        return fits and match.time_ratio is not None and match.time_ratio <= 1 + 2 * self.noise

    @property
    def verdict(self) -> list[str]:
        """The answers, a sentence each."""
        own = self.own
        none = sum(entry.peer is None for entry in self.between)
        fits = sum(point.fits for point in own)
        exact = sum(not point.gradient_difference for point in own)
        lines = [
            *map(str, self.goals),
            f"Of our {len(self.between)} budgets {none} are below every peer's peak. Of {len(own)} points of ours "
            f"{fits} are within their budget, and {exact} have the plain step's gradients to the last bit.",
        ]
        wrong = [point.title for point in self.peers if point.gradient_difference]
        if wrong:
            others = [match for match in self.matches if match.peer.gradient_difference]
            lines.append(
                f"Other gradients than the plain step's, dropout masks being drawn again: {', '.join(wrong)}. With the "
                f"peak of one of these as budget ours replays no more FLOPs at "
                f"{sum(match.no_more_flops for match in others)} of {len(others)}, and takes no more time at "
                f"{sum(map(self._no_longer, others))}."
            )
        errors = dict.fromkeys(failure.error for failure in self.failures)
        for error in errors:
            titles = ", ".join(failure.title for failure in self.failures if failure.error == error)
            lines.append(f"Left out: {titles}: {error}")
        return lines

    @property
    def how(self) -> dict[str, str]:
        """How each kind of figure was obtained."""
        return {
            "peak": "the sum of the CPU allocator's events in one step, parameters included",
            "replay": "FLOPs of a step less those of the plain step, by PyTorch's counter; of compiled code, by its "
            "formulas on the operations that ran",
            "times": f"median of {self.config.rounds} rounds, all taking turns (threads: {torch.get_num_threads()})",
            "gradients": f"one step from the same seed, with dropout {self.config.dropout:g}, against the plain step",
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
            "goals": [asdict(goal) for goal in self.goals],
            "verdict": self.verdict,
            "reached": self.reached,
            "broken": [point.title for point in self.broken],
            "noise": self.noise,
            "peers": [asdict(point) for point in self.peers],
            "failures": [asdict(failure) for failure in self.failures],
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
        return document("peers frontier", SCHEMA_VERSION, data)


def _kept(point: Point) -> bool:
    assert point.promise is not None
    exact = point.promise.replay_flops == point.replay_flops and not point.gradient_difference
    return point.fits and exact and point.peak_error <= NEAR


def _everywhere(name: str, text: str, held: list[bool], seen: str = "") -> Goal:
    """A goal that is reached if it held at every point."""
    return Goal(name, text, sum(held), len(held), seen, all(held))


def _spread(less: list[float]) -> str:
    """The median and the ends of what ours replays less."""
    if not less:
        return "nothing to compare"
    median, least, most = (
        "a loss" if share == -math.inf else f"{share:.0f} %"
        for share in (statistics.median(less), min(less), max(less))
    )
    return f"the median is {median}, the least {least}, the most {most}"


def _between(ours: Point, everybody: list[Point]) -> Between:
    assert ours.promise is not None
    right = [point for point in everybody if not point.gradient_difference]
    fitting = [point for point in right if point.peak_bytes <= ours.promise.budget_bytes]
    best = min(fitting, key=lambda point: (point.replay_flops, point.peak_bytes), default=None)
    less = None if best is None or not best.replay_flops else 100 * (1 - ours.replay_flops / best.replay_flops)
    return Between(ours, best, less)
