"""Texts for ranks that were to hold the same plan."""

from __future__ import annotations

from collections.abc import Sequence


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}"


def plans_differ(common: Sequence[int], others: Sequence[tuple[Sequence[int], Sequence[str]]]) -> str:
    """Text for ranks with different plans."""
    lines = [
        f"  {_ranks(ranks)} {'holds' if len(ranks) == 1 else 'hold'} another. First difference:"
        + "".join(f"\n    {line}" for line in difference)
        for ranks, difference in others
    ]
    return "\n".join(
        [
            f"the ranks of this group do not hold the same plan. One is held by {_ranks(common)}.",
            *lines,
            "  Ranks that hold the same layers must recompute the same ones. Look for a configuration file, a command "
            "line or a checkpoint that is not the same everywhere; a plan made by measuring is made on one rank and "
            "sent to the others as plan.to_json(). The stages of a pipeline hold different layers: pass the data or "
            "tensor parallel group,  agree_on(plan, group).",
        ]
    )


def no_plan_on_rank(rank: int, what: str) -> str:
    """Text for a rank that passed something else than a plan."""
    return (
        f"rank {rank} passed no Plan to agree_on, but an object of type {what}.\n"
        "  Write:  agree_on(RecomputeConfig(...).plan(model), group)   (a rank without regions passes Plan())"
    )


def no_ranks_to_ask() -> str:
    """Text for an agreement without a group."""
    return (
        "agree_on compares plans over the ranks of a group, but there is no process group here, or this rank is not a "
        "member of the one that was passed.\n"
        "  Call torch.distributed.init_process_group first, and pass a group that this rank belongs to; a program of "
        "one process needs no agreement."
    )
