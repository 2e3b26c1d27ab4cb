"""What one process says of its trial, as plain data that goes through files and between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

DONE = "done"
OUT = "OOM"
REFUSED = "REFUSED"
NO_PLAN = "NO PLAN"
FAILED = "FAILED"
MISMATCH = "MISMATCH"
STOPPED = "stopped"
"""On this rank nothing went wrong, but on another."""
WORST = (REFUSED, NO_PLAN, OUT, FAILED, MISMATCH, STOPPED, DONE)


@dataclass(frozen=True)
class Record:
    """A trial on one rank.

    Attributes:
        status: How it ended: one of `WORST`.
        detail: Where and why, unless it is done.
        losses: Of all steps, as exact hexadecimals.
        seconds: Of the timed steps.
        allocated_bytes: The most alive in a step.
        reserved_bytes: The most that the process has taken for it from the system or the device.
        flops: Of a step without replays; None where it was not, or could not be, counted.
        replay_flops: Of the replays; likewise.
        uncounted: Why there are no FLOPs, if that could be asked.
        items: How many tokens or samples a step has.
        unit: Which of both.
        device: The device's name.
        parameters: How many the model has.
        regions: How many the plan has.
        predicted_peak_bytes: What the plan promises, where it was made for a budget.
        plan: The plan as JSON, where it was to be made.
    """

    status: str
    detail: str = ""
    losses: Sequence[str] = ()
    seconds: Sequence[float] = ()
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    flops: int | None = None
    replay_flops: int | None = None
    uncounted: str = ""
    items: int = 0
    unit: str = "tokens"
    device: str = ""
    parameters: int = 0
    regions: int = 0
    predicted_peak_bytes: int | None = None
    plan: str | None = None

    def as_data(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def worst(records: Sequence[Record]) -> Record:
    """The one that says what became of the trial."""
    return min(records, key=lambda record: WORST.index(record.status))
