"""`torch-recompute demo`: compares five settings of recomputation on one screen, on your machine, on real text.

One small GPT is trained on Python's own standard library, byte by byte, five times side by side, with the plans of
`SETTINGS`. All take the same steps from the same weights; random numbers depend on the seed and the number of the step
alone. Dropout is on, so a replay that drew other random numbers would show in the very first backward. Each measurement
has steps of its own, because each would disturb the others:

    seconds  median of the training steps, in which the settings take turns so that noise hits all alike
    bytes    one step under `measure`, by category, at the peak; beside it what the plan has predicted
    FLOPs    one step under `FlopCounterMode`, less that of the plain setting. The counter knows no formula for the
             CPU's fused attention, so in this step attention runs as the matrix products that it stands for
    bits     the loss of every training step, compared as bits with the plain setting; a difference is an error
"""

from __future__ import annotations

import argparse
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from .. import Choice, Plan, apply, make_plan, measure
from ..errors import ArgumentError
from .output import FAILED, MIB, OK, Output, add_options, document, drawing, new_command, new_table, reason
from .small_models import Decoder, TransformerBlock, seeded

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 1
VOCABULARY, HEADS, DROPOUT = 256, 4, 0.1
CORPUS_BYTES = 4 * 2**20
COLOURS = {
    "parameters": "#9a9a9a",
    "gradients": "#d98c3f",
    "optimizer": "#e8c9a0",
    "activations": "#2b6cb0",
    "buffers": "#5c6b73",
    "other": "#7cc4a4",
}


@dataclass(frozen=True)
class DemoSetting:
    """A setting; `plan` makes a plan of a model, its optimizer and a batch, which is applied to the model."""

    name: str
    title: str
    plan: Callable[[nn.Module, torch.optim.Optimizer, Tensor], Plan]


def _each(*parts: str, keep: tuple[str, ...] = ()) -> Callable[..., Plan]:
    """Returns a function that makes a plan with a region around each layer, or around parts of each."""
    return lambda model, *_: Plan(
        tuple(Choice((f"layers.{i}{part}",), keep) for i in range(len(model.layers)) for part in parts)
    )


SETTINGS = (
    DemoSetting("none", "nothing recomputed", _each()),
    DemoSetting("layers", "every layer", _each("")),
    DemoSetting("attention", "attention only", _each(".attention")),
    DemoSetting("layers_save_attention", "every layer but attention", _each("", keep=("attention.core",))),
    DemoSetting(
        "planned",
        "planned for 35 % of the activation memory",
        lambda model, optimizer, text: make_plan(model, (text,), budget=0.35, optimizer=optimizer, hold_output=False),
    ),
)


@dataclass(frozen=True)
class DemoConfig:
    """The size of the demonstration."""

    steps: int = 8
    layers: int = 6
    d_model: int = 256
    seq: int = 256
    batch: int = 4
    seed: int = 0

    def check(self) -> None:
        """Refuses values that cannot run, and says which can."""
        for name in ("steps", "layers", "d_model", "seq", "batch"):
            if getattr(self, name) < 1:
                option = "--" + name.replace("_", "-")
                raise ArgumentError(
                    f"{option} is {getattr(self, name)}; expected a whole number of at least 1. "
                    f"Write for example {option} {getattr(DemoConfig, name)}, which is what you get without it."
                )
        if not -(2**63) <= self.seed < 2**63:
            raise ArgumentError(f"--seed is {self.seed}, which has over 64 bits. Write for example --seed 1")
        if self.d_model % HEADS:
            above = self.d_model + HEADS - self.d_model % HEADS
            raise ArgumentError(
                f"--d-model is {self.d_model}; expected a multiple of {HEADS}, because the model has {HEADS} "
                f"attention heads of equal width. Write --d-model {above}"
            )


