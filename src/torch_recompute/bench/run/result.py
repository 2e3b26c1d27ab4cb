"""What a comparison showed: one row per setting, with a verdict on each, and the exit code that follows.

A setting's time is the median over rounds of the median step, on the slowest rank; its memory the most of any rank in
any round. Three questions are kept apart: whether it ran (OOM, and what else may happen), whether it trains the same
(MISMATCH), and whether it has become slower than it was (PERF REGRESSION), which only a golden figure can say. What it
costs beside the control is shown, and is no reason to fail: recomputing takes time.

Losses are compared with those of the control's first round on the same rank; where the control did not finish, with
those of the first setting that did.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ... import __version__
from .golden import Figure, Golden
from .record import DONE, MISMATCH, NO_PLAN, OUT, REFUSED, Record, worst
from .settings import CONTROL, Config, Setting

OK, REGRESSION = "OK", "PERF REGRESSION"
TOLERANCES = {"cpu": {}, "cuda": {"fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2, None: 1e-2}}
"""How far a loss may be from the control's, relative to it; on a CPU every bit counts."""

Trials = Mapping[str, Sequence[Sequence[Record]]]
"""By name: the rounds of a setting, each with a record per rank."""


@dataclass(frozen=True)
class OnRank:
    """One rank of a setting.

    Attributes:
        rank: Which.
        status: How its worst trial ended.
        step_seconds: The median over rounds of the median step.
        tflops: Of the model, per second; replays do not count.
        per_second: Tokens or samples.
        allocated_bytes: The most alive in a step.
        reserved_bytes: The most taken for it from the system or the device.
    """

    rank: int
    status: str
    step_seconds: float | None
    tflops: float | None
    per_second: float | None
    allocated_bytes: int | None
    reserved_bytes: int | None


@dataclass(frozen=True)
class Row:
    """One setting.

    Attributes:
        name: What the user calls it.
        setting: What it says.
        result: `OK`, `REGRESSION`, `MISMATCH`, or how it ended.
        detail: Why, unless it is OK.
        ranks: Each rank's figures.
        golden: The figure that it was compared with.
        change_percent: How much more TFLOP/s than that figure.
        control_time_percent: How much longer a step takes than the control's.
        control_memory_percent: How much more bytes are allocated than by the control.
        replay_percent: Replayed FLOPs in percent of the model's.
        replay_flops: Of a step, on rank 0.
        flops: The model's, of a step, on rank 0.
        uncounted: Why there are no FLOPs.
        unit: What `per_second` counts.
        regions: Of its plan.
        predicted_peak_bytes: Of its plan, where one was made for a budget.
        compared_with: The name of the setting whose losses its own were compared with.
    """

    name: str
    setting: str
    result: str
    detail: str
    ranks: Sequence[OnRank]
    golden: Figure | None = None
    change_percent: float | None = None
    control_time_percent: float | None = None
    control_memory_percent: float | None = None
    replay_percent: float | None = None
    replay_flops: int | None = None
    flops: int | None = None
    uncounted: str = ""
    unit: str = "tokens"
    regions: int = 0
    predicted_peak_bytes: int | None = None
    compared_with: str | None = None

    @property
    def step_seconds(self) -> float | None:
        """Of the slowest rank."""
        return _over(max, (rank.step_seconds for rank in self.ranks))

    @property
    def tflops(self) -> float | None:
        """Per second and device, on the slowest rank."""
        return _over(min, (rank.tflops for rank in self.ranks))

    @property
    def per_second(self) -> float | None:
        """Tokens or samples of all ranks."""
        return _over(sum, (rank.per_second for rank in self.ranks))

    @property
    def allocated_bytes(self) -> int | None:
        """The most of any rank."""
        return _over(max, (rank.allocated_bytes for rank in self.ranks))

    @property
    def reserved_bytes(self) -> int | None:
        """The most of any rank."""
        return _over(max, (rank.reserved_bytes for rank in self.ranks))


