"""Reads from the record of one run of a segment what it takes under any regions.

    figures = evaluate(tape, choices)

The events of the run are walked once, forward and backward, and the holders of each storage are counted: Python, until
the storage ended in the run; autograd, for what no region has dropped; regions, for what they were given and what their
kept calls returned. Backward's first read of a dropped tensor replays its region: the events of the region's forward
are walked again, on storages of their own, up to the last tensor that backward still needs.

The rules are those of the engine: which saved tensors are a region's inputs, weights or results of kept calls, and need
no rebuilding; when a kept result goes; where a replay ends; what a chain of regions passes on; how a region inside
another finds its inputs; what a tensor without values is. Each is written a second time here, so a law compares the
figures with those of the engine (`tests/laws/test_recorded_step.py`), and a plan's promise is the simulation with the
engine itself: a rule that is wrong here would cost a round of planning, not a promise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..plan.calls import ALL_PRODUCTS
from ..plan.choice import VALUES_UNUSED, Choice, joined
from ..plan.roles import inside
from .alone import Figures
from .candidates import CallKey
from .tape import DECISION, Saved, Tape, Values, What

MAKE, FREE, SAVE, READ, RELEASE, DROP, ENTER, LEAVE, BEGIN, END = map(int, What)


@dataclass(frozen=True)
class Evaluated(Figures):
    """The figures of a segment under some choices, read from its record.

    Attributes:
        replayed: How often each of `Tape.keys` runs again.
        is_refused: Whether the engine raises an error, since a replay needs an argument or a kept result that has been
            changed in place.
    """

    replayed: dict[int, int] = field(default_factory=dict[int, int])
    is_refused: bool = False


def evaluate(tape: Tape, choices: Sequence[Choice]) -> Evaluated:
    """The figures of a segment under some choices, in the paths of its tape."""
    walk = _Walk(tape, choices)
    walk.forward(0, tape.level)
    level = walk.live
    walk.forward(tape.level, tape.start)
    walk.top = walk.live
    walk.forward(tape.start, tape.turn)
    forward, saved = walk.top, walk.live
    walk.top = 0
    walk.backward(tape.turn, len(tape.events))
    backward = walk.top or saved
    return Evaluated(
        saved_bytes=saved - level,
        forward_bytes=forward - level,
        backward_bytes=backward - level,
        calls=walk.calls,
        watched=walk.watched,
        replayed=walk.replayed,
        is_refused=walk.refused,
    )


def need_values(tape: Tape, choice: Choice) -> dict[CallKey, bool]:
    """Whether a replay needs the values of what calls return, by their names in `Candidates`, of those that it runs.

    They are found from the end of a replay to its beginning: what backward needs has values, and so has what an
    operation reads that needs values, or that makes something which has some.
    """
    walk = _Walk(tape, (choice,))
    walk.forward(0, tape.turn)
    found: dict[CallKey, bool] = {}
    for region in walk.regions:
        for call, values in _Values(tape, region).calls():
            found[call] = found.get(call, False) or values
    return found


class _Values:
    """Goes back over the replay of a region, and finds which of its storages need values."""

    def __init__(self, tape: Tape, region: _Region) -> None:
        self._tape, self._region = tape, region
        self._wanted: set[int] = set(region.later or ())

    def calls(self) -> Iterator[tuple[CallKey, bool]]:
        """The calls that a replay runs again, from its end on, each with whether its result needs values."""
        events, begins, region = self._tape.events, dict[int, int](), self._region
        for i in range(region.begin, region.end):
            if events[i][0] == BEGIN:
                begins[events[i][1]] = i
        at = self._last()
        while at > region.begin:
            what, x = events[at]
            if what == END and x in region.kept:
                if (name := self._tape.calls[x].candidate) is not None:
                    yield name, True
                self._wanted.update(self._tape.saves[k].storage for k, _ in region.kept[x] if k in region.slots)
                at = begins[x]
            elif what == END and (name := self._tape.calls[x].candidate) is not None:
                values = self._call_needs_values(x, begins[x], at)
                yield name, values
                at = at if values else begins[x]
            elif what == MAKE:
                self._operation(x)
            elif what == SAVE:  # which a replay does again, whether backward still needs it or not
                self._wanted.add(self._tape.saves[x].storage)
            at -= 1

    def _last(self) -> int:
        """The event with which a replay ends."""
        region, until = self._region, self._region.needed_until
        if region.later or not region.is_last:
            return region.end - 1
        saves, within = 0, -1
        for i in range(region.begin, region.end):
            what, x = self._tape.events[i]
            if what == BEGIN and within < 0 and x in region.kept:
                within = x
            elif what == END and x == within:
                within = -1
                if x == until.call:
                    return i
            elif what == SAVE and within < 0:
                if saves == until.saves and until.call == math.inf:
                    return i
                saves += 1
        return region.begin

    def _call_needs_values(self, number: int, begin: int, end: int) -> bool:
        """Whether a call that is no kept one has a result that needs values; else notes what autograd saves in it."""
        tape, call, slots = self._tape, self._tape.calls[number], self._region.slots
        if call.kinds[0] not in ALL_PRODUCTS:
            return True
        inside = tape.events[begin:end]
        made = {storage for what, x in inside if what == MAKE for storage in tape.ops[x].made}
        saved = {tape.saves[x].storage for what, x in inside if what == SAVE and x in slots}
        if self._wanted & made or saved & made:
            return True
        self._wanted |= saved
        return False

    def _operation(self, number: int) -> None:
        op = self._tape.ops[number]
        if op.needs == Values.NONE:
            return
        made = op.made[1:] if op.needs == Values.MASK else op.made
        if op.needs == Values.ALL or not self._wanted.isdisjoint((*made, *op.wrote)):
            self._wanted.update(op.read)


class _Moment(NamedTuple):
    """A moment of a region's forward: how many tensors autograd has saved, and then the number of a kept call."""

    saves: float
    call: float


