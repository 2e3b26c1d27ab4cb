"""All-reduces the gradients of a whole step in a few large messages: PaddlePaddle's `fused_allreduce_gradients`.

Code that runs its steps under `no_sync()` reduces the gradients by hand. One message per parameter is slow, one for all
doubles the memory of the gradients, and a parameter that was unused on one rank leaves the others waiting forever.

Gradients of one dtype on one device are copied into buckets of bounded size, and while one bucket is being summed the
next is filled; two exist at a time. Ranks first exchange five numbers: checksums of what they are about to reduce. If
only *which* parameters have a gradient differs, one message carries the union, and a rank without contributes zero and
receives the mean. If the parameters themselves differ, every rank raises, so none waits.

Every rank issues the same collectives, also the one that raises. A gradient is multiplied by 1/ranks before it is
summed, as DDP does, so the result is DDP's to the last bit where each bucket is (two ranks; more ranks sum in an order
that depends on the bucket's size).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from .. import errors
from ..errors.text import grouped
from .agreement import check_group

MIB = 1 << 20


@torch.no_grad()
def fused_allreduce_gradients(
    params: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None, *, bucket_bytes: int = 128 * MIB
) -> int:
    """Replaces the gradients of `params` by their mean over the ranks of `group`, in buckets.

        with ddp.no_sync():
            loss(ddp(batch)).backward()
        fused_allreduce_gradients(ddp.parameters())
        optimizer.step()

    The gradient of a parameter is its `main_grad`, where it has one, else its `grad`; it is reduced in its own dtype,
    in place. A parameter that has none on any rank is left without. One that has none on this rank, but on
    another, counts as zero here and gets the mean as its `grad`: optimizers then do the same everywhere.

    A parameter that is a DTensor is reduced shard by shard: right where `group` is not the group that it is sharded
    over (tensor parallel shards, reduced over the data parallel group), and refused where it is.

    Reading the other ranks' answer waits for the device, as `loss.item()` does.

    Args:
        params: Parameters of the same shapes and dtypes in the same order on every rank; twice named counts once.
        group: The ranks to take the mean over, by default all.
        bucket_bytes: The size of one message, in bytes; a gradient larger than this is a message of its own. Two such
            buffers exist at a time.

    Returns:
        The number of buckets reduced: at most `total // bucket_bytes + 1` per dtype and device, if no gradient
        is larger than half of one.

    Raises:
        ArgumentError: There is no process group, or this rank is not in it; `params` is a module or holds something
            else than tensors; `bucket_bytes` is not positive; a parameter is sharded over the group; or, on every
            rank alike, some gradient is sparse or the ranks were given different parameters.

    The call is PaddlePaddle's `paddle.distributed.fleet.utils.hybrid_parallel_util.fused_allreduce_gradients`.
    """
    _check_group(bucket_bytes, group)
    parameters = _parameters(params)
    ranks = dist.get_process_group_ranks(group)
    _check_not_sharded_over(parameters, ranks)
    _agree(parameters, group)
    grads = [_local(grad) for grad in map(_gradient, parameters) if grad is not None]
    count = 0
    pending: _Message | None = None
    for bucket in _buckets(grads, bucket_bytes):
        message = _Message(bucket, len(ranks), group)
        if pending is not None:
            pending.finish()
        pending, count = message, count + 1
    if pending is not None:
        pending.finish()
    return count


def _check_group(bucket_bytes: Any, group: dist.ProcessGroup | None) -> None:
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise errors.ArgumentError(
            f"bucket_bytes={bucket_bytes!r}, where a number of bytes is expected, 1 or more.\n"
            "  Leave it out for 128 MiB, or write bucket_bytes=32 * 2**20."
        )
    if not dist.is_initialized():
        raise errors.ArgumentError(
            "fused_allreduce_gradients: there is no process group to take the mean over.\n"
            '  Call torch.distributed.init_process_group("nccl") first ("gloo" on CPU), in a process that torchrun has '
            "started; one process alone has nothing to reduce."
        )
    check_group("fused_allreduce_gradients", group)
    if dist.get_rank(group) < 0:
        raise errors.ArgumentError(
            f"fused_allreduce_gradients: rank {dist.get_rank()} is not in the group that it was given.\n"
            "  Call it with the group that this rank has made of itself and those with other data; new_group and "
            "init_device_mesh are called by all ranks, and give each its own."
        )


def _parameters(params: Any) -> list[torch.Tensor]:
    wrong = params
    if isinstance(params, Iterable) and not isinstance(params, (nn.Module, torch.Tensor)):
        unique = list({id(parameter): parameter for parameter in params}.values())
        others = [one for one in unique if not isinstance(one, torch.Tensor)]
        if not others:
            return unique
        wrong = others[0]
    raise errors.ArgumentError(
        f"fused_allreduce_gradients takes an iterable of parameters, but got {errors.say(wrong)}.\n"
        "  Write:  fused_allreduce_gradients(model.parameters())"
    )


def _gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    main: torch.Tensor | None = getattr(parameter, "main_grad", None)
    return parameter.grad if main is None else main


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the part of a tensor that is in this rank's memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sharded_over(parameter: torch.Tensor) -> set[int]:
    """Returns the ranks that hold other shards of a parameter than this one, and this one."""
    if not isinstance(parameter, DTensor):
        return set()
    mesh = parameter.device_mesh
    over = [i for i, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    return {rank for i in over for rank in dist.get_process_group_ranks(mesh.get_group(i))}


def _check_not_sharded_over(parameters: list[torch.Tensor], ranks: list[int]) -> None:
    for index, parameter in enumerate(parameters):
        over = _sharded_over(parameter)
        if len(over.intersection(ranks)) > 1:
            raise errors.ArgumentError(
                f"fused_allreduce_gradients: parameter {index}, a DTensor of shape {tuple(parameter.shape)}, is "
                f"sharded over ranks {', '.join(map(str, sorted(over)))}, and the group holds more than one of them: "
                "their shards are different parts of the parameter, and have no mean.\n"
                "  Pass the group of ranks that hold the same shard (for tensor parallel the data parallel one: "
                'mesh["dp"].get_group()). What fully_shard has sharded it reduces itself.'
            )


def _agree(parameters: list[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Gives every rank the same list of gradients to reduce, or raises on every rank."""
    grads = [_gradient(parameter) for parameter in parameters]
    have = bytes(grad is not None for grad in grads)
    sparse = [i for i, grad in enumerate(grads) if grad is not None and _local(grad).layout is not torch.strided]
    what, which = zlib.crc32(repr([_kind(p) for p in parameters]).encode()), zlib.crc32(have)
    if parameters:
        device = _local(parameters[0]).device
    else:  # a rank without any has to take part as well
        accelerator = torch.accelerator.current_accelerator()
        on_cpu = accelerator is None or dist.get_backend(group) == "gloo"
        device = torch.device("cpu") if on_cpu else accelerator
    sums = torch.tensor([what, -what, which, -which, bool(sparse)], dtype=torch.int64, device=device)
    dist.all_reduce(sums, dist.ReduceOp.MAX, group)
    most, least, most_which, least_which, any_sparse = sums.tolist()
    if most != -least:
        raise errors.ArgumentError(
            f"fused_allreduce_gradients: this rank was given {len(parameters)} parameters, and some other rank "
            "different ones: another number, order, shape, dtype, or main_grad on one side alone.\n"
            "  Pass the same parameters in the same order on every rank, as model.parameters() gives them, also those "
            "that this rank has no gradient for."
        )
    if any_sparse:
        where = f"parameter {sparse[0]} has" if sparse else "some parameter, on another rank, has"
        raise errors.ArgumentError(
            f"fused_allreduce_gradients: {where} a sparse gradient, which cannot share a bucket with others.\n"
            "  Make it dense (nn.Embedding(..., sparse=False)), or reduce it alone and leave it out here: "
            "torch.distributed.all_reduce(p.grad)"
        )
    if most_which == -least_which:
        return
    union = torch.frombuffer(bytearray(have), dtype=torch.uint8).to(device)
    dist.all_reduce(union, dist.ReduceOp.MAX, group)
    for parameter, mine, anywhere in zip(parameters, have, union.tolist(), strict=True):
        if anywhere and not mine:
            parameter.grad = torch.zeros_like(parameter)


