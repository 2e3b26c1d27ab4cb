"""Planned regions that `torch.compile` traces: the calls that they keep.

In a region that runs, wrappers on the modules and a mode around the calls see what a plan keeps. In one that is traced,
each operation of the graph is asked where it stands: in which modules, in which function, with which operands. So one
reading of `Choice.keep` serves the eager region (`plan/calls.py`) and this is the other; a test compares the two.

The words are those of `Choice`. Here `@values_unused` says nothing new: the partitioner sees what is needed, and
neither keeps nor repeats the rest. Of decisions that are carried, the operation that made them is saved.
"""

from __future__ import annotations

import hashlib
import re
import types
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.nn import functional as F

from .._torch import compiler, tracing
from .calls import ALL_PRODUCTS, COLLECTIVES, is_declared

Kept = tuple[nn.Module | None, str]
"""A module of the region, or None for all of it, and the kind of calls in it; "" for all that it does."""


PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "convolution", "_grouped_mm", "_trilinear"})
PICKS = {"topk", "sort", "argmax", "argmin", "multinomial"}
DECISIONS = frozenset(PICKS | {"nonzero", "bincount", "histc", "searchsorted", "bucketize"})
ATTENTION = re.compile("_scaled_dot_product_.*attention.*|flex_attention")


def contexts(module: nn.Module, kept: Sequence[Kept], carry: bool, name: str, first: bool | None) -> Any:
    """Returns the contexts of a region for `tracing.call`; None for a region that is recomputed whole, and alone.

    Args:
        module: The region's module.
        kept: What is not recomputed.
        carry: Whether decisions are not made again.
        name: All of this in words that tell one from another.
        first: Of modules that are recomputed together, whether this is the first; None where it is alone.
    """
    unused = {within for within, kind in kept if kind == "values_unused"}
    kept = [(within, kind) for within, kind in kept if within not in unused or kind not in ALL_PRODUCTS]
    if not kept and not carry and first is None:
        return None

    def begin() -> tracing.Saves:
        parameters = compiler.storages_of(module.parameters())

        def saves(operation: Any, nodes: Sequence[Any]) -> bool:
            modules, functions = compiler.called()
            return (carry and _name(operation) in DECISIONS) or any(
                _is_of(kind, operation, nodes, functions, parameters)
                for within, kind in kept
                if within is None or str(id(within)) in modules
            )

        return saves

    return tracing.contexts(lambda: f"{name} {_digest(module)}", begin, first)


def _digest(module: nn.Module) -> str:
    """Tells apart modules whose code differs: the same words may name other operations of the same graph there."""
    kinds = {type(part) for part in module.modules()}
    codes = {(kind.__qualname__, code.co_code, code.co_names) for kind in kinds if (code := _code(kind))}
    return hashlib.sha256(repr(sorted(codes)).encode()).hexdigest()[:16]


def _code(kind: type[nn.Module]) -> types.CodeType | None:
    return getattr(kind.forward, "__code__", None)


def _is_of(kind: str, operation: Any, nodes: Any, functions: Iterable[Any], parameters: frozenset[int]) -> bool:
    """Returns whether an operation is of a kind of `choice.KINDS`, or the kind is empty."""
    if kind in COLLECTIVES:
        return _is_collective(kind, operation)
    if kind == "attention":
        return F.scaled_dot_product_attention in functions or ATTENTION.fullmatch(_name(operation)) is not None
    if kind not in ALL_PRODUCTS:
        return not kind  # of "values_unused" nothing is kept
    if any(map(is_declared, functions)):
        return kind == "product"
    if _name(operation) not in PRODUCTS:
        return False
    operands = compiler.operands(operation, nodes)
    place = next((i for i, (storage, shape) in enumerate(operands) if storage in parameters and len(shape) > 1), None)
    if place is None or kind == "matmul":
        return (place is None) == (kind == "matmul")
    if kind == "product" or _name(operation) == "convolution":
        return kind == "product"
    rows, columns = operands[place][1][-2:]
    is_first = all(len(shape) < 2 for _, shape in operands[:place])
    return rows < columns if is_first else columns < rows


def collectives_saved(kind: str) -> tracing.Contexts:
    """Returns the contexts of a call in which collectives of a kind are saved."""
    return tracing.contexts(lambda: kind, lambda: lambda operation, nodes: _is_collective(kind, operation))


def _is_collective(kind: str, operation: Any) -> bool:
    collectives = {*COLLECTIVES[kind], "wait_tensor"}
    return "_c10d_functional" in operation.name() and _name(operation).removesuffix("_coalesced") in collectives


def _name(operation: Any) -> str:
    """The name of an operation without its namespace and its overload."""
    return operation.name().rpartition("::")[2].partition(".")[0]
