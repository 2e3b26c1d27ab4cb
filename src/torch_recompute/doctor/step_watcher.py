"""Watches real steps of a model, by hooks on its modules and parameters and by counters that exist anyway.

The calls of each module are counted, in forward and in backward, which shows work that is done a third time, whichever
library checkpoints it. Buffers are copied when a backward begins and compared when it has ended: a replay changed
them. The gradients that each parameter gets are counted, and replays of a plan's regions are timed. After the
first steps two hooks remain: one takes the time and reads how many bytes are alive, and one marks the graph of each
output, with a mark that dies with it. Where more bytes are alive, or more marks outlive their step, than in the first
steps, all hooks are registered again for a while. Inside `torch.compile` each hook returns at once, because it would
break the graph.

No hook changes the step, none keeps a tensor of its graph, and `end` leaves none behind.
"""

from __future__ import annotations

import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .. import _torch
from .._torch import graphs
from .._torch.compiler import any_compiled, compilations, compilers_share, fallbacks, resumed
from ..errors import RecomputeError
from ..memory import allocator
from ..memory.free import heap
from ..memory.ledger import storages
from ..memory.meter import Stamp, between, stamp
from ..memory.operations import kind_of
from ..memory.retainers import holders_of, separate_parts
from ..plan.apply import Region
from ..plan.observe import watching
from ..plan.wrappers import wrappers_on
from .compare import Difference, distance

if TYPE_CHECKING:
    from ..distributed import Reentrant

CLOSELY = 3
"""The number of steps that are watched with all hooks."""

FORWARDS = 8
"""The factor by which more calls of the model are watched closely where none has had a backward."""
LITTLE = 0.02
"""The share of what the modules of a step return that may outlive it."""
GROWN = 2**22
"""The growth of the bytes alive that is watched closely: Python takes its own memory in pieces of 1 MiB."""
DROPOUT = ("p", "dropout", "dropout_p", "attention_dropout")  # attributes of modules that draw masks


@dataclass(frozen=True)
class AllocatorStats:
    """Counts of the CUDA allocator."""

    device: str
    allocated_bytes: int  # the most that tensors held at once while it was watched
    reserved_bytes: int  # the most that the allocator held at once
    retries: int  # how often it had to give everything unused back and ask again, since the process began
    total_bytes: int  # of the device


class Raised(NamedTuple):
    """An exception of a step, without its frames."""

    text: str  # `IndexError: pop from empty list`
    advice: str  # what the exception says to write, if it is one of this library's
    module: str  # path of the innermost module in whose code it was raised
    line: str  # `file:line` of the user's code

    @classmethod
    def by(cls, error: Exception, model: nn.Module) -> Raised:
        """Reads an exception that `model` raised."""
        paths = {id(module): path for path, module in model.named_modules()}
        module = line = ""
        for frame, number in traceback.walk_tb(error.__traceback__):
            module = paths.get(id(frame.f_locals.get("self")), module)
            if kind_of(frame.f_code.co_filename) == "user":
                line = f"{frame.f_code.co_filename}:{number}"
        text, _, advice = str(error).partition("\n")
        advice = " ".join(advice.split()) if isinstance(error, RecomputeError) else ""
        return cls(f"{type(error).__name__}: {text}", advice, module, line)


class OutlivedStep(NamedTuple):
    """Results of one module that were alive when their step was over."""

    nbytes: int
    steps: int  # of how many steps they were, at once
    backward: bool  # whether a backward has gone through them
    in_graph: bool  # whether a graph holds them, which something refers to
    holder: str  # what refers to them, or to the graph, as `global 'loss' of __main__`; "" where it has no name


class Summed(NamedTuple):
    """Forwards whose losses were added up before one backward, though none of them needs another one."""

    forwards: int
    nbytes: int  # of what their modules returned, alive when that backward began
    alone: int  # of these, of the largest forward


