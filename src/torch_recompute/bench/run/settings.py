"""What is compared: a workload, and settings of recomputation for it, as plain data.

A workload says what is trained, and on what; figures of two runs can be compared only where it is the same. A setting
says what is recomputed: the fields of `RecomputeConfig`, a budget that a plan is made for, or a plan. Its key is a hash
of these, whatever it is called, so that a figure is found again under another name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from ... import Plan, RecomputeConfig, __version__, errors
from ..._models import DTYPES, OPTIMIZERS
from ...plan.budget import read_budget
from .machine import name_of_cpu

NAME_OF_CONTROL = "control"
DEVICES = ("cpu", "cuda")


def _not_one_of(option: str, value: object, known: Sequence[str]) -> str:
    """Text for a word that is not among those that an option takes."""
    return f"{option} is {value}; expected one of {', '.join(known)}. Write for example {option} {known[0]}"


@dataclass(frozen=True)
class Workload:
    """What is trained.

    Attributes:
        model: The word MODEL of the command line.
        batch: Sequences or pictures of a step, on each rank; None for what the model comes with.
        sequence: Tokens of a sequence; likewise.
        dtype: Of the weights; likewise.
        optimizer: Its word.
        device: "cpu" or "cuda".
    """

    model: str
    batch: int | None = None
    sequence: int | None = None
    dtype: str | None = None
    optimizer: str = "adamw"
    device: str = "cpu"

    def check(self) -> None:
        """Refuse what cannot run, and say what would."""
        for option, value in (("--batch", self.batch), ("--sequence", self.sequence)):
            if value is not None:
                a_size(option, value)
        for option, value, known in (
            ("--dtype", self.dtype, (*DTYPES, None)),
            ("--optimizer", self.optimizer, tuple(OPTIMIZERS)),
            ("--device", self.device, DEVICES),
        ):
            if value not in known:
                raise errors.ArgumentError(_not_one_of(option, value, [word for word in known if word is not None]))


@dataclass(frozen=True)
class Setting:
    """What is recomputed; nothing, unless one of the three says something.

    Attributes:
        name: What the user calls it.
        fields: Of `RecomputeConfig`.
        budget: As `make_plan` takes it.
        plan: A plan as JSON text.
    """

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    budget: str | None = None
    plan: str | None = None

    @property
    def key(self) -> str:
        """The same for settings that say the same, whatever they are called."""
        plan = None if self.plan is None else Plan.from_json(self.plan).digest()
        return hashed([dict(self.fields), self.budget, plan])

    @property
    def words(self) -> str:
        """What it says, on one line."""
        if self.plan is not None:
            return "a plan"
        if self.budget is not None:
            return f"budget {self.budget}"
        said = (f"{name}={value}" for name, value in self.fields.items())
        return ", ".join(said) or "nothing recomputed"

    def on(self, model: torch.nn.Module) -> Plan:
        """What is applied to a model; a budget has become a plan before."""
        if self.plan is not None:
            return Plan.from_json(self.plan)
        return RecomputeConfig(**dict(self.fields)).plan(model)

    def planned(self, plan: str) -> Setting:
        """The same with the plan that its budget led to."""
        return replace(self, plan=plan)


CONTROL = Setting(NAME_OF_CONTROL)


@dataclass(frozen=True)
class Config:
    """A comparison.

    Attributes:
        workload: What is trained.
        settings: How, the control first.
        steps: Timed steps of each process.
        warmup: Steps before these.
        rounds: How often each setting is run.
        capacity: Bytes that a process may take for the step; None for what there is.
        threshold: How many percent slower than its golden figure a setting may be.
    """

    workload: Workload
    settings: tuple[Setting, ...] = (CONTROL,)
    steps: int = 5
    warmup: int = 2
    rounds: int = 3
    capacity: int | None = None
    threshold: float = 5.0

    def check(self) -> None:
        """Refuse what cannot run, and say what would."""
        self.workload.check()
        for name in ("steps", "rounds"):
            a_size(f"--{name}", getattr(self, name))
        a_size("--warmup", self.warmup, least=0)
        if isinstance(self.threshold, bool) or not isinstance(self.threshold, (int, float)) or self.threshold < 0:
            raise errors.ArgumentError(
                f"--threshold is {self.threshold}; expected a number of percent, 0 or more, without a sign. Write for "
                "example --threshold 5"
            )

    def key(self, setting: Setting, ranks: int) -> str:
        """The same for what can stand in for a trial that has been run already."""
        asked = [asdict(self.workload), setting.key, self.steps, self.warmup, self.capacity]
        return hashed([*asked, ranks, torch.__version__, __version__, name_of_cpu()])


def a_size(option: str, value: object, least: int = 1) -> None:
    """Refuse what is no whole number, or too small."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise errors.ArgumentError(errors.not_a_size(option, value, least))


def capacity_of(text: object) -> int:
    """The bytes that `--capacity` means."""
    budget = read_budget(text)
    if budget.bytes is None:
        raise errors.ArgumentError(
            f"--capacity is {text}; expected the bytes that there are. Write for example --capacity 2GiB"
        )
    return budget.bytes


def hashed(data: object) -> str:
    """A short name for plain data."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