@dataclass(frozen=True)
class Result:
    """A comparison.

    Attributes:
        config: What was asked for.
        rows: One per setting, the control first.
        device: The device's name.
        parameters: Of the model.
        noise_percent: How far the rounds of the control, or else of the first setting that ran, lie apart.
        golden: The figures that were compared with.
        taken: How many trials were taken from the file of results instead of run.
    """

    config: Config
    rows: Sequence[Row]
    device: str
    parameters: int
    noise_percent: float | None
    golden: Golden | None = None
    taken: int = 0

    @property
    def exit_code(self) -> int:
        """2 where a setting was refused, 1 where one failed in any other way, 3 where a budget has no plan, else 0.

        The control may run out of memory: that is what the others are there for.
        """
        alone = len(self.rows) == 1 or self.rows[0].result != OUT
        results = {row.result for row in (self.rows if alone else self.rows[1:])} - {OK}
        if REFUSED in results:
            return 2
        if results - {NO_PLAN}:
            return 1
        return 3 if results else 0

    @property
    def how(self) -> dict[str, str]:
        """How each kind of figure was obtained."""
        config = self.config
        cuda = config.workload.device == "cuda"
        tolerance = TOLERANCES[config.workload.device].get(config.workload.dtype, 0.0)
        rounds = "one round" if config.rounds == 1 else f"{config.rounds} rounds"
        return {
            "time": f"median of {config.steps} steps after {config.warmup}, and of {rounds} in which all settings take "
            "turns, each in a fresh process",
            "TFLOP/s": "the model's matrix products, replays left out, per device; by PyTorch's formulas"
            + ("" if cuda else ", which know no attention kernel of a CPU"),
            "allocated": f"{'by the allocator' if cuda else 'by tensors alive'}, at the peak of a step",
            "reserved": f"taken from the {'driver by the allocator' if cuda else 'system, beyond what libraries take'}",
            "more": "than the control, in percent; replay: FLOPs in percent of the model's",
            "losses": f"equal within {tolerance:g} of each" if tolerance else "equal to the last bit",
        }

    def as_data(self) -> dict[str, Any]:
        """Ready for JSON; bytes and FLOPs are integers."""
        figures = ("step_seconds", "tflops", "per_second", "allocated_bytes", "reserved_bytes")
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
            "rows": [{**asdict(row), **{name: getattr(row, name) for name in figures}} for row in self.rows],
        }

    def to_golden(self) -> Golden:
        """Its figures, to compare with later; those of settings that are OK or have become slower."""
        figures: dict[str, Figure] = {}
        for row, setting in zip(self.rows, self.config.settings, strict=True):
            if row.result in (OK, REGRESSION) and row.step_seconds is not None:
                figures[setting.key] = Figure(row.name, row.step_seconds, row.tflops)
        ranks = len(self.rows[0].ranks)
        return Golden(self.config.workload, ranks, self.device, self.parameters, figures)


def judged(config: Config, trials: Trials, golden: Golden | None, taken: int) -> Result:
    """The result that follows from the trials."""
    finished = [setting for setting in config.settings if _ended(trials[setting.name]).status == DONE]
    reference = finished[0] if finished else CONTROL
    rows = [_row(config, setting, trials, reference, golden) for setting in config.settings]
    known = [record for rounds in trials.values() for records in rounds for record in records]
    steps = [
        max(statistics.median(record.seconds) for record in records)
        for records in (trials[reference.name] if finished else ())
    ]
    noise = 100 * (max(steps) / min(steps) - 1) if len(steps) > 1 else None
    control = rows[0]
    rows = [_beside(row, control) for row in rows]
    device = next((record.device for record in known if record.device), "")
    return Result(config, rows, device, max(record.parameters for record in known), noise, golden, taken)


def _ended(rounds: Sequence[Sequence[Record]]) -> Record:
    return worst([record for records in rounds for record in records])


def _row(config: Config, setting: Setting, trials: Trials, reference: Setting, golden: Golden | None) -> Row:
    rounds = trials[setting.name]
    end, first = _ended(rounds), rounds[0][0]
    counted = first.flops
    row = Row(
        name=setting.name,
        setting=setting.words,
        result=end.status,
        detail=end.detail,
        ranks=[_on_rank(rank, [records[rank] for records in rounds]) for rank in range(len(rounds[0]))],
        flops=counted,
        replay_flops=first.replay_flops,
        replay_percent=100 * (first.replay_flops or 0) / counted if counted else None,
        uncounted=first.uncounted,
        unit=first.unit,
        regions=first.regions,
        predicted_peak_bytes=first.predicted_peak_bytes,
    )
    if end.status != DONE:
        return row
    differs = _difference(config, rounds, trials[reference.name][0], reference.name)
    figure = golden.of(setting) if golden is not None else None
    assert row.step_seconds is not None
    change = None if figure is None else 100 * (figure.step_seconds / row.step_seconds - 1)
    result, detail = OK, ""
    if differs:
        result, detail = MISMATCH, differs
    elif figure is not None and change is not None and change < -config.threshold:
        result = REGRESSION
        detail = f"{-change:.1f} % below the golden figure of {figure.name}; allowed are {config.threshold:g} %"
    return replace(
        row, result=result, detail=detail, golden=figure, change_percent=change, compared_with=reference.name
    )


def _beside(row: Row, control: Row) -> Row:
    return replace(
        row,
        control_time_percent=_more(row.step_seconds, control.step_seconds),
        control_memory_percent=_more(row.allocated_bytes, control.allocated_bytes),
    )


def _more(value: float | None, than: float | None) -> float | None:
    return None if value is None or not than else 100 * (value / than - 1)


def _on_rank(rank: int, records: Sequence[Record]) -> OnRank:
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


def _difference(config: Config, rounds: Sequence[Sequence[Record]], wanted: Sequence[Record], name: str) -> str:
    """Where losses first differ, in words; empty where they do not."""
    tolerance = TOLERANCES[config.workload.device].get(config.workload.dtype, 0.0)
    for number, records in enumerate(rounds, 1):
        for rank, (record, reference) in enumerate(zip(records, wanted, strict=True)):
            for step, (ours, theirs) in enumerate(zip(record.losses, reference.losses, strict=True), 1):
                a, b = float.fromhex(ours), float.fromhex(theirs)
                if ours != theirs and not abs(a - b) <= tolerance * abs(b):
                    where = f"round {number}, rank {rank}, step {step}"
                    return f"{where}: the loss is {a!r} ({ours}), that of {name} {b!r} ({theirs})"
    return ""


def _over(choose: Any, values: Any) -> Any:
    """The chosen one of what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    return choose(known) if known else None
