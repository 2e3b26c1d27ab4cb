"""`torch-recompute bench run MODEL`: measures settings of recomputation in training, beside a control without any.

A workload and a list of settings are data, from options or from a file (`--sweep`). The control and every setting take
turns in rounds, each trial in a process of its own (`trials.py`); a setting with a budget is planned first, once, so
that all its rounds run the same plan. A setting that failed in any way is not run again. Trials are kept in a
file of JSON lines, so that a sweep can go on another time. torchrun may start the command once per rank.

A setting's time is the median over rounds of the median step, on the slowest rank; its memory the most of any rank in
any round. Losses are compared with those of the control's first round on the same rank; where the control did not
finish, with those of the first setting that did. Recomputing takes time, which is no reason to fail: only a golden
figure can say that a setting has become slower, takes more memory or learns something else.

Memory and losses are exact; throughput is not. So a drop beyond the threshold by less than the noise (of this run and
of the golden one) is `UNSURE`, and more rounds are run, up to `MOST` times those asked for. Where the control has moved
against its golden figure, the machine has, and the other settings are compared relative to the control.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from .. import RecomputeConfig, __version__, errors
from ..memory.budget import read_budget
from ..plan.settings import BLOCK_FLAG, GRANULARITY_FLAG, add_others_to, content_of
from ..simulation.training_step import OPTIMIZERS
from . import output as out
from . import trials
from .models import DTYPES, PRESETS
from .output import GIB, MIB
from .trials import DONE, MISMATCH, NO_PLAN, OUT, REFUSED, OneProcess, Record, Setting, TrialTask, Workload, worst

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

SCHEMA_VERSION = 3
UNITS = ((GIB, "GiB"), (MIB, "MiB"))
CONTROL = Setting("control")
OK, UNSURE, REGRESSION = "OK", "UNSURE", "PERF REGRESSION"
MEMORY_REGRESSION, LOSS_CHANGED = "MEMORY REGRESSION", "LOSS CHANGED"
RAN = (OK, UNSURE, REGRESSION, MEMORY_REGRESSION, LOSS_CHANGED)
"""The results of settings that finished with the losses of the control."""
MOST = 3
"""The factor by which more rounds than asked for are run, where a verdict is unsure."""
TOLERANCES: Mapping[str, Mapping[str | None, float]] = {
    "cpu": {},
    "cuda": {"fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2, None: 1e-2},
}
PLANNING = -1
"""The number of the round in which plans are made."""
GOLDEN = {"schema_version": 3, "what": "golden figures of torch-recompute bench run"}
"""The first keys of a file of golden figures."""
OPTIONS = (
    *("model", "batch", "sequence", "dtype", "optimizer", "device"),
    *("steps", "warmup", "rounds", "capacity", "threshold", "memory_threshold"),
)
"""The keys that a file of experiments may have at its top."""
FIGURES = {"step_seconds": max, "tflops": min, "allocated_bytes": max, "reserved_bytes": max}
"""The figures of a rank, and the function that makes one for all ranks of theirs."""
OF_FIRST_RECORD = ("dtype", "replay_flops", "flops", "uncounted", "unit", "regions", "predicted_peak_bytes")
"""The fields of a row that are those of rank 0 in the first round."""

Trials = Mapping[str, Sequence[Sequence[Record]]]
"""The rounds of each setting, by its name; a round has a record per rank."""


@dataclass(frozen=True)
class BenchConfig:
    """A comparison: the control comes first among `settings`, and the thresholds are in percent."""

    workload: Workload
    settings: tuple[Setting, ...] = (CONTROL,)
    steps: int = 5
    warmup: int = 2
    rounds: int = 3
    capacity: int | None = None
    threshold: float = 5.0
    memory_threshold: float = 0.5

    def check(self) -> None:
        """Refuses values that cannot run, and says which can."""
        self.workload.check()
        for name in ("steps", "rounds"):
            trials.whole_number(f"--{name}", getattr(self, name))
        trials.whole_number("--warmup", self.warmup, least=0)
        for name, usual in (("threshold", 5), ("memory_threshold", 0.5)):
            value, option = getattr(self, name), f"--{name.replace('_', '-')}"
            if not _number(value, least=0) or value > 100:
                raise errors.ArgumentError(
                    f"{option} is {value}; expected a number of percent, from 0 to 100, without a sign. Write for "
                    f"example {option} {usual}"
                )

    @property
    def tolerance(self) -> float:
        """The relative difference from the control that a loss may have; on a CPU every bit counts."""
        return TOLERANCES[self.workload.device].get(self.workload.dtype, 0.0)

    def key(self, setting: Setting, ranks: int) -> str:
        """Returns a key that is the same for trials that can take each other's place."""
        asked = [asdict(self.workload), setting.key, self.steps, self.warmup, self.capacity]
        return trials.hashed([*asked, ranks, torch.__version__, __version__, trials.cpu_and_threads()])


def read_sweep(path: Path) -> tuple[dict[str, Any], list[Setting]]:
    """Reads the options and the settings of a file of experiments, YAML or JSON.

        model: gpt-tiny
        rounds: 3
        experiments:
          - {name: every layer, recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1}
          - {name: half the activations, budget: 50%}
          - {name: by hand, plan: plan.json}

    Keys at the top are the command's options, and an option on the command line wins. The fields of an experiment are
    those of `RecomputeConfig`, or `budget`, or `plan`, a path relative to the file's folder. The control is always
    there and has no entry. A key that means nothing is refused, unlike in a training configuration, which holds much
    else.

    Raises:
        ArgumentError: It cannot be read, or says something that means nothing.
    """
    try:
        content = dict(content_of(path))
    except OSError as error:
        raise errors.ArgumentError(
            f"--sweep is {path!s}: {out.reason(error)}. Write the path of a file that is there, and that may be read."
        ) from error
    experiments: Any = content.pop("experiments", None)
    _check_keys(str(path), content, (*OPTIONS, "experiments"))
    if not isinstance(experiments, list) or not experiments:
        has = "has no experiments" if experiments is None else f"has experiments: {experiments!r}"
        raise errors.ArgumentError(
            f"--sweep is {path}, which {has}; expected a list. Write for example:\n"
            "      experiments:\n"
            "        - name: every layer\n"
            "          recompute_granularity: full\n"
            "          recompute_method: uniform\n"
            "          recompute_num_layers: 1"
        )
    settings: list[Setting] = []
    taken = {CONTROL.name: "the control's own"}
    for number, entry in enumerate(cast("list[Any]", experiments), 1):
        where = f"{path}, experiment {number}"
        setting = _experiment(path, where, entry)
        if setting.name in taken:
            raise _bad_experiment(where, f"its name is {setting.name!r}, {taken[setting.name]}")
        taken[setting.name] = "that of another experiment"
        settings.append(setting)
    return content, settings


