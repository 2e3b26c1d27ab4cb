"""One way to treat a segment, tried: it runs forward and backward alone, with the real engine, on fake tensors.

What a region stores, and what is alive while it is replayed, follows from the engine's rules about views, inputs,
storages and order. A model of these rules would drift away from the engine, so the segment's own modules get the plan
that is to be priced, run forward and backward once under `measure`, and the figures of `Option` are read off.

The segment is alone: what its neighbours hold is added by `planner.calibrate`. Its input is made by a function that
drops it, as a layer before would, so it lives only as long as something needs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import nn

from ..engine.shape_only import refusing
from ..memory.batch import tensors_of_call
from ..memory.ledger import storages
from ..memory.operations import Operation
from ..memory.saved import generators_as_before
from ..plan.apply import apply
from ..plan.libraries import CacheSnapshot
from ..plan.plan import Choice, Plan
from ..simulation.copies import reached_as_before
from ..simulation.devices import Host, Work
from ..simulation.fake_mode import FakeMode
from ..simulation.made_up import floats
from ..simulation.recording import SimulatedMeasurement
from ..state.observer import observing, running
from .cost import Option
from .hosts import SimulatedHostStore
from .ops import Op, is_kept, op_of


@dataclass(frozen=True)
class SegmentCall:
    """A call of a segment, which is one module or several in a row; modules and tensors are fake."""

    steps: tuple[tuple[nn.Module, tuple[Any, ...], Any], ...]  # each module, its flat arguments, and their maker
    autocast: torch.autocast | None = None  # as it was; None where nothing is called with a tensor

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The tensors of the first call that come from the segments before: those with a gradient, else the first."""
        tensors = [x for x in self.steps[0][1] if isinstance(x, torch.Tensor) and floats(x)]
        return [tensor for tensor in tensors if tensor.requires_grad] or tensors[:1]

    def run(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Calls the modules, with these tensors for `inputs`; the result of one is the first argument of the next."""
        fresh = {id(old): new for old, new in zip(self.inputs, inputs, strict=True)}
        result: Any = None
        for number, (module, leaves, build) in enumerate(self.steps):
            given = [leaf.cache() if isinstance(leaf, CacheSnapshot) else fresh.get(id(leaf), leaf) for leaf in leaves]
            if number:
                given[0] = result[0] if isinstance(result, tuple) else result
            args, kwargs = build(given)
            del given
            with self.autocast or nullcontext():
                result = module(*args, **kwargs)
            given = {id(tensor) for tensor in (*leaves, *fresh.values())}
            if not tensors_of_call(result):  # it may have left it in a container that it was given
                result = [tensor for tensor in tensors_of_call((args, kwargs)) if id(tensor) not in given]
            del args, kwargs
        return result


@dataclass(frozen=True)
class Tried:
    """The figures of a trial; bytes are those of `Option`."""

    saved_bytes: int
    forward_bytes: int
    backward_bytes: int
    ops: Counter[Op]  # all that ran, forward and backward
    calls: int = 0  # kept, and decisions carried
    watched: int = 0  # operations, in forward and in replays, among which these were found
    host_bytes: int = 0
    at_once_bytes: int = 0  # see `Graph.backward_bytes`

    def grown(self, more: Tried, times: int) -> Tried:
        """The figures of a trial of so many more segments than this one, where `more` has one more."""

        def at(one: int, other: int) -> int:
            return one + times * (other - one)

        figures = {
            field.name: at(getattr(self, field.name), getattr(more, field.name))
            for field in fields(self)
            if field.name != "ops"
        }
        return Tried(ops=Counter({op: at(self.ops[op], more.ops[op]) for op in more.ops}), **figures)

    def work(self, price: Callable[[Op], float]) -> Work:
        """Returns the work of a segment without regions, for device and host."""
        launched = sum(count for op, count in self.ops.items() if not op.in_host_memory)
        return Work(sum(price(op) * count for op, count in self.ops.items()), launched)

    def option(
        self, regions: tuple[Choice, ...], plain: Tried, price: Callable[[Op], float], host: Host, span: int = 1
    ) -> Option:
        """The option that was tried; its seconds and FLOPs are those beyond `span` plain segments.

        Args:
            regions: Its regions.
            plain: The segment without any.
            price: Gives the seconds of an operation.
            host: What launches operations.
            span: How many segments it is of.
        """
        counts = Counter({op: self.ops[op] - span * plain.ops[op] for op in (*self.ops, *plain.ops)})
        again, without = Tried(0, 0, 0, counts).work(price), plain.work(price).times(span)
        called = sum(1 + span * region.nested for region in regions)
        device, replayed = max(0.0, again.device), max(0, again.launched)  # layers may leave themselves out
        work = Work(device, 0, replayed, called, self.calls, self.watched)
        flops = max(0, sum(op.flops * count for op, count in counts.items()))
        levels = self.saved_bytes, self.forward_bytes, self.backward_bytes
        return Option(regions, *levels, host.added(without, work), flops, span, self.host_bytes, work)


class _Source(torch.autograd.Function):
    """Makes tensors as a layer before would: only the reader holds them, and their gradients go nowhere."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, call: SegmentCall) -> Any:
        return tuple(_maker(x, strided=True)() for x in call.inputs)  # of the call: arguments are part of the graph

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, None


def _maker(like: Any, *, strided: bool = False) -> Callable[[], torch.Tensor]:
    """Returns what makes tensors of a tensor's shape, without keeping that; of a jagged one, of its lengths."""
    if like.is_nested:
        values, offsets, lengths = _maker(like.values(), strided=strided), like.offsets(), like.lengths()
        jagged = next(dim for dim, size in enumerate(like.shape) if not isinstance(size, int))
        return lambda: torch.nested.nested_tensor_from_jagged(values(), offsets, lengths, jagged)
    make = partial(torch.empty_strided, like.shape, like.stride()) if strided else partial(torch.empty, like.shape)
    return partial(make, dtype=like.dtype, device=like.device)


def attempt(call: SegmentCall, choices: Sequence[Choice], pretend: FakeMode, *, frees: bool = False) -> Tried:
    """Runs a segment under some choices.

    Args:
        call: The segment.
        choices: Their paths are relative to the modules: "0" is the first one, "0.mlp" a part of it.
        pretend: The mode of its fake tensors, which is active.
        frees: Whether the gradients of parameters are freed as they come.

    Raises:
        RecomputeError: The engine refuses the choices, or they say that what is read is unread.
    """
    holder = nn.ModuleList(module for module, _, _ in call.steps)
    gradients = [(parameter, parameter.grad) for parameter in holder.parameters()]
    host = SimulatedHostStore()
    stores = {"host": host} if any(choice.store for choice in choices) else {}
    trained = [weight for weight in holder.parameters() if weight.requires_grad and frees]
    with reached_as_before(holder), ExitStack() as stack:
        stack.callback(apply(holder, Plan(tuple(choices)), stores=stores).remove)
        for weight in trained:
            stack.callback(weight.register_post_accumulate_grad_hook(_free).remove)
        try:
            with refusing(), generators_as_before():  # which decide alike in each trial
                keeps = any(choice.keep or choice.carry for choice in choices)
                return _run(call, holder, pretend, host, keeps)
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient


def _free(weight: torch.Tensor) -> None:
    weight.grad = None


class _Watch:
    """Counts the operations of a trial.

    Attributes:
        own: Whether what runs is the trial's own: it makes the tensors that a layer before and one behind would make.
        before: The storages that are no part of `at_once`; None until backward begins.
        at_once: The most bytes of other storages that one operation reads and makes.
    """

    def __init__(self, keeps: bool) -> None:
        self._keeps = keeps
        self.ran: Counter[Op] = Counter()
        self.calls = self.watched = self.at_once = 0
        self.own = True
        self.before: set[int] | None = None

    def see(self, operation: Operation) -> None:
        """Counts an operation."""
        if self.before is not None:
            met = {id(storage): storage for _, storage in (*operation.given, *operation.results)}
            self.at_once = max(self.at_once, sum(int(met[key].nbytes()) for key in met.keys() - self.before))
        op = op_of(operation)
        if op is not None and not self.own:
            self.ran[op] += 1
        if op is not None and self._keeps and running():
            self.watched += 1
            self.calls += is_kept()


def _run(call: SegmentCall, holder: nn.Module, pretend: FakeMode, host: SimulatedHostStore, keeps: bool) -> Tried:
    seen = _Watch(keeps)
    m = SimulatedMeasurement(None, pretend, seen.see)
    like = call.inputs
    grads = any(tensor.requires_grad for tensor in like)
    with m.track(holder), observing():
        token = torch.empty((), device=like[0].device, requires_grad=grads) if like else None
        level = m.live_bytes
        inputs = list(_Source.apply(token, call)) if token is not None else []  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        start, seen.own = len(m.timeline), False
        result = call.run(inputs)
        there = [inputs, *(leaves for _, leaves, _ in call.steps), *holder.parameters(), *holder.buffers()]
        known = {id(storage) for _, storage in storages(there)}
        del inputs, there
        forward = max(sample.live_bytes for sample in m.timeline[start - 1 :])
        outputs = [x for x in tensors_of_call(result) if x.requires_grad]
        edges = [torch.autograd.graph.get_gradient_edge(x) for x in outputs]
        makers = [_maker(x.detach()) for x in outputs]
        del result, outputs
        host.settle()
        saved, host_bytes = m.live_bytes, host.host_bytes
        start = len(m.timeline)
        seen.own = True
        given = [make() for make in makers]
        seen.own, seen.before = False, known
        # as a training loop does, outside of autocast
        with nullcontext() if call.autocast is None else torch.autocast(call.autocast.device, enabled=False):
            torch.autograd.backward(edges, given)  # pyright: ignore[reportArgumentType]
        del given
        backward = max((sample.live_bytes for sample in m.timeline[start:]), default=saved)
    levels = saved - level, forward - level, backward - level
    return Tried(*levels, seen.ran, seen.calls, seen.watched, host_bytes, seen.at_once)
