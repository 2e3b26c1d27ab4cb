"""Simulates what elastic regions take: the table that a pool would otherwise fill in its first steps."""

from __future__ import annotations

from ..memory.elastic import Rehearsal
from ..memory.ledger import Ledger
from ..memory.measurement import running
from ..plan.apply import Applied, apply
from ..plan.plan import Plan
from .recording import Recording
from .step import simulate_step
from .training_step import TrainingStep


class LedgerMeter:
    """A `Meter` of the simulated step that is recorded now; there are no bytes where none is."""

    def __init__(self) -> None:
        self._before, self._since = 0, 0

    def _ledger(self) -> Ledger | None:
        recording = running()
        return recording.here if isinstance(recording, Recording) else None

    def live(self) -> int:
        """Returns the bytes alive now."""
        ledger = self._ledger()
        if ledger is None:
            return 0
        ledger.book_deaths()
        return ledger.live

    def reset_lap(self) -> None:
        """Begins a lap."""
        ledger = self._ledger()
        self._before, self._since = self.live(), 0 if ledger is None else len(ledger.timeline)

    def lap(self) -> int:
        """Returns the most bytes alive since `reset_lap`, workspaces included."""
        ledger = self._ledger()
        since = () if ledger is None else ledger.timeline[self._since :]
        return max(self.live(), self._before, *(sample.live_bytes for sample in since), 0)


def rehearse(step: TrainingStep, plan: Plan) -> Applied:
    """Returns the plan as it was in a simulated step in which its regions kept nothing, for the regions of a handle."""
    memory, handles = Rehearsal(LedgerMeter()), list[Applied]()
    simulate_step(step, prepare=lambda model: handles.append(apply(model, plan, elastic=memory)))
    return handles[-1]
