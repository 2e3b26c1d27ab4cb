"""The ways to treat one segment that are worth a trial: its operations as a graph, and what choices would cost by it.

The segment runs once, on fake tensors. A dispatch mode writes down which storage each operation makes and reads,
saved-tensor hooks which of them backward needs, and a function mode which call of a kind (`plan/calls.py`) the
operation belongs to. Everything is said of storages: a view is its base, a write in place belongs to the node of what
it writes (what it reads counts only if it was made earlier, so the graph has no cycle; the bound stays one). What an
operation asks the layout of (`empty_like`, a dropout for its mask) it does not read. Calls become candidates, each the
words that a plan writes into `Choice.keep` (`self_attn.q_proj@product`); what words cannot tell apart is one candidate:
the calls of one module, the members of a list of experts, the parts of a product with an adapter.

A choice is a set of regions in the segment (all of it, or some of its parts: the attention, the MLP, each also together
with its norm) and, in each, the calls that are kept. There are hundreds. What each costs is guessed from the graph by
three rules, those of the engine: a region that is replayed stores its arguments, what its kept calls returned or
backward needs of them, decisions, and what something outside of it needs; what backward needs of the rest is made
again, from that; and a replay runs up to where the last such tensor was saved, except for the products of which nothing
that is made again reads the values. Guesses only leave out choices: those worse than
another in everything, and those far from the convex hull of seconds over bytes, since a mixture of two layers on the
hull is as good as any choice above it. Bytes are meant twice: those stored, which add up over the layers, and with them
those that a replay makes, which decide the peak in a layer's backward. Half of the choices are taken by each.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .. import _torch, errors
from .._torch.graphs import attention_in_parts
from .._torch.modes import transforming
from ..engine.shape_only import ASK_FOR_LAYOUT, DROPOUT, goes_through
from ..memory.batch import tensors_of_call
from ..memory.ledger import storages
from ..memory.operations import Operation
from ..plan.calls import ALL_PRODUCTS, decided, kind_of
from ..plan.choice import ATTENTION, DOWN, PRODUCT, VALUES_UNUSED, Choice, Target
from ..plan.roles import inside, relative
from ..simulation.copies import reached_as_before
from ..simulation.devices import ITSELF, NO_WORK, Host, Work
from .cost import Graph, Node
from .ops import Op, logging

MOST = 8  # candidates, so that all their subsets can be looked at
_Key = tuple[str, str]  # the module and the kind of a call


@dataclass
class Made:
    """A storage that the segment made."""

    bytes: int
    ops: list[Op]  # what was run to make it and to write it
    inputs: set[int]  # the storages read for it, by index; -1 is the segment's input
    module: str  # path of the module that made it, below the segment
    call: int = -1  # the candidate that it was made in; -1 outside of all
    result: bool = False  # whether the call that it was made in returned it
    decision: bool = False  # whether a region that carries decisions carries it
    saved: dict[str, int] = field(default_factory=dict[str, int])
    """Paths of the modules in which autograd saved it, each with how many storages had been made when it last did."""


@dataclass
class SegmentRecord:
    """The operations of a segment. The lists `calls`, `kinds` and `within` have one entry per candidate."""

    input_bytes: int
    made: list[Made] = field(default_factory=list["Made"])  # the storages it makes, in order
    calls: list[tuple[Target, ...]] = field(default_factory=list[tuple[Target, ...]])  # their words
    kinds: list[str] = field(default_factory=list[str])
    within: list[frozenset[int]] = field(default_factory=list[frozenset[int]])
    """Those that its words say, too: the narrowing products among all of a module."""
    parts: list[str] = field(default_factory=list[str])
    """Modules below the segment that hold several of its calls and that it calls itself."""
    inner: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """For a part those below it: the shared expert of a mixture, and its stack of experts."""
    feeders: dict[str, str] = field(default_factory=dict[str, str])
    """For a part the module, without calls of a kind, whose result it is given: its norm."""
    given: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    """For a module the storages that its arguments are in."""
    output: int = -1  # index of the storage of its result
    input_needed: bool = False  # whether backward needs its input itself

    def graph(self, price: Callable[[Op], float]) -> Graph:
        """The operations as plain data, with prices."""
        nodes = [
            Node(sum(map(price, made.ops)), made.bytes, tuple(sorted(made.inputs)), bool(made.saved), len(made.ops))
            for made in self.made
        ]
        return Graph(tuple(nodes), self.output, self.input_bytes, self.input_needed)


def record(module: nn.Module, call: Callable[[], Any], inputs: Sequence[torch.Tensor]) -> SegmentRecord:
    """Runs a segment and records its operations.

    Args:
        module: The segment.
        call: Runs it on fake tensors, with grad.
        inputs: The tensors that come from the segments before.

    Raises:
        ArgumentError: It calls what allows no saved-tensor hooks around it.
    """
    try:
        with reached_as_before(module):
            return _SegmentRecorder(module, inputs).run(call)
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        raise errors.ArgumentError(
            f"{type(module).__name__} calls torch.func.grad or one of its kind, for which PyTorch takes no "
            "saved-tensor hooks, by which regions are made: neither it nor what is around it can be recomputed.\n"
            "  Take a smaller batch: no other layer is called that a plan could recompute."
        ) from error


class _SegmentRecorder:
    """Records what a segment makes, reads and saves, by storages."""

    def __init__(self, module: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
        given = [storage for _, storage in storages(list(inputs))]
        self._found = SegmentRecord(sum(storage.nbytes() for storage in given))
        self._index: dict[int, int] = {id(storage): -1 for storage in given}
        self._held: list[Any] = [*inputs]  # no storage may die and give its identity to another
        self._packs: list[tuple[weakref.ref[torch.Tensor], int, str, int]] = []
        self._made_in: list[_Key | None] = []
        self._calls = _Calls(module)

    def run(self, call: Callable[[], Any]) -> SegmentRecord:
        """Runs the segment once."""
        pack = _torch.see_through(partial(self._pack))  # which takes attributes, as a method does not
        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            self._calls.following(),
            logging(self._see),
        ):
            result = call()
        found, index = self._found, self._index
        for packed, place, saver, time in self._packs:
            if packed() is None:  # of a graph that leads to nothing, and is gone
                continue
            if place == -1:
                found.input_needed = True
            else:
                found.made[place].saved[saver] = time
        found.output = max((index.get(id(storage), -1) for _, storage in storages(tensors_of_call(result))), default=-1)
        self._add_calls()
        return found

    def _see(self, op: Op, ran: Operation) -> None:
        found, index = self._found, self._index
        given = {id(storage) for _, storage in ran.given}
        reads = set[int]() if op.func in ASK_FOR_LAYOUT else {index[storage] for storage in given & index.keys()}
        results = [s for _, s in ran.results]
        self._held.extend(results)  # not the tensors, which would keep a graph alive that nothing else holds
        fresh = [s for _, s in ran.made if id(s) not in index]
        written = [index[id(s)] for s in results if index.get(id(s), -1) >= 0]
        drawn = op.func is DROPOUT and len(fresh) == 2
        if drawn:  # first the mask, which follows from the layout alone
            fresh.reverse()
        owner = len(found.made) if fresh else written[0] if written else None
        if written and not fresh:
            found.made[written[0]].inputs |= {read for read in reads if read < written[0]}
        for storage in fresh:
            index[id(storage)] = len(found.made)
            own = set[int]() if drawn and storage is fresh[0] else set(reads)
            found.made.append(Made(int(storage.nbytes()), [], own, self._calls.module))
            self._made_in.append(self._calls.current)
            if drawn:
                reads.add(index[id(fresh[0])])
        if owner is not None:
            found.made[owner].ops.append(op)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        packed, at = tensor.detach(), (self._calls.module, len(self._found.made))
        places = [self._index[id(storage)] for _, storage in storages([tensor]) if id(storage) in self._index]
        self._packs.extend((weakref.ref(packed), place, *at) for place in places)
        return packed

    def _add_calls(self) -> None:
        """Adds the calls of kinds, and in which of them each storage was made."""
        found, index, calls = self._found, self._index, self._calls
        calls.describe(found)
        for made, key in zip(found.made, self._made_in, strict=True):
            made.call = -1 if key is None else calls.found[key]
        for path, given in calls.given.items():
            found.given[path] = {index[storage] for storage in given & index.keys()}
        for storage in calls.results & index.keys():
            found.made[index[storage]].result = True
        for storage in calls.decisions & index.keys():
            found.made[index[storage]].decision = True


class _Calls(TorchFunctionMode):
    """Knows which call of a kind is running, and in which module.

    Attributes:
        current: The call; None for none.
        found: All calls, in the order in which they first ran; by the number of their candidate after `describe`.
        given: The identities of the storages that a module was given, by its path.
        results: Those of the storages that calls returned.
        decisions: Those of what a region may carry.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        children = list(module.named_modules())
        self._module = module
        self._called = [path for path, child in children if type(child).forward is not nn.Module.forward]
        self._rows = {path for path, child in children if isinstance(child, nn.Sequential)}
        self._products = {path for path, child in children if hasattr(child, "base_layer")}
        self._stack: list[str] = []
        self._left: dict[int, tuple[str, weakref.ref[torch.Tensor]]] = {}
        self._feeders: dict[str, set[str]] = {}
        self.given: dict[str, set[int]] = {}
        self.results = set[int]()
        self.decisions = set[int]()
        self.found: dict[_Key, int] = {}
        self.current: _Key | None = None

    @contextmanager
    def following(self) -> Generator[None]:
        """Follows the modules through one run, under the mode, which enters itself again inside some functions."""
        with ExitStack() as hooks:
            for path, child in self._module.named_modules():
                enter = partial(self._enter, path)
                hooks.enter_context(child.register_forward_pre_hook(enter, with_kwargs=True))
                hooks.enter_context(child.register_forward_hook(self._leave, always_call=True))
            hooks.enter_context(self)
            yield

    def _enter(self, path: str, _: nn.Module, *given: Any) -> None:
        self._stack.append(path)
        tensors = [] if transforming() else _torch.tensors_in(given)  # in `vmap` one stands for several
        left = [(self._left[id(x)], x) for x in tensors if id(x) in self._left]
        self._feeders.setdefault(path, set()).update(where for (where, ref), x in left if ref() is x)
        self.given.setdefault(path, set()).update(id(storage) for _, storage in storages(tensors))

    def _leave(self, _: nn.Module, given: Any, result: Any) -> None:
        path = self._stack.pop()
        if isinstance(result, torch.Tensor):
            self._left[id(result)] = path, weakref.ref(result)

    @property
    def module(self) -> str:
        """Path of the module that is running."""
        return self._stack[-1] if self._stack else ""

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if transforming():
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:
                return attention_in_parts(*args, **kwargs)
        kind = kind_of(func, args, kwargs)
        if kind is None or self.current is not None:
            result = func(*args, **kwargs)
            carried = decided(func, args, kwargs, result)
            self.decisions.update(id(storage) for _, storage in storages([carried]))
            return result
        where = self._scope(self.module)
        if kind == DOWN and where in self._products:  # a part of a product with an adapter
            kind = PRODUCT
        self.current = where, kind
        self.found[self.current] = -1
        try:
            result = func(*args, **kwargs)
        finally:
            self.current = None
        self.results.update(id(storage) for _, storage in storages([result]))
        return result

    def _scope(self, path: str) -> str:
        """The module whose calls are named together with those of this one."""
        parts = path.split(".")
        for length in range(len(parts) + 1):
            above = ".".join(parts[:length])
            if above in self._products:
                return above
        for place, part in enumerate(parts):
            if part.isdigit() and ".".join(parts[:place]) not in self._rows:  # experts, of which each may run or not
                parts = parts[:place]
                break
        while parts and ".".join(parts) not in self._called:
            parts.pop()
        return ".".join(parts)

    def describe(self, found: SegmentRecord) -> None:
        """Adds what is known of the calls to a record, and numbers them."""
        groups = self._groups()
        # Of a candidate that has products of both kinds, that of all products.
        found.kinds = [next((kind for _, kind in group if kind == PRODUCT), group[0][1]) for group in groups]
        for number, group in enumerate(groups):
            self.found.update(dict.fromkeys(group, number))
            found.calls.append(tuple(self._word(*key) for key in group if not _covered(*key, group)))
            modules = [path for path, _ in group]
            narrow = (
                i
                for i, (kind, inner) in enumerate(zip(found.kinds, groups, strict=True))
                if (found.kinds[number], kind) == (PRODUCT, DOWN)
                and all(any(inside(where, path) for path in modules) for where, _ in inner)
            )
            found.within.append(frozenset(narrow))
        found.parts = self._parts("")
        found.inner = {part: self._parts(part) for part in found.parts}
        feeders: dict[str, str] = {}
        for part in found.parts:
            given = self._feeders.get(part, set()) - {""}
            feeder = next(iter(given), "")
            has_calls = any(inside(where, feeder) for where, _ in self.found)
            if len(given) == 1 and not has_calls and not inside(feeder, part):
                feeders[part] = feeder
        shared = Counter(feeders.values())
        found.feeders = {part: feeder for part, feeder in feeders.items() if shared[feeder] == 1}

    def _parts(self, around: str) -> list[str]:
        """The outermost modules below another that are called and are more than one call.

        The calls of a list (`nn.Sequential`) go by its own name, so a module of that name may be more than one, too.
        """
        bare = {where for where, _ in self.found}
        called = [path for path in self._called if path != around and inside(path, around)]
        below = [path for path in called if any(inside(where, path) for where in bare)]
        outermost = [path for path in below if not any(inside(path, other) and path != other for other in below)]
        return [
            path
            for path in outermost
            if path not in bare
            or sum(inside(where, path) for where, _ in self.found) > 1
            or (path not in self._products and any(self._module.get_submodule(path).children()))
        ]

    def _word(self, where: str, kind: str) -> Target:
        """The word for the calls of a kind in a module: where all products narrow, that they are products."""
        others = any(other == PRODUCT and inside(path, where) for path, other in self.found)
        return Target.of(where, PRODUCT if kind == DOWN and not others else kind)

    def _groups(self) -> list[list[_Key]]:
        """The calls that are one candidate, in the order in which they ran."""
        groups: list[list[_Key]] = []
        for where, kind in sorted(self.found, key=lambda key: len(key[0])):
            around = [group for group in groups if group[0][1] == kind and inside(where, group[0][0])]
            if around:
                around[0].append((where, kind))
            else:
                groups.append([(where, kind)])
        order = list(self.found)
        groups.sort(key=lambda group: min(map(order.index, group)))
        while len(groups) > MOST:  # the two neighbours of one kind that are nearest in the tree
            _, place = min((_distance(a, b), i) for i, (a, b) in enumerate(itertools.pairwise(groups)))
            groups[place : place + 2] = [groups[place] + groups[place + 1]]
        return groups


