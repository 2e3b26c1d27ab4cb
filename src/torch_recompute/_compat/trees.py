"""Nested arguments: PyTorch's pytrees, taken apart and put together without its recursive closures."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils import _pytree

_NODES: Any = _pytree.SUPPORTED_NODES


def _node_of(value: Any) -> Any:
    """How a pytree container is taken apart and put together; None for a leaf."""
    kind = type(value)
    node = _NODES.get(kind)
    if node is None and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        node = _NODES[namedtuple]
    return node


def is_container(value: Any) -> bool:
    """Whether `value` is a pytree node: a tuple, list, dict, named tuple or a registered class."""
    return _node_of(value) is not None


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of a pytree and what `tree_unflatten` makes it from again.

    PyTorch's own functions of these names define a recursive closure, seven objects of cyclic garbage per call.
    """
    leaves: list[Any] = []
    return leaves, _flatten(tree, leaves)


def _flatten(tree: Any, leaves: list[Any]) -> Any:
    node = _node_of(tree)
    if node is None:
        leaves.append(tree)
        return None
    children, context = node.flatten_fn(tree)
    return node.unflatten_fn, context, [_flatten(child, leaves) for child in children]


def tree_unflatten(leaves: Sequence[Any], spec: Any) -> Any:
    """A pytree of the structure `spec` with these leaves."""
    return _unflatten(iter(leaves), spec)


def _unflatten(leaves: Iterator[Any], spec: Any) -> Any:
    if spec is None:
        return next(leaves)
    unflatten, context, children = spec
    return unflatten([_unflatten(leaves, child) for child in children], context)


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves of a pytree."""
    return tree_flatten(tree)[0]
