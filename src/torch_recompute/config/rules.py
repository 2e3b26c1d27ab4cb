"""Which values go together, as far as no model is needed to tell.

Three kinds of rules, in this order, so that the first complaint is about the first cause: the type of each value; what
Megatron's fields require of each other; and what is not available yet. Where Megatron forbids something because of how
it is built (offloading beside recomputation), there is no rule here; the offload fields have a file of their own.

A fourth kind is ours: a field that nothing would look at is an error. What a dump of Megatron's own configuration holds
by default is let through, or no dump could be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from .. import errors
from . import offloading

if TYPE_CHECKING:
    from .config import RecomputeConfig

FULL, SELECTIVE = "full", "selective"
UNIFORM, BLOCK = "uniform", "block"

SWITCHES = (
    "distribute_saved_activations",
    "repeat_collectives",
    "sequence_parallel",
    "moe_layer_recompute",
    "fine_grained_activation_offloading",
    "cpu_offloading",
)


def check_types(config: RecomputeConfig) -> None:
    """Complain of a value that is not of the kind that its field holds."""
    if config.recompute_granularity not in (None, FULL, SELECTIVE):
        raise errors.ArgumentError(errors.unknown_granularity(config.recompute_granularity))
    if config.recompute_method not in (None, UNIFORM, BLOCK):
        raise errors.ArgumentError(errors.unknown_method(config.recompute_method))
    layers = config.recompute_num_layers
    if layers is not None and (not isinstance(layers, int) or isinstance(layers, bool) or layers < 1):
        raise errors.ArgumentError(errors.not_a_count("recompute_num_layers", layers))
    for field in ("recompute_modules", "offload_modules"):
        modules = getattr(config, field)
        if modules is not None and not _are_labels(modules):
            raise errors.ArgumentError(errors.not_labels(field, modules))
    for switch in SWITCHES:
        value = getattr(config, switch)
        if not isinstance(value, bool):
            raise errors.ArgumentError(errors.not_a_switch(switch, value))


def _are_labels(value: object) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        return False
    return all(isinstance(label, str) and label for label in cast("Sequence[object]", value))


def check(config: RecomputeConfig) -> None:
    """Complain of values that do not go together, and of what is not available yet."""
    if config.recompute_granularity == FULL:
        _check_full(config)
    else:
        _check_methods_unused(config)
    if config.recompute_granularity != SELECTIVE:
        _check_modules_unused(config)
    if config.distribute_saved_activations:
        if config.sequence_parallel:
            raise errors.ArgumentError(errors.sequence_parallel_shards_already())
        if config.recompute_granularity == SELECTIVE:
            raise errors.ArgumentError(errors.parts_are_not_shared())
        if config.recompute_granularity is None:
            why = "recompute_granularity is None, which recomputes nothing, so there are no inputs to distribute"
            write = 'Write recompute_granularity="full" with it'
            raise errors.ArgumentError(errors.no_effect("distribute_saved_activations", True, why, write))
        if config.cpu_offloading:
            raise errors.ArgumentError(errors.in_two_places())
    if config.repeat_collectives:
        _check_repeated(config)
    offloading.check(config)


def _check_repeated(config: RecomputeConfig) -> None:
    if config.recompute_granularity is None:
        why = "recompute_granularity is None, which recomputes nothing, so nothing is repeated"
        write = 'Write recompute_granularity="full" with it'
    elif config.distribute_saved_activations:
        why = "with distribute_saved_activations=True nothing is kept whole, so collectives are repeated anyway"
        write = "Write one of the two"
    else:
        return
    raise errors.ArgumentError(errors.no_effect("repeat_collectives", True, why, write))


def _check_full(config: RecomputeConfig) -> None:
    fields = ("recompute_method", "recompute_num_layers")
    missing = [field for field in fields if getattr(config, field) is None]
    if missing:
        raise errors.ArgumentError(errors.incomplete_full(missing))


def _check_methods_unused(config: RecomputeConfig) -> None:
    selective = config.recompute_granularity == SELECTIVE
    for field in ("recompute_method", "recompute_num_layers"):
        value = getattr(config, field)
        if value is None:
            continue
        if selective:
            why = 'recompute_granularity="selective" recomputes parts of every layer, whichever recompute_modules names'
            write = 'For a part of some layers, name it by paths: recompute_modules=["layers.0.mlp", "layers.1.mlp"]'
        else:
            why = "recompute_granularity is None, which recomputes nothing"
            write = (
                'Write recompute_granularity="full", recompute_method="block", recompute_num_layers=N for the first N '
                'layers (what Megatron-Bridge means by --recompute_num_layers alone), or recompute_method="uniform" '
                "for all, N at a time"
            )
        raise errors.ArgumentError(errors.no_effect(field, value, why, write))


def _check_modules_unused(config: RecomputeConfig) -> None:
    if not config.recompute_modules:
        return
    if config.recompute_granularity == FULL:
        why = 'recompute_granularity="full" recomputes whole layers'
    else:
        why = "recompute_granularity is None, which recomputes nothing"
    write = 'Write recompute_granularity="selective" for these parts'
    raise errors.ArgumentError(errors.no_effect("recompute_modules", list(config.recompute_modules), why, write))
