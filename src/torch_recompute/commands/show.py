"""`torch-recompute show MODEL`: prints the parts of a model, and the labels that make regions around them.

A configuration names parts of the model: `core_attn`, `moe_act`, a path. This shows before a training run what each
word matches: the tree of units that `find_units` finds, each with the labels that put a region around it, and below it
how many regions each label makes in the whole model. Layers that are made alike are one row.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from ..errors.text import explained
from ..plan.labels import LABELS, MEANS, choices, matching
from ..plan.roles import ROLES, Units
from ..plan.units import find_units
from .models import PRESETS, load
from .output import OK, Output, add_explain, add_options, document, new_command

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 1


def add_command(commands: Any) -> None:
    """Adds `torch-recompute show` to the command line."""
    parser = new_command(commands, "show")
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="pkg.module:name of a module or of a function that makes one, or the config.json (or its folder) of a "
        f"Hugging Face model, which is built without weights, or one of {', '.join(PRESETS)}",
    )
    add_explain(parser)
    add_options(parser, command)


def command(args: argparse.Namespace) -> int:
    """Runs `torch-recompute show`; 0 when the model could be built."""
    output = Output.of(args)
    with output.at_work(f"building {args.model}"):
        units = find_units(load(args.model).model)
    output.give(lambda: _to_json(units), lambda console: _print(console, units, explain=args.explain))
    return OK


def labels_at(units: Units) -> dict[str, tuple[str, ...]]:
    """Returns the labels that make a region around each module, by path."""
    found: dict[str, tuple[str, ...]] = {}
    for label in LABELS:
        for choice in choices(units, label):
            for path in choice.paths:
                found[path] = (*found.get(path, ()), label)
    return found


def _to_json(units: Units) -> str:
    """Returns the units and their labels as a JSON document."""
    here = labels_at(units)
    data = {
        "model": units.model,
        "stacks": [
            {"path": stack, "layers": sum(layer.stack == stack for layer in units.layers)} for stack in units.stacks
        ],
        "labels": matching(units),
        "units": [{**dataclasses.asdict(unit), "labels": here.get(unit.path, ())} for unit in units],
    }
    return document("show", SCHEMA_VERSION, data)


def _print(console: Console, units: Units, *, explain: bool) -> None:
    """Prints the tree, the number of regions that each label makes, and what roles and labels mean."""
    from rich.text import Text

    stacks = ", ".join(
        f"{stack or 'the model'} {sum(u.stack == stack for u in units.layers)}" for stack in units.stacks
    )
    console.print(f"{units.model}; layers: {stacks or 'none'}", style="bold")
    for line in units.lines({path: " ".join(words) for path, words in labels_at(units).items()}):
        text = Text("  " * (line.depth + 1)).append(line.name, style="bold" if line.depth == 0 else "")
        if line.times > 1:
            text.append(f" x {line.times}", style="bold")
        text.append(f": {', '.join(line.roles)} ").append(f"({line.cls})", style="dim")
        if line.note:
            text.append(f"  [{line.note}]", style="green")
        console.print(text)
    matches = ", ".join(f"{label} {count}" for label, count in matching(units).items())
    console.print(f"labels that match, with their number of regions: {matches or 'none'}")
    if explain:
        roles = {role: meaning for role, meaning in ROLES.items() if units.by_role(role)}
        labels = {f"[{label}]": meaning for label, meaning in MEANS.items() if label in matching(units)}
        console.print(explained({**roles, **labels}), markup=False)
