"""`torch-recompute show MODEL`: what a model is made of, and which labels would place something there.

Problem. Before anything is recomputed a user has to name parts of the model in a configuration: `core_attn`, `moe_act`,
a path. Whether a word matches anything, and what, should not need a training run to be known.

Idea. The tree of units as `find_units` sees it, each with the labels that put a region around it, and below it how many
regions each label makes in the whole model. Layers that are made alike are one row. A Hugging Face configuration is
enough: the model is built on the meta device, where a weight has a shape and takes no memory.

The result goes to stdout, as a tree or with `--json` as one document; a MODEL that cannot be had ends with 2 and one
line on stderr.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, cast

from .._face import OK, Face, add_options, document
from .._models import PRESETS, load
from ..plan.anatomy import Units
from ..plan.labels import LABELS, choices, matching
from ..plan.units import find_units

__all__ = ["add_command", "command", "labels_at", "to_json"]

SCHEMA_VERSION = 1


def add_command(commands: Any) -> None:
    """Describe `torch-recompute show` to the command line."""
    about = "the parts of a model, and the labels that match each"
    parser = cast("argparse.ArgumentParser", commands.add_parser("show", help=about, description=about))
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="pkg.module:name of a module or of a function that makes one, or the config.json (or its folder) of a "
        f"Hugging Face model, which is built without weights, or one of {', '.join(PRESETS)}",
    )
    add_options(parser, command)


def command(args: argparse.Namespace) -> int:
    """Run `torch-recompute show`; 0 when there was something to show."""
    face = Face.of(args)
    with face.at_work(f"building {args.model}"):
        units = find_units(load(args.model).model)
    face.give(lambda: to_json(units), lambda: _view().show(units, labels_at(units), matching(units)))
    return OK


def labels_at(units: Units) -> dict[str, tuple[str, ...]]:
    """The labels that make a region around each module."""
    found: dict[str, tuple[str, ...]] = {}
    for label in LABELS:
        for choice in choices(units, label):
            for path in choice.paths:
                found[path] = (*found.get(path, ()), label)
    return found


def to_json(units: Units) -> str:
    """The units and their labels as a JSON document."""
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


def _view() -> Any:
    from . import view

    return view