def _bad_experiment(where: str, why: str) -> errors.ArgumentError:
    return errors.ArgumentError(
        f"{where}: {why}. An experiment has a name of its own, and the fields of RecomputeConfig, or budget, or plan. "
        "The control, which recomputes nothing, is always there and has no entry."
    )


def _experiment(path: Path, where: str, entry: Any) -> Setting:
    if not isinstance(entry, Mapping):
        raise _bad_experiment(where, f"it is {entry!r}")
    fields = {str(key): value for key, value in cast("Mapping[Any, Any]", entry).items()}
    name = fields.pop("name", None)
    if not isinstance(name, str) or not name:
        raise _bad_experiment(where, "it has no name" if name is None else f"its name is {name!r}")
    _check_keys(where, fields, (*RecomputeConfig.names(), "name", "budget", "plan"))
    if not fields:
        raise _bad_experiment(where, "it says nothing but its name")
    budget, plan = fields.pop("budget", None), fields.pop("plan", None)
    return setting_of(name, fields, budget, None if plan is None else path.parent / str(plan), f"{path}: {name}")


def setting_of(name: str, fields: Mapping[str, Any], budget: object, plan: Path | None, where: str = "") -> Setting:
    """Returns a setting; refuses one that has two sources, or one that cannot be read."""
    place = f"{where}: " if where else ""
    given = [word for word, value in (("budget", budget), ("plan", plan)) if value is not None]
    given += [next(iter(fields))] if fields else []
    if len(given) > 1:
        raise errors.ArgumentError(
            f"{place}{given[0]} and {given[1]} both say what is recomputed. Leave one of them out: the recompute "
            "fields, budget and plan exclude each other."
        )
    if budget is not None:
        read_budget(budget)
        return Setting(name, budget=str(budget))
    if plan is not None:
        return Setting(name, plan=out.read_plan(plan, f"{where}: plan" if where else "--plan").to_json())
    try:
        return Setting(name, RecomputeConfig.from_dict(fields).to_dict())
    except errors.ArgumentError as error:
        raise errors.ArgumentError(f"{place}{error}") from None


