"""What lives on a rank of a pipeline, from what single actions of its stages take, as plain data.

Problem. A rank runs hundreds of actions in a step, on several chunks. To simulate them all for each plan that is tried
would take minutes for a large model, and says nothing that follows from less.

Idea. Microbatches do not meet: what one stage keeps of one is the same for all, and what an action takes beyond that
does not depend on how many wait. So each stage is run for two microbatches, one after the other (`planning/pieces.py`),
and everything else is a sum. In the second, gradients of parameters are there already and are added to. With the
counts of `inflight.py`, during an action live

    always         parameters, buffers, optimizer state, and for every microbatch of a step what the stage reads of
                   the batch and the labels, and one buffer for the input and one for the gradient of the output,
                   which torch makes once and keeps
    from a stage's first backward on     its gradients
    per microbatch in flight             what its forward, or the first half of its backward, left behind
    per microbatch that is through       on the last stage its output and loss, until the step ends; and what was sent,
                   where the schedule waits for its sends only in the end
    the action                           what it takes above these

Invariants. Bytes are exact, nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .inflight import BACKWARD, FORWARD, INPUTS, WEIGHTS, Moment


@dataclass(frozen=True)
class StageBytes:
    """What a stage takes under one plan; all but `static_bytes` and `gradient_bytes` for one microbatch.

    Attributes:
        static_bytes: Parameters and buffers.
        batch_bytes: What its operations read of the batch and of the labels.
        gradient_bytes: Gradients of the parameters.
        input_bytes: What is received from the stage before; 0 on the first.
        output_bytes: What is sent to the stage behind; 0 on the last.
        whole_bytes: What is kept from the end of its forward to its backward, the output counted, the input not.
        half_bytes: What is kept between the halves of a backward.
        through_bytes: What is kept of it after its backward until the step ends.
        own: The most that an action takes, with all that is kept of its own microbatch; by its kind, and whether the
            stage's gradients were there before.
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
    """Until when a schedule holds what it has sent.

    Attributes:
        to_the_end: Until all actions have run; else until it sends the next of the same sort.
        here: Stages whose next lies on the same rank, to which nothing is sent.
    """

    to_the_end: bool
    here: frozenset[int] = frozenset()


@dataclass(frozen=True)
class RankMoment:
    """When something lives on a rank.

    Attributes:
        bytes: All that lives.
        moment: The action, and what is in flight; None after the last.
        where: In words.
    """

    bytes: int
    moment: Moment | None
    where: str


class Rank:
    """One rank of a pipeline.

    Args:
        moments: What it does.
        microbatches: How many there are in a step.
        sends: Until when what was sent is held.
        optimizer: Bytes of the optimizer's state, and the most that its step takes besides.
    """

    def __init__(
        self, moments: Sequence[Moment], microbatches: int, sends: Sends, optimizer: tuple[int, int] = (0, 0)
    ) -> None:
        self.moments = moments
        self.stages = sorted(moments[0].forwards)
        self._microbatches = microbatches
        self._sends = sends
        self._optimizer = optimizer
        self._filling = {s: max(moment.live(s) for moment in moments) for s in self.stages}

    def static(self, stages: Mapping[int, StageBytes]) -> int:
        """What always lives."""
        each = (stages[stage] for stage in self.stages)
        each_time = (stages[s].batch_bytes + stages[s].input_bytes + stages[s].output_bytes for s in self.stages)
        buffers = self._microbatches * sum(each_time)
        return sum(stage.static_bytes for stage in each) + buffers + self._optimizer[0]

    def at(self, stages: Mapping[int, StageBytes], moment: Moment) -> int:
        """The most bytes that live during an action."""
        action = moment.action
        stage = stages[action.stage]
        own = stage.own[action.kind, moment.weights[action.stage] > 0]
        if action.kind in (BACKWARD, INPUTS) and action.stage in self._sends.here:
            own -= stage.output_bytes  # it lies in the buffer of the next
        return self.static(stages) + sum(self._held(s, stages[s], moment) for s in self.stages) + own

    def _held(self, number: int, stage: StageBytes, moment: Moment) -> int:
        """What lives of a stage besides what an action takes."""
        out = 0 if number not in self._sends.here else stage.output_bytes
        ended = moment.inputs[number]
        return (
            (stage.gradient_bytes if moment.weights[number] else 0)
            + moment.whole(number) * (stage.whole_bytes - out)
            + moment.half(number) * stage.half_bytes
            + ended * stage.through_bytes
            + self._sent(number, stage, ended)
        )

    def _sent(self, number: int, stage: StageBytes, ended: int) -> int:
        """What a stage has sent and is still held: outputs of microbatches that are through, gradients of inputs."""
        outputs = 0 if number in self._sends.here else stage.output_bytes
        inputs = 0 if number - 1 in self._sends.here else stage.input_bytes
        if self._sends.to_the_end:
            return ended * (outputs + inputs)
        # The last one that was sent while the pipeline filled stays in a variable of the schedule's.
        filling = self._filling[number] > 1 and ended >= self._filling[number] - 1
        return min(ended, 1) * inputs + filling * outputs

    def after(self, stages: Mapping[int, StageBytes]) -> list[RankMoment]:
        """What lives when the last stage's outputs are joined, and in the optimizer's step."""
        static = self.static(stages)
        gradients = sum(stages[s].gradient_bytes for s in self.stages)
        through = sum(stages[s].through_bytes for s in self.stages) * self._microbatches
        found = [RankMoment(static + gradients + self._optimizer[1], None, "in the optimizer's step")]
        if through:
            found.append(
                RankMoment(static + gradients + 2 * through, None, "where the microbatches' outputs are joined")
            )
        return found

    def peak(self, stages: Mapping[int, StageBytes]) -> RankMoment:
        """When the most bytes live."""
        most = max(self.moments, key=lambda moment: self.at(stages, moment))
        found = RankMoment(self.at(stages, most), most, f"in {_WORDS[most.action.kind]} of stage {most.action.stage}")
        return max([found, *self.after(stages)], key=lambda moment: moment.bytes)


_WORDS = {
    FORWARD: "a forward",
    BACKWARD: "a backward",
    INPUTS: "a backward for inputs",
    WEIGHTS: "a backward for weights",
}
