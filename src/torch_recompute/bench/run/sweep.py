"""A file of experiments: a list of named settings, and the workload and sizes that they share.

    model: gpt-tiny
    batch: 4
    rounds: 3
    experiments:
      - name: every layer
        recompute_granularity: full
        recompute_method: uniform
        recompute_num_layers: 1
      - name: half the activations
        budget: 50%
      - name: by hand
        plan: plan.json

Keys at the top are the command's options, and an option on the command line wins. The fields of an experiment are those
of `RecomputeConfig`, or `budget`, or `plan`, which is a path seen from the file's folder. The control is always there
and has no entry. A key that means nothing is refused, unlike in a training configuration, which holds much else.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ... import RecomputeConfig, errors
from ..._plan_file import read_plan
from ...plan.budget import read_budget
from ...plan.settings import content_of
from .settings import NAME_OF_CONTROL, Setting

EXPERIMENTS = "experiments"
OPTIONS = (
    *("model", "batch", "sequence", "dtype", "optimizer", "device"),
    *("steps", "warmup", "rounds", "capacity", "threshold"),
)


@dataclass(frozen=True)
class Sweep:
    """What a file says.

    Attributes:
        options: By their names without dashes.
        settings: The experiments.
    """

    options: Mapping[str, Any]
    settings: Sequence[Setting]


def _bad_sweep(path: str, experiments: object) -> str:
    """Text for a file without a list of experiments."""
    has = "has no experiments" if experiments is None else f"has experiments: {experiments!r}"
    return (
        f"--sweep is {path}, which {has}; expected a list. Write for example:\n"
        "      experiments:\n"
        "        - name: every layer\n"
        "          recompute_granularity: full\n"
        "          recompute_method: uniform\n"
        "          recompute_num_layers: 1"
    )


def _bad_experiment(where: str, why: str) -> str:
    """Text for an experiment that is none."""
    return (
        f"{where}: {why}. An experiment has a name of its own, and the fields of RecomputeConfig, or budget, or plan. "
        "The control, which recomputes nothing, is always there and has no entry."
    )


def read(path: Path) -> Sweep:
    """The content of a file, YAML or JSON.

    Raises:
        ArgumentError: It cannot be read, or says something that means nothing.
    """
    try:
        content = dict(content_of(path))
    except OSError as error:
        raise errors.ArgumentError(
            f"--sweep is {path!s}: {(error.strerror or str(error)).lower()}. Write the path of a file that is there, "
            "and that may be read."
        ) from error
    experiments: Any = content.pop(EXPERIMENTS, None)
    _known(str(path), content, OPTIONS, and_also=(EXPERIMENTS,))
    if not isinstance(experiments, list) or not experiments:
        raise errors.ArgumentError(_bad_sweep(str(path), experiments))
    entries = cast("list[Any]", experiments)
    settings = [_experiment(path, number, entry) for number, entry in enumerate(entries, 1)]
    names = [setting.name for setting in settings]
    for number, name in enumerate(names, 1):
        if name == NAME_OF_CONTROL or name in names[: number - 1]:
            why = "the control's own" if name == NAME_OF_CONTROL else "that of another experiment"
            raise errors.ArgumentError(_bad_experiment(f"{path}, experiment {number}", f"its name is {name!r}, {why}"))
    return Sweep(content, settings)


def _experiment(path: Path, number: int, entry: Any) -> Setting:
    where = f"{path}, experiment {number}"
    if not isinstance(entry, Mapping):
        raise errors.ArgumentError(_bad_experiment(where, f"it is {entry!r}"))
    fields = {str(key): value for key, value in cast("Mapping[Any, Any]", entry).items()}
    name = fields.pop("name", None)
    if not isinstance(name, str) or not name:
        raise errors.ArgumentError(
            _bad_experiment(where, "it has no name" if name is None else f"its name is {name!r}")
        )
    _known(where, fields, RecomputeConfig.names(), and_also=("name", "budget", "plan"))
    if not fields:
        raise errors.ArgumentError(_bad_experiment(where, "it says nothing but its name"))
    budget, plan = fields.pop("budget", None), fields.pop("plan", None)
    return setting_of(name, fields, budget, None if plan is None else path.parent / str(plan), f"{path}: {name}")


def _two_settings(where: str, one: str, other: str) -> str:
    """Text for two ways at once of saying what is recomputed."""
    place = f"{where}: " if where else ""
    return (
        f"{place}{one} and {other} both say what is recomputed. Leave one of them out: the recompute fields, budget "
        "and plan exclude each other."
    )


def setting_of(name: str, fields: Mapping[str, Any], budget: object, plan: Path | None, where: str = "") -> Setting:
    """A setting, if it says one thing and what it says can be.

    Raises:
        ArgumentError: It does not.
    """
    given = [word for word, value in (("budget", budget), ("plan", plan)) if value is not None]
    given += [next(iter(fields))] if fields else []
    if len(given) > 1:
        raise errors.ArgumentError(_two_settings(where, *given[:2]))
    if budget is not None:
        read_budget(budget)
        return Setting(name, budget=str(budget))
    if plan is not None:
        return Setting(name, plan=read_plan(plan, f"{where}: plan" if where else "--plan").to_json())
    try:
        return Setting(name, RecomputeConfig.from_dict(fields).to_dict())
    except errors.ArgumentError as error:
        raise errors.ArgumentError(f"{where}: {error}" if where else str(error)) from None


def _known(where: str, keys: Mapping[str, Any], known: Sequence[str], *, and_also: Sequence[str]) -> None:
    words = (*known, *and_also)
    for key in keys:
        if key not in words:
            nearest = difflib.get_close_matches(str(key), words, 1, 0.0)[0]
            raise errors.ArgumentError(
                f"{where}: {key!r} is not known, so it would have no effect; the nearest is {nearest!r}. Write "
                f"{nearest}:"
            )
