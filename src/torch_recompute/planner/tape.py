"""A tape: one run of a segment as plain data, which is saved as JSON and printed an event a line.

It says what each operation made and read, what autograd saved, which modules and calls were entered and left, and when
each storage ended. `record.py` writes it; `evaluate.py` reads from it what the segment takes under any regions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

from .. import errors
from .candidates import CallKey

DECISION = "decision"
"""The kind of a call whose result a region may carry to its replays."""


class What(IntEnum):
    """The kinds of events, each with what its number is of."""

    MAKE = 0  # an operation ran: `Tape.ops`
    FREE = 1  # a storage ended: `Tape.sizes`
    SAVE = 2  # autograd saved a tensor: `Tape.saves`
    READ = 3  # backward reads a saved tensor
    RELEASE = 4  # backward, or the end of a graph, drops a saved tensor
    DROP = 5  # what backward was given when it read a saved tensor has ended
    ENTER = 6  # a module begins: `Tape.modules`
    LEAVE = 7
    BEGIN = 8  # a call that a region may keep begins: `Tape.calls`
    END = 9


class Values(IntEnum):
    """The values that an operation needs of a tensor which may have a shape alone (`engine/shape_only.py`)."""

    ALL = 0
    ITS_OWN = 1  # it works element by element: of a tensor without values it makes another one
    NONE = 2  # it asks for the layout
    MASK = 3  # dropout, whose mask follows from the layout


class RanOp(NamedTuple):
    """An operation that has run.

    Attributes:
        made: The storages that it made.
        wrote: Those that were there before, and that its results are in.
        read: Those that it read.
        workspace: Bytes that it took while it ran.
        key: Number of its key in `Tape.keys`; -1 for one that neither made nor wrote memory.
        surrounding: Whether it stands for a layer before or behind, and is not the segment's.
        needs: What it needs of its arguments' values.
    """

    made: tuple[int, ...]
    wrote: tuple[int, ...]
    read: tuple[int, ...]
    workspace: int
    key: int
    surrounding: bool
    needs: int


class Saved(NamedTuple):
    """A tensor that autograd saved.

    Attributes:
        storage: Its storage; -1 for one that no operation of the record made.
        grad: Whether it requires grad.
        node: Autograd's number of the node that saved it.
        weight: Whether it is a parameter's.
        copied_bytes: Of what a region copies and puts back: its bytes, since what autograd saves of it is a copy.
    """

    storage: int
    grad: bool
    node: int
    weight: bool
    copied_bytes: int = 0

    @property
    def is_fixed(self) -> bool:
        """Whether it is there all the time, as a weight."""
        return self.storage < 0 or self.weight


@dataclass
class ModuleCall:
    """A call of a module.

    Attributes:
        path: Its path.
        given: The storages that it was given.
        copied_bytes: Of what it and the modules below hold that a region of it copies and keeps, to put it back.
        forward_bytes: Of what a region copies and drops when its forward has not changed it.
        own_bytes: Both of what it holds itself.
        is_changed: Whether the segment has written to what it was given since, so that it cannot run again.
    """

    path: str
    given: tuple[int, ...]
    copied_bytes: int
    forward_bytes: int
    own_bytes: tuple[int, int]
    is_changed: bool = False


@dataclass
class KeepableCall:
    """A call that a region may keep.

    Attributes:
        kinds: The kinds it is of, the narrowest first.
        modules: The paths of the modules that run, outermost first.
        given: The storages that it was given.
        candidate: By which name `Candidates` knows it; None for a decision, or within several modules in a row.
        results: The storages that it returned.
        is_changed: Whether the segment has written to one of these since, so that no replay can take it.
    """

    kinds: tuple[str, ...]
    modules: tuple[str, ...]
    given: tuple[int, ...]
    candidate: CallKey | None = None
    results: tuple[int, ...] = ()
    is_changed: bool = False


@dataclass
class Tape:
    """A run of a segment; paths are those of `alone`: "0" is its first module, "0.mlp" a part of that.

    Attributes:
        events: What happened, in order: one of `What`, and the number of what it happened to.
        keys: The different operations that ran; those of a tape that was read from JSON are words.
        sizes: The bytes of each storage.
        level, start, turn, back: The numbers of the events with which the stages BEFORE, FORWARD, TURN and BACKWARD of
            `run_alone` begin.
        results: The storages that the segment returned.
        there: Those that modules hold in attributes when it begins.
        known: Those of its arguments, and of its input.
        outside: Those of its arguments that are there all the time; their sizes are 0.
        why_not: Why no figures can be read from it; "" where they can.
    """

    events: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    ops: list[RanOp] = field(default_factory=list[RanOp])
    keys: list[Any] = field(default_factory=list[Any])
    sizes: list[int] = field(default_factory=list[int])
    saves: list[Saved] = field(default_factory=list[Saved])
    modules: list[ModuleCall] = field(default_factory=list[ModuleCall])
    calls: list[KeepableCall] = field(default_factory=list[KeepableCall])
    level: int = 0
    start: int = 0
    turn: int = 0
    back: int = 0
    results: tuple[int, ...] = ()
    there: tuple[int, ...] = ()
    known: frozenset[int] = frozenset()
    outside: tuple[int, ...] = ()
    why_not: str = ""

    def to_json(self) -> str:
        """Returns the tape as JSON; operations become words."""
        return json.dumps({**asdict(self), "keys": list(map(str, self.keys)), "known": sorted(self.known)})

    @staticmethod
    def from_json(text: str) -> Tape:
        """Reads a tape that `to_json` wrote."""
        data: dict[str, Any] = json.loads(text)
        for name, kind in (("ops", RanOp), ("saves", Saved)):
            data[name] = [kind(*map(_frozen, row)) for row in data[name]]
        for name, kind in (("modules", ModuleCall), ("calls", KeepableCall)):
            data[name] = [kind(**{key: _frozen(value) for key, value in row.items()}) for row in data[name]]
        data["events"] = [(what, number) for what, number in data["events"]]
        for name in ("results", "there", "outside"):
            data[name] = _frozen(data[name])
        data["known"] = frozenset(data["known"])
        return Tape(**data)

    def __str__(self) -> str:
        return "\n".join(f"{i:5} {What(what).name:7} {self._said(what, n)}" for i, (what, n) in enumerate(self.events))

    def _said(self, what: int, number: int) -> str:
        if what == What.MAKE:
            op = self.ops[number]
            name = "views" if op.key < 0 else str(getattr(self.keys[op.key], "func", self.keys[op.key]))
            return f"{name}: {list(op.read)} -> {list(op.made)}"
        if what == What.FREE:
            return f"{number}: {errors.size(self.sizes[number])}"
        if what in (What.ENTER, What.LEAVE):
            return self.modules[number].path
        if what in (What.BEGIN, What.END):
            return f"{self.calls[number].kinds[0]} in {self.calls[number].modules[-1]}"
        return f"{number} of storage {self.saves[number].storage}"

    @cached_property
    def counts(self) -> dict[int, int]:
        """Counts of each of `keys` in the segment's forward and backward."""
        found: dict[int, int] = {}
        for op in self.ops:
            if op.key >= 0 and not op.surrounding:
                found[op.key] = found.get(op.key, 0) + 1
        return found

    @property
    def made(self) -> Iterator[RanOp]:
        """The operations of the forward that made or wrote memory."""
        ran = (self.ops[number] for what, number in self.events[self.start : self.turn] if what == What.MAKE)
        return (op for op in ran if op.key >= 0)


def _frozen(value: Any) -> Any:
    """A value of JSON with tuples in the place of lists."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
