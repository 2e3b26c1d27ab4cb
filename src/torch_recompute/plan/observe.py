"""What a placed region frees and what its replays cost, seen while it trains.

The bytes are those of the tensors that autograd saves in the region's forward and that the region then drops: counted
by storage, so a norm's output that three projections save counts once, and only if the region left a place for it
(a parameter, an input, what a saved call stores is not freed). The cost is that of the replays: seconds of every one
but the first, which warms caches, and FLOPs of products, of one. Where decisions are not carried, those of one forward
are compared with its replay's.

Looking at every saved tensor and every operation is not free, so it is done in one step: the first after `apply`, or
after a report was taken. From then on a replay is only timed (0.3 us; on CUDA two events, read when a report is taken).

Storages are told apart by weak references: a region drops what it saves, and the next tensor may well lie at the
same address.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from .. import _compat
from .._compat.capture import capturing
from .._compat.flops import flops
from .._frame import Frame
from ..values import Run, save_for_recompute

COMPARED = "torch_recompute: decisions are compared"
Stamp = float | torch.cuda.Event


class Figures:
    """The figures of one placement.

    Attributes:
        saved_bytes: Bytes dropped by one call's forward; None before the first one.
        flops: FLOPs of one replay's products; None before the first one.
        replays: How often the region was replayed.
        decisions: How many decisions of one call were compared with those of its replay.
    """

    def __init__(self) -> None:
        self.saved_bytes: int | None = None
        self.decisions = 0
        self._flips: list[torch.Tensor] = []
        self.flops: int | None = None
        self.replays = 0
        self._seconds = 0.0
        self._pending: list[tuple[Any, Any]] = []

    def __reduce__(self) -> Any:
        return Figures, ()  # a copy of the model has figures of its own

    def start_again(self) -> None:
        """Forgets everything, so that the next step is looked at."""
        self.__init__()

    @property
    def flips(self) -> int:
        """How many of these decisions came out differently."""
        return sum(int(count) for count in self._flips)

    def decided(self, flips: torch.Tensor, decisions: int) -> None:
        """Called by a replay that compares its decisions with the forward's."""
        self._flips.append(flips)
        self.decisions += decisions

    def compares(self, run: Run) -> bool:
        """Whether the decisions of this run are compared: those of a forward that is looked at, and of its replays."""
        if not run.replaying and self.saved_bytes is None:
            save_for_recompute(key=COMPARED)
        return run.trace is not None and COMPARED in run.trace.values

    def forward(self, frame: Frame) -> None:
        """Called when the function starts in a forward."""
        if self.saved_bytes is None:
            self.saved_bytes, seen = 0, {}

            def drop(tensor: torch.Tensor, seen: dict[int, weakref.ref[Any]] = seen) -> None:
                if tensor.layout is not torch.strided:
                    return
                storage = tensor.untyped_storage()
                known = seen.get(id(storage))
                if known is None or known() is not storage:
                    seen[id(storage)] = weakref.ref(storage)
                    self.saved_bytes = (self.saved_bytes or 0) + storage.nbytes()

            frame.watch(drop)

    @contextmanager
    def replay(self) -> Generator[None]:
        """Around the function in a replay. One that is captured in a CUDA graph does not run, and cannot be timed."""
        if capturing():
            yield
            return
        start = stamp()
        try:
            if self.flops is None:
                self.flops = 0
                with _Flops() as count:
                    try:
                        yield
                    finally:
                        self.flops = count.flops
            else:
                yield
        finally:
            if self.replays:
                self._pending.append((start, stamp()))
                if len(self._pending) > 64:
                    self._settle()
            self.replays += 1

    @property
    def seconds(self) -> float | None:
        """Mean seconds of a replay, but for the first; None before the second."""
        self._settle()
        return self._seconds / (self.replays - 1) if self.replays > 1 else None

    def _settle(self) -> None:
        for start, end in self._pending:
            self._seconds += between(start, end)
        self._pending.clear()


def stamp() -> Stamp:
    """The present moment: on CUDA an event, so that nothing is waited for."""
    if torch.cuda.is_initialized():
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    return time.perf_counter()


def between(start: Any, end: Any) -> float:
    """Seconds from one moment to another."""
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1000


class _Flops(_compat.TorchDispatchMode):
    """Counts the FLOPs of products."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.flops += flops(func, args, kwargs or {}, out)
        return out
