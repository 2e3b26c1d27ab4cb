"""What a planned step is promised to take: the figures that a plan made for a budget carries, and their table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .._loop import Loop
from .._text import table

MIB = 2**20


@dataclass(frozen=True)
class Line:
    """Segments of one kind that were treated alike.

    Attributes:
        where: Their paths, numbers that differ written as `*`.
        count: How many.
        what: What becomes of each, in words.
        saved_bytes: What each keeps from its forward to its backward.
        freed_bytes: What each keeps less than without a region.
        seconds: What each adds to the step.
        host_bytes: What each keeps in host memory meanwhile.
    """

    where: str
    count: int
    what: str
    saved_bytes: int
    freed_bytes: int
    seconds: float
    host_bytes: int = 0

    @property
    def why(self) -> str:
        """The reason, as an exchange rate."""
        if not self.freed_bytes:
            return "its bytes are not needed"
        if not self.seconds:
            return "costs nothing"
        return f"{self.freed_bytes / MIB / (1000 * self.seconds):,.1f} MiB per ms"


@dataclass(frozen=True)
class Prediction:
    """What a planned step takes.

    Attributes:
        budget_bytes: What was asked for; the peak is at most this.
        peak_bytes: The most bytes alive at any time of the step.
        plain_peak_bytes: The same without the plan.
        step_seconds: Seconds of operations in the step, replays included.
        plain_step_seconds: The same without the plan.
        replay_flops: FLOPs of products in all replays.
        bound_seconds: No schedule that keeps or recomputes the same operations takes less within the budget.
        device: What the seconds are of.
        solver: Which solver chose, and how good it says its choice is.
        lines: The segments, those treated alike together.
        timing: Where the seconds are from, in words.
        host_bytes: The most that lies in host memory.
        loop: The training loop that the peak is of; None where the plan does not say.
        advice: What else would lower this peak, in words; "" where nothing is to be said.
    """

    budget_bytes: int
    peak_bytes: int
    plain_peak_bytes: int
    step_seconds: float
    plain_step_seconds: float
    replay_flops: int
    bound_seconds: float
    device: str
    solver: str
    lines: tuple[Line, ...]
    timing: str = ""
    host_bytes: int = 0
    loop: Loop | None = None
    advice: str = ""

    @property
    def gap(self) -> float:
        """How far from the bound the step can be at most, as a share of the step."""
        return max(0.0, self.step_seconds - self.bound_seconds) / self.step_seconds if self.step_seconds else 0.0

    @staticmethod
    def from_data(lines: Iterable[dict[str, Any]], loop: Any = None, **rest: Any) -> Prediction:
        """A prediction from the dictionary that `dataclasses.asdict` made of it."""
        read = None if loop is None else Loop(**loop)
        return Prediction(lines=tuple(Line(**line) for line in lines), loop=read, **rest)

    def __str__(self) -> str:
        more = self.step_seconds / self.plain_step_seconds - 1 if self.plain_step_seconds else 0.0
        head = [
            f"peak {_mib(self.peak_bytes)} of {_mib(self.budget_bytes)} allowed ({_mib(self.plain_peak_bytes)} with no "
            "region)" + (f", and {_mib(self.host_bytes)} of host memory" if self.host_bytes else ""),
            f"step {1000 * self.step_seconds:,.1f} ms on {self.device}: {more:+.1%} for {self.replay_flops / 1e9:,.1f} "
            f"GFLOP replayed; no schedule saves more than {self.gap:.1%} of it",
        ]
        if self.loop is not None:
            head.append(f"counted: {self.loop}")
        if self.timing:
            head.append(f"seconds: {self.timing}")
        rows = [("", "keeps MiB", "frees MiB", "costs ms", "why", "")]
        rows += [
            (
                f"{line.count} x",
                f"{line.saved_bytes / MIB:,.2f}",
                f"{line.freed_bytes / MIB:,.2f}",
                f"{1000 * line.seconds:,.3f}",
                line.why,
                f"{line.where}: {line.what}",
            )
            for line in self.lines
        ]
        return "\n".join([*head, *table(rows, right=5), *filter(None, [self.advice])])


def _mib(count: int) -> str:
    return f"{count / MIB:,.1f} MiB"
