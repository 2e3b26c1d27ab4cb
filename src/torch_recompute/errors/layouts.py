"""Texts for steps that are spread over ranks."""

from __future__ import annotations

from ._say import size


def batch_not_shared(batch: int, replicas: int, each: int) -> str:
    """Text for a batch that replicas and microbatches cannot share."""
    return (
        f"--batch is {batch}, which {replicas} replicas (--dp) cannot take in microbatches of {each} (--mbs). Write a "
        f"multiple of {replicas * each}."
    )


def not_interleaved(microbatches: int, pipeline: int, share: int) -> str:
    """Text for microbatches that interleaved 1F1B cannot take."""
    return (
        f"--vpp: interleaved 1F1B takes the microbatches in turns of the pipeline's {pipeline} ranks, and "
        f"{microbatches} are no multiple of it. Write a --batch that is a multiple of {pipeline * share}."
    )


def too_few_layers(layers: int, pipeline: int, chunks: int) -> str:
    """Text for a pipeline that is longer than the model."""
    return (
        f"--pp {pipeline} --vpp {chunks} are {pipeline * chunks} parts, and the model has {layers} layers. Write fewer."
    )


def cannot_divide(model: str, name: str, value: int, ranks: int) -> str:
    """Text for a size that a tensor-parallel group cannot share."""
    return (
        f"--tp is {ranks}, and {name} of {model} is {value}, which {ranks} ranks cannot share. Write a divisor of it."
    )


def no_slices(model: str, cls: str) -> str:
    """Text for a model whose layers cannot be divided by its configuration."""
    return (
        f"--tp: {model} is {cls}, whose configuration does not say how wide a head is, so a rank's slice of it cannot "
        "be built. Use it without --tp, or a model of transformers with head_dim, such as those of Llama's kind."
    )


def not_divided(model: str, cls: str, name: str, ranks: int) -> str:
    """Text for a model that a smaller configuration does not make a slice of."""
    what = f"{name} is no slice of the model's" if name else "no weight is a slice of the model's"
    return f"--tp {ranks}: {model} is {cls}, and built from a configuration for one rank {what}. Use it without --tp."


def no_pipeline(model: str, cls: str) -> str:
    """Text for a model whose layers are not known."""
    return (
        f"--tp, --pp, --dp and --mbs are for language models of transformers; {model} is {cls}. Leave them out, or "
        "plan with make_plan what each rank runs."
    )


def goes_without(option: str, other: str, why: str) -> str:
    """Text for an option that excludes another one."""
    return f"{option} does not go with {other}: {why}. Leave one of them out."


def spread_does_not_fit(rank: int, budget: int, smallest: int, plain: int, fixed: int) -> str:
    """Text for a budget that a rank of a pipeline does not fit into."""
    return (
        f"budget={size(budget)} is too small for rank {rank} of the pipeline, which needs the most: with the plan that "
        f"needs the least its peak is {size(smallest, up=True)} ({smallest} bytes), with no region {size(plain)}; "
        f"{size(fixed)} of either are weights, gradients and optimizer state.\n"
        f"  Write --budget {size(smallest, up=True).replace(' ', '')} or more, or spread the step over more ranks."
    )


def no_cut(model: str, name: str) -> str:
    """Text for a model with more before its layers than an embedding."""
    return (
        f"--pp: {model} holds {name} before its layers, besides the embedding, so it is not known what a rank without "
        "them is called with. Use it without --pp."
    )
