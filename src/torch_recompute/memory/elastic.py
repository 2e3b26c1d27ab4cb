"""The pool of elastic regions: who keeps its activations, who is evicted, and when.

A step is cut into stretches by boundaries: a region's forward, its end, the first tensor that backward reads of a kept
call, a replay and its end. What each stretch takes above what was alive when it began is learned from the meter, by the
size of the call; before a stretch, calls are evicted until what it will take fits under the limit. So room is made
before memory runs out, and never in the middle of a kernel. What a simulated step took (`Rehearsal`) fills the table
before the first step.

What backward needs last is evicted first: the oldest call, or, where microbatches overlap (seen when backward begins
with an older call of a region while a newer one waits), the newest microbatch's oldest. A region's first call is never
kept: it shows what the region takes at the least, and proves in the first step that it can be replayed.

For a size that was not seen, what is needed is interpolated between its neighbours. Above a single one it is taken to
grow with the square: too much, for one step, rather than too little. Above several, as they did: a line and a square.

Rejected: a policy per operation (DTR, Kirisame et al., ICLR 2021), whose fragmentation costs most where memory is
shortest; retrying alone, which cannot repeat a node of the graph.

Invariants: nothing here waits for the device, and after a region's first call no mode is active. The pool's lock is
never held while a region's is waited for.
"""

from __future__ import annotations

import bisect
import functools
import math
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch

from .. import errors
from .._torch.storages import is_fake
from ..engine.elastic import ElasticCall
from ..engine.region_call import Contexts, RegionCall
from ..errors.text import shown, table
from ..region import checked_store
from ..stores import Store, bandwidth
from .budget import as_budget, read_budget
from .collectives import Agreement, Collectives
from .free import memory_of
from .meter import HeapMeter, Meter, Stamp, between, has_passed, meter_for, stamp

KEPT, DROPPED, AFTER, BACKWARD, REPLAY = "forward, kept", "forward, dropped", "after the forward", "backward", "replay"
"""The stretches of a step: each begins at a boundary of a region and ends at the next boundary of any."""

FINE = 5  # bits of a size that tell it from others: 16 steps from one power of two to the next


class _Learned:
    """The most bytes that one stretch of a region was seen to take, by the size of the call in bytes."""

    def __init__(self) -> None:
        self._points: dict[int, tuple[int, int]] = {}  # by the size in steps: the largest size, and the most bytes
        self._seen: dict[int, int] = {}  # the largest size that was not only simulated

    def learn(self, size: int, taken: int, *, simulated: bool = False) -> None:
        """Notes what a stretch has taken."""
        step = _step_of(size)
        largest, most = self._points.get(step, (0, 0))
        self._points[step] = max(size, largest), max(taken, most)
        if not simulated:
            self._seen[step] = max(size, self._seen.get(step, 0))

    def learn_all(self, other: _Learned) -> None:
        """Notes what another has learned, of a simulated step."""
        for size, taken in other._points.values():
            self.learn(size, taken, simulated=True)

    def knows(self, size: int) -> bool:
        """Whether a stretch of about this size was seen."""
        return self._seen.get(_step_of(size), -1) >= size

    def of(self, size: int) -> int | None:
        """Returns what the stretch will take at a size: between two that are known, the chord; see `_beyond`."""
        points = sorted(self._points.values())
        place = bisect.bisect_left(points, (size, 0))
        if not points:
            return None
        if place == len(points):
            return _beyond(points, size)
        above, most = points[place]
        if place == 0 or above == size:
            return most
        below, least = points[place - 1]
        return round(least + (max(most, least) - least) * (size - below) / (above - below))


def _beyond(points: Sequence[tuple[int, int]], size: int) -> int:
    """Returns what a stretch may take at a size above all that were seen.

    Memory is a constant (gradients of weights), a part as large as the size, and one as its square (scores). Of one
    size nothing is known of these, and all of it may be the square. Two that are apart bound the square, three say each
    part.
    """
    top, most = points[-1]
    square = most * (size / max(1, top)) ** 2
    low, least = points[0]
    apart = (top - low) / 8
    if top < 1.1 * low:
        return round(square)
    middle, between = min(points, key=lambda point: abs(2 * point[0] - low - top))
    if not low + apart < middle < top - apart:
        grown = (most - least) * (size**2 - top**2) / (top**2 - low**2)
        return round(min(square, most + max(0.0, grown)))
    slope = (most - between) / (top - middle)
    bend = max(0.0, (slope - (between - least) / (middle - low)) / (top - low))
    return round(min(square, most + max(0.0, slope + bend * (size - middle)) * (size - top)))


