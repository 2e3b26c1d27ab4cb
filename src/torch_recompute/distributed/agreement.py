"""Checks before training that ranks which must recompute the same hold the same plan.

Where a data or tensor parallel rank recomputes other layers than its peers do, nothing fails: it only runs out of
memory first, or every step waits for it; and where a region repeats a collective, ranks with different plans wait for
each other forever. So ranks compare before training: first a hash of each plan, and only if these differ the plans, for
the error to name the ranks that differ and the first difference. It is raised on every rank, because a rank that goes
on alone waits for the others in its next collective. The first rank's plan is not sent to the others: a rank whose
configuration is wrong in this is wrong in more.
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

    Call it on every rank of the group. With several model chunks on a rank, call it once for each, in the same
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
    check_group("agree_on", group)
    if not dist.is_available() or not dist.is_initialized() or dist.get_rank(group) < 0:
        raise errors.ArgumentError(
            "agree_on compares plans over the ranks of a group, but there is no process group here, or this rank is "
            "not a member of the one that was passed.\n"
            "  Call torch.distributed.init_process_group first, and pass a group that this rank belongs to; a program "
            "of one process needs no agreement."
        )
    held = plan if isinstance(plan, (Plan, StagePlans)) else type(plan).__name__
    hashes = _gathered(None if isinstance(held, str) else held.digest(), group)
    if hashes[0] is None or len(set(hashes)) > 1:
        ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        compare(dict(zip(ranks, _gathered(held, group), strict=True)))
    return plan


def check_group(face: str, group: Any) -> None:
    """Raises if what the function named `face` got as its group is none, as a device mesh is."""
    if not (group is None or isinstance(group, dist.ProcessGroup) or group == dist.GroupMember.NON_GROUP_MEMBER):
        raise errors.ArgumentError(
            f"{face}: group is {errors.say(group)}, where a process group is expected, or None for all ranks.\n"
            '  Write device_mesh.get_group("tp") for a dimension of a mesh, or torch.distributed.new_group([0, 1]).'
        )


def _gathered(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group)
    return found


def compare(held: Mapping[int, Plan | StagePlans | str]) -> None:
    """Raises unless all ranks hold the same plan.

    Args:
        held: What each rank holds: its plan, or the name of the type of what it has instead.

    Raises:
        ArgumentError: With the ranks that differ from what most of them hold, and the first difference.
    """
    camps: dict[str, tuple[Any, list[int]]] = {}  # by digest: a plan, and the ranks that hold it
    for rank, plan in held.items():
        if isinstance(plan, str):
            raise errors.ArgumentError(
                f"rank {rank} passed no Plan to agree_on, but an object of type {plan}.\n"
                "  Write:  agree_on(RecomputeConfig(...).plan(model), group)   (a rank without regions passes Plan())"
            )
        camps.setdefault(plan.digest(), (plan, []))[1].append(rank)
    (common, holders), *others = sorted(camps.values(), key=lambda camp: (-len(camp[1]), camp[1][0]))
    if not others:
        return
    lines = [f"the ranks of this group do not hold the same plan. One is held by {_ranks(holders)}."]
    for plan, ranks in sorted(others, key=lambda camp: camp[1][0]):
        lines.append(f"  {_ranks(ranks)} {'holds' if len(ranks) == 1 else 'hold'} another. First difference:")
        place = common.diff(plan).split("\n@@")[1].split("\n")[1:]
        lines += [f"    {line}" for sign in "-+" for line in [x for x in place if x.startswith(sign)][:1]]
    lines.append(
        "  Ranks that hold the same layers must recompute the same ones. Look for a configuration file, a command line "
        "or a checkpoint that is not the same everywhere; a plan made by measuring is made on one rank and sent to the "
        "others as plan.to_json(). The stages of a pipeline hold different layers: pass the data or tensor parallel "
        "group,  agree_on(plan, group)."
    )
    raise errors.ArgumentError("\n".join(lines))


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}"
