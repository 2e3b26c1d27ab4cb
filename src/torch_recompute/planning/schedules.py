"""What the schedules of `torch.distributed.pipelining` do, read from their own tables.

A schedule object holds, for each rank, the actions of all ranks (`pipeline_order`). It is made of stages, which need a
process group and modules; for the table alone it asks them for no more than their number, so a schedule that is only
named is built on stand-ins here, on one process and without torch.distributed being initialised.

ScheduleGPipe and Schedule1F1B do not run by their tables, and that of 1F1B is another order than what they run (in
torch 2.13 the last rank begins with microbatch 1 and holds two); their orders are those of `plan/inflight.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from torch import nn

from .. import errors
from ..plan.inflight import Action, Orders, gpipe, one_f_one_b

_WRITTEN = {"ScheduleGPipe": gpipe, "Schedule1F1B": one_f_one_b}
NAMES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def orders_of(schedule: Any) -> Orders:
    """What each rank does under a schedule object of `torch.distributed.pipelining`.

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
    """Text for the name of a schedule that is not there."""
    return f"schedule={name!r} is not known.\n  Known are {', '.join(names)}, as in torch.distributed.pipelining."


def _schedule_refuses(name: str, why: str) -> str:
    """Text for numbers that a schedule does not take."""
    return f"the schedule {name} does not take these numbers: {why.rstrip('.')}.\n  Pass others, or another schedule."


def orders_named(name: str, pipeline: int, microbatches: int, chunks: int = 1) -> Orders:
    """What each rank does under a schedule of `torch.distributed.pipelining` that is only named.

        in_flight(orders_named("Interleaved1F1B", pipeline=4, microbatches=8, chunks=2))

    Args:
        name: Such as "1F1B" or "Interleaved1F1B": the name of torch's class without `Schedule`, in any case.
        pipeline: How many ranks there are.
        microbatches: How many microbatches a step has.
        chunks: How many stages lie on each rank.

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
    return orders_of(_built(full, pipeline, microbatches, chunks))


def _built(name: str, pipeline: int, microbatches: int, chunks: int) -> Any:
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
    make: Any = getattr(schedules, f"Schedule{name}", None)
    if make is None:
        raise errors.ArgumentError(_unknown_schedule(name, [n for n in NAMES if hasattr(schedules, f"Schedule{n}")]))
    try:
        return make(stages, microbatches)
    except (ValueError, AssertionError) as error:
        raise errors.ArgumentError(_schedule_refuses(name, str(error))) from None
