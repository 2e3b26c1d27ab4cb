"""The memory of a pipeline rank: a sum over the microbatches in flight, from what single actions of its stages take.

A rank runs hundreds of actions in a step, on several chunks, and microbatches do not meet: what a stage keeps of one is
the same for all, and what an action takes beyond that does not depend on how many wait. So each stage is run for two
microbatches (`stage_runs.py`), and with the counts of `schedules.py` this is alive during an action:

    static         parameters, buffers, optimizer state, and what the runtime keeps throughout the step
    gradients      of a stage from its first backward on, or from the start (`preallocated`, or of parameters that the
                   optimizer does not hold, which nobody clears)
    per microbatch in flight       what its forward, or the first half of its backward, left behind
    per microbatch that is through what the runtime keeps of it until the step ends
    the action     what it takes above these

torch's runtime makes one buffer for the input and one for the gradient of the output, if that requires one, of every
microbatch and keeps them, holds the last stage's outputs to the end of the step, and what it has sent until it sends
the next of the same sort (`to_the_end`: until all actions have run). Megatron's releases what is sent, has buffers for
gradients from the start, and what it receives is part of what a microbatch keeps. Bytes are exact, nothing is rounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import mul

from ..simulation.recording import SHARDING
from .schedules import BACKWARD, FORWARD, INPUTS, REDUCE, WEIGHTS, ScheduleStep, with_reductions

_WORDS = {
    FORWARD: "a forward",
    BACKWARD: "a backward",
    INPUTS: "a backward for inputs",
    WEIGHTS: "a backward for weights",
    REDUCE: "the reduction of gradients",
}


@dataclass(frozen=True)
class StageBytes:
    """Bytes of a stage under one plan; all but the static ones and the gradients for one microbatch."""

    static_bytes: int  # parameters and buffers
    batch_bytes: int  # what its operations read of the batch and of the labels
    gradient_bytes: int  # of the parameters
    input_bytes: int  # received from the stage before; 0 on the first
    output_bytes: int  # sent to the next stage; 0 on the last
    returned_bytes: int  # received from it: the gradients of those outputs that require one
    back_bytes: int  # sent to the stage before: the gradients of those inputs that require one
    whole_bytes: int  # kept from the end of its forward to its backward, the output counted, the input not
    half_bytes: int  # kept between the halves of a backward
    through_bytes: int  # kept after its backward until the step ends
    own: Mapping[tuple[str, bool], int]
    """The most that an action takes, with all that is kept of its own microbatch: by its kind, and by whether the
    stage's gradients existed before."""
    after: Mapping[tuple[str, bool, str], int] = field(default_factory=dict[tuple[str, bool, str], int])
    """The same where weights are sharded, also by the kind of the stage's action before; "" before the first."""
    gathered: Mapping[str, int] = field(default_factory=dict[str, int])
    """Then bytes of whole weights, by the kind of the stage's last action."""
    reduced_bytes: int = 0  # then of the gradients once they have been reduced
    left_bytes: int = 0  # of the gradients that the step before has left, since its optimizer does not hold them

    def gradients_after(self, last: str, made: bool = True) -> int:
        """The bytes of gradients after an action; until a backward has `made` the others, of those that were left."""
        if not made:
            return self.left_bytes
        return self.reduced_bytes if last == REDUCE else self.gradient_bytes


@dataclass(frozen=True)
class RankPeak:
    """When the most bytes are alive on a rank: the action and what is in flight, or None after the last; in words."""

    bytes: int
    step: ScheduleStep | None
    where: str