def _step_of(size: int) -> int:
    coarse = max(0, size.bit_length() - FINE)
    return size >> coarse << coarse


class ElasticRow(NamedTuple):
    """One region's calls, counted.

    Attributes:
        name: The region's name.
        kept: Forwards that kept what they saved.
        dropped: Forwards that kept nothing.
        evicted: How many of those kept were evicted before their backward.
        emptied: How many calls also lost what their saved calls had kept.
        moved: How many of the evicted were moved to a store in the place of being dropped.
        replayed: Replays.
        run_again: Forwards and replays that were run again because an allocation had failed.
        seconds: Seconds of the replays: on CUDA of the device, else of the host.
    """

    name: str
    kept: int
    dropped: int
    evicted: int
    emptied: int
    moved: int
    replayed: int
    run_again: int
    seconds: float


@shown
class ElasticReport(NamedTuple):
    """The calls of a pool of elastic regions so far, counted.

    Attributes:
        rows: One per region, in the order of their first calls.
        limit: The limit in bytes; 0 before the first call where it is "fit".
        miss: The least bytes that were left under the limit, slack included; None before the second boundary.
        where: The stretch at whose highest point that was.
    """

    rows: tuple[ElasticRow, ...]
    limit: int
    miss: int | None
    where: str

    @property
    def seconds(self) -> float:
        """Seconds of all replays."""
        return sum(row.seconds for row in self.rows)

    def __str__(self) -> str:
        counted = ("kept", "dropped", "evicted", "saved calls", "moved", "replayed", "run again")
        lines: list[tuple[str, ...]] = [(*counted, "replay ms", "region")]
        lines += [(*map(str, row[1:-1]), f"{1000 * row.seconds:.1f}", row.name) for row in self.rows]
        replays = sum(row.replayed for row in self.rows)
        text = f"elastic under {errors.size(self.limit)}: {replays} replays, {1000 * self.seconds:.1f} ms"
        if self.miss is not None:
            near = f"{errors.size(self.miss)} were left" if self.miss >= 0 else f"{errors.size(-self.miss)} above it"
            text += f"; nearest to the limit: {near}, {self.where}"
        return "\n".join([text, *table(lines, right=8)])


