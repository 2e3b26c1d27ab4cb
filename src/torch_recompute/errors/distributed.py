"""Texts for what goes on between ranks."""

from __future__ import annotations

from collections.abc import Sequence

from ._say import say


def bad_bucket_bytes(value: object) -> str:
    """Text for a bucket size that is none."""
    return (
        f"bucket_bytes={value!r}, where a number of bytes is expected, 1 or more.\n"
        "  Leave it out for 128 MiB, or write bucket_bytes=32 * 2**20."
    )


def no_process_group() -> str:
    """Text for a reduction outside of any process group."""
    return (
        "fused_allreduce_gradients: there is no process group to take the mean over.\n"
        '  Call torch.distributed.init_process_group("nccl") first ("gloo" on CPU), in a process that torchrun has '
        "started; one process alone has nothing to reduce."
    )


def not_in_the_group(rank: int) -> str:
    """Text for a reduction over a group of other ranks."""
    return (
        f"fused_allreduce_gradients: rank {rank} is not in the group that it was given.\n"
        "  Call it with the group that this rank has made of itself and those with other data; new_group and "
        "init_device_mesh are called by all ranks, and give each its own."
    )


def not_parameters(value: object) -> str:
    """Text for something that holds no parameters."""
    return (
        f"fused_allreduce_gradients takes an iterable of parameters, but got {say(value)}.\n"
        "  Write:  fused_allreduce_gradients(model.parameters())"
    )


def sharded_over_the_group(index: int, shape: Sequence[int], over: Sequence[int]) -> str:
    """Text for a mean over ranks that hold different shards."""
    return (
        f"fused_allreduce_gradients: parameter {index}, a DTensor of shape {tuple(shape)}, is sharded over ranks "
        f"{', '.join(map(str, over))}, and the group holds more than one of them: their shards are different parts of "
        "the parameter, and have no mean.\n"
        "  Pass the group of ranks that hold the same shard (for tensor parallel the data parallel one: "
        'mesh["dp"].get_group()). What fully_shard has sharded it reduces itself.'
    )


def other_parameters(count: int) -> str:
    """Text for ranks that were given different parameters."""
    return (
        f"fused_allreduce_gradients: this rank was given {count} parameters, and some other rank different ones: "
        "another number, order, shape, dtype, or main_grad on one side alone.\n"
        "  Pass the same parameters in the same order on every rank, as model.parameters() gives them, also those that "
        "this rank has no gradient for."
    )


def sparse_gradient(index: int | None) -> str:
    """Text for a sparse gradient, here or on another rank."""
    where = "some parameter, on another rank, has" if index is None else f"parameter {index} has"
    return (
        f"fused_allreduce_gradients: {where} a sparse gradient, which cannot share a bucket with others.\n"
        "  Make it dense (nn.Embedding(..., sparse=False)), or reduce it alone and leave it out here: "
        "torch.distributed.all_reduce(p.grad)"
    )


def not_a_graph(value: object) -> str:
    """Text for something without an autograd graph."""
    return (
        f"find_reentrant walks the autograd graph of a model's output or loss, but found no graph on {say(value)}.\n"
        "  Pass the tensor that backward is called on, before or after backward: find_reentrant(loss, model)"
    )