def _covered(where: str, kind: str, group: Sequence[_Key]) -> bool:
    """Whether another word of the group says this one too."""
    return any(
        inside(where, around) and ((other == kind and where != around) or (other, kind) == (PRODUCT, DOWN))
        for around, other in group
    )


def _distance(one: Sequence[_Key], other: Sequence[_Key]) -> tuple[bool, int]:
    """The distance of two groups: whether their kinds differ, then how little of their paths they share."""
    a, b = one[-1][0].split("."), other[0][0].split(".")
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
    return one[-1][1] != other[0][1], max(len(a), len(b)) - shared


# --- what each choice would cost ---

Regions = Mapping[tuple[str, ...], frozenset[int]]


@dataclass(frozen=True)
class Guess:
    """The guessed cost of a choice."""

    regions: tuple[Choice, ...]  # with paths below the segment
    saved: int  # bytes stored
    rebuilt: int  # bytes made by the largest of its replays that backward needs
    seconds: float  # that it adds to the step
    work: Work  # of the replays


Carries = Callable[[Sequence[str]], bool]  # whether a region of these paths carries decisions


def all_guesses(
    found: SegmentRecord,
    price: Callable[[Op], float],
    host: Host = ITSELF,
    plain: Work = NO_WORK,
    carries: Carries = lambda _: False,
) -> list[Guess]:
    """Guesses the cost of each choice; `plain` is the work of the segment without recomputation."""
    device = [sum(map(price, made.ops)) for made in found.made]
    return [_guess(found, device, regions, host, plain, carries) for regions in _choices(found)]