class RankMemory:
    """The memory of one rank.

    Attributes:
        steps: Its actions.
        stages: Its stages.
        most: The most microbatches that each of them holds at once.
    """

    def __init__(
        self,
        steps: Sequence[ScheduleStep],
        microbatches: int,  # in a step
        to_the_end: bool,  # whether what was sent is held until all actions have run
        here: frozenset[int] = frozenset(),  # stages whose next one is on the same rank, to which nothing is sent
        optimizer: tuple[int, int] = (0, 0),  # bytes of its state, and the most that its step takes besides
        preallocated: bool = False,  # whether gradients have buffers from the start
        reserved: int = 0,  # bytes that something else holds throughout the step
        sharded: bool = False,  # whether gradients are reduced after a stage's last backward
    ) -> None:
        if preallocated:  # nothing is kept of microbatches that are through: one action with so much in flight will do
            steps = list({(s.action.stage, s.action.kind, *map(s.live, s.forwards)): s for s in steps}.values())
        every = with_reductions(steps) if sharded else steps
        self.steps = [step for step in every if step.action.kind != REDUCE]
        self._reductions = [step for step in every if step.action.kind == REDUCE]
        self.stages = sorted(steps[0].forwards)
        self._microbatches, self._to_the_end, self._here = microbatches, to_the_end, here
        self._optimizer, self._preallocated, self._reserved = optimizer, preallocated, reserved
        self.most = {s: max(step.live(s) for step in steps) for s in self.stages}
        self._sharded = sharded
        self._counts = {id(step): [(s, self._alive(s, step)) for s in self.stages] for step in every}
        last, self._last = dict.fromkeys(self.stages, ""), dict[int, dict[int, str]]()
        for step in every:
            self._last[id(step)] = dict(last)
            last[step.action.stage] = step.action.kind

    def before(self, kind: str) -> Counter[tuple[int, str]]:
        """Counts how often each stage does an action of some kind after one of each other kind."""
        steps = (step for step in (*self.steps, *self._reductions) if step.action.kind == kind)
        return Counter((step.action.stage, self._last[id(step)][step.action.stage]) for step in steps)

    def _static(self, stages: Mapping[int, StageBytes]) -> int:
        each = [stages[stage] for stage in self.stages]
        return sum(stage.static_bytes for stage in each) + self._sent(each) + self._optimizer[0] + self._reserved

    def _sent(self, stages: Sequence[StageBytes]) -> int:
        """The bytes of the batch, and of the buffers that are there throughout the step."""
        return self._microbatches * sum(s.batch_bytes + s.input_bytes + s.returned_bytes for s in stages)

    def made_of(
        self, stages: Mapping[int, StageBytes], uses: Mapping[int, Mapping[str, Mapping[str, int]]]
    ) -> dict[str, int]:
        """Returns the bytes of the peak by what they are for; they sum to it.

        Args:
            stages: The bytes of each.
            uses: Of each, see `StageRun.uses`.
        """
        peak, each = self.peak(stages), [stages[stage] for stage in self.stages]
        found = {
            "weights": sum(stage.static_bytes for stage in each),
            "gradients": sum(map(self._at_the_end, each)),
            "states": self._optimizer[0],
            "batch and output": self._sent(each),
        }
        if peak.step is None:
            return {**found, "transient": peak.bytes - sum(found.values())}
        action, counts = peak.step.action, self._counts[id(peak.step)]
        last = self._last[id(peak.step)]
        found["gradients"] = sum(stages[stage].gradients_after(last[stage], count[0] > 0) for stage, count in counts)
        if not counts[self.stages.index(action.stage)][1][0]:  # those that this backward makes
            running = stages[action.stage]
            with_them = running.after.get((action.kind, False, last[action.stage]), running.own[action.kind, False])
            found["gradients"] += max(0, with_them - running.own[action.kind, True])
        found["batch and output"] += sum(
            stages[stage].back_bytes * count[4] + stages[stage].output_bytes * count[5] for stage, count in counts
        )
        use = dict(uses[action.stage].get(action.kind, {}))
        gathered = sum(stages[stage].gathered.get(last[stage], 0) for stage in self.stages)
        found["loss"], found["buffers of ranks"] = use.get("loss", 0), use.get(SHARDING, 0) + gathered
        found["transient"] = use.get("transient", 0) + self._reserved
        return {**found, "kept by layers": peak.bytes - sum(found.values())}

    def most_hosted(self, each: Mapping[int, int]) -> int:
        """The most bytes in host memory, of so many for each microbatch of a stage."""
        return max(sum(step.live(stage) * nbytes for stage, nbytes in each.items()) for step in self.steps)

    def at(self, stages: Mapping[int, StageBytes], step: ScheduleStep) -> int:
        """The most bytes that are alive during one of its actions."""
        return self._static(stages) + self._during(stages, step)

    def _during(self, stages: Mapping[int, StageBytes], step: ScheduleStep) -> int:
        """Of these, the bytes that other actions may not have."""
        action = step.action
        stage = stages[action.stage]
        last = self._last[id(step)]
        had = self._preallocated or step.weights[action.stage] > 0
        own = stage.after.get((action.kind, had, last[action.stage]), stage.own[action.kind, had])
        if action.kind in (BACKWARD, INPUTS) and action.stage in self._here:
            own -= stage.returned_bytes  # it is in the buffer of the next
        for number, counts in self._counts[id(step)]:
            s, before = stages[number], last[number]
            own += s.gathered.get(before, 0) + s.gradients_after(before, counts[0] > 0)
            each = s.whole_bytes, s.half_bytes, s.through_bytes, s.back_bytes, s.output_bytes
            own += sum(map(mul, counts[1:], each))
        return own

    def _alive(self, number: int, step: ScheduleStep) -> tuple[int, ...]:
        """Counts how often each of a stage's bytes is alive, besides those of an action.

        They are those of gradients, of microbatches that are whole, half and through, and of what was sent: back and
        on.
        """
        ended, whole = step.inputs[number], step.whole(number)
        inputs, outputs = number - 1 not in self._here, number not in self._here  # whether it has buffers for them
        back, sent = ended * inputs, ended * outputs
        if not self._to_the_end:
            # The last one that was sent while the pipeline filled stays in a variable of the schedule's.
            filling = self.most[number] > 1 and ended >= self.most[number] - 1
            back, sent = min(ended, 1) * inputs, filling * outputs
        has_gradients = self._preallocated or step.weights[number] > 0
        return has_gradients, whole, step.half(number), ended, back, sent - whole * (not outputs)

    def after(self, stages: Mapping[int, StageBytes]) -> list[RankPeak]:
        """The peaks where the last stage's outputs are joined, and in the optimizer's step."""
        base = self._static(stages) + sum(self._at_the_end(stages[s]) for s in self.stages)
        through = sum(stages[s].through_bytes for s in self.stages) * self._microbatches
        found = [RankPeak(base + self._optimizer[1], None, "in the optimizer's step")]
        if through:
            found.append(RankPeak(base + 2 * through, None, "where the microbatches' outputs are joined"))
        return found

    def _at_the_end(self, stage: StageBytes) -> int:
        """The bytes of its gradients."""
        return stage.gradients_after(REDUCE if self._sharded else "")

    def fullest(self, stages: Mapping[int, StageBytes]) -> ScheduleStep:
        """The action during which the most is alive."""
        return max(self.steps, key=lambda step: self._during(stages, step))

    def peak(self, stages: Mapping[int, StageBytes]) -> RankPeak:
        """When the most bytes are alive."""
        found = [
            RankPeak(self.at(stages, step), step, f"in {_WORDS[step.action.kind]} of stage {step.action.stage}")
            for step in (self.fullest(stages), *self._reductions)
        ]
        return max([*found, *self.after(stages)], key=lambda peak: peak.bytes)
