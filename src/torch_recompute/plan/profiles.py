"""Two profiles beside each other: what differs (`diff`), and one that holds for several (`merge`).

Segments are matched as a person would: those of one pattern of paths (`layers.*`), in their order. What a profile says
of a kind of segment is what it keeps with no region, the least that any way to treat it keeps, what lives in its
backward, and what that least costs.

Merging is for several profiles of one step: measurements repeated on a noisy machine, or on the ranks of a group that
are all to get one plan. Seconds are medians. Bytes are the largest of each figure: every constraint of `cost.py` is a
sum of them, so a plan that fits the merged profile fits each of those it was made from. Ways to treat a segment are
those that all profiles have, matched by their regions; profiles whose segments are not the same are refused. The bound
counts the fewest bytes, since it must hold for each.

Rejected: merging the stages of a pipeline into one whole. Each lies in its own memory, so no plan could be made from
the sum.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from .. import errors
from .._text import table
from .cost import Costs, Graph, Kind, Node, Option, Point, Segment

if TYPE_CHECKING:
    from .profile import Profile

MIB = 2**20
_FIGURES = ("keeps MiB", "least MiB", "backward MiB", "least costs ms", "ways")


def diff(one: Profile, other: Profile) -> str:
    """What turns one profile into another, as a table; empty where nothing differs."""
    head = [
        f"{name}: {_pair(a, b)}"
        for name, a, b in (
            ("model", one.model, other.model),
            ("device", one.device, other.device),
            ("peak with no region, MiB", _mib(one.plain_peak_bytes), _mib(other.plain_peak_bytes)),
            ("step with no region, ms", _ms(one.costs.step_seconds), _ms(other.costs.step_seconds)),
            ("most besides the segments, MiB", _besides(one.costs), _besides(other.costs)),
            ("counted", str(one.loop or "-"), str(other.loop or "-")),
            ("not planned", ", ".join(dict(one.left_out)) or "-", ", ".join(dict(other.left_out)) or "-"),
        )
        if a != b
    ]
    mine, theirs = _groups(one.costs), _groups(other.costs)
    rows: list[tuple[str, ...]] = []
    for name in dict.fromkeys([*mine, *theirs]):
        ours, its = mine.get(name), theirs.get(name)
        if ours != its:
            nothing = ("-",) * (1 + len(_FIGURES))
            rows.append((name, *(_pair(a, b) for a, b in zip(ours or nothing, its or nothing, strict=True))))
    if rows:
        rows.insert(0, ("segments", "how many", *_FIGURES))
    return "\n".join([*head, *table(rows, right=0)])


def _groups(costs: Costs) -> dict[str, tuple[str, ...]]:
    """Of the segments of one pattern and kind: how many, and the figures of one."""
    found: dict[tuple[str, str], int] = {}
    for segment in costs.segments:
        key = (re.sub(r"\d+", "*", segment.path), segment.kind)
        found[key] = found.get(key, 0) + 1
    groups: dict[str, tuple[str, ...]] = {}
    for (pattern, kind), count in found.items():
        options = costs.kinds[kind].options
        least = min(options, key=lambda option: (option.saved_bytes / option.span, option.seconds))
        figures = (
            str(count),
            _mib(options[0].saved_bytes),
            _mib(least.saved_bytes // least.span),
            _mib(options[0].backward_bytes),
            _ms(least.seconds / least.span),
            str(len(options)),
        )
        alike = sum(name == pattern or name.startswith(f"{pattern} (") for name in groups)
        groups[f"{pattern} ({alike + 1})" if alike else pattern] = figures
    return groups


def _besides(costs: Costs) -> str:
    ends = [n for segment in costs.segments for n in (segment.forward_bytes, segment.backward_bytes)]
    return _mib(max([costs.turn_bytes, *ends, *(point.bytes for point in costs.points)]))


def _pair(one: str, other: str) -> str:
    return one if one == other else f"{one} -> {other}"


def _mib(count: float) -> str:
    return f"{count / MIB:,.2f}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.3f}"


def merge(profiles: Sequence[Profile]) -> Profile:
    """One profile that holds for several of one step."""
    first = profiles[0]
    for other in profiles[1:]:
        _same("the model", first.model, other.model)
        _same("the number of segments", len(first.costs.segments), len(other.costs.segments))
        for one, its in zip(first.costs.segments, other.costs.segments, strict=True):
            _same("a segment", f"{one.path} of kind {one.kind}", f"{its.path} of kind {its.kind}")
        _same("the training loop", *(loop and loop.unmeasured for loop in (first.loop, other.loop)))
        _same("what carries decisions", first.carries, other.carries)
    costs = [profile.costs for profile in profiles]
    segments = tuple(
        Segment(same[0].path, same[0].kind, max(s.forward_bytes for s in same), max(s.backward_bytes for s in same))
        for same in zip(*(one.segments for one in costs), strict=True)
    )
    points: dict[int, Point] = {}
    for point in (point for one in costs for point in one.points):
        if point.after not in points or points[point.after].bytes < point.bytes:
            points[point.after] = point
    merged = Costs(
        {name: _kind([one.kinds[name] for one in costs]) for name in first.costs.kinds},
        segments,
        tuple(points.values()),
        median(one.step_seconds for one in costs),
        max(one.turn_bytes for one in costs),
    )
    loops = [profile.loop for profile in profiles if profile.loop is not None]
    words = [*dict.fromkeys(profile.timing or profile.device for profile in profiles)]
    return replace(
        first,
        device=" and ".join(dict.fromkeys(profile.device for profile in profiles)),
        costs=merged,
        plain_peak_bytes=max(profile.plain_peak_bytes for profile in profiles),
        loop=max(loops, key=lambda loop: loop.batch_bytes, default=None),
        timing=f"medians of {len(profiles)} profiles ({'; '.join(words)})",
    )


def _same(what: str, one: object, other: object) -> None:
    if one != other:
        raise errors.ArgumentError(
            f"profiles of different steps cannot be merged: {what} is {one} in one and {other} in another.\n"
            "  Merge those of one model and one shape of batch: several measurements, or the ranks of a group. What "
            "two profiles differ in is shown by  print(one.diff(other))."
        )


def _kind(kinds: Sequence[Kind]) -> Kind:
    ways = [{(o.regions, o.span, o.store): o for o in kind.options} for kind in kinds]
    shared = [key for key in ways[0] if all(key in way for way in ways)]
    return Kind(tuple(_option([way[key] for way in ways]) for key in shared), _graph([kind.graph for kind in kinds]))


def _option(options: Sequence[Option]) -> Option:
    def most(figure: Callable[[Option], int]) -> int:
        return max(map(figure, options))

    return replace(
        options[0],
        saved_bytes=most(lambda option: option.saved_bytes),
        forward_bytes=most(lambda option: option.forward_bytes),
        backward_bytes=most(lambda option: option.backward_bytes),
        seconds=median(option.seconds for option in options),
        flops=most(lambda option: option.flops),
    )


def _graph(graphs: Sequence[Graph | None]) -> Graph | None:
    """The graph that all have, with the fewest bytes; None, for which the bound counts nothing, where they differ."""
    known = [graph for graph in graphs if graph is not None]
    first = known[0] if len(known) == len(graphs) else None
    if first is None or any(_shape(graph) != _shape(first) for graph in known):
        return None
    nodes = tuple(
        Node(median(n.seconds for n in same), min(n.bytes for n in same), same[0].inputs, same[0].needed)
        for same in zip(*(graph.nodes for graph in known), strict=True)
    )
    at_once = min(graph.backward_bytes for graph in known)
    return replace(first, nodes=nodes, input_bytes=min(graph.input_bytes for graph in known), backward_bytes=at_once)


def _shape(graph: Graph) -> object:
    """All of a graph but its figures."""
    return graph.output, graph.input_needed, [(node.inputs, node.needed) for node in graph.nodes]
