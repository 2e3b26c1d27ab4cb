"""Torch's collectives: the functional ones, the ranks of each, and what the classes of tensors that make them see."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from .fakes import FakeTensor


def functional() -> Any:
    """The operations; what they return on fake tensors is defined where torch calls them."""
    importlib.import_module("torch.distributed._functional_collectives")
    return torch.ops._c10d_functional


_operations: Any = torch
_plain: Any = getattr(torch.Tensor, "__torch_dispatch__")  # noqa: B009


def dispatches(kind: type) -> bool:
    """Whether tensors of a class decide themselves what an operation on them is; not so fake ones, nor parameters."""
    own: Any = getattr(kind, "__torch_dispatch__", None)
    return own is not None and own is not _plain and not issubclass(kind, FakeTensor)


def call_next_mode(mode: Any, func: Any, kinds: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Shows an operation to the dispatch mode around `mode`, which is handling it and goes on inside of that one.

    `NotImplemented`, as that mode may return, where there is none: the tensors' class comes next.
    """
    around: Any = next(reversed(_get_current_dispatch_mode_stack()), None)
    if around is None or getattr(around, "_mode_key", None) is not None:
        return NotImplemented
    _pop_mode()
    _push_mode(mode)
    try:
        return type(around).__torch_dispatch__(around, func, kinds, args, kwargs)
    finally:
        _pop_mode()
        _push_mode(around)


def members(args: Sequence[Any]) -> frozenset[int] | None:
    """The ranks of a collective, from the arguments of its operation; None where these do not name a group."""
    for arg in reversed(args):
        if isinstance(arg, str):
            named: Any = getattr(dist.distributed_c10d, "_resolve_process_group")  # noqa: B009
            return frozenset(dist.get_process_group_ranks(named(arg)))
        kind: Any = arg._type() if isinstance(arg, torch.ScriptObject) else None
        if kind is not None and kind.name() == "ProcessGroup":
            return frozenset(dist.get_process_group_ranks(dist.ProcessGroup.unbox(arg)))
    return None


def detach_outputs(outputs: Iterable[torch.Tensor]) -> None:
    """Detaches the outputs of the last stage, which are kept until the step ends, from their graph; views cannot be.

    The graph of a view stays, with what the backward has not freed.
    """
    for output in outputs:
        if not output._is_view():
            output.detach_()


def every_input_has_a_gradient() -> bool:
    """Whether a stage sends back a gradient of whatever it has received, as torch's do that have no metadata of it."""
    from torch.distributed.pipelining.stage import PipelineStage

    return not hasattr(PipelineStage, "_get_grad_send_meta")


def backward_for_inputs(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor] | None,
    inputs: Sequence[torch.Tensor],
    weights: Iterable[torch.nn.Parameter],
) -> Any:
    """Computes the gradients of the inputs; returns what the other half of backward needs."""
    from torch.distributed.pipelining import _backward

    given = None if gradients is None else list(gradients)
    return _backward.stage_backward_input(list(outputs), given, list(inputs), iter(weights))[1]


def backward_for_weights(weights: Iterable[torch.nn.Parameter], groups: Any) -> None:
    """Computes the gradients of the weights."""
    from torch.distributed.pipelining import _backward

    _backward.stage_backward_weight(iter(weights), groups)


def copy_all(into: Iterable[torch.Tensor], tensors: Iterable[torch.Tensor]) -> None:
    """Copies tensors into others of their shapes, converted, in one call."""
    _operations._foreach_copy_(list(into), list(tensors))


def into_chunks(tensors: Sequence[torch.Tensor], into: torch.Tensor) -> None:
    """Cuts tensors, padded, into as many parts as a buffer has rows, and writes the parts of each number to one row."""
    _operations._chunk_cat(list(tensors), 0, into.shape[0], out=into)
