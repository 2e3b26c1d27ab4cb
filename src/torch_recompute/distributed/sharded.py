"""Keeps the inputs of regions as one shard per rank, and gathers them for the replay.

Under tensor parallelism without sequence parallelism every rank of the group holds the same hidden states, so every
rank keeps the same region inputs, N times over. `ShardedOver` keeps the N-th part on each and puts them together again
when a region is replayed: what Megatron calls `distribute_saved_activations`. Megatron writes the shard into the
caller's tensor, which other code may need; this does not.

A tensor is taken as a row of bytes, cut into N equal parts, the last ones padded. Gathering takes time on the critical
path, so each tensor that is opened starts the gathering of the next older one that is still waiting: with as many
tensors in one region as in the next, that is one region ahead. The order in which tensors are put and opened must be
the same on all ranks, as with any collective. The first few tensors are compared between ranks when they are put, since
the mistakes in question (sequence parallelism, the wrong group) show in the first region.

What is gathered ahead is the next older shard that is alive, which need not be the same on all ranks: the garbage
collector may have freed a graph on one of them only. So with their parts the ranks tell each other the number of the
tensor, and a fingerprint of the whole that each of them had, 24 bytes beside a part. On the CPU another number or
fingerprint raises; on a device it is asserted there, because reading it would be a host sync.
"""

from __future__ import annotations

import functools
import threading
import weakref
import zlib
from typing import Any

import torch
import torch.distributed as dist

from .. import _torch, errors
from .._torch.tensors import meta, say, unexpanded
from ..engine.mismatch import digest
from .agreement import check_group

# The name is new in torch 2.13, which deprecates the other.
_all_gather: Any = getattr(dist, "all_gather_single", getattr(dist, "all_gather_into_tensor", None))
SMALL = 512
"""Parts below this many bytes free nothing: CUDA's allocator gives no less. Such a tensor is kept whole."""


