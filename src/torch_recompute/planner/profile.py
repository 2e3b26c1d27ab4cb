"""A profile: what the step of one model costs on one device, as plain data that can be saved, read and compared.

It holds everything that `solve` needs and nothing of the model but paths, so a profile that was taken on one machine is
solved on another, for any number of budgets. That of `profile` also keeps its planner, which is no part of the data:
with it a plan for another budget is simulated as `make_plan` simulates its own.

`merge` is for several profiles of one step, of a noisy machine or of the ranks of a group that are all to get one plan:
every constraint of `cost.py` is a sum of bytes, so with the largest of each figure a plan that fits the merged profile
fits each of those it was made from; the bound counts the fewest bytes, since it must hold for each.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, ClassVar, TypeVar

from .. import errors
from ..errors.text import shown, starred, table
from ..memory.loop import Loop
from ..plan.plan import MIB, VERSION, Plan, Switched, made, read
from .cost import NOTHING, Always, Costs, Graph, HostMemory, Kind, Node, Option, Segment, highest_points


@shown
@dataclass(frozen=True, repr=False)
class Profile:
    """The costs of a step.

    Attributes:
        model: The name of the model's class.
        device: What the seconds are of.
        costs: The segments, their options, and what else lives.
        plain_peak_bytes: The peak of the step without recomputation, with what every plan switches.
        modules: What the segments are, in words, by path.
        carries: The paths of segments whose regions carry decisions (routing).
        left_out: Modules that are not planned, and why.
        advice: What else would lower `plain_peak_bytes`, in words; "" for nothing.
        timing: Where the seconds are from, in words.
        loop: The training loop that the bytes are of; None where the profile does not say.
        assumed: What was not known of the step and has been assumed, in words.
        uncounted: Which operations take something that is not known and could raise the peak by over 0.5 %, in words.
        always: What all plans hold besides, as a head with its loss in tiles.
        switched: What every plan switches in the model, where that alone changes the peak.
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
    assumed: tuple[str, ...] = ()
    uncounted: str = ""
    always: Always = NOTHING
    switched: Switched | None = None
    _planner: ClassVar[Callable[[Any], Plan] | None] = None  # no field, so that copies have none

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != _PLANNER}

    @property
    def own_peak_bytes(self) -> int:
        """The peak of the user's own step, without a plan."""
        return self.plain_peak_bytes + (self.switched.saved_bytes if self.switched else 0)

    @property
    def without_a_plan(self) -> str:
        """The same peak in words, after those of the step without recomputation; "" where that is the same."""
        return f"; without a plan {errors.brief(self.own_peak_bytes)}: {self.switched}" if self.switched else ""

    def __str__(self) -> str:
        step = f"{errors.brief(self.plain_peak_bytes)} at the peak, {_ms(self.costs.step_seconds)} ms per step"
        head = [f"{self.model} on {self.device}, without recomputation: {step}{self.without_a_plan}"]
        if self.loop is not None:
            head.append(f"counted: {self.loop}")
        rows = [("segments", *_FIGURES), *((name, *row) for name, row in _groups(self.costs).items())]
        return "\n".join([*head, *table(rows, right=0), *filter(None, [self.advice])])

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
        return read(text, _profile, _bad_profile)

    def solve(self, *, budget: int | float | str) -> Plan:
        """Makes the plan for another budget, without profiling again; see `torch_recompute.solve`."""
        from .solve import by_costs  # which reads profiles

        return by_costs(self, budget) if self._planner is None else self._planner(budget)

    def diff(self, other: Profile) -> str:
        """Shows what turns this profile into the other: a line for each kind of segment that differs.

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


_PLANNER = "_planner"


def with_planner(profile: Profile, planner: Callable[[Any], Plan]) -> Profile:
    """The profile with what makes the plan for a budget and simulates it, which copies of it do not have."""
    made = replace(profile)
    object.__setattr__(made, _PLANNER, planner)
    return made


def _bad_profile(why: str) -> str:
    return (
        f"this is not a profile: {why}.\n"
        "  A profile is made by torch_recompute.profile(model, args), or read by Profile.from_json(text) from what "
        "profile.to_json() wrote."
    )


def _profile(data: dict[str, Any]) -> Profile:
    for kind in data["costs"]["kinds"].values():
        for option in kind["options"]:
            words = {name: option.pop(name) for name in ("store", "nested", "offload") if name in option}
            tiles = option.pop("tiles", None) or [0] * len(option["regions"])
            regions = zip(option["regions"], tiles, strict=True)
            option["regions"] = [
                {"paths": path.split(" "), "keep": keep, **words, **({"store": "", "tiles": count} if count else {})}
                for (path, keep), count in regions
            ]
    return made(Profile, data)


def _option_data(option: Option) -> dict[str, Any]:
    """The option as JSON holds it: of each region its paths in one string and what it keeps, for all where and how."""
    data = {field.name: getattr(option, field.name) for field in dataclasses.fields(option)}
    regions = [(" ".join(choice.paths), choice.keep) for choice in option.regions]
    said = {"store": option.store, "nested": option.nested, **({"offload": True} if option.offload else {})}
    tiles = [choice.tiles for choice in option.regions]
    said |= {"tiles": tiles} if any(tiles) else {}
    work = dataclasses.asdict(option.work)
    return {**data, "regions": regions, **said, "host_bytes": data["host_bytes"], "work": work}


_FIGURES = ("how many", "keeps MiB", "least MiB", "backward MiB", "least costs ms", "ways")


def _diff(one: Profile, other: Profile) -> str:
    head = [
        f"{name}: {_pair(a, b)}"
        for name, a, b in (
            ("model", one.model, other.model),
            ("device", one.device, other.device),
            ("peak without recomputation, MiB", _mib(one.plain_peak_bytes), _mib(other.plain_peak_bytes)),
            ("step without recomputation, ms", _ms(one.costs.step_seconds), _ms(other.costs.step_seconds)),
            ("most besides the segments, MiB", _besides(one.costs), _besides(other.costs)),
            ("host", *(str(each.costs.host) if each.costs.host.name else "-" for each in (one, other))),
            ("counted", str(one.loop or "-"), str(other.loop or "-")),
            ("not planned", ", ".join(dict(one.left_out)) or "-", ", ".join(dict(other.left_out)) or "-"),
        )
        if a != b
    ]
    mine, theirs, nothing = _groups(one.costs), _groups(other.costs), ("-",) * len(_FIGURES)
    pairs = {name: (mine.get(name, nothing), theirs.get(name, nothing)) for name in (*mine, *theirs)}
    rows = [(name, *map(_pair, ours, its)) for name, (ours, its) in pairs.items() if ours != its]
    return "\n".join([*head, *table([("segments", *_FIGURES), *rows] if rows else [], right=0)])


def _groups(costs: Costs) -> dict[str, tuple[str, ...]]:
    """The figures of one of the segments of each pattern of paths and kind, and how many there are."""
    groups: dict[str, tuple[str, ...]] = {}
    for (pattern, kind), count in Counter((starred(s.path), s.kind) for s in costs.segments).items():
        options = costs.kinds[kind].options
        least = min(options, key=lambda option: (option.saved_bytes / option.span, option.seconds))
        alike = sum(name == pattern or name.startswith(f"{pattern} (") for name in groups)
        groups[f"{pattern} ({alike + 1})" if alike else pattern] = (
            str(count),
            _mib(options[0].saved_bytes),
            _mib(least.saved_bytes // least.span),
            _mib(options[0].backward_bytes),
            _ms(least.seconds / least.span),
            str(len(options)),
        )
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
    first = profiles[0]
    for other in profiles[1:]:
        _same("the model", first.model, other.model)
        _same("the number of segments", len(first.costs.segments), len(other.costs.segments))
        for one, its in zip(first.costs.segments, other.costs.segments, strict=True):
            _same("a segment", f"{one.path} of kind {one.kind}", f"{its.path} of kind {its.kind}")
        _same(
            "the training loop",
            *(loop and replace(loop, batch_bytes=0, output_bytes=0) for loop in (first.loop, other.loop)),
        )
        _same("the host", first.costs.host.name, other.costs.host.name)
        _same("what carries decisions", first.carries, other.carries)
        _same("what is always in tiles", first.always.choices, other.always.choices)
    costs = [profile.costs for profile in profiles]
    hosts = [one.host_memory for one in costs if one.host_memory is not None]
    limits = [host.bytes for host in hosts if host.bytes is not None]
    merged = replace(
        first.costs,
        kinds={name: _merged_kind([one.kinds[name] for one in costs]) for name in first.costs.kinds},
        segments=tuple(_figures(same) for same in zip(*(one.segments for one in costs), strict=True)),
        points=highest_points([point for one in costs for point in one.points]),
        step_seconds=median(one.step_seconds for one in costs),
        turn_bytes=max(one.turn_bytes for one in costs),
        host_memory=HostMemory(min(limits, default=None), median(host.to_host for host in hosts)) if hosts else None,
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


Figured = TypeVar("Figured", Option, Segment, Node, Graph)


def _figures(several: Sequence[Figured], of_bytes: Callable[[Iterable[int]], int] = max) -> Figured:
    """The first of several alike, with the median of seconds and the largest (or another) of bytes and FLOPs."""
    names = [field.name for field in dataclasses.fields(several[0])]
    values = {name: [getattr(one, name) for one in several] for name in names}
    seconds = {name: median(values[name]) for name in names if name == "seconds"}
    counts = {name: of_bytes(values[name]) for name in names if name.endswith("bytes") or name == "flops"}
    return replace(several[0], **seconds, **counts)


def _merged_kind(kinds: Sequence[Kind]) -> Kind:
    ways = [{(o.regions, o.span): o for o in kind.options} for kind in kinds]
    shared = [key for key in ways[0] if all(key in way for way in ways)]
    graphs = [kind.graph for kind in kinds]
    options = tuple(_figures([way[key] for way in ways]) for key in shared)
    return replace(kinds[0], options=options, graph=_merged_graph(graphs))


def _merged_graph(graphs: Sequence[Graph | None]) -> Graph | None:
    """The graph that all have, with the fewest bytes; None, for which the bound counts nothing, where they differ."""
    known = [graph for graph in graphs if graph is not None]
    shapes = [(g.output, g.input_needed, [(node.inputs, node.needed) for node in g.nodes]) for g in known]
    if len(known) < len(graphs) or any(shape != shapes[0] for shape in shapes):
        return None
    nodes = tuple(_figures(same, min) for same in zip(*(graph.nodes for graph in known), strict=True))
    return replace(_figures(known, min), nodes=nodes)