_END = _Moment(math.inf, 0)


class _Result(NamedTuple):
    """A result of a kept call that a region holds, and when the call was."""

    at: _Moment
    storage: int


_Key = int | tuple[str, int]
"""A saved tensor by its number, or ("input", storage) for what the region inside is given."""


@dataclass(eq=False)
class _Region:
    """One call of a region.

    Attributes:
        choice, place: Its choice, and its place among the modules of that.
        begin: The event with which it begins.
        end: That with which it ends.
        call: The call of its module.
        given: The storages that it was given.
        around: The region that it is within, if each layer of a group is a region of its own.
        before: The region before it in a chain, whose result it is given.
        own: Of `given` those that it knows by identity, so what autograd saves of them needs no rebuilding.
        passed: Those that the region before it makes again.
        inputs: The storages that it holds: inputs, and copies of what it puts back.
        passing: The copies that it drops when its forward ends.
        met: The modules that it has called so far, if it is within another region.
        order: For each tensor that autograd saved in it, outside of kept calls, its number; None for one that needs no
            rebuilding.
        slots: What has to be rebuilt, and the storage once it is: saved tensors by number, and what the region inside
            is given.
        later: What the next one in a chain is given, likewise.
        results: What it holds of kept calls.
        aliases: Those of these results that it knows by identity.
        kept: For each kept call, the saved tensors in it that have to be rebuilt, and how many had been saved before.
        waits: How many saved tensors, and others, may still ask for something.
    """

    choice: Choice
    place: int
    begin: int
    call: int
    given: tuple[int, ...]
    around: _Region | None = None
    before: _Region | None = None
    own: set[int] = field(default_factory=set[int])
    passed: set[int] = field(default_factory=set[int])
    end: int = 0
    inside: _Region | None = None
    inputs: list[int] = field(default_factory=list[int])
    order: list[_Key | None] = field(default_factory=list["_Key | None"])
    slots: dict[_Key, int | None] = field(default_factory=dict["_Key", "int | None"])
    later: dict[int, int | None] | None = None
    results: list[_Result] = field(default_factory=list[_Result])
    aliases: set[int] = field(default_factory=set[int])
    kept: dict[int, list[tuple[int, int]]] = field(default_factory=dict[int, list[tuple[int, int]]])
    waits: int = 0
    passing: list[int] = field(default_factory=list[int])
    met: list[str] = field(default_factory=list[str])
    over: bool = False
    gone: bool = False

    @property
    def is_last(self) -> bool:
        """Whether it is the last of its choice's modules."""
        return self.around is not None or self.place == len(self.choice.paths) - 1

    @property
    def needed_until(self) -> _Moment:
        """The moment of the last tensor that a replay has to rebuild."""
        numbers = range(len(self.order) - 1, -1, -1)
        last = next((i for i in numbers if (k := self.order[i]) is not None and k in self.slots), -1)
        moment = _Moment(last, math.inf)
        for call, saved in reversed(self.kept.items()):
            if any(k in self.slots for k, _ in saved):
                return max(moment, _Moment(saved[0][1], call))
        return moment


