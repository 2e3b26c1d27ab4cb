"""Tensors inside nested arguments, and how to hold a call so that it can be made again.

A region is called twice with "the same" arguments, the second time long after the first. Between the two the caller
may have emptied a list that he passed, popped a key from a dict or replaced an element. So a call is taken apart
into leaves when it is made and put together anew for each replay: containers are rebuilt, tensors come from where
they were kept, everything else is handed over by identity.

Flat calls (every argument a tensor or a plain value) are by far the most common and skip the pytree machinery; only
arguments that are containers pay for it. Rejected: `tree_flatten((args, kwargs))` on every call, 5 us where the
loop below takes one.

Geometry says where a view lies in its memory, relative to another view of the same memory, so that it can be rebuilt
from that other one once it exists again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from . import _compat, errors

PLAIN = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size})


class Subtree(NamedTuple):
    """Stands for a container among the leaves of a call: its elements are `leaves[start:stop]`."""

    spec: Any
    start: int
    stop: int


class Call:
    """The arguments of one call as a flat list: positional ones, keyword ones, then the elements of containers.

    Attributes:
        leaves: The flat list; a container is replaced by a `Subtree`.
        tensors: Where in `leaves` the tensors are.
        others: Where in `leaves` there is something that is neither a tensor nor a plain value.
    """

    __slots__ = ("_nested", "keywords", "leaves", "others", "positional", "tensors")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.leaves = leaves = [*args, *kwargs.values()] if kwargs else list(args)
        self.positional = len(args)
        self.keywords = tuple(kwargs)
        self.tensors: list[int] = []
        self.others: Sequence[int] = ()
        self._nested = False
        for i, leaf in enumerate(leaves):  # grows while it is read: elements of containers come at the end
            kind = type(leaf)
            if kind is torch.Tensor:
                self.tensors.append(i)
            elif kind in PLAIN:
                continue
            elif isinstance(leaf, torch.Tensor):
                self.tensors.append(i)
            elif i < self.positional + len(self.keywords) and _compat.is_container(leaf):
                self._nested = True
                elements, spec = _compat.tree_flatten(leaf)
                leaves[i] = Subtree(spec, len(leaves), len(leaves) + len(elements))
                leaves.extend(elements)
            else:
                self.others = (*self.others, i)

    def arguments(self, leaves: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Puts `leaves` (as long as `self.leaves`) together into fresh `args, kwargs`."""
        if self._nested:
            top = self.positional + len(self.keywords)
            leaves, elements = list(leaves[:top]), leaves
            for i, value in enumerate(leaves):
                if type(value) is Subtree:
                    spec, start, stop = value
                    leaves[i] = _compat.tree_unflatten(list(elements[start:stop]), spec)
        if not self.keywords:
            return leaves, {}
        return leaves[: self.positional], dict(zip(self.keywords, leaves[self.positional :], strict=True))

    def label(self, index: int) -> str:
        """Names leaf `index` for an error: `argument 0`, `argument 'mask'`, `an element of argument 1`."""
        top = self.positional + len(self.keywords)
        if index < top:
            key = index if index < self.positional else repr(self.keywords[index - self.positional])
            return f"argument {key}"
        for i, value in enumerate(self.leaves[:top]):
            if type(value) is Subtree and value.start <= index < value.stop:
                return f"an element of {self.label(i)}"
        return "an argument"


class Geometry(NamedTuple):
    """A view of some memory, placed relative to `base`, another view of the same memory."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    shift: int
    base_stride: tuple[int, ...]
    whole: bool

    def of(self, base: torch.Tensor) -> torch.Tensor | None:
        """The view, over the memory of a new `base`; None where that cannot be had."""
        if self.whole:
            return base.detach()
        if base.stride() != self.base_stride:
            return self._laid_out(base)
        return base.detach().as_strided(self.size, self.stride, base.storage_offset() + self.shift)

    def _laid_out(self, base: torch.Tensor) -> torch.Tensor | None:
        """The view, over a copy of `base` with the strides that it had (a store may have returned it without gaps)."""
        try:
            copy = base.new_empty_strided(base.shape, self.base_stride).copy_(base.detach())
            return copy.as_strided(self.size, self.stride, self.shift)
        except RuntimeError:  # the elements of the old one overlapped, or the view reached beyond it
            return None


class SplitGeometry(NamedTuple):
    """Where a DTensor lies relative to another: as its part on this rank does, if the two are split alike on a mesh."""

    part: Geometry
    layout: dict[str, Any]
    base_stride: tuple[int, ...]

    def of(self, base: torch.Tensor) -> torch.Tensor | None:
        """The view, over the memory of a new `base`; None where that cannot be had."""
        part = _part(base.detach())
        view = None if part is None else self.part.of(part)
        return None if view is None else cast("Any", type(base)).from_local(view, **self.layout)


AnyGeometry = Geometry | SplitGeometry


def _part(tensor: Any) -> torch.Tensor | None:
    """What of a DTensor is on this rank, once a collective has delivered it; None of other subclasses."""
    if not hasattr(tensor, "placements"):
        return None
    with torch.no_grad():
        local = tensor.to_local()
        return local.wait() if hasattr(local, "wait") else local


def _split_geometry(view: Any, base: Any) -> SplitGeometry | None:
    part, whole = _part(view.detach()), _part(base.detach())
    if part is None or whole is None or _compat.storage_id(part) != _compat.storage_id(whole):
        return None
    found = geometry(part, whole)
    if not isinstance(found, Geometry):
        return None
    layout = {"device_mesh": view.device_mesh, "placements": view.placements, "run_check": False}
    return SplitGeometry(found, {**layout, "shape": view.shape, "stride": view.stride()}, base.stride())


def geometry(view: torch.Tensor, base: torch.Tensor) -> AnyGeometry | None:
    """Where `view` lies relative to `base`; None where strides cannot say it (other dtype, subclass, layout)."""
    plain = view.layout is torch.strided and base.layout is torch.strided
    if not plain or view.dtype != base.dtype or view.is_conj() != base.is_conj() or view.is_neg() != base.is_neg():
        return None
    if not _compat.is_plain(view) or not _compat.is_plain(base):
        return _split_geometry(view, base)
    shift = int(view.storage_offset() - base.storage_offset())
    whole = shift == 0 and view.shape == base.shape and view.stride() == base.stride()
    return Geometry(tuple(view.shape), view.stride(), shift, base.stride(), whole)


def wants_grad(tensor: torch.Tensor) -> bool:
    """Whether operations on the tensor are recorded.

    `requires_grad` says so too, but also of a view made under `no_grad` of something that requires grad, which is a
    constant; and it raises for a view whose base was changed under it, which counts as requiring grad here.
    """
    try:
        if not (tensor.requires_grad and tensor.is_leaf and tensor._is_view()):
            return tensor.requires_grad
        base: Any = tensor._base
        return base is None or not base.requires_grad
    except RuntimeError:
        return True


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory and version without a history, which might come to lead back to who holds it.

    A leaf that requires grad has none and is returned as it is, and so is a view that PyTorch refuses to detach
    because its base was changed under it; nothing can be computed with that one anyway.
    """
    try:
        return tensor if tensor.is_leaf and wants_grad(tensor) else tensor.detach()
    except RuntimeError:
        return tensor