def _check_keys(where: str, keys: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in keys:
        if key not in known:
            nearest = difflib.get_close_matches(str(key), known, 1, 0.0)[0]
            raise errors.ArgumentError(
                f"{where}: {key!r} is not known, so it would have no effect; the nearest is {nearest!r}. Write "
                f"{nearest}:"
            )


def _number(value: Any, least: float | None = None) -> bool:
    """Returns whether it is a finite number above 0, or from `least` on."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return (value > 0 if least is None else value >= least) and value < math.inf


def _count(value: Any) -> bool:
    return isinstance(value, int) and _number(value)


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _categories(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(count, int) and _number(count, least=0) for count in cast("dict[str, Any]", value).values()
    )


def _curves(value: Any) -> bool:
    """Returns whether it has the exact losses of each rank, all finite."""
    try:
        curves = [[math.isfinite(float.fromhex(loss)) for loss in curve] for curve in value]
    except (TypeError, ValueError, OverflowError):
        return False
    return bool(curves) and all(curve and all(curve) for curve in curves)


_ABOVE, _WHOLE = "a finite number above 0", "a whole number above 0"
FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "name": (_text, "a name"),
    "step_seconds": (_number, _ABOVE),
    "per_second": (_number, _ABOVE),
    "flops": (lambda value: value is None or _count(value), f"{_WHOLE}, or null where they were not counted"),
    "tflops": (lambda value: value is None or _number(value), f"{_ABOVE}, or null where FLOPs were not counted"),
    "noise_percent": (lambda value: _number(value, least=0), "a finite number from 0 on"),
    "pace_seconds": (_number, _ABOVE),
    "allocated_bytes": (_count, _WHOLE),
    "by_category": (_categories, "whole numbers from 0 on, by category"),
    "losses": (_curves, "for each rank the losses of its steps, as hexadecimals of finite numbers"),
    "plan": (_text, "the digest of a plan"),
    "ranks": (_count, _WHOLE),
    "items": (_count, _WHOLE),
    "device": (_text, "the name of a device"),
    "parameters": (_count, _WHOLE),
    "torch": (_text, "a version"),
}
"""The check of each field of a golden file, and what is expected, in words."""


@dataclass(frozen=True)
class Figure:
    """The golden figures of a setting: throughput of all ranks, the step on the slowest, the most memory, the losses.

    `tflops` and `flops` are None where FLOPs could not be counted. `pace_seconds` is the time of a fixed piece of work,
    and `plan` the digest of the plan that was in the model.
    """

    name: str
    step_seconds: float
    per_second: float
    flops: int | None
    tflops: float | None
    noise_percent: float
    pace_seconds: float
    allocated_bytes: int
    by_category: Mapping[str, int]
    losses: Sequence[Sequence[str]]
    plan: str


def _fields(where: str, data: Any, kind: type[Any], *more: str) -> dict[str, Any]:
    """Returns the fields of a part of a golden file, checked one by one; `more` are checked elsewhere."""
    if not isinstance(data, dict):
        raise ValueError(f"{where} is {data!r}; expected fields by name")
    given = cast("dict[str, Any]", data)
    known = {field.name for field in fields(kind)} - {"source"}
    for name in sorted({*given, *known}, key=lambda name: (name in known, name)):
        if name not in known:
            raise ValueError(f"{where}: {name} is not known")
        if name not in given:
            raise ValueError(f"{where}: {name} is missing; expected {FIELDS[name][1] if name in FIELDS else 'it'}")
        if name in FIELDS and name not in more and not FIELDS[name][0](given[name]):
            raise ValueError(f"{where}: {name} is {given[name]!r}; expected {FIELDS[name][1]}")
    return given


def _figure(data: Any, items: int, cpu: bool) -> Figure:
    """Returns a golden figure, whose fields are each valid and agree with each other."""
    name = cast("dict[str, Any]", data).get("name") if isinstance(data, dict) else None
    where = f"setting {name!r}"
    found = Figure(**_fields(where, data, Figure))
    expected: dict[str, float | None] = {"per_second": items / found.step_seconds}
    expected["tflops"] = found.flops / found.step_seconds / 1e12 if found.flops else None
    for field, value in expected.items():
        given = getattr(found, field)
        if (given is None) != (value is None) or (value and not math.isclose(given, value, rel_tol=1e-6)):
            raise ValueError(f"{where}: {field} is {given}, which step_seconds, flops and items make {value}")
    if cpu and sum(found.by_category.values()) != found.allocated_bytes:
        raise ValueError(f"{where}: allocated_bytes is {found.allocated_bytes}, which is not the sum of by_category")
    return found


FIGURE_FIELDS = tuple(field.name for field in fields(Figure))


@dataclass(frozen=True)
class Golden:
    """Golden figures, in a file: earlier results to compare with, by the keys of their settings.

    They are of one workload on one kind of device; those of another are refused, because the comparison would say
    nothing. A setting is compared with its own figure, found by its content and not by its name. One that has none is
    compared with the control's throughput, as the published harness compares everything with one figure per workload.
    Every figure is checked when it is read. `items` are the tokens or samples of a step, of all ranks.
    """

    workload: Workload
    ranks: int
    items: int
    device: str
    parameters: int
    figures: Mapping[str, Figure]
    torch: str = torch.__version__
    source: str = ""

    @staticmethod
    def read(path: Path) -> Golden:
        """Reads the figures of a file."""
        try:
            data: Any = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(data, dict) or any(cast("Any", data).pop(key, None) != GOLDEN[key] for key in GOLDEN):
                raise ValueError(f"no {GOLDEN['what']}, version {GOLDEN['schema_version']}")
            given = _fields("the file", data, Golden)
            workload = Workload(**_fields("workload", given.pop("workload"), Workload, "device"))
            figures: Any = given.pop("figures")
            if not isinstance(figures, dict) or not figures:
                raise ValueError(f"figures is {figures!r}; expected at least one")
            known = cast("dict[str, Any]", figures).items()
            checked = {key: _figure(value, given["items"], workload.device == "cpu") for key, value in known}
            return Golden(workload, figures=checked, source=str(path), **given)
        except OSError as error:
            why = out.reason(error)
        except ValueError as error:
            why = f"no JSON: {error}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise errors.ArgumentError(
            f"--golden is {path}: {why}. Write the path of a file that --save-golden has written, on the same kind of "
            "device."
        )

    def write(self, path: Path) -> None:
        """Writes them to a file, which `read` reads."""
        data = {**GOLDEN, **asdict(self)}
        del data["source"]
        out.write_text("--save-golden", path, json.dumps(data, indent=1) + "\n")

    def of(self, setting: Setting) -> Figure:
        """Returns the figure that a setting is compared with."""
        found = self.figures.get(setting.key) or self.figures.get(CONTROL.key)
        if found is None:
            others = ", ".join(repr(figure.name) for figure in self.figures.values()) or "nothing"
            raise errors.ArgumentError(
                f"{self.source} has no figure for {setting.name!r} and none for the control, only for {others}. "
                "Run it once with --save-golden, or leave --golden out."
            )
        return found

    def check_workload(self, workload: Workload, ranks: int) -> None:
        """Refuses figures of another workload, or of more or fewer ranks."""
        for what, mine in asdict(self.workload).items():
            self._check(what, mine, getattr(workload, what))
        self._check("ranks", self.ranks, ranks)

    def check_machine(self, records: Sequence[Record]) -> None:
        """Refuses figures of another device, or of another model or batch of the same name."""
        self._check("device", self.device, records[0].device)
        self._check("number of parameters", self.parameters, records[0].parameters)
        self._check("number of items in a step", self.items, _items(records))

    def _check(self, what: str, mine: object, ours: object) -> None:
        if mine != ours:
            raise errors.ArgumentError(
                f"the figures in {self.source} are of another {what}: {mine}, here {ours}. A comparison would say "
                "nothing. Write figures of your own with --save-golden, or leave --golden out."
            )


class Journal:
    """The trials that have been run already, one JSON object a line; without a path nothing is kept.

    A line is written when a trial ends, in whatever way. Lines are found by the key of the trial, so a file may hold
    several sweeps, and a setting that was changed is run again. A last line that is cut off is left out; a
    trial that failed or was refused is run again, because what was wrong may have been mended.
    """

    def __init__(self, path: Path | None, *, fresh: bool = False) -> None:
        self._path = path
        self._known: dict[tuple[str, int], list[Record]] = {}
        if path is None:
            return
        with out.writing("--results", path):
            if fresh:
                path.unlink(missing_ok=True)
            with path.open("a+", encoding="utf-8", errors="replace") as file:
                file.seek(0)
                lines = file.read().split("\n")
                if lines[-1]:
                    file.write("\n")  # what was cut off stays a line of its own
        for number, line in enumerate(lines, 1):
            if line.strip():
                self._read(line, number)

    def _read(self, line: str, number: int) -> None:
        try:
            data: Any = json.loads(line)
            if data["schema_version"] != SCHEMA_VERSION:
                raise ValueError(f"schema_version is {data['schema_version']}")
            self._known[data["key"], data["round"]] = [Record(**record) for record in data["ranks"]]
        except (ValueError, KeyError, TypeError) as error:
            if not line.startswith('{"schema_version"') or line.endswith("}"):  # not one of ours that was cut off
                raise errors.ArgumentError(
                    f"--results is {self._path!s}, whose line {number} is no result of bench run ({error!s}). Write "
                    "the path of another file, or --fresh to begin this one again."
                ) from None

    def get(self, key: str, number: int) -> list[Record] | None:
        """Returns the records of a trial that need not be run again; None if it has to be run."""
        records = self._known.get((key, number))
        again = (trials.FAILED, REFUSED, trials.STOPPED)
        return None if records is None or any(record.status in again for record in records) else records

    def add(self, key: str, name: str, number: int, records: Sequence[Record]) -> None:
        """Adds a trial to the file."""
        if self._path is None:
            return
        ranks = [asdict(record) for record in records]
        data = {"schema_version": SCHEMA_VERSION, "key": key, "name": name, "round": number, "ranks": ranks}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(data) + "\n")


@dataclass(frozen=True)
class OnRank:
    """One rank of a setting: how its worst trial ended, its median step, and the most bytes of any trial."""

    rank: int
    status: str
    step_seconds: float | None
    tflops: float | None
    per_second: float | None
    allocated_bytes: int | None
    reserved_bytes: int | None

    @staticmethod
    def of(rank: int, records: Sequence[Record]) -> OnRank:
        """Computes the figures of a rank from its records."""
        medians = [statistics.median(record.seconds) for record in records if record.seconds]
        seconds = statistics.median(medians) if medians else None
        flops, items = records[0].flops, records[0].items
        return OnRank(
            rank,
            worst(records).status,
            seconds,
            flops / seconds / 1e12 if flops and seconds else None,
            items / seconds if seconds else None,
            _over(max, (record.allocated_bytes for record in records)),
            _over(max, (record.reserved_bytes for record in records)),
        )


@dataclass(frozen=True)
class BenchRow:
    """One setting beside the control; its figures are those of its ranks together, as `FIGURES` says.

    `result` is one of `RAN`, `MISMATCH`, or how it ended, and `detail` says why. Of its `rounds`, `taken` are from the
    file of results. `change_percent` is the throughput beside the golden figure, if `relative` relative to the control,
    and `compared_with` names the setting whose losses its own were compared with.
    """

    name: str
    setting: str
    result: str
    detail: str
    rounds: int
    taken: int
    ranks: Sequence[OnRank]
    step_seconds: float | None
    tflops: float | None
    per_second: float | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    noise_percent: float | None
    pace_seconds: float | None
    by_category: Mapping[str, int]
    losses: Sequence[Sequence[str]]
    plan: str
    dtype: str
    shortage: Mapping[str, Any] | None
    replay_percent: float | None
    replay_flops: int | None
    flops: int | None
    uncounted: str
    unit: str
    regions: int
    predicted_peak_bytes: int | None
    compared_with: str | None
    golden: Figure | None = None
    change_percent: float | None = None
    relative: bool = False
    control_time_percent: float | None = None
    control_memory_percent: float | None = None


@dataclass(frozen=True)
class Result:
    """The result of a comparison, one row per setting, the control first.

    `noise_percent` is the most of any row, `moved` the control beside its golden figure.
    """

    config: BenchConfig
    rows: Sequence[BenchRow]
    device: str
    parameters: int
    noise_percent: float | None
    golden: Golden | None = None
    moved: Moved | None = None

    @property
    def taken(self) -> int:
        """The number of trials that were taken from the file of results instead of run."""
        return sum(row.taken for row in self.rows)

    @property
    def exit_code(self) -> int:
        """2 where a setting was refused, 1 where one failed in any other way, 3 where a budget has no plan, else 0.

        The control may run out of memory: that is what the others are there for. What a busy machine leaves unsure is
        printed and fails nobody.
        """
        alone = len(self.rows) == 1 or self.rows[0].result != OUT
        results = {row.result for row in (self.rows if alone else self.rows[1:])} - {OK, UNSURE}
        if REFUSED in results:
            return 2
        if results - {NO_PLAN}:
            return 1
        return 3 if results else 0

    @property
    def how(self) -> dict[str, str]:
        """The way in which each kind of figure was obtained, in words."""
        config = self.config
        cuda = config.workload.device == "cuda"
        tolerance = config.tolerance
        ran = {row.name for row in self.rows if row.step_seconds is not None}
        if not ran:
            return {}
        equal = [row for row in self.rows if row.compared_with and row.result != MISMATCH]
        others = [row.name for row in equal if row.name != row.compared_with or row.rounds > 1]
        how = {
            "time": f"median of {config.steps} steps after {config.warmup}, and of {_counted(config.rounds)} in which "
            "all settings take turns, each in a fresh process",
            "TFLOP/s": "the model's matrix products, replays left out, per device; by PyTorch's formulas"
            + ("" if cuda else ", which know no attention kernel of a CPU"),
            "allocated": f"{'by the allocator' if cuda else 'by tensors alive'}, at the peak of a step",
            "reserved": f"taken from the {'driver by the allocator' if cuda else 'system, beyond what libraries take'}",
            "more": "than the control, in percent; replay: FLOPs in percent of the model's",
        }
        if others:
            bits = f"within {tolerance:g} of each" if tolerance else "to the last bit"
            how["losses"] = f"equal {bits} to those of {equal[0].compared_with}: {', '.join(others)}"
        return how

    def as_data(self) -> dict[str, Any]:
        """Returns the result ready for JSON; bytes and FLOPs are integers."""
        return {
            "torch_recompute": __version__,
            "torch": torch.__version__,
            "device": self.device,
            "parameters": self.parameters,
            "config": asdict(self.config),
            "how": self.how,
            "noise_percent": self.noise_percent,
            "golden": None if self.golden is None else {"file": self.golden.source, "torch": self.golden.torch},
            "taken_from_results": self.taken,
            "exit_code": self.exit_code,
            "notes": notes(self),
            "rows": [asdict(row) for row in self.rows],
        }

    def to_golden(self) -> Golden:
        """Returns the figures to compare with later: of settings that ran, with losses that are finite."""
        figures: dict[str, Figure] = {}
        for row, setting in zip(self.rows, self.config.settings, strict=True):
            known: dict[str, Any] = {name: getattr(row, name) for name in FIGURE_FIELDS}
            known["noise_percent"] = row.noise_percent or 0.0
            if row.result in RAN and _curves(row.losses):
                figures[setting.key] = Figure(**known)
        items = next(
            (round(row.per_second * row.step_seconds) for row in self.rows if row.per_second and row.step_seconds), 0
        )
        ranks = len(self.rows[0].ranks)
        return Golden(self.config.workload, ranks, items, self.device, self.parameters, figures)


def judged(config: BenchConfig, ended: Trials, golden: Golden | None, taken: Mapping[str, int] | None = None) -> Result:
    """Returns the result of trials; `taken` is how many of each setting were in the file of results."""
    finished = [setting for setting in config.settings if _end(ended[setting.name]).status == DONE]
    reference = finished[0] if finished else CONTROL
    rows = [
        _row(config, setting, ended, reference.name, (taken or {}).get(setting.name, 0)) for setting in config.settings
    ]
    control = rows[0]
    moved = None if golden is None else _moved(control, golden.figures.get(CONTROL.key))
    rows = [
        replace(
            row if golden is None or row.result != OK else _against(config, row, setting, golden, moved),
            control_time_percent=_more(row.step_seconds, control.step_seconds),
            control_memory_percent=_more(row.allocated_bytes, control.allocated_bytes),
        )
        for row, setting in zip(rows, config.settings, strict=True)
    ]
    known = [record for rounds in ended.values() for records in rounds for record in records]
    device = next((record.device for record in known if record.device), "")
    noise = _over(max, (row.noise_percent for row in rows))
    return Result(config, rows, device, max(record.parameters for record in known), noise, golden, moved)


def _end(rounds: Sequence[Sequence[Record]]) -> Record:
    return worst([record for records in rounds for record in records])


def _more(value: float | None, than: float | None) -> float | None:
    """Returns how much more one figure is, in percent; None where one is not known."""
    return None if value is None or not than else 100 * (value / than - 1)


def _items(records: Sequence[Record]) -> int:
    return sum(record.items for record in records)


def _noise(rounds: Sequence[Sequence[Record]]) -> float | None:
    """Returns the noise of a setting's step time, in percent: between its rounds, and between the halves of its run.

    Of many rounds, those count between which their median is with 95 %; of few, all.
    """
    steps = [[max(each) for each in zip(*(record.seconds for record in records), strict=True)] for records in rounds]
    medians, inorder = sorted(map(statistics.median, steps)), [step for each in steps for step in each]
    if len(inorder) < 2:
        return None
    outer = max(0, int((len(medians) - 1.96 * math.sqrt(len(medians))) / 2))
    half = len(inorder) // 2
    halves = sorted((statistics.median(inorder[:half]), statistics.median(inorder[half:])))
    return max(100 * (most / least - 1) for least, most in ((medians[outer], medians[-1 - outer]), halves))


class Moved(NamedTuple):
    """The change of the control's throughput against its golden figure, in percent, and its noise."""

    percent: float
    noise: float

    @property
    def sure(self) -> bool:
        """Whether it has moved by more than noise."""
        return abs(self.percent) > self.noise


def _moved(control: BenchRow, figure: Figure | None) -> Moved | None:
    change = None if figure is None else _more(control.per_second, figure.per_second)
    if figure is None or change is None:
        return None
    return Moved(change, (control.noise_percent or 0.0) + figure.noise_percent)


def _against(config: BenchConfig, row: BenchRow, setting: Setting, golden: Golden, moved: Moved | None) -> BenchRow:
    """Compares a row of a setting that ran well with its golden figure; the exact verdicts come first."""
    figure = golden.of(setting)
    assert row.per_second is not None
    change = 100 * (row.per_second / figure.per_second - 1)
    noise = (row.noise_percent or 0.0) + figure.noise_percent
    relative = moved is not None and moved.sure and row.name != CONTROL.name
    if moved is not None and relative:
        change = 100 * ((1 + change / 100) / (1 + moved.percent / 100) - 1)
        noise = (row.noise_percent or 0.0) + moved.noise
    elif row.pace_seconds:
        noise += max(0.0, 100 * (row.pace_seconds / figure.pace_seconds - 1))  # the machine was that much slower
    found: list[tuple[str, str]] = []
    if setting.key in golden.figures:
        found += _losses_changed(config, row, figure)
        if setting.budget is None or row.plan == figure.plan:
            found += _memory_grew(config, row, figure)
    if change < -config.threshold:
        than = " relative to the control" if relative else ""
        text = f"throughput {-change:.1f} % below the golden figure of {figure.name}{than}; allowed are "
        text += f"{config.threshold:g} %; after {_counted(row.rounds)}, noise {noise:.1f} %"
        found.append((REGRESSION if change < -config.threshold - noise else UNSURE, text))
    result = found[0][0] if found else OK
    detail = "; and ".join(text if verdict == result else f"{verdict}: {text}" for verdict, text in found)
    return replace(row, result=result, detail=detail, golden=figure, change_percent=change, relative=relative)


def _counted(rounds: int) -> str:
    return "one round" if rounds == 1 else f"{rounds} rounds"


def _losses_changed(config: BenchConfig, row: BenchRow, figure: Figure) -> list[tuple[str, str]]:
    """Returns a verdict on the first loss that differs by more than the last bits, which another torch may change."""
    allowed = TOLERANCES["cuda"].get(config.workload.dtype or row.dtype, TOLERANCES["cuda"][None])
    first = _first_apart(row.losses, figure.losses, allowed)
    return (
        [(LOSS_CHANGED, f"{first}; allowed is a share of {allowed:g}; after {_counted(row.rounds)}")] if first else []
    )


def _first_apart(
    ours: Sequence[Sequence[str]], theirs: Sequence[Sequence[str]], allowed: float, whose: str = "the golden one"
) -> str:
    """Returns where losses first differ from others by more than a share of them, in words; "" where they do not."""
    for rank, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for step, (here, there) in enumerate(zip(mine, other), 1):  # noqa: B905 - as many steps as both have
            a, b = float.fromhex(here), float.fromhex(there)
            if here != there and not abs(a - b) <= allowed * abs(b):
                return f"rank {rank}, step {step}: the loss is {a!r} ({here}), {whose} {b!r} ({there})"
    return ""


def _memory_grew(config: BenchConfig, row: BenchRow, figure: Figure) -> list[tuple[str, str]]:
    """Returns a verdict on a peak above the golden one by more than its threshold, with the categories that grew."""
    now, then = row.allocated_bytes or 0, figure.allocated_bytes
    more = 100 * (now / then - 1)
    if more <= config.memory_threshold:
        return []
    apart = {name: count - figure.by_category.get(name, 0) for name, count in row.by_category.items()}
    grew = ", ".join(f"{name} {errors.size(count)}" for name, count in apart.items() if count > 0) or "no category"
    text = f"the peak is {_exactly(now)}, {more:.2f} % above the golden {_exactly(then)}; allowed are "
    text += f"{config.memory_threshold:g} %; more is in: {grew}; after {_counted(row.rounds)}"
    return [(MEMORY_REGRESSION, text)]


def _exactly(count: int) -> str:
    return f"{errors.size(count)} ({count})"


def _row(config: BenchConfig, setting: Setting, ended: Trials, reference: str, taken: int) -> BenchRow:
    rounds = ended[setting.name]
    end, first = _end(rounds), rounds[0][0]
    ranks = [OnRank.of(rank, [records[rank] for records in rounds]) for rank in range(len(rounds[0]))]
    figures = {name: _over(choose, (getattr(rank, name) for rank in ranks)) for name, choose in FIGURES.items()}
    records = [record for each in rounds for record in each]
    largest = max(records, key=lambda record: record.allocated_bytes or 0)
    result, detail, done = end.status, end.detail, end.status == DONE
    if done:
        detail = _difference(config, rounds, ended[reference][0], reference)
        result = MISMATCH if detail else OK
    return BenchRow(
        name=setting.name,
        setting=setting.words,
        result=result,
        detail=detail,
        rounds=len(rounds),
        taken=taken,
        ranks=ranks,
        **figures,
        per_second=_items(rounds[0]) / figures["step_seconds"] if figures["step_seconds"] else None,
        noise_percent=_noise(rounds) if done else None,
        pace_seconds=_over(statistics.median, (second for record in records for second in record.pace)),
        by_category=largest.by_category,
        losses=[record.losses for record in rounds[0]] if done else [],
        plan=first.digest,
        **{name: getattr(first, name) for name in OF_FIRST_RECORD},
        shortage=end.shortage,
        replay_percent=100 * (first.replay_flops or 0) / first.flops if first.flops else None,
        compared_with=reference if done else None,
    )


def _difference(config: BenchConfig, rounds: Sequence[Sequence[Record]], wanted: Sequence[Record], name: str) -> str:
    """Returns where losses first differ from those `wanted`, in words; "" where they do not."""
    theirs = [record.losses for record in wanted]
    for number, records in enumerate(rounds, 1):
        first = _first_apart([record.losses for record in records], theirs, config.tolerance, f"that of {name}")
        if first:
            return f"round {number}, {first}"
    return ""


def _over(choose: Any, values: Any) -> Any:
    """Returns the chosen one of the values that are known; None where none is."""
    known = [value for value in values if value is not None]
    return choose(known) if known else None


def ticks(config: BenchConfig) -> int:
    """Returns how often `run` reports progress."""
    return len(config.settings) * config.rounds + sum(setting.budget is not None for setting in config.settings)


def run(
    config: BenchConfig,
    *,
    journal: Journal,
    ranks: OneProcess,
    golden: Golden | None = None,
    progress: Callable[[str], object] = lambda _: None,
) -> Result:
    """Compares all settings with the control.

    Args:
        config: The comparison.
        journal: The trials that have been run already.
        ranks: The ranks that run it together.
        golden: Figures to compare with.
        progress: Called after each of the `ticks(config)` pieces of work, with a word on it.

    Raises:
        ArgumentError: The workload cannot be run at all, or the golden figures are of something else.
    """
    bench = _Rounds(config, journal, ranks, progress)
    settings = list(config.settings)
    for number in range(config.rounds):
        for place, setting in enumerate(settings):
            if number == 0 and setting.budget is not None:
                settings[place] = setting = bench.planned(setting)
            end = bench.run(setting, number)
            if place == 0 and end is not None and worst(end).status == REFUSED:
                raise errors.ArgumentError(worst(end).detail)
            if golden is not None and end is not None and worst(end).status == DONE:
                golden.check_machine(end)
    bench.limit = f"at most {MOST * config.rounds}"
    for number in range(config.rounds, MOST * config.rounds):
        unsure = {row.name for row in judged(config, bench.ended, golden).rows if row.result == UNSURE}
        for setting in settings if unsure else ():
            done = _end(bench.ended[setting.name]).status == DONE
            if done and (setting.name in unsure or setting.name == CONTROL.name):
                bench.run(setting, number)
    return judged(config, bench.ended, golden, bench.taken)


class _Rounds:
    """The rounds of all settings: runs the trials that the journal does not have, and collects their records.

    Attributes:
        ended: The rounds of each setting so far, by name.
        taken: The number of trials of each setting that were in the journal.
        limit: The number of rounds, in words for the progress.
    """

    def __init__(
        self, config: BenchConfig, journal: Journal, ranks: OneProcess, progress: Callable[[str], object]
    ) -> None:
        self._config, self._journal, self._ranks, self._progress = config, journal, ranks, progress
        self.ended: dict[str, list[list[Record]]] = {setting.name: [] for setting in config.settings}
        self.taken = dict.fromkeys(self.ended, 0)
        self.limit = str(config.rounds)

    def planned(self, setting: Setting) -> Setting:
        """Returns a setting with a plan for its budget; where no plan fits, that is its first and last round."""
        records = self._records_of(setting, PLANNING)
        if worst(records).status != DONE:
            self.ended[setting.name].append(records)
        return replace(setting, plan=records[0].plan)

    def run(self, setting: Setting, number: int) -> list[Record] | None:
        """Runs one round of a setting and returns the ranks' records; None if its last round did not end well."""
        rounds = self.ended[setting.name]
        if rounds and worst(rounds[-1]).status != DONE:
            self._progress(f"{setting.name}: {worst(rounds[-1]).status}, not run again")
            return None
        rounds.append(self._records_of(setting, number))
        return rounds[-1]

    def _records_of(self, setting: Setting, number: int) -> list[Record]:
        """Returns the ranks' records of a trial; one that rank 0 has in its journal is not run again."""
        config, ranks = self._config, self._ranks
        key = config.key(setting, ranks.count)
        text = ranks.shared(lambda: json.dumps([asdict(record) for record in self._journal.get(key, number) or ()]))
        known = [Record(**record) for record in json.loads(text)]
        where = f"{setting.name}: " + ("planning" if number == PLANNING else f"round {number + 1} of {self.limit}")
        if known:
            self.taken[setting.name] += 1
            self._progress(f"{where}: known from the results")
            return known
        task = TrialTask(config.workload, setting, config.steps, config.warmup, config.capacity, count=number == 0)
        records = ranks.run(task)
        self._journal.add(key, setting.name, number, records)
        self._progress(f"{where}: {worst(records).status}")
        return records


def add_command(commands: Any) -> None:
    """Adds `torch-recompute bench run` to the command line."""
    benchmarks = out.new_command(commands, "bench")
    parser = out.new_command(
        benchmarks.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True),
        "run",
        "train a model with settings of recomputation, beside a control: TFLOP/s, memory, losses, golden figures",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help=f"{' or '.join(trials.SMALL)}; or what torch-recompute plan takes: one of {', '.join(PRESETS)}, a "
        "config.json, or pkg.module:name of a function that returns (model, batch)",
    )
    parser.add_argument("--sweep", type=Path, metavar="FILE.yaml", help="a list of experiments, see docs/bench-run.md")
    parser.add_argument("--budget", metavar="BYTES", help='plan for a peak, as 24GiB; or for a share, as "40%%"')
    parser.add_argument("--plan", type=Path, metavar="FILE.json", help="apply this plan, of torch-recompute plan")
    _add_workload_options(parser)
    _add_golden_options(parser)
    parser.add_argument("--results", type=Path, metavar="FILE.jsonl", help="where trials are kept, and not run again")
    parser.add_argument("--fresh", action="store_true", help="begin the file of results again")
    RecomputeConfig.add_arguments(parser)
    add_others_to(parser, RecomputeConfig.names())
    out.add_options(parser, command)


