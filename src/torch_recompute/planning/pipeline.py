"""The pipeline that was asked for: what each of its ranks does, and which layers lie where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .. import errors
from ..plan.inflight import Orders
from ..plan.stage_memory import Sends
from ..plan.stages import Stages
from .schedules import orders_named, orders_of

# They wait for each send before the next, and hold what they sent no longer.
_WAITS = {"1F1B"}


class Schedule(Protocol):
    """A schedule of `torch.distributed.pipelining`."""

    pipeline_order: Any


@dataclass(frozen=True)
class Pipeline:
    """A pipeline over the layers of a model.

    Attributes:
        name: The schedule's, without `Schedule`.
        orders: What each rank does.
        microbatches: How many a step has.
        bounds: The layers of each stage.
    """

    name: str
    orders: Orders
    microbatches: int
    bounds: tuple[tuple[int, int], ...]

    @staticmethod
    def of(stages: Stages | Schedule, paths: Sequence[str]) -> Pipeline:
        """The pipeline that was asked for.

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

    def sends(self, rank: int) -> Sends:
        """Until when a rank holds what it sends."""
        here = {action.stage for action in self.orders[rank]}
        waits = self.name.upper() in _WAITS
        return Sends(not waits, frozenset(stage for stage in here if stage + 1 in here))
