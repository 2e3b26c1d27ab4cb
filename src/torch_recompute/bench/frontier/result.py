"""What the comparison showed: points of memory and cost, the peers' and ours, and the verdict in numbers.

Two questions are asked. At each peer's own point: what does our plan replay if the peer's measured peak is its budget?
And between these points, at ten budgets: what does the best peer's setting replay that still fits?

What is replayed is exact; times on a CPU are noisy. How noisy says the plain step, which takes part twice: a time
counts as no longer if the median over rounds of the ratio of both is within twice what the plain steps are apart.
"""

from __future__ import annotations

import platform
import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ... import __version__
from ..._face import document
from .config import Config

SCHEMA_VERSION = 1
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
class Failure:
    """A peer that does not run this model.

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
        between, own = self.between, self.own
        wrong = [point for point in self.peers if point.gradient_difference]
        right = [match for match in self.matches if not match.peer.gradient_difference]
        less = [entry.less_percent for entry in between if entry.less_percent is not None]
        none = sum(entry.peer is None for entry in between)
        lines = [
            f"With a peer's peak as budget {self._matched(right)}.",
            f"At {len(between)} budgets, against the best peer that fits and has the plain step's gradients: none fits "
            f"at {none}"
            + (
                f"; at {len(less)} it replays something, and ours {statistics.median(less):.0f} % less (median; from "
                f"{min(less):.0f} to {max(less):.0f} %)."
                if less
                else "."
            ),
            f"Of {len(own)} points of ours {sum(point.fits for point in own)} are within their budget, the worst "
            f"predicted peak is {max((point.peak_error for point in own), default=0.0):.2%} off, and "
            f"{sum(not point.gradient_difference for point in own)} have the plain step's gradients to the last bit.",
        ]
        if wrong:
            names = ", ".join(point.title for point in wrong)
            others = [match for match in self.matches if match.peer.gradient_difference]
            lines.append(
                f"Other gradients than the plain step's, dropout masks being drawn again: {names}. With the peak of "
                f"one of these as budget {self._matched(others)}."
            )
        lines += [f"{failure.title} does not run this model: {failure.error}" for failure in self.failures]
        return lines

    def _matched(self, matches: list[Match]) -> str:
        """How ours compares with some points of peers."""
        timed = [match.time_ratio for match in matches if match.time_ratio is not None]
        return (
            f"ours replays no more FLOPs at {sum(match.no_more_flops for match in matches)} of {len(matches)} points, "
            f"and takes no more time at {sum(ratio <= 1 + 2 * self.noise for ratio in timed)}, within noise (two plain "
            f"steps differ by {self.noise:.1%}, twice that is allowed)"
        )

    @property
    def how(self) -> dict[str, str]:
        """How each kind of figure was obtained."""
        return {
            "peak": "the sum of the CPU allocator's events in one step, parameters included",
            "replay": "FLOPs of a step less those of the plain step, by PyTorch's counter; of compiled code, by its "
            "formulas on the shapes that ran",
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
            "verdict": self.verdict,
            "passed": self.passed,
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
        return document("bench frontier", SCHEMA_VERSION, data)


def _kept(point: Point) -> bool:
    assert point.promise is not None
    exact = point.promise.replay_flops == point.replay_flops and not point.gradient_difference
    return point.fits and exact and point.peak_error <= NEAR


def _between(ours: Point, everybody: list[Point]) -> Between:
    assert ours.promise is not None
    right = [point for point in everybody if not point.gradient_difference]
    fitting = [point for point in right if point.peak_bytes <= ours.promise.budget_bytes]
    best = min(fitting, key=lambda point: (point.replay_flops, point.peak_bytes), default=None)
    less = None if best is None or not best.replay_flops else 100 * (1 - ours.replay_flops / best.replay_flops)
    return Between(ours, best, less)