class Elastic:
    """Memory that regions share: each keeps its activations while they fit, and is recomputed where they do not.

        memory = Elastic("72GiB")
        layers = [recompute(block, elastic=memory) for block in blocks]
        ...
        print(memory.report())
        memory.limit = "40GiB"          # between steps

    One object for all regions of a device. Gradients are those of the plain call whatever is evicted.

    Args:
        limit: The most bytes alive at any time, weights and everything else included: bytes, "72GiB", or "fit" for
            what the device has for this process when the first region is called. A CPU refuses nothing above it; a
            warning says so once. On CUDA the allocator is told as well
            (`torch.cuda.set_per_process_memory_fraction`), until this object is gone: it refuses to reserve more, for
            the whole process. Set `PYTORCH_ALLOC_CONF=expandable_segments:True` in the environment: sizes that vary
            leave holes, and these count there.
        slack: The share of the limit that is left free, for what a stretch may take beyond what was learned, and on
            CUDA for holes.
        group: A process group on the CPU of the ranks that must replay the same regions, because a region repeats a
            collective of theirs: they agree before a microbatch's backward, and evict alike. By default each rank
            decides for itself, and an elastic region with such a collective is refused.
        to: A store such as `OnHost()`: a call is moved there in the place of being emptied where copying back is
            expected to be faster than its replay.
        meter: Says what is alive: `live()`, `reset_lap()` and `lap()`, in bytes. By default the device's allocator.
        always: Keep nothing, however much memory is free: the same path as under pressure, to test it and to see the
            least that a limit can be.

    Raises:
        ArgumentError: The limit is no number of bytes, or the slack is not between 0 and 1. In a forward: the limit is
            below what is resident, or a region repeats a collective and there is no `group`.

    The ideas are those of dynamic rematerialization (DTR, Kirisame et al., ICLR 2021) with regions as units.
    """

    simulated = False  # whether it is of a step on tensors without data

    def __init__(
        self,
        limit: int | str = "fit",
        *,
        slack: float = 0.05,
        group: Any = None,
        to: Any = None,
        meter: Meter | None = None,
        always: bool = False,
    ) -> None:
        if not isinstance(slack, (int, float)) or not 0 <= slack < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise errors.ArgumentError(
                f"slack={slack!r} is the share of the limit that is left free, from 0 to below 1.\n"
                '  Write Elastic("72GiB", slack=0.05).'
            )
        self._made_from = {"limit": limit, "slack": slack, "group": group, "to": to, "meter": meter, "always": always}
        self._known: weakref.WeakKeyDictionary[Any, dict[Any, _RegionMemory]] = weakref.WeakKeyDictionary()
        self._pool = _Pool(slack, group, checked_store("to", to), meter, always)
        self.limit = limit

    @property
    def limit(self) -> int:
        """The limit in bytes; 0 for "fit" before the first call. May be set between steps."""
        return self._pool.limit

    @limit.setter
    def limit(self, limit: int | str) -> None:
        try:
            budget = read_budget(limit)
        except errors.ArgumentError:
            budget = None
        if budget is None or budget.share is not None:
            raise errors.ArgumentError(
                f"limit={limit!r} is no number of bytes; the limit is of all that is alive on the device.\n"
                '  Write bytes (72 * 2**30), a text with a unit ("72GiB"), or "fit" for what the device has.'
            )
        with self._pool.lock:
            self._made_from["limit"] = limit
            self._pool.limit, self._pool.checked = budget.bytes or 0, False

    def report(self) -> ElasticReport:
        """Reports what each region did so far. On CUDA it waits for the last replays to be timed."""
        return self._pool.report(self._pool.parts)

    def report_on(self, makes: Iterable[Any]) -> ElasticReport:
        """Reports on the regions whose calls were looked up, in their order."""
        return self._pool.report([make.args[0] for make in makes])

    def expect(self, makes: Iterable[tuple[Any, Any]]) -> None:
        """Fills what regions know with what others took in a simulated step; each is given by what makes its calls."""
        for mine, simulated in makes:
            mine.args[0].expect(simulated.args[0])

    def __deepcopy__(self, memo: dict[int, Any]) -> Elastic:
        return self  # a copy of a model is on the same device

    def __reduce__(self) -> Any:
        """In another process it begins with what it was made from."""
        return functools.partial(Elastic, **self._made_from), ()

    def calls(self, fn: Callable[..., Any], name: str, what: Hashable = None) -> Callable[..., RegionCall]:
        """Returns what makes the calls of a region: of one function there is one part, however often it is wrapped.

        `what` tells apart regions of one function and name. A simulated step keeps nothing: that is its floor.
        """
        owner: Any = getattr(fn, "__self__", fn)
        if isinstance(owner, torch.nn.Module) and any(map(is_fake, owner.parameters())) and not self.simulated:
            return RegionCall
        if isinstance(owner, types.FunctionType):
            owner = owner.__code__
        try:
            parts = self._known.setdefault(owner, {})
        except TypeError:  # nothing that can be referred to weakly
            parts = self._known.setdefault(type(owner), {})
        with self._pool.lock:
            if (name, what) not in parts:
                parts[name, what] = _RegionMemory(self._pool, name)
            return functools.partial(ElasticCall, parts[name, what])


def alive_beside(memory: Elastic, held: int, device: torch.device) -> int:
    """The bytes that are alive on a device beside those that a step holds."""
    pool = memory._pool  # pyright: ignore[reportPrivateUsage]
    return max(0, (pool.meter or meter_for(device)).live() - held)


def limit_above(memory: Elastic, nbytes: int, others: int) -> int:
    """The limit for a step of so many bytes, above all else that is alive."""
    return nbytes + math.ceil(others / (1 - memory._pool.slack))  # pyright: ignore[reportPrivateUsage]


