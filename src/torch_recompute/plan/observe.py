"""Figures of a plan's regions: what each drops and what its replays cost, while they are watched (`Applied.watch`).

The bytes are those of the tensors that autograd saves in the region's forward and that the region then drops, counted
by storage. The cost is that of the replays: FLOPs of products, of the first one, and seconds of every one but the
first, which warms caches and runs under the counter of FLOPs. Times are two events on CUDA, read when the figures are
asked for. Where decisions are not carried, those of one forward are compared with its replay's.

A region that is not watched has no figures, which is all that a call of it looks at. A call that began while it was
watched has its figures for an observer, so its replays are watched wherever the backward runs.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from .._torch.devices import capturing
from .._torch.flops import flops
from ..engine.region_call import RegionCall
from ..memory.ledger import CountedOnce
from ..memory.meter import Stamp, between, stamp
from ..memory.operations import Operation, Operations
from ..state.observer import Observer, Running, running
from ..state.tape import Run, thread
from ..state.values import save_for_recompute
from ..stores import Store
from .calls import Compare, Picks

COMPARED = "torch_recompute: decisions are compared"


class Figures(Observer):
    """The figures of one region of a plan.

    Args:
        name: The region's. Of nested ones of this name the bytes are those of the innermost, and all replays count.
        compare: Whether decisions are compared, because they are not carried.

    Attributes:
        saved_bytes: Bytes dropped by one call's forward, or given to the store by it; None before the first one.
        flops: FLOPs of one replay's products; None before the first one.
        replays: How often the region was replayed.
        decisions: How many decisions of one call were compared with those of its replay.
        watchers: How many watch the region.
    """

    def __init__(self, name: str = "", compare: bool = False) -> None:
        self.saved_bytes: int | None = None
        self.flops: int | None = None
        self.replays = 0
        self.decisions = 0
        self.watchers = 0
        self._name, self._compare = name, compare
        self._first: weakref.ref[RegionCall] | None = None
        self._dropped = CountedOnce()
        self._flips: list[torch.Tensor] = []
        self._times: list[tuple[Stamp, Stamp]] = []
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the model is not watched

    @property
    def flips(self) -> int:
        """The number of these decisions that the replay made otherwise."""
        return sum(int(count) for count in self._flips)

    @property
    def seconds(self) -> float | None:
        """Mean seconds of a replay but the first; None before the second. Waits for the device."""
        return sum(between(*times) for times in self._times) / len(self._times) if self._times else None

    def around(self, running: Running) -> AbstractContextManager[Any]:
        """Takes the figures of a forward or a replay of the region."""
        if running.name == self._name and running.kind in ("forward", "replay"):
            return self._forward(running.run) if running.kind == "forward" else self._replay(running.run)
        return nullcontext()

    @contextmanager
    def _forward(self, region_call: RegionCall) -> Generator[None]:
        with self._lock:
            around = self._first and self._first()
            inner = around is not None and any(at.run is around for at in running()[:-1])
            first = self.saved_bytes is None or inner
            if first:
                self.saved_bytes, self._first, self._dropped = 0, weakref.ref(region_call), CountedOnce()
        run: Any = thread.run
        if first and self._compare and not run.replaying and not capturing():
            picks = Picks()
            save_for_recompute(picks, key=COMPARED)
            with Compare(run, picks):
                yield
        else:
            yield

    def dropped(self, region_call: Any, tensor: torch.Tensor) -> None:
        """Counts the memory of a tensor."""
        if self._first is not None and self._first() is region_call:
            self.saved_bytes = (self.saved_bytes or 0) + self._dropped.add(tensor)

    def counting(self, store: Store) -> Store:
        """The store of an offloaded module; in its first call, one that counts the memory that it is given."""
        if self.saved_bytes is not None:
            return store
        self.saved_bytes = 0
        return _Counting(store, self)

    def moved(self, tensor: torch.Tensor) -> None:
        """Counts memory that is given to a store."""
        self.saved_bytes = (self.saved_bytes or 0) + self._dropped.add(tensor)

    @contextmanager
    def _replay(self, run: Run) -> Generator[None]:
        """Around the function in a replay. One that is captured in a CUDA graph does not run, and cannot be timed."""
        then = run.tape.values.get(COMPARED)
        with self._timed(), nullcontext() if then is None else Compare(run, *then.get(run.name), seen=self._decided):
            yield

    def _decided(self, flips: torch.Tensor, decisions: int) -> None:
        self._flips.append(flips)
        self.decisions += decisions

    def _count(self, ran: Operation) -> None:
        self.flops = (self.flops or 0) + flops(ran.func, ran.args, ran.kwargs, ran.out)

    @contextmanager
    def _timed(self) -> Generator[None]:
        if capturing():
            yield
            return
        with self._lock:
            self.replays += 1
            first = self.replays == 1
        if first:
            self.flops = 0
            with Operations(self._count):
                yield
            return
        start = stamp()
        try:
            yield
        finally:
            self._times.append((start, stamp()))


class _Counting:
    """A store whose puts are counted."""

    def __init__(self, store: Store, figures: Figures) -> None:
        self._store, self._figures = store, figures

    def put(self, tensor: torch.Tensor) -> Any:
        """Puts a tensor into the store."""
        self._figures.moved(tensor)
        return self._store.put(tensor)

    def get(self, handle: Any) -> torch.Tensor:
        """Gets a tensor from the store."""
        return self._store.get(handle)


@contextmanager
def watching(watched: Sequence[Any]) -> Generator[list[Figures]]:
    """Watches regions and offloaded modules of a plan; one that is watched already keeps its figures."""
    for one in watched:
        one.figures = one.figures or Figures(one.name, compare=not one.choice.carry)
        one.figures.watchers += 1
    found: list[Figures] = [one.figures for one in watched]
    try:
        yield found
    finally:
        for one, figures in zip(watched, found, strict=True):
            figures.watchers -= 1
            if not figures.watchers:
                one.figures = None
