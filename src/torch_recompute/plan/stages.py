"""Pipelines as plain data: how a model is split into stages, and the plans of all stages.

The first ranks of a pipeline hold more microbatches at once than the last, so each stage has a plan of its own. All
ranks hold all plans, and so can compare them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

from .. import errors
from ..errors.text import shown, table
from .plan import VERSION, Plan, bad_plan, made, read
from .roles import inside


@dataclass(frozen=True)
class Stages:
    """A way to train a model in a pipeline.

        Stages("1F1B", pipeline=4, microbatches=8)
        Stages("Interleaved1F1B", pipeline=4, microbatches=8, chunks=2, split=(5, 5, 5, 5, 4, 4, 4, 4))
        Stages(schedule, split=("", "layers.9", "layers.20", "layers.30"))

    Attributes:
        schedule: The name of a schedule of `torch.distributed.pipelining` without `Schedule` ("GPipe", "1F1B",
            "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"), or such a schedule
            itself; then the next three are its own and left out.
        pipeline: How many ranks there are.
        microbatches: How many microbatches a step has.
        chunks: How many stages are on each rank.
        split: How many layers each stage has, in order; or the path of the first layer of each, the first being "".
            By default evenly, the first stages one more if need be. What comes before the first layer is on the first
            stage, what comes behind the last one, with the loss, on the last.
    """

    schedule: Any
    pipeline: int = 0
    microbatches: int = 0
    chunks: int = 1
    split: tuple[int, ...] | tuple[str, ...] = ()

    def bounds(self, stages: int, paths: Sequence[str]) -> list[tuple[int, int]]:
        """The layers of each stage: the first, and the first of the next.

        Raises:
            ArgumentError: The split does not fit.
        """
        split = self.split or tuple(len(paths) // stages + (i < len(paths) % stages) for i in range(stages))

        def refuse(why: str) -> NoReturn:
            raise errors.ArgumentError(
                f"split={split!r} does not fit: {why}.\n"
                f"  The model's layers are {paths[0]} to {paths[-1]}, {len(paths)} of them. Write how many each stage "
                'has, or the path of the first of each ("" for the first stage).'
            )

        starts = [0]
        for before, part in pairwise(split):
            if isinstance(part, str) and part not in paths:
                refuse(f"{part!r} is no layer")
            starts.append(paths.index(part) if isinstance(part, str) else starts[-1] + int(before))
        ends = [*starts[1:], len(paths)]
        if len(split) != stages:
            refuse(f"there are {stages} stages")
        if any(a >= b for a, b in zip(starts, ends, strict=True)):
            refuse("each stage needs a layer, in the model's order")
        if isinstance(split[-1], int) and starts[-1] + split[-1] != len(paths):
            refuse(f"the model has {len(paths)} layers")
        return list(zip(starts, ends, strict=True))


@shown
@dataclass(frozen=True, repr=False)
class StagePlan:
    """The plan of one stage.

    Attributes:
        stage: Its number.
        rank: The rank that it is on.
        in_flight: The most microbatches that it holds at once.
        layers: The paths of its layers in the whole model.
        plan: Its plan, which predicts the peak of all chunks of the rank, and the seconds of all microbatches.
    """

    stage: int
    rank: int
    in_flight: int
    layers: tuple[str, ...]
    plan: Plan

    def __str__(self) -> str:
        return f"stage {self.stage} on rank {self.rank}, {self.in_flight} in flight: {self.plan}"


@shown
@dataclass(frozen=True, repr=False)
class StagePlans:
    """The plans of all stages of a pipeline, in order; `plans[stage]` is a plan for `apply`.

    Attributes:
        stages: One entry per stage.
        source: What they were made from, in words.
    """

    stages: tuple[StagePlan, ...]
    source: str = ""

    def __getitem__(self, stage: int) -> Plan:
        return self.stages[stage].plan

    def __iter__(self) -> Iterator[Plan]:
        return (stage.plan for stage in self.stages)

    def __len__(self) -> int:
        return len(self.stages)

    def renamed(self, stage: int, names: Mapping[str, str]) -> Plan:
        """A stage's plan for a module whose layers have other paths than in the whole model.

            apply(chunk, plans.renamed(1, {"layers.4": "layers.0", "layers.5": "layers.1"}))

        Args:
            stage: The number of the stage.
            names: From paths of the whole model to those in the stage's module. Of several that a path begins with the
                longest counts.
        """
        plan = self[stage]

        def name(path: str) -> str:
            fitting = [old for old in names if path == old or path.startswith(old + ".")]
            old = max(fitting, key=len, default=None)
            return path if old is None else (names[old] + path[len(old) :]).strip(".")

        choices = [dataclasses.replace(choice, paths=tuple(map(name, choice.paths))) for choice in plan.choices]
        modules = tuple((name(path), said) for path, said in plan.modules)
        return dataclasses.replace(plan, choices=tuple(choices), modules=modules)

    def __str__(self) -> str:
        promises = [plan.prediction for plan in self if plan.prediction is not None]
        unit, name = errors.unit_of(max((promise.peak_bytes for promise in promises), default=0))
        head = "stage", "rank", "in flight", "layers", "with regions", f"peak {name}", f"of {name}", "costs", "gap"
        rows: list[tuple[str, ...]] = [head]
        for stage in self.stages:
            chosen = [path for choice in stage.plan for path in choice.paths]
            begun = sum(any(inside(path, layer) for path in chosen) for layer in stage.layers)
            numbers = stage.stage, stage.rank, stage.in_flight, len(stage.layers), begun
            promised, figures = stage.plan.prediction, ("", "", "", "")
            if promised is not None:
                peak, budget = (f"{count / unit:,.1f}" for count in (promised.peak_bytes, promised.budget_bytes))
                costs = f"{promised.step_seconds / promised.plain_step_seconds - 1:+.1%}"
                figures = peak, budget, costs, f"{promised.gap:.1%}"
            rows.append((*map(str, numbers), *figures))
        made = f", from {self.source}" if self.source else ""
        return "\n".join([f"plans of {len(self)} stages{made}", *table(rows)])

    def digest(self) -> str:
        """A SHA-256 hash of the choices of all stages, equal in every process for plans that choose alike."""
        data = [[stage.stage, stage.rank, stage.plan.digest()] for stage in self.stages]
        return hashlib.sha256(json.dumps(data, separators=(",", ":")).encode()).hexdigest()

    def diff(self, other: StagePlans) -> str:
        """Shows what turns these plans into the others, line by line; empty if they choose the same."""
        return self._whole().diff(other._whole())

    def _whole(self) -> Plan:
        """All choices as one plan, the number of the stage before each path."""
        choices = [
            dataclasses.replace(choice, paths=tuple(f"stage {stage.stage}: {path}" for path in choice.paths))
            for stage in self.stages
            for choice in stage.plan
        ]
        return Plan(tuple(choices), self.source)

    def to_json(self) -> str:
        """The plans as JSON text; `from_json` reads it."""
        stages = [{**vars(stage), "plan": json.loads(stage.plan.to_json())} for stage in self.stages]
        return json.dumps({"version": VERSION, "source": self.source, "stages": stages}, indent=1)

    @staticmethod
    def from_json(text: str) -> StagePlans:
        """Plans from what `to_json` wrote.

        Raises:
            ArgumentError: The text is no JSON, of another version, or holds something else.
        """
        return read(text, _plans, bad_plan)


def _plans(data: dict[str, Any]) -> StagePlans:
    plans = [Plan.from_json(json.dumps(stage["plan"])) for stage in data["stages"]]
    stages = [made(StagePlan, {**stage, "plan": plan}) for stage, plan in zip(data["stages"], plans, strict=True)]
    return StagePlans(tuple(stages), data["source"])
