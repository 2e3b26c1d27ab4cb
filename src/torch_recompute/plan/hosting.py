"""Choices that respect a limit on host memory.

Problem. Bytes on the device are what the solvers count; bytes in host memory are a second limit, and two limits at once
make an exact search many times as large.

Idea. What the first layers keep weighs at every later moment of the step, and has the longest way to come back. So host
memory goes to the first layers, as many as it has room for if each takes up to so many bytes. Each size that an option
takes there gives one such restriction, in which no choice can break the limit; each is solved, and the best is taken.
The restrictions depend on the costs alone, so a larger budget still never costs more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .cost import Costs, Kind, Segment


def restrictions(costs: Costs) -> Iterator[Costs]:
    """Costs in which no choice takes more host memory than there is; the costs themselves if none can."""
    sizes = sorted({option.host_bytes for kind in costs.kinds.values() for option in kind.options} - {0})
    if costs.host is None or costs.host.bytes is None or not sizes:
        yield costs
        return
    seen: set[tuple[str, ...]] = set()
    for size in sizes:
        restricted = _restricted(costs, size, costs.host.bytes)
        names = tuple(segment.kind for segment in restricted.segments)
        if names not in seen:
            seen.add(names)
            yield restricted


def _restricted(costs: Costs, size: int, room: int) -> Costs:
    """The first segments may take up to so many bytes each, as long as there is room."""
    kinds: dict[str, Kind] = {}
    segments: list[Segment] = []
    for segment in costs.segments:
        kind = costs.kinds[segment.kind]
        least = max((option.host_bytes for option in kind.options if option.host_bytes <= size), default=0)
        allowed = least if least <= room else 0
        room = room - least if allowed else 0
        name = f"{segment.kind} with {allowed} bytes in host memory" if least else segment.kind
        options = tuple(option for option in kind.options if option.host_bytes <= allowed)
        kinds.setdefault(name, replace(kind, options=options))
        segments.append(replace(segment, kind=name))
    return replace(costs, kinds=kinds, segments=tuple(segments))