def _add_workload_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the step to train, and for how often it is run."""
    for name, about in (
        ("batch", "sequences or pictures in a step, on each rank (1; of the tiny models 4)"),
        ("sequence", "tokens in a sequence (the model's, at most 4096)"),
        ("steps", f"timed steps of each process ({BenchConfig.steps})"),
        ("warmup", f"steps before these ({BenchConfig.warmup})"),
        ("rounds", f"processes of each setting, all settings taking turns ({BenchConfig.rounds})"),
    ):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=about)
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (the model's own)")
    parser.add_argument("--optimizer", metavar="NAME", help=f"{', '.join(OPTIMIZERS)} ({Workload.optimizer})")
    parser.add_argument("--device", choices=trials.DEVICES, help="(cuda where there is one)")
    parser.add_argument(
        "--capacity", metavar="BYTES", help="what a process may take for the step, as 2GiB: a device of that size"
    )


def _add_golden_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options for figures to compare with, and for how far from them a setting may be."""
    parser.add_argument("--golden", type=Path, metavar="FILE.json", help="compare with these figures")
    parser.add_argument("--save-golden", type=Path, metavar="FILE.json", help="write figures to compare with later")
    for name, figure in (("threshold", "below"), ("memory-threshold", "of memory above")):
        usual = getattr(BenchConfig, name.replace("-", "_"))
        about = f"{figure} the golden figure allowed ({usual:g})"
        parser.add_argument(f"--{name}", type=float, metavar="PERCENT", help=about)


