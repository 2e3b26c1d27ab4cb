"""Facts of one tensor: whether it records, what two runs must agree on, how its elements are laid out."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch

from . import tree_flatten, tree_unflatten

_C: Any = torch._C
_set_versions: Any = _C._autograd._unsafe_set_version_counter


def versions_of(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    """Pairs each tensor that counts changes in place with the number that it has seen."""
    return [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]


def set_versions(versions: list[tuple[torch.Tensor, int]]) -> None:
    """Gives tensors their former versions, so that graphs that have saved them remain valid."""
    changed = [(tensor, then) for tensor, then in versions if tensor._version != then]
    if changed:
        _set_versions(*map(tuple, zip(*changed, strict=True)))


def wants_grad(tensor: torch.Tensor) -> bool:
    """Whether the tensor requires grad, or is a view that was made under `no_grad` of one that does.

    A view whose base was changed under it, which can tell no more, counts as such a tensor.
    """
    try:
        return tensor.requires_grad
    except RuntimeError:
        return True


def _is_trained(tensor: torch.Tensor) -> bool:
    """Whether a leaf requires grad itself; a view that was made under `no_grad` does so for its base, and is a leaf."""
    base: Any = tensor._base if tensor._is_view() else None
    return tensor.is_leaf and tensor.requires_grad and (base is None or not base.requires_grad)


def has_history(tensor: torch.Tensor) -> bool:
    """Whether a graph hangs on the tensor or its base; a view whose base was changed under it counts as such."""
    try:
        return tensor.requires_grad and not _is_trained(tensor)
    except RuntimeError:
        return True


def is_leaf_of_constant(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a leaf that requires grad, and a view of one that does not (`x.view(6).requires_grad_()`).

    Under `no_grad`, views of it do not require grad, and views of every other leaf do.
    """
    try:
        return tensor._is_view() and tensor._base is not None and _is_trained(tensor)
    except RuntimeError:  # its base was changed under it
        return False


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory and version without a history, which might come to lead back to who holds it.

    A leaf that requires grad has none and is returned as it is, and so are integers, which can have none, and a view
    that PyTorch refuses to detach because its base was changed under it; nothing can be computed with that one anyway.
    """
    try:
        some = tensor.is_floating_point() or tensor.is_complex()
        return tensor.detach() if some and not _is_trained(tensor) else tensor
    except RuntimeError:
        return tensor


Meta = tuple[Any, ...]


meta: Callable[[torch.Tensor], Meta] = operator.attrgetter("shape", "dtype", "device")
"""What the forward and the replay must agree on for a saved tensor.

Strides are compared with `check="values"` only: other strides give the same gradient, and reading them costs.
"""


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
    """A view of the same memory in which no element occurs twice.

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


def unviewed(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as no view: of a view that a `Function` returns, autograd allows no change in place."""
    return tensor if tensor._base is None else torch.ops.aten._unsafe_view.default(tensor, tensor.shape)


def each_tensor(tree: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Returns a pytree with what `change` makes of each tensor in its place."""
    leaves, spec = tree_flatten(tree)
    return tree_unflatten([change(x) if isinstance(x, torch.Tensor) else x for x in leaves], spec)
