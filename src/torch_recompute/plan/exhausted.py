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

import torch
from torch import nn

from .. import errors
from .._torch.fakes import FakeTensor
from ..memory import measurement
from ..memory.ledger import CountedOnce
from ..observer import Observer, always
from .plan import Plan
from .solve import solve

_MEASURE = "run the step in `with torch_recompute.measure(model, optimizer):` to see all categories"

RESERVE = 0.05  # of the device: what `budget="fit"` leaves as well, for workspaces and fragments

planned_models: weakref.WeakKeyDictionary[nn.Module, Plan] = weakref.WeakKeyDictionary()
"""The models that a plan is in; `apply` writes it."""

_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB|TiB)")
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
        capacity = free + held - round(RESERVE * total)  # what a step of this process can have
        lines.append(
            f"On {device!s} {errors.size(allocated)} were allocated, {errors.size(held)} reserved by the allocator, of "
            f"{errors.size(total)}: {errors.size(max(0, held - allocated))} lay unused between them."
        )
    return "\n".join([*lines, *_advice(plan, capacity, asked_for(text))])


def asked_for(text: str) -> int:
    """The bytes that an error says could not be had; 0 where it does not say."""
    found = _ASKED.search(text)
    return 0 if found is None else int(float(found[1]) * _UNITS[found[2]])


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
    word = "24GiB" if budget is None else errors.as_budget(budget)
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
        leaner = solve(plan.profile, budget=max(1, target)).prediction
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
        f'step that takes {more:.1%} longer. Write: make_plan(..., budget="{errors.as_budget(max(1, target))}").',
    ]


class _Advice(Observer):
    def out_of_memory(self, region: str, text: str) -> str:
        """Adds lines to the error."""
        return look(region, text)


always[:] = [_Advice()]
