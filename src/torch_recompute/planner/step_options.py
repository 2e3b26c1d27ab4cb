"""The options of all kinds of segments of a step: by records, in host memory, in tiles, and several in one region.

A kind of segment is recorded once (`options.py`). What host memory and tiles add has no rule in a record, so the most
promising options are tried with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from .. import errors
from ..errors.text import doing
from ..memory.loop import Loop
from ..plan.choice import Choice
from ..plan.roles import inside, relative
from ..stores import Bandwidth
from .alone import SegmentCall
from .candidates import offloads
from .cost import Graph, Kind, Option, for_all, kinds_for_all
from .hosts import waited
from .ops import work_of
from .options import SegmentOptions, in_host_memory, undominated, worth_a_trial
from .segments import CapturedCall
from .sent import Price
from .tiling import InTiles
from .trials import attempt


class StepOptions:
    """The ways to treat each kind of segment of a step.

    Args:
        captured: The calls of the segments.
        price: Gives the seconds of an operation, and the host that launches it.
        loop: The loop of the step.
        link: How fast host memory is reached; None where none may be used.
        gathers: Whether the weights of segments are gathered one by one, which allows no region around several.

    Attributes:
        refused: Kinds that allow no region, or not all that others do, each with the reason.
    """

    def __init__(
        self, captured: CapturedCall, price: Price, loop: Loop, *, link: Bandwidth | None, gathers: bool
    ) -> None:
        self._captured, self._price, self._loop, self._link, self._gathers = captured, price, loop, link, gathers
        self._host = price.host
        self.refused: dict[str, str] = {}

    def kinds(self) -> dict[str, Kind]:
        """The kinds, with options paid for in each microbatch.

        Raises:
            ArgumentError: No kind allows a region.
        """
        captured, several = self._captured, self._called_several_times()
        segments = {kind: one for kind in dict.fromkeys(captured.kinds) if (one := self.of_kind(kind)) is not None}
        if not segments:
            raise errors.ArgumentError(next(iter(self.refused.values())))
        options = {kind: segment.evaluated() for kind, segment in segments.items()}
        for path in several:  # what is called several times has one choice for all its calls
            _for_all_calls({k: segments[k] for k in segments if segments[k].path == path}, options)
        ways = dict[str, Kind]()
        for kind in dict.fromkeys(captured.kinds):
            segment = segments.get(kind)
            if segment is None:
                ways[kind] = self._without_regions(captured.calls[captured.kinds.index(kind)])
                continue
            graph = segment.priced.graph
            some = undominated(options[kind])
            if self._link is not None:
                some += tuple(self._offloaded(segment, some))
            if not self._gathers:
                some += tuple(segment.grouped())
            kept = options[kind] if segment.path in several else undominated(some)
            ways[kind] = Kind(tuple(kept), _ends_in_result(graph), segment.priced.work)
        return kinds_for_all(ways, self._loop.accumulate)

    def of_kind(self, kind: str) -> SegmentOptions | None:
        """The options of a kind of segment; None where it allows no region, and then the reason is kept."""
        first = self._captured.kinds.index(kind)
        doing(f"recording {self._captured.paths[first]}")
        frees = self._loop.frees_gradients
        try:
            found = SegmentOptions(self._captured, first, self._price, self._host, frees=frees)
        except errors.ArgumentError as error:
            self.refused[kind] = str(error)
            return None
        if found.segment.tape.why_not:
            why = found.segment.tape.why_not
            self.refused[kind] = f"of {found.path} only the most promising choices are looked at: {why}"
        return found

    def _called_several_times(self) -> set[str]:
        """The modules that have one choice for several calls."""
        return {path for path, times in Counter(self._captured.paths).items() if times > 1}

    def _without_regions(self, call: SegmentCall) -> Kind:
        """The one option of a segment that allows no region."""
        with self._captured.running():
            found = attempt(call, [], self._captured.pretend, frees=self._loop.frees_gradients)
        work = work_of(found.ops, self._price)
        return Kind((Option((), found.saved_bytes, found.forward_bytes, found.backward_bytes, 0.0),), work=work)

    def in_tiles(self, without: Mapping[str, Kind], tiling: InTiles) -> dict[str, Kind]:
        """The kinds with options `without` tiles, and with those with an MLP in tiles beside them."""
        ways, several = dict(without), self._called_several_times()
        for kind, own in without.items() if tiling.mlps else ():
            segment = self.of_kind(kind)
            if segment is None:
                continue
            tried = self._with_tiles(segment, own.options, tiling)
            tiled = [for_all(option, self._loop.accumulate) for option in tried]
            graph = own.graph and replace(own.graph, backward_bytes=0)  # an operation in tiles takes less at once
            if tiled:
                options = (*own.options, *tiled)
                kept = options if segment.path in several else undominated(options)
                ways[kind] = Kind(kept, graph, own.work)
        return ways

    def _with_tiles(self, segment: SegmentOptions, options: Sequence[Option], tiling: InTiles) -> Iterator[Option]:
        """The options of one segment with an MLP in tiles: each of the others, with a region of its own for it."""
        path = segment.path
        some = [options[0], *worth_a_trial(options[1:], segment.count)]
        for mlp in (relative(mlp, path) for mlp in tiling.mlps if inside(mlp, path) and mlp != path):
            tile = Choice((mlp,), tiles=tiling.tiles)
            ways = (_around(option, mlp) for option in some)
            for others in dict.fromkeys(way for way in ways if way is not None):
                doing(f"trying tiles for {path}")
                here = segment.tried((*others, tile))
                if here is not None:
                    yield replace(here, seconds=here.seconds + self._waited(segment, here))

    def _waited(self, segment: SegmentOptions, here: Option) -> float:
        """Seconds for which a segment that keeps something in host memory waits for copies."""
        if self._link is None:
            return 0.0
        step = self._host.seconds(segment.priced.work)
        forward = self._host.seconds(segment.priced.forward_work)
        return waited(here.host_bytes, self._link, forward, max(0.0, step - forward) + here.seconds)

    def _offloaded(self, segment: SegmentOptions, options: Sequence[Option]) -> Iterator[Option]:
        """The options of one segment that use host memory: its best ones with their inputs there, and parts of it."""
        best = worth_a_trial((option for option in options[1:] if option.span == 1), segment.count)
        ways = [(option.saved_bytes, in_host_memory(option)) for option in best]
        ways += [(segment.plain.saved_bytes, way) for way in offloads(segment.candidates)]
        for saved_bytes, regions in ways:
            here = segment.tried(regions)
            if here is not None and here.saved_bytes < saved_bytes:
                wait = self._waited(segment, here)
                beside = here.host_bytes if here.offload else 0  # of its neighbour, which leaves or comes meanwhile
                levels = here.forward_bytes + beside, here.backward_bytes + beside
                seconds = here.seconds + wait
                yield replace(here, forward_bytes=levels[0], backward_bytes=levels[1], seconds=seconds)


def _for_all_calls(segments: Mapping[str, SegmentOptions], options: dict[str, list[Option]]) -> None:
    """Gives the calls of one module the same choices: those that are no worse than others for one of them."""
    best = [option.regions for kind in segments for option in undominated(options[kind])]
    every: dict[str, dict[tuple[Choice, ...], Option | None]] = {}
    for kind, segment in segments.items():
        own = {option.regions: option for option in options[kind]}
        every[kind] = {regions: own.get(regions) or segment.of(regions) for regions in dict.fromkeys(best)}
    for kind in segments:
        allowed = (regions for regions in every[kind] if all(found[regions] is not None for found in every.values()))
        options[kind] = [option for regions in allowed if (option := every[kind][regions]) is not None]


def _around(option: Option, mlp: str) -> tuple[Choice, ...] | None:
    """The regions of an option of one segment, without one of an MLP alone; None where others are a part of that."""
    regions = tuple(one for one in option.regions if not any(path and inside(path, mlp) for path in one.paths))
    named = [path for one in regions for path in (*one.paths, *(keep.module for keep in one.kept)) if path]
    apart = not any(inside(mlp, path) or inside(path, mlp) for path in named)
    return regions if apart and option.span == 1 and not option.offload else None


def _ends_in_result(graph: Graph) -> Graph | None:
    """A graph, if it makes the result of its segment; one that returns what it was given, or nothing, has none."""
    return None if graph.output < 0 else graph
