"""Watches real steps of a model: hooks on its modules and parameters, and counters that are there anyway.

Modules are counted by calls in forward and in backward, which shows work that is done a third time, whichever library
checkpoints it. Buffers are copied when a forward ends and compared when the backward has ended: a replay changed them.
Parameters are counted when autograd gives them a gradient, and replays of a plan's regions are timed. After the first
steps one hook is left that takes the time. In what `torch.compile` compiles each hook returns at once, because it would
break the graph.

No hook changes the step, none keeps a tensor of its graph, and `end` leaves none behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .. import _torch
from .._torch.modes import compilers_share, fallbacks, is_compiled
from ..memory import allocator
from ..plan.apply import Region
from ..plan.observe import Stamp, between, stamp, watching
from ..plan.wrappers import wrappers_on

if TYPE_CHECKING:
    from ..distributed import Reentrant

CLOSELY = 3
"""How many steps are looked at with all hooks."""


DROPOUT = ("p", "dropout", "dropout_p", "attention_dropout")  # attributes of modules that draw masks


@dataclass(frozen=True)
class AllocatorStats:
    """Counts of the CUDA allocator."""

    device: str
    allocated_bytes: int  # the most that tensors held at once while it was watched
    reserved_bytes: int  # the most that the allocator held at once
    retries: int  # how often it had to give everything unused back and ask again, since the process began
    total_bytes: int  # of the device


@dataclass
class Observations:
    """The observations of a model's steps."""

    steps: int = 0  # calls of the model, with gradients
    seconds: float = 0.0  # from one call to the next, on the average; 0 where there were too few
    replay_seconds: dict[str, float] = field(default_factory=dict[str, float])  # by region of a plan in the model
    calls: Counter[str] = field(default_factory=Counter[str])  # of each module in forward, by path
    calls_in_backward: Counter[str] = field(default_factory=Counter[str])
    backwards: int = 0  # that have ended
    changed_buffers: Counter[str] = field(default_factory=Counter[str])  # by a backward, and in how many
    reentrant: tuple[Reentrant, ...] = ()  # checkpoints that call backward inside backward
    without_grad: tuple[str, ...] = ()  # modules with trainable parameters that ran without grad in a model with it
    gradients: Counter[str] = field(default_factory=Counter[str])  # given to each trainable parameter
    owners: dict[str, str] = field(default_factory=dict[str, str])  # paths of the modules of trainable parameters
    trained_plainly: frozenset[str] | None = None  # given a gradient when reentrant checkpoints are plain calls
    parallel: bool = False  # `DistributedDataParallel` is around the model or in it
    fallbacks: Mapping[str, int] = field(default_factory=dict[str, int])  # left to eager execution by `torch.compile`
    drawn_again: tuple[str, ...] = ()  # modules with dropout, compiled while the compiler's own budget was below 1
    allocator: AllocatorStats | None = None  # None without CUDA

    @property
    def untrained(self) -> list[str]:
        """Trainable parameters without a gradient, of modules that ran without grad."""
        return [n for n, owner in self.owners.items() if not self.gradients[n] and owner in self.without_grad]


