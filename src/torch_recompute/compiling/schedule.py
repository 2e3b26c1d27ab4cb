"""The peak of a compiled forward and backward, counted in the code that inductor writes for them.

A graph says what is computed; inductor decides in which order, which operations share a kernel and a buffer, and when a
buffer is freed. Its code is run here on tensors without data, with the books of a simulated step open, so what is
counted is what the compiled step will allocate. No kernel is compiled: that is most of a compiler's time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .._torch.fakes import FakeTensorMode
from .._torch.inductor import generated, no_modes
from .._torch.partitioning import hint, outputs_of
from ..simulation.fake_mode import FakeMode
from ..simulation.recording import SimulatedMeasurement


def peak_of(forward: fx.GraphModule, backward: fx.GraphModule, outputs: int) -> int:
    """The most bytes alive at any time of a forward and its backward, besides what they are given.

    Args:
        forward: The graph of the forward.
        backward: That of the backward.
        outputs: How many of the forward's outputs its caller sees, and holds until backward has ended.

    Raises:
        Exception: Inductor cannot generate code for this device on this machine, or code of another kind.
    """
    compiled = generated(forward, backward=False), generated(backward, backward=True)
    fakes = FakeTensorMode()
    with no_modes():
        given = {node.name: _like(node, fakes) for node in forward.graph.find_nodes(op="placeholder")}
        device = next(
            (x.device for x in given.values() if isinstance(x, torch.Tensor) and x.device.type != "cpu"), None
        )
        pretend = FakeMode(fakes, str)
        books = SimulatedMeasurement(device or torch.device("cpu"), pretend)
        with pretend, books:
            made = [*compiled[0]([*given.values()])]
            names = [node.name if isinstance(node, fx.Node) else "" for node in outputs_of(forward.graph)]
            given.update(zip(names[outputs:], made[outputs:], strict=True))
            del made[outputs:]
            wanted = backward.graph.find_nodes(op="placeholder")
            there = [given[node.name] if node.name in given else _like(node, fakes) for node in wanted]
            given.clear()
            compiled[1](there)
        return books.peak_bytes


def _like(node: fx.Node, fakes: FakeTensorMode) -> Any:
    """What a graph is given, on tensors without data."""
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return hint(value) if isinstance(value, torch.SymInt) else value
    with fakes:
        size, stride = (tuple(map(hint, counts)) for counts in (value.shape, value.stride()))
        return torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)
