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


def bad_split(split: object, why: str, layers: Sequence[str]) -> str:
    """Text for a split that does not fit a model."""
    return (
        f"split={split!r} does not fit: {why}.\n"
        f"  The model's layers are {layers[0]} to {layers[-1]}, {len(layers)} of them. Write how many each stage has, "
        'or the path of the first of each ("" for the first stage).'
    )


def bad_stages(stages: object) -> str:
    """Text for something that says nothing of a pipeline."""
    return (
        f"stages is {say(stages)}, where a pipeline is expected.\n"
        '  Write stages=Stages("1F1B", pipeline=4, microbatches=8), or pass a schedule of torch.distributed.pipelining.'
    )


def budgets_per_rank(given: int, ranks: int) -> str:
    """Text for another number of budgets than there are ranks."""
    return (
        f"budget holds {given} budgets, and the pipeline has {ranks} ranks.\n"
        "  Pass one for all, or a list with one per rank."
    )


def stages_and_sizes() -> str:
    """Text for a pipeline and sizes at once."""
    return (
        "make_plan was given stages and sizes; the microbatches of a pipeline are of one size.\n"
        "  Pass as args one microbatch of the largest size."
    )


def stages_and_loop() -> str:
    """Text for words of a training loop with stages."""
    return (
        "hold_output=, accumulate= and set_to_none= describe a loop over one model, and a pipeline's schedule says "
        "itself what a rank holds.\n"
        "  Leave them out with stages=; microbatches are those of the schedule."
    )


def stages_and_offload() -> str:
    """Text for a pipeline and host memory at once."""
    return (
        "make_plan was given stages and offload; plans for the stages of a pipeline keep everything on the device.\n"
        "  Leave offload out, or let regions of a stage that you choose keep their inputs there: "
        'Choice(..., store="host").'
    )


def optimizer_of_a_whole(optimizer: object) -> str:
    """Text for an optimizer of the whole model where each stage has its own."""
    return (
        f"optimizer is a {type(optimizer).__name__} of the whole model, but each rank of a pipeline has one of its "
        "stages' parameters.\n"
        "  Pass what makes it: optimizer=torch.optim.AdamW, or a function from a list of parameters to an optimizer."
    )


def called_again_in_stages(path: str, times: int) -> str:
    """Text for a pipeline through a module that a forward calls several times."""
    return (
        f"{path} is called {times} times in one forward, and a pipeline cannot be cut between calls of one module: its "
        "parameters would lie on several stages.\n"
        "  Plan the model without stages=, or give each stage a module of its own."
    )


def rank_does_not_fit(rank: int, why: str) -> str:
    """Text for a rank of a pipeline that no plan fits on."""
    return f"rank {rank} of the pipeline: {why}"


def fit_of_ranks() -> str:
    """Text for "fit" for the ranks of a pipeline."""
    return (
        'budget="fit" means what a device has free now, which each rank of a pipeline knows only of its own.\n'
        '  Pass bytes, such as budget="70GiB", or a list with one budget per rank.'
    )
