"""A profile: what the step of one model costs on one device, as plain data that can be saved, read and compared.

It holds everything that `solve` needs and nothing of the model but paths, so a profile that was taken on one machine is
solved on another, for any number of budgets.

Beside each other (`diff`) segments are matched as a person would: those of one pattern of paths (`layers.*`), in their
order. Merging is for several profiles of one step, of a noisy machine or of the ranks of a group that are all to get
one plan: every constraint of `cost.py` is a sum of bytes, so with the largest of each figure a plan that fits the
merged profile fits each of those it was made from; the bound counts the fewest bytes, since it must hold for each.
Rejected: merging the stages of a pipeline. Each is in its own memory, so no plan could be made from the sum.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, TypeVar

from .. import errors
from .._text import table
from ..memory.loop import Loop
from .choice import Choice
from .cost import Costs, Graph, Host, Kind, Node, Option, Point, Segment, highest_points

VERSION = 1
MIB = 2**20
_FIGURES = ("keeps MiB", "least MiB", "backward MiB", "least costs ms", "ways")


T = TypeVar("T")


def read(text: str, version: int, build: Callable[[dict[str, Any]], T], refuse: Callable[[str], str]) -> T:
    """What a text says.

    Args:
        text: JSON, an object with its version.
        version: What can be read.
        build: Makes it from the object, without the version.
        refuse: The text of the error, from why.

    Raises:
        ArgumentError: The text is no JSON, of another version, or holds something else.
    """
    try:
        data: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise errors.ArgumentError(refuse(f"no JSON: {error}")) from None
    if not isinstance(data, dict) or data.pop("version", None) != version:  # pyright: ignore[reportUnknownMemberType]
        raise errors.ArgumentError(refuse(f"this version of the library reads version {version}"))
    try:
        return build(data)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise errors.ArgumentError(refuse(f"a field is missing or unknown: {error}")) from None


def _bad_profile(why: str) -> str:
    """Text for a profile that cannot be."""
    return (
        f"this is not a profile: {why}.\n"
        "  A profile is made by torch_recompute.profile(model, args), or read by Profile.from_json(text) from what "
        "profile.to_json() wrote."
    )


@dataclass(frozen=True)
class Profile:
    """What a step costs.

    Attributes:
        model: The name of the model's class.
        device: What the seconds are of.
        costs: The segments, their options, and what else lives.
        plain_peak_bytes: The peak of the step without recomputation.
        modules: What the segments are, in words, by path.
        carries: The paths of segments whose regions carry decisions (routing).
        left_out: Modules that are not planned, and why.
        advice: What else would lower `plain_peak_bytes`, in words; "" for nothing.
        timing: Where the seconds are from, in words.
        loop: The training loop that the bytes are of; None where the profile does not say.
    """

    model: str
    device: str
    costs: Costs
    plain_peak_bytes: int
    modules: tuple[tuple[str, str], ...] = ()
    carries: tuple[str, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    advice: str = ""
    timing: str = ""
    loop: Loop | None = None

    def to_json(self) -> str:
        """The profile as JSON text; `from_json` reads it."""
        data = dataclasses.asdict(self)
        for name, kind in self.costs.kinds.items():
            data["costs"]["kinds"][name]["options"] = [_option_data(option) for option in kind.options]
        return json.dumps({"version": VERSION, **data}, indent=1)

    @staticmethod
    def from_json(text: str) -> Profile:
        """A profile from what `to_json` wrote.

        Raises:
            ArgumentError: The text is no JSON, of another version, or holds something else.
        """
        return read(text, VERSION, _profile, _bad_profile)

    def diff(self, other: Profile) -> str:
        """What turns this profile into the other: a line for each kind of segment that differs; empty where none does.

        Bytes and seconds are shown to the places that a person reads; what differs by less is not shown.
        """
        return _diff(self, other)

    def merge(self, *others: Profile) -> Profile:
        """One profile for several of the same step: repeated measurements, or those of several ranks.

            plan = solve(first.merge(second, third), budget="24GiB")

        Seconds are medians, bytes the largest of each figure: what fits the merged profile fits every one of them. Ways
        to treat a segment that not all profiles have are left out.

        Args:
            others: Profiles of the same model and shape of batch.

        Raises:
            ArgumentError: They are of different steps; it names the first difference.
        """
        return _merged([self, *others])


def _profile(data: dict[str, Any]) -> Profile:
    costs, loop = _costs(**data.pop("costs")), data.pop("loop", None)
    pairs = {name: tuple((a, b) for a, b in data.pop(name)) for name in ("modules", "left_out")}
    read_loop = None if loop is None else Loop(**loop)
    return Profile(costs=costs, loop=read_loop, carries=tuple(data.pop("carries")), **pairs, **data)


def _costs(kinds: Any, segments: Any, points: Any, host: Any = None, **rest: Any) -> Costs:
    return Costs(
        {name: _kind(**kind) for name, kind in kinds.items()},
        tuple(Segment(**segment) for segment in segments),
        tuple(Point(**point) for point in points),
        host=None if host is None else Host(**host),
        **rest,
    )


def _kind(options: Any, graph: Any) -> Kind:
    return Kind(tuple(_option(**option) for option in options), None if graph is None else _graph(**graph))


def _option(regions: Any, store: str = "", nested: bool = False, **rest: Any) -> Option:
    choices = (Choice(path.split(" "), keep, store=store, nested=nested) for path, keep in regions)
    return Option(tuple(choices), **rest)


def _option_data(option: Option) -> dict[str, Any]:
    """What `_option` reads: each region as its paths in one string, and what it keeps."""
    data = {field.name: getattr(option, field.name) for field in dataclasses.fields(option)}
    regions = [(" ".join(choice.paths), choice.keep) for choice in option.regions]
    host_bytes = data.pop("host_bytes")
    return {**data, "regions": regions, "store": option.store, "nested": option.nested, "host_bytes": host_bytes}


def _graph(nodes: Any, **rest: Any) -> Graph:
    return Graph(tuple(_node(**node) for node in nodes), **rest)


def _node(inputs: Any, **rest: Any) -> Node:
    return Node(inputs=tuple(inputs), **rest)


def _diff(one: Profile, other: Profile) -> str:
    """What turns one profile into another, as a table; empty where nothing differs."""
    head = [
        f"{name}: {_pair(a, b)}"
        for name, a, b in (
            ("model", one.model, other.model),
            ("device", one.device, other.device),
            ("peak without recomputation, MiB", _mib(one.plain_peak_bytes), _mib(other.plain_peak_bytes)),
            ("step without recomputation, ms", _ms(one.costs.step_seconds), _ms(other.costs.step_seconds)),
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


def _merged(profiles: Sequence[Profile]) -> Profile:
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
    hosts = [one.host for one in costs if one.host is not None]
    limits = [host.bytes for host in hosts if host.bytes is not None]
    merged = Costs(
        {name: _merged_kind([one.kinds[name] for one in costs]) for name in first.costs.kinds},
        segments,
        highest_points([point for one in costs for point in one.points]),
        median(one.step_seconds for one in costs),
        max(one.turn_bytes for one in costs),
        Host(min(limits, default=None), median(host.to_host for host in hosts)) if hosts else None,
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


def _merged_kind(kinds: Sequence[Kind]) -> Kind:
    ways = [{(o.regions, o.span): o for o in kind.options} for kind in kinds]
    shared = [key for key in ways[0] if all(key in way for way in ways)]
    return Kind(
        tuple(_merged_option([way[key] for way in ways]) for key in shared),
        _merged_graph([kind.graph for kind in kinds]),
    )


def _merged_option(options: Sequence[Option]) -> Option:
    def most(figure: Callable[[Option], int]) -> int:
        return max(map(figure, options))

    return replace(
        options[0],
        saved_bytes=most(lambda option: option.saved_bytes),
        forward_bytes=most(lambda option: option.forward_bytes),
        backward_bytes=most(lambda option: option.backward_bytes),
        seconds=median(option.seconds for option in options),
        flops=most(lambda option: option.flops),
        host_bytes=most(lambda option: option.host_bytes),
    )


def _merged_graph(graphs: Sequence[Graph | None]) -> Graph | None:
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
