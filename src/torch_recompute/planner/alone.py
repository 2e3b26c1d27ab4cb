"""A segment alone: one layer, or several in a row, run forward and backward on fake tensors without their model.

Its input is made by a function that drops it, as a layer before would, so it is alive only as long as something needs
it; so are the gradients of its results. What the layers around it hold is added later (`calibrate.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from torch import nn

from ..memory.batch import tensors_of_call
from ..memory.saved import generators_as_before
from ..plan.libraries import CacheSnapshot
from ..simulation.copies import reached_as_before
from ..simulation.made_up import floats


@dataclass(frozen=True)
class SegmentCall:
    """A call of a segment, which is one module or several in a row; modules and tensors are fake."""

    steps: tuple[tuple[nn.Module, tuple[Any, ...], Any], ...]  # each module, its flat arguments, and their maker
    autocast: torch.autocast | None = None  # as it was; None where nothing is called with a tensor

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The tensors of the first call that come from the segments before: those with a gradient, else the first."""
        tensors = [x for x in self.steps[0][1] if isinstance(x, torch.Tensor) and floats(x)]
        return [tensor for tensor in tensors if tensor.requires_grad] or tensors[:1]

    @property
    def given(self) -> list[torch.Tensor]:
        """All tensors that its modules are called with."""
        return [leaf for _, leaves, _ in self.steps for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def run(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Calls the modules, with these tensors for `inputs`; the result of one is the first argument of the next."""
        fresh = {id(old): new for old, new in zip(self.inputs, inputs, strict=True)}
        result: Any = None
        for number, (module, leaves, build) in enumerate(self.steps):
            given = [leaf.cache() if isinstance(leaf, CacheSnapshot) else fresh.get(id(leaf), leaf) for leaf in leaves]
            if number:
                given[0] = result[0] if isinstance(result, tuple) else result
            args, kwargs = build(given)
            del given
            with self.autocast or nullcontext():
                result = module(*args, **kwargs)
            given = {id(tensor) for tensor in (*leaves, *fresh.values())}
            if not tensors_of_call(result):  # it may have left it in a container that it was given
                result = [tensor for tensor in tensors_of_call((args, kwargs)) if id(tensor) not in given]
            del args, kwargs
        return result


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of a segment under some choices; bytes are those of `Option`.

    Attributes:
        calls: The operations of calls that are kept, and of decisions that are carried.
        watched: The operations, in forward and in replays, among which these are found.
    """

    saved_bytes: int
    forward_bytes: int
    backward_bytes: int
    host_bytes: int = 0
    calls: int = 0
    watched: int = 0


class Stage(Enum):
    """The parts of a run."""

    BEFORE = auto()
    """The tensors are made that the layers before make."""
    FORWARD = auto()
    RETURNED = auto()
    """The forward is over, and its result not yet dropped."""
    TURN = auto()
    """The gradients are made that the layers behind make."""
    BACKWARD = auto()


At = Callable[[Stage, list[torch.Tensor]], object]
"""Is called when a stage begins: FORWARD with what the segment is given, RETURNED with what it returned."""


@contextmanager
def alone(call: SegmentCall, *, frees: bool) -> Generator[nn.ModuleList]:
    """Yields the modules of a segment in a list, and puts back afterwards what running them changes.

    In paths of the list "0" is the first module, "0.mlp" a part of it.

    Args:
        call: The segment.
        frees: Whether the gradients of parameters are freed as they come.
    """
    modules = nn.ModuleList(module for module, _, _ in call.steps)
    gradients = [(parameter, parameter.grad) for parameter in modules.parameters()]
    trained = [weight for weight in modules.parameters() if weight.requires_grad and frees]
    with reached_as_before(modules), ExitStack() as stack:
        for weight in trained:
            stack.callback(weight.register_post_accumulate_grad_hook(_free).remove)
        stack.enter_context(generators_as_before())  # which decide alike in each run
        stack.enter_context(_without_history(modules))
        try:
            yield modules
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient


@contextmanager
def _without_history(modules: nn.Module) -> Generator[None]:
    """Gives modules the tensors that others have set as their attributes without the graph that made them.

    A backward of the segment alone ends there; the gradients go nowhere, as those of its inputs.
    """
    own = [(vars(module), name, value) for module in modules.modules() for name, value in vars(module).items()]
    given = [(place, name, value) for place, name, value in own if isinstance(value, torch.Tensor) and value.grad_fn]
    for place, name, value in given:
        place[name] = value.detach().requires_grad_()
        place[name].register_post_accumulate_grad_hook(_free)
    try:
        yield
    finally:
        for place, name, value in given:
            place[name] = value


def run_alone(call: SegmentCall, at: At, around: AbstractContextManager[Any] | None = None) -> None:
    """Runs a segment forward and backward, within `alone`.

    Args:
        call: The segment.
        at: Is told when each stage begins.
        around: Is entered around the forward.
    """
    like = call.inputs
    grads = any(tensor.requires_grad for tensor in like)
    token = torch.empty((), device=like[0].device, requires_grad=grads) if like else None
    at(Stage.BEFORE, [])
    inputs = list(_Source.apply(token, call)) if token is not None else []  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    at(Stage.FORWARD, inputs)
    with around or nullcontext():
        result = call.run(inputs)
    del inputs
    at(Stage.RETURNED, tensors_of_call(result))
    outputs = [x for x in tensors_of_call(result) if x.requires_grad]
    edges = [torch.autograd.graph.get_gradient_edge(x) for x in outputs]
    makers = [_maker(x.detach()) for x in outputs]
    del result, outputs
    at(Stage.TURN, [])
    given = [make() for make in makers]
    at(Stage.BACKWARD, [])
    # As a training loop does, outside of autocast; within any, what replays cast would wait for the end of it.
    outside = call.autocast is None or not torch.is_autocast_enabled(call.autocast.device)
    with nullcontext() if outside or call.autocast is None else torch.autocast(call.autocast.device, enabled=False):
        torch.autograd.backward(edges, given)  # pyright: ignore[reportArgumentType]


class _Source(torch.autograd.Function):
    """Makes tensors as a layer before would: only the reader holds them, and their gradients go nowhere."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, call: SegmentCall) -> Any:
        return tuple(_maker(x, strided=True)() for x in call.inputs)  # of the call: arguments are part of the graph

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, None


def _maker(like: Any, *, strided: bool = False) -> Callable[[], torch.Tensor]:
    """Returns what makes tensors of a tensor's shape, without keeping that; of a jagged one, of its lengths."""
    if like.is_nested:
        values, offsets, lengths = _maker(like.values(), strided=strided), like.offsets(), like.lengths()
        jagged = next(dim for dim, size in enumerate(like.shape) if not isinstance(size, int))
        return lambda: torch.nested.nested_tensor_from_jagged(values(), offsets, lengths, jagged)
    make = partial(torch.empty_strided, like.shape, like.stride()) if strided else partial(torch.empty, like.shape)
    return partial(make, dtype=like.dtype, device=like.device)


def _free(weight: torch.Tensor) -> None:
    weight.grad = None
