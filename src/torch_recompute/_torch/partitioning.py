"""The joint graph that AOTAutograd hands to a partitioner, and torch's partitioner, which splits it by tags.

Private: `torch._inductor.custom_graph_pass.CustomPartitionerFn` (since torch 2.9; without it there is no way in, and
the import fails), `torch._functorch.partitioners.min_cut_rematerialization_partition`, `joint_custom_pass` in
`torch._functorch.config`, the names of inductor's operations for random numbers, and `node.meta`. Run on torch 2.11,
2.13, 2.14.1 and 2.15.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx
from torch._functorch import config, partitioners
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

from . import storage_id
from .flops import flops, fused_on_cpu

__all__ = ["CustomPartitionerFn"]

split: Callable[..., tuple[fx.GraphModule, fx.GraphModule]] = partitioners.min_cut_rematerialization_partition
"""Splits a joint graph into forward and backward, as a `CustomPartitionerFn` is to."""

# Inductor makes each number of a random operation from a seed and a position; a seed itself is drawn once.
_DRAWS = frozenset({"prims.inductor_seeds.default", "prims.inductor_seed.default"})
_FUSED = frozenset({"aten::full", "aten::expand", "aten::clone", "aten::full_like", "prims::iota"})
_ALSO_FUSED = ("prims.inductor_random", "prims.inductor_lookup_seed", "prims.convert_element_type")


def storages(node: fx.Node) -> list[tuple[int, int]]:
    """The storages of a node's tensors, each with its bytes; symbolic sizes by the example they were traced with."""
    found: dict[int, int] = {}
    for tensor in pytree.tree_leaves(node.meta.get("val")):
        if isinstance(tensor, torch.Tensor):
            found[storage_id(tensor)] = hint(tensor.untyped_storage().nbytes())
    return list(found.items())


def hint(size: Any) -> int:
    """A size as a number; a symbol by the example that it was traced with."""
    return size if isinstance(size, int) else int(size.node.hint) if size.node.has_hint() else 4096


def outputs_of(graph: fx.Graph) -> list[Any]:
    """The results of a graph, flat."""
    (last,) = graph.find_nodes(op="output")
    return pytree.arg_tree_leaves(*last.args)


def backward_of(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that need a gradient of the outputs."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if "tangents" in str(node.target):
                found.add(node)
        elif node.op == "call_function" and (
            any(given in found for given in node.all_input_nodes)
            or node.meta.get("partitioner_tag") == "must_be_in_backward"
        ):
            found.add(node)
    return found


def flops_of(node: fx.Node) -> int:
    """The FLOPs of a node."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return 0
    args, kwargs = pytree.tree_map_only(fx.Node, lambda given: given.meta.get("val"), (node.args, node.kwargs))
    return hint(flops(node.target, args, kwargs, node.meta.get("val")) or fused_on_cpu(node.target, args))


def in_next_graph() -> None:
    """Has the next joint graph that AOTAutograd traces changed by `read_copies_of_written`; for Dynamo a constant."""
    former = config.joint_custom_pass
    if getattr(former, "func", None) is not _split_next:
        config.joint_custom_pass = functools.partial(_split_next, former)


in_next_graph._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _split_next(former: Callable[..., fx.GraphModule] | None, gm: fx.GraphModule, inputs: Any) -> fx.GraphModule:
    """The pass over a joint graph that takes the place of `former` once."""
    config.joint_custom_pass = former
    gm = former(gm, inputs) if former else gm
    read_copies_of_written(gm.graph)
    return gm


def read_copies_of_written(graph: fx.Graph) -> None:
    """Lets a joint graph read each buffer that it writes to from a copy, which is made first.

    The forward ends with these writes. What backward runs again of it would read what the buffer is then, and not what
    the forward read; torch's partitioners do not look at that. They keep the copy where something runs again.
    """
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for buffer in graph.find_nodes(op="placeholder"):
        if _is_written(buffer) and not all(_stays(user, buffer) for user in buffer.users):
            with graph.inserting_before(first):
                copy = graph.call_function(_COPY, (buffer,))
            copy.meta = {"val": buffer.meta["val"].clone(), "recompute": CheckpointPolicy.MUST_SAVE}
            buffer.replace_all_uses_with(copy, lambda user, buffer=buffer: not _stays(user, buffer))


_COPY: Any = torch.ops.aten.lift_fresh_copy.default  # of `clone` inductor's passes over a joint graph leave nothing


def _is_written(node: fx.Node) -> bool:
    return node.op == "placeholder" and any(_writes(user, node) for user in node.users)


def _writes(user: fx.Node, buffer: fx.Node) -> bool:
    return user.target is torch.ops.aten.copy_.default and user.args[0] is buffer


def _stays(user: fx.Node, buffer: fx.Node) -> bool:
    """Whether an operation is the copy of a buffer, or the write to it."""
    return user.target is _COPY or _writes(user, buffer)


def may_run_again(node: fx.Node) -> bool:
    """Whether a node gives the same once more, and changes and sends nothing."""
    if any(map(_is_written, node.all_input_nodes)):
        return False
    target: Any = node.target
    name = str(target)
    if node.op == "get_attr" or name in _DRAWS or "_c10d_functional" in name or "with_effects" in name:
        return False
    if not isinstance(target, torch._ops.OpOverload):
        return True
    if target._schema.is_mutable:
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags or _has_no_dropout(node)


def _has_no_dropout(node: fx.Node) -> bool:
    """Whether an operation that may draw numbers draws none: attention without dropout."""
    target: Any = node.target
    for place, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", argument.default_value)
            return not given
    return False


def is_pointwise(node: fx.Node) -> bool:
    """Whether the compiler makes a node a part of the kernels around it."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags:
        return True
    schema = getattr(target, "_schema", None)
    return str(target).startswith(_ALSO_FUSED) or (schema is not None and schema.name in _FUSED)


def tag(graph: fx.Graph, backward: Collection[fx.Node], saved: Collection[int], again: Collection[fx.Node]) -> None:
    """Writes onto the nodes of a joint graph what `split` is to do with them.

    Args:
        graph: The graph.
        backward: Its nodes of backward.
        saved: The storages that backward keeps from the forward.
        again: The nodes that backward runs again; what is a view of what they make is made again as well.
    """
    kept, made = set(saved), {key for node in again for key, _ in storages(node)}
    for node in graph.nodes:
        if node.op != "call_function" or node in backward:
            continue
        node.meta.pop("recompute", None)  # of regions: the choice was made from all operations
        node.meta.pop("ac_graph_id", None)
        keys = {key for key, _ in storages(node)}
        source = node.args[0] if node.target is operator.getitem else node
        if keys & kept and node not in again:  # an operation may run again for another of its results
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        elif source in again or keys & made:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