Meta = tuple[Any, ...]


def meta(tensor: torch.Tensor) -> Meta:
    """What the forward and the replay must agree on for a saved tensor: shape, dtype, device.

    Strides are compared with `check="values"` only: other strides give the same gradient, and reading them costs.
    """
    return tensor.shape, tensor.dtype, tensor.device


def layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Stride, or the layout where there is no stride (sparse, nested)."""
    try:
        return tensor.stride()
    except (RuntimeError, NotImplementedError):
        return (tensor.layout,)


def say(value: Meta) -> str:
    """A `meta` in words."""
    shape, dtype, device = value
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}"


def unexpanded(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its expanded dimensions narrowed to one."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def each_once(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the same memory in which no element lies twice.

    Unexpanded; where elements overlap in another way (`unfold`), all memory from the first to the last of them.
    """
    tensor = unexpanded(tensor)
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            whole = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            return tensor.as_strided((whole,), (1,), tensor.storage_offset())
        reach += (size - 1) * stride
    return tensor


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """A fingerprint of a tensor's bits (two int64, on its device; no host sync), for `check="values"`.

    Rows and columns of the bits are summed with weights in wrapping integer arithmetic, so a changed bit, a moved
    element and a NaN that is not the same NaN all show.
    """
    with torch.no_grad():
        data = tensor.detach()
        if data.layout is not torch.strided:
            data = data.to_dense() if not data.is_nested else data.values()
        flat = data.resolve_conj().resolve_neg().contiguous().reshape(-1)
        if flat.stride(0) != 1:  # one element, whose stride says nothing to anybody but `view`
            flat = flat.as_strided((flat.numel(),), (1,))
        bits = flat.view(torch.uint8)
        pad = -bits.numel() % 1024
        rows = torch.nn.functional.pad(bits, (0, pad)).view(-1, 1024)
        across, down = rows.sum(0, dtype=torch.int64), rows.sum(1, dtype=torch.int64)
        return torch.stack([_weighted(across), _weighted(down)])


def _weighted(sums: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(1, sums.numel() + 1, device=sums.device, dtype=torch.int64)
    return (sums * (weights * 2 - 1) * 0x9E3779B1).sum()


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, as `clone` makes it; but that of a DTensor has the same placements, where `clone` reduces a partial one.

    Duck typing keeps torch.distributed, which need not be there, out of `import torch_recompute`.
    """
    placements: Any = getattr(tensor, "placements", ())
    if not any(placement.is_partial() for placement in placements):
        return tensor.clone()
    from torch.distributed.tensor import Replicate

    d: Any = tensor
    local = d.to_local(grad_placements=[Replicate() if p.is_partial() else p for p in placements])
    layout = {"run_check": False, "shape": d.shape, "stride": d.stride()}
    return type(d).from_local(local.clone(), d.device_mesh, placements, **layout)


def mapped(value: Any, fn: Callable[[torch.Tensor], Any]) -> Any:
    """An operation's arguments or results, with `fn` of each tensor among them."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if type(value) in (list, tuple):
        return type(value)(mapped(item, fn) for item in value)
    if isinstance(value, dict):
        return {key: mapped(item, fn) for key, item in cast("dict[Any, Any]", value).items()}
    return value


def check_call(what: str, model: object, args: object, kwargs: object, *, a_module: bool = False) -> None:
    """Refuses what is no model, no tuple of positional arguments or no dict of keyword arguments.

    Args:
        what: The public function that was called; the error's text names it.
        model: The model.
        args: The positional arguments of one call of it.
        kwargs: Its keyword arguments, or None.
        a_module: Whether only a module will do; else anything that can be called.

    Raises:
        ArgumentError: One of them is of another kind.
    """
    if not (isinstance(model, nn.Module) if a_module else callable(model)):
        raise errors.ArgumentError(errors.not_a_model(what, model))
    if type(args) is not tuple:
        raise errors.ArgumentError(errors.args_not_a_tuple(what, args))
    if kwargs is not None and (not isinstance(kwargs, dict) or not all(isinstance(key, str) for key in kwargs)):
        raise errors.ArgumentError(errors.kwargs_not_a_dict(what, kwargs))