class Rehearsal(Elastic):
    """Memory of a simulated step: it keeps nothing, and learns what each stretch takes of a meter's bytes."""

    simulated = True

    def __init__(self, meter: Meter) -> None:
        super().__init__(1 << 62, meter=meter, always=True)
        self._pool.checked = True  # no limit to compare with, and none to set on a device


class _Pool:
    """The calls that wait for their backward, and what is alive beside them.

    Attributes:
        limit: The limit in bytes; 0 for what the device has, until it is checked.
        checked: Whether what is resident has been compared with it.
        overlapping: Whether microbatches overlap: a backward has begun with an older call of a region.
        parts: The regions, in the order of their first calls.
    """

    def __init__(self, slack: float, group: Any, store: Store | None, meter: Meter | None, always: bool) -> None:
        self.slack, self.store, self.meter, self.always = slack, store, meter, always
        self.limit, self.checked, self.overlapping = 0, False, False
        self.parts: list[_RegionMemory] = []
        self._calls: dict[int, weakref.ref[ElasticCall]] = {}  # complete or in forward, and backward has not begun
        self.lock = threading.RLock()
        self.agreement = None if group is None else Agreement(group, self.lock)
        # Of the stretch that runs: whose it is, which, the call's size, what was alive, and whether a lap is taken.
        self._stretch: tuple[_RegionMemory, str, int, int, bool] | None = None
        self._miss: tuple[int, str] | None = None
        self._said = False  # that more was alive than the limit

    def report(self, parts: Iterable[_RegionMemory]) -> ElasticReport:
        """Reports on some regions."""
        with self.lock:
            miss, where = self._miss or (None, "")
            return ElasticReport(tuple(part.row() for part in parts), self.limit, miss, where)

    def begin(self, part: _RegionMemory, kind: str, call: ElasticCall) -> None:
        """Begins a stretch, after what it will take has been made room for."""
        self.make_room(part.needs[kind].of(call.size) or 0)
        self.open(part, kind, call.size)

    def open(self, part: _RegionMemory, kind: str, size: int) -> None:
        """Begins a stretch; room has been made for it.

        On the CPU a lap costs time, and must end before the user's code could start a profiler. So it is taken for
        sizes that are not known yet and where the limit is near; what comes after a forward is known by its two ends.
        """
        meter, needs = self._metered(), part.needs[kind]
        began = meter.live()  # before the lap, which takes some memory itself on the CPU
        lap = kind != AFTER and not (needs.knows(size) and began + (needs.of(size) or 0) <= self.limit)
        lap = lap or not isinstance(meter, HeapMeter)
        if lap:
            meter.reset_lap()
        self._stretch = part, kind, size, began, lap

    def end(self) -> None:
        """Ends the stretch that runs, and learns from it.

        What comes when no call waits for its backward is left out: an optimizer's step, an evaluation.
        """
        if self._stretch is None:
            return
        part, kind, size, began, lap = self._stretch
        most, self._stretch = self._most(lap), None
        if kind not in (KEPT, DROPPED) and not self._calls:
            return
        if (lap or kind == AFTER) and not getattr(self._metered(), "missed", ""):
            part.needs[kind].learn(size, max(0, most - began))
        left = self.limit - most
        if self._miss is None or left < self._miss[0]:
            self._miss = left, f"{part.name}, {kind}"
        if left < 0 and not self._said and isinstance(self.meter, HeapMeter):
            self._said = True
            warnings.warn(_above(self.limit, most, f"{part.name}, {kind}"), RuntimeWarning, stacklevel=2)

    def taken(self) -> tuple[str, int, int]:
        """The stretch that runs, what was alive when it began, and what it has taken above that."""
        if self._stretch is None:
            return "", self._metered().live(), 0
        part, kind, _, began, lap = self._stretch
        return f"{part.name}, {kind}", began, max(0, self._most(lap) - began)

    def _most(self, lap: bool) -> int:
        """The most bytes alive in the stretch that runs, as far as is known without a lap."""
        return self._metered().lap() if lap else self._metered().live()

    @property
    def usable(self) -> int:
        """The bytes that may be alive, slack left out."""
        return round(self.limit * (1 - self.slack))

    def room(self) -> int:
        """The bytes that a stretch may take now."""
        return self.usable - self._metered().live()

    def make_room(self, need: int, mine: ElasticCall | None = None) -> bool:
        """Evicts calls until `need` bytes are free; returns whether they are.

        Args:
            need: The bytes.
            mine: A call that begins and would keep what it saves: whatever backward needs before it stays.
        """
        room = self.room()
        if need <= room:
            return True
        waiting = self.waiting(mine)
        if mine is not None and room + sum(_part_of(call).held(call) for call in waiting if call.resident) < need:
            return False  # it would not fit if everything else went
        for saved in (False, True)[: 1 if mine is not None else 2]:
            for call in waiting:
                if call is mine:
                    return False
                if _part_of(call).evict(call, saved):
                    room = self.room()
                    if need <= room:
                        return True
        return False

    def waiting(self, mine: ElasticCall | None = None) -> list[ElasticCall]:
        """The calls that wait for their backward: what it needs last comes first."""
        calls = [call for ref in [*self._calls.values()] if (call := ref()) is not None]
        if mine is not None:
            calls = [*(call for call in calls if call is not mine), mine]
        if self.overlapping:
            calls.sort(key=lambda call: -call.microbatch)
        return calls

    def waits(self, call: ElasticCall) -> None:
        """Notes a call whose backward is to come."""
        number = id(call)
        calls = self._calls
        calls[number] = weakref.ref(call, lambda _: calls.pop(number, None))

    def starts(self, call: ElasticCall) -> None:
        """Notes that the backward of a call begins."""
        if self._calls.pop(id(call), None) is not None and not self.overlapping:
            self.overlapping = any(
                other.part is call.part and other.microbatch > call.microbatch for other in self.waiting()
            )

    def check(self) -> None:
        """Sets what "fit" means, and refuses a limit below what is resident."""
        if not self.checked and not self._calls:
            live = self._metered().live()
            self._fence()
            self.limit = self.limit or live + memory_of(self.device)[0]
            self.checked, self._said = True, False
            if live > self.usable:
                heap = isinstance(self.meter, HeapMeter)
                what = f"{'the whole heap: ' * heap}weights, gradients, optimizer{', Python and libraries' * heap}"
                raise errors.ArgumentError(
                    f"Elastic({as_budget(self.limit)!r}): {errors.size(live)} are alive before the first elastic "
                    f"region runs ({what}), and with slack={self.slack} only "
                    f"{errors.size(self.usable)} may be.\n"
                    f'  Write a limit above that, such as memory.limit = "{as_budget(2 * live)}".'
                )

    def _fence(self) -> None:
        """Has the CUDA allocator itself refuse more than the limit, and give back what it holds above it.

        What it holds counts, fragments included, and of the whole process, for as long as the pool is there. So an
        allocation fails there, and is run again, before another process on the card misses its share.
        """
        if self.device.type == "cuda":
            if _fences.get(self.device) != id(self):
                _fences[self.device] = id(self)
                weakref.finalize(self, _unfence, self.device, id(self)).atexit = False
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, (self.limit or total) / total), self.device)
            if self.limit and torch.cuda.memory_reserved(self.device) > self.limit:
                torch.cuda.empty_cache()

    def _metered(self) -> Meter:
        if self.meter is None:
            self.meter = meter_for(self.device)
        return self.meter

    @functools.cached_property
    def device(self) -> torch.device:
        """The device whose memory it is: the present CUDA device where CUDA is in use, else the CPU."""
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")


