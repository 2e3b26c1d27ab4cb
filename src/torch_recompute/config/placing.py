"""From settings to the choices that they mean in one model.

Whole layers are a matter of counting in each stack of layers that `plan/units.py` finds; parts are a matter of labels,
which `plan/labels.py` knows. What is left to do here is to complain of what does not fit the model, where Megatron goes
on in silence: a number of layers beyond the stage, a label that nothing answers to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

from .. import errors
from ..plan import Choice
from ..plan.labels import choices, matching, merge, named, routed
from ..plan.named import Found
from ..plan.units import Units, find_units
from .collectives import reductions_kept
from .offloading import check_merged, layers_on_host, part_on_host
from .rules import FULL, UNIFORM

if TYPE_CHECKING:
    from .config import RecomputeConfig

T = TypeVar("T")


def placed(config: RecomputeConfig, model: object, look: Callable[[], Found] | None) -> tuple[Choice, ...]:
    """The choices that these settings mean in this model; `look` calls it to find the names of calls, if it can be."""
    if not isinstance(model, torch.nn.Module):
        raise errors.ArgumentError(errors.not_plannable(model))
    return reductions_kept(config, model, _regions(config, model, look))


def _regions(config: RecomputeConfig, model: torch.nn.Module, look: Callable[[], Found] | None) -> tuple[Choice, ...]:
    if config.recompute_granularity == FULL:
        method, number = config.recompute_method or "", config.recompute_num_layers or 0
        found = _layers(config, find_units(model), type(model).__name__, method, number)
        if config.distribute_saved_activations:
            return tuple(dataclasses.replace(choice, store="sharded") for choice in found)
        return found
    labels = tuple(dict.fromkeys(config.recompute_modules or ()))
    return _parts(config, find_units(model), type(model).__name__, labels, look) if labels else ()


def _layers(config: RecomputeConfig, units: Units, model: str, method: str, number: int) -> tuple[Choice, ...]:
    stacks: dict[str | None, list[str]] = {}
    for layer in units.layers:
        stacks.setdefault(layer.stack, []).append(layer.path)
    if not stacks:
        raise errors.ArgumentError(errors.no_layers(model))
    longest = max(stacks, key=lambda stack: len(stacks[stack]))
    if number > len(stacks[longest]):
        raise errors.ArgumentError(errors.too_many_layers(number, longest, len(stacks[longest])))
    chosen = [
        Choice(group, carry=any(routed(units, path) for path in group), labels=(f"{FULL}/{method}",))
        for stack in stacks.values()
        for group in groups(stack, method, number)
    ]
    return layers_on_host(config, stacks.values(), chosen)


def groups(layers: Sequence[T], method: str, number: int) -> list[tuple[T, ...]]:
    """The layers of one stack that are recomputed, those of one region together.

    Args:
        layers: A stack's layers, in order.
        method: "uniform": all, `number` at a time, the last group with what is left; "block": the first `number`, or
            all if there are fewer, one at a time.
        number: At least 1.
    """
    if method == UNIFORM:
        return [tuple(layers[first : first + number]) for first in range(0, len(layers), number)]
    return [(layer,) for layer in layers[:number]]


def _parts(
    config: RecomputeConfig, units: Units, model: str, labels: Sequence[str], look: Callable[[], Found] | None
) -> tuple[Choice, ...]:
    found: list[Choice] = []
    names: Found | None = None
    for label in labels:
        here = choices(units, label)
        if not here and look is not None:
            names = names or look()
            here = named(units, label, names.calls.get(label, ()))
            if not here and label in names.regions:
                raise errors.ArgumentError(errors.a_region_anyway(label, model, names.regions[label]))
        if not here:
            calls = None if names is None else {name: len(paths) for name, paths in names.calls.items()}
            raise errors.ArgumentError(errors.matches_nothing(label, model, matching(units), calls))
        found.extend(part_on_host(config, label, here))
    merged = merge(units, tuple(found))
    check_merged(config, merged)
    return merged
