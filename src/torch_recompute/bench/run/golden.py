"""Golden figures: what a step took when it was good, in a file to compare with.

A figure is of one workload on one kind of device; a file of another is refused, because the comparison would say
nothing. A setting is compared with its own figure, found by what it says and not by its name. One that has none is
compared with the control's, as the published harness compares everything with one figure per workload.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch

from ... import errors
from .settings import CONTROL, Setting, Workload

SCHEMA_VERSION = 1
WHAT = "golden figures of torch-recompute bench run"


@dataclass(frozen=True)
class Figure:
    """What a step took.

    Attributes:
        name: Of the setting.
        step_seconds: Of the slowest rank.
        tflops: Per second and device; None where FLOPs could not be counted.
    """

    name: str
    step_seconds: float
    tflops: float | None


def _golden_of_another(path: str, what: str, theirs: object, ours: object) -> str:
    """Text for golden figures that say nothing of this run."""
    return (
        f"the figures in {path} are of another {what}: {theirs}, here {ours}. A comparison would say nothing. Write "
        "figures of your own with --save-golden, or leave --golden out."
    )


def _no_golden_figure(path: str, name: str, known: Sequence[str]) -> str:
    """Text for a setting that there is no figure for."""
    others = ", ".join(map(repr, known)) or "nothing"
    return (
        f"{path} has no figure for {name!r} and none for the control, only for {others}. "
        "Run it once with --save-golden, or leave --golden out."
    )


@dataclass(frozen=True)
class Golden:
    """The figures of a file.

    Attributes:
        workload: What was trained.
        ranks: By how many.
        device: The device's name.
        parameters: Of the model.
        figures: By the settings' keys.
        torch: The version it ran with.
        source: The file's name.
    """

    workload: Workload
    ranks: int
    device: str
    parameters: int
    figures: Mapping[str, Figure]
    torch: str = torch.__version__
    source: str = ""

    def of(self, setting: Setting) -> Figure:
        """The figure that a setting is compared with.

        Raises:
            ArgumentError: There is none.
        """
        found = self.figures.get(setting.key) or self.figures.get(CONTROL.key)
        if found is None:
            known = [figure.name for figure in self.figures.values()]
            raise errors.ArgumentError(_no_golden_figure(self.source, setting.name, known))
        return found

    def check_workload(self, workload: Workload, ranks: int) -> None:
        """Refuse figures of something else than this.

        Raises:
            ArgumentError: They are.
        """
        theirs, ours = {**asdict(self.workload), "ranks": self.ranks}, {**asdict(workload), "ranks": ranks}
        for what, value in theirs.items():
            if value != ours[what]:
                raise errors.ArgumentError(_golden_of_another(self.source, what, value, ours[what]))

    def check_machine(self, device: str, parameters: int) -> None:
        """Refuse figures of another device, or of a model that is called the same.

        Raises:
            ArgumentError: They are.
        """
        for what, theirs, ours in (
            ("device", self.device, device),
            ("number of parameters", self.parameters, parameters),
        ):
            if theirs != ours:
                raise errors.ArgumentError(_golden_of_another(self.source, what, theirs, ours))

    def write(self, path: Path) -> None:
        """Write them to a file, which `read` reads.

        Raises:
            ArgumentError: The file cannot be written.
        """
        data: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "what": WHAT, **asdict(self)}
        del data["source"]
        try:
            path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise errors.ArgumentError(errors.cannot_write("--save-golden", str(path), why)) from error


def _bad_golden(path: str, why: str) -> str:
    """Text for a file that holds no golden figures."""
    return (
        f"--golden is {path}: {why}. Write the path of a file that --save-golden has written, on the same kind of "
        "device."
    )


def read(path: Path) -> Golden:
    """The figures of a file.

    Raises:
        ArgumentError: It cannot be read, or holds something else.
    """
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise errors.ArgumentError(_bad_golden(str(path), (error.strerror or str(error)).lower())) from None
    except ValueError as error:
        raise errors.ArgumentError(_bad_golden(str(path), f"no JSON: {error}")) from None
    head = {"schema_version": SCHEMA_VERSION, "what": WHAT}
    if not isinstance(data, dict) or any(cast("dict[str, Any]", data).get(key) != head[key] for key in head):
        raise errors.ArgumentError(_bad_golden(str(path), f"no {WHAT}, version {SCHEMA_VERSION}"))
    try:
        rest = {key: value for key, value in data.items() if key not in head}
        figures = {key: Figure(**value) for key, value in rest.pop("figures").items()}
        return Golden(Workload(**rest.pop("workload")), figures=figures, source=str(path), **rest)
    except (KeyError, TypeError, AttributeError) as error:
        raise errors.ArgumentError(_bad_golden(str(path), f"a field is missing or unknown: {error}")) from None
