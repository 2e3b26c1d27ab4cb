"""What one rank of a pipeline holds while its schedule runs, and the choices that fit it into a budget.

Problem. A rank holds several microbatches at once, of each of its chunks another number, and the plan for it is one
choice per layer that all of them share.

Idea. One microbatch is simulated through all chunks of the rank in a row (`Planner`). What a chunk keeps of it, and
what its forward and its backward take besides, do not depend on the others, so at each action of the schedule live

    what the chunk that runs takes, and what is kept of its own microbatch so far
    for each chunk as often as it has a microbatch in flight: what it keeps of one

The counts are those of `plan/inflight.py`, from the order of the schedule itself. For the choices a byte gets a price:
each layer takes the option for which its seconds, and the price of what it keeps as often as it is in flight, are the
least. The price is raised until the rank fits; then layers take back, one after the other, what still fits. A layer's
transient is capped in the same search, since replaying much at once keeps little and takes much.

The choice is simulated, and the peak that is said is counted from that simulation. What a choice by prices can miss is
what a single layer makes of the budget; layers recomputed together are not considered. How much that is at the most
the bound says: at the moment at which an action's microbatch is whole, all that is kept must fit, whoever chooses it.

Prices keep all moments of the schedule at once. `planning/stages.py`, where stages are a user's own and few, asks the
solvers of `plan/` at one moment after the other instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..plan.bound import bound
from ..plan.cost import Costs, Kind, Option, Segment
from ..plan.inflight import FORWARD, Action, moments
from ..plan.microbatches import graph_held
from ..simulation import Simulation

STEPS = 40


@dataclass(frozen=True)
class Instant:
    """An action of a rank, by its chunks.

    Attributes:
        chunk: The one that runs.
        forward: Whether it runs forward.
        held: How many microbatches each chunk holds, besides the one that runs.
    """

    chunk: int
    forward: bool
    held: tuple[int, ...]


def instants(actions: Sequence[Action], ranks: int) -> tuple[Instant, ...]:
    """The actions of a rank that hold the most: of those with one chunk and direction, none holds less everywhere.

    Args:
        actions: What the rank does, in order; the number of a stage is its chunk times the ranks, plus the rank.
        ranks: Of the pipeline.
    """
    found: set[Instant] = set()
    for moment in moments(actions):
        held = tuple(moment.whole(stage) for stage in sorted(moment.forwards))
        found.add(Instant(moment.action.stage // ranks, moment.action.kind == FORWARD, held))

    def covered(one: Instant) -> bool:
        return any(
            other != one
            and (other.chunk, other.forward) == (one.chunk, one.forward)
            and all(a <= b for a, b in zip(one.held, other.held, strict=True))
            for other in found
        )

    return tuple(sorted((one for one in found if not covered(one)), key=lambda one: (one.chunk, one.held)))


@dataclass(frozen=True)
class Taken:
    """What a rank's chunks take.

    Attributes:
        kept: What each keeps of a microbatch, from its forward to its backward.
        forward: The most that lives while each runs forward, without what others are holding.
        backward: The same while it runs backward.
        besides: The most that lives when no microbatch is in flight: in the optimizer's step.
    """

    kept: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    besides: int

    def at(self, instant: Instant) -> int:
        """The bytes alive in an action."""
        own = self.forward if instant.forward else self.backward
        return own[instant.chunk] + sum(n * kept for n, kept in zip(instant.held, self.kept, strict=True))

    def peak(self, found: Sequence[Instant]) -> tuple[int, Instant | None]:
        """The most bytes alive, and in which action; None for the optimizer's step."""
        most = max(found, key=self.at)
        return (self.at(most), most) if self.at(most) >= self.besides else (self.besides, None)


def taken(
    simulation: Simulation,
    paths: Sequence[str],
    options: Sequence[Option],
    sizes: Sequence[int],
    received: Sequence[int],
) -> Taken:
    """What a rank's chunks take, from its simulated microbatch.

    Args:
        simulation: One microbatch through all chunks.
        paths: The layers.
        options: What was chosen for each.
        sizes: How many layers each chunk has.
        received: Bytes of the gradient that each chunk is sent, which whoever calls its backward holds until it ends.
    """
    starts = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
    kept = tuple(sum(option.saved_bytes for option in options[a:b]) for a, b in itertools.pairwise(starts))
    chunk_of = {path: number for number, size in enumerate(sizes) for path in paths[starts[number] :][:size]}
    highest = {"forward": [0] * len(sizes), "backward": [0] * len(sizes)}
    besides, now = 0, 0
    for moment in simulation.timeline:
        live = moment.live_bytes - simulation.loop.batch_bytes  # what is received is in what a chunk keeps
        if moment.phase == "optimizer":
            besides = max(besides, live)
            continue
        phase = "forward" if moment.phase in ("forward", "loss") else "backward"
        if phase == "backward" and not any(highest["backward"]):
            now = len(sizes) - 1
        now = _chunk(moment.module, chunk_of, now)
        highest[phase][now] = max(highest[phase][now], live - sum(kept[:now]))
    backward = tuple(most + sent for most, sent in zip(highest["backward"], received, strict=True))
    return Taken(kept, tuple(highest["forward"]), backward, besides)


