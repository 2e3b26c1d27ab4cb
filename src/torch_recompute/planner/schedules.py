"""Pipeline schedules: what each rank does, in order, and how many microbatches are in flight at each step.

A schedule is, for each rank, its actions in order: forward (F), backward (B), or the two halves of a backward, that of
the inputs (I) and that of the weights (W). Counting along them gives what is alive: a microbatch is *whole* from its
forward to its backward or the first half of it, and *half* from there to the second. Several chunks of the model on one
rank are several stages with one order. A formula per schedule would not do: the published ones hold only for as many
microbatches as fill the pipeline, and a schedule written by a user has none.

Orders are read from the tables of `torch.distributed.pipelining` (`pipeline_order`). A schedule object is made of
stages, which need a process group and modules; for the table alone it asks only for their numbers, so a schedule that
is given by name is built on placeholders. ScheduleGPipe and Schedule1F1B do not run by their tables (in torch 2.13 the
table of 1F1B has another order than what runs); their orders are written here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Protocol

from torch import nn

from .. import errors
from ..plan.stages import Stages

FORWARD, BACKWARD, INPUTS, WEIGHTS = "F", "B", "I", "W"
REDUCE = "R"  # of a stage's gradients over the ranks that share its weights, once after its last backward


@dataclass(frozen=True, order=True)
class Action:
    """One thing that a rank does, such as "0F3": stage 0, the kind (F, B, I or W), microbatch 3."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Orders = Mapping[int, Sequence[Action]]  # what each rank does, in order


@dataclass(frozen=True)
class ScheduleStep:
    """An action of a rank, and how much each of its stages has done before it, by stage."""

    action: Action
    forwards: Mapping[int, int]  # forwards that have ended
    inputs: Mapping[int, int]  # backwards, or halves for the inputs, that have ended
    weights: Mapping[int, int]  # backwards, or halves for the weights, that have ended

    def whole(self, stage: int) -> int:
        """The number of microbatches that a stage holds whole, without the one that runs."""
        own = self.action.stage == stage and self.action.kind in (BACKWARD, INPUTS)
        return self.forwards[stage] - self.inputs[stage] - own

    def half(self, stage: int) -> int:
        """The number of microbatches that wait for the gradients of weights, without the one that runs."""
        own = self.action.stage == stage and self.action.kind == WEIGHTS
        return self.inputs[stage] - self.weights[stage] - own

    def live(self, stage: int) -> int:
        """The number of microbatches that a stage holds, whole or half, with the one that runs."""
        return self.whole(stage) + self.half(stage) + (self.action.stage == stage)


def schedule_steps(actions: Sequence[Action]) -> tuple[ScheduleStep, ...]:
    """The actions of one rank, with what is in flight during each.

    Raises:
        ArgumentError: A backward comes before its forward, one of the two halves before the other, or one of them
            twice.
    """
    forwards, inputs, weights = (Counter({action.stage: 0 for action in actions}) for _ in range(3))
    counted = {FORWARD: (forwards,), BACKWARD: (inputs, weights), INPUTS: (inputs,), WEIGHTS: (weights,)}
    ended: set[Action] = set()
    found: list[ScheduleStep] = []
    for action in actions:
        _check(action, ended)
        found.append(ScheduleStep(action, dict(forwards), dict(inputs), dict(weights)))
        for counter in counted[action.kind]:
            counter[action.stage] += 1
        ended.add(action)
    return tuple(found)


def with_reductions(steps: Sequence[ScheduleStep]) -> list[ScheduleStep]:
    """The actions of a rank, and after the last backward of each stage the reduction of its gradients."""
    last = {step.action.stage: number for number, step in enumerate(steps) if step.action.kind != FORWARD}
    found: list[ScheduleStep] = []
    for number, step in enumerate(steps):
        found.append(step)
        stage = step.action.stage
        if last.get(stage) == number:
            inputs, weights = ({**before, stage: before[stage] + 1} for before in (step.inputs, step.weights))
            action = Action(stage, REDUCE, step.action.microbatch)
            found.append(ScheduleStep(action, step.forwards, inputs, weights))
    return found