def guesses(every: list[Guess], most: int, segments: int) -> list[Guess]:
    """The choices worth trying, at most so many: first those that are the least for some of so many such segments."""
    best: list[Guess] = []
    for guess in sorted(
        every, key=lambda g: (g.saved, g.seconds, g.rebuilt, len(g.regions), sum(len(c.keep) for c in g.regions))
    ):
        if not any(
            other.saved <= guess.saved and other.seconds <= guess.seconds and other.rebuilt <= guess.rebuilt
            for other in best
        ):
            best.append(guess)
    by_saved = _nearest(best, lambda guess: guess.saved)
    by_both = _nearest(best, lambda guess: guess.saved + guess.rebuilt)
    mixed = itertools.chain.from_iterable(zip(by_saved, by_both, strict=True))
    least = (min(best, key=lambda guess: n * guess.saved + guess.rebuilt) for n in range(1, segments + 1))
    return list(dict.fromkeys((*least, *mixed)))[:most]


def offloads(found: SegmentRecord) -> list[tuple[Choice, ...]]:
    """The ways to save a segment in host memory without recomputing it: all of it, some parts, or its attention."""
    attention = [
        word for kind, words in zip(found.kinds, found.calls, strict=True) if kind == ATTENTION for word in words
    ]
    ways = [[""], *([part] for part in found.parts), *([found.parts] if len(found.parts) > 1 else []), attention]
    return [tuple(Choice((path,), store="host", offload=True) for path in way) for way in ways if way]


