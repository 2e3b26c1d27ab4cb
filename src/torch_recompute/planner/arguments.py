"""The arguments of one recorded call, taken apart and put together again with other tensors.

A segment of a model is tried many times over, each time with tensors of its own. Containers, and objects that hold
plain data alone, as a context does, are rebuilt around them; everything else is passed on by identity.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .. import _torch
from ..engine.taken import PLAIN, is_config, written_in_c


def is_context(value: Any) -> bool:
    """Whether an object can be made again from its attributes; those of an enumeration and of torch are one of a kind.

    One with slots, or of a class that extends one written in C, is not.
    """
    kinds = type(value).__mro__[:-1]
    mine = not any(written_in_c(kind) or kind.__dict__.get("__slots__") for kind in kinds)
    return mine and not isinstance(value, enum.Enum) and is_config(value) and bool(value.__dict__)


class Subtree(NamedTuple):
    """Stands for a container or an object among the leaves of a call: its elements are `leaves[start:stop]`.

    `kind` is the class of an object, of whose attributes `spec` is.
    """

    spec: Any
    start: int
    stop: int
    kind: type[Any] | None = None


class _Again(NamedTuple):
    """Stands for an object that is at another place too."""

    place: int


class Call:
    """The arguments of one call as a flat list: positional ones, keyword ones, then the elements of containers.

    Attributes:
        leaves: The flat list; a container is replaced by a `Subtree`.
        tensors: Where in `leaves` the tensors are.
        others: Where in `leaves` there is something that is neither a tensor nor a plain value.
        nested: Whether there are containers or objects that are taken apart.
        flat: Whether the leaves are the arguments: there are no keywords, and no containers.
    """

    __slots__ = ("nested", "flat", "keywords", "leaves", "others", "positional", "tensors")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.leaves = leaves = [*args, *kwargs.values()] if kwargs else list(args)
        self.positional = len(args)
        self.keywords = tuple(kwargs)
        self.tensors: list[int] = []
        self.others: Sequence[int] = ()
        self.nested = False
        objects: dict[int, int] = {}
        for i, leaf in enumerate(leaves):  # grows while it is read: elements of containers come at the end
            kind = type(leaf)
            if kind is torch.Tensor:
                self.tensors.append(i)
            elif kind in PLAIN:
                continue
            elif isinstance(leaf, torch.Tensor):
                self.tensors.append(i)
            elif i < self.positional + len(self.keywords) and _torch.is_container(leaf):
                self.nested = True
                elements, spec = _torch.tree_flatten(leaf)
                leaves[i] = Subtree(spec, len(leaves), len(leaves) + len(elements))
                leaves.extend(elements)
            elif id(leaf) in objects:
                leaves[i] = _Again(objects[id(leaf)])
            elif is_context(leaf):
                self.nested, objects[id(leaf)] = True, i
                elements, spec = _torch.tree_flatten(leaf.__dict__)
                leaves[i] = Subtree(spec, len(leaves), len(leaves) + len(elements), type(leaf))
                leaves.extend(elements)
            else:
                self.others = (*self.others, i)
        self.flat = not (self.nested or kwargs)

    def arguments(self, leaves: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Puts `leaves` (as long as `self.leaves`) together into fresh `args, kwargs`."""
        if self.nested:
            leaves = _put_together(leaves)[: self.positional + len(self.keywords)]
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


def _put_together(leaves: Sequence[Any]) -> list[Any]:
    """Makes the containers and objects among the leaves of a call; what is in them comes behind them."""
    made = {i: object.__new__(value.kind) for i, value in enumerate(leaves) if type(value) is Subtree and value.kind}
    found = [made[value.place] if type(value) is _Again else value for value in leaves]
    for i in reversed(range(len(found))):
        value = found[i]
        if type(value) is Subtree:
            content = _torch.tree_unflatten(found[value.start : value.stop], value.spec)
            if i in made:
                made[i].__dict__.update(content)
            found[i] = made.get(i, content)
    return found
