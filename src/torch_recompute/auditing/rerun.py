"""A region's function once more, as a replay would run it, but to its end.

`Again` is a replay that fills no slot and stops for none: it only counts what autograd saves, hands out what saved
calls and `replay(fn)` have stored, and ends where the engine has dropped what it would hand out, because no replay gets
that far. The world is put in place by the engine itself (`World.run`).

With noise, the floating inputs are written over for the time of the run, in their own memory: a copy would not be an
input of the region any more. They and all else that the run has written to are put back.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .. import _compat, errors
from .._frame import Frame
from .._reach import Reach, rebuild
from .._replay import Replay
from .._saved_call import SavedCall
from .._slots import Packed, Stop, unpack
from .._tree import each_once
from ..memory.ledger import storages
from ..memory.operations import leaves
from ..state import TensorState
from ..values import Trace, thread
from .comparing import print_of
from .recorder import Record, Recorder
from .surroundings import Generators, Places


class Again(Replay):
    """A replay that fills nothing and goes to the end.

    Attributes:
        stopped: Whether it ended before, where something had been dropped.
    """

    __slots__ = ("stopped",)

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame, (), None)
        self.stopped = False

    def go(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Runs the function under hooks that only count; calls whose results are not kept are repeated."""
        unread = list(_unread(self.trace))
        for record in unread:
            record.read = True
        _compat.push_hooks(self.pack, unpack)
        try:
            fn(*args, **kwargs)
        except Stop as stop:
            if stop.args[0] is not self:
                raise
            self.stopped = True
        finally:
            _compat.pop_hooks()
            for record in unread:
                record.read = False

    def event(self) -> None:
        """Goes on."""

    @_compat.see_through
    def pack(self, tensor: torch.Tensor, finished: bool = False) -> Packed:
        """Counts the tensor."""
        self.filled += 1
        return tensor.detach()

    def saved_call(self, record: SavedCall, inputs: Sequence[torch.Tensor]) -> None:
        """Ends where the output has been dropped."""
        if not record.finished or record.dropped:
            raise Stop(self)

    def next_child(self) -> Trace | None:
        """The trace of the next nested region; ends where outputs of saved calls in it have been dropped."""
        child = super().next_child()
        if child is not None and child.spare and _has_dropped(child):
            raise Stop(self)
        return child


def _unread(trace: Trace | None) -> Iterator[SavedCall]:
    """The calls of a run and of those in it whose results have no values in a replay."""
    if trace is not None:
        yield from (one for one in trace.records if isinstance(one, SavedCall) and one.unread and not one.read)
        for _, child in trace.children:
            yield from _unread(child)


def _has_dropped(trace: Trace) -> bool:
    saved = (record for record in trace.records if isinstance(record, SavedCall))
    return any(record.dropped for record in saved) or any(
        child is not None and _has_dropped(child) for _, child in trace.children
    )


class Outcome:
    """What came of a second run.

    Attributes:
        record: What it did.
        inputs_differ: Whether the engine could not give it the inputs of the first run.
        error: What it raised.
        changed: What the engine would say instead of replaying, because something has been changed in place.
        rewritten: Memory that it has changed and that was not put back by the engine, by `id` of the storage.
        places: What else it has changed: attributes, closure variables, globals.
        ended_early: Whether it stopped where the engine has dropped what comes next.
        generators: The generators that it has advanced and that were not put back by the engine.
        names: What the function calls tensors that it reaches, by `id` of the storage.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        self.inputs_differ = False
        self.error: Exception | None = None
        self.changed: errors.ChangedError | None = None
        self.rewritten: list[int] = []
        self.places: list[str] = []
        self.generators: list[str] = []
        self.ended_early = False
        self.names: dict[int, str] = {}


def run_again(
    recorder: Recorder, first: Record, around: Callable[[Any], Places], noise: float = 0.0, seed: int = 0
) -> Outcome:
    """Runs a region's function again and says what came of it; what it has changed is put back.

    Args:
        recorder: What watches.
        first: The first run.
        around: Takes a snapshot of what lies around a function.
        noise: How much to change the floating inputs, relative to themselves.
        seed: For the noise.
    """
    frame = first.frame
    outcome = Outcome(Record(frame))
    outcome.record.line = first.line
    with recorder.deaf():
        try:
            frame._world.check(frame.name)  # pyright: ignore[reportPrivateUsage]
            frame.inputs.check(frame.name)
        except errors.ChangedError as error:
            outcome.changed = error
        try:
            args, kwargs, cells, _ = frame.inputs.open()
        except errors.RecomputeError as error:  # rebuilt by another region, which is the one to blame
            outcome.inputs_differ, outcome.error = True, error
            return outcome
        given = list(leaves([*args, kwargs]))
        outcome.inputs_differ = outcome.changed is not None or not _same(first, given)
        before = {key: (one, one.storage.clone()) for key, one in first.written.items()}
        fn = rebuild(frame._template, cells)  # pyright: ignore[reportPrivateUsage]
        outcome.names = _names(fn)
        places, generators = around(fn), Generators()
        contexts = frame._contexts  # pyright: ignore[reportPrivateUsage]
        run = Again(frame)
        grad, outer = torch.is_grad_enabled(), thread.run
        _compat.set_grad_enabled(True)
        thread.run = run
        try:
            with _disturbed([*given, *cells], noise, seed):
                frame._world.run(frame.name, _go, recorder, outcome.record, run, fn, contexts, args, kwargs)  # pyright: ignore[reportPrivateUsage]
        except Exception as error:
            outcome.error = error.with_traceback(None)
        finally:
            thread.run = outer
            _compat.set_grad_enabled(grad)
        outcome.ended_early = run.stopped
        outcome.places, outcome.generators = places.changes(), generators.advanced()
        places.restore()
        generators.restore()
        restored = frame.restored
        for key, one in outcome.record.written.items():
            if key not in before and not one.is_among(restored):
                before[key] = one, one.before
        for key, (one, content) in before.items():
            if not one.same(content):
                outcome.rewritten.append(key)
                one.storage.copy_(content)
    return outcome


def _go(
    recorder: Recorder, record: Record, run: Again, fn: Callable[..., Any], contexts: Any, args: Any, kwargs: Any
) -> None:
    with recorder.listening_to(Again.go.__code__, record):
        if contexts is None:
            run.go(fn, args, kwargs)
        else:
            with contexts:
                run.go(fn, args, kwargs)


def _names(fn: Callable[..., Any]) -> dict[int, str]:
    reach = Reach(fn)
    return {id(storage): seen.label() for seen in reach.mutable(True) for _, storage in storages(seen.tensor)}


def _same(first: Record, given: Sequence[torch.Tensor]) -> bool:
    """Whether the inputs are those of the first run."""
    for then, tensor in zip(first.inputs, given, strict=False):
        now = print_of(tensor)
        if then is not None and now is not None and not then.same(now):
            return False
    return True


@contextmanager
def _disturbed(tensors: Sequence[torch.Tensor], noise: float, seed: int) -> Generator[None]:
    """Noise on the floating tensors, in place, for the time being."""
    chosen = [
        tensor
        for tensor in tensors
        if noise
        and tensor.is_floating_point()
        and tensor.layout is torch.strided
        and _compat.is_plain(tensor)
        and _compat.parameter_of(tensor) is None
    ]
    state = TensorState(*chosen)
    before = state.capture()
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in chosen:
            data = each_once(tensor.data)
            factor = 1 + noise * torch.randn(data.shape, generator=random)
            data.copy_(data * factor.to(data.device, torch.float64 if data.dtype is torch.float64 else torch.float32))
    try:
        yield
    finally:
        state.restore(before)
