"""The segments of a model as it runs: which modules, in which order, called with what, and which of them are alike.

One forward on fake tensors. Hooks on the chosen modules note the arguments of each call, a dispatch mode the operations
that run in it. Two segments are of one kind if they ran the same operations on the same shapes. That tells apart what
class names do not (a layer with a sliding window from one without), and ignores what makes no difference (the number of
the layer). Segments are the layers that `find_units` sees; where it sees none (a U-Net), the largest modules with at
most `PRODUCTS` products each. A module that is called more than once in a forward is a segment for each of its calls,
of kinds of its own, since their bytes are at different places of the step; one choice is for all (`planner/solve.py`).

`groups` are layers in a row recomputed together: of `g` layers one input is kept. With `Choice.nested` each is a region
of its own in the replay of them all, which holds `g` inputs and one layer instead of `g` layers, for one more forward
of all but the last. With the square root of the layers as `g`, the bytes grow with that root. Groups are powers of two,
so a few of them fill any run of equal layers. In a group only attention is kept, the call that costs most to repeat for
what it stores: where single layers fit, what is kept in them is chosen layer by layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from .. import _torch, errors
from .._torch.compiler import uncompiled
from .._torch.fakes import FakeTensorMode
from .._torch.modes import transforming
from ..memory.operations import Operation
from ..plan.apply import apply
from ..plan.choice import ATTENTION, DOWN, Choice, Target, joined
from ..plan.libraries import CacheSnapshot, checkpointing, is_cache
from ..plan.plan import Plan
from ..plan.roles import Units, inside
from ..plan.units import find_units
from ..simulation.context_parallel import share_context
from ..simulation.copies import Faker, reached_as_before
from ..simulation.experts import share_experts
from ..simulation.fake_mode import FakeMode
from ..simulation.fully_sharded import computing
from ..simulation.training_step import TrainingStep
from .alone import SegmentCall
from .arguments import Call, is_context
from .ops import Op, logging

PRODUCTS = 6


@dataclass
class CapturedCall:
    """A fake model and the calls of its segments, in their order; the lists have an entry per call."""

    pretend: FakeMode  # under which they run
    routers: tuple[str, ...]  # the modules that decide where tokens go; a region around one carries the decisions
    autocast: str = ""  # the dtype of the autocast under which the first one ran; "" for none
    paths: list[str] = field(default_factory=list[str])
    calls: list[SegmentCall] = field(default_factory=list[SegmentCall])
    kinds: list[str] = field(default_factory=list[str])  # segments of one kind are alike
    chained: list[bool] = field(default_factory=list[bool])  # whether it is given the result of the one before

    @contextmanager
    def running(self) -> Generator[None]:
        """Runs operations on the fakes, with grad, whatever is set outside."""
        with torch.inference_mode(False), torch.enable_grad(), self.pretend:
            yield


def capture(step: TrainingStep, device: torch.device) -> CapturedCall:
    """Runs a fake copy of a step's model forward and records the calls of its segments.

    Args:
        step: The step.
        device: Where the fakes are.

    Raises:
        ArgumentError: The model has no module that could be a segment.
    """
    return _Capture(step, device).run(step)


class _Capture:
    """A fake copy of a model, and the calls of its segments as they run."""

    def __init__(self, step: TrainingStep, device: torch.device) -> None:
        fakes = FakeTensorMode()
        faker = Faker(fakes, device)
        self._copy: nn.Module = faker.copy(step.model)
        for module, flag in checkpointing(self._copy):
            vars(module)[flag] = False
        self._call = faker.arguments(*step.call)
        self._units, self._target, self._device = find_units(step.model), step.where.target, device
        parts = [part for unit in self._units.by_role("moe") for part in (unit.parts or (unit.path,))]
        routers = tuple(dict.fromkeys([*(unit.path for unit in self._units.by_role("router")), *parts]))
        self._captured = CapturedCall(FakeMode(fakes, lambda: "", self._target), routers)
        with self._captured.pretend:
            share_context(self._copy, step.ranks)
            share_experts(self._copy, step.ranks)
            computing(self._copy, step.ranks)
        self._seen: list[tuple[str, SegmentCall, list[Op], bool]] = []
        self._running: list[list[Op]] = []  # the operations of the calls that have not ended
        self._result: Any = None  # of the segment that ended last
        self._transformed = False

    def _enter(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if transforming():  # of torch.func, under which a region is a plain call
            self._transformed = True
            return
        if not self._seen:
            kind = self._target.partition(" ")[0]
            self._captured.autocast = _torch.autocast_dtype(kind, self._device.type)
        leaves, spec = _torch.tree_flatten((args, kwargs))
        build: Any = partial(_torch.tree_unflatten, spec=spec)
        if any(is_context(leaf) and not is_cache(leaf) for leaf in leaves):
            whole = Call(args, kwargs)
            leaves, build = whole.leaves, whole.arguments
        recorded = tuple(CacheSnapshot(leaf) if is_cache(leaf) else leaf for leaf in leaves)
        chained = bool(leaves) and leaves[0] is self._result and isinstance(leaves[0], torch.Tensor)
        before = {id(leaf) for _, call, _, _ in self._seen[-1:] for leaf in call.steps[0][1]}
        others = (leaf for leaf in leaves[1:] if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
        chained = chained and all(id(leaf) in before for leaf in others)  # else made between the two
        self._running.append([])
        call = SegmentCall(((module, recorded, build),), _autocast(leaves))
        self._seen.append((path, call, self._running[-1], chained))

    def _leave(self, _module: nn.Module, _args: Any, returned: Any) -> None:
        if transforming():
            return
        self._running.pop()
        self._result = returned[0] if isinstance(returned, tuple) and returned else returned

    def _ran(self, op: Op, _: Operation) -> None:
        if self._running:
            self._running[-1].append(op)

    def run(self, step: TrainingStep) -> CapturedCall:
        """Runs the copy forward."""
        handle = apply(self._copy, Plan())  # which keeps a model from filling a cache in training
        args, kwargs = self._call
        with reached_as_before(step.model), self._captured.running(), uncompiled(step.model), ExitStack() as stack:
            for path in _outermost(self._units, self._copy):
                module = self._copy.get_submodule(path)
                enter = partial(self._enter, path)
                stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            stack.enter_context(logging(self._ran))
            self._copy(*args, **kwargs)
        handle.remove()
        self._add_segments()
        if not self._captured.paths:
            name = type(step.model).__name__
            raise errors.ArgumentError(
                f"{name} calls its layers only within a transform of torch.func (jvp, grad, vmap), where PyTorch takes "
                "no saved-tensor hooks, by which regions are made: no layer can be recomputed there.\n"
                "  Take a smaller batch, or call layers outside of the transform, which a plan can recompute."
                if self._transformed
                else f"{name} has no module that a plan could recompute: none that is called in a "
                "forward holds a product.\n"
                "  Call layers as layer(x), since layer.forward(x) passes a plan by; or name one by hand: "
                'torch_recompute.register("layer", MyBlock)'
            )
        return self._captured

    def _add_segments(self) -> None:
        """Adds the calls, and numbers their kinds."""
        captured, numbers = self._captured, dict[Any, int]()
        times = Counter(path for path, *_ in self._seen)
        for path, call, ops, chained in self._seen:
            ((module, leaves, _build),) = call.steps
            grads = tuple(isinstance(x, torch.Tensor) and x.requires_grad for x in (*leaves, *module.parameters()))
            names = tuple(name for name, _ in module.named_modules())  # by which parts are chosen
            like = tuple(ops), names, grads, module.training, path if times[path] > 1 else ""
            kind = str(numbers.setdefault(like, len(numbers)))
            captured.paths.append(path)
            captured.calls.append(call)
            captured.kinds.append(kind)
            captured.chained.append(chained and times[path] == 1)


def _autocast(leaves: list[Any]) -> torch.autocast | None:
    """Autocast as it is now, of the device of the first tensor."""
    kind = next((leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)), "")
    if not kind or not torch.amp.is_autocast_available(kind):
        return None
    return torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind))


def segment_paths(model: nn.Module) -> list[str]:
    """The modules of a model that are segments."""
    return _outermost(find_units(model), model)


def _outermost(units: Units, model: nn.Module) -> list[str]:
    """The modules to plan: the outermost layers, else the largest modules with few products."""
    layers = [unit.path for unit in units.layers]
    if layers:
        return [path for path in layers if not any(inside(path, other) and path != other for other in layers)]
    products = {unit.path for unit in units.by_role("product")} or {
        path for path, module in model.named_modules() if any(p.ndim > 1 for p in module.parameters(recurse=False))
    }

    def split(path: str, module: nn.Module) -> Iterator[tuple[int, str]]:
        held = sum(inside(product, path) for product in products)
        if path and path in units.modules and 0 < held <= PRODUCTS:
            yield id(module), path
        elif held:
            for name, child in module.named_children():
                yield from split(joined(path, name), child)

    found: dict[int, str] = {}
    for module, path in split("", model):
        found.setdefault(module, path)
    return list(found.values())


# --- several layers under one region ---

TOGETHER = 2
LARGEST = 8
KEEPS = ((), (ATTENTION,), (ATTENTION, DOWN))


def spans(captured: CapturedCall, kind: str) -> tuple[int, list[int]]:
    """The numbers of layers of a kind in a row that are worth one region, and where the longest row begins."""
    start, longest = max(_runs(captured, kind), key=lambda run: run[1], default=(0, 0))
    found = [TOGETHER] if longest else []
    while found and found[-1] < LARGEST and (2 * found[-1]) ** 2 <= 2 * longest:
        found.append(2 * found[-1])
    return start, found


def group(captured: CapturedCall, start: int, span: int) -> tuple[SegmentCall, tuple[str, ...]]:
    """The call of some layers in a row, and their paths."""
    calls = captured.calls[start : start + span]
    call = SegmentCall(tuple(call.steps[0] for call in calls), calls[0].autocast)
    return call, tuple(captured.paths[start : start + span])


def regions_of_groups(kinds: Sequence[str]) -> list[Choice]:
    """The regions around several layers that are worth a trial.

    Args:
        kinds: The kinds of calls that a layer makes, such as "attention".
    """
    keeps = [tuple(Target.of(calls=kind) for kind in keep) for keep in KEEPS if all(kind in kinds for kind in keep)]
    return [Choice(("",), keep, nested=nested) for keep in keeps for nested in (False, True)]


def _runs(captured: CapturedCall, kind: str) -> list[tuple[int, int]]:
    """The runs of segments of a kind that take one another's results: where each begins, and its length.

    A run of equal segments is one for the solvers, so where one of them takes something else there is no group at all.
    """
    runs: list[tuple[int, int]] = []
    for index, (other, chained) in enumerate(zip(captured.kinds, captured.chained, strict=True)):
        if other != kind:
            continue
        if runs and sum(runs[-1]) == index:
            if not chained:
                return []
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((index, 1))
    return [run for run in runs if run[1] > 1]