def _above(limit: int, most: int, where: str) -> str:
    """Text for more alive on a CPU than the limit."""
    return (
        f"{errors.size(most)} are alive ({where}), {errors.size(most - limit)} above the limit of elastic regions. A "
        "CPU refuses nothing by itself, and nothing was left to evict, or it was not known yet what this takes.\n"
        "  Write a higher limit (at the end memory.report() says how much was missing), a larger slack, or a smaller "
        "batch. (Said once for a limit.)"
    )


_fences: dict[torch.device, int] = {}
"""For each device the pool, by its `id`, that told the allocator its limit last."""


def _unfence(device: torch.device, pool: int) -> None:
    """Takes the limit away that a pool told the allocator, which is gone now, unless another has told it since."""
    if _fences.get(device) == pool:
        del _fences[device]
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def _part_of(call: ElasticCall) -> _RegionMemory:
    return cast("_RegionMemory", call.part)


class _RegionMemory:
    """One region's part of a pool; see `engine.elastic.Part`.

    Attributes:
        needs: What each stretch that begins here takes.
        counts: What its calls did, as in `ElasticRow`.
        collectives: What it communicates.
    """

    def __init__(self, pool: _Pool, name: str) -> None:
        self.pool, self.name = pool, name
        self.collectives = Collectives(name, pool.agreement)
        self.needs = {kind: _Learned() for kind in (KEPT, DROPPED, AFTER, BACKWARD, REPLAY)}
        self._saved = _Learned()
        self.counts = dict.fromkeys(ElasticRow._fields[1:-1], 0)
        self._running: weakref.WeakKeyDictionary[ElasticCall, Stamp] = weakref.WeakKeyDictionary()  # when replays began
        self._timed: list[tuple[int, Stamp, Stamp]] = []  # replays by their size, from one moment to another
        self._micros = _Learned()  # of a replay
        self._seconds = 0.0

    def watch(self, call: ElasticCall) -> Contexts | None:
        """Returns what is entered around the forward of a call, and around its replays; None for nothing."""
        return self.collectives.watch(call)

    def forward(self, call: ElasticCall) -> bool:
        """Makes room for a forward, and returns whether the call is to keep what it saves."""
        pool = self.pool
        with pool.lock:
            pool.end()
            pool.check()
            if not (self.counts["kept"] or self.counts["dropped"]):
                pool.parts.append(self)
            mine = [other.microbatch for other in pool.waiting() if other.part is self]
            call.microbatch = 1 + max(mine) if mine else 0
            lean = self.needs[DROPPED].of(call.size)
            first = not self.counts["dropped"]
            keeps = not (first or lean is None or call.attempt or pool.always or self.collectives.unclear)
            if keeps:
                most = (self._saved.of(call.size) or 0) + (lean or 0)
                seen = self.needs[KEPT].of(call.size)
                need = most if seen is None else min(seen, most)
                keeps = pool.make_room(need, call)
            if not keeps:
                pool.make_room(lean or 0)
            self.counts["kept" if keeps else "dropped"] += 1
            if keeps:
                pool.waits(call)
            pool.open(self, KEPT if keeps else DROPPED, call.size)
            return keeps

    def forward_ended(self, call: ElasticCall) -> None:
        """Notes a call whose forward is over, and makes room for what comes next."""
        pool = self.pool
        with pool.lock:
            pool.end()
            pool.waits(call)
            if self._agreed_on:
                self._agreed_on.add(call)
            if not call.resident:
                self._saved.learn(call.size, call.saved_bytes())
            pool.begin(self, AFTER, call)

    def interrupted(self, call: ElasticCall) -> None:
        """Ends the stretch of a forward or replay that has raised."""
        with self.pool.lock:
            self._running.pop(call, None)
            self.pool.end()

    @property
    def _agreed_on(self) -> Agreement | None:
        """The agreement of ranks on the region's calls; None where each decides for itself."""
        return self.pool.agreement if self.collectives.repeated else None

    def agree(self, call: ElasticCall) -> None:
        """Evicts what other ranks have evicted, before the backward of a call begins; the call may be among it."""
        if self._agreed_on:
            self._agreed_on.agree(call, lambda one, saved: _part_of(one).evict_now(one, saved))

    def backward(self, call: ElasticCall) -> None:
        """Makes room for the backward of a kept call, which begins now."""
        with self.pool.lock:
            self.collectives.seen(replayed=False)
            self._start(BACKWARD, call)

    def _start(self, kind: str, call: ElasticCall) -> None:
        """Makes room for the first stretch of a call's backward."""
        self.pool.end()  # while the call still waits: what came before is learned
        self.pool.starts(call)
        self.pool.begin(self, kind, call)

    def waits(self, call: ElasticCall) -> None:
        """Notes a kept call whose graph was retained: its backward may come again."""
        with self.pool.lock:
            self.pool.waits(call)

    def replay(self, call: ElasticCall) -> None:
        """Makes room for a replay."""
        with self.pool.lock:
            self.counts["replayed"] += 1
            self._start(REPLAY, call)
            self._running.setdefault(call, stamp())  # a replay may begin again, when values are missing

    def replay_ended(self, call: ElasticCall) -> None:
        """Makes room for the backward of a call that has been replayed."""
        with self.pool.lock:
            began = self._running.pop(call, None)
            if began is not None:
                self._timed.append((call.size, began, stamp()))
            self._take_times()
            self.collectives.seen(replayed=True)
            self.pool.end()
            self.pool.begin(self, BACKWARD, call)

    def expect(self, simulated: _RegionMemory) -> None:
        """Notes what the same region took in a simulated step."""
        for kind, learned in simulated.needs.items():
            self.needs[kind].learn_all(learned)
        self._saved.learn_all(simulated._saved)

    def held(self, call: ElasticCall) -> int:
        """The bytes that eviction of a kept call is expected to free."""
        return 0 if self._stays(call) else self._saved.of(call.size) or 0

    def _stays(self, call: ElasticCall) -> bool:
        """Whether the call stays as it is, because ranks have agreed on it or may have to."""
        return self.collectives.unclear or (self._agreed_on is not None and self._agreed_on.settled(call))

    def evict(self, call: ElasticCall, saved: bool) -> bool:
        """Evicts a call, and with `saved` what its saved calls keep; returns whether there was something."""
        return not self._stays(call) and self.evict_now(call, saved, None if saved else self._goes_to(call))

    def evict_now(self, call: ElasticCall, saved: bool, to: Any = None) -> bool:
        """Evicts a call that ranks may just have agreed on."""
        with self.pool.lock:
            kept = call.resident
            if not call.evict(saved, to, self.collectives.saved):
                return False
            self.counts["evicted"] += kept
            self.counts["moved"] += kept and to is not None
            self.counts["emptied"] += saved
            return True

    def replay_micros(self, size: int) -> int | None:
        """The microseconds that a replay takes; None before the first was timed."""
        return self._micros.of(size)

    def _goes_to(self, call: ElasticCall) -> Any:
        """The store, where bringing back what a call keeps takes less time than its replay; None elsewhere."""
        micros = self.replay_micros(call.size)
        if self.pool.store is None or micros is None or self._agreed_on:
            return None
        back = self.held(call) / bandwidth(self.pool.device).to_device
        return self.pool.store if 1e6 * back < micros else None

    def _take_times(self, wait: bool = False) -> None:
        """Takes the times of replays that the device has ended."""
        left: list[tuple[int, Stamp, Stamp]] = []
        for size, began, ended in self._timed:
            if not (wait or has_passed(ended)):
                left.append((size, began, ended))
                continue
            seconds = between(began, ended)
            self._seconds += seconds
            self._micros.learn(size, round(1e6 * seconds))
        self._timed = left

    def failed(self, call: ElasticCall, attempt: int) -> bool:
        """Evicts others after an allocation has failed; returns whether to try again."""
        pool = self.pool
        with pool.lock:
            *_, taken = pool.taken()
            before = sum(self._evictions())
            pool.make_room(1 << 62 if attempt else pool.room() + max(1, taken))
            again = sum(self._evictions()) > before or call.was_resident
            self.counts["run_again"] += again
            return again

    def _evictions(self) -> Iterator[int]:
        for part in self.pool.parts:
            yield part.counts["evicted"] + part.counts["emptied"]

    def unrepeatable(self, replaying: bool = False) -> str:
        """A sentence on why a forward, or a replay, cannot be run again; "" where it can."""
        return self.collectives.unrepeatable(replaying)

    def shortage(self) -> str:
        """The sentences for an error that memory ran out although nothing is left to evict."""
        pool = self.pool
        with pool.lock:
            where, began, taken = pool.taken()
            return (
                f"Nothing is left to evict under the limit of {errors.size(pool.limit)}: {errors.size(began)} were "
                f"alive when this stretch began ({where}), and it had taken {errors.size(taken)} when an allocation "
                f"failed. The step needs more than {errors.size(began + taken)}."
            )

    def row(self) -> ElasticRow:
        """Returns the counts of the region."""
        self._take_times(wait=True)
        return ElasticRow(self.name, **self.counts, seconds=self._seconds)
