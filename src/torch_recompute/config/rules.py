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


def _not_labels(field: str, value: object) -> str:
    """Text for a list of labels that is not a list of strings."""
    written = f"[{value!r}]" if isinstance(value, str) else '["core_attn", "layernorm"]'
    none = "recomputes nothing, which is the run to compare with" if field == "recompute_modules" else "moves nothing"
    return (
        f"{field} is {errors.say(value)}, where a list of strings is expected.\n  Write {field}={written}; [] {none}."
    )


def check_types(config: RecomputeConfig) -> None:
    """Complain of a value that is not of the kind that its field holds."""
    if config.recompute_granularity not in (None, FULL, SELECTIVE):
        raise errors.ArgumentError(
            f"recompute_granularity={config.recompute_granularity!r} is not known. It says how much of a layer is "
            "recomputed:\n"
            "      None          nothing (null in a file; leave the flag out)\n"
            '      "full"        whole layers; recompute_method and recompute_num_layers say which\n'
            '      "selective"   the parts that recompute_modules names'
        )
    if config.recompute_method not in (None, UNIFORM, BLOCK):
        raise errors.ArgumentError(
            f"recompute_method={config.recompute_method!r} is not known. It says which layers are recomputed:\n"
            '      "uniform"   all of them, recompute_num_layers at a time\n'
            '      "block"     the first recompute_num_layers, one by one; the others keep their activations'
        )
    layers = config.recompute_num_layers
    if layers is not None and (not isinstance(layers, int) or isinstance(layers, bool) or layers < 1):
        raise errors.ArgumentError(errors.not_a_count("recompute_num_layers", layers))
    for field in ("recompute_modules", "offload_modules"):
        modules = getattr(config, field)
        if modules is not None and not _are_labels(modules):
            raise errors.ArgumentError(_not_labels(field, modules))
    for switch in SWITCHES:
        value = getattr(config, switch)
        if not isinstance(value, bool):
            raise errors.ArgumentError(
                f"{switch} is {errors.say(value)}, where True or False is expected.\n"
                f"  Write {switch}=True ({switch}: true in a file, without quotes)."
            )


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
            raise errors.ArgumentError(
                "distribute_saved_activations=True does not go with sequence_parallel=True: with the latter the input "
                "of a layer is already split over the tensor parallel ranks, so each rank keeps its own part and "
                "there is nothing to distribute.\n"
                "  Leave distribute_saved_activations out."
            )
        if config.recompute_granularity == SELECTIVE:
            raise errors.ArgumentError(
                'distribute_saved_activations=True does not go with recompute_granularity="selective": what goes into '
                "a layer "
                "is the same on all tensor parallel ranks, but what goes into its parts (the queries, keys and values "
                "of its attention) is not, so it cannot be kept in common. (Megatron-LM's arguments refuse it too; "
                "its TransformerConfig takes it, and does nothing with it.)\n"
                "  Leave it out, or write it with full granularity. For a part whose input is the same on all ranks:  "
                'Choice((path,), store="sharded").'
            )
        if config.recompute_granularity is None:
            why = "recompute_granularity is None, which recomputes nothing, so there are no inputs to distribute"
            write = 'Write recompute_granularity="full" with it'
            raise errors.ArgumentError(errors.no_effect("distribute_saved_activations", True, why, write))
        if config.cpu_offloading:
            raise errors.ArgumentError(
                "distribute_saved_activations=True does not go with cpu_offloading=True: the one keeps the inputs of "
                "regions in parts on the tensor parallel ranks, the other in host memory, and they lie in one place.\n"
                '  Leave one of the two out, or make the choices by hand:  Choice((path,), store="sharded")  for some '
                'layers, store="host"  for others.'
            )
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
        raise errors.ArgumentError(
            f'recompute_granularity="full" needs {" and ".join(missing)}: without, there is no saying which layers.\n'
            '  For every layer by itself, write recompute_method="uniform", recompute_num_layers=1.'
        )


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
