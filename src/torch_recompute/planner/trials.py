"""One way to treat a segment, tried: it runs forward and backward alone, with the real engine, on fake tensors.

Problem. What a region stores, and what lives while it is replayed, follows from rules of the engine about views,
inputs, storages and order. A model of these rules beside the engine would drift away from it.

Idea. Do it, and look. The segment's own modules, on fake tensors, get the plan that is to be priced; one forward and
one backward run under `measure`; the figures of `Option` are read off. No formula of ours stands between the engine
and the planner, and a new kind of choice needs nothing here but its words.

The segment is alone, so what its neighbours hold is missing: `calibrate.py` adds it. Its input is made by a function
that lets go of it, as a layer before would, so that it lives only as long as something needs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .. import _torch
from ..engine.shape_only import refusing
from ..memory.ledger import storages
from ..memory.measurement import SimulatedMeasurement
from ..plan.apply import apply
from ..plan.libraries import CacheSnapshot
from ..plan.plan import Choice, Plan
from ..simulation.fake_mode import FakeMode
from .hosts import HostApart
from .ops import Op, op_of


@dataclass(frozen=True)
class SegmentCall:
    """How the model calls a segment: its modules in a row, and the arguments of each.

    Attributes:
        modules: The modules, fake; one, or several that are called one after the other.
        leaves: The flat arguments of each call; tensors are fake, and a cache is what it held when the call was made.
        specs: Their structure.
        autocast: Autocast as it was; None where nothing is called with a tensor.
    """

    modules: tuple[nn.Module, ...]
    leaves: tuple[tuple[Any, ...], ...]
    specs: tuple[Any, ...]
    autocast: torch.autocast | None = None

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The tensors of the first call that come from the segments before: those with a gradient, else the first."""
        tensors = [leaf for leaf in self.leaves[0] if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
        return [tensor for tensor in tensors if tensor.requires_grad] or tensors[:1]

    def run(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Calls the modules, with these tensors for `inputs`; the result of one is the first argument of the next."""
        fresh = {id(old): new for old, new in zip(self.inputs, inputs, strict=True)}
        result: Any = None
        for number, (module, leaves, spec) in enumerate(zip(self.modules, self.leaves, self.specs, strict=True)):
            given = [leaf.cache() if isinstance(leaf, CacheSnapshot) else fresh.get(id(leaf), leaf) for leaf in leaves]
            if number:
                given[0] = result[0] if isinstance(result, tuple) else result
            args, kwargs = _torch.tree_unflatten(given, spec)
            del given
            with self.autocast or nullcontext():
                result = module(*args, **kwargs)
        return result

    def backward(self, edges: Sequence[Any], given: Sequence[torch.Tensor]) -> None:
        """Runs backward from the results' edges, which a training loop does outside of autocast."""
        with nullcontext() if self.autocast is None else torch.autocast(self.autocast.device, enabled=False):
            torch.autograd.backward(edges, given)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class Tried:
    """What was seen.

    Attributes:
        saved_bytes: See `Option`.
        forward_bytes: See `Option`.
        backward_bytes: See `Option`.
        ops: Everything that ran, forward and backward.
        host_bytes: What lay in host memory between forward and backward.
        at_once_bytes: See `Graph.backward_bytes`.
    """

    saved_bytes: int
    forward_bytes: int
    backward_bytes: int
    ops: Counter[Op]
    host_bytes: int = 0
    at_once_bytes: int = 0

    def extra(self, plain: Tried, price: Callable[[Op], float], times: int = 1) -> tuple[float, int]:
        """Seconds and FLOPs beyond those of so many plain segments."""
        counts = {op: self.ops[op] - times * plain.ops[op] for op in (*self.ops, *plain.ops)}
        seconds = sum(price(op) * count for op, count in counts.items())
        return max(0.0, seconds), sum(op.flops * count for op, count in counts.items())


class _Source(torch.autograd.Function):
    """Makes tensors as a layer before would: nobody but the reader holds them, and their gradients go nowhere."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, call: SegmentCall) -> Any:
        like = call.inputs  # of the call, since an argument would be part of the graph
        return tuple(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in like)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, None


class _Counts:
    """What ran in a trial.

    Attributes:
        ran: How often each operation ran.
        before: Storages that do not count below, by identity; None while nothing is looked at.
        at_once_bytes: The most that one operation read and made, besides what was there before.
    """

    def __init__(self) -> None:
        self.ran: Counter[Op] = Counter()
        self.before: set[int] | None = None
        self.at_once_bytes = 0

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Counts an operation."""
        if self.before is not None:
            met = {id(storage): int(storage.nbytes()) for _, storage in storages((args, kwargs, out))}
            here = sum(nbytes for storage, nbytes in met.items() if storage not in self.before)
            self.at_once_bytes = max(self.at_once_bytes, here)
        op = op_of(func, args, kwargs, out)
        if op is not None:
            self.ran[op] += 1


def attempt(call: SegmentCall, choices: Sequence[Choice], pretend: FakeMode) -> Tried:
    """Runs a segment under some choices.

    Args:
        call: The segment.
        choices: Their paths are relative to the modules: "0" is the first one, "0.mlp" a part of it.
        pretend: The mode of its fake tensors, which is active.

    Raises:
        RecomputeError: The engine refuses the choices, or they say that what is read is unread.
    """
    holder = nn.ModuleList(call.modules)
    parameters = list(holder.parameters())
    gradients = [parameter.grad for parameter in parameters]
    host = HostApart()
    stores = {"host": host} if any(choice.store for choice in choices) else {}
    handle = apply(holder, Plan(tuple(choices)), stores=stores)
    try:
        with refusing():
            return _run(call, holder, pretend, host)
    finally:
        handle.remove()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def _run(call: SegmentCall, holder: nn.Module, pretend: FakeMode, host: HostApart) -> Tried:
    counts = _Counts()
    m = SimulatedMeasurement(None, pretend, counts.see)
    like = call.inputs
    grads = any(tensor.requires_grad for tensor in like)
    with m.track(holder):
        token = torch.empty((), device=like[0].device, requires_grad=grads) if like else None
        level = m.live_bytes
        inputs = list(_Source.apply(token, call)) if token is not None else []  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        start = len(m.timeline)
        result = call.run(inputs)
        before = {
            id(storage) for _, storage in storages([inputs, call.leaves, *holder.parameters(), *holder.buffers()])
        }
        del inputs
        forward = max(sample.live_bytes for sample in m.timeline[start - 1 :])
        outputs = [x for x in _torch.tree_leaves(result) if isinstance(x, torch.Tensor) and x.requires_grad]
        edges = [torch.autograd.graph.get_gradient_edge(x) for x in outputs]
        shapes = [(x.shape, x.dtype, x.device) for x in outputs]
        del result, outputs
        host.settle()
        saved, host_bytes = m.live_bytes, host.host_bytes
        start = len(m.timeline)
        given = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in shapes]
        counts.before = before
        call.backward(edges, given)
        del given
        backward = max((sample.live_bytes for sample in m.timeline[start:]), default=saved)
    return Tried(saved - level, forward - level, backward - level, counts.ran, host_bytes, counts.at_once_bytes)
