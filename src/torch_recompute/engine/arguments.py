"""The arguments of one call of a region, taken apart and put together again.

A region is called twice with "the same" arguments, the second time long after the first. Between the two the caller
may have emptied a list that was passed, popped a key from a dict, replaced an element or set an attribute. So a call is
taken apart into leaves when it is made and put together again for each replay: containers are rebuilt, and objects that
hold plain data alone, as a context or a cache does; tensors come from where they were kept, everything else is passed
on by identity. What a function writes into a container or an object is not held either, so that no cycle leads from a
region's result through it back to the region. Flat calls (every argument a tensor or a plain value) are by
far the most common and skip the pytree machinery. Rejected: `tree_flatten((args, kwargs))` on every call, 5 us where
the loop below takes one.
"""

from __future__ import annotations

import collections
import enum
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .. import _torch

PLAIN = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size})


CONTAINERS = (list, dict, set, collections.deque)
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)
_WRITTEN_IN_PYTHON = 1 << 9  # a class that Python has made: `Py_TPFLAGS_HEAPTYPE`


def is_config(value: Any, deep: int = 2) -> bool:
    """Whether an object holds plain data alone, as a config does. A handle or a trainer does not, and is left alone."""
    if isinstance(value, (torch.nn.Module, torch.Tensor, *FUNCTIONS)) or not deep:
        return False
    data: dict[str, Any] | None = getattr(value, "__dict__", None)
    plain = (enum.Enum, tuple, torch.Tensor, torch.Generator, *CONTAINERS, *FUNCTIONS)
    return bool(data) and all(
        type(one) in PLAIN or isinstance(one, plain) or is_config(one, deep - 1) for one in data.values()
    )


def written_in_c(kind: type[Any]) -> bool:
    """Whether a class is no Python code's, so that an object of it may have more than its attributes."""
    return not kind.__flags__ & _WRITTEN_IN_PYTHON


def is_context(value: Any) -> bool:
    """Whether an object can be made again from its attributes; those of an enumeration and of torch are one of a kind.

    One with slots, or of a class that extends one written in C, is not.
    """
    kinds = type(value).__mro__[:-1]
    mine = not any(written_in_c(kind) or kind.__dict__.get("__slots__") for kind in kinds)
    return mine and not isinstance(value, enum.Enum) and type(value).__module__[:6] != "torch." and is_config(value)


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
