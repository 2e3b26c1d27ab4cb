"""`torch-recompute demo --elastic`: trains on texts of varied length, under a limit that plain training breaks.

The GPT of the demonstration takes the same steps twice, one text a step: without recomputation, and with each layer an
elastic region. A few texts are long; only these need more memory than the limit, which is halfway between the longest
step with every layer recomputed and without. Elastic regions keep their activations in all other steps.

Nothing enforces the limit here: bytes are counted by `measure` after every operation, and the pool is told what is
alive by the same count, through a meter of its own. So the picture, and all that is printed but milliseconds, is the
same on every machine. Losses are compared with those of plain training as bits.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import Elastic, Plan, doing_recompute, measure, recompute
from ..errors import size
from ..memory import Measurement
from .demo import SETTINGS, DemoConfig, DemoSetting, Trainer, batches, read_text
from .output import MIB, document, drawing

if TYPE_CHECKING:
    from rich.console import Console

    from ..memory.elastic import ElasticReport

SCHEMA_VERSION = 1
DEFAULTS = DemoConfig(steps=40, layers=6, d_model=128, seq=1024, batch=1)
BARS = 60  # columns of a bar in the terminal
POINTS = 24  # of each step in the picture


class MeasuredMeter:
    """The bytes alive by the count of the `measure` block that runs.

    Attributes:
        measurement: That block.
        replayed: Where replays began, in its timeline.
    """

    def __init__(self) -> None:
        self.measurement = Measurement()
        self.replayed: list[int] = []
        self._from = 0

    def live(self) -> int:
        """Returns the bytes alive now."""
        return self.measurement.live_bytes

    def reset_lap(self) -> None:
        """Begins a lap."""
        self._from = max(0, len(self.measurement.timeline) - 1)

    def lap(self) -> int:
        """Returns the most bytes alive since `reset_lap`."""
        return max((sample.live_bytes for sample in self.measurement.timeline[self._from :]), default=self.live())


@dataclass(frozen=True)
class ElasticStep:
    """The figures of one step; a curve has the most bytes alive in each of `POINTS` equal parts of the step."""

    tokens: int
    plain_peak_bytes: int
    peak_bytes: int
    replays: int
    loss: float
    identical: bool
    plain_curve: list[int] = field(repr=False)
    curve: list[int] = field(repr=False)
    replayed_at: list[float] = field(repr=False)


@dataclass(frozen=True)
class ElasticResult:
    """The result of the demonstration."""

    config: DemoConfig
    text: str
    limit_bytes: int
    least_bytes: int
    steps: list[ElasticStep]
    report: ElasticReport

    @property
    def passed(self) -> bool:
        """Whether every loss is plain training's, and no step went above the limit."""
        return all(step.identical and step.peak_bytes <= self.limit_bytes for step in self.steps)

    def to_json(self) -> str:
        """Returns one JSON document."""
        data = {
            "torch": torch.__version__,
            "text": self.text,
            "config": asdict(self.config),
            "limit_bytes": self.limit_bytes,
            "least_bytes": self.least_bytes,
            "passed": self.passed,
            "steps": [asdict(step) for step in self.steps],
            "regions": [row._asdict() for row in self.report.rows],
        }
        return document("demo --elastic", SCHEMA_VERSION, data)