def command(args: argparse.Namespace) -> int:
    """Runs `torch-recompute bench run` and returns its exit code."""
    config, results = _read(args)
    config.check()
    trials.check_capacity(config.capacity, config.workload.device)
    if config.workload.device == "cuda" and not torch.cuda.is_available():
        raise errors.ArgumentError(
            f"--device is cuda, but torch {torch.__version__} sees no such device here. Write --device cpu"
        )
    path: Path | None = args.save_golden
    if path is not None:
        out.check_folder("--save-golden", path)
    output = out.Output.of(args)
    ranks = trials.ranks_of_environment()
    golden = None
    if args.golden is not None:
        golden = Golden.read(args.golden)
        golden.check_workload(config.workload, ranks.count)
        for setting in config.settings:
            golden.of(setting)
    first = ranks.rank == 0
    journal = Journal(results if first else None, fresh=args.fresh)
    with replace(output, quiet=output.quiet or not first).progress(ticks(config)) as progress:
        seen = run(config, journal=journal, ranks=ranks, golden=golden, progress=progress)
    ranks.leave()
    if first:
        saved = seen.to_golden()
        if path is not None and saved.figures:
            saved.write(path)
        output.give(
            lambda: out.document("bench run", SCHEMA_VERSION, seen.as_data()),
            lambda console: _print(console, seen, saved, path),
        )
    return seen.exit_code