class _Slot(NamedTuple):
    """Stands for a saved tensor that is in a region: the region, and its storage where that needs no rebuilding."""

    region: _Region
    storage: int | None


class _Walk:
    """A walk over the events of a tape, under some choices.

    Attributes:
        live: The bytes that are alive.
        top: The most since it was set.
        calls, watched, replayed: See `Evaluated`.
        refused: Whether the engine raises an error.
        looks: Whether regions look for calls to keep.
        regions: Those that have been entered.
    """

    def __init__(self, tape: Tape, choices: Sequence[Choice]) -> None:
        self.tape = tape
        self.live = self.top = self.calls = self.watched = 0
        self.refused = False
        self.replayed: dict[int, int] = {}
        self._sizes = list(tape.sizes)  # and those of what replays make
        self._holders: dict[int, int] = dict.fromkeys(tape.outside, 1)  # of each storage, how many
        self._of = {path: (choice, place) for choice in choices for place, path in enumerate(choice.paths)}
        self.looks = any(choice.keep or choice.carry for choice in choices)
        self._keeps: dict[tuple[int, int, int], str] = {}
        self._saved: dict[int, int | _Slot] = {}  # what stands for each saved tensor: its storage, or a region's
        self._reading: dict[int, int] = {}  # the storage that backward was given for one
        self.regions: list[_Region] = []
        for storage in tape.there:
            self.hold(storage)

    def hold(self, storage: int) -> None:
        """Adds a holder."""
        holders = self._holders
        count = holders.get(storage, 0)
        holders[storage] = count + 1
        if not count:
            self.live += self._sizes[storage]

    def drop(self, storage: int) -> None:
        """Takes a holder away."""
        count = self._holders[storage] - 1
        if count:
            self._holders[storage] = count
        else:
            del self._holders[storage]
            self.live -= self._sizes[storage]

    def new(self, nbytes: int) -> int:
        """A storage that no event has made, with a holder."""
        self._sizes.append(nbytes)
        self.hold(len(self._sizes) - 1)
        return len(self._sizes) - 1

    def _ran(self, made: Sequence[int], workspace: int) -> None:
        for storage in made:
            self.hold(storage)
        self.top = max(self.top, self.live + workspace)

    def word_for(self, region: _Region, number: int) -> str:
        """The word by which a region keeps a call; "" where it does not."""
        choice, place = region.choice, region.place
        key = id(choice), place, number
        if key not in self._keeps:
            call = self.tape.calls[number]
            self._keeps[key] = _word_for(choice, place, call.kinds, call.modules)
        return self._keeps[key]

    # --- forward ---

    def forward(self, first: int, last: int) -> None:
        """Walks over events of a forward."""
        tape, ops = self.tape, self.tape.ops
        stack: list[_Region] = []
        chains: dict[int, _Region] = {}
        within, word, at = -1, "", 0  # the kept call that runs, by which word, and after how many saved tensors
        for i in range(first, last):
            what, x = tape.events[i]
            if what == MAKE:
                op = ops[x]
                self._ran(op.made, op.workspace)
                if stack and self.looks:
                    self.watched += op.key >= 0
                    self.calls += within >= 0 and op.key >= 0
            elif what == FREE:
                if x in self._holders:
                    self.drop(x)
            elif what == SAVE:
                self._save(x, stack[-1] if stack else None, within, at)
            elif what == ENTER:
                if stack and stack[-1].around is not None:
                    self._meet(stack[-1], x)
                here = self._of.get(tape.modules[x].path)
                if here is not None:
                    stack.append(self._enter(*here, i, x, chains))
                    if here[0].nested:
                        stack.append(self._enter_inside(stack[-1], i, x))
            elif what == LEAVE:
                while stack and stack[-1].call == x:
                    self._leave(stack.pop(), i, chains)
            elif what == BEGIN:
                if stack and within < 0 and (word := self.word_for(stack[-1], x)):
                    within, at = x, len(stack[-1].order)
                    stack[-1].kept[x] = []
            elif what == END:
                if within == x:
                    if word != VALUES_UNUSED:
                        self._keep_results(stack[-1], x, _Moment(at, x))
                    within = -1
            else:  # a graph that leads nowhere may end in the forward
                self._walk_saved(what, x)

    def _keep_results(self, region: _Region, number: int, at: _Moment) -> None:
        call = self.tape.calls[number]
        for storage in call.results:
            if storage not in call.given and storage in self._holders:
                self.hold(storage)
                region.results.append(_Result(at, storage))
                if not region.passed and region.around is None:  # a region whose inputs come later knows none
                    region.aliases.add(storage)

    def _enter(self, choice: Choice, place: int, begin: int, number: int, chains: dict[int, _Region]) -> _Region:
        call = self.tape.modules[number]
        before = chains.pop(id(choice), None) if place else None
        region = _Region(choice, place, begin, number, call.given, before=before)
        if before is not None:
            made = {s for what, n in self._events(before) if what == MAKE for s in self.tape.ops[n].made}
            region.passed = made.intersection(call.given)
        self.regions.append(region)
        region.own = set() if region.passed else set(call.given)
        region.inputs = [storage for storage in call.given if storage in self._holders]
        for storage in region.inputs:
            self.hold(storage)
        entered = self.tape.modules[region.call]
        self._copy(region, entered.copied_bytes, entered.forward_bytes)
        return region

    def _enter_inside(self, around: _Region, begin: int, number: int) -> _Region:
        """Enters the region of one layer of a group, whose inputs the region around it knows or rebuilds."""
        given = self.tape.modules[number].given
        region = _Region(around.choice, around.place, begin, number, given, around=around)
        around.inside = region
        for storage in given:
            around.waits += 1
            if storage in around.own:
                self.hold(storage)
                region.inputs.append(storage)
                around.order.append(None)
            else:
                around.slots["input", storage] = None
                around.order.append(("input", storage))
        self._copy(region, *self.tape.modules[number].own_bytes)
        return region

    def _copy(self, region: _Region, kept: int, passing: int) -> None:
        """Has a region copy what modules hold: what it keeps, and what it drops when its forward ends."""
        if kept:
            region.inputs.append(self.new(kept))
        if passing:
            region.passing.append(self.new(passing))

    def _meet(self, region: _Region, number: int) -> None:
        """Has the region of one layer of a group copy what a module holds, when it first calls it."""
        call = self.tape.modules[number]
        if not any(inside(call.path, met) for met in region.met):
            region.met.append(call.path)
            self._copy(region, call.copied_bytes, call.forward_bytes)

    def _events(self, region: _Region) -> Sequence[tuple[int, int]]:
        return self.tape.events[region.begin : region.end]

    def _leave(self, region: _Region, end: int, chains: dict[int, _Region]) -> None:
        region.end = end
        for storage in region.passing:
            self.drop(storage)
        if region.results and (region.around or region).is_last:
            until = region.needed_until
            for result in list(region.results):
                if result.at >= until:
                    self.drop(result.storage)
                    region.results.remove(result)
        region.over = True
        if region.is_last and not region.kept and not any(k is not None for k in region.order):
            self._forget(region)
        if region.is_last or region.around is not None:
            if not region.waits:
                self._forget(region)
        else:
            chains[id(region.choice)] = region
        if region.before is not None:
            self._pass_on(region.before, region)

    def _pass_on(self, before: _Region, region: _Region) -> None:
        """Leaves what the region before it makes again to that one."""
        before.later = {}
        for storage in [s for s in region.inputs if s in region.passed]:
            if not region.gone:
                before.later[storage] = None
                before.waits += 1
            region.inputs.remove(storage)
            self.drop(storage)
        if not before.waits:
            self._forget(before)

    def _save(self, number: int, region: _Region | None, within: int, at: int) -> None:
        """Autograd saves a tensor: outside of regions, in one, or in a call that it keeps."""
        saved = self.tape.saves[number]
        if region is None:
            if not saved.is_fixed:
                self.hold(saved.storage)
                self._saved[number] = saved.storage
            return
        region.waits += 1
        rebuilt = self._is_rebuilt(saved, region, within)
        if rebuilt:
            region.slots[number] = None
        if within < 0:
            region.order.append(number if rebuilt else None)
        elif rebuilt:
            region.kept[within].append((number, at))
        stays = None if rebuilt or saved.is_fixed else saved.storage
        if stays is not None:
            self.hold(stays)
        self._saved[number] = _Slot(region, stays)

    def _is_rebuilt(self, saved: Saved, region: _Region, within: int) -> bool:
        """Whether a replay rebuilds a tensor that autograd saves in a region, or in a call that it keeps."""
        known = saved.is_fixed or saved.storage in region.own
        if within >= 0:
            return not known and saved.storage in self.tape.calls[within].given
        return bool(saved.copied_bytes) or not (known or saved.storage in region.aliases)

    # --- backward ---

    def backward(self, first: int, last: int) -> None:
        """Walks over events of a backward."""
        ops = self.tape.ops
        for what, x in self.tape.events[first:last]:
            if what == MAKE:
                self._ran(ops[x].made, ops[x].workspace)
            elif what == FREE:
                if x in self._holders:
                    self.drop(x)
            elif what == SAVE:
                self._save(x, None, -1, 0)
            else:
                self._walk_saved(what, x)

    def _walk_saved(self, what: int, number: int) -> None:
        if what == READ:
            self._read(number)
        elif what == RELEASE:
            self._release(number)
        elif what == DROP:
            storage = self._reading.pop(number, None)
            if storage is not None:
                self.drop(storage)

    def _read(self, number: int) -> None:
        held = self._saved.get(number)
        storage: int | None = None
        if isinstance(held, _Slot):
            storage = held.storage
            if storage is None and number in held.region.slots:
                if held.region.slots[number] is None:
                    self._replay(held.region, number)
                storage = held.region.slots.get(number)
        else:
            storage = held
        if storage is not None:
            self.hold(storage)
            self._reading[number] = storage

    def _release(self, number: int) -> None:
        held = self._saved.pop(number, None)
        if held is None:
            return
        if not isinstance(held, _Slot):
            self.drop(held)
            return
        if held.storage is not None:
            self.drop(held.storage)
        else:
            self._empty(held.region, number)
        self._waits_less(held.region)

    def _empty(self, region: _Region, slot: _Key) -> None:
        storage = region.slots.pop(slot, None)
        if storage is not None:
            self.drop(storage)

    def _waits_less(self, region: _Region) -> None:
        region.waits -= 1
        if not region.waits and region.over:
            self._forget(region)

    def _forget(self, region: _Region) -> None:
        """Lets go of all that a region holds, when nothing can ask for it."""
        if region.gone:
            return
        region.gone = True
        for storage in (*region.inputs, *(result.storage for result in region.results)):
            self.drop(storage)
        region.inputs, region.results = [], []
        if region.around is not None:
            for storage in region.given:
                self._empty(region.around, ("input", storage))
                self._waits_less(region.around)
        before = region.before
        if before is not None and before.later is not None:
            for storage in list(before.later):
                rebuilt = before.later.pop(storage)
                if rebuilt is not None:
                    self.drop(rebuilt)
                self._waits_less(before)

    # --- replays ---

    def _inputs_of(self, region: _Region) -> dict[int, int]:
        """The storages that a replay is given, by those of the forward; what is rebuilt first is replayed now."""
        found = {storage: storage for storage in region.given}
        around, before = region.around, region.before
        if around is not None:
            for storage in region.given:
                slot = "input", storage
                if slot in around.slots and around.slots[slot] is None:
                    self._replay(around)
                rebuilt = around.slots.get(slot)
                found[storage] = storage if rebuilt is None else rebuilt
        if before is not None and before.later:
            for storage in list(before.later):
                if before.later[storage] is None:
                    self._replay(before)
                rebuilt = before.later[storage]
                found[storage] = storage if rebuilt is None else rebuilt
        return found

    def _replay(self, region: _Region, opened: int | None = None) -> None:
        """Replays a region; `opened` is the saved tensor that was read first."""
        given = self._inputs_of(region)
        call = self.tape.modules[region.call]
        copies = call.copied_bytes
        self.refused |= call.is_changed
        held = [storage for storage in given.values() if storage in self._holders]
        for storage in held:
            self.hold(storage)
        if copies:  # of small buffers, those of now, which are put back afterwards; and those of a region inside
            held += [self.new(copies) for _ in range(1 + (region.inside is not None and not region.is_last))]
        if call.forward_bytes and region.inside is not None and not region.is_last:
            held.append(self.new(call.forward_bytes))
        replay = _Replay(self, region, given, opened)
        if region.inside is None or not region.is_last:
            replay.run()
        replay.fill_inputs(given)
        replay.end()
        for storage in held:
            self.drop(storage)

    def run_again(self, key: int) -> None:
        """Counts an operation of a replay."""
        if key >= 0:
            self.replayed[key] = self.replayed.get(key, 0) + 1
            self.watched += self.looks

    def is_held(self, storage: int) -> bool:
        """Whether a storage has holders."""
        return storage in self._holders

    def again(self, storage: int) -> int:
        """A storage like another one, with a holder."""
        return self.new(self._sizes[storage])

    def size(self, storage: int) -> int:
        """The bytes of a storage."""
        return self._sizes[storage]

    def reaches(self, workspace: int) -> None:
        """Notes what is alive with the workspace of an operation."""
        self.top = max(self.top, self.live + workspace)


