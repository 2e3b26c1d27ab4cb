"""From settings to the choices that they mean in one model.

Whole layers are a matter of counting in each stack of layers that `plan/units.py` finds; parts are a matter of labels,
which `plan/labels.py` knows. What is left to do here is to complain of what does not fit the model, where Megatron goes
on in silence: a number of layers beyond the stage, a label that nothing answers to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
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


def _not_plannable(value: object) -> str:
    """Text for a model that is no module."""
    each = ""
    if isinstance(value, (list, tuple)):
        each = "\n  For the chunks of an interleaved pipeline, one plan each: [config.plan(chunk) for chunk in chunks]."
    return f"RecomputeConfig.plan(model) needs a torch.nn.Module, but got {errors.kind(value)}.{each}"


def placed(config: RecomputeConfig, model: object, look: Callable[[], Found] | None) -> tuple[Choice, ...]:
    """The choices that these settings mean in this model; `look` calls it to find the names of calls, if it can be."""
    if not isinstance(model, torch.nn.Module):
        raise errors.ArgumentError(_not_plannable(model))
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


def _too_many_layers(layers: int, stack: str | None, length: int) -> str:
    """Text for more layers than the model has; `stack` is the path of the longest stack, None if there is none."""
    if stack is None:
        has = "this model is a single layer"
    else:
        has = f"the longest stack of layers in this model, {stack or 'the model itself'}, has {length}"
    write = f"Write a number from 1 to {length}" if length > 1 else "Write 1"
    return (
        f"recompute_num_layers={layers}, but {has}. (Under pipeline parallelism a model is one stage, or one chunk of "
        "it; the number is per stage.)\n"
        f"  {write}."
    )


def _layers(config: RecomputeConfig, units: Units, model: str, method: str, number: int) -> tuple[Choice, ...]:
    stacks: dict[str | None, list[str]] = {}
    for layer in units.layers:
        stacks.setdefault(layer.stack, []).append(layer.path)
    if not stacks:
        raise errors.ArgumentError(
            f"no layers were found in {model}. Looked for: a ModuleList, Sequential or ModuleDict of alike modules, "
            "each with at least two products (linear layers, convolutions, stacked experts) inside.\n"
            "  Say which class is a layer, before the plan is made:\n"
            "      from torch_recompute.plan.units import register\n"
            '      register("layer", MyLayer)\n'
            "  or name modules by their paths, as named_modules() gives them:\n"
            '      RecomputeConfig(recompute_granularity="selective", recompute_modules=["blocks.*"])'
        )
    longest = max(stacks, key=lambda stack: len(stacks[stack]))
    if number > len(stacks[longest]):
        raise errors.ArgumentError(_too_many_layers(number, longest, len(stacks[longest])))
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


def _matches_nothing(label: str, model: str, matching: Mapping[str, int], calls: Mapping[str, int] | None) -> str:
    """Text for a label that finds no part of the model; `calls` are the names that its author gave, if it was run."""
    matching = {**matching, **(calls or {})}
    if calls is None:
        names = (
            '\n  Names that the author gave to calls, no_recompute(fn, name="..."), match if plan is given an example '
            "call, which alone shows them: config.plan(model, args, kwargs)."
        )
    else:
        names = "" if calls else '\n  Its author gave no call a name: no_recompute(fn, name="...").'
    if matching:
        width = max(map(len, matching))
        rows = "".join(
            f"\n      {word:<{width}}   {count} place{'s' if count > 1 else ''}" for word, count in matching.items()
        )
        known = f"  These labels match:{rows}\n"
    else:
        known = "  No label does.\n"
    return (
        f"recompute_modules: {label!r} matches nothing in {model}, so nothing would be recomputed for it.\n"
        f"{known}"
        '  Paths of modules match too, as named_modules() gives them, and patterns of paths such as "layers.*.mlp"; a '
        f"ModuleList does not, since it is never called.{names}"
    )


def _a_region_anyway(label: str, model: str, paths: Sequence[str]) -> str:
    """Text for a label that is the name of a region in the model's own code."""
    where = ", ".join(path or "the model itself" for path in paths[:3]) + (" ..." if len(paths) > 3 else "")
    return (
        f"recompute_modules: {label!r} is a region in the code of {model} (in {where}): recompute(fn, name={label!r}) "
        "is recomputed whatever a plan says, so naming it would have no effect.\n"
        "  Leave it out. A call that is recomputed only where it is listed is written in the model as "
        f"no_recompute(fn, name={label!r}), which is the plain call otherwise."
    )


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
                raise errors.ArgumentError(_a_region_anyway(label, model, names.regions[label]))
        if not here:
            calls = None if names is None else {name: len(paths) for name, paths in names.calls.items()}
            raise errors.ArgumentError(_matches_nothing(label, model, matching(units), calls))
        found.extend(part_on_host(config, label, here))
    merged = merge(units, tuple(found))
    check_merged(config, merged)
    return merged