def _read(args: argparse.Namespace) -> tuple[BenchConfig, Path | None]:
    """Returns the comparison that a command line describes, and the file for its trials."""
    names = (*RecomputeConfig.names(), GRANULARITY_FLAG, BLOCK_FLAG)
    fields = RecomputeConfig.from_args(argparse.Namespace(**{name: getattr(args, name) for name in names})).to_dict()
    results, options = args.results, dict[str, Any]()
    settings = [CONTROL]
    if args.sweep is not None:
        given = [option for option, value in (("--budget", args.budget), ("--plan", args.plan)) if value is not None]
        given += [f"--{name}" for name in fields]
        if given:
            raise errors.ArgumentError(
                f"{given[0]} says what is recomputed, and so does the file of --sweep. Make it an experiment in the "
                "file, or leave --sweep out."
            )
        options, found = read_sweep(args.sweep)
        settings += found
        results = results or args.sweep.with_suffix(".results.jsonl")
    elif fields or args.budget is not None or args.plan is not None:
        settings.append(setting_of("setting", fields, args.budget, args.plan))
    if args.fresh and results is None:
        raise errors.ArgumentError(errors.goes_with("--fresh", "--results"))
    for option in ("--threshold", "--memory-threshold"):
        if getattr(args, option[2:].replace("-", "_")) is not None and args.golden is None:
            raise errors.ArgumentError(errors.goes_with(option, "--golden"))
    options.update({name: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None})
    return _config(settings, options), results


