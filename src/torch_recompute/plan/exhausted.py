"""Advice for an error that memory ran out in a region: what was alive, and the nearest plan that fits.

What was alive is known from a measurement that runs. Without one, the model that a plan is in says its parameters and
gradients, and the CUDA allocator the sum. The nearest plan that fits is solved for on the spot, from the costs that a
plan made for a budget carries: plain data, milliseconds, and no device memory. It may take what this process can have,
or, if the plan's own promise was smaller than that and still broken, as much less as the allocation that failed asked
for. For a plan that was read from a file, which has no costs, the line to write is said.
"""

from __future__ import annotations

import re
import weakref
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from .. import errors
from .._torch.fakes import FakeTensor
from ..memory import measurement
from ..memory.budget import as_budget
from ..memory.free import reserve
from ..memory.ledger import CountedOnce
from ..memory.reserved import EXPANDABLE, expands
from ..state.observer import Observer, always
from .plan import Plan

_MEASURE = "run the step in `with torch_recompute.measure(model, optimizer):` to see all categories"

planned_models: weakref.WeakKeyDictionary[nn.Module, Plan] = weakref.WeakKeyDictionary()
"""The models that a plan is in; `apply` writes it."""

UNUSED = 0.2  # of what the allocator reserved: more than this in pieces is fragmentation, if no request is known
CAPACITY, FRAGMENTATION = "capacity", "fragmentation"

_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB|TiB)"
_ASKED = re.compile(f"[Tt]ried to allocate {_SIZE}")
_BOOKS = [
    re.compile(text)
    for text in (
        f"{_SIZE} is allocated by PyTorch",
        f"{_SIZE} is reserved by PyTorch but",
        f"{_SIZE} allowed",
        f"total capacity of {_SIZE}",
    )
]
"""What torch says of a device's memory in the text of its error, in the state in which the request failed."""
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def look(region: str, text: str) -> str:
    """The lines for an error: what was alive, what the allocator holds, and the nearest plan that fits.

    Args:
        region: The region's name, which is a path where a plan made it.
        text: The error's own.
    """
    model, plan = _planned(region)
    device = _device(model)
    lines, capacity = [_alive(model, device)], None
    if device is not None:
        allocated, held = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        free, total = torch.cuda.mem_get_info(device)
        capacity = free + held - reserve(total)  # what a step of this process can have
        lines.append(
            f"On {device!s} {errors.size(allocated)} were allocated, {errors.size(held)} reserved by the allocator, of "
            f"{errors.size(total)}: {errors.size(max(0, held - allocated))} lay unused between them."
        )
    return "\n".join([*lines, *_advice(plan, capacity, asked_for(text))])


def asked_for(text: str) -> int:
    """The bytes that an error says could not be had; 0 where it does not say."""
    return _said(_ASKED, text) or 0


