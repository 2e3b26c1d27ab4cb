"""Texts for the calls of other systems."""

from __future__ import annotations

from collections.abc import Sequence

from ._say import say


def not_on_or_off(face: str, option: str, value: object, write: str) -> str:
    """Text for an option that is True or False and was given something else."""
    return f"{face}: {option} is {say(value)}, where True or False is expected.\n  {write}"


def no_sharded_inputs(setting: str, write: str) -> str:
    """Text for spreading inputs over ranks through a function that is not told the group of ranks."""
    return (
        f"{setting} is not understood here: the inputs of a region are spread over the ranks of a group, and this "
        "function is not told the group.\n"
        f"  {write}, or, with ShardedOver from torch_recompute.distributed:  "
        "recompute(function, inputs=ShardedOver(group))(*args)."
    )


def not_indices(value: object) -> str:
    """Text for `offload_indices` that are not a list."""
    return (
        f"recompute: offload_indices is {say(value)}, where a list of numbers is expected.\n"
        "  Write offload_indices=[0] for the first positional argument."
    )


def bad_offload_index(region: str, index: object, positional: int, keywords: Sequence[str]) -> str:
    """Text for an element of `offload_indices` that names no positional argument."""
    if not positional:
        has = f"{region} was called without positional arguments"
    elif positional == 1:
        has = f"the one positional argument of {region} has number 0"
    else:
        has = f"the positional arguments of {region} have numbers 0 to {positional - 1}"
    write = "Pass the tensor by position" if keywords else "Write numbers of positional arguments"
    return f"offload_indices holds {index!r}, but {has}.\n  {write}, or leave offload_indices out."


def nothing_to_offload(region: str, index: int, value: object) -> str:
    """Text for an offloaded argument that holds no tensor."""
    return (
        f"offload_indices holds {index}, but argument {index} of {region} is {say(value)}, in which there is no tensor "
        "to offload.\n"
        "  Leave the number out. Numbers count all positional arguments, not only tensors; parameters stay where they "
        "are."
    )


def bad_ctx(ctx: object) -> str:
    """Text for a `ctx` that is no dict of the two known keys."""
    return (
        f"recompute_sequential(ctx, functions, *args): ctx is {say(ctx)}, where a dict is expected, with no other keys "
        'than "segments" and "preserve_rng_state".\n'
        '  Write {"segments": 2}. Where inputs are kept is said by offload_indices=[0].'
    )


def not_one_input(count: int, keywords: Sequence[str]) -> str:
    """Text for what a sequence of functions cannot be given."""
    if keywords:
        wrong = f"the functions are not called with keywords, but got {', '.join(keywords)}"
    else:
        wrong = f"the functions are called with one argument, but got {count}"
    return (
        f"recompute_sequential(ctx, functions, *args): {wrong}.\n"
        "  Put several values into a tuple that the functions take and return."
    )


def no_deepspeed_config(path: str, why: str) -> str:
    """Text for a file that cannot be read as a DeepSpeed configuration."""
    return (
        f"{path} cannot be read as a DeepSpeed configuration: {why}.\n"
        "  Pass the path of a JSON file, or the dict that it holds."
    )


def not_a_deepspeed_config(value: object, within: bool) -> str:
    """Text for a DeepSpeed configuration, or the section of one, that is no dict."""
    what = "the section activation_checkpointing" if within else "deepspeed_config"
    return (
        f"configure: {what} is {say(value)}, where keys and values are expected.\n"
        '  Write {"activation_checkpointing": {"cpu_checkpointing": True}}, with any other sections beside.'
    )


def unknown_deepspeed_key(key: object, right: str | None, known: Sequence[str]) -> str:
    """Text for a key that DeepSpeed would pass over."""
    if right is not None:
        write = f"It is the argument of configure; the key in a configuration is {right}."
    else:
        write = f"The keys are {', '.join(known)}."
    return f"{key!r} is not a key of activation_checkpointing, so it would have no effect.\n  {write}"
