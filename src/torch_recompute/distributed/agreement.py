"""Ranks that must do the same check that they hold the same plan.

Under data or tensor parallelism all ranks of a group run the same layers. Where one of them recomputes others than its
peers do, nothing fails: it only runs out of memory first, or every step waits for it; and where a region holds a
collective that is repeated in the replay, ranks with different plans wait for each other for ever. Such plans come
about by a configuration file of yesterday on one machine, or by a planner that has measured on each rank by itself.

So ranks compare before training. What travels is a hash of each plan, as plain data; only if they differ do the plans
follow, so that the error can say who differs and where. It is raised on every rank, at the same place, because a rank
that goes on alone waits for the others in its next collective.

Rejected: sending the first rank's plan to the others. A plan that fits one rank's model may name layers that another
has not, and a rank whose configuration is wrong in this is wrong in more; the user is to know.

The stages of a pipeline hold different layers and so different plans. The group to compare over is the one whose ranks
hold the same layers: data parallel, tensor parallel, or both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from .. import errors
from ..plan.plan import Plan
from ..plan.stages import StagePlans

SomePlans = TypeVar("SomePlans", Plan, StagePlans)


def agree_on(plan: SomePlans, group: dist.ProcessGroup | None = None) -> SomePlans:
    """Checks that all ranks of a group hold the same plan.

        apply(model, agree_on(config.plan(model), data_parallel_group))

    To be called by every rank of the group. With several model chunks on a rank, call it once for each, in the same
    order everywhere.

    Args:
        plan: This rank's plan.
        group: Ranks that hold the same layers: data or tensor parallel ranks, not the stages of a pipeline. By default
            all ranks.

    Returns:
        The plan.

    Raises:
        ArgumentError: On every rank, if one of them holds another plan or none, with the ranks that differ and the
            first difference. On this rank, if there is no process group or it is not a member.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_rank(group) < 0:
        raise errors.ArgumentError(
            "agree_on compares plans over the ranks of a group, but there is no process group here, or this rank is "
            "not a member of the one that was passed.\n"
            "  Call torch.distributed.init_process_group first, and pass a group that this rank belongs to; a program "
            "of one process needs no agreement."
        )
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    mine = plan.digest() if isinstance(plan, (Plan, StagePlans)) else None
    if len(set(_gathered(mine, group))) == 1 and mine is not None:
        return plan
    compare(
        dict(
            zip(
                ranks,
                _gathered(plan if isinstance(plan, (Plan, StagePlans)) else type(plan).__name__, group),
                strict=True,
            )
        )
    )
    return plan


def _gathered(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group)
    return found


def _plans_differ(common: Sequence[int], others: Sequence[tuple[Sequence[int], Sequence[str]]]) -> str:
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


def compare(held: Mapping[int, Plan | str]) -> None:
    """Raises unless all ranks hold the same plan.

    Args:
        held: What each rank holds: its plan, or the name of the type of what it has instead.

    Raises:
        ArgumentError: With the ranks that differ from what most of them hold, and the first difference.
    """
    for rank, plan in held.items():
        if isinstance(plan, str):
            raise errors.ArgumentError(
                f"rank {rank} passed no Plan to agree_on, but an object of type {plan}.\n"
                "  Write:  agree_on(RecomputeConfig(...).plan(model), group)   (a rank without regions passes Plan())"
            )
    camps: dict[str, list[int]] = {}
    plans: dict[str, Plan] = {}
    for rank, plan in held.items():
        assert isinstance(plan, (Plan, StagePlans))
        camps.setdefault(plan.digest(), []).append(rank)
        plans.setdefault(plan.digest(), plan)
    if len(camps) < 2:
        return
    common = max(camps, key=lambda digest: (len(camps[digest]), -camps[digest][0]))
    others = [(ranks, _first(plans[common].diff(plans[digest]))) for digest, ranks in camps.items() if digest != common]
    raise errors.ArgumentError(_plans_differ(camps[common], others))


def _first(diff: str) -> list[str]:
    """The first line that goes and the first that comes, of the first place where two plans differ."""
    place = diff.split("\n@@")[1].split("\n")[1:]
    return [line for sign in "-+" for line in [x for x in place if x.startswith(sign)][:1]]


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}"