def _check(action: Action, ended: set[Action]) -> None:
    of = {kind: replace(action, kind=kind) for kind in (FORWARD, BACKWARD, INPUTS, WEIGHTS)}
    before = of[INPUTS] if action.kind == WEIGHTS else of[FORWARD]
    if action.kind != FORWARD and before not in ended:
        raise errors.ArgumentError(
            f"the schedule does {action!s} before {before!s}, which it needs.\n"
            "  A microbatch goes through a stage forward (F), then backward (B), or backward for its inputs (I) and "
            "then for its weights (W)."
        )
    same = {BACKWARD: (BACKWARD, INPUTS), INPUTS: (INPUTS, BACKWARD), WEIGHTS: (WEIGHTS, BACKWARD)}
    for kind in same.get(action.kind, (FORWARD,)):
        if of[kind] in ended:
            raise errors.ArgumentError(
                f"the schedule does {action!s} after {of[kind]!s}, which is the same work.\n"
                "  On each stage a microbatch has one forward (F), and one backward: B, or the halves I and W."
            )


def in_flight(orders: Orders) -> dict[int, int]:
    """The most microbatches that each stage holds at once, whole or half, the one that runs counted, by stage.

    in_flight(one_f_one_b(4, 8)) is {0: 4, 1: 3, 2: 2, 3: 1}.
    """
    most: dict[int, int] = {}
    for actions in orders.values():
        for step in schedule_steps(actions):
            for stage in step.forwards:
                most[stage] = max(most.get(stage, 0), step.live(stage))
    return dict(sorted(most.items()))


def gpipe(stages: int, microbatches: int) -> dict[int, tuple[Action, ...]]:
    """GPipe: all forwards, then all backwards. One stage per rank."""
    return {
        stage: tuple(Action(stage, kind, m) for kind in (FORWARD, BACKWARD) for m in range(microbatches))
        for stage in range(stages)
    }


def one_f_one_b(stages: int, microbatches: int) -> dict[int, tuple[Action, ...]]:
    """1F1B: as many forwards as stages lie from here to the end, then a backward and a forward in turn."""
    orders: dict[int, tuple[Action, ...]] = {}
    for stage in range(stages):
        forwards = [Action(stage, FORWARD, m) for m in range(microbatches)]
        warmup = min(stages - stage, microbatches)
        order = forwards[:warmup]
        for m in range(microbatches):
            order += [Action(stage, BACKWARD, m), *forwards[m + warmup : m + warmup + 1]]
        orders[stage] = tuple(order)
    return orders


_WRITTEN = {"ScheduleGPipe": gpipe, "Schedule1F1B": one_f_one_b}
NAMES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def orders_of(schedule: Any) -> Orders:
    """The actions of each rank under a schedule object of `torch.distributed.pipelining`.

    Raises:
        ArgumentError: It is none, or has no table.
    """
    table: Any = getattr(schedule, "pipeline_order", None)
    if not table or not isinstance(table, dict):
        raise errors.ArgumentError(
            f"{errors.say(schedule)} is no schedule of torch.distributed.pipelining with a table of actions "
            "(pipeline_order).\n"
            f"  Pass such a schedule, or the name of one: {', '.join(NAMES)}."
        )
    written = _WRITTEN.get(type(schedule).__name__)
    if written is not None:
        kinds = [str(action.computation_type.value) for action in table[0] if action is not None]
        return written(len(table), kinds.count("F"))
    return {int(rank): tuple(_flat(actions)) for rank, actions in table.items()}


def _flat(actions: Iterable[Any]) -> Iterable[Action]:
    for action in actions:
        if action is None:
            continue
        kind = str(action.computation_type.value)
        if action.sub_actions is not None:
            yield from _flat(action.sub_actions)
        elif kind in ("F", "B", "I", "W"):
            yield Action(int(action.stage_index), kind, int(action.microbatch_index))


def _unknown_schedule(name: object, names: Sequence[str]) -> str:
    return f"schedule={name!r} is not known.\n  Known are {', '.join(names)}, as in torch.distributed.pipelining."


