"""Megatron's offload fields: which of the recomputed regions keep their inputs in host memory.

Megatron moves what layers keep for backward; here a plan moves what its regions keep, which is their inputs. So
`cpu_offloading` acts beside whole layers that are recomputed (where Megatron forbids it), and
`fine_grained_activation_offloading` on those parts that are both in `offload_modules` and in `recompute_modules`. What
a module keeps without being recomputed stays where it is, and settings that ask for that are errors: there is no such
choice in a plan.

How much is moved, and how far ahead, is the store's business (`OnHost`), so the fields for it are answered with the
store that says the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .. import errors
from ..plan import Choice

if TYPE_CHECKING:
    from .config import RecomputeConfig

LAYERS, PARTS = "cpu_offloading", "fine_grained_activation_offloading"
HOST = "host"

# A switch, and the fields that are looked at only when it is on, with the values that Megatron gives them by default.
BELONGING: dict[str, dict[str, tuple[object, ...]]] = {
    PARTS: {
        "offload_modules": (None, [], ()),
        "min_offloaded_tensor_size": (1024 * 1024,),
        "delay_offload_until_cuda_graph": (False,),
        "delta_offload_bytes_across_pp_ranks": (0,),
        "activation_offload_fraction": (1.0,),
        "fine_grained_offloading_max_inflight_offloads": (None,),
    },
    LAYERS: {
        "cpu_offloading_num_layers": (0,),
        "cpu_offloading_activations": (True,),
        "cpu_offloading_weights": (False, True),  # it was True once
        "cpu_offloading_double_buffering": (False,),
        "cpu_offloading_retain_pinned_cpu_buffers": (False,),
    },
}
# Fields of the parts that are options of the store.
OPTIONS = {
    "min_offloaded_tensor_size": "OnHost(smallest=...) (bytes, not elements)",
    "activation_offload_fraction": "OnHost(fraction=...)",
    "fine_grained_offloading_max_inflight_offloads": "OnHost(ahead=...) (regions, not tensors)",
}


def check(config: RecomputeConfig) -> None:
    """Complains of offload fields that do not go together, or would have no effect."""
    for switch, fields in BELONGING.items():
        if not getattr(config, switch):
            for field, defaults in fields.items():
                value = getattr(config, field)
                if value not in defaults:
                    raise errors.ArgumentError(
                        errors.no_effect(field, value, f"{switch} is False", f"Write {switch}=True with it")
                    )
    if config.cpu_offloading:
        _check_layers(config)
    if config.fine_grained_activation_offloading:
        _check_parts(config)


def _offload_without_regions(field: str, what: str) -> str:
    """Text for offloading where nothing is recomputed whose inputs could be moved."""
    granularity = '"full"' if field == "cpu_offloading" else '"selective"'
    return (
        f"{field}=True moves the inputs of {what}, that are recomputed, to host memory, and here there are none: it "
        f"needs recompute_granularity={granularity}. (What a module keeps without being recomputed is not moved; "
        "Megatron-LM does that in its own layers.)\n"
        f"  Write recompute_granularity={granularity} with it, or place a store by hand: "
        "no_recompute(fn, store=OnHost()) inside a region."
    )


def _check_layers(config: RecomputeConfig) -> None:
    if config.recompute_granularity != "full":
        raise errors.ArgumentError(_offload_without_regions(LAYERS, "whole layers"))
    number = config.cpu_offloading_num_layers
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise errors.ArgumentError(errors.not_a_count("cpu_offloading_num_layers", number))
    if config.recompute_method == "block" and number > (config.recompute_num_layers or 0):
        why = f"only the first {config.recompute_num_layers} layers are recomputed, and only their inputs are moved"
        write = f"Write cpu_offloading_num_layers={config.recompute_num_layers}"
        raise errors.ArgumentError(errors.no_effect("cpu_offloading_num_layers", number, why, write))
    if not config.cpu_offloading_activations:
        why = "weights stay on the device, so nothing would be moved"
        write = "Write cpu_offloading_activations=True"
        raise errors.ArgumentError(errors.no_effect("cpu_offloading_activations", False, why, write))
    if config.cpu_offloading_weights:
        why = "only inputs of regions are moved; weights stay on the device"
        write = "Write cpu_offloading_weights=False"
        raise errors.ArgumentError(errors.no_effect("cpu_offloading_weights", True, why, write))


def _check_parts(config: RecomputeConfig) -> None:
    modules, recomputed = config.offload_modules or (), config.recompute_modules or ()
    if config.recompute_granularity != "selective" or not modules:
        raise errors.ArgumentError(_offload_without_regions(PARTS, "parts, named in offload_modules too"))
    for label in modules:
        if label not in recomputed:
            why = f"{label!r} is not among recompute_modules, and only inputs of what is recomputed are moved"
            write = f"Write recompute_modules={[*recomputed, label]}"
            raise errors.ArgumentError(errors.no_effect("offload_modules", list(modules), why, write))
    for field, defaults in BELONGING[PARTS].items():
        value = getattr(config, field)
        if field == "offload_modules" or value in defaults:
            continue
        if field in OPTIONS:
            why = "a plan says whose inputs lie in host memory, and the store how many of them"
            write = f'Write apply(model, plan, stores={{"host": store}}) with store = {OPTIONS[field]}'
        else:
            why = "it is about Megatron-LM's own schedule"
            write = "Write nothing in its place"
        raise errors.ArgumentError(errors.no_effect(field, value, why, write))


def layers_on_host(
    config: RecomputeConfig, stacks: Iterable[Sequence[str]], choices: Sequence[Choice]
) -> tuple[Choice, ...]:
    """The choices, with those that begin among the first layers of a stack in host memory."""
    if not config.cpu_offloading:
        return tuple(choices)
    number, lengths = config.cpu_offloading_num_layers, [len(stack) for stack in stacks]
    if number > max(lengths):
        why = f"the longest stack of layers here has {max(lengths)}"
        write = f"Write cpu_offloading_num_layers={max(lengths)}"
        raise errors.ArgumentError(errors.no_effect("cpu_offloading_num_layers", number, why, write))
    first = {path for stack in stacks for path in stack[:number]}
    return tuple(dataclasses.replace(c, store=HOST) if c.paths[0] in first else c for c in choices)


def part_on_host(config: RecomputeConfig, label: str, choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """The choices of a label, in host memory if it is to be offloaded."""
    if not config.fine_grained_activation_offloading or label not in (config.offload_modules or ()):
        return tuple(choices)
    return tuple(dataclasses.replace(choice, store=HOST) for choice in choices)


def check_merged(config: RecomputeConfig, choices: Sequence[Choice]) -> None:
    """Complains of a label whose regions have gone up in others that stay on the device."""
    for label in config.offload_modules or ():
        if not any(label in choice.labels and choice.store == HOST for choice in choices):
            why = f"all of {label!r} lies inside of other regions, whose inputs stay on the device"
            write = "Name the label of those in offload_modules"
            raise errors.ArgumentError(
                errors.no_effect("offload_modules", list(config.offload_modules or ()), why, write)
            )
