"""Costs of one microbatch as those of several: bytes that lie there more than once, seconds that are paid each time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .cost import Graph, Kind, Option


def held_times(option: Option, times: int, *, active: bool) -> Option:
    """An option of which some more microbatches lie there, besides the one that runs if its stage does."""
    lies = times * option.saved_bytes
    if not active:
        return replace(option, saved_bytes=lies, forward_bytes=lies, backward_bytes=lies)
    return replace(
        option,
        saved_bytes=lies + option.saved_bytes,
        forward_bytes=lies + option.forward_bytes,
        backward_bytes=lies + option.backward_bytes,
    )


def graph_held(graph: Graph, times: int) -> Graph:
    """A graph whose results are held for some microbatches; which of them is in its backward is not known."""
    nodes = tuple(replace(node, bytes=node.bytes * times) for node in graph.nodes)
    return replace(graph, nodes=nodes, input_bytes=graph.input_bytes * times, backward_bytes=0)


def behind_each(options: Sequence[Option], *, counted: bool) -> list[int]:
    """What is saved by the options from each on, if that is counted."""
    sums = [0]
    for option in reversed(options):
        sums.append(sums[-1] + counted * option.saved_bytes // option.span)
    return sums[::-1]


def kinds_for_all(kinds: Mapping[str, Kind], times: int) -> dict[str, Kind]:
    """Kinds whose options are paid for in each of some microbatches."""
    return {
        name: Kind(tuple(for_all(option, times) for option in kind.options), kind.graph and _paid(kind.graph, times))
        for name, kind in kinds.items()
    }


def for_all(option: Option, times: int) -> Option:
    """An option that is paid for in each of some microbatches."""
    return replace(option, seconds=option.seconds * times, flops=option.flops * times)


def _paid(graph: Graph, times: int) -> Graph:
    return replace(graph, nodes=tuple(replace(node, seconds=node.seconds * times) for node in graph.nodes))