def _kind(parameter: torch.Tensor) -> tuple[Any, ...]:
    """Returns the properties of a parameter that must agree between ranks, such as the shape of its gradient."""
    grad = _gradient(parameter)
    like = parameter if grad is None else grad
    local, places = _local(like), like.placements if isinstance(like, DTensor) else ()
    has_main = getattr(parameter, "main_grad", None) is not None
    return tuple(local.shape), str(local.dtype), local.device.type, has_main, str(places)


def _buckets(grads: list[torch.Tensor], limit: int) -> Iterator[list[torch.Tensor]]:
    """Yields the gradients by dtype and device, in their order, as many together as fit into `limit` bytes."""
    for same in grouped(grads, lambda grad: (grad.dtype, grad.device)).values():
        bucket: list[torch.Tensor] = []
        size = 0
        for grad in same:
            if bucket and size + grad.nbytes > limit:
                yield bucket
                bucket, size = [], 0
            bucket.append(grad)
            size += grad.nbytes
        yield bucket


class _Message:
    """A bucket that is being reduced."""

    def __init__(self, bucket: list[torch.Tensor], ranks: int, group: dist.ProcessGroup | None) -> None:
        self._bucket = bucket
        alone = len(bucket) == 1 and bucket[0].is_contiguous()
        self._flat = bucket[0] if alone else torch.cat([grad.reshape(-1) for grad in bucket])
        self._flat.mul_(1 / ranks)
        self._work: Any = dist.all_reduce(self._flat, dist.ReduceOp.SUM, group, async_op=True)

    def finish(self) -> None:
        """Waits for the sum and writes it to the gradients."""
        self._work.wait()
        if self._flat is not self._bucket[0]:
            parts = self._flat.split([grad.numel() for grad in self._bucket])
            for grad, mean in zip(self._bucket, parts, strict=True):
                grad.copy_(mean.view_as(grad))
