"""Texts for plans that meet the checkpointing and the training loops of other libraries."""

from __future__ import annotations

from collections.abc import Mapping

from ._say import say


def not_a_policy(policy: object) -> str:
    """Text for something that no plan can be made of."""
    return (
        f"{say(policy)} does not say what to recompute.\n"
        '  Write "full" (every layer), "full:2" (two layers as one region), "block:3" (the first three layers), labels '
        'such as "core_attn,mlp", the path of a .json or .yaml file, Megatron\'s flags, or "none"; or pass a Plan or a '
        "RecomputeConfig."
    )


def plan_has_chosen(settings: Mapping[str, object]) -> str:
    """Text for checkpointing settings that a plan leaves no room for."""
    said = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    return (
        f"checkpointing was turned on with {said}, but this model has a plan, which says what is recomputed; the "
        "setting would have no effect.\n"
        '  Leave it out and say it in the plan ("block:3" or labels, for less than all layers), or take the plan out: '
        "handle.remove()"
    )


def other_checkpointing_inside(path: str) -> str:
    """Text for another library's checkpoint where a region is."""
    return (
        f"{path or 'the model'} is a region of a plan and also checkpointed by another library; it would be run again "
        "twice over.\n"
        "  Turn that off (gradient_checkpointing, activation_checkpointing_policy, checkpoint_wrapper), or take the "
        "plan out: handle.remove()"
    )


def cache_in_place(path: str) -> str:
    """Text for a cache that cannot be noted."""
    return (
        f"the cache of keys and values that {path or 'the model'} was given with gradients on is written in place, so "
        "what it held when the region ran is gone when it is run again.\n"
        "  Pass use_cache=False, or a DynamicCache, which appends; a static cache is for torch.no_grad()."
    )


def bad_every(every: object) -> str:
    """Text for a frequency of figures that is none."""
    return (
        f"every= is the number of steps from one taking of figures to the next, at least 3, but got {say(every)}. Two "
        "steps are watched each time.\n"
        "  Write every=100, or leave it out: then the first two steps are watched, and no other."
    )


def no_policy() -> str:
    """Text for a callback that has nothing to apply."""
    return (
        "RecomputeCallback() was given no plan, and the training arguments have none either.\n"
        '  Write RecomputeCallback("full"), or put activation_checkpointing_kwargs={"policy": "full"} into the '
        "TrainingArguments; to report on a plan that is applied already, pass its handle: RecomputeCallback(handle)"
    )
