"""What costs must be so that solvers can trust them, in words.

Costs come from a profile, from a file or from a person; a wrong sign or a point behind the last segment would give a
plan that looks right. So each rule is looked at before anything is solved, and the first that is broken is named.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from .. import errors
from .cost import Costs, Graph, Option


def check(costs: Costs) -> None:
    """Raises ArgumentError with the first rule that is broken."""
    for complaint in _complaints(costs):
        raise errors.ArgumentError(
            f"these costs cannot be: {complaint}.\n  Costs are made by profiling a model; by hand, see plan/cost.py."
        )


def _complaints(costs: Costs) -> Iterator[str]:
    if not costs.segments:
        yield "they have no segment, so there is nothing to choose"
    for name, kind in costs.kinds.items():
        if all(option.span != 1 for option in kind.options):
            yield f"kind {name!r} has no option that takes a single segment, so it may not fill a run"
        for option in kind.options:
            yield from (f"an option of kind {name!r} {wrong}: {option}" for wrong in _of_option(option))
        if kind.graph is not None:
            yield from (f"the graph of kind {name!r} {wrong}" for wrong in _of_graph(kind.graph))
    for segment in costs.segments:
        if segment.kind not in costs.kinds:
            known = ", ".join(sorted(costs.kinds))
            yield f"segment {segment.path!r} is of kind {segment.kind!r}, but there are {known or 'no kinds'}"
        if not (_is_bytes(segment.forward_bytes) and _is_bytes(segment.backward_bytes)):
            yield f"the bytes of segment {segment.path!r} are not whole and at least 0: {segment}"
    for point in costs.points:
        if not 0 <= point.after <= len(costs.segments):
            yield f"a point comes after {point.after} of {len(costs.segments)} segments: {point}"
        if not _is_bytes(point.bytes):
            yield f"the bytes of a point are not whole and at least 0: {point}"
    if not _is_bytes(costs.turn_bytes):
        yield f"turn_bytes are not whole and at least 0: {costs.turn_bytes!r}"
    host = costs.host
    if host is not None and not (host.to_host > 0 and (host.bytes is None or _is_bytes(host.bytes))):
        yield f"host memory has no whole number of bytes or no speed above 0: {host}"


def _of_option(option: Option) -> Iterator[str]:
    if not all(map(_is_bytes, (option.saved_bytes, option.forward_bytes, option.backward_bytes, option.flops))):
        yield "has bytes or FLOPs that are not whole and at least 0"
    elif option.saved_bytes > min(option.forward_bytes, option.backward_bytes):
        yield "saves more than lives in its forward or its backward, which contain what it saves"
    if not 0 <= option.seconds < math.inf:
        yield "has seconds that are negative or no number"
    if not _is_bytes(option.host_bytes):
        yield "has bytes in host memory that are not whole and at least 0"
    if option.span < 1:
        yield "takes no segment"
    elif option.span > 1 and any(path for path, _ in option.regions):
        yield "takes several segments, but has a region around a part of one"


def _of_graph(graph: Graph) -> Iterator[str]:
    if not 0 <= graph.output < len(graph.nodes):
        yield f"has no operation {graph.output}, which is said to make its output"
    if not _is_bytes(graph.backward_bytes):
        yield f"has backward_bytes that are not whole and at least 0: {graph.backward_bytes!r}"
    for index, node in enumerate(graph.nodes):
        if not all(-1 <= read < index for read in node.inputs):
            yield f"has an operation {index} that reads one that does not come before it: {node.inputs}"
        if not _is_bytes(node.bytes) or not node.seconds >= 0:
            yield f"has an operation {index} with bytes or seconds that are negative or no number: {node}"


def _is_bytes(value: object) -> bool:
    return isinstance(value, int) and value >= 0