def _config(settings: Sequence[Setting], options: dict[str, Any]) -> BenchConfig:
    """Returns the comparison of settings under the options of a command line or of a file of experiments."""
    if options.get("model") is None:
        raise errors.ArgumentError(
            "bench run needs a MODEL: on the command line, or as model: in the file of --sweep. Write for example "
            "torch-recompute bench run gpt-tiny"
        )
    options.setdefault("device", "cuda" if torch.cuda.is_available() else "cpu")
    capacity = None
    if options.get("capacity") is not None:
        with contextlib.suppress(errors.ArgumentError):
            capacity = read_budget(options["capacity"]).bytes
        if capacity is None:
            raise errors.ArgumentError(
                f"--capacity is {options['capacity']}; expected the bytes that there are. Write for example "
                "--capacity 2GiB"
            )
        options["capacity"] = capacity
    workload = {name: options.pop(name) for name in Workload.__dataclass_fields__ if name in options}
    return BenchConfig(Workload(**workload), tuple(settings), **options)


def _print(console: Console, result: Result, saved: Golden, path: Path | None) -> None:
    """Prints the tables, the verdicts, and which golden figures were written to `path`."""
    workload = result.config.workload
    title = f"{workload.model}, {result.parameters:,} parameters, {workload.optimizer}, on {result.device}"
    console.print(title, style="bold", markup=False)
    for table in _tables(result):
        console.print(table)
    for line in notes(result):
        console.print(line, markup=False)
    for row in result.rows:
        if row.result != OK:
            console.print(f"{row.result}: {row.name}: {row.detail}", style="bold red", markup=False)
        if row.shortage and row.shortage["verdict"]:
            console.print(f"  {row.shortage['verdict']}. Write: {row.shortage['write']}", markup=False)
    if path is not None:
        names = "; ".join(figure.name for figure in saved.figures.values())
        text = f"Golden figures of {names} written to {path}." if names else "No golden figure was written: none ran."
        console.print(text, markup=False)
    for label, text in result.how.items():
        console.print(f"{label[0].upper()}{label[1:]}: {text}.", style="dim", markup=False)


