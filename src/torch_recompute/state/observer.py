"""Observers of regions that run: one protocol, and one stack per thread of what runs.

Plans count what a region drops, measurements say in which region memory was made, the doctor counts operations by
region, the planner times replays. All of them use an `Observer`:

    with observing(mine):
        model(batch).sum().backward()

Every region that is called in the block, on this thread, is shown to `mine`: its forward, the calls in it, and its
replays, on whichever thread the backward runs and however long after the block. `running()` is the stack of what runs.

A region without observers only checks one field that is None. So nothing is kept for observers that come
later: a call that began without observers stays without.

An out-of-memory error is the one event that is always shown, to `always`: where it passes through
a region, lines are added to its text, once, by the innermost region. It stays the same object of the same class, so
`except torch.OutOfMemoryError` and code that reads its text (batch-size finders) work as before. Rejected: `add_note`,
which Python 3.10 does not have and which `str(error)`, and so many a log, leaves out.

Invariant: a region's call refers to its observers as long as its graph is alive, so an observer refers to none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch


class Running(NamedTuple):
    """Something of a region that runs.

    Attributes:
        kind: "forward" and "replay" of the region's function; "rebuild", all of a replay with what the engine does
            around the function; "saved call"; "choice", a call of `replay(fn)` in forward.
        name: The region's name, or the call's.
        run: The region's call (`RegionCall`) for "forward" and "rebuild", else the run that it is, or is a call in.
        args: Positional arguments of the function.
        kwargs: Its keyword arguments.
    """

    kind: str
    name: str
    run: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None


class Observer:
    """Watches regions. This one sees everything and does nothing."""

    def around(self, running: Running) -> AbstractContextManager[Any]:
        """Entered before something of a region runs, on its thread, and left after it."""
        return nullcontext()

    def dropped(self, region_call: Any, tensor: torch.Tensor) -> None:
        """Called with a tensor that autograd saves in a region's forward and that the region does not keep."""

    def out_of_memory(self, region: str, text: str) -> str:
        """The lines to add to an error that memory ran out, from the region's name and the error's own text."""
        return ""


class Observers:
    """All the observers of a region's call, as the engine calls them."""

    def __init__(self, each: tuple[Observer, ...]) -> None:
        self.each = each

    def around(self, kind: str, name: str, run: Any, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The function, observed."""

        def observed(*args: Any, **kwargs: Any) -> Any:
            at = Running(kind, name, run, args, kwargs)
            here.running.append(at)
            try:
                with ExitStack() as entered:
                    for observer in self.each:
                        entered.enter_context(observer.around(at))
                    return fn(*args, **kwargs)
            finally:
                here.running.pop()

        return observed

    def dropped(self, region_call: Any, tensor: torch.Tensor) -> None:
        """Passes on a tensor, unless the call keeps what it saves."""
        for observer in () if region_call.resident else self.each:
            observer.dropped(region_call, tensor)


class _Here(threading.local):
    """This thread's part.

    Attributes:
        observers: Observers of the regions that are called now; None without any. A replay has those of its forward.
        running: What runs of the regions that are observed, the outermost first.
        again: Whether an elastic region around runs again where memory runs out, so that an error is not told yet.
    """

    def __init__(self) -> None:
        self.observers: Observers | None = None
        self.running: list[Running] = []
        self.again = False


here = _Here()

always: list[Observer] = []
"""The observers that every error that memory ran out in a region is passed to."""


def running() -> tuple[Running, ...]:
    """Returns what runs on this thread of the regions that are observed, the outermost first."""
    return tuple(here.running)


@contextmanager
def observing(*observers: Observer) -> Generator[None]:
    """Shows the regions that are called in the block to some observers, besides those that are there already.

    Without any, it keeps the stack of what runs.
    """
    before = here.observers
    here.observers = Observers((*(() if before is None else before.each), *observers))
    try:
        yield
    finally:
        here.observers = before


# --- an error passes --------------------------------------------------------------------------------------------------

_TOLD = "torch_recompute_region"
_CPU = "DefaultCPUAllocator"  # on a CPU the allocator raises a plain RuntimeError that says who it is


def is_exhaustion(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    return isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and _CPU in str(error))


def tell(error: BaseException, region: str, *, replaying: bool) -> None:
    """Adds to an error that memory ran out what is known here; leaves any other alone.

    Args:
        error: What is passing through.
        region: The region's name.
        replaying: Whether it ran again, in backward.
    """
    if here.again or not is_exhaustion(error) or hasattr(error, _TOLD):
        return
    setattr(error, _TOLD, region)
    text = "\n".join(map(str, error.args))
    where = f"Out of memory in the region {region}, in its {'replay' if replaying else 'forward'}."
    observers = (*always, *(() if here.observers is None else here.observers.each))
    said = [where, *(_asked(observer, region, text) for observer in observers)]
    lines = [line for part in said for line in part.split("\n") if line]
    error.args = ("\n".join([text, *(f"  {line}" for line in lines)]),)


def _asked(observer: Observer, region: str, text: str) -> str:
    try:
        return observer.out_of_memory(region, text)
    except Exception as failure:  # looking must not hide what it looks at
        return f"What was alive could not be found out ({type(failure).__name__}: {failure})."