def lengths(config: DemoConfig) -> Iterator[int]:
    """Yields the length of each step without end: log-normal around a quarter of the longest."""
    drawn = random.Random(config.seed)
    while True:
        yield min(config.seq, max(1, config.seq // 16, round(drawn.lognormvariate(math.log(config.seq / 4), 0.7))))


class _Run:
    """Steps of one setting, each under `measure`."""

    def __init__(self, config: DemoConfig, setting: DemoSetting, meter: MeasuredMeter) -> None:
        self.trainer = Trainer(config, setting)
        self.meter = meter
        self._end = 0  # of the backward, in the timeline
        self.trainer.optimizer.register_step_pre_hook(self._backward_ended)

    def _backward_ended(self, *_: Any) -> None:
        self._end = len(self.meter.measurement.timeline)

    def step(self, number: int, text: Tensor) -> float:
        """Runs a step and returns its loss; its measurement stays with the meter."""
        self.meter.replayed.clear()
        with measure(self.trainer.model, self.trainer.optimizer).track(text) as self.meter.measurement:
            return self.trainer.step(number, text)

    def curve(self) -> list[int]:
        """The most bytes alive in equal parts of the last step, from its beginning to the end of its backward."""
        levels = [sample.live_bytes for sample in self.meter.measurement.timeline[: self._end]]
        edges = [part * len(levels) // POINTS for part in range(POINTS + 1)]
        return [max(levels[start : max(end, start + 1)]) for start, end in itertools.pairwise(edges)]

    def replayed_at(self) -> list[float]:
        """Where replays began, as shares of the same."""
        return [place / self._end for place in self.meter.replayed]


def _elastic(meter: MeasuredMeter, memory: Elastic, model: nn.Module) -> Plan:
    """Makes each layer of a model an elastic region that notes its replays."""

    def noting(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def noted(x: Tensor) -> Tensor:
            if doing_recompute():
                meter.replayed.append(len(meter.measurement.timeline))
            return forward(x)

        return noted

    layers: Any = model.layers
    for number, layer in enumerate(layers):
        layer.forward = recompute(noting(layer.forward), name=f"layers.{number}", elastic=memory)
    return Plan()


def ticks(config: DemoConfig) -> int:
    """Returns the number of times that `run` reports progress."""
    return 2 * config.steps


def run(
    config: DemoConfig, path: Path | None = None, *, progress: Callable[[str], object] = lambda _: None
) -> ElasticResult:
    """Trains without recomputation, then with elastic regions.

    The text is at `path`, or else the Python standard library. `progress` is called after each of the `ticks(config)`
    pieces of work, with a word on it.
    """
    config.check()
    name, text = read_text(path, config.seq)
    with torch.random.fork_rng(devices=[]):
        texts = [*itertools.islice(batches(text, config, lengths(config)), config.steps)]
        plain = _Run(config, SETTINGS[0], MeasuredMeter())
        before: list[tuple[float, int, list[int]]] = []
        for number, batch in enumerate(texts):
            loss = plain.step(number, batch)
            before.append((loss, plain.meter.measurement.peak_bytes, plain.curve()))
            progress(f"plain, step {number + 1} of {config.steps}")
        recomputed = _Run(config, SETTINGS[1], MeasuredMeter())
        longest = max(texts, key=Tensor.numel)
        for number in range(2):  # the optimizer's state is there from the second on
            recomputed.step(number, longest)
        least, most = recomputed.meter.measurement.peak_bytes, max(peak for _, peak, _ in before)
        meter = MeasuredMeter()
        memory = Elastic((least + most) // 2, meter=meter)
        regions = DemoSetting("elastic", "elastic", lambda model, *_: _elastic(meter, memory, model))
        elastic = _Run(config, regions, meter)
        steps: list[ElasticStep] = []
        for number, (batch, (loss, peak, curve)) in enumerate(zip(texts, before, strict=True)):
            mine = elastic.step(number, batch)
            steps.append(
                ElasticStep(
                    tokens=batch.numel() - len(batch),
                    plain_peak_bytes=peak,
                    peak_bytes=meter.measurement.peak_bytes,
                    replays=len(meter.replayed),
                    loss=mine,
                    identical=mine.hex() == loss.hex(),
                    plain_curve=curve,
                    curve=elastic.curve(),
                    replayed_at=elastic.replayed_at(),
                )
            )
            progress(f"elastic, step {number + 1} of {config.steps}, loss {mine:.3f}")
    return ElasticResult(config, name, memory.limit, least, steps, memory.report())


def show(console: Console, result: ElasticResult) -> None:
    """Prints a bar for each step, what it shows, and the report."""
    config, steps, limit = result.config, result.steps, result.limit_bytes
    most = max(step.plain_peak_bytes for step in steps)

    def column(count: int) -> int:
        return round(BARS * count / max(most, limit))

    console.print(
        f"GPT of {config.layers} layers, d_model {config.d_model}; {config.steps} steps, one text each of up to "
        f"{config.seq} bytes of {result.text}",
        style="bold",
    )
    console.print(f"step  tokens  {'most bytes alive':{max(0, column(limit) - 6)}} limit│")
    for number, step in enumerate(steps, 1):
        mine, plain = column(step.peak_bytes), column(step.plain_peak_bytes)
        bar = f"{'█' * mine + '░' * (plain - mine):{BARS}}"
        notes = f"  replays: {step.replays}" if step.replays else ""
        console.print(f"{number:>4}  {step.tokens:>6}  {bar[: column(limit)]}│{bar[column(limit) :]}{notes}".rstrip())
    highest = max(step.peak_bytes for step in steps)
    console.print(
        f"█ elastic, ░ what plain training takes beyond. The limit, {size(limit)}, is halfway from "
        f"{size(result.least_bytes)} (the longest text, every layer recomputed) to {size(most)} (none).\n"
        f"Plain training is above it in {sum(step.plain_peak_bytes > limit for step in steps)} of {len(steps)} steps; "
        f"elastic regions take {size(highest)} at the most, and recompute nothing in "
        f"{sum(not step.replays for step in steps)} steps.\n"
        "The first call of a layer is always recomputed, which shows what the layer takes.\n"
        "Losses are those of plain training, bit by bit: "
        f"{'yes' if all(step.identical for step in steps) else 'NO'}."
    )
    if highest > limit:
        console.print(f"ABOVE THE LIMIT by {size(highest - limit)}.", style="bold red")
    console.print(str(result.report))


def draw(result: ElasticResult, path: Path) -> None:
    """Draws the bytes alive in all steps, plain's behind them, with the limit and the replays."""
    places = [number + (part + 0.5) / POINTS for number in range(len(result.steps)) for part in range(POINTS)]
    with drawing(path, (11, 4.4)) as figure:
        axes = figure.add_subplot()
        plain = [count / MIB for step in result.steps for count in step.plain_curve]
        mine = [count / MIB for step in result.steps for count in step.curve]
        axes.fill_between(places, plain, color="#d5d9de", linewidth=0, label="plain")
        axes.fill_between(places, mine, color="#2b6cb0", linewidth=0, alpha=0.85, label="elastic")
        limit = result.limit_bytes / MIB
        axes.axhline(limit, color="#b0302b", linewidth=1.2, label=f"limit, {limit:.0f} MiB")
        replays = [number + share for number, step in enumerate(result.steps) for share in step.replayed_at]
        axes.plot(replays, [-0.03 * max(plain)] * len(replays), "|", color="#d9822b", markersize=9, label="a replay")
        axes.set_xlim(0, len(result.steps))
        axes.set_xlabel("step (forward and backward)")
        axes.set_ylabel("bytes alive, MiB")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
        axes.set_title(
            f"GPT of {result.config.layers} layers, one text of up to {result.config.seq} bytes a step",
            loc="left",
            fontsize=11,
        )