class _Replay:
    """A replay of a region: its forward again, on storages of its own.

    Attributes:
        made: What it has made and Python holds, by the storages of the forward.
        held: What autograd saves in it, which goes with its graph.
        stopped: Whether it has ended before the function has.
    """

    def __init__(self, walk: _Walk, region: _Region, given: dict[int, int], opened: int | None) -> None:
        self._walk, self._region, self._opened = walk, region, opened
        self._now = dict(given)
        self.made: dict[int, int] = {}
        self.held: list[int] = []
        self._kept_by = region.inside or region
        whole = region.later or not region.is_last
        self._until = _END if whole else region.needed_until
        self.stopped = False
        self._copies: list[int] = []  # the slots that get copies when it ends, of what is put back then
        self._saves = 0  # tensors that autograd has saved, outside of kept calls
        self._empty = set[int]()  # the storages without values
        self._unfinished = -1  # the node of the last saved tensor that requires no grad
        self._done = False

    def run(self) -> None:
        """Walks over the events of the region's forward, up to the last that is needed.

        Around a region of its own layer it goes to the end, and what autograd saves is that region's.
        """
        region, skipped = self._region, -1
        for what, x in self._walk.tape.events[region.begin + 1 : region.end]:
            if skipped >= 0:
                skipped = -1 if what == END and x == skipped else skipped
            elif what == MAKE:
                self._make(x)
            elif what == FREE:
                storage = self.made.pop(x, None)
                if storage is not None:
                    self._walk.drop(storage)
            elif what == SAVE:
                if region.inside is None and self._save(x):
                    self.stopped = True
                    return
            elif what == BEGIN and x in self._kept_by.kept:
                if self._done or self._skip(x):
                    self.stopped = True
                    return
                skipped = x

    def end(self) -> None:
        """Drops what the replay has made, and its graph; fills slots with copies of what is put back after it."""
        walk = self._walk
        made = *self.made.values(), *self.held
        for storage in made if self.stopped else ():
            walk.drop(storage)
        for slot in self._copies:
            self._region.slots[slot] = walk.new(walk.tape.saves[slot].copied_bytes)
        walk.reaches(0)
        for storage in () if self.stopped else made:
            walk.drop(storage)

    def _make(self, number: int) -> None:
        walk, op = self._walk, self._walk.tape.ops[number]
        made = op.made
        if self._empty and not self._empty.isdisjoint(op.read):
            if op.needs == Values.MASK and made and op.read[0] in self._empty:
                # The engine draws the mask over a blank tensor, and drops that and the values.
                walk.reaches(sum(map(walk.size, made)) + walk.size(made[-1]) + op.workspace)
                self._empty.update(made[1:])
                made = made[:1]
            elif op.needs == Values.ITS_OWN:
                self._empty.update(made)
                return
        for storage in made:
            self.made[storage] = self._now[storage] = walk.again(storage)
        walk.reaches(op.workspace)
        walk.run_again(op.key)

    def _save(self, number: int) -> bool:
        """Autograd saves a tensor; returns whether the replay ends there."""
        if self._done:
            return True
        walk, region = self._walk, self._region
        saved = walk.tape.saves[number]
        slot = region.order[self._saves] if self._saves < len(region.order) else None
        waiting = slot is not None and slot in region.slots and region.slots[slot] is None
        storage = self._now.get(saved.storage)
        if waiting and slot is not None:
            if saved.copied_bytes:
                self._copies.append(number)
            elif storage is not None and walk.is_held(storage) and not saved.weight:
                self._fill(slot, storage)
            elif walk.is_held(saved.storage):
                self._fill(slot, saved.storage)
        if storage is not None and walk.is_held(storage) and not saved.weight and not (waiting and saved.copied_bytes):
            walk.hold(storage)
            self.held.append(storage)
        if slot is not None and not saved.grad:
            self._unfinished = saved.node
        if self._saves == self._until.saves and self._until.call == math.inf:
            self._done = True
            if saved.grad and self._unfinished != saved.node:
                return True
            opened = self._opened if self._opened in region.order else None
            if opened is not None and walk.tape.saves[opened].node == saved.node:
                return True
        self._saves += 1
        return False

    def _fill(self, slot: _Key, storage: int) -> None:
        self._walk.hold(storage)
        self._region.slots[slot] = storage

    def _skip(self, number: int) -> bool:
        """Takes what a kept call left, in its place; returns whether the replay ends there."""
        region, walk = self._region, self._walk
        for slot, _ in self._kept_by.kept[number]:
            if slot in region.slots and region.slots[slot] is None:
                saved = walk.tape.saves[slot]
                storage = self._now.get(saved.storage, saved.storage)
                if saved.copied_bytes:
                    self._copies.append(slot)
                elif walk.is_held(storage):
                    self._fill(slot, storage)
        if self._until.call == number and self._until.saves != math.inf:
            return True
        self._take_results(number)
        return False

    def _take_results(self, number: int) -> None:
        call = self._walk.tape.calls[number]
        unused = self._walk.word_for(self._region, number) == VALUES_UNUSED
        for storage in call.results:
            if storage not in call.given:
                if unused:
                    self._empty.add(storage)
                else:
                    self._now[storage] = storage
                    self._walk.refused |= call.is_changed

    def fill_inputs(self, given: dict[int, int]) -> None:
        """Fills what the region inside it, and the next one of a chain, are given."""
        region, walk = self._region, self._walk
        if region.inside is not None:
            for storage in region.given:
                slot = "input", storage
                if slot in region.slots and region.slots[slot] is None and walk.is_held(given.get(storage, -1)):
                    self._fill(slot, given[storage])
        for storage in region.later or ():
            now = self._now.get(storage)
            if now is not None and walk.is_held(now):
                walk.hold(now)
                assert region.later is not None
                region.later[storage] = now


def _word_for(choice: Choice, place: int, kinds: Sequence[str], modules: Sequence[str]) -> str:
    """The word by which a region keeps a call in some modules; "" where it does not."""
    if DECISION in kinds:
        return DECISION if choice.carry else ""
    found = ""
    for word in choice.kept:
        if word.module and joined(choice.paths[place], word.module) not in modules:
            continue
        if word.calls == VALUES_UNUSED and kinds[0] in ALL_PRODUCTS:
            return VALUES_UNUSED
        if word.calls in kinds:
            found = word.calls
    return found
