"""`measure`: a block of code, watched operation by operation, and the figures that come out.

A dispatch mode counts the storages of every operation's results under "activations"; better names come later. A tensor
hook on each tracked parameter sees what backward delivers, an optimizer's own step hooks bracket what it allocates.
Nothing else of the model or of torch is touched, and all hooks are gone after the block.

The categories sum to the total, at the peak and now. A storage made before the block counts only if it is named
(`measure(model, optimizer)`, `track`), and so does one that no operator made (`torch.load`). After the block nothing
new is counted, but deaths still are: `live_bytes` then says what the block has left behind. Devices have separate
ledgers.

What is to be compiled runs uncompiled in the block, and a warning says so: under a mode Dynamo would skip it, for good.

Not seen: threads that the user starts (autograd's own are seen), sparse tensors, and what no operator returns, such as
the 5 kB of a random generator's state in each checkpoint. The CUDA allocator's peak statistics are reset when a
measurement begins.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import defaultdict
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

from .. import _torch
from .._torch import in_backward
from .._torch.compiler import all_uncompiled, calls_compiled
from .._torch.modes import without_functions
from ..errors import ArgumentError, RecomputeError
from ..errors.text import in_html, shown
from ..state.observer import observing
from ..state.values import doing_recompute
from . import allocator
from .ledger import (
    ACTIVATIONS,
    BUFFERS,
    GRADIENTS,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    Ledger,
    Place,
    Sample,
    blocks_of,
    by_category,
    storages,
)
from .operations import ADDED, Operation, Operations, place_in_code
from .snapshot import write_snapshot
from .workspaces import watched, workspace

if TYPE_CHECKING:
    from typing_extensions import Self


@shown
class Reading(NamedTuple):
    """The figures of one device.

    Attributes:
        device: The device these figures are of.
        peak_bytes: The most bytes alive at any one operation, on the CPU with its workspace, or when the block began.
        live_bytes: The bytes alive now; after the block, those of its storages that still are.
        by_category: `peak_bytes`, split; every category is there, and they sum to it.
        live_by_category: `live_bytes`, split in the same way.
        timeline: The bytes alive when the block began, and after each operation that changed them.
        allocator_peak_bytes: On CUDA the allocator's own peak, rounding and untracked tensors included; else None.
        reserved_peak_bytes: On CUDA the most that the allocator held from the device, which is what has to fit onto it;
            what exceeds `allocator_peak_bytes` is fragmentation and freed memory that it kept. Else None.
    """

    device: torch.device
    peak_bytes: int
    live_bytes: int
    by_category: dict[str, int]
    live_by_category: dict[str, int]
    timeline: tuple[Sample, ...]
    allocator_peak_bytes: int | None
    reserved_peak_bytes: int | None

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {count:,}" for name, count in self.by_category.items() if count)
        held = self.reserved_peak_bytes
        more = "" if held is None else f"; the allocator {self.allocator_peak_bytes:,}, of {held:,} reserved"
        return f"measurement on {self.device}: peak {self.peak_bytes:,} bytes ({parts or 'nothing'}){more}"


def weights_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters of an optimizer."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def _roots(model: nn.Module) -> list[nn.Module]:
    """A model, and the modules that it hides in lists, tuples and dicts, as a teacher that is not to be trained."""
    roots, seen = [model], set[nn.Module]()
    for root in roots:  # grows while it is read
        found = [*root.modules()]
        seen.update(found)
        held = (leaf for module in found for leaf in _torch.tree_leaves(vars(module)) if isinstance(leaf, nn.Module))
        roots += {one: None for one in held if one not in seen and one not in roots}
    return roots


_running: list[Measurement] = []


def running() -> Measurement | None:
    """Returns the measurement that runs, the innermost of several; None where none does."""
    return _running[-1] if _running else None


class Measurement:
    """Bytes alive in a `with` block, and what they are for; made by `measure`.

    It may be read inside the block and after it, as often as wanted, and measurements nest.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._lock = threading.RLock()
        self._ledgers: defaultdict[torch.device, Ledger] = defaultdict(Ledger)
        self._tracked: dict[int, weakref.ref[Any]] = {}  # parameters, modules and optimizers, by `id`
        self._watch: ExitStack | None = None  # what ends with the block
        self._entered = False
        self._in_step = False
        self._events = 0
        self._compiled = False  # whether something that is to be compiled was called
        self._allocator_peaks: dict[int, allocator.Peak] = {}

    def track(self, *things: nn.Module | torch.optim.Optimizer | torch.Tensor) -> Self:
        """Names what no operation of the block made: from now on it counts, and under its own category.

        Args:
            things: Modules (their parameters, buffers and gradients, and tensors that they hold as plain attributes,
                also those that they come to hold, counted as "other": `torch.nn.utils.weight_norm` computes its weight
                into one, and `torch.get_rng_state()` makes one without an operation; modules that they hold in lists,
                tuples and dicts are counted alike), optimizers (their parameters, gradients and state, also the state
                made later) and tensors (counted as "other").

        Returns:
            The measurement itself.
        """
        with self._lock:
            if self._entered and self._watch is None:
                raise RecomputeError("This measurement is over, so nothing more is counted. " + _AGAIN)
            for thing in things:
                if isinstance(thing, nn.Module):
                    if any(map(nn.parameter.is_lazy, (*thing.parameters(), *thing.buffers()))):
                        raise ArgumentError(
                            f"{type(thing).__name__} has parameters without a shape (a LazyModule), which take no "
                            "memory yet.\n  Call it once before it is measured:  with torch.no_grad(): model(*batch)"
                        )
                    for root in _roots(thing):
                        self._track_parameters(root.parameters())
                        self._mark(tuple(root.buffers()), BUFFERS)
                        self._follow(root)
                elif isinstance(thing, torch.optim.Optimizer):
                    self._track_parameters(weights_of(thing))
                    self._follow(thing)
                elif isinstance(thing, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
                    self._mark(thing, OTHER)
                else:
                    raise ArgumentError(
                        f"A measurement can track modules, optimizers (torch.optim.Optimizer) and tensors, not a "
                        f"{type(thing).__name__}. Name the tensors that it holds: m.track(*tensors)"
                    )
            self._look()
        return self

    @property
    def device(self) -> torch.device:
        """The device asked for, else the busiest accelerator in the measurement, else the CPU."""
        return self.on().device

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Every device on which something was counted."""
        with self._lock:
            return tuple(self._ledgers)

    def on(self, device: torch.device | str | None = None) -> Reading:
        """Returns all the figures of one device; without an argument, those that the properties show."""
        with self._lock:
            chosen = self._choose(self._device if device is None else torch.device(device))
            self._look()
            ledger = self._ledgers.get(chosen, Ledger())
            held = None
            if chosen.type == "cuda":
                if self._watch is not None:
                    allocator.read(self._allocator_peaks)
                held = self._allocator_peaks.get(chosen.index or 0, allocator.Peak())
            return Reading(
                device=chosen,
                peak_bytes=ledger.peak,
                live_bytes=ledger.live,
                by_category=by_category(ledger.at_peak()),
                live_by_category=by_category(ledger.alive()),
                timeline=tuple(ledger.timeline),
                allocator_peak_bytes=None if held is None else held.allocated,
                reserved_peak_bytes=None if held is None else held.reserved,
            )

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once, see `Reading`."""
        return self.on().peak_bytes

    @property
    def live_bytes(self) -> int:
        """The bytes alive now, see `Reading`."""
        return self.on().live_bytes

    @property
    def by_category(self) -> dict[str, int]:
        """The bytes of the peak by category, see `Reading`."""
        return self.on().by_category

    @property
    def live_by_category(self) -> dict[str, int]:
        """The bytes alive now by category, see `Reading`."""
        return self.on().live_by_category

    @property
    def timeline(self) -> tuple[Sample, ...]:
        """The bytes alive after each operation that changed them, see `Reading`."""
        return self.on().timeline

    @property
    def allocator_peak_bytes(self) -> int | None:
        """The CUDA allocator's own peak, see `Reading`."""
        return self.on().allocator_peak_bytes

    @property
    def reserved_peak_bytes(self) -> int | None:
        """The most that the CUDA allocator held from the device, see `Reading`."""
        return self.on().reserved_peak_bytes

    def to_snapshot(self, path: Path | str, device: torch.device | str | None = None) -> None:
        """Writes the measured step for the viewer of allocations at https://pytorch.org/memory_viz.

        Bytes are coloured by category, and show which operation made them, in which line, phase and region. Nothing
        of an allocator is in it: each storage is a segment of its own.

        Args:
            path: The file, a pickle in the form of `torch.cuda.memory._snapshot()`.
            device: The device, as for `on`.

        Raises:
            OSError: It cannot be written.
        """
        with self._lock:
            chosen = self.on(device).device
            ledger = self._ledgers.get(chosen, Ledger())
            ledger.stamp(self._events + 1)
            write_snapshot(Path(path), blocks_of(ledger.changes), chosen.index or 0)

    def __repr__(self) -> str:
        return f"<{self.on()}>"

    def _repr_html_(self) -> str:
        return in_html(self.on())

    def __enter__(self) -> Self:
        if self._entered:
            raise RecomputeError("This measurement was entered before; one measurement is one block. " + _AGAIN)
        self._entered = True
        with self._lock:
            self._watch = ExitStack()
            allocator.begin(self._allocator_peaks)
            self._watch.callback(allocator.end, self._allocator_peaks)
            _running.append(self)
            self._watch.callback(_running.remove, self)
            for thing in self._alive():
                self._hook(thing, self._watch)
            self._look()
            for ledger in self._ledgers.values():
                ledger.sample(self._events, "")
        self._watch.enter_context(self._watching())
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            if self._watch is None:
                return
            self._look()
            self._tracked.clear()
            ended, self._watch = self._watch, None
        ended.close()

    def _book(self, ran: Operation) -> None:
        """Counts one operation: its new storages, and any known one that changed size."""
        func = ran.func
        with self._lock:
            self._events += 1
            for device, storage in ran.given:
                self._ledgers[device].touch(storage)
            place: Place | None = None
            for device, storage in ran.made:
                ledger = self._ledgers[device]
                if func is ADDED:  # which stands for what it was added to
                    ledger.give_up(ran.args[0].untyped_storage())
                if not ledger.touch(storage):
                    place = place or self._place(func)
                    ledger.mark(storage, OPTIMIZER if self._in_step else ACTIVATIONS, place)
            name, taken = str(getattr(func, "__name__", func)), self._workspace(ran)
            if taken:
                device = next((where for where, _ in (*ran.given, *ran.made)), torch.device("cpu"))
                self._take(name, taken, device, place or self._place(func))
            self._close("" if taken else name)

    def _take(self, op: str, nbytes: int, device: torch.device, place: Place) -> None:
        """Counts an operation's workspace; its release is the next event."""
        ledger = self._ledgers[device]
        taken = torch.UntypedStorage(nbytes, device="meta")
        ledger.mark(taken, OPTIMIZER if self._in_step else ACTIVATIONS, place._replace(shape=()))
        self._close(op)
        self._events += 1

    def _close(self, op: str) -> None:
        """Ends one event in each ledger."""
        for ledger in self._ledgers.values():
            ledger.book_deaths()
            ledger.settle()
            ledger.sample(self._events, op)

    def _workspace(self, ran: Operation) -> int:
        """Returns the bytes that an operation took while it ran; 0 where they are not known."""
        taken = workspace(ran.func, (ran.args, ran.kwargs)) if ran.taken is None else ran.taken
        return taken if isinstance(taken, int) else 0

    def _place(self, func: object) -> Place:
        """Returns where the present operation is, for the snapshot."""
        phase = "replay" if doing_recompute() else "backward" if in_backward() else "forward"
        line, region = place_in_code()
        return Place(self._events, "optimizer" if self._in_step else phase, region, str(func), line=line)

    @contextmanager
    def _watching(self) -> Generator[None]:
        with observing(), all_uncompiled(), Operations(self._real, watched):
            yield

    def _real(self, ran: Operation) -> None:
        """Counts an operation of a step that is not simulated."""
        if not self._compiled and calls_compiled():
            self._compiled = True
            warnings.warn(_UNCOMPILED, RuntimeWarning, stacklevel=2)
        self._book(ran)

    def _choose(self, wanted: torch.device | None) -> torch.device:
        """`cuda` without a number means the busiest of them; nothing at all means the busiest accelerator."""
        if wanted is None:
            candidates = [d for d in self._ledgers if d.type not in ("cpu", "meta")]
            wanted = torch.device("cpu")
        else:
            candidates = [d for d in self._ledgers if d.type == wanted.type and wanted.index in (None, d.index)]
        return max(candidates, key=lambda d: self._ledgers[d].peak, default=wanted)

    def _mark(self, value: object, rank: int) -> None:
        for device, storage in storages(value):
            self._ledgers[device].mark(storage, rank)

    def _alive(self) -> list[Any]:
        """Returns the tracked parameters, modules and optimizers that are alive."""
        return [thing for reference in self._tracked.values() if (thing := reference()) is not None]

    def _look(self) -> None:
        """Updates sizes from parameters, gradients and optimizer state, and finds what modules hold by now."""
        with without_functions():  # each of which would be shown to those around a step, as to `simulate`'s
            for thing in self._alive():
                if isinstance(thing, torch.Tensor):
                    self._mark(thing.grad, GRADIENTS)
                elif isinstance(thing, nn.Module):
                    self._mark([held for module in thing.modules() for held in vars(module).values()], OTHER)
                else:
                    self._mark(thing.state, OPTIMIZER)
        for ledger in self._ledgers.values():
            ledger.refresh()
            if self._watch is not None:
                ledger.settle()

    def _track_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            self._mark(parameter, PARAMETERS)
            self._follow(parameter)

    def _follow(self, thing: torch.Tensor | nn.Module | torch.optim.Optimizer) -> None:
        known = self._tracked.get(id(thing))
        if known is None or known() is not thing:
            self._tracked[id(thing)] = weakref.ref(thing)
            if self._watch is not None:
                self._hook(thing, self._watch)

    def _hook(self, thing: torch.Tensor | nn.Module | torch.optim.Optimizer, until: ExitStack) -> None:
        def delivered(gradient: object) -> None:
            with self._lock:
                self._mark(gradient, GRADIENTS)

        def step(begins: bool) -> None:
            with self._lock:
                self._look()
                self._in_step = begins

        if isinstance(thing, torch.optim.Optimizer):
            until.callback(thing.register_step_pre_hook(lambda *_: step(True)).remove)
            until.callback(thing.register_step_post_hook(lambda *_: step(False)).remove)
        elif isinstance(thing, torch.Tensor) and thing.requires_grad and thing.is_leaf:
            until.callback(cast("Any", thing).register_hook(delivered).remove)
            until.callback(thing.register_post_accumulate_grad_hook(lambda tensor: delivered(tensor.grad)).remove)


def measure(
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    device: torch.device | str | None = None,
) -> Measurement:
    """Measures the bytes alive in a block of code, exactly, by storage.

        with measure(model, optimizer) as m:
            loss(model(batch)).backward()
        print(m.peak_bytes, m.by_category)

    Operations run slower while measured, so take times in another step than bytes. Each leaves some hundred bytes of
    history in the measurement.

    Args:
        model: Its parameters, buffers and gradients count, each under its category.
        optimizer: Its state counts too, and so do its parameters and their gradients.
        device: The device whose figures the properties show; by default the busiest accelerator, else the CPU.

    Returns:
        A context manager that is also its own result.
    """
    try:
        where = None if device is None else torch.device(device)
        here = where is None or where.type != "cuda" or torch.cuda.is_available()
    except RuntimeError:
        where, here = None, False
    if not here:
        raise ArgumentError(
            f"measure(device={device!r}): what runs here is measured, on a device of torch's (cpu, cuda:0).\n"
            f"  Leave device out; for another, which need not be here, write simulate(..., device={device!r})."
        )
    measurement = Measurement(where)
    return measurement.track(*(thing for thing in (model, optimizer) if thing is not None))


_UNCOMPILED = (
    "measure follows each operation, and what torch.compile compiles is not made of these: the block calls it, and it "
    "runs uncompiled there. The bytes are those of the step without torch.compile.\n"
    "  Of the compiled step torch.cuda.max_memory_allocated() has the peak; make_plan(..., compiled=True) predicts it."
)
_AGAIN = "Start another: with measure(...) as m: ..."