def _tables(result: Result) -> Iterator[Table]:
    """Yields the table of settings and, where there is something in them, those of ranks and of memory that ran out."""
    from rich.text import Text

    control = result.rows[0]
    most = max((row.allocated_bytes or 0 for row in result.rows), default=0)
    size, unit = next((unit for unit in UNITS if most >= 10 * unit[0]), UNITS[-1])
    titles = ("TFLOP/s", f"{control.unit}\nper s", f"alloc.\n{unit}", f"reser.\n{unit}")
    golden = ["vs\ngolden"] if result.golden else []
    kept = "rounds\n(kept)" if result.taken else "rounds"
    table = _table("", titles[0], *golden, *titles[1:], "more\nmemory", "more\ntime", "replay", kept, "result")
    for row in result.rows:
        cells = _figures(row, size)
        if golden:
            cells.insert(1, _percent(row.change_percent))
        beside = (row.control_memory_percent, row.control_time_percent) if row is not control else (None, None)
        verdict = Text(row.result, style="green" if row.result == OK else "bold red")
        rounds = f"{row.rounds} ({row.taken})" if row.taken else str(row.rounds)
        replayed = _cell(row.replay_percent, ".1f", end="%")
        table.add_row(Text(row.name), *cells, *map(_percent, beside), replayed, rounds, verdict)
    yield table
    if len(control.ranks) > 1:
        table = _table("", "rank", *titles, "result")
        for row in result.rows:
            for rank in row.ranks:
                table.add_row(Text(row.name), str(rank.rank), *_figures(rank, size), rank.status)
        yield table
    if any(row.shortage for row in result.rows):
        yield _shortages(result)


def _figures(row: BenchRow | OnRank, size: int) -> list[str]:
    """Returns the cells that rows of settings and of ranks have in common."""
    tflops = row.tflops
    return [
        _cell(tflops, ",.2f" if tflops and tflops >= 10 else ".4f"),
        _cell(row.per_second, ",.0f"),
        _cell(row.allocated_bytes, ",.1f", size),
        _cell(row.reserved_bytes, ",.1f", size),
    ]


def _shortages(result: Result) -> Table:
    """Returns the table of the bytes of settings whose memory ran out."""
    from rich.text import Text

    names = ("requested", "allocated", "reserved", "capacity")
    table = _table("", *names, "verdict")
    for row in result.rows:
        if row.shortage:
            counts = [row.shortage[f"{name}_bytes"] for name in names]
            cells = ["–" if count is None else errors.size(max(0, count)) for count in counts]
            table.add_row(Text(row.name), *cells, row.shortage["verdict"] or "–")
    return table


def _table(*titles: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for title in titles:
        words = title in ("", "result")
        least = {"": 9, "result": 10}.get(title)
        table.add_column(
            title, justify="left" if words else "right", no_wrap=not words, overflow="fold", min_width=least
        )
    return table


def _cell(value: float | None, form: str, size: int = 1, end: str = "") -> str:
    return "–" if value is None else f"{value / size:{form}}{end}"


def _percent(percent: float | None) -> str:
    return _cell(percent, "+.1f", end="%")


def notes(result: Result) -> list[str]:
    """Returns the sentences that explain the table."""
    lines: list[str] = []
    if result.taken:
        lines.append(f"{result.taken} trials (kept) were taken from the file of results; --fresh runs them again.")
    if result.noise_percent is not None:
        lines.append(
            f"Noise: rounds of one setting, or the two halves of its run, differ by up to {result.noise_percent:.1f} %."
        )
    golden, moved = result.golden, result.moved
    if moved is not None and moved.sure and any(row.relative for row in result.rows):
        lines.append(
            f"The control has moved by {moved.percent:+.1f} % against its golden figure (noise {moved.noise:.1f} %): "
            "settings are compared relative to the control."
        )
    if golden is not None:
        lines.append(f"Golden: {golden.source}, with torch {golden.torch}.")
        others = [row.name for row in result.rows if row.golden is not None and row.golden.name != row.name]
        if others:
            lines.append(f"Compared with a golden figure of another name: {', '.join(others)}.")
        for row, setting in zip(result.rows, result.config.settings, strict=True):
            if row.golden is not None and setting.key in golden.figures:
                lines += _beside(row, setting, row.golden)
    if all(row.compared_with is None for row in result.rows):
        lines.append("Nothing finished, so no time, memory or loss is compared.")
    compared = [row.compared_with for row in result.rows if row.compared_with not in (None, result.rows[0].name)]
    if compared:
        which = f"losses are compared with those of {compared[0]}" if compared[1:] else "no losses could be compared"
        lines.append(f"The control did not finish, so {which}.")
    lines += [f"FLOPs of {row.name} are not counted: {row.uncounted}" for row in result.rows if row.uncounted]
    return lines


def _beside(row: BenchRow, setting: Setting, figure: Figure) -> list[str]:
    """Returns the differences of a row from its own golden figure that are no verdict."""
    lines: list[str] = []
    if figure.flops and row.flops not in (None, figure.flops):
        lines.append(
            f"A step of {row.name} is counted as {row.flops:,} FLOPs, in the golden figure as {figure.flops:,}; "
            "throughput is compared from the same FLOPs, as are tokens per s."
        )
    first = "" if row.result == LOSS_CHANGED else _first_apart(row.losses, figure.losses, 0.0)
    if first:
        lines.append(f"Losses of {row.name} are the golden ones but for the last bits, first on {first}.")
    if row.plan != figure.plan:
        why = "is another than in its golden figure"
        if setting.budget is None:
            lines.append(f"The plan of {row.name} {why}: its label or fields mean something else by now.")
        else:
            peaks = f"{_exactly(row.allocated_bytes or 0)}, the golden one {_exactly(figure.allocated_bytes)}"
            lines.append(
                f"The plan of {row.name} {why}: it is made anew in each run. Peaks of two plans are not compared; "
                f"this one is {peaks}."
            )
    return lines