def build(config: DemoConfig) -> nn.Module:
    """Builds the GPT from the seed; the caller's random numbers are left alone."""
    layer = partial(TransformerBlock.gpt, head=config.d_model // HEADS)
    return seeded(lambda: Decoder(config.layers, config.d_model, config.seq, layer, VOCABULARY), DROPOUT, config.seed)


def read_text(path: Path | None, seq: int) -> tuple[str, Tensor]:
    """Returns the name of the training text and its bytes; by default Python's standard library."""
    if path is None:
        data = b"".join(source.read_bytes() for source in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
        name = "the Python standard library"
        mend = "This Python has no sources to read; pass a text: --text FILE"
    else:
        name = str(path)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ArgumentError(
                f"--text {path}: {reason(error)}; expected a readable file. Any text will do, the model reads bytes; "
                "without --text it reads the Python standard library."
            ) from None
        mend = f"Pass a longer text, or write --seq {max(len(data) - 1, 1)} or less."
    data = data[:CORPUS_BYTES]
    if len(data) < seq + 1:
        raise ArgumentError(
            f"{name} has {len(data)} bytes; expected at least {seq + 1}, one more than a sequence (--seq {seq}). {mend}"
        )
    return name, torch.frombuffer(bytearray(data), dtype=torch.uint8)


def batches(text: Tensor, config: DemoConfig, lengths: Iterable[int] | None = None) -> Iterator[Tensor]:
    """Yields batches without end, the same for the same seed; of other lengths than the sequence if these are given."""
    generator = torch.Generator().manual_seed(config.seed)
    for length in repeat(config.seq) if lengths is None else lengths:
        starts = torch.randint(len(text) - length, (config.batch, 1), generator=generator)
        yield text[starts + torch.arange(length + 1)].long()


class Trainer:
    """One setting's model under its plan, its optimizer, and the measurements."""

    def __init__(self, config: DemoConfig, setting: DemoSetting) -> None:
        self.setting = setting
        self.seed = config.seed
        self.model = build(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.by_category: dict[str, int] = {}
        self.flops = 0
        plan = setting.plan(self.model, self.optimizer, torch.zeros(config.batch, config.seq + 1, dtype=torch.long))
        self.predicted_peak_bytes = plan.predicted_peak_bytes
        apply(self.model, plan)

    def step(self, number: int, text: Tensor) -> float:
        """Runs one training step; its random numbers depend on its number alone."""
        torch.manual_seed(self.seed + number)
        loss = self.model(text)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def outcome(self, plain: Trainer) -> Outcome:
        """Returns what was measured, beside the plain setting."""
        pairs = enumerate(zip(self.losses, plain.losses, strict=True))
        differing = [step for step, (mine, its) in pairs if mine.hex() != its.hex()]
        return Outcome(
            name=self.setting.name,
            title=self.setting.title,
            peak_bytes=sum(self.by_category.values()),
            predicted_peak_bytes=self.predicted_peak_bytes,
            by_category=self.by_category,
            step_seconds=statistics.median(self.seconds),
            flops=self.flops,
            recomputed_flops=self.flops - plain.flops,
            recomputed_percent=100 * (self.flops - plain.flops) / plain.flops,
            identical=not differing,
            first_difference=differing[0] if differing else None,
            losses=self.losses,
        )


@dataclass(frozen=True)
class Outcome:
    """The measurements of one setting; `identical` compares all its losses with the plain setting's, as bits."""

    name: str
    title: str
    peak_bytes: int
    predicted_peak_bytes: int | None
    by_category: dict[str, int]
    step_seconds: float
    flops: int
    recomputed_flops: int
    recomputed_percent: float
    identical: bool
    first_difference: int | None
    losses: list[float] = field(repr=False)


@dataclass(frozen=True)
class DemoResult:
    """The result of the demonstration."""

    config: DemoConfig
    text: str
    parameters: int
    outcomes: list[Outcome]

    @property
    def identical(self) -> bool:
        """Whether every setting has the plain setting's losses."""
        return all(outcome.identical for outcome in self.outcomes)

    def to_json(self) -> str:
        """Returns one JSON document: bytes and FLOPs are integers, losses are values and exact hexadecimals."""
        data = {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "text": self.text,
            "config": asdict(self.config),
            "parameters": self.parameters,
            "identical": self.identical,
            "settings": [
                asdict(outcome) | {"losses": [{"value": loss, "hex": loss.hex()} for loss in outcome.losses]}
                for outcome in self.outcomes
            ],
        }
        return document("demo", SCHEMA_VERSION, data)


def ticks(config: DemoConfig, settings: Sequence[DemoSetting] = SETTINGS) -> int:
    """Returns the number of times that `run` reports progress."""
    return len(settings) * (config.steps + 3)


def run(
    config: DemoConfig,
    path: Path | None = None,
    *,
    settings: Sequence[DemoSetting] = SETTINGS,
    progress: Callable[[str], object] = lambda _: None,
) -> DemoResult:
    """Trains all settings side by side and measures them; the others are compared with the first one.

    The text is at `path`, or else the Python standard library. `progress` is called after each of the
    `ticks(config, settings)` pieces of work, with a word on it.
    """
    config.check()
    name, text = read_text(path, config.seq)
    numbered = enumerate(batches(text, config))
    trainers: list[Trainer] = []
    with torch.random.fork_rng(devices=[]):
        for setting in settings:
            trainers.append(Trainer(config, setting))
            progress(f"planning: {setting.title}")
        for _ in range(config.steps):
            step, batch = next(numbered)
            turn = step % len(trainers)
            for trainer in trainers[turn:] + trainers[:turn]:
                start = time.perf_counter()
                trainer.losses.append(trainer.step(step, batch))
                trainer.seconds.append(time.perf_counter() - start)
                progress(f"step {step + 1} of {config.steps}, loss {trainer.losses[-1]:.3f}")
        memory_step, flops_step = next(numbered), next(numbered)
        for trainer in trainers:
            with measure(trainer.model, trainer.optimizer).track(memory_step[1]) as m:
                trainer.step(*memory_step)
            trainer.by_category = m.by_category
            progress("measuring bytes")
            with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
                trainer.step(*flops_step)
            trainer.flops = counter.get_total_flops()
            progress("counting FLOPs")
    parameters = sum(parameter.numel() for parameter in trainers[0].model.parameters())
    return DemoResult(config, name, parameters, [trainer.outcome(trainers[0]) for trainer in trainers])


def add_command(commands: Any) -> None:
    """Adds `torch-recompute demo` to the command line."""
    parser = new_command(commands, "demo")
    parser.add_argument("--text", type=Path, metavar="PATH", help="a text to learn (the Python standard library)")
    about = "train on texts of varied length, in elastic regions under a limit that plain training breaks"
    parser.add_argument("--elastic", action="store_true", help=about)
    for name, about in (
        ("steps", "training steps of each setting"),
        ("layers", "transformer layers"),
        ("d_model", f"width, a multiple of {HEADS}"),
        ("seq", "bytes in a sequence"),
        ("batch", "sequences in a step"),
        ("seed", "of weights, text and dropout"),
    ):
        option = "--" + name.replace("_", "-")
        default = getattr(DemoConfig, name)
        parser.add_argument(option, type=int, metavar="N", help=f"{about} (default {default}; --elastic has its own)")
    add_options(parser, command, plot="the peaks; with --elastic the bytes alive")


def command(args: argparse.Namespace) -> int:
    """Runs `torch-recompute demo`; 0 if all losses are identical, and no elastic step is above the limit, else 1."""
    from . import demo_elastic

    asked = {name: value for name in DemoConfig.__dataclass_fields__ if (value := getattr(args, name)) is not None}
    config = replace(demo_elastic.DEFAULTS if args.elastic else DemoConfig(), **asked)
    config.check()
    read_text(args.text, config.seq)
    output = Output.of(args)
    if args.elastic:
        with output.progress(demo_elastic.ticks(config)) as progress:
            elastic = demo_elastic.run(config, args.text, progress=progress)
        if output.plot is not None:
            demo_elastic.draw(elastic, output.plot)
        output.give(elastic.to_json, lambda console: demo_elastic.show(console, elastic))
        return OK if elastic.passed else FAILED
    with output.progress(ticks(config)) as progress:
        result = run(config, args.text, progress=progress)
    if output.plot is not None:
        _draw(result, output.plot)
    output.give(result.to_json, lambda console: _print(console, result))
    return OK if result.identical else FAILED


def _in_mib(count: int | None) -> str:
    return "-" if count is None else f"{count / MIB:.1f}"


# The rows of the table, in its three parts: a label, and the cell of a setting as rich's markup.
ROWS: tuple[dict[str, Callable[[Outcome], str]], ...] = (
    {
        "peak MiB": lambda outcome: f"[bold]{_in_mib(outcome.peak_bytes)}[/]",
        "  predicted": lambda outcome: _in_mib(outcome.predicted_peak_bytes),
        "  activations": lambda outcome: _in_mib(outcome.by_category["activations"]),
        "  parameters": lambda outcome: _in_mib(outcome.by_category["parameters"]),
        "  gradients": lambda outcome: _in_mib(outcome.by_category["gradients"]),
        "  optimizer": lambda outcome: _in_mib(outcome.by_category["optimizer"]),
    },
    {
        "seconds per step": lambda outcome: f"{outcome.step_seconds:.3f}",
        "recomputed GFLOP": lambda outcome: f"{outcome.recomputed_flops / 1e9:.2f}",
        "  of a plain step": lambda outcome: f"{outcome.recomputed_percent:.1f}%",
    },
    {
        "first loss": lambda outcome: f"{outcome.losses[0]:.4f}",
        "last loss": lambda outcome: f"{outcome.losses[-1]:.4f}",
        "same bits": lambda outcome: "[green]yes[/]" if outcome.identical else "[bold red]NO[/]",
    },
)


def _print(console: Console, result: DemoResult) -> None:
    """Prints the table, and any loss that differs."""
    from rich.text import Text

    config, outcomes = result.config, result.outcomes
    table = new_table("", *("\n".join(wrap(outcome.title, len("recomputed"))) for outcome in outcomes))
    table.columns[0].no_wrap = True
    for group in ROWS:
        for label, cell in group.items():
            cells = (Text.from_markup(cell(outcome)) for outcome in outcomes)
            table.add_row(label, *cells, end_section=label == list(group)[-1])
    console.print(
        f"GPT of {config.layers} layers, d_model {config.d_model}, {result.parameters:,} parameters; "
        f"{config.steps} steps of {config.batch} x {config.seq} bytes of {result.text}",
        style="bold",
    )
    console.print(table)
    console.print(
        "MiB: at the peak of a step. Same bits: the losses of all steps equal those without recomputation to the last "
        "bit."
    )
    for outcome in outcomes:
        if outcome.predicted_peak_bytes is not None:
            console.print(
                f"{outcome.title.capitalize()}: the plan predicts a peak of {outcome.predicted_peak_bytes:,} bytes, "
                f"measured were {outcome.peak_bytes:,}."
            )
        if outcome.first_difference is not None:
            at = outcome.first_difference
            mine, plain = outcome.losses[at], outcomes[0].losses[at]
            console.print(
                f"NOT IDENTICAL: {outcome.title}: the loss of step {at + 1} is {mine!r} ({mine.hex()}), "
                f"without recomputation it is {plain!r} ({plain.hex()}).",
                style="bold red",
            )


def _draw(result: DemoResult, path: Path) -> None:
    """Draws for each setting the peak of a step, stacked by category."""
    titles = ["\n".join(wrap(outcome.title, 16)) for outcome in result.outcomes]
    below = [0.0] * len(titles)
    with drawing(path, (8, 4.5)) as figure:
        axes = figure.add_subplot()
        for category, colour in COLOURS.items():
            heights = [outcome.by_category.get(category, 0) / MIB for outcome in result.outcomes]
            if any(heights):
                axes.bar(titles, heights, bottom=below, color=colour, label=category, width=0.6)
            below = [low + high for low, high in zip(below, heights, strict=True)]
        for place, (height, outcome) in enumerate(zip(below, result.outcomes, strict=True)):
            axes.text(place, height, f"{outcome.peak_bytes / MIB:.1f}", ha="center", va="bottom")
        axes.set_ylabel("peak of a step, MiB")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
        axes.set_title(
            f"GPT of {result.config.layers} layers, d_model {result.config.d_model}", loc="left", fontsize=11
        )
