"""Operations as keys: what ran, on which shapes, how often; enough to price one, or to run it alone on a device.

A fake tensor has no values, so an operation is known by its overload, its other arguments, and the shape, strides and
type of each tensor. Layers that are alike run the same keys, so a model of a hundred layers has some fifty of them.
An operation that returns only views of its inputs costs nothing and is not written down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch

from .. import _torch
from .._torch.fakes import device_of, is_operator, writes
from .._torch.flops import flops
from ..memory.ledger import storages
from ..memory.operations import Operations


@dataclass(frozen=True)
class Meta:
    """A tensor without its values.

    Attributes:
        shape: Its shape.
        stride: Its strides, in elements.
        dtype: Its type.
        device: The type of the device that it lies on.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str = "cpu"

    @property
    def bytes(self) -> int:
        """Bytes of its elements, a repeated one counted once."""
        count = 1
        for size, step in zip(self.shape, self.stride, strict=True):
            count *= size if step or not size else 1
        return count * self.dtype.itemsize


@dataclass(frozen=True)
class Op:
    """One operation on tensors of given shapes.

    Attributes:
        func: The overload, such as `aten.mm.default`, or an operator of functions, such as `flex_attention`.
        args: Its positional arguments, tensors as `Meta`, lists as tuples.
        kwargs: Its keyword arguments, likewise.
        results: Its tensors.
        flops: As PyTorch counts them; 0 for what is no product.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    results: tuple[Meta, ...]
    flops: int

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return sum(meta.bytes for meta in (*metas(self.args), *metas(dict(self.kwargs)), *self.results))

    def __str__(self) -> str:
        return f"{self.func}({', '.join(str(list(meta.shape)) for meta in metas(self.args))})"


def metas(value: object) -> Iterator[Meta]:
    """The tensors in a nest of arguments."""
    if isinstance(value, Meta):
        yield value
    elif isinstance(value, tuple):
        for item in cast("tuple[object, ...]", value):
            yield from metas(item)
    elif isinstance(value, dict):
        yield from metas(tuple(cast("dict[object, object]", value).values()))


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return repr(value.shape)
        return Meta(tuple(value.shape), tuple(value.stride()), value.dtype, device_of(value).type)
    if isinstance(value, (list, tuple)):
        return tuple(_plain(item) for item in cast("Iterable[Any]", value))
    if isinstance(value, torch.Generator):
        return None
    return value


def _is_view(func: Any, args: Any, kwargs: Any, out: Any) -> bool:
    """Whether an operation made no memory and wrote none: its results lie in its arguments."""
    if writes(func):
        return False
    before = {id(storage) for _, storage in storages((args, kwargs))}
    return all(id(storage) in before for _, storage in storages(out))


def op_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, out: Any) -> Op | None:
    """The key of an operation that has run; None for one that does nothing."""
    kwargs = kwargs or {}
    if _is_view(func, args, kwargs, out):
        return None
    counted = flops(func, args, kwargs, out)
    if not is_operator(func):  # of an operator of functions the tensors are enough for its price
        args, kwargs = tuple(x for x in _torch.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)), {}
    named = tuple((name, _plain(value)) for name, value in sorted(kwargs.items()))
    return Op(func, _plain(args), named, tuple(metas(_plain((out,)))), counted)


def logging(seen: Callable[[Op, Any, Any], None]) -> Operations:
    """The mode that shows the operations that run inside, each with its arguments and its result."""

    def ran(func: Any, args: Any, kwargs: Any, out: Any) -> None:
        op = op_of(func, args, kwargs, out)
        if op is not None:
            seen(op, (args, kwargs), out)

    return Operations(ran)
