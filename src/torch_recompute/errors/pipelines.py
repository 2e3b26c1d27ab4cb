"""Texts for pipelines: schedules, their actions, and how a model is split into stages."""

from __future__ import annotations

from collections.abc import Sequence

from ._say import say


def bad_action(text: object) -> str:
    """Text for something that is not the text of an action."""
    return (
        f"{say(text)} is no action of a pipeline's schedule.\n"
        '  torch.distributed.pipelining writes an action as the stage, F, B, I or W, and the microbatch: "0F3".'
    )


def action_too_early(action: str, before: str) -> str:
    """Text for an action that comes before one that it needs."""
    return (
        f"the schedule does {action} before {before}, which it needs.\n"
        "  A microbatch goes through a stage forward (F), then backward (B), or backward for its inputs (I) and then "
        "for its weights (W)."
    )


def action_twice(action: str, earlier: str) -> str:
    """Text for an action that has been done."""
    return (
        f"the schedule does {action} after {earlier}, which is the same work.\n"
        "  On each stage a microbatch has one forward (F), and one backward: B, or the halves I and W."
    )


def not_a_schedule(schedule: object, names: Sequence[str]) -> str:
    """Text for something that is no schedule with a table."""
    return (
        f"{say(schedule)} is no schedule of torch.distributed.pipelining with a table of actions (pipeline_order).\n"
        f"  Pass such a schedule, or the name of one: {', '.join(names)}."
    )


def unknown_schedule(name: object, names: Sequence[str]) -> str:
    """Text for the name of a schedule that is not there."""
    return f"schedule={name!r} is not known.\n  Known are {', '.join(names)}, as in torch.distributed.pipelining."


def schedule_refuses(name: str, why: str) -> str:
    """Text for numbers that a schedule does not take."""
    return f"the schedule {name} does not take these numbers: {why.rstrip('.')}.\n  Pass others, or another schedule."


def bad_pipeline(pipeline: object, microbatches: object, chunks: object) -> str:
    """Text for numbers of a pipeline that are none."""
    return (
        f"pipeline={pipeline!r}, microbatches={microbatches!r}, chunks={chunks!r}, where whole numbers are expected, 1 "
        "or more.\n"
        "  pipeline is the number of ranks, microbatches those of one step, chunks the number of stages on each rank."
    )