def _choices(found: SegmentRecord) -> Iterator[Regions]:
    """All sets of regions and kept calls: one region around the segment, or any of its parts, or of parts of these."""
    numbers = range(len(found.calls))
    yield from ({("",): kept} for kept in _kept(found, numbers))

    def own(part: str) -> list[int]:
        return [n for n in numbers if all(inside(word.module, part) for word in found.calls[n])]

    ways: list[list[Regions]] = []
    for part in found.parts:
        ways.append([{}, *({(part,): kept} for kept in _kept(found, own(part)))])
        if part in found.feeders:
            together = found.feeders[part], part
            ways[-1] += [{together: kept} for kept in _by_kind(found, own(part))]
        inner = [[{}, *({(below,): kept} for kept in _by_kind(found, own(below)))] for below in found.inner[part]]
        ways[-1] += filter(None, _together(inner))
    yield from filter(None, _together(ways))


def _together(ways: Sequence[Sequence[Regions]]) -> Iterator[Regions]:
    """All combinations of one way for each of some parts."""
    for chosen in itertools.product(*ways):
        yield {part: kept for way in chosen for part, kept in way.items()}


def _subsets(numbers: Sequence[int]) -> Iterator[frozenset[int]]:
    for size in range(len(numbers) + 1):
        yield from map(frozenset, itertools.combinations(numbers, size))


