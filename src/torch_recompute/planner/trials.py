"""One way to treat a segment, tried: it runs forward and backward alone, with the real engine, on fake tensors.

What most choices take is read from a record of one run (`evaluate.py`). A trial is for what that has no rule for, such
as host memory and tiles, and for the law that compares both: the segment's own modules get the plan that is to be
priced, run once under `measure`, and the figures of `Option` are read off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..engine.shape_only import refusing
from ..memory.operations import Operation
from ..plan.apply import apply
from ..plan.choice import Choice
from ..plan.plan import Plan
from ..simulation.fake_mode import FakeMode
from ..simulation.recording import SimulatedMeasurement
from ..state.observer import observing, running
from .alone import Figures, SegmentCall, Stage, alone, run_alone
from .hosts import SimulatedHostStore
from .ops import Op, is_kept, op_of


@dataclass(frozen=True)
class Tried(Figures):
    """The figures of a segment under some choices, with how often each operation ran, forward and backward."""

    ops: Counter[Op] = field(default_factory=Counter[Op])


def attempt(call: SegmentCall, choices: Sequence[Choice], pretend: FakeMode, *, frees: bool = False) -> Tried:
    """Runs a segment under some choices.

    Args:
        call: The segment.
        choices: Their paths are relative to the modules: "0" is the first one, "0.mlp" a part of it.
        pretend: The mode of its fake tensors, which is active.
        frees: Whether the gradients of parameters are freed as they come.

    Raises:
        RecomputeError: The engine refuses the choices, or they say that what is read is unread.
    """
    host = SimulatedHostStore()
    stores = {"host": host} if any(choice.store for choice in choices) else {}
    with alone(call, frees=frees) as modules, refusing():
        handle = apply(modules, Plan(tuple(choices)), stores=stores)
        try:
            trial = _Trial(pretend, host, any(choice.keep or choice.carry for choice in choices))
            with trial.measurement.track(modules), observing():
                run_alone(call, trial.at)
            return trial.result()
        finally:
            handle.remove()


class _Trial:
    """Counts the operations and reads the levels of a trial."""

    def __init__(self, pretend: FakeMode, host: SimulatedHostStore, keeps: bool) -> None:
        self.measurement = SimulatedMeasurement(None, pretend, self._see)
        self._host, self._keeps = host, keeps
        self._ran: Counter[Op] = Counter()
        self._calls = self._watched = 0
        self._stage = Stage.BEFORE
        self._level = self._forward = self._saved = self._host_bytes = self._start = 0

    def at(self, stage: Stage, _: list[torch.Tensor]) -> None:
        """Notes the levels with which a stage begins."""
        self._stage = stage
        timeline = self.measurement.timeline
        if stage is Stage.BEFORE:
            self._level = self.measurement.live_bytes
        elif stage is Stage.FORWARD:
            self._start = len(timeline)
        elif stage is Stage.RETURNED:
            self._forward = max(sample.live_bytes for sample in timeline[self._start - 1 :])
        elif stage is Stage.TURN:
            self._host.settle()
            self._saved, self._host_bytes = self.measurement.live_bytes, self._host.host_bytes
            self._start = len(self.measurement.timeline)

    def _see(self, operation: Operation) -> None:
        op = op_of(operation)
        if op is None:
            return
        if self._stage not in (Stage.BEFORE, Stage.TURN):
            self._ran[op] += 1
        if self._keeps and running():
            self._watched += 1
            self._calls += is_kept()

    def result(self) -> Tried:
        """The figures."""
        after = (sample.live_bytes for sample in self.measurement.timeline[self._start :])
        levels = self._saved, self._forward, max(after, default=self._saved)
        saved, forward, backward = (level - self._level for level in levels)
        return Tried(
            saved_bytes=saved,
            forward_bytes=forward,
            backward_bytes=backward,
            host_bytes=self._host_bytes,
            calls=self._calls,
            watched=self._watched,
            ops=self._ran,
        )
