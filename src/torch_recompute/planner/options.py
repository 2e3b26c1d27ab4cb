"""From what a segment takes under some choices to an `Option`, and which options a solver is given.

All choices of a kind of segment are evaluated, so what is left out is what others beat: those that are worse than
another one in everything. Where each figure takes a trial of its own, those are tried that may be the best: the least
for some number of layers, then those near the convex hull of seconds over bytes, since a mixture of two layers on the
hull is as good as any choice above it.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from .. import errors
from ..errors.text import counted, doing
from ..plan.choice import Choice, joined
from ..simulation.devices import Host, Work
from .alone import Figures, SegmentCall
from .candidates import Candidates, Regions, joined_in_turn, of_parts, unread_words, whole, words
from .cost import Option, simplicity
from .evaluate import Evaluated, evaluate, need_values
from .ops import Op, work_of
from .priced_tape import PricedTape
from .record import RecordedSegment, record
from .segments import CapturedCall, group, regions_of_groups, spans
from .solve import decides
from .trials import Tried, attempt

TRIED = 20  # choices of a kind of segment, where the record says nothing of what they take


class SegmentOptions:
    """The options of one kind of segment.

    Args:
        captured: The calls of the segments.
        number: That of the segment among them.
        price: Gives the seconds of an operation.
        host: What launches operations.
        frees: Whether the gradients of parameters are freed as they come.

    Attributes:
        captured: The calls of the segments.
        path: The segment's path in the model.
        call: Its call.
        segment: Its record.
        priced: That, with prices.
        plain: The option without regions.

    Raises:
        ArgumentError: It allows no regions.
    """

    def __init__(
        self, captured: CapturedCall, number: int, price: Callable[[Op], float], host: Host, *, frees: bool
    ) -> None:
        self.captured, self._number, self._price, self._host, self._frees = captured, number, price, host, frees
        self.path, self.call = captured.paths[number], captured.calls[number]
        self.segment = self.recorded(self.call)
        self.priced, self._carrying = self._with_prices(self.segment)
        plain = self.of(())
        assert plain is not None  # without regions nothing is refused
        self.plain = plain
        if self.segment.tape.why_not:
            self.plain = self.tried(()) or self.plain
        self._seen: dict[tuple[tuple[str, ...], frozenset[int]], Choice] = {}

    @property
    def count(self) -> int:
        """The number of segments of the kind."""
        return self.captured.kinds.count(self.captured.kinds[self._number])

    @property
    def candidates(self) -> Candidates:
        """The calls that a region may keep."""
        return self.segment.candidates

    def recorded(self, call: SegmentCall) -> RecordedSegment:
        """Records a call of segments of the kind."""
        with self.captured.running():
            return record(call, self.captured.pretend, frees=self._frees, carry=bool(self.captured.routers))

    def _with_prices(self, segment: RecordedSegment) -> tuple[PricedTape, PricedTape]:
        """Prices both tapes of a record: the plain one, and that with decisions carried, which may be the same."""
        plain = PricedTape(segment.tape, self._price)
        return plain, plain if segment.carrying is segment.tape else PricedTape(segment.carrying, self._price)

    # --- by the record ---

    def evaluated(self) -> list[Option]:
        """The options of all choices, or of the best of them; some are tried where the record says nothing of them."""
        joined = joined_in_turn(of_parts(self.candidates), self._best)
        found = [option for regions in (*whole(self.candidates), *joined) if (option := self._of(regions)) is not None]
        if not self.segment.tape.why_not:
            return [self.plain, *found]
        some = worth_a_trial(found, self.count)
        tried = (self.tried(option.regions) for option in self._one_by_one(some))
        return [self.plain, *(option for option in tried if option is not None)]

    def _one_by_one(self, options: Sequence[Option]) -> Iterator[Option]:
        for number, option in enumerate(options, 1):
            doing(f"trying choices for {self.path}", number, len(options))
            yield option

    def _best(self, regions: Sequence[Regions]) -> list[Regions]:
        """Of some choices those that are the least in seconds for what they save, or for that and what they make."""
        found = [(one, option) for one in regions if (option := self._of(one)) is not None]
        options = [option for _, option in found]

        def front(size: Callable[[Option], int]) -> set[int]:
            kept, least = set[int](), float("inf")
            for i in sorted(range(len(options)), key=lambda i: (size(options[i]), options[i].seconds)):
                if options[i].seconds < least:
                    least = options[i].seconds
                    kept.add(i)
            return kept

        kept = front(lambda option: option.saved_bytes) | front(lambda option: option.backward_bytes)
        return [found[i][0] for i in sorted(kept)]

    def _of(self, regions: Regions) -> Option | None:
        """The option of some regions with the calls that they keep."""
        choices = tuple(self._choice(paths, kept) for paths, kept in regions.items())
        return self.of(choices)

    def of(self, regions: tuple[Choice, ...]) -> Option | None:
        """The option of some regions; None where the engine refuses them."""
        placed = self.placed(regions)
        priced = self._carrying if any(choice.carry for choice in placed) else self.priced
        return self._of_record(regions, evaluate(priced.tape, placed), priced, self.priced)

    def _choice(self, paths: tuple[str, ...], kept: frozenset[int]) -> Choice:
        """A region that keeps some calls; products whose values its replay does not need are not run again."""
        key = paths, kept
        if key not in self._seen:
            choice = Choice(paths, words(self.candidates, paths, kept))
            (placed,) = self.placed((choice,))
            calls = need_values(self.segment.carrying if placed.carry else self.segment.tape, placed)
            some, none = ({self.candidates.numbers[n] for n in calls if calls[n] is needed} for needed in (True, False))
            idle = sorted(none - some - kept)
            said = (word for number in idle for word in unread_words(self.candidates, paths, number))
            self._seen[key] = replace(choice, keep=(*choice.keep, *said))
        return self._seen[key]

    def placed(self, regions: Sequence[Choice], of: Sequence[str] = ()) -> list[Choice]:
        """Regions of the segment, or around several `of` them, in the paths of `alone`."""
        placed: list[Choice] = []
        for region in regions:
            carry = decides(of or [joined(self.path, part) for part in region.paths], self.captured.routers)
            paths = tuple(joined(str(i), part) for i in range(len(of) or 1) for part in region.paths)
            placed.append(replace(region, paths=paths, carry=carry and not region.offload))
        return placed

    def _of_record(
        self, regions: tuple[Choice, ...], found: Evaluated, by: PricedTape, plain: PricedTape, span: int = 1
    ) -> Option | None:
        """The option of choices that have been evaluated by a record, beside the one without decisions carried.

        Seconds and FLOPs are those beyond the plain segment, of which carrying decisions has more, too.
        """
        if found.is_refused:
            return None
        again, flops = by.of(found.replayed)
        again = again.plus(by.work).plus(plain.work, -1)
        flops += by.flops - plain.flops
        return self._option(regions, found, again, flops, span)

    def _option(self, regions: tuple[Choice, ...], figures: Figures, more: Work, flops: int, span: int) -> Option:
        """The option of some figures, and of the work and the FLOPs that it adds to those of its segments."""
        called = sum(1 + span * region.nested for region in regions)
        device, launched = max(0.0, more.device), max(0, more.launched)  # layers may leave themselves out
        work = Work(device, 0, launched, called, figures.calls, figures.watched)
        return Option(
            regions,
            figures.saved_bytes,
            figures.forward_bytes,
            figures.backward_bytes,
            seconds=self._host.added(self.priced.work.times(span), work),
            flops=max(0, flops),
            span=span,
            host_bytes=figures.host_bytes,
            work=work,
        )

    # --- by a trial ---

    def tried(self, regions: tuple[Choice, ...]) -> Option | None:
        """The option of some regions, by a trial with the engine; None where that refuses them.

        It refuses to keep a call whose result the model changes in place, and keeps none within other hooks.
        """
        found = self._attempted(self.call, self.placed(regions))
        return None if found is None else self._of_trial(regions, found)

    def _attempted(self, call: SegmentCall, placed: Sequence[Choice]) -> Tried | None:
        try:
            with warnings.catch_warnings(), self.captured.running():
                warnings.filterwarnings("error", ".* within saved-tensor hooks that it enters itself", RuntimeWarning)
                warnings.filterwarnings("ignore", ".*, so what it decides is not carried", RuntimeWarning)  # said later
                return attempt(call, placed, self.captured.pretend, frees=self._frees)
        except (errors.RecomputeError, RuntimeWarning):
            return None

    def _of_trial(self, regions: tuple[Choice, ...], found: Tried, span: int = 1) -> Option:
        counts = Counter(found.ops)
        for key, count in self.priced.tape.counts.items():
            counts[self.priced.tape.keys[key]] -= span * count
        flops = sum(op.flops * count for op, count in counts.items())
        return self._option(regions, found, work_of(counts, self._price), flops, span)

    # --- of several segments ---

    def grouped(self) -> Iterator[Option]:
        """The options that take several segments of the kind at once.

        From three on, each more adds the same to all figures of a group: records of three and four say those of more.
        """
        start, numbers = spans(self.captured, self.captured.kinds[self._number])
        recorded: dict[int, tuple[PricedTape, PricedTape]] = {}

        def option(region: Choice, span: int) -> Option | None:
            call, paths = group(self.captured, start, span)
            placed = self.placed([region], paths)
            if self.segment.tape.why_not:
                found = self._attempted(call, placed)
                return None if found is None else self._of_trial((region,), found, span)
            if span not in recorded:
                doing(f"recording {counted(span, 'segment')} in one region")
                recorded[span] = self._with_prices(self.recorded(call))
            plain, carrying = recorded[span]
            by = carrying if placed[0].carry else plain
            return self._of_record((region,), evaluate(by.tape, placed), by, plain, span)

        for region in regions_of_groups(self.candidates.kinds) if numbers else ():
            found = [option(region, span) for span in numbers[: 2 if region.nested else 1]]
            if region.nested and numbers[2:]:
                three, four = option(region, 3), option(region, 4)
                found += [self._grown(three, four, span) for span in numbers[2:] if three and four]
            yield from filter(None, found)

    def _grown(self, three: Option, four: Option, span: int) -> Option:
        """The option of a group of more segments than four."""

        def at(one: float, other: float) -> float:
            return one + (span - 3) * (other - one)

        names = "saved_bytes", "forward_bytes", "backward_bytes", "flops"
        figures = {name: int(at(getattr(three, name), getattr(four, name))) for name in names}
        work = three.work.plus(four.work.plus(three.work, -1), span - 3)
        seconds = self._host.added(self.priced.work.times(span), work)
        return replace(three, **figures, seconds=seconds, span=span, work=work)


def in_host_memory(option: Option) -> tuple[Choice, ...]:
    """The regions of an option with their inputs in host memory; tiles are inside of one of them, or stay."""
    return tuple(replace(region, store="" if region.tiles else "host") for region in option.regions)


def undominated(options: Sequence[Option]) -> tuple[Option, ...]:
    """The options of which no other of as many segments is at least as good in everything.

    The first one stays, and a region around all of one segment, which others are compared with.
    """

    def figures(option: Option) -> tuple[float, ...]:
        return option.saved_bytes, option.forward_bytes, option.backward_bytes, option.seconds

    kept = [options[0]]
    rivals: dict[int, list[tuple[float, ...]]] = {options[0].span: [figures(options[0])]}
    for option in sorted(options[1:], key=lambda option: (*figures(option)[::-1], simplicity(option))):
        own = figures(option)
        others = rivals.setdefault(option.span, [])
        beaten = any(a <= own[0] and b <= own[1] and c <= own[2] and d <= own[3] for a, b, c, d in others)
        if option.is_full or not beaten:
            kept.append(option)
            others.append(own)
    return tuple(kept)


def worth_a_trial(options: Iterable[Option], segments: int) -> list[Option]:
    """The options that may be the best, at most `TRIED`: first the least for each number of segments up to one."""

    def rebuilt(option: Option) -> int:
        return option.backward_bytes - option.saved_bytes

    best: list[Option] = []
    for option in sorted(options, key=lambda o: (o.saved_bytes, o.seconds, rebuilt(o), simplicity(o))):
        if not any(other.seconds <= option.seconds and rebuilt(other) <= rebuilt(option) for other in best):
            best.append(option)
    by_saved = _nearest(best, lambda option: option.saved_bytes)
    by_both = _nearest(best, lambda option: option.backward_bytes)
    mixed = itertools.chain.from_iterable(zip(by_saved, by_both, strict=True))
    numbers = range(1, segments + 1)
    least = (min(best, key=lambda option: n * option.saved_bytes + rebuilt(option)) for n in numbers if best)
    return list(dict.fromkeys((*least, *mixed)))[:TRIED]


def _nearest(found: Sequence[Option], size: Callable[[Option], int]) -> list[Option]:
    """Sorts options by how many seconds each is above the lower convex hull of seconds over bytes."""
    hull: list[Option] = []

    def slope(one: Option, other: Option) -> float:
        return (other.seconds - one.seconds) / (size(other) - size(one))

    for point in sorted(found, key=lambda option: (size(option), option.seconds)):
        if hull and point.seconds >= hull[-1].seconds:
            continue
        while len(hull) > 1 and slope(hull[-2], hull[-1]) >= slope(hull[-2], point):
            hull.pop()
        hull.append(point)

    def above(option: Option) -> float:
        for one, other in itertools.pairwise(hull):
            if size(option) <= size(other):
                return option.seconds - one.seconds - (size(option) - size(one)) * slope(one, other)
        return option.seconds - hull[-1].seconds

    return sorted(found, key=above)