def _kept(found: SegmentRecord, numbers: Sequence[int]) -> Iterator[frozenset[int]]:
    """All sets of calls that words can say."""
    for chosen in _subsets(numbers):
        if all(found.within[number] <= chosen for number in chosen):
            yield chosen


def _by_kind(found: SegmentRecord, numbers: Sequence[int]) -> Iterator[frozenset[int]]:
    """All sets of kinds of calls, as the calls: what can be kept of several modules."""
    names = sorted({found.kinds[number] for number in numbers})
    for chosen in _subsets(range(len(names))):
        kinds = {names[i] for i in chosen}
        if PRODUCT not in kinds or DOWN in kinds or DOWN not in names:
            yield frozenset(number for number in numbers if found.kinds[number] in kinds)


def _guess(
    found: SegmentRecord, device: Sequence[float], regions: Regions, host: Host, plain: Work, carries: Carries
) -> Guess:
    """The cost of some regions."""
    needs = _Needs(found, regions, carries)
    work, rebuilt, forward = Work(), 0, 0
    choices: list[Choice] = []
    for paths, kept in regions.items():
        passed, saved = needs.add_replay(paths, kept)
        idle = {found.made[i].call for i in passed} - needs.asked - {-1}
        idle = {call for call in idle if _goes_nowhere(found, call, passed)}
        unused = {call: said for call in sorted(idle) if (said := _unused(found, paths, call))}
        again = [i for i in passed if found.made[i].call not in unused]
        replayed = sum(len(found.made[i].ops) for i in again)
        inner, skipped = needs.inside(paths), kept | unused.keys()
        calls = sum(len(m.ops) for m in inner if m.call in skipped or (m.decision and paths in needs.carrying))
        work = work.plus(Work(sum(device[i] for i in again), 0, replayed, 1, calls))
        forward += sum(len(made.ops) for made in inner)
        rebuilt = max(rebuilt, sum(found.made[i].bytes for i in saved))
        words = (word for said in unused.values() for word in said)
        choices.append(Choice(paths, (*_words(found, paths, kept), *words)))
    if needs.carrying or any(choice.keep for choice in choices):
        work = replace(work, watched=forward + work.replayed)
    return Guess(tuple(choices), needs.stored_bytes, rebuilt, host.added(plain, work), work)


