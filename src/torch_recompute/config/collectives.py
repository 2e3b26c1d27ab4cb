"""Which regions keep the results of their reductions: those of layers that `parallelize_module` has split.

Under tensor parallelism a layer ends its attention and its MLP with a reduction over the ranks. A replay that repeats
it communicates once more in every backward; its result, kept, is no larger than the layer's input. So the regions that
settings ask for keep it ("@reduction"), unless `repeat_collectives` is set. All-gathers, which sequence parallelism
has besides, are repeated: a result is as many times as large as there are ranks, and not to keep it is what sequence
parallelism is for (docs/design/005-collectives.md has the figures). With `distribute_saved_activations` nothing is to
be kept whole on any rank, so reductions are repeated, too.

That a weight is split is seen by its placements. `fully_shard` splits weights too, once, and gathers them in place,
which is none of a region's business; a weight that is split more often than that is split for tensor parallelism.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .. import errors
from ..plan import Choice
from ..plan.anatomy import inside
from ..plan.named import module_of

if TYPE_CHECKING:
    from .config import RecomputeConfig

KEPT = "@reduction"


def reductions_kept(config: RecomputeConfig, model: nn.Module, choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """The choices, with those of split layers keeping reductions, unless the settings say that they be repeated."""
    weights = split_weights(model)
    splits = [_runs_one(choice, weights) for choice in choices]
    if config.distribute_saved_activations:
        return tuple(choices)
    if not config.repeat_collectives:
        pairs = zip(choices, splits, strict=True)
        return tuple(dataclasses.replace(one, keep=(*one.keep, KEPT)) if split else one for one, split in pairs)
    if not any(splits):
        why = "no weight in what is recomputed is split over ranks as parallelize_module splits it"
        write = "Plan after parallelize_module"
        raise errors.ArgumentError(errors.no_effect("repeat_collectives", True, why, write))
    return tuple(choices)


def split_weights(model: nn.Module) -> list[str]:
    """The paths of parameters that are split over ranks for tensor parallelism."""
    if not torch.distributed.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    by_fsdp = 1 if any(isinstance(module, FSDPModule) for module in model.modules()) else 0
    return [
        path
        for path, parameter in model.named_parameters(remove_duplicate=False)
        if isinstance(parameter, DTensor) and _times(parameter.placements) > by_fsdp
    ]


def _times(placements: Iterable[Any]) -> int:
    """Over how many dimensions of its mesh a tensor is split; what both split has a placement that is not `Shard`."""
    return sum(not (placement.is_replicate() or placement.is_partial()) for placement in placements)


def _runs_one(choice: Choice, weights: Iterable[str]) -> bool:
    """Whether a replay of this region runs a module with one of these weights."""
    regions = [module_of(path) for path in choice.paths]
    skipped = [f"{regions[0]}.{word}".strip(".") for word in choice.keep if "@" not in word]
    return any(
        any(inside(weight, region) for region in regions) and not any(inside(weight, path) for path in skipped)
        for weight in weights
    )
