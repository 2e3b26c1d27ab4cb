"""The demonstration itself: train all settings side by side, measure each, compare with the first.

Invariants. What happens in a step depends on the seed and the number of the step alone, never on the setting: text,
weights and dropout are the same for all. Settings take turns in going first. The global random generator is left as
it was found.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from .. import apply, make_plan
from .._face import document
from ..memory import measure
from .model import GPT, SETTINGS, Config, Setting
from .text import batches, read_text

SCHEMA_VERSION = 1


class Trainer:
    """One setting's model and optimizer, and what is measured of them."""

    def __init__(self, config: Config, setting: Setting) -> None:
        self.setting = setting
        self.seed = config.seed
        torch.manual_seed(config.seed)
        self.model = GPT(config, setting)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.predicted_peak_bytes: int | None = None

    def plan(self, budget: float, text: Tensor) -> None:
        """Plan for a share of the activation memory, with a batch such as this, and apply the plan."""
        plan = make_plan(self.model, (text,), budget=budget, optimizer=self.optimizer, hold_output=False)
        self.predicted_peak_bytes = plan.predicted_peak_bytes
        apply(self.model, plan)

    def step(self, index: int, text: Tensor) -> float:
        """One training step; its random numbers depend on the step alone."""
        torch.manual_seed(self.seed + index)
        loss = self.model(text)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def timed_step(self, index: int, text: Tensor) -> None:
        """A step of the loss curve."""
        start = time.perf_counter()
        self.losses.append(self.step(index, text))
        self.seconds.append(time.perf_counter() - start)

    def bytes_of_step(self, index: int, text: Tensor) -> dict[str, int]:
        """What is alive at the peak of a step."""
        with measure(self.model, self.optimizer).track(text) as m:
            self.step(index, text)
        return m.by_category

    def flops_of_step(self, index: int, text: Tensor) -> int:
        """The FLOPs of a step's matrix products."""
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            self.step(index, text)
        return counter.get_total_flops()


@dataclass(frozen=True)
class Outcome:
    """What one setting showed; `identical` compares all its losses with the plain setting's, as bits.

    `predicted_peak_bytes` is what its plan has promised, None where there is no plan.
    """

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
class Result:
    """What the demonstration showed."""

    config: Config
    text: str
    parameters: int
    outcomes: list[Outcome]

    @property
    def identical(self) -> bool:
        """Whether every setting has the plain setting's losses."""
        return all(outcome.identical for outcome in self.outcomes)

    def to_json(self) -> str:
        """One JSON document: bytes and FLOPs are integers, losses come as values and as exact hexadecimals."""
        settings: list[dict[str, Any]] = []
        for outcome in self.outcomes:
            losses = [{"value": loss, "hex": loss.hex()} for loss in outcome.losses]
            settings.append(asdict(outcome) | {"losses": losses})
        data = {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "text": self.text,
            "config": asdict(self.config),
            "parameters": self.parameters,
            "identical": self.identical,
            "settings": settings,
        }
        return document("demo", SCHEMA_VERSION, data)


def run(
    config: Config,
    path: Path | None = None,
    *,
    settings: tuple[Setting, ...] = SETTINGS,
    progress: Callable[[str], None] | None = None,
) -> Result:
    """Train all settings side by side and measure them; the first one is what the others are compared with.

    Args:
        config: The size.
        path: The text, or None for the Python standard library.
        settings: What to compare.
        progress: Called after each of the `ticks(config, settings)` pieces of work, with a word on it.

    Returns:
        What was seen.
    """
    config.check()
    tick = progress or _quiet
    name, text = read_text(path, config.seq)
    numbered = batches(text, config)
    with torch.random.fork_rng(devices=[]):
        trainers = [Trainer(config, setting) for setting in settings]
        for trainer in trainers:
            if trainer.setting.budget is not None:
                trainer.plan(trainer.setting.budget, torch.zeros(config.batch, config.seq + 1, dtype=torch.long))
                tick("planning")
        for _ in range(config.steps):
            step, batch = next(numbered)
            turn = step % len(trainers)
            for trainer in trainers[turn:] + trainers[:turn]:
                trainer.timed_step(step, batch)
                tick(f"step {step + 1} of {config.steps}, loss {trainer.losses[-1]:.3f}")
        memory_step, flops_step = next(numbered), next(numbered)
        seen: list[tuple[dict[str, int], int]] = []
        for trainer in trainers:
            memory = trainer.bytes_of_step(*memory_step)
            tick("measuring bytes")
            seen.append((memory, trainer.flops_of_step(*flops_step)))
            tick("counting FLOPs")
    reference, reference_flops = trainers[0].losses, seen[0][1]
    outcomes: list[Outcome] = []
    for trainer, (memory, flops) in zip(trainers, seen, strict=True):
        pairs = zip(trainer.losses, reference, strict=True)
        differing = [step for step, (mine, theirs) in enumerate(pairs) if mine.hex() != theirs.hex()]
        outcomes.append(
            Outcome(
                name=trainer.setting.name,
                title=trainer.setting.title,
                peak_bytes=sum(memory.values()),
                predicted_peak_bytes=trainer.predicted_peak_bytes,
                by_category=memory,
                step_seconds=statistics.median(trainer.seconds),
                flops=flops,
                recomputed_flops=flops - reference_flops,
                recomputed_percent=100 * (flops - reference_flops) / reference_flops,
                identical=not differing,
                first_difference=differing[0] if differing else None,
                losses=trainer.losses,
            )
        )
    parameters = sum(parameter.numel() for parameter in trainers[0].model.parameters())
    return Result(config, name, parameters, outcomes)


def ticks(config: Config, settings: tuple[Setting, ...] = SETTINGS) -> int:
    """How often `run` reports progress."""
    return len(settings) * (config.steps + 2) + sum(setting.budget is not None for setting in settings)


def _quiet(_: str) -> None:
    pass
