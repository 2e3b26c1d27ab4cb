"""Texts for steps that are spread over ranks."""

from __future__ import annotations


def batch_not_shared(batch: int, replicas: int, size: int) -> str:
    """Text for a batch that replicas and microbatches cannot share."""
    return (
        f"--batch is {batch}, which {replicas} replicas (--dp) cannot take in microbatches of {size} (--mbs). Write a "
        f"multiple of {replicas * size}."
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


def cannot_divide(model: str, name: str, value: int, size: int) -> str:
    """Text for a size that a tensor-parallel group cannot share."""
    return f"--tp is {size}, and {name} of {model} is {value}, which {size} ranks cannot share. Write a divisor of it."


def no_slices(model: str, cls: str) -> str:
    """Text for a model whose layers cannot be divided by its configuration."""
    return (
        f"--tp: {model} is {cls}, whose configuration does not say how wide a head is, so a rank's slice of it cannot "
        "be built. Use it without --tp, or a model of transformers with head_dim, such as those of Llama's kind."
    )


def not_divided(model: str, cls: str, name: str, size: int) -> str:
    """Text for a model that a smaller configuration does not make a slice of."""
    what = f"{name} is no slice of the model's" if name else "no weight is a slice of the model's"
    return f"--tp {size}: {model} is {cls}, and built from a configuration for one rank {what}. Use it without --tp."


def no_pipeline(model: str, cls: str) -> str:
    """Text for a model whose layers are not known."""
    return (
        f"--tp, --pp, --dp and --mbs are for language models of transformers; {model} is {cls}. Leave them out, or plan "
        "with make_plan what each rank runs."
    )


def goes_without(option: str, other: str, why: str) -> str:
    """Text for an option that excludes another one."""
    return f"{option} does not go with {other}: {why}. Leave one of them out."