class StepWatcher:
    """Watches a model's steps from now until `end`.

    Args:
        model: The model as the training calls it: with its wrappers.
        closely: How many steps are looked at with all hooks.
    """

    def __init__(self, model: nn.Module, closely: int = CLOSELY) -> None:
        self._model = model
        parallel = any(isinstance(module, DistributedDataParallel) for module in model.modules())
        self._found = Observations(parallel=parallel)
        self._closely = closely
        self._grad, self._task = False, -1
        self._stamps: list[Stamp] = []  # of the first steps, and of the last one
        self._buffers: dict[str, torch.Tensor] = {}
        self._without_grad: dict[str, None] = {}
        self._reentrant: dict[Reentrant, None] = {}
        self._before = fallbacks()
        self._peaks: dict[int, allocator.Peak] = {}
        self._ended = False
        allocator.begin(self._peaks)
        self._root = [
            model.register_forward_pre_hook(self._begins, prepend=True),
            model.register_forward_hook(self._has_run),
        ]
        self._close: list[Any] = []
        regions = [placed for m in model.modules() for placed in wrappers_on(m) if isinstance(placed, Region)]
        self._watching = ExitStack()
        figures = self._watching.enter_context(watching(regions))
        self._figures = list(zip([region.path for region in regions], figures, strict=True))
        for path, module in model.named_modules():
            trainable = [name for name, p in module.named_parameters(recurse=False) if p.requires_grad]
            self._close.append(module.register_forward_pre_hook(self._counter(path, bool(trainable)), prepend=True))
            for name in trainable:
                full = f"{path}.{name}".removeprefix(".")
                self._found.owners[full] = path
                self._close.append(getattr(module, name).register_post_accumulate_grad_hook(self._given(full)))

    @property
    def observations(self) -> Observations:
        """What has been observed so far."""
        found, stamps = self._found, self._stamps
        first = 1 if len(stamps) > 2 else 0  # the first step warms caches
        steps = found.steps - 1 - first
        found.seconds = between(stamps[first], stamps[-1]) / steps if steps > 0 else 0.0
        seconds = {path: figures.seconds for path, figures in self._figures}
        found.replay_seconds = {path: each for path, each in seconds.items() if each is not None}
        found.drawn_again = _drawn_again(self._model)
        found.without_grad, found.reentrant = tuple(self._without_grad), tuple(self._reentrant)
        more = {what: count - self._before.get(what, 0) for what, count in fallbacks().items()}
        found.fallbacks = {what: count for what, count in more.items() if count > 0}
        if not self._ended:
            found.allocator = _allocator_stats(self._model)
        return found

    def end(self) -> Observations:
        """Takes all hooks away; calling it again does nothing."""
        found = self.observations
        if not self._ended:
            self._ended = True
            allocator.end(self._peaks)
            self._end_close_look()
            for handle in self._root:
                handle.remove()
            self._buffers.clear()
        return found

    def _end_close_look(self) -> None:
        self._watching.close()
        for handle in self._close:
            handle.remove()
        self._close.clear()

    # --- hooks ----------------------------------------------------------------------------------------------------

    def _begins(self, _module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._grad = torch.is_grad_enabled()
        if not self._grad or _torch.in_backward():
            return
        del self._stamps[2:]
        self._stamps.append(stamp())
        if self._found.steps >= self._closely:
            self._end_close_look()
        self._found.steps += 1

    def _has_run(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self._grad or not self._close or _torch.in_backward():
            return
        self._buffers = {name: buffer.detach().clone() for name, buffer in self._model.named_buffers()}
        leaves = [leaf for leaf in _torch.tensors_in(output) if leaf.requires_grad]
        if not leaves:
            return
        from ..distributed import find_reentrant  # takes two seconds to import

        self._reentrant.update(dict.fromkeys(find_reentrant(leaves, self._model)))
        for leaf in leaves:
            leaf.register_hook(self._in_backward)

    def _in_backward(self, _gradient: torch.Tensor) -> None:
        before, self._task = self._task, _torch.graph_task_id()
        if before != self._task:  # an output of several tensors has a hook on each
            _torch.after_backward(self._backward_over)

    def _backward_over(self) -> None:
        self._found.backwards += 1
        for name, buffer in self._model.named_buffers():
            then = self._buffers.get(name)
            if then is not None and (then.shape != buffer.shape or not torch.equal(then, buffer.detach())):
                self._found.changed_buffers[name] += 1

    def _counter(self, path: str, trainable: bool) -> Any:
        found = self._found

        def count(_module: nn.Module, _args: Any) -> None:
            if torch.compiler.is_compiling():
                return
            if _torch.in_backward():
                found.calls_in_backward[path] += 1
                return
            found.calls[path] += 1
            if trainable and self._grad and not torch.is_grad_enabled():
                self._without_grad[path] = None

        return count

    def _given(self, name: str) -> Any:
        def given(_parameter: torch.Tensor) -> None:
            self._found.gradients[name] += 1

        return given


def _drawn_again(model: nn.Module) -> tuple[str, ...]:
    """The modules with dropout in a compiled model whose compiler has a budget of its own."""
    compiled = any(module.__dict__.get("_compiled_call_impl") or is_compiled(module) for module in model.modules())
    if not compiled or compilers_share() >= 1:
        return ()
    return tuple(
        path.removeprefix("_orig_mod.")
        for path, module in model.named_modules()
        if module.training and any(_is_share(getattr(module, name, 0.0)) for name in DROPOUT)
    )


def _is_share(value: Any) -> bool:
    return isinstance(value, float) and value > 0


def _cuda_device(model: nn.Module) -> torch.device | None:
    return next((p.device for p in model.parameters() if p.device.type == "cuda"), None)


def _allocator_stats(model: nn.Module) -> AllocatorStats | None:
    """What the CUDA allocator of the device that a model is on has counted."""
    device = _cuda_device(model)
    if device is None:
        return None
    stats = torch.cuda.memory_stats(device)
    return AllocatorStats(
        str(device),
        int(stats.get("allocated_bytes.all.peak", 0)),
        int(stats.get("reserved_bytes.all.peak", 0)),
        int(stats.get("num_alloc_retries", 0)),
        int(torch.cuda.mem_get_info(device)[1]),
    )