def _said(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return None if found is None else int(float(found[1]) * _UNITS[found[2]])


def fragmented(allocated: int, reserved: int, requested: int = 0) -> bool:
    """Whether memory ran out by fragmentation: what is reserved and not allocated would hold what was requested.

    Args:
        allocated: Bytes that tensors hold.
        reserved: Bytes that the allocator holds.
        requested: Bytes that could not be had; if they are not known, a share of what is reserved.
    """
    return reserved - allocated >= (requested or UNUSED * reserved)


def against_fragmentation(cuda: bool = True) -> str:
    """The setting for an allocator whose free memory is in pieces."""
    if not cuda:
        return "MALLOC_MMAP_THRESHOLD_=1048576 in the environment, so that the system gets every large block back."
    if expands():
        return "batches of a few fixed lengths: expandable_segments is on already, and sizes that recur leave no holes."
    return f"{EXPANDABLE} in the environment, before the program starts."


@dataclass(frozen=True)
class Shortage:
    """A request for memory that failed, and the allocator's bytes at that moment; None for what is not known."""

    requested_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    capacity_bytes: int | None = None
    cuda: bool = True

    @staticmethod
    def of(text: str, allocated: int | None, reserved: int | None, capacity: int | None, *, cuda: bool) -> Shortage:
        """Reads the text of an error; what it does not say is as passed."""
        taken, unused, allowed, total = (_said(pattern, text) for pattern in _BOOKS)
        if taken is not None and unused is not None:
            allocated, reserved, cuda = taken, taken + unused, True
            capacity = allowed or total or capacity
        return Shortage(asked_for(text) or None, allocated, reserved, capacity, cuda)

    @property
    def verdict(self) -> str:
        """`FRAGMENTATION` or `CAPACITY`; empty where too little is known."""
        if self.requested_bytes is None or self.allocated_bytes is None or self.reserved_bytes is None:
            return ""
        pieces = fragmented(self.allocated_bytes, self.reserved_bytes, self.requested_bytes)
        return FRAGMENTATION if pieces else CAPACITY

    @property
    def write(self) -> str:
        """The advice: a setting, or memory to take less of."""
        if self.verdict == FRAGMENTATION:
            return against_fragmentation(self.cuda)
        return "a smaller batch, more recomputation, or a device with more memory." if self.verdict else ""

    def as_data(self) -> dict[str, Any]:
        """Ready for JSON."""
        known = asdict(self)
        del known["cuda"]
        return {**known, "verdict": self.verdict, "write": self.write}


def _planned(region: str) -> tuple[nn.Module | None, Plan | None]:
    """The model whose plan made a region of this name; of several, the one that has had its plan for the least time."""
    for model, plan in reversed(list(planned_models.items())):
        simulated = any(isinstance(parameter, FakeTensor) for parameter in model.parameters())
        paths = [path for choice in plan.all_choices for path in choice.paths]
        if region in paths and not simulated:
            return model, plan
    return None, None


def _device(model: nn.Module | None) -> torch.device | None:
    """The CUDA device that memory ran out on; None where it was the CPU's."""
    if not torch.cuda.is_initialized():
        return None
    parameter = None if model is None else next(model.parameters(), None)
    device = torch.device("cuda", torch.cuda.current_device()) if parameter is None else parameter.device
    return device if device.type == "cuda" else None


def _alive(model: nn.Module | None, device: torch.device | None) -> str:
    running = measurement.running()
    if running is not None:
        reading = running.on(device)
        counts = reading.live_by_category
        parts = ", ".join(f"{name} {errors.size(count)}" for name, count in counts.items() if count)
        total = errors.size(sum(counts.values()))
        return f"Alive then on {reading.device}, {total}: {parts or 'nothing that was counted'}."
    allocated = None if device is None else torch.cuda.memory_allocated(device)
    if model is None:
        seen = "" if allocated is None else f" {errors.size(allocated)},"
        return f"Alive then:{seen} not counted by category: {_MEASURE}."
    parameters = CountedOnce().add([*model.parameters(), *model.buffers()])
    gradients = CountedOnce().add([parameter.grad for parameter in model.parameters()])
    known = f"Alive then: parameters and buffers {errors.size(parameters)}, gradients {errors.size(gradients)}"
    if allocated is None:
        return f"{known} of {type(model).__name__}; the rest was not counted: {_MEASURE}."
    rest = errors.size(max(0, allocated - parameters - gradients))
    return f"{known} of {type(model).__name__}; optimizer state and activations {rest} together: {_MEASURE}."


def _make_one(budget: int | None) -> str:
    """Line where it is not known what a plan would do."""
    word = "24GiB" if budget is None else as_budget(budget)
    ask = " (what the device may hold)" if budget is None else ""
    return (
        f'For a plan that fits, write: apply(model, make_plan(model, (batch,), budget="{word}", optimizer=...))'
        f"{ask}, or: torch-recompute plan MODEL --budget {word}"
    )


def _advice(plan: Plan | None, capacity: int | None, asked: int) -> list[str]:
    promise = None if plan is None else plan.prediction
    if plan is None or promise is None:
        return [_make_one(capacity)]
    lines: list[str] = []
    target = capacity
    if capacity is None or promise.peak_bytes <= capacity:
        where = "" if capacity is None else f", and this process can have {errors.size(capacity)}"
        lines.append(
            f"The plan in the model promises a peak of {errors.size(promise.peak_bytes)}{where}: this step is a larger "
            "one than was planned (batch, optimizer), or the memory is in fragments; torch_recompute.doctor tells "
            "which."
        )
        target = promise.peak_bytes - max(asked, 1)
    assert target is not None
    if plan.profile is None:
        return [*lines, _make_one(target)]
    try:
        leaner = plan.profile.solve(budget=f"{max(1, target)}B").prediction
    except errors.BudgetError as error:
        return [
            *lines,
            f"No plan would fit: with this batch the least has a peak of {errors.size(error.smallest, up=True)}. "
            "Write a smaller batch, or an optimizer with less state, or shard the model.",
        ]
    except errors.ArgumentError:  # numpy, which solves, is not installed
        return [*lines, _make_one(target)]
    assert leaner is not None
    more = leaner.step_seconds / promise.step_seconds - 1 if promise.step_seconds else 0.0
    freed = errors.size(promise.peak_bytes - leaner.peak_bytes)
    return [
        *lines,
        f"The nearest plan that fits has a peak of {errors.size(leaner.peak_bytes)}, {freed} less than this one, for a "
        f'step that takes {more:.1%} longer. Write: make_plan(..., budget="{as_budget(max(1, target))}").',
    ]


class _Advice(Observer):
    def out_of_memory(self, region: str, text: str) -> str:
        """Adds lines to the error."""
        return look(region, text)


always[:] = [_Advice()]
