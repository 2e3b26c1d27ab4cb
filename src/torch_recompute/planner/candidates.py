"""The ways to treat one segment that a plan chooses among: sets of regions, and in each the calls that are kept.

A segment runs once, on fake tensors (`record.py`), and shows its calls of a kind (`plan/calls.py`). Calls become
candidates, each the words that a plan writes into `Choice.keep` (`self_attn.q_proj@product`); what words cannot tell
apart is one candidate: the calls of one module, the members of a list of experts, the parts of a product with an
adapter.

A choice is a set of regions in the segment (all of it, or some of its parts: the attention, the MLP, each also together
with its norm) and, in each, the calls that are kept. There are mostly some hundreds, and each is evaluated in less than
a millisecond. A layer of many parts has thousands of combinations: there parts are joined one after the other, and of
what has been joined only the choices go on that none of the others beats, so that the number of choices grows with that
of the parts.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..plan.calls import ALL_PRODUCTS
from ..plan.choice import ATTENTION, DOWN, PRODUCT, VALUES_UNUSED, Choice, Target
from ..plan.roles import inside, relative

MOST = 8  # candidates, so that all their subsets can be looked at
MANY = 600  # combinations of parts, from which on they are joined one after the other
CallKey = tuple[str, str]
"""The module and the kind of a call."""
Regions = Mapping[tuple[str, ...], frozenset[int]]
"""For the paths of each region the numbers of the candidates that it keeps."""


@dataclass
class Candidates:
    """The calls of a segment that a region may keep; `calls`, `kinds` and `within` have one entry per candidate."""

    calls: list[tuple[Target, ...]] = field(default_factory=list[tuple[Target, ...]])  # their words
    kinds: list[str] = field(default_factory=list[str])
    within: list[frozenset[int]] = field(default_factory=list[frozenset[int]])
    """Those that its words say, too: the narrowing products among all of a module."""
    numbers: dict[CallKey, int] = field(default_factory=dict[CallKey, int])
    parts: list[str] = field(default_factory=list[str])
    """Modules below the segment that hold several of its calls and that it calls itself."""
    inner: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """For a part those below it: the shared expert of a mixture, and its stack of experts."""
    feeders: dict[str, str] = field(default_factory=dict[str, str])
    """For a part the module, without calls of a kind, whose result it is given: its norm."""


class CallNames:
    """Follows the modules and calls of a segment while it runs, and says by which words its calls can be kept.

    Args:
        module: The segment.
    """

    def __init__(self, module: nn.Module) -> None:
        children = list(module.named_modules())
        self._module = module
        self._called = [path for path, child in children if type(child).forward is not nn.Module.forward]
        self._rows = {path for path, child in children if isinstance(child, nn.Sequential)}
        self._products = {path for path, child in children if hasattr(child, "base_layer")}
        self._left: dict[int, tuple[str, weakref.ref[torch.Tensor]]] = {}
        self._feeders: dict[str, set[str]] = {}
        self._keys: dict[CallKey, None] = {}  # in the order in which they first ran

    def enter(self, path: str, given: Iterable[torch.Tensor]) -> None:
        """Notes which modules made what a module is given."""
        left = [(self._left[id(x)], x) for x in given if id(x) in self._left]
        self._feeders.setdefault(path, set()).update(where for (where, ref), x in left if ref() is x)

    def leave(self, path: str, result: Any) -> None:
        """Notes the result of a module."""
        if isinstance(result, torch.Tensor):
            self._left[id(result)] = path, weakref.ref(result)

    def call(self, path: str, kind: str) -> CallKey:
        """Notes a call of a kind in a module, and returns by what it is known."""
        where = self._scope(path)
        if kind == DOWN and where in self._products:  # a part of a product with an adapter
            kind = PRODUCT
        self._keys[where, kind] = None
        return where, kind

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

    def candidates(self) -> Candidates:
        """The candidates among the calls that have run."""
        found, groups = Candidates(), self._groups()
        # Of a candidate that has products of both kinds, that of all products.
        found.kinds = [next((kind for _, kind in group if kind == PRODUCT), group[0][1]) for group in groups]
        for number, group in enumerate(groups):
            found.numbers.update(dict.fromkeys(group, number))
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
            has_calls = any(inside(where, feeder) for where, _ in self._keys)
            if len(given) == 1 and not has_calls and not inside(feeder, part):
                feeders[part] = feeder
        shared = Counter(feeders.values())
        found.feeders = {part: feeder for part, feeder in feeders.items() if shared[feeder] == 1}
        return found

    def _parts(self, around: str) -> list[str]:
        """The outermost modules below another that are called and are more than one call.

        The calls of a list (`nn.Sequential`) go by its own name, so a module of that name may be more than one, too.
        """
        bare = {where for where, _ in self._keys}
        called = [path for path in self._called if path != around and inside(path, around)]
        below = [path for path in called if any(inside(where, path) for where in bare)]
        outermost = [path for path in below if not any(inside(path, other) and path != other for other in below)]
        return [
            path
            for path in outermost
            if path not in bare
            or sum(inside(where, path) for where, _ in self._keys) > 1
            or (path not in self._products and any(self._module.get_submodule(path).children()))
        ]

    def _word(self, where: str, kind: str) -> Target:
        """The word for the calls of a kind in a module: where all products narrow, that they are products."""
        others = any(other == PRODUCT and inside(path, where) for path, other in self._keys)
        return Target.of(where, PRODUCT if kind == DOWN and not others else kind)

    def _groups(self) -> list[list[CallKey]]:
        """The calls that are one candidate, in the order in which they ran."""
        groups: list[list[CallKey]] = []
        for where, kind in sorted(self._keys, key=lambda key: len(key[0])):
            around = [group for group in groups if group[0][1] == kind and inside(where, group[0][0])]
            if around:
                around[0].append((where, kind))
            else:
                groups.append([(where, kind)])
        order = list(self._keys)
        groups.sort(key=lambda group: min(map(order.index, group)))
        while len(groups) > MOST:  # the two neighbours of one kind that are nearest in the tree
            _, place = min((_distance(a, b), i) for i, (a, b) in enumerate(itertools.pairwise(groups)))
            groups[place : place + 2] = [groups[place] + groups[place + 1]]
        return groups


def _covered(where: str, kind: str, group: Sequence[CallKey]) -> bool:
    """Whether another word of the group says this one too."""
    return any(
        inside(where, around) and ((other == kind and where != around) or (other, kind) == (PRODUCT, DOWN))
        for around, other in group
    )


def _distance(one: Sequence[CallKey], other: Sequence[CallKey]) -> tuple[bool, int]:
    """The distance of two groups: whether their kinds differ, then how little of their paths they share."""
    a, b = one[-1][0].split("."), other[0][0].split(".")
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
    return one[-1][1] != other[0][1], max(len(a), len(b)) - shared


# --- choices ---


def whole(found: Candidates) -> list[Regions]:
    """The choices of one region around the segment: one for each set of calls that words can say."""
    return [{("",): kept} for kept in _kept(found, range(len(found.calls)))]


def of_parts(found: Candidates) -> list[list[Regions]]:
    """For each part of a segment the ways to treat it, of which the first is to recompute nothing."""
    numbers = range(len(found.calls))

    def own(part: str) -> list[int]:
        return [n for n in numbers if all(inside(word.module, part) for word in found.calls[n])]

    ways: list[list[Regions]] = []
    for part in found.parts:
        ways.append([{}, *({(part,): kept} for kept in _kept(found, own(part)))])
        if part in found.feeders:
            together = found.feeders[part], part
            ways[-1] += [{together: kept} for kept in _by_kind(found, own(part))]
        inner = [[{}, *({(below,): kept} for kept in _by_kind(found, own(below)))] for below in found.inner[part]]
        ways[-1] += filter(None, combined(inner))
    return ways


def combined(ways: Sequence[Sequence[Regions]]) -> Iterator[Regions]:
    """All combinations of one way for each of some parts."""
    for chosen in itertools.product(*ways):
        yield {paths: kept for way in chosen for paths, kept in way.items()}


def joined_in_turn(
    ways: Sequence[Sequence[Regions]], best: Callable[[Sequence[Regions]], Sequence[Regions]]
) -> Iterator[Regions]:
    """Combinations of one way for each of some parts: all where there are few, else of the `best` ones of each step.

    Args:
        ways: The ways of each part.
        best: Leaves out choices that others beat.
    """
    done: Sequence[Regions] = [{}]
    for number, more in enumerate(ways, 1):
        done = [{**one, **way} for one in done for way in more]
        rest = ways[number:]
        if len(done) * math.prod(map(len, rest)) > MANY:
            done = best(done)
    yield from filter(None, done)


def _subsets(numbers: Sequence[int]) -> Iterator[frozenset[int]]:
    for size in range(len(numbers) + 1):
        yield from map(frozenset, itertools.combinations(numbers, size))


def _kept(found: Candidates, numbers: Sequence[int]) -> Iterator[frozenset[int]]:
    """All sets of calls that words can say."""
    for chosen in _subsets(numbers):
        if all(found.within[number] <= chosen for number in chosen):
            yield chosen


def _by_kind(found: Candidates, numbers: Sequence[int]) -> Iterator[frozenset[int]]:
    """All sets of kinds of calls, as the calls: what can be kept of several modules."""
    names = sorted({found.kinds[number] for number in numbers})
    for chosen in _subsets(range(len(names))):
        kinds = {names[i] for i in chosen}
        if PRODUCT not in kinds or DOWN in kinds or DOWN not in names:
            yield frozenset(number for number in numbers if found.kinds[number] in kinds)


def words(found: Candidates, paths: tuple[str, ...], kept: frozenset[int]) -> tuple[Target, ...]:
    """The words of kept calls as seen from a region."""
    said = kept - frozenset().union(*(found.within[number] for number in kept))
    words = [word for number in sorted(said) for word in found.calls[number]]
    path, *more = paths
    if more:
        kinds = {found.kinds[number] for number in kept}
        return tuple(Target.of(calls=kind) for kind in sorted(kinds - {DOWN} if PRODUCT in kinds else kinds))
    return tuple(Target.of("" if word.module == path else relative(word.module, path), word.calls) for word in words)


def unread_words(found: Candidates, paths: tuple[str, ...], call: int) -> tuple[Target, ...]:
    """The words for a call of products whose values are unused, as seen from a region; none where words say more."""
    modules = [word.module for word in found.calls[call]]
    others = [word.module for n, words in enumerate(found.calls) if n != call for word in words]
    if found.kinds[call] not in ALL_PRODUCTS or any(inside(other, module) for other in others for module in modules):
        return ()
    around = [next((part for part in paths if inside(m, part) and m != part), None) for m in modules]
    if None in around:
        return ()
    return tuple(Target.of(relative(m, part or ""), VALUES_UNUSED) for m, part in zip(modules, around, strict=True))


def offloads(found: Candidates) -> list[tuple[Choice, ...]]:
    """The ways to save a segment in host memory without recomputing it: all of it, some parts, or its attention."""
    attention = [
        word for kind, words in zip(found.kinds, found.calls, strict=True) if kind == ATTENTION for word in words
    ]
    ways = [[""], *([part] for part in found.parts), *([found.parts] if len(found.parts) > 1 else []), attention]
    return [tuple(Choice((path,), store="host", offload=True) for path in way) for way in ways if way]
