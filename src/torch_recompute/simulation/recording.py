"""`Recording`: a measurement that also notes where the step is, what it keeps for backward, and counts FLOPs.

The books are those of `measure`, so a simulated step is counted as a real one is. FLOPs are those of products, by
PyTorch's own formulas (`torch.utils.flop_counter`), each operation on its own; an operation without one counts none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch

from .._compat.flops import flops
from ..memory.ledger import ACTIVATIONS, OTHER, Entry, Ledger, Place, storages
from ..memory.measurement import Measurement
from .places import PHASES, Places
from .pretending import Pretend

USES = ("saved", "loss", "transient")
Watch = Callable[[str, Any, Any, Any, Any], None]


class Recording(Measurement):
    """The books of one simulated step.

    Args:
        pretend: The mode under which the step runs.
        places: Knows where the step is.
        device: The device whose figures are wanted.
        rounding: Sizes are rounded up to multiples of this many bytes.
        watch: Called with each operation: its phase, overload, arguments, keyword arguments and result.

    Attributes:
        flops: FLOPs by phase.
        kept: What the (last) forward keeps for backward: entries of activations and their bytes.
    """

    def __init__(
        self, pretend: Pretend, places: Places, device: torch.device, rounding: int, watch: Watch | None = None
    ) -> None:
        super().__init__(device)
        self._pretend, self._here = pretend, device
        self._held: torch.UntypedStorage | None = None
        self._rounding = rounding
        self._places = places
        self._told = watch
        self.flops: dict[str, int] = dict.fromkeys(PHASES, 0)
        self.kept: list[tuple[Entry, int]] = []
        self._ever_kept: list[Entry] = []
        self.at: dict[int, Place] = {}

    @property
    def events(self) -> int:
        """The number of the last operation."""
        return self._events

    def hold(self, nbytes: int) -> None:
        """Books memory that is there from the beginning and stays, which no forward keeps for its backward."""
        self._held = torch.UntypedStorage(nbytes, device="meta")
        self.books(self._here).mark(self._held, ACTIVATIONS, Place())

    def _watcher(self) -> AbstractContextManager[Any]:
        return self._pretend.showing(self.record)

    def _ledger(self, device: torch.device) -> Ledger:
        if device not in self._ledgers:
            self._ledgers[device] = Ledger(self._rounding, history=True)
        return self._ledgers[device]

    def record(self, func: object, inputs: object, outputs: object) -> None:
        """Books one operation."""
        phase, module = self._places.now()
        shape = next((tuple(map(int, t.shape)) for t in _tensors(outputs)), ())
        place = Place(self._events + 1, phase, module, str(func), shape, calls=self._places.calls)
        for device, _ in storages(outputs):
            self._ledger(device)
        for ledger in self._ledgers.values():
            ledger.place = place
        self.at[place.event] = place
        if phase == "loss":  # reads labels, which whoever wrote it holds
            self._mark_new(inputs)
        super().record(func, inputs, outputs)
        args, kwargs = cast("tuple[tuple[Any, ...], dict[str, Any] | None]", inputs)
        if self._told is not None:
            self._told(phase, func, args, kwargs or {}, outputs)
        self.flops[phase] += flops(func, args, kwargs or {}, outputs)

    def _mark_new(self, values: object) -> None:
        """Books storages that no operation has made, as from now on."""
        for device, storage in storages(values):
            if not self._ledger(device).touch(storage):
                self._mark(storage, OTHER)

    def _place(self, func: object) -> Place:
        return self.at[self._events]

    def _take(self, op: str, nbytes: int, inputs: object, place: Place) -> None:
        super()._take(op, nbytes, inputs, place)
        self.at[self._events] = place._replace(event=self._events, op="")

    def _workspace(self, func: object, inputs: object) -> int:
        return self._pretend.workspace(func, inputs)

    def forward_is_over(self, device: torch.device) -> None:
        """Notes what is kept for backward."""
        ledger = self.books(device)
        ledger.book_deaths()
        alive = ((entry, nbytes) for entry, nbytes in ledger.alive() if entry.rank == ACTIVATIONS)
        self.kept = [(entry, nbytes) for entry, nbytes in alive if self._held is None or entry() is not self._held]
        self._ever_kept += [entry for entry, _ in self.kept]

    def by_use(self, activations: Iterable[tuple[Entry, int]]) -> dict[str, int]:
        """Bytes of activations, by what they are there for."""
        kept = {id(entry) for entry in self._ever_kept}
        sums: dict[str, int] = dict.fromkeys(USES, 0)
        for entry, nbytes in activations:
            of_loss = entry.place.phase == "loss"
            sums["loss" if of_loss else "saved" if id(entry) in kept else "transient"] += nbytes
        return sums

    def go_on_from(self, other: Recording, phase: str) -> None:
        """Takes over what another recording knows of the storages that are alive, as an event that begins a phase."""
        self._events = other._events + 1
        self.at[self._events] = Place(self._events, phase)
        for device, books in other._ledgers.items():
            books.book_deaths()
            books.stamp(self._events)
            mine = self._ledger(device)
            for entry, _ in books.alive():
                storage = entry()
                if storage is not None:
                    mine.place = entry.place
                    mine.mark(storage, entry.rank)
            mine.place = Place()

    def width_of(self, output: object, first: Callable[[Any], torch.Tensor | None]) -> tuple[int, int] | None:
        """The operation that made an output's first floating tensor, and how wide that is."""
        tensor = first(getattr(output, "logits", output))
        if tensor is None or tensor.dim() < 2:
            return None
        for device, storage in storages(tensor):
            for entry, _ in self._ledger(device).alive():
                if entry() is storage:
                    return entry.place.event, int(tensor.shape[-1])
        return None

    def books(self, device: torch.device) -> Ledger:
        """The books of one device."""
        return self._ledger(self._choose(device))


def _tensors(value: object) -> list[torch.Tensor]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [item for item in values if isinstance(item, torch.Tensor)]
