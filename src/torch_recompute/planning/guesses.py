"""Which choices for a segment are worth a trial: guessed from its graph, without running anything.

A choice is a set of regions in the segment (all of it, or some of its parts: the attention, the MLP, each also together
with its norm) and, in each, the calls that are kept. There are hundreds. What each stores and runs again follows from
the graph by three rules: a region stores its inputs and what its kept calls made, as far as something asks for it; what
backward needs of the rest is made again, from that; and a replay runs everything up to the last tensor that is needed,
but for the products of which nothing that is made again reads the values: these are unread.

The guess is close, but it is only used to leave out choices: those that are worse than another in everything, and those
far from the convex hull of seconds over bytes. A mixture of two layers on the hull is as good as any choice above it.
Bytes are meant twice: those stored, which add up over the layers, and with them those that a replay makes, which decide
the peak in a layer's backward. Half of the choices are taken by each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .._hollow import goes_through
from ..plan.calls import ALL_PRODUCTS
from ..plan.choice import DOWN, PRODUCT, UNREAD, Choice, Target
from ..plan.roles import inside, relative
from .ops import Op
from .trace import Trace

Regions = Mapping[tuple[str, ...], frozenset[int]]


@dataclass(frozen=True)
class Guess:
    """What a choice would cost.

    Attributes:
        regions: The regions, with paths below the segment.
        saved: Bytes stored.
        rebuilt: Bytes made by the largest of its replays that backward needs.
        seconds: Of the replays.
    """

    regions: tuple[Choice, ...]
    saved: int
    rebuilt: int
    seconds: float

    @property
    def both(self) -> int:
        """Bytes stored and rebuilt."""
        return self.saved + self.rebuilt


def all_guesses(found: Trace, price: Callable[[Op], float]) -> list[Guess]:
    """What each choice would cost."""
    seconds = [sum(map(price, made.ops)) for made in found.made]
    return [_guess(found, seconds, regions) for regions in _choices(found)]


def guesses(found: Trace, price: Callable[[Op], float], most: int) -> list[Guess]:
    """The choices worth trying, at most so many."""
    every = all_guesses(found, price)
    every.sort(key=lambda g: (g.saved, g.seconds, g.rebuilt, len(g.regions), sum(len(c.keep) for c in g.regions)))
    best: list[Guess] = []
    for guess in every:
        if not any(
            other.saved <= guess.saved and other.seconds <= guess.seconds and other.rebuilt <= guess.rebuilt
            for other in best
        ):
            best.append(guess)
    by_saved = _nearest(best, lambda guess: guess.saved)
    by_both = _nearest(best, lambda guess: guess.both)
    mixed = dict.fromkeys(itertools.chain.from_iterable(zip(by_saved, by_both, strict=True)))
    return list(mixed)[:most]


def _choices(found: Trace) -> Iterator[Regions]:
    """All sets of regions and kept calls: one region around the segment, or any of its parts."""
    numbers = range(len(found.calls))
    yield from ({("",): kept} for kept in _kept(found, numbers))
    if not found.parts:
        return
    ways: list[list[Regions]] = []
    for part in found.parts:
        own = [n for n in numbers if all(inside(word.module, part) for word in found.calls[n])]
        ways.append([{}, *({(part,): kept} for kept in _kept(found, own))])
        if part in found.feeders:
            together = found.feeders[part], part
            ways[-1] += [{together: kept} for kept in _by_kind(found, own)]
    for chosen in itertools.product(*ways):
        regions = {part: kept for way in chosen for part, kept in way.items()}
        if regions:
            yield regions


def _subsets(numbers: Sequence[int]) -> Iterator[frozenset[int]]:
    for size in range(len(numbers) + 1):
        yield from map(frozenset, itertools.combinations(numbers, size))


def _kept(found: Trace, numbers: Sequence[int]) -> Iterator[frozenset[int]]:
    """All sets of calls that words can say."""
    for chosen in _subsets(numbers):
        if all(found.within[number] <= chosen for number in chosen):
            yield chosen


def _by_kind(found: Trace, numbers: Sequence[int]) -> Iterator[frozenset[int]]:
    """All sets of kinds of calls, as the calls: what can be kept of several modules."""
    names = sorted({found.kinds[number] for number in numbers})
    for chosen in _subsets(range(len(names))):
        kinds = {names[i] for i in chosen}
        if PRODUCT not in kinds or DOWN in kinds or DOWN not in names:
            yield frozenset(number for number in numbers if found.kinds[number] in kinds)


def _guess(found: Trace, seconds: Sequence[float], regions: Regions) -> Guess:
    """Follows what backward needs back to what is stored."""
    at = [
        next((paths for paths in regions if any(inside(made.module, path) for path in paths)), None)
        for made in found.made
    ]
    stored: set[int] = set()
    again: set[int] = set()
    asked: set[int] = set()
    open_ = [(i, at[i]) for i, made in enumerate(found.made) if made.needed]
    takes_input = found.input_needed
    while open_:
        i, asked_in = open_.pop()
        if i < 0:
            takes_input = True
            continue
        region = at[i]
        if region == asked_in:
            asked.add(found.made[i].call)
        if i in stored or i in again:
            continue
        if region is None or region != asked_in or found.made[i].call in regions[region]:
            stored.add(i)  # no region makes it again, or it is an input of the one that asks, or it is kept
        else:
            again.add(i)
            open_.extend((read, region) for read in found.made[i].inputs)
    total, rebuilt = 0.0, 0
    choices: list[Choice] = []
    for paths, kept in regions.items():
        here = [i for i in again if at[i] == paths]
        passed = [i for i in range(max(here, default=-1) + 1) if at[i] == paths and found.made[i].call not in kept]
        idle = {found.made[i].call for i in passed} - asked - {-1}
        idle = {call for call in idle if _goes_nowhere(found, call, passed)}
        unread = {call: said for call in sorted(idle) if (said := _unread(found, paths, call))}
        total += sum(seconds[i] for i in passed if found.made[i].call not in unread)
        rebuilt = max(rebuilt, sum(found.made[i].bytes for i in here if found.made[i].needed))
        choices.append(
            Choice(paths, (*_words(found, paths, kept), *(word for said in unread.values() for word in said)))
        )
    saved = sum(found.made[i].bytes for i in stored) + (found.input_bytes if takes_input else 0)
    return Guess(tuple(choices), saved, rebuilt, total)


def _words(found: Trace, paths: tuple[str, ...], kept: frozenset[int]) -> tuple[Target, ...]:
    """The words of kept calls as seen from a region."""
    said = kept - frozenset().union(*(found.within[number] for number in kept))
    words = [word for number in sorted(said) for word in found.calls[number]]
    path, *more = paths
    if more:
        kinds = {found.kinds[number] for number in kept}
        return tuple(Target.of(calls=kind) for kind in sorted(kinds - {DOWN} if PRODUCT in kinds else kinds))
    return tuple(Target.of("" if word.module == path else relative(word.module, path), word.calls) for word in words)


def _goes_nowhere(found: Trace, call: int, passed: Sequence[int]) -> bool:
    """Whether nothing in a replay reads the values of a call, or of what is computed from them."""
    hollow = {i for i in passed if found.made[i].call == call}
    for i in passed:
        if found.made[i].inputs & hollow:
            if not all(goes_through(op.func) for op in found.made[i].ops):
                return False
            hollow.add(i)
    return True


def _unread(found: Trace, paths: tuple[str, ...], call: int) -> tuple[Target, ...]:
    """The words that a call of products is unread, as seen from a region; none where words cannot tell it apart."""
    modules = [word.module for word in found.calls[call]]
    others = [word.module for n, words in enumerate(found.calls) if n != call for word in words]
    if found.kinds[call] not in ALL_PRODUCTS or any(inside(other, module) for other in others for module in modules):
        return ()
    around = [next((part for part in paths if inside(m, part) and m != part), None) for m in modules]
    if None in around:
        return ()
    return tuple(Target.of(relative(m, part or ""), UNREAD) for m, part in zip(modules, around, strict=True))


def _nearest(found: Sequence[Guess], size: Callable[[Guess], int]) -> list[Guess]:
    """By how many seconds each lies above the lower convex hull of seconds over bytes."""
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