def _chunk(module: str, chunk_of: dict[str, int], now: int) -> int:
    """The chunk of the layer that a module is or lies in; else the one that ran last."""
    path = module
    while path and path not in chunk_of:
        path = path.rpartition(".")[0]
    return chunk_of.get(path, now)


def estimated(costs: Costs, options: Sequence[Option], sizes: Sequence[int]) -> Taken:
    """The same from costs, for options that have not been simulated."""
    kept: list[int] = []
    forward: list[int] = []
    backward: list[int] = []
    start = 0
    for size in sizes:
        saved, ahead, back = 0, 0, 0
        for segment, option in zip(costs.segments[start : start + size], options[start:], strict=False):
            ahead = max(ahead, saved + segment.forward_bytes + option.forward_bytes)
            back = max(back, saved + segment.backward_bytes + option.backward_bytes)
            saved += option.saved_bytes
        start += size
        kept.append(saved)
        forward.append(ahead)
        backward.append(back)
    forward[-1] = max(forward[-1], kept[-1] + costs.turn_bytes)
    return Taken(tuple(kept), tuple(forward), tuple(backward), 0)


def chosen(
    costs: Costs, sizes: Sequence[int], found: Sequence[Instant], budget: int
) -> tuple[tuple[Option, ...], bool]:
    """The options that fit into a budget for the fewest seconds, and whether they do; else those that need the least.

    Args:
        costs: Of one microbatch.
        sizes: How many layers each chunk has.
        found: The actions that hold the most.
        budget: In bytes.
    """
    chunk_of = [number for number, size in enumerate(sizes) for _ in range(size)]
    often = [max(one.held[chunk] for one in found) + 1 for chunk in chunk_of]
    alone = {name: [one for one in kind.options if one.span == 1] for name, kind in costs.kinds.items()}
    ways = [alone[segment.kind] for segment in costs.segments]

    def peak(options: Sequence[Option]) -> int:
        return estimated(costs, options, sizes).peak(found)[0]

    def seconds(options: Sequence[Option]) -> float:
        return sum(option.seconds for option in options)

    def at(price: float, cap: int) -> tuple[Option, ...]:
        return tuple(
            min(
                [way for way in own if _transient(way) <= cap] or [min(own, key=_transient)],
                key=lambda way: (way.seconds + price * times * way.saved_bytes, way.saved_bytes),
            )
            for own, times in zip(ways, often, strict=True)
        )

    plain = tuple(own[0] for own in ways)
    if peak(plain) <= budget:
        return plain, True
    best: tuple[Option, ...] | None = None
    least = plain
    for cap in sorted({_transient(way) for own in {id(own): own for own in ways}.values() for way in own}):
        low, high = 0.0, 1.0
        most = at(high, cap)
        least = min(least, most, key=peak)
        if peak(most) > budget:
            continue
        for _ in range(STEPS):  # prices differ by orders of magnitude, so they are halved until one is too low
            low = high / 4
            if peak(at(low, cap)) > budget:
                break
            high = low
        for _ in range(STEPS):
            middle = (low + high) / 2
            low, high = (low, middle) if peak(at(middle, cap)) <= budget else (middle, high)
        options = _filled(at(high, cap), ways, lambda options: peak(options) <= budget)
        if best is None or seconds(options) < seconds(best):
            best = options
    return (best, True) if best is not None else (least, False)


def _transient(option: Option) -> int:
    return option.backward_bytes - option.saved_bytes


def _filled(
    options: tuple[Option, ...], ways: Sequence[Sequence[Option]], fits: Callable[[Sequence[Option]], bool]
) -> tuple[Option, ...]:
    """Takes for one layer after the other the cheapest choice that still fits; the last layers first."""
    found = list(options)
    for place in reversed(range(len(found))):
        before = found[place]
        for way in sorted(ways[place], key=lambda way: way.seconds):
            found[place] = way
            if way.seconds >= before.seconds or fits(found):
                break
        if found[place].seconds >= before.seconds:
            found[place] = before
    return tuple(found)


def seconds_at_least(costs: Costs, sizes: Sequence[int], found: Sequence[Instant], budget: int, always: int) -> float:
    """Seconds that every schedule of keeping and recomputing adds to a microbatch within a budget.

    Args:
        costs: Of one microbatch.
        sizes: How many layers each chunk has.
        found: The actions that hold the most.
        budget: In bytes.
        always: Bytes that live at any time, such as parameters.
    """
    return max(bound(_kept_at(costs, sizes, instant, always), budget) for instant in found)


def _kept_at(costs: Costs, sizes: Sequence[int], instant: Instant, always: int) -> Costs:
    """What an action holds when its microbatch is whole, as the costs of one step: results as often as they lie there.

    What one chunk hands on is another rank's to take, so between chunks there is nothing to be had or to be kept.
    """
    kinds = {"": Kind((Option((), 0, 0, 0, 0.0),))}
    segments: list[Segment] = []
    rest = iter(costs.segments)
    for chunk, size in enumerate(sizes):
        times = instant.held[chunk] + (chunk == instant.chunk)
        for segment in itertools.islice(rest, size):
            kind = costs.kinds[segment.kind]
            name = f"{segment.kind} of chunk {chunk}"
            kinds[name] = Kind(kind.options, kind.graph and graph_held(kind.graph, times))
            segments.append(Segment(segment.path, name, 0, 0))
        segments.append(Segment("", "", 0, 0))
    return Costs(kinds, tuple(segments), (), costs.step_seconds, always)
