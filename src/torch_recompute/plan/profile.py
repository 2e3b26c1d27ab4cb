"""A profile: what the step of one model costs on one device, as plain data that can be saved, read and compared.

It holds everything that `solve` needs and nothing of the model but paths, so a profile that was taken on one machine is
solved on another, for any number of budgets.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from .._loop import Loop
from .cost import Costs, Graph, Host, Kind, Node, Option, Point, Segment
from .profiles import diff, merge
from .reading import read

VERSION = 1


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
        plain_peak_bytes: The peak of the step with no region.
        modules: What the segments are, in words, by path.
        carries: The paths of segments whose regions carry decisions (routing).
        left_out: Modules that are not planned, and why.
        advice: What else would lower the peak of the step with no region, in words; "" where nothing is to be said.
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
        return json.dumps({"version": VERSION, **dataclasses.asdict(self)}, indent=1)

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
        return diff(self, other)

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
        return merge([self, *others])


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


def _option(regions: Any, **rest: Any) -> Option:
    return Option(tuple((path, tuple(keep)) for path, keep in regions), **rest)


def _graph(nodes: Any, **rest: Any) -> Graph:
    return Graph(tuple(_node(**node) for node in nodes), **rest)


def _node(inputs: Any, **rest: Any) -> Node:
    return Node(inputs=tuple(inputs), **rest)