class _Shard:
    """This rank's part of one tensor.

    Attributes:
        about: int64 [3], how many tensors were put before, and the fingerprint of this one.
        part: uint8 [part], the bytes of this rank, padded at the end; all bytes where the tensor is kept whole.
        opened: Whether it has been put together once; if so, it is not gathered ahead again.
        whole: Once gathering has begun, uint8 [part x ranks] and the work that fills it, and int64 [ranks x 3], what
            the ranks say of the shards that they gave, and the work that fills that.
    """

    def __init__(self, index: int, tensor: torch.Tensor, rank: int, ranks: int, wrap: Any) -> None:
        self.index = index
        self.opened = False
        self.whole: tuple[torch.Tensor, Any, torch.Tensor, Any] | None = None
        self._wrap = functools.partial(wrap, tensor.shape)
        tensor = unexpanded(tensor).resolve_conj().resolve_neg()
        # By falling strides, so that a dense tensor comes back with the strides that it had.
        self._order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        tensor = tensor.permute(self._order).contiguous()
        self._shape, self._dtype = tensor.shape, tensor.dtype
        row = tensor.reshape(-1).view(torch.uint8)
        length = -(-row.numel() // ranks)
        self.small = length < SMALL
        if self.small:
            self.part = row.clone()
        else:
            mine = row[rank * length : (rank + 1) * length]
            self.part = row.new_zeros(length)
            self.part[: mine.numel()] = mine
            self.about = torch.cat([torch.full_like(number := digest(tensor), index)[:1], number])

    def tensor(self, row: torch.Tensor) -> torch.Tensor:
        """Returns the tensor that these bytes are; there may be more of them at the end."""
        back = sorted(range(len(self._order)), key=self._order.__getitem__)
        size = self._shape.numel() * self._dtype.itemsize
        return self._wrap(row[:size].view(self._dtype).view(self._shape).permute(back))


class ShardedOver:
    """A store that keeps a part of each tensor on each rank of a group: `recompute(layer, inputs=ShardedOver(group))`.

    All ranks of the group must put equal tensors, in the same order, and open them in the same order. That is so for
    the inputs of layers under tensor parallelism without sequence parallelism. Any number of tensors of any dtype and
    shape; a tensor of n bytes takes n / N, rounded up, of which no part is below 512 bytes. The caller's tensor is not
    touched. Strides are kept where the tensor is dense. A DTensor may be replicated over the group, and split over
    other dimensions of its mesh.

    One store may serve many regions: while one is replayed, the inputs of the one before it are gathered.

    Args:
        group: The process group of the ranks that hold equal tensors, or None for all ranks.
        compared: The number of tensors, from the first on, that are compared between the ranks when they are put:
            shape, dtype and bits. Each comparison is a collective of 24 bytes per rank and a host sync. None compares
            all. The bits of the others are compared when their parts are put together.
        ahead: Whether to gather one region ahead, which takes the memory of that region's inputs.

    Raises:
        ArgumentError: There is no process group, it has one rank, or this process is not in it; or an option is none.
        StoreError: On `put`, the ranks hold different tensors, or the tensor is split over the group already, or is
            not strided; on `get`, the ranks held different ones, or open different ones. All ranks raise.

    The idea is Megatron-LM's `distribute_saved_activations`.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, compared: int | None = 8, ahead: bool = True) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise errors.ArgumentError(
                "ShardedOver needs a process group, and torch.distributed has not been initialised.\n"
                "  Write before it:  torch.distributed.init_process_group()   (and start the script with torchrun)"
            )
        check_group("ShardedOver", group)
        self._group = group
        self._ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)
        if self._rank < 0:
            raise errors.ArgumentError(errors.not_a_member("ShardedOver"))
        if self._ranks < 2:
            raise errors.ArgumentError(
                "ShardedOver was given a group of one rank, which would keep everything it is given: nothing is "
                "shared.\n"
                "  Pass the tensor parallel group, or leave the store out."
            )
        if compared is not None and (type(compared) is not int or compared < 0):
            raise errors.ArgumentError(
                f"ShardedOver(compared={compared!r}): compared must be a number of tensors, 0 or more, or None for "
                "all.\n  Leave it out: the first 8 are compared."
            )
        self._uncompared = compared
        self._ahead = ahead
        self._count = 0
        self._lock = threading.Lock()
        self._live: weakref.WeakValueDictionary[int, _Shard] = weakref.WeakValueDictionary()

    def __deepcopy__(self, memo: Any) -> ShardedOver:
        return self  # a copy of the model runs on the same ranks

    def __reduce__(self) -> Any:
        raise errors.StoreError(
            f"{errors.kind(self)} cannot be pickled: it belongs to the process group of this run.\n"
            "  Save model.state_dict(), or remove the plan first: handle.remove()."
        )

    def put(self, tensor: torch.Tensor) -> Any:
        """Keeps this rank's part of the tensor."""
        with torch.no_grad(), self._lock:
            local, wrap = self._local(tensor.detach())
            if self._uncompared is None or self._count < self._uncompared:
                self._compare(local)
            shard = _Shard(self._count, local, self._rank, self._ranks, wrap)
            self._live[self._count] = shard
            self._count += 1
            return shard

    def get(self, handle: Any) -> torch.Tensor:
        """Gathers the tensor, unless that is under way already, and starts to gather an older one."""
        with torch.no_grad(), self._lock:
            if handle.small:
                return handle.tensor(handle.part.clone())
            self._gather(handle)
            row, work, about, told = handle.whole
            handle.opened, handle.whole = True, None
            if self._ahead:
                self._gather_older(handle.index)
            told.wait()
            same = about.view(-1, 3) == handle.about
            _hold(same[:, 0].all(), _OTHERS)
            _hold(same.all(), _UNEQUAL)
            work.wait()
            return handle.tensor(row)

    def _gather(self, shard: _Shard) -> None:
        if shard.whole is None:
            about = shard.about.new_empty(3 * self._ranks)
            told = _all_gather(about, shard.about, group=self._group, async_op=True)
            row = shard.part.new_empty(shard.part.numel() * self._ranks)
            shard.whole = row, _all_gather(row, shard.part, group=self._group, async_op=True), about, told

    def _gather_older(self, index: int) -> None:
        for older in sorted((i for i in self._live if i < index), reverse=True):
            shard = self._live.get(older)
            if shard is not None and shard.whole is None and not (shard.opened or shard.small):
                self._gather(shard)
                return

    def _local(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns the part of the tensor on this rank, and a function that makes the tensor of its shape and that."""
        placements: Any = getattr(tensor, "placements", None)
        wrap: Any = _expanded
        if placements is not None:
            d: Any = tensor
            mesh = d.device_mesh
            ours = set(dist.get_process_group_ranks(self._group or dist.group.WORLD))
            for dim, placement in enumerate(placements):
                shared = ours.intersection(dist.get_process_group_ranks(mesh.get_group(dim)))
                if len(shared) > 1 and not placement.is_replicate():
                    raise errors.StoreError(
                        f"ShardedOver was given a DTensor that is {placement!r} over dimension {dim} of its mesh, "
                        "which is the store's group: each rank has its own part of it already (sequence parallelism), "
                        "so there is nothing to share.\n"
                        "  Leave the store out."
                    )
            layout = {"run_check": False, "shape": d.shape, "stride": d.stride()}
            from_local = functools.partial(type(d).from_local, device_mesh=mesh, placements=placements, **layout)
            tensor, wrap = d.to_local(), lambda shape, local: from_local(_expanded(shape, local))
        strided = tensor.layout is torch.strided
        if strided and not _torch.is_plain(tensor):
            tensor = tensor.clone()  # waits for what a collective has yet to deliver
        if not strided or not _torch.is_plain(tensor):
            why = "only its class knows what it is made of" if strided else f"its layout is {tensor.layout}"
            raise errors.StoreError(
                f"ShardedOver cannot cut {errors.say(tensor)} in parts: {why}.\n"
                "  Leave the store out for this region, or make the tensor inside of the region."
            )
        return tensor, wrap

    def _compare(self, tensor: torch.Tensor) -> None:
        """Raises on all ranks if one holds another tensor."""
        side = say((*meta(tensor)[:2], tensor.device.type))
        mine = torch.cat([digest(tensor), digest(tensor).new_tensor([zlib.crc32(side.encode())])])
        all_of_them = mine.new_empty(3 * self._ranks)
        _all_gather(all_of_them, mine, group=self._group)
        if not bool((all_of_them.view(-1, 3) == mine).all()):
            sides: list[Any] = [None] * self._ranks
            dist.all_gather_object(sides, side, group=self._group)
            what = "; ".join(f"rank {i} has {side}" for i, side in enumerate(sides))
            if len(set(sides)) == 1:
                what = f"all have {side}, with other values"
            raise errors.StoreError(
                "ShardedOver keeps one part of a tensor per rank, so all ranks of its group must hold the same tensor, "
                f"but they do not: {what}. Put together again, it would be none of theirs.\n"
                "  With sequence parallelism each rank has its own part of the input already, and nothing is to be "
                "shared: leave the store out.\n"
                "  Else the group is another one than that of the tensor parallel ranks, or something in the model "
                "(dropout, a kernel that is not deterministic to the bit) differs between ranks where it should not."
            )


_OTHERS = (
    "ShardedOver gathered parts of different tensors: a graph that one rank still has was freed on another, so the "
    "ranks disagree about which tensor comes next.\n"
    "  Free the graphs of forwards that get no backward at the same moment on all ranks (leave no reference cycle "
    "around an output; call gc.collect() on every rank), or gather nothing ahead: ShardedOver(group, ahead=False)."
)
_UNEQUAL = (
    "ShardedOver has put together the parts of a tensor that was not the same on all ranks of its group, so the result "
    "is none of theirs. The first few were compared in forward, and were equal.\n"
    "  Find where the ranks begin to differ (dropout, a kernel that is not deterministic to the bit, other data): "
    "ShardedOver(group, compared=None) raises in the forward of the first region that is given another tensor."
)


def _hold(same: torch.Tensor, text: str) -> None:
    """Raises unless this is true; on a device as soon as that gets there."""
    if same.device.type != "cpu":
        _torch.assert_on_device(same, text)
    elif not same:
        raise errors.StoreError(text)


def _expanded(shape: torch.Size, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.shape == shape else tensor.expand(shape)