@dataclass
class _ModelOutputs:
    """The memory of what the modules returned in one call of the model."""

    backward: bool = False  # has gone through it
    task: int = -1  # the last one that has
    nodes: set[int] = field(default_factory=set[int])  # that the model's outputs come from, by sequence number
    nbytes: int = 0
    results: dict[int, tuple[weakref.ref[torch.UntypedStorage], str]] = field(default_factory=dict[int, Any])
    returned: set[int] = field(default_factory=set[int])  # of these, what the model itself returned

    def add(self, path: str, output: Any) -> None:
        """Records the memory of what a module returned, without keeping it alive."""
        for tensor in _torch.tensors_in(output):
            for _, storage in storages(tensor) if tensor.grad_fn is not None else ():
                base = tensor._base
                known = self.results.get(id(storage))
                new = known is None or known[0]() is None  # another storage may have had this id
                if new and (base is None or base.grad_fn is not None):  # no parameter
                    self.results[id(storage)] = weakref.ref(storage), path
                    self.nbytes += storage.nbytes()

    def ends(self, output: Any) -> None:
        """Records what the model returned; the loop may hold that until the next call returns."""
        self.add("", output)
        self.returned = {id(storage) for _, storage in storages(_torch.tensors_in(output))}

    @property
    def alive_bytes(self) -> int:
        """The bytes that are still alive."""
        return sum(storage.nbytes() for ref, _ in self.results.values() if (storage := ref()) is not None)

    def alive(self, last: bool) -> dict[int, tuple[torch.UntypedStorage, str]]:
        """Returns the storages still alive and their modules; none where they are little or of a `last` output."""
        found = {
            key: (storage, path)
            for key, (ref, path) in self.results.items()
            if (storage := ref()) is not None and not (last and key in self.returned)
        }
        return found if sum(s.nbytes() for s, _ in found.values()) > LITTLE * self.nbytes else {}


@dataclass
class Observations:
    """The counts and findings of the steps that were watched."""

    steps: int = 0  # calls of the model, with gradients
    seconds: float = 0.0  # from one call to the next, on the average; 0 where there were too few
    replay_seconds: dict[str, float] = field(default_factory=dict[str, float])  # by region of a plan in the model
    calls: Counter[str] = field(default_factory=Counter[str])  # of each module in forward, by path
    calls_in_backward: Counter[str] = field(default_factory=Counter[str])
    backwards: int = 0  # that have ended
    changed_buffers: Counter[str] = field(default_factory=Counter[str])  # by a backward, and in how many
    reentrant: tuple[Reentrant, ...] = ()  # checkpoints that call backward inside backward
    without_grad: tuple[str, ...] = ()  # modules with trainable parameters that an autograd Function ran without grad
    gradients: Counter[str] = field(default_factory=Counter[str])  # given to each trainable parameter
    owners: dict[str, str] = field(default_factory=dict[str, str])  # paths of the modules of trainable parameters
    trained_plainly: frozenset[str] | None = None  # given a gradient when reentrant checkpoints are plain calls
    parallel: bool = False  # `DistributedDataParallel` is around the model or in it
    fallbacks: Mapping[str, int] = field(default_factory=dict[str, int])  # left to eager execution by `torch.compile`
    resumed: tuple[str, ...] = ()  # where compiled code went on after a break, as `forward, line 30`
    compiled_before: bool = False  # these, then, are of all that was compiled since the process began
    drawn_again: tuple[str, ...] = ()  # modules with dropout, compiled while the compiler's own budget was below 1
    allocator: AllocatorStats | None = None  # None without CUDA
    checkpoints: int = 0  # calls of torch's checkpoint
    raised: Raised | None = None  # by a step that without recomputation raises nothing
    differ: tuple[Difference, ...] = ()  # gradients from those of the step without recomputation
    right_with_regions: bool = False  # they do not when torch's checkpoints are regions
    kept: dict[str, OutlivedStep] = field(
        default_factory=dict[str, OutlivedStep]
    )  # activations that outlive their step, by module
    summed: Summed | None = None  # the most forwards that one backward went through, and could have gone one by one
    zeroed_bytes: int = 0  # of gradients that were there, all zero, when a step began
    watched: str = ""  # what was compared after the steps that were watched closely; "" where there were none
    never_again: tuple[str, ...] = ()  # modules in eval mode whose checkpointing is on, and that backward did not call

    @property
    def untrained(self) -> list[str]:
        """Trainable parameters without a gradient, of modules that ran without grad."""
        return [n for n, owner in self.owners.items() if not self.gradients[n] and owner in self.without_grad]

    @property
    def cut_off(self) -> list[str]:
        """Those of them that get one without recomputation, as far as that was tried."""
        plainly = self.trained_plainly
        return [name for name in self.untrained if plainly is None or name in plainly]


