"""The memory of a pipeline rank: a sum over the microbatches in flight, from what single actions of its stages take.

A rank runs hundreds of actions in a step, on several chunks. Microbatches do not meet: what a stage keeps of one is the
same for all, and what an action takes beyond that does not depend on how many wait. So each stage is run for two
microbatches (`stage_runs.py`), and everything else is a sum. With the counts of `schedules.py`, during an action live

    static         parameters, buffers, optimizer state, and what the runtime keeps throughout the step
    gradients      of a stage from its first backward on, or from the start (`preallocated`)
    per microbatch in flight       what its forward, or the first half of its backward, left behind
    per microbatch that is through what the runtime keeps of it until the step ends
    the action     what it takes above these

Two runtimes are described. torch's makes one buffer for the input and one for the gradient of the output of every
microbatch and keeps them, holds the last stage's outputs to the end of the step, and what it has sent for as long as
`Sends` says. Megatron's releases what is sent, and has buffers for gradients from the start; what it receives is part
of what a microbatch keeps. Bytes are exact, nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .schedules import BACKWARD, FORWARD, INPUTS, WEIGHTS, Pipeline, ScheduleStep

_WORDS = {
    FORWARD: "a forward",
    BACKWARD: "a backward",
    INPUTS: "a backward for inputs",
    WEIGHTS: "a backward for weights",
}


@dataclass(frozen=True)
class StageBytes:
    """What a stage takes under one plan; all but `static_bytes` and `gradient_bytes` for one microbatch.

    Attributes:
        static_bytes: Parameters and buffers.
        batch_bytes: What its operations read of the batch and of the labels.
        gradient_bytes: Gradients of the parameters.
        input_bytes: What is received from the stage before; 0 on the first.
        output_bytes: What is sent to the next stage; 0 on the last.
        whole_bytes: What is kept from the end of its forward to its backward, the output counted, the input not.
        half_bytes: What is kept between the halves of a backward.
        through_bytes: What is kept of it after its backward until the step ends.
        own: The most that an action takes, with all that is kept of its own microbatch; by its kind, and whether the
            stage's gradients existed before.
    """

    static_bytes: int
    batch_bytes: int
    gradient_bytes: int
    input_bytes: int
    output_bytes: int
    whole_bytes: int
    half_bytes: int
    through_bytes: int
    own: Mapping[tuple[str, bool], int]


@dataclass(frozen=True)
class Sends:
    """How long torch's runtime holds what a rank has sent.

    Attributes:
        to_the_end: Until all actions have run; else until it sends the next of the same sort.
        here: Stages whose next one is on the same rank, to which nothing is sent.
    """

    to_the_end: bool
    here: frozenset[int] = frozenset()

    @staticmethod
    def of(pipeline: Pipeline, rank: int) -> Sends:
        """For a rank: the schedule 1F1B waits for each send before the next."""
        here = {action.stage for action in pipeline.orders[rank]}
        return Sends(pipeline.name.upper() != "1F1B", frozenset(stage for stage in here if stage + 1 in here))


@dataclass(frozen=True)
class RankPeak:
    """When the most bytes are alive on a rank.

    Attributes:
        bytes: All that is alive.
        step: The action, and what is in flight; None after the last.
        where: In words.
    """

    bytes: int
    step: ScheduleStep | None
    where: str


class RankMemory:
    """The memory of one rank.

    Args:
        steps: What it does.
        microbatches: How many there are in a step.
        sends: How long what was sent is held.
        optimizer: Bytes of the optimizer's state, and the most that its step takes besides.
        preallocated: Whether gradients have buffers from the start.
        reserved: Bytes that something else holds throughout the step.
    """

    def __init__(
        self,
        steps: Sequence[ScheduleStep],
        microbatches: int,
        sends: Sends,
        optimizer: tuple[int, int] = (0, 0),
        preallocated: bool = False,
        reserved: int = 0,
    ) -> None:
        if preallocated:  # nothing is kept of microbatches that are through: one action with so much in flight will do
            steps = list({(s.action.stage, s.action.kind, *map(s.live, s.forwards)): s for s in steps}.values())
        self.steps = steps
        self.stages = sorted(steps[0].forwards)
        self._microbatches = microbatches
        self._sends = sends
        self._optimizer = optimizer
        self._preallocated = preallocated
        self._reserved = reserved
        self._filling = {s: max(step.live(s) for step in steps) for s in self.stages}

    def static(self, stages: Mapping[int, StageBytes]) -> int:
        """What is alive throughout the step."""
        each = [stages[stage] for stage in self.stages]
        buffers = self._microbatches * sum(s.batch_bytes + s.input_bytes + s.output_bytes for s in each)
        return sum(stage.static_bytes for stage in each) + buffers + self._optimizer[0] + self._reserved

    def at(self, stages: Mapping[int, StageBytes], step: ScheduleStep) -> int:
        """The most bytes that are alive during an action."""
        action = step.action
        stage = stages[action.stage]
        own = stage.own[action.kind, self._preallocated or step.weights[action.stage] > 0]
        if action.kind in (BACKWARD, INPUTS) and action.stage in self._sends.here:
            own -= stage.output_bytes  # it is in the buffer of the next
        return self.static(stages) + sum(self._held(s, stages[s], step) for s in self.stages) + own

    def _held(self, number: int, stage: StageBytes, step: ScheduleStep) -> int:
        """What is alive of a stage besides what an action takes."""
        out = 0 if number not in self._sends.here else stage.output_bytes
        ended = step.inputs[number]
        return (
            (stage.gradient_bytes if self._preallocated or step.weights[number] else 0)
            + step.whole(number) * (stage.whole_bytes - out)
            + step.half(number) * stage.half_bytes
            + ended * stage.through_bytes
            + self._sent(number, stage, ended)
        )

    def _sent(self, number: int, stage: StageBytes, ended: int) -> int:
        """What a stage has sent and still holds: outputs of microbatches that are through, gradients of inputs."""
        outputs = 0 if number in self._sends.here else stage.output_bytes
        inputs = 0 if number - 1 in self._sends.here else stage.input_bytes
        if self._sends.to_the_end:
            return ended * (outputs + inputs)
        # The last one that was sent while the pipeline filled stays in a variable of the schedule's.
        filling = self._filling[number] > 1 and ended >= self._filling[number] - 1
        return min(ended, 1) * inputs + filling * outputs

    def after(self, stages: Mapping[int, StageBytes]) -> list[RankPeak]:
        """What is alive when the last stage's outputs are joined, and in the optimizer's step."""
        base = self.static(stages) + sum(stages[s].gradient_bytes for s in self.stages)
        through = sum(stages[s].through_bytes for s in self.stages) * self._microbatches
        found = [RankPeak(base + self._optimizer[1], None, "in the optimizer's step")]
        if through:
            found.append(RankPeak(base + 2 * through, None, "where the microbatches' outputs are joined"))
        return found

    def fullest(self, stages: Mapping[int, StageBytes]) -> ScheduleStep:
        """The action during which the most is alive."""
        return max(self.steps, key=lambda step: self.at(stages, step))

    def peak(self, stages: Mapping[int, StageBytes]) -> RankPeak:
        """When the most bytes are alive."""
        most = self.fullest(stages)
        found = RankPeak(self.at(stages, most), most, f"in {_WORDS[most.action.kind]} of stage {most.action.stage}")
        return max([found, *self.after(stages)], key=lambda peak: peak.bytes)