class _Needs:
    """Follows what backward needs under some regions back to what is stored.

    Attributes:
        stored: The storages that are kept.
        again: Those that replays make.
        asked: The calls of which backward needs something within their region.
        takes_input: Whether the segment's input is kept.
        carrying: The regions that carry decisions.
    """

    def __init__(self, found: SegmentRecord, regions: Regions, carries: Carries) -> None:
        self._found, self._regions = found, regions
        self.carrying = {paths for paths in regions if carries(paths)}
        self._known: dict[str, tuple[str, ...] | None] = {}
        self._at = [self._region_of(made.module) for made in found.made]
        self.stored, self.again, self.asked = set[int](), set[int](), set[int]()
        self.takes_input = found.input_needed
        self._follow()

    def _region_of(self, module: str) -> tuple[str, ...] | None:
        if module not in self._known:
            around = (paths for paths in self._regions if any(inside(module, path) for path in paths))
            self._known[module] = next(around, None)
        return self._known[module]

    def _follow(self) -> None:
        made = self._found.made
        open_ = [(i, self._region_of(saver)) for i, one in enumerate(made) for saver in one.saved]
        while open_:
            i, asked_in = open_.pop()
            if i < 0:
                self.takes_input = True
                continue
            region = self._at[i]
            if region == asked_in:
                self.asked.add(made[i].call)
            if region is None or region != asked_in or made[i].call in self._regions[region]:
                self.stored.add(i)  # no region makes it again, or what asks is outside of the region, or it is kept
            elif made[i].decision and region in self.carrying:
                self.stored.add(i)
            elif i not in self.again:
                self.again.add(i)
                open_.extend((read, region) for read in made[i].inputs)

    def add_replay(self, paths: tuple[str, ...], kept: frozenset[int]) -> tuple[list[int], set[int]]:
        """Adds what the replay of a region is given; returns what it makes again, and what of that backward needs."""
        made, at = self._found.made, self._at
        here = [i for i in self.again if at[i] == paths]
        saved = [(i, n) for i in here for saver, n in made[i].saved.items() if self._region_of(saver) == paths]
        run = [i for i in range(max((n for _, n in saved), default=0)) if at[i] == paths]
        self.stored.update(i for i in run if made[i].call in kept and made[i].result)
        if saved:  # there is a replay, which is given what the forward was given
            given = {i for path in paths for i in self._found.given[path]}
            self.takes_input = self.takes_input or -1 in given
            self.stored.update(i for i in given if i >= 0 and at[i] != paths)
            self.stored.update(i for i in run if paths in self.carrying and made[i].decision)
        return [i for i in run if made[i].call not in kept], {i for i, _ in saved}

    def inside(self, paths: tuple[str, ...]) -> list[Made]:
        """Returns what the forward of a region makes."""
        return [made for made, at in zip(self._found.made, self._at, strict=True) if at == paths]

    @property
    def stored_bytes(self) -> int:
        """The bytes that are kept."""
        return sum(self._found.made[i].bytes for i in self.stored) + self._found.input_bytes * self.takes_input


