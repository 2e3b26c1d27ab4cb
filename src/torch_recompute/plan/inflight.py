"""Microbatches in flight: what a pipeline's schedule does on a rank, and how much of it lives at each moment.

Problem. A stage of a pipeline holds what the forward of a microbatch saved until its backward, which comes after the
stages behind it have had theirs. So a stage holds several microbatches at once, the first stage the most, and how many
is decided by the schedule alone.

Idea. A schedule is, for each rank, the actions in their order: forward (F), backward (B), or the two halves of a
backward, that of the inputs (I) and that of the weights (W). Counting along them says what lives: a microbatch is
*whole* from its forward to its backward or the first half of it, and *half* from there to the second. Several chunks of
the model on one rank are several stages with one order.

The orders of GPipe and 1F1B are written here, because they are two lines each; those of the other schedules of
`torch.distributed.pipelining` are read from their own tables (`planning/schedules.py`).

Rejected: a formula per schedule. The published ones hold for as many microbatches as fill the pipeline; with fewer, or
with a number that is no multiple of the ranks, they do not, and a schedule written by a user has none.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .. import errors

FORWARD, BACKWARD, INPUTS, WEIGHTS = "F", "B", "I", "W"
_TEXT = re.compile(r"(\d+)([FBIW])(\d+)")


@dataclass(frozen=True, order=True)
class Action:
    """One thing that a rank does.

    Attributes:
        stage: The number of the stage in the pipeline.
        kind: "F" forward, "B" backward, "I" the half of a backward that makes the gradients of the inputs, "W" the one
            that makes those of the weights.
        microbatch: The number of the microbatch.
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @staticmethod
    def from_text(text: str) -> Action:
        """An action as `torch.distributed.pipelining` writes it, such as "0F3".

        Raises:
            ArgumentError: It is written otherwise.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise errors.ArgumentError(
                f"{errors.say(text)} is no action of a pipeline's schedule.\n"
                '  torch.distributed.pipelining writes an action as the stage, F, B, I or W, and the microbatch: "0F3".'
            )
        return Action(int(match[1]), match[2], int(match[3]))


Orders = Mapping[int, Sequence[Action]]  # what each rank does, in order


@dataclass(frozen=True)
class Moment:
    """An action of a rank, and how often each of its stages has run before. All counts are by stage.

    Attributes:
        action: What runs.
        forwards: Forwards that have ended.
        inputs: Backwards, or halves for the inputs, that have ended.
        weights: Backwards, or halves for the weights, that have ended.
    """

    action: Action
    forwards: Mapping[int, int]
    inputs: Mapping[int, int]
    weights: Mapping[int, int]

    def whole(self, stage: int) -> int:
        """How many microbatches a stage holds whole, besides the one that the action is of."""
        own = self.action.stage == stage and self.action.kind in (BACKWARD, INPUTS)
        return self.forwards[stage] - self.inputs[stage] - own

    def half(self, stage: int) -> int:
        """How many microbatches of a stage wait for the gradients of weights, besides the one that the action is of."""
        own = self.action.stage == stage and self.action.kind == WEIGHTS
        return self.inputs[stage] - self.weights[stage] - own

    def live(self, stage: int) -> int:
        """How many microbatches a stage holds, whole or half, with the one that the action is of."""
        return self.whole(stage) + self.half(stage) + (self.action.stage == stage)


def moments(actions: Sequence[Action]) -> tuple[Moment, ...]:
    """The actions of one rank with what is in flight during each.

    Raises:
        ArgumentError: A backward comes before its forward, one of the two halves before the other, or one of them
            twice.
    """
    forwards, inputs, weights = (Counter({action.stage: 0 for action in actions}) for _ in range(3))
    counted = {FORWARD: (forwards,), BACKWARD: (inputs, weights), INPUTS: (inputs,), WEIGHTS: (weights,)}
    ended: set[Action] = set()
    found: list[Moment] = []
    for action in actions:
        _check(action, ended)
        found.append(Moment(action, dict(forwards), dict(inputs), dict(weights)))
        for counter in counted[action.kind]:
            counter[action.stage] += 1
        ended.add(action)
    return tuple(found)


def _check(action: Action, ended: set[Action]) -> None:
    of = {kind: Action(action.stage, kind, action.microbatch) for kind in (FORWARD, BACKWARD, INPUTS, WEIGHTS)}
    before = of[INPUTS] if action.kind == WEIGHTS else of[FORWARD]
    if action.kind != FORWARD and before not in ended:
        raise errors.ArgumentError(
            f"the schedule does {action!s} before {before!s}, which it needs.\n"
            "  A microbatch goes through a stage forward (F), then backward (B), or backward for its inputs (I) and "
            "then for its weights (W)."
        )
    again = [of[action.kind], *([of[BACKWARD]] if action.kind in (INPUTS, WEIGHTS) else [])]
    again += [of[INPUTS]] if action.kind == BACKWARD else []
    for other in again:
        if other in ended:
            raise errors.ArgumentError(
                f"the schedule does {action!s} after {other!s}, which is the same work.\n"
                "  On each stage a microbatch has one forward (F), and one backward: B, or the halves I and W."
            )


def in_flight(orders: Orders) -> dict[int, int]:
    """The most microbatches that each stage holds at once, whole or half, the one that runs counted.

        in_flight(one_f_one_b(4, 8))     # {0: 4, 1: 3, 2: 2, 3: 1}

    Args:
        orders: The actions of each rank.

    Returns:
        By the number of the stage, in order.
    """
    most: dict[int, int] = {}
    for actions in orders.values():
        for moment in moments(actions):
            for stage in moment.forwards:
                most[stage] = max(most.get(stage, 0), moment.live(stage))
    return dict(sorted(most.items()))


def in_flight_on_rank(orders: Orders) -> dict[int, int]:
    """The most microbatches that each rank holds at once, those of all its stages added up."""
    return {
        rank: max((sum(moment.live(stage) for stage in moment.forwards) for moment in moments(actions)), default=0)
        for rank, actions in orders.items()
    }


def gpipe(stages: int, microbatches: int) -> dict[int, tuple[Action, ...]]:
    """GPipe: all forwards, then all backwards. One stage per rank."""
    return {
        stage: tuple(Action(stage, kind, m) for kind in (FORWARD, BACKWARD) for m in range(microbatches))
        for stage in range(stages)
    }


def one_f_one_b(stages: int, microbatches: int) -> dict[int, tuple[Action, ...]]:
    """1F1B: as many forwards as stages lie from here to the end, then a backward and a forward in turn."""
    return {stage: tuple(_one_f_one_b(stage, stages - stage, microbatches)) for stage in range(stages)}


def _one_f_one_b(stage: int, warmup: int, microbatches: int) -> Iterable[Action]:
    warmup = min(warmup, microbatches)
    yield from (Action(stage, FORWARD, m) for m in range(warmup))
    for m in range(microbatches):
        yield Action(stage, BACKWARD, m)
        if m + warmup < microbatches:
            yield Action(stage, FORWARD, m + warmup)
