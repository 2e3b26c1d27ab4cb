"""A recording of a simulated step: `measure` on fake tensors, with the place of each event, what is kept, and FLOPs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

from .. import errors
from .._torch.fakes import resizes
from .._torch.flops import flops
from ..errors.text import listed
from ..memory.ledger import ACTIVATIONS, OTHER, Entries, Entry, Ledger, Place, leaves, storages
from ..memory.measurement import Measurement, running
from ..memory.operations import PHASES, ModuleStack, Operation, Seen, Storages
from ..state.observer import observing
from .fake_mode import FakeMode

Watch = Callable[[Place, Operation], object]
SHARDING = "fully_shard"
"""The last word of the paths of modules to which buffers of FSDP belong."""
MATTERS = 0.005
"""The share of a peak above which what is not known is said on the first line."""
_CONVOLUTION = "aten.convolution"
_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", _CONVOLUTION)


class SimulatedMeasurement(Measurement):
    """A measurement of operations on fake tensors.

    Args:
        device: The device whose figures the properties show.
        pretend: What runs the operations.
        booked: Called with each operation when it has been counted.
        rounding: See `simulate`.
    """

    def __init__(
        self, device: torch.device | None, pretend: FakeMode, booked: Seen | None = None, rounding: int = 1
    ) -> None:
        super().__init__(device)
        self._ledgers = defaultdict(partial(Ledger, rounding, told=True))
        self._pretend, self._booked = pretend, booked

    @contextmanager
    def _watching(self) -> Generator[None]:
        def resized() -> None:
            for ledger in self._ledgers.values():
                ledger.resized()

        with observing(), self._pretend.showing(self._book), resizes(resized):
            yield

    def _workspace(self, ran: Operation) -> int:
        taken = self._pretend.workspace(ran)
        if isinstance(taken, str):
            self._uncounted(ran, taken)
            return 0
        return taken

    def _uncounted(self, ran: Operation, why: str) -> None:
        """Called with an operation whose workspace is not known, and why it is not."""

    def _place(self, func: object) -> Place:
        return Place()

    def _book(self, ran: Operation) -> None:
        super()._book(ran)
        if self._booked is not None:
            self._booked(ran)


class Recording(SimulatedMeasurement):
    """A measurement of one simulated step, with the place of each event, what is kept for backward, and FLOPs.

    Attributes:
        at: Where each event was.
        flops: FLOPs of products by phase, by PyTorch's own formulas.
        kept: What the (last) forward keeps for backward: entries of activations and their bytes.
        heads: The products that no other consumes, and what was made of them.
        unknown: What is not known to be taken, by operation and phase; of several the one whose `level` is highest.
        state_bytes: The optimizer's state when the recording begins.
    """

    state_bytes = 0

    def __init__(
        self, pretend: FakeMode, modules: ModuleStack, device: torch.device, rounding: int, watch: Watch | None = None
    ) -> None:
        super().__init__(device, pretend, rounding=rounding)
        self._here, self.rounding = device, rounding
        self._held: list[torch.UntypedStorage] = []
        self._modules, self._watched = modules, watch
        self.flops: dict[str, int] = dict.fromkeys(PHASES, 0)
        self.kept: list[tuple[Entry, int]] = []
        self.at: dict[int, Place] = {}
        self.heads = _Heads()
        self.unknown: dict[tuple[str, str], Unknown] = {}

    @property
    def events(self) -> int:
        """The number of the last operation."""
        return self._events

    @property
    def here(self) -> Ledger:
        """The ledger of the device."""
        return self._ledgers[self._here]

    def hold(self, nbytes: int, module: str = "") -> None:
        """Adds memory that is there from the beginning and stays, which no forward keeps for its backward."""
        self._held.append(torch.UntypedStorage(nbytes, device="meta"))
        self.here.mark(self._held[-1], ACTIVATIONS, Place(module=module))

    def name(self, path: str, held: object, rank: int) -> None:
        """Counts the tensors of a parameter, or of its state, as of its path."""
        for tensor in leaves(held):
            for device, storage in storages(tensor):
                self._ledgers[device].mark(storage, rank, Place(module=path, shape=tuple(tensor.shape)))

    def _book(self, ran: Operation) -> None:
        phase, module = self._modules.now()
        op, shape, count = ran.once(_described)
        place = Place(self._events + 1, phase, module, op, shape, calls=self._modules.calls)
        for device, _ in ran.results:
            self._ledgers[device].place = place
        for ledger in self._ledgers.values():
            ledger.place = place
        self.at[place.event] = place
        if phase != "optimizer":  # of which nothing is a loss's
            self.heads.follow(ran, place)
        if phase == "loss":  # reads labels, which the caller holds
            self._mark_new(ran.given)
        super()._book(ran)
        if self._watched is not None:
            self._watched(place, ran)
        self.flops[phase] += count

    def _uncounted(self, ran: Operation, why: str) -> None:
        sizes = {id(storage): storage.nbytes() for _, storage in (*ran.given, *ran.results)}
        found = Unknown(why, sum(sizes.values()), self._events, self.here.live + sum(sizes.values()))
        kind = str(ran.func).partition(".default")[0].removesuffix("_backward"), self.at[self._events].phase
        self.unknown[kind] = max(self.unknown.get(kind, found), found, key=lambda one: one.level)

    def _mark_new(self, found: Storages) -> None:
        """Adds storages that no operation has made, as of the present event."""
        for device, storage in found:
            if not self._ledgers[device].touch(storage):
                self._mark(storage, OTHER)

    def _place(self, func: object) -> Place:
        return self.at[self._events]

    def _take(self, op: str, nbytes: int, device: torch.device, place: Place) -> None:
        super()._take(op, nbytes, device, place)
        self.at[self._events] = place._replace(event=self._events, op="")

    def forward_is_over(self) -> None:
        """Records the activations that are kept for backward."""
        self.here.book_deaths()
        alive = ((entry, nbytes) for entry, nbytes in self.here.alive() if entry.rank == ACTIVATIONS)
        self.kept = [(entry, nbytes) for entry, nbytes in alive if not any(entry() is held for held in self._held)]

    def by_use(self, activations: Entries) -> dict[str, int]:
        """Bytes of activations, by what they are there for."""
        kept, wide = ({id(entry) for entry, _ in some} for some in (self.kept, self.heads.wide(activations)[0]))
        sums = {"saved": 0, "loss": 0, "transient": 0}
        for entry, nbytes in activations:
            of_loss = entry.place.phase == "loss" or id(entry) in wide
            use = "loss" if of_loss else "saved" if id(entry) in kept else "transient"
            use = SHARDING if entry.place.module.endswith(SHARDING) else use
            sums[use] = sums.get(use, 0) + nbytes
        return sums

    def stepping(self, begins: bool) -> None:
        """Says that an optimizer's step begins within backward, or ends: what is made there is the optimizer's."""
        self._in_step = begins

    def take_over(self, other: Recording, rank_of: Callable[[Place], int]) -> None:
        """Counts what is alive in another recording as there when this one begins, but for what is known of it."""
        for device, ledger in other._ledgers.items():
            ledger.book_deaths()
            for entry, _ in ledger.alive():
                storage = entry()
                if storage is not None:
                    self._ledgers[device].mark(storage, rank_of(entry.place), Place(module=entry.place.module))

    def go_on_from(self, other: Recording, phase: str) -> None:
        """Takes over the storages that are alive in another recording, as an event that begins a phase."""
        self._events = other._events + 1
        self.at[self._events] = Place(self._events, phase)
        for device, ledger in other._ledgers.items():
            ledger.book_deaths()
            ledger.stamp(self._events)
            mine = self._ledgers[device]
            for entry, _ in ledger.alive():
                storage = entry()
                if storage is not None:
                    mine.mark(storage, entry.rank, entry.place)


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


class _Heads:
    """The products of a forward that no other product consumes, and which operations follow them.

    Their results are what a loss is of, by whatever operations it is written: a cross-entropy, a divergence from a
    teacher's. Each storage is known by the products before it that none has consumed yet; a product ends that.
    """

    def __init__(self) -> None:
        self._products: dict[int, tuple[int, ...]] = {}  # the shape of its result, where that is wider than its input
        self._consumed: set[int] = set()
        self._before: dict[int, frozenset[int]] = {}  # by `id` of the storage: one of a new storage replaces it
        self._of: dict[int, frozenset[int]] = {}  # by operation

    def follow(self, ran: Operation, place: Place) -> None:
        """Called with each operation, before it is counted."""
        before = [found for _, storage in ran.given if (found := self._before.get(id(storage)))]
        after = frozenset[int]().union(*before) - self._consumed if before else frozenset[int]()
        if place.op.startswith(_PRODUCTS):
            if place.phase in ("forward", "loss"):
                self._consumed |= after
            after = self._product(ran, place)
        for _, storage in ran.results:
            self._before[id(storage)] = after
        if after:
            self._of[place.event] = after

    def _product(self, ran: Operation, place: Place) -> frozenset[int]:
        left = ran.args["addmm" in place.op or "baddbmm" in place.op]
        if place.op.startswith(_CONVOLUTION) or not place.shape or place.shape[-1] <= left.shape[-1]:
            return frozenset()
        if place.phase in ("forward", "loss"):
            self._products[place.event] = place.shape
            return frozenset((place.event,))
        again = place.phase == "replay"
        return frozenset(event for event, shape in self._products.items() if again and shape == place.shape)

    def wide(self, activations: Entries) -> tuple[Entries, int]:
        """The activations that have as many elements as the result of a head before them, and its width."""
        found: Entries = []
        width = 0
        for entry, nbytes in activations:
            shapes = [self._products[event] for event in self._of.get(entry.place.event, frozenset()) - self._consumed]
            if any(math.prod(entry.place.shape) >= math.prod(shape) for shape in shapes):
                found.append((entry, nbytes))
                width = max(width, *(shape[-1] for shape in shapes))
        return found, width


class Unknown(NamedTuple):
    """An operation of which is not known what it takes."""

    why: str
    nbytes: int  # of all its arguments and results
    event: int
    level: int  # with a copy of these


def uncounted(unknown: Mapping[str, Unknown], peak: int) -> tuple[tuple[str, ...], str]:
    """Describes operations whose workspace is not known, and those that could raise the peak by over `MATTERS`."""
    most = {kind: one.level / peak - 1 for kind, one in unknown.items() if one.level > peak * (1 + MATTERS) > 0}
    little: defaultdict[str, list[str]] = defaultdict(list)
    for kind, one in unknown.items():
        if kind not in most:
            little[one.why].append(kind)
    unasked = "takes while it runs is not known and counted as 0 bytes"
    said = [
        f"what {kind} {unasked}: {unknown[kind].why}; a copy of its arguments and results "
        f"({errors.size(unknown[kind].nbytes)}) would raise the peak by {more:.1%}"
        for kind, more in most.items()
    ]
    for why, kinds in little.items():
        each = "each of " if len(kinds) > 1 else ""
        what = f"what {each}{listed(kinds)} {unasked}: {why}; a copy of its arguments and results"
        said.append(f"{what} would not raise the peak by {MATTERS:.1%}")
    named = listed(sorted(most, key=lambda kind: -most[kind])[:3])
    words = (
        f"not counted: what {named} takes while it runs, perhaps {max(most.values()):.1%} of the peak" if most else ""
    )
    return tuple(said), words


def _described(ran: Operation) -> tuple[str, tuple[int, ...], int]:
    """The name of an operation, the shape of its first result, and its FLOPs."""
    shape = next((tuple(map(int, tensor.shape)) for tensor in leaves(ran.out)), ())
    return str(ran.func), shape, flops(ran.func, ran.args, ran.kwargs, ran.out)