def _words(found: SegmentRecord, paths: tuple[str, ...], kept: frozenset[int]) -> tuple[Target, ...]:
    """The words of kept calls as seen from a region."""
    said = kept - frozenset().union(*(found.within[number] for number in kept))
    words = [word for number in sorted(said) for word in found.calls[number]]
    path, *more = paths
    if more:
        kinds = {found.kinds[number] for number in kept}
        return tuple(Target.of(calls=kind) for kind in sorted(kinds - {DOWN} if PRODUCT in kinds else kinds))
    return tuple(Target.of("" if word.module == path else relative(word.module, path), word.calls) for word in words)


def _goes_nowhere(found: SegmentRecord, call: int, passed: Sequence[int]) -> bool:
    """Whether nothing in a replay reads the values of a call, or of what is computed from them."""
    shape_only = {i for i in passed if found.made[i].call == call}
    for i in passed:
        if found.made[i].inputs & shape_only:
            if not all(goes_through(op.func) for op in found.made[i].ops):
                return False
            shape_only.add(i)
    return True


def _unused(found: SegmentRecord, paths: tuple[str, ...], call: int) -> tuple[Target, ...]:
    """The words for a call of products whose values are unused, as seen from a region.

    None where words cannot tell it apart.
    """
    modules = [word.module for word in found.calls[call]]
    others = [word.module for n, words in enumerate(found.calls) if n != call for word in words]
    if found.kinds[call] not in ALL_PRODUCTS or any(inside(other, module) for other in others for module in modules):
        return ()
    around = [next((part for part in paths if inside(m, part) and m != part), None) for m in modules]
    if None in around:
        return ()
    return tuple(Target.of(relative(m, part or ""), VALUES_UNUSED) for m, part in zip(modules, around, strict=True))


def _nearest(found: Sequence[Guess], size: Callable[[Guess], int]) -> list[Guess]:
    """Sorts guesses by how many seconds each is above the lower convex hull of seconds over bytes."""
    hull: list[Guess] = []

    def slope(one: Guess, other: Guess) -> float:
        return (other.seconds - one.seconds) / (size(other) - size(one))

    for point in sorted(found, key=lambda guess: (size(guess), guess.seconds)):
        if hull and point.seconds >= hull[-1].seconds:
            continue
        while len(hull) > 1 and slope(hull[-2], hull[-1]) >= slope(hull[-2], point):
            hull.pop()
        hull.append(point)

    def above(guess: Guess) -> float:
        for one, other in itertools.pairwise(hull):
            if size(guess) <= size(other):
                return guess.seconds - one.seconds - (size(guess) - size(one)) * slope(one, other)
        return guess.seconds - hull[-1].seconds

    return sorted(found, key=above)
