"""Operations as keys: what ran, on which shapes; enough to price one, or to run it alone on a device.

A fake tensor has no values, so an operation is known by its overload, its other arguments, and the shape, strides and
dtype of each tensor. Equal layers run equal keys, so a model of a hundred layers has some fifty of them. An operation
that returns only views of its inputs costs nothing and has no key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch

from .._torch import is_operator, tensors_in
from .._torch.fakes import APART, device_of, writes
from .._torch.flops import flops, fused_on_cpu
from ..memory.operations import Operation, Operations


@dataclass(frozen=True)
class Meta:
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str = "cpu"  # type of the device

    @property
    def bytes(self) -> int:
        """Bytes of its elements; a dimension with stride 0 counts once."""
        sizes = (size for size, step in zip(self.shape, self.stride, strict=True) if step or not size)
        return math.prod(sizes) * self.dtype.itemsize


class RankGroup(NamedTuple):
    """A group of ranks by its name, as "tensor-4", or "shard-64-8" for 8 ranks among 64 in a row."""

    word: str
    span: int
    size: int


FROM_HOST = "weights from host memory"


@dataclass(frozen=True)
class Op:
    """One operation on tensors of given shapes."""

    func: Any  # the overload, such as `aten.mm.default`, or a higher-order operator, such as `flex_attention`
    args: tuple[Any, ...]  # tensors as `Meta`, lists as tuples
    kwargs: tuple[tuple[str, Any], ...]
    results: tuple[Meta, ...]
    flops: int  # as PyTorch counts them: 0 except for products

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return sum(meta.bytes for meta in metas((self.args, self.kwargs, self.results)))

    @property
    def read(self) -> Iterator[Meta]:
        """The tensors that it reads."""
        return metas((self.args, self.kwargs))

    @property
    def all_flops(self) -> int:
        """The FLOPs, those of the CPU's fused attention too, which PyTorch does not count.

        A step for a device by name is simulated with the CPU's kernels, and attention is no cheaper there for that.
        """
        return self.flops or fused_on_cpu(self.func, self.args)

    @property
    def sent_bytes(self) -> int | None:
        """The bytes that each rank of a group sends for a collective of `_c10d_functional`; None for other operations.

        In a ring a gathering or a scattering of so many bytes sends all but a rank's own share of them, and an
        all-reduce is one of each; an all-to-all of uneven parts takes as long as the longer side. A group whose
        name does not say its size is taken to be large.
        """
        name = self.func.name().partition("::")
        kind = _RINGS.get(name[2].partition(".")[0]) if name[0] == "_c10d_functional" else None
        if kind is None:
            return None
        times, side = kind
        size = self.group.size
        ends = {"in": self.args, "out": self.results, "either": (self.args, self.results)}
        moved = max((meta.bytes for meta in metas(ends[side])), default=0)
        return times * (moved - moved // size if size else moved)

    @property
    def in_host_memory(self) -> bool:
        """Whether it reads or writes host memory beside a device by its data sheet."""
        return any(meta.device == APART.type for meta in metas((self.args, self.kwargs, self.results)))

    @property
    def moved(self) -> str:
        """Whether it goes to such memory, or comes from it, and what: in words; "" for what is done on one side."""
        devices = {meta.device for meta in metas((self.args, self.kwargs, self.results)) if meta.shape}
        if APART.type not in devices or len(devices) == 1:
            return ""
        return "gradients to host memory" if self.results[0].device == APART.type else FROM_HOST

    @property
    def group(self) -> RankGroup:
        """The group of a collective: that of its name, or of unknown size."""
        word, *numbers = str(self.args[-1]).split("-")
        sizes = [int(number) for number in numbers if number.isdigit()]
        return RankGroup(word, sizes[0], sizes[-1]) if sizes else RankGroup(word, 0, 0)


_RINGS = {
    "all_gather_into_tensor": (1, "out"),
    "reduce_scatter_tensor": (1, "in"),
    "all_reduce": (2, "in"),
    "all_reduce_": (2, "in"),
    "all_to_all_single": (1, "either"),
}


def metas(value: object) -> Iterator[Meta]:
    """The tensors in a nest of tuples."""
    if isinstance(value, Meta):
        yield value
    elif isinstance(value, tuple):
        for item in cast("tuple[object, ...]", value):
            yield from metas(item)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return repr(value.shape)
        return Meta(tuple(value.shape), tuple(value.stride()), value.dtype, device_of(value).type)
    if isinstance(value, (list, tuple)):
        return tuple(_plain(item) for item in cast("Iterable[Any]", value))
    return None if isinstance(value, torch.Generator) else value


def op_of(ran: Operation) -> Op | None:
    """The key of an operation that has run; None for one that neither made nor wrote memory."""
    return ran.once(_op_of)


def _op_of(ran: Operation) -> Op | None:
    func, args, kwargs, out = ran.func, ran.args, ran.kwargs, ran.out
    if not writes(func) and not ran.made:
        return None
    counted = flops(func, args, kwargs, out)
    if not is_operator(func):  # the tensors of a higher-order operator are enough for its price
        args, kwargs = tuple(tensors_in((args, kwargs))), {}
    named = tuple((name, _plain(value)) for name, value in sorted(kwargs.items()))
    return Op(func, _plain(args), named, tuple(metas(_plain((out,)))), counted)


def logging(seen: Callable[[Op, Operation], None]) -> Operations:
    """The mode that shows the operations that run inside and make or write memory, each with its key."""

    def look(ran: Operation) -> None:
        op = op_of(ran)
        if op is not None:
            seen(op, ran)

    return Operations(look)
