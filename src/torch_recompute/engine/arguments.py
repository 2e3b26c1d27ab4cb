"""The arguments of one call of a region, taken apart and put together again.

A region is called twice with "the same" arguments, the second time long after the first. Between the two the caller
may have emptied a list that was passed, popped a key from a dict or replaced an element. So a call is taken apart
into leaves when it is made and put together again for each replay: containers are rebuilt, tensors come from where
they were kept, everything else is passed on by identity. Flat calls (every argument a tensor or a plain value) are by
far the most common and skip the pytree machinery. Rejected: `tree_flatten((args, kwargs))` on every call, 5 us where
the loop below takes one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .. import _torch

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
        flat: Whether the leaves are the arguments: there are no keywords, and no containers.
    """

    __slots__ = ("_nested", "flat", "keywords", "leaves", "others", "positional", "tensors")

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
            elif i < self.positional + len(self.keywords) and _torch.is_container(leaf):
                self._nested = True
                elements, spec = _torch.tree_flatten(leaf)
                leaves[i] = Subtree(spec, len(leaves), len(leaves) + len(elements))
                leaves.extend(elements)
            else:
                self.others = (*self.others, i)
        self.flat = not (self._nested or kwargs)

    def arguments(self, leaves: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Puts `leaves` (as long as `self.leaves`) together into fresh `args, kwargs`."""
        if self._nested:
            top = self.positional + len(self.keywords)
            leaves, elements = list(leaves[:top]), leaves
            for i, value in enumerate(leaves):
                if type(value) is Subtree:
                    spec, start, stop = value
                    leaves[i] = _torch.tree_unflatten(list(elements[start:stop]), spec)
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