class Compiled:
    """The counters of `torch.compile`, as they are now, for what it does from then on."""

    def __init__(self) -> None:
        self._fallbacks, self._resumed, self._count = fallbacks(), resumed(), compilations()

    def before(self, model: nn.Module) -> bool:
        """Returns whether a model was compiled before, and nothing since."""
        return any_compiled(model) and 0 < compilations() == self._count

    def fallbacks(self, model: nn.Module) -> dict[str, int]:
        """Returns the reasons for eager execution since, with counts; since the process began if `before(model)`."""
        return _since({} if self.before(model) else self._fallbacks, fallbacks())

    def resumed(self, model: nn.Module) -> tuple[str, ...]:
        """Returns the functions in which compiled code resumed after a graph break, over the same time."""
        return tuple(_since({} if self.before(model) else self._resumed, resumed()))


def _since(then: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    return {what: count - then.get(what, 0) for what, count in now.items() if count > then.get(what, 0)}


class StepWatcher:
    """Watches a model's steps from now until `end`.

    Args:
        model: The model as the training calls it: with its wrappers.
        closely: The number of steps that are watched with all hooks.
        since: Counters from before the model ran.
    """

    def __init__(self, model: nn.Module, closely: int = CLOSELY, since: Compiled | None = None) -> None:
        self._model = model
        parallel = any(isinstance(module, DistributedDataParallel) for module in model.modules())
        self._found = Observations(parallel=parallel)
        self._closely = closely
        self._grad, self._task = False, -1
        self._stamps: list[Stamp] = []  # of the first steps, and of the last one
        self._buffers: dict[str, torch.Tensor] = {}
        self._without_grad: dict[str, None] = {}
        self._reentrant: dict[Reentrant, None] = {}
        self._steps: list[_ModelOutputs] = []  # that were watched closely
        self._compiled = since or Compiled()
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
        self._sums = 0  # backwards whose roots were read, because they may go through several forwards
        self._marks: list[weakref.ref[_ModelOutputs]] = []  # of calls of the model whose graph may be alive
        self._usual, self._until = (
            0,
            closely,
        )  # so many of them in the first steps; the last call that is watched closely
        self._meter, self._alive_bytes = _meter_of(model)
        self._most, self._allowed = 0, GROWN  # bytes alive when one of the first steps was over; more that are allowed
        self._add_close_hooks()

    @property
    def observations(self) -> Observations:
        """The observations so far."""
        found, stamps = self._found, self._stamps
        first = 1 if len(stamps) > 2 else 0  # the first step warms caches
        steps = found.steps - 1 - first
        found.seconds = between(stamps[first], stamps[-1]) / steps if steps > 0 else 0.0
        seconds = {path: figures.seconds for path, figures in self._figures}
        found.replay_seconds = {path: each for path, each in seconds.items() if each is not None}
        found.drawn_again = _drawn_again(self._model)
        found.without_grad, found.reentrant = tuple(self._without_grad), tuple(self._reentrant)
        found.fallbacks = self._compiled.fallbacks(self._model)
        found.resumed = self._compiled.resumed(self._model)
        found.compiled_before = self._compiled.before(self._model)
        if not self._ended:
            found.allocator = _allocator_stats(self._model)
            found.never_again = tuple(self._never_again())
            self._find_outlived(over=True)
        return found

    def end(self) -> Observations:
        """Removes all hooks; calling it again does nothing."""
        found = self.observations
        if not self._ended:
            self._ended = True
            allocator.end(self._peaks)
            self._remove_close_hooks()
            for handle in self._root:
                handle.remove()
            self._buffers.clear()
            self._steps.clear()
        return found

    def _add_close_hooks(self) -> None:
        """Puts a hook on each module and trainable parameter."""
        for path, module in self._model.named_modules():
            trainable = [name for name, p in module.named_parameters(recurse=False) if p.requires_grad]
            count = partial(self._count_call, path, bool(trainable))
            self._close.append(module.register_forward_pre_hook(count, prepend=True))
            if module is not self._model:
                self._close.append(module.register_forward_hook(partial(self._add_output, path)))
            for name in trainable:
                full = f"{path}.{name}".removeprefix(".")
                self._found.owners[full] = path
                count_gradient = partial(self._count_gradient, full)
                self._close.append(getattr(module, name).register_post_accumulate_grad_hook(count_gradient))

    def _lasting(self) -> int:
        """Returns the number of calls before the last whose output, or graph without a backward, is still alive."""
        self._marks = [mark for mark in self._marks if mark() is not None]
        steps = [step for mark in self._marks[:-1] if (step := mark()) is not None]
        return sum(not step.backward or bool(step.alive(False)) for step in steps)

    def _choose_hooks(self) -> None:
        """Removes most hooks after the first steps, and registers them again where more outlives its step."""
        lasting, alive, steps = self._lasting(), self._alive_bytes(), self._found.steps
        if self._close:
            self._usual, self._most = max(self._usual, lasting), max(self._most, alive)
            # Forwards before the first backward are of one step.
            if steps >= (self._until if self._found.backwards else FORWARDS * self._until):
                self._remove_close_hooks()
                self._found.watched = f"{self._meter}outputs and graphs that outlive their step"
                of_a_step = max((step.nbytes for step in self._steps), default=0)
                self._allowed = max(self._allowed, round(LITTLE * of_a_step))
        elif lasting > self._usual or alive > self._most + self._allowed:
            self._allowed *= 1 if lasting > self._usual else 2  # it may be no tensor that grows
            # What happens every so many steps is to be seen twice.
            self._usual, self._until = max(self._usual, lasting), steps + 2 * (steps - self._until) + self._closely
            self._add_close_hooks()

    def _remove_close_hooks(self) -> None:
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
        if self._close:
            self._find_outlived()
            zeroed = [p.grad for p in self._model.parameters() if p.grad is not None]
            if self._found.steps and zeroed and not any(map(torch.count_nonzero, zeroed)):
                self._found.zeroed_bytes = sum(grad.nbytes for grad in zeroed)
        self._choose_hooks()
        if self._close:
            self._steps.append(_ModelOutputs())
        self._found.steps += 1

    def _has_run(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self._grad or _torch.in_backward():
            return
        step = self._steps[-1] if self._close else _ModelOutputs()
        step.ends(output)
        leaves = [leaf for leaf in _torch.tensors_in(output) if leaf.requires_grad]
        if self._close and leaves:
            from ..distributed import find_reentrant  # takes two seconds to import

            self._reentrant.update(dict.fromkeys(find_reentrant(leaves, self._model)))
        self._marks.append(weakref.ref(step))
        for leaf in leaves:  # the graph holds the step
            leaf.register_hook(partial(self._in_backward, step))
            if leaf.grad_fn is not None:
                step.nodes.add(_torch.sequence_of(leaf.grad_fn))

    def _in_backward(self, step: _ModelOutputs, _gradient: torch.Tensor) -> None:
        step.backward = True
        before, self._task = self._task, _torch.graph_task_id()
        step.task = self._task
        if before != self._task:  # an output of several tensors has a hook on each
            if self._close:
                self._buffers = {name: buffer.detach().clone() for name, buffer in self._model.named_buffers()}
            _torch.after_backward(self._backward_over)
            self._find_sums(step)

    def _find_sums(self, step: _ModelOutputs) -> None:
        """Finds sums of losses that a backward began with, in the first that may go through several forwards."""
        waiting = [other for mark in self._marks if (other := mark()) is not None and not other.backward]
        if not waiting or self._sums == self._closely:
            return
        self._sums += 1
        steps = [step, *waiting]
        parts = separate_parts(graphs.roots_of_backward(), {number for one in steps for number in one.nodes})
        sizes = [sum(one.alive_bytes for one in steps if one.nodes & part) for part in parts]
        if len(sizes) > 1 and (self._found.summed is None or len(sizes) > self._found.summed.forwards):
            self._found.summed = Summed(len(sizes), sum(sizes), max(sizes))

    def _backward_over(self) -> None:
        if not self._close:
            return
        self._found.backwards += 1
        for name, buffer in self._model.named_buffers():
            then = self._buffers.get(name)
            if then is not None and distance(then, buffer):
                self._found.changed_buffers[name] += 1

    def _count_call(self, path: str, trainable: bool, _module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if _torch.in_backward():
            self._found.calls_in_backward[path] += 1
            return
        self._found.calls[path] += 1
        if trainable and self._grad and not torch.is_grad_enabled() and graphs.in_function():
            self._without_grad[path] = None

    def _add_output(self, path: str, _module: nn.Module, _args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and self._grad and self._steps and not _torch.in_backward():
            self._steps[-1].add(path, output)

    def _find_outlived(self, over: bool = False) -> None:
        """Finds results of modules that outlive their step, and what refers to them.

        A step without a backward counts only when all is `over`, and only as one of several: a backward may come that
        goes through all of them.
        """
        last = self._steps[-1] if self._steps else None
        held = {id(step) for step in self._steps if step is last or (step.backward and step.task == self._task)}
        alive = [(step.backward, found) for step in self._steps if (found := step.alive(id(step) in held))]
        if over and sum(not backward for backward, _ in alive) > 1:
            counted = alive
        else:
            counted = [(backward, found) for backward, found in alive if backward]
        if not counted:
            return
        paths = {path: None for _, found in counted for _, path in found.values()}
        new = {key for _, found in counted for key, (_, path) in found.items() if path not in self._found.kept}
        names = {id(module): path for path, module in self._model.named_modules()}
        holders, in_graph = holders_of(new, lambda module: names.get(id(module), type(module).__name__))
        for path in paths:
            of = [(b, [(k, s.nbytes()) for k, (s, at) in found.items() if at == path]) for b, found in counted]
            of = [(backward, sizes) for backward, sizes in of if sizes]
            keys = [key for _, sizes in of for key, _ in sizes]
            by_graph = [in_graph[key] for key in keys if key in in_graph]
            holder = bool(by_graph), next(filter(None, by_graph or (holders.get(key) for key in keys)), "")
            before = self._found.kept.get(path)
            self._found.kept[path] = OutlivedStep(
                sum(nbytes for _, sizes in of for _, nbytes in sizes),
                len(of),
                all(backward for backward, _ in of),
                *(holder if before is None else before[3:]),
            )

    def _never_again(self) -> Iterator[str]:
        """Yields the modules in eval mode whose checkpointing is turned on, and that no backward has called."""
        called = self._found.calls_in_backward
        if not self._found.backwards or self._without_grad:
            return
        above: list[str] = []
        for path, module in self._model.named_modules():
            if module.training or not getattr(module, "gradient_checkpointing", False) or not self._found.calls[path]:
                continue
            inside = f"{path}." if path else ""
            if not any(path.startswith(outer) for outer in above) and not any(
                count and (name == path or name.startswith(inside)) for name, count in called.items()
            ):
                above.append(inside)
                yield path

    def _count_gradient(self, name: str, _parameter: torch.Tensor) -> None:
        self._found.gradients[name] += 1


def _drawn_again(model: nn.Module) -> tuple[str, ...]:
    """Returns the modules with dropout in a compiled model whose compiler has a budget of its own."""
    if not any_compiled(model) or compilers_share() >= 1:
        return ()
    return tuple(
        path.removeprefix("_orig_mod.")
        for path, module in model.named_modules()
        if module.training and any(isinstance(p := getattr(module, name, 0), float) and p > 0 for name in DROPOUT)
    )


def _cuda_device(model: nn.Module) -> torch.device | None:
    return next((p.device for p in model.parameters() if p.device.type == "cuda"), None)


def _meter_of(model: nn.Module) -> tuple[str, Callable[[], int]]:
    """Returns the name of a counter of bytes alive that needs no mode, and the counter; "" and 0 without one."""
    device = _cuda_device(model)
    if device is not None:
        return f"bytes alive by the allocator of {device}, ", lambda: torch.cuda.memory_allocated(device)
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    if not on_cpu or heap() is None:
        return "", lambda: 0
    return "bytes in use of this process's heap, ", lambda: (heap() or (0, 0))[0]


def _allocator_stats(model: nn.Module) -> AllocatorStats | None:
    """Returns the counts of the CUDA allocator of a model's device; None for a model that is not on CUDA."""
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