def _schedule_refuses(name: str, why: str) -> str:
    return f"the schedule {name} does not take these numbers: {why.rstrip('.')}.\n  Pass others, or another schedule."


def orders_named(name: str, pipeline: int, microbatches: int, chunks: int = 1) -> Orders:
    """The actions of each rank under a schedule of `torch.distributed.pipelining` that is only named.

    Args:
        name: Such as "1F1B" or "Interleaved1F1B": the name of torch's class without `Schedule`, in any case.
        pipeline: The number of ranks.
        microbatches: The number of microbatches in a step.
        chunks: The number of stages on each rank.

    Raises:
        ArgumentError: There is no such schedule, or it does not take these numbers.
    """
    if any(type(n) is not int or n < 1 for n in (pipeline, microbatches, chunks)):
        raise errors.ArgumentError(
            f"pipeline={pipeline!r}, microbatches={microbatches!r}, chunks={chunks!r}, where whole numbers are "
            "expected, 1 or more.\n"
            "  pipeline is the number of ranks, microbatches those of one step, chunks the number of stages on each "
            "rank."
        )
    full = next((known for known in NAMES if known.lower() == str(name).lower().removeprefix("schedule")), None)
    if full is None:
        raise errors.ArgumentError(_unknown_schedule(name, NAMES))
    if full in ("GPipe", "1F1B"):
        if chunks != 1:
            raise errors.ArgumentError(_schedule_refuses(full, f"it has one stage per rank, not {chunks}"))
        if full == "1F1B" and microbatches < pipeline:
            why = f"it needs as many microbatches as ranks, and {microbatches} are fewer than {pipeline}"
            raise errors.ArgumentError(_schedule_refuses(full, why))
        return _WRITTEN[f"Schedule{full}"](pipeline, microbatches)
    from torch.distributed.pipelining import schedules

    stages = [
        SimpleNamespace(
            stage_index=chunk,
            num_stages=pipeline * chunks,
            group_size=pipeline,
            group_rank=0,
            submod=nn.Identity(),
            has_backward=True,
            is_first=chunk == 0,
            is_last=False,
        )
        for chunk in range(chunks)
    ]
    make: Any = getattr(schedules, f"Schedule{full}", None)
    if make is None:
        raise errors.ArgumentError(_unknown_schedule(full, [n for n in NAMES if hasattr(schedules, f"Schedule{n}")]))
    try:
        return orders_of(make(stages, microbatches))
    except (ValueError, AssertionError) as error:
        raise errors.ArgumentError(_schedule_refuses(full, str(error))) from None


class Schedule(Protocol):
    """A schedule of `torch.distributed.pipelining`."""

    pipeline_order: Any


@dataclass(frozen=True)
class Pipeline:
    """A schedule over the layers of a model."""

    name: str  # the schedule's, without `Schedule`
    orders: Orders
    microbatches: int  # in a step
    bounds: tuple[tuple[int, int], ...]  # of each stage: its first layer, and the first of the next

    @staticmethod
    def of(stages: Stages | Schedule, paths: Sequence[str]) -> Pipeline:
        """The pipeline that a `Stages`, or a schedule of torch's, describes for these layers.

        Raises:
            ArgumentError: The schedule is none, or does not take these numbers, or the split does not fit.
        """
        if not isinstance(stages, Stages):
            if not hasattr(stages, "pipeline_order"):
                raise errors.ArgumentError(
                    f"stages is {errors.say(stages)}, where a pipeline is expected.\n"
                    '  Write stages=Stages("1F1B", pipeline=4, microbatches=8), or pass a schedule of '
                    "torch.distributed.pipelining."
                )
            stages = Stages(stages)
        if isinstance(stages.schedule, str):
            orders = orders_named(stages.schedule, stages.pipeline, stages.microbatches, stages.chunks)
            name = stages.schedule
        else:
            orders, name = orders_of(stages.schedule), type(stages.schedule).__name__
        actions = [action for order in orders.values() for action in order]
        count = 1 + max(action.stage for action in actions)
        microbatches = 1 + max(action.microbatch for action in actions)
        return Pipeline(name.removeprefix("Schedule"), orders, microbatches, tuple(stages.bounds(count, paths)))
