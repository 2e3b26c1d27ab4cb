"""What one step takes, with any engine: peak bytes and FLOPs by PyTorch's profiler, gradients, and seconds.

Problem. The lens of this library and PyTorch's own counter of FLOPs watch by a dispatch mode, and compiled code does
not run under a mode: PyTorch falls back to the original code. Figures of peers by one instrument and ours by another
prove little.

Idea. The profiler sees every allocation of any step, so every peak is the running sum of the CPU allocator's events,
beginning with the parameters and the batch. What a random generator's state takes in host memory is left out, as it is
on any device. FLOPs are counted by PyTorch's mode, which sees what really runs; of compiled code, which repeats nothing
that it does not need, they are PyTorch's formulas on the arguments that the profiler saw. For a plain step both give
the same.

Rejected: the profiler's operations for all. It lists an operation before it runs, and so also those that a replay
breaks off at, and those whose saved result is returned.

Invariants. Each way has a copy of the model; parameters are shared. Steps begin without gradients and from one seed.
"""

from __future__ import annotations

import copy
import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from allocated import levels_in
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from .ways import Way

REPEATED = {"aten::_convolution"}
"""Operations with a formula that another with one, of the same work, is made of."""
SEED = 1


@dataclass(frozen=True)
class Seen:
    """What a step showed.

    Attributes:
        peak_bytes: The most bytes alive, parameters and batch included.
        flops: Of products, replays included.
        gradients: By parameter.
    """

    peak_bytes: int
    flops: int
    gradients: tuple[Tensor, ...]


class Step:
    """A training step of one model run in one way: forward and backward."""

    def __init__(self, model: nn.Module, batch: Tensor, way: Way) -> None:
        self.way = way
        self._parameters = list(model.parameters())
        self._model = copy.deepcopy(model, {id(parameter): parameter for parameter in self._parameters})
        self._batch = batch
        way.prepare(self._model)
        with (way.first or nullcontext)():
            self()

    def __call__(self) -> None:
        """Runs the step."""
        torch.manual_seed(SEED)
        self._model(self._batch).backward()

    def drop_gradients(self) -> None:
        """Leaves none."""
        for parameter in self._parameters:
            parameter.grad = None

    def seen(self) -> Seen:
        """What a step takes."""
        self.drop_gradients()
        gc.collect()
        live = sum(tensor.untyped_storage().nbytes() for tensor in (*self._parameters, self._batch))
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as profiler:
            self()
        results: Any = profiler.profiler
        gradients = tuple(parameter.grad for parameter in self._parameters if parameter.grad is not None)
        self.drop_gradients()
        compiled = self.way.first is not None
        flops = sum(map(_flops, results.kineto_results.events())) if compiled else self._counted()
        return Seen(live + max([0, *(level for _, level in levels_in(profiler))]), flops, gradients)

    def _counted(self) -> int:
        with FlopCounterMode(display=False) as counter:
            self()
        self.drop_gradients()
        return counter.get_total_flops()

    def seconds(self) -> float:
        """One step by the clock."""
        self.drop_gradients()
        start = time.perf_counter()
        self()
        return time.perf_counter() - start


def _flops(event: Any) -> int:
    """FLOPs of an operation that the profiler saw, as PyTorch counts them; 0 for what is no product."""
    name, shapes = event.name(), event.shapes()
    operation: Any = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
    formula: Any = flop_registry.get(operation)
    if formula is None or not name.startswith("aten::") or name in REPEATED:
        return 0
    tensors = [shape for shape in shapes if shape]  # numbers have none
    for given in (tensors, tensors[:-1]):  # the last may be what compiled code lets it write to
        with suppress(TypeError):  # it needs the other arguments, or the result
            return int(formula(*given))
    values = zip(shapes, event.concrete_inputs(), strict=True)
    try:
        args = [torch.empty(shape, device="meta") if shape else value for shape, value in values]
        return int(formula(*args, out_val=operation(*args)))
    except (TypeError, RuntimeError) as error:
        raise NotImplementedError(f"the FLOPs of {name} do not follow from what the profiler saw") from error


def difference(plain: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """How long the difference of all gradients is, relative to the plain ones; 0 only if all bits agree."""
    if len(plain) != len(other):
        return math.inf
    if all(torch.equal(a, b) for a, b in zip(plain, other, strict=True)):
        return 0.0
    apart = sum((a.double() - b.double()).square().sum().item() for a, b in zip(plain, other, strict=True))
    return math.sqrt(apart / sum(a.double().square().sum().item() for a in plain))


def clock(steps: Sequence[Step], rounds: int, tick: Callable[[], None]) -> list[list[float]]:
    """Seconds of every step in each of some rounds, all taking turns; after a round of warming up."""
    taken: list[list[float]] = [[] for _ in steps]
    for round_ in range(rounds + 1):
        for step, seconds in zip(steps, taken, strict=True):
            once = step.seconds()
            if round_:
                seconds.append(once)
        tick()
    for step in steps:
        step.drop_gradients()
    return taken


def ratio(seconds: Sequence[float], others: Sequence[float]) -> float:
    """The median over rounds of one step's seconds to another's in the same round."""
    return statistics.median(a / b for a, b in zip(seconds, others, strict=True))
