"""Texts that are added to an out-of-memory error which passes through a region.

The error is torch's, not one of this family, so these are lines and not messages: `_exhausted.py` puts them together,
and their test is `tests/test_exhausted.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from ._say import size

_MEASURE = "run the step in `with torch_recompute.measure(model, optimizer):` to see all categories"


def alive_by_category(device: str, categories: Mapping[str, int]) -> str:
    """Line for what a running measurement had counted."""
    parts = ", ".join(f"{name} {size(count)}" for name, count in categories.items() if count)
    return f"Alive then on {device}, {size(sum(categories.values()))}: {parts or 'nothing that was counted'}."


def alive_of_model(model: str, parameters: int, gradients: int, allocated: int | None) -> str:
    """Line for what can be seen without a measurement."""
    known = f"Alive then: parameters and buffers {size(parameters)}, gradients {size(gradients)} of {model}"
    if allocated is None:
        return f"{known}; the rest was not counted: {_MEASURE}."
    rest = max(0, allocated - parameters - gradients)
    return f"{known}; optimizer state and activations {size(rest)} together: {_MEASURE}."


def alive_unknown(allocated: int | None) -> str:
    """Line where there is neither a measurement nor a plan in a model."""
    seen = "" if allocated is None else f" {size(allocated)},"
    return f"Alive then:{seen} not counted by category: {_MEASURE}."


def allocator_holds(device: str, allocated: int, reserved: int, total: int) -> str:
    """Line for the CUDA allocator's books."""
    return (
        f"On {device} {size(allocated)} were allocated, {size(reserved)} reserved by the allocator, of {size(total)}: "
        f"{size(max(0, reserved - allocated))} lay unused between them."
    )


def broken_promise(predicted: int, capacity: int | None) -> str:
    """Line for a plan that was to fit."""
    where = "" if capacity is None else f", and this process can have {size(capacity)}"
    return (
        f"The plan in the model promises a peak of {size(predicted)}{where}: this step is a larger one than was "
        "planned (batch, optimizer), or the memory is in fragments; torch_recompute.doctor tells which."
    )


def nearest_plan(budget: int, peak: int, freed: int, more: float) -> str:
    """Line for the plan that comes next below."""
    return (
        f"The nearest plan that fits has a peak of {size(peak)}, {size(freed)} less than this one, for a step that "
        f'takes {more:.1%} longer. Write: make_plan(..., budget="{_compact(budget)}").'
    )


def no_nearer_plan(least: int) -> str:
    """Line where no plan needs less."""
    return (
        f"No plan would fit: with this batch the least has a peak of {size(least, up=True)}. Write a smaller batch, or "
        "an optimizer with less state, or shard the model."
    )


def make_one(budget: int | None) -> str:
    """Line where it is not known what a plan would do."""
    word = "24GiB" if budget is None else _compact(budget)
    ask = " (what the device may hold)" if budget is None else ""
    return (
        f'For a plan that fits, write: apply(model, make_plan(model, (batch,), budget="{word}", optimizer=...))'
        f"{ask}, or: torch-recompute plan MODEL --budget {word}"
    )


def _compact(count: int) -> str:
    """A budget as it is written: rounded down, so that it is not more than was meant."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= 10 * unit or (count >= unit and name == "KiB"):
            return f"{count * 100 // unit / 100:.2f}{name}"
    return str(count)
