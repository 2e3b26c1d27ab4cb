"""What a placed region frees and what its replays cost, taken while somebody watches.

The bytes are those of the tensors that autograd saves in the region's forward and that the region then drops: counted
by storage, so a norm's output that three projections save counts once, and only if the region left a place for it
(a parameter, an input, what a saved call stores is not freed). The cost is that of the replays: FLOPs of products, of
the first one, and seconds of every one but the first, which warms caches and runs under the counter of FLOPs. Where
decisions are not carried, those of one forward are compared with its replay's.

A step is watched if somebody asks for it (`Applied.watch`). Otherwise a region has no figures, which is all that a call
of it looks at: no mode is entered, no time taken. A call that began while it was watched takes its figures along, so
its replays are watched wherever the backward runs. Times are two events on CUDA, read when the figures are asked for.

Storages are told apart by weak references: a region drops what it saves, and the next tensor may well lie at the
same address.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch

from .. import _compat
from .._compat.capture import capturing
from .._compat.flops import flops
from .._frame import Frame
from .._replay import Replay
from ..values import Run, save_for_recompute
from .calls import Compare, Picks

COMPARED = "torch_recompute: decisions are compared"
Stamp = float | torch.cuda.Event


class Figures:
    """The figures of one placement.

    Attributes:
        saved_bytes: Bytes dropped by one call's forward; None before the first one.
        flops: FLOPs of one replay's products; None before the first one.
        replays: How often the region was replayed.
        decisions: How many decisions of one call were compared with those of its replay.
        watchers: How many watch the region.
    """

    def __init__(self) -> None:
        self.saved_bytes: int | None = None
        self.flops: int | None = None
        self.replays = 0
        self.decisions = 0
        self.watchers = 0
        self._flips: list[torch.Tensor] = []
        self._times: list[tuple[Stamp, Stamp]] = []
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the model is not watched

    @property
    def flips(self) -> int:
        """How many of these decisions came out differently."""
        return sum(int(count) for count in self._flips)

    @property
    def seconds(self) -> float | None:
        """Mean seconds of a replay, but for the first; None before the second. Waits for a device that is at work."""
        return sum(between(*times) for times in self._times) / len(self._times) if self._times else None

    def begin(self, stack: ExitStack, run: Run, compare: bool) -> None:
        """Called when the region's function starts, in forward or in a replay.

        Args:
            stack: What it enters is left when the function ends.
            run: The run it starts in.
            compare: Whether its decisions are compared, because they are not carried.
        """
        if isinstance(run, Frame):
            self._forward(stack, run, compare)
            return
        stack.enter_context(self.replay())
        then = None if run.trace is None else run.trace.values.get(COMPARED)
        if then is not None and type(run) is Replay:  # an audit's run is another kind, and compares for itself
            stack.enter_context(Compare(run, *then.get(run.name), seen=self._decided))

    def _forward(self, stack: ExitStack, frame: Frame, compare: bool) -> None:
        with self._lock:
            first = self.saved_bytes is None
            if first:
                self.saved_bytes = 0
        if not first:
            return
        seen: dict[int, weakref.ref[Any]] = {}

        def drop(tensor: torch.Tensor) -> None:
            if tensor.layout is not torch.strided:
                return
            storage = tensor.untyped_storage()
            known = seen.get(id(storage))
            if known is None or known() is not storage:
                seen[id(storage)] = weakref.ref(storage)
                self.saved_bytes = (self.saved_bytes or 0) + storage.nbytes()

        frame.watch(drop)
        if compare and not frame.replaying and not capturing():
            picks = Picks()
            save_for_recompute(picks, key=COMPARED)
            stack.enter_context(Compare(frame, picks))

    def _decided(self, flips: torch.Tensor, decisions: int) -> None:
        self._flips.append(flips)
        self.decisions += decisions

    @contextmanager
    def replay(self) -> Generator[None]:
        """Around the function in a replay. One that is captured in a CUDA graph does not run, and cannot be timed."""
        if capturing():
            yield
            return
        with self._lock:
            self.replays += 1
            first = self.replays == 1
        if first:
            with _Flops() as count:
                try:
                    yield
                finally:
                    self.flops = count.flops
            return
        start = stamp()
        try:
            yield
        finally:
            self._times.append((start, stamp()))


class Watched(Protocol):
    """What can be watched.

    Attributes:
        figures: Its figures while it is; else None.
    """

    figures: Figures | None


@contextmanager
def watching(watched: Iterable[Watched]) -> Generator[list[Figures]]:
    """Watches some regions; who watches one that is watched already shares its figures."""
    every = list(watched)
    found: list[Figures] = []
    for one in every:
        if one.figures is None:
            one.figures = Figures()
        one.figures.watchers += 1
        found.append(one.figures)
    try:
        yield found
    finally:
        for one, figures in zip(every, found, strict=True):
            figures.watchers -= 1
            if not figures.watchers:
                one.figures = None


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
