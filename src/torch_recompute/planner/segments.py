"""The segments of a model as it runs: which modules, in which order, called with what, and which of them are alike.

Idea. One forward on fake tensors, no backward. Hooks on the chosen modules note the arguments of each call; a dispatch
mode the operations that run in it. Two segments are of one kind if they ran the same operations on the same shapes.
That tells apart what class names and configurations do not (a layer with a sliding window from one without, a mixture
of experts from a dense layer), and says nothing of what makes no difference (the number of the layer).

Segments are the layers that `find_units` sees. Where it sees none (a U-Net, a convolutional network), they are the
largest modules with at most `PRODUCTS` products each.

A module that is called more than once in a forward is a segment for each of its calls, of kinds of its own: the bytes
of each call are at another place of the step, and one choice is for all of them (`plan/solve.py`).

Several layers under one region. Where there are many layers, or long sequences, the inputs of recomputed layers do not
fit, however little else is kept; then some inputs have to be rebuilt from others. Layers in a row are recomputed
together: of `g` layers one input is kept. Together they are rebuilt whole, so the group holds `g` layers while its
backward runs; where that is too much, each is a region of its own in the replay of them all (`Choice.nested`), which
holds `g` inputs and one layer, for one more forward of all but the last. With the square root of the layers as `g`, the
bytes grow with the square root of the layers.

Groups are powers of two, so a few of them fill any run of equal layers, and a search can take runs in blocks. They are
tried as single layers are, by doing it. In a group nothing is kept but attention, the call that costs most to repeat
for what it stores: where single layers fit, what is kept in them is chosen layer by layer.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .. import _torch, errors
from .._torch.fakes import FakeTensorMode
from ..plan.apply import apply
from ..plan.choice import ATTENTION, DOWN, Choice, Target
from ..plan.libraries import CacheSnapshot, is_cache
from ..plan.plan import Plan
from ..plan.roles import Units, inside
from ..plan.units import find_units
from ..simulation.fake_mode import FakeMode, Faker
from .ops import Op, logging
from .trials import SegmentCall

PRODUCTS = 6


@dataclass
class CapturedCall:
    """A fake model and the calls of its segments.

    Attributes:
        units: What the model is made of.
        paths: The segments, in the order of their calls; one that is called several times stands there as often.
        calls: How each is called.
        kinds: The kind of each: segments with the same number are alike.
        chained: Of each, whether its first argument is the result of the one before, as it was returned.
        autocast: The dtype of the autocast under which the first one ran; "" for none.
        pretend: The mode under which they run.
    """

    units: Units
    pretend: FakeMode
    paths: list[str] = field(default_factory=list[str])
    calls: list[SegmentCall] = field(default_factory=list[SegmentCall])
    kinds: list[int] = field(default_factory=list[int])
    chained: list[bool] = field(default_factory=list[bool])
    autocast: str = ""

    @property
    def routers(self) -> tuple[str, ...]:
        """What decides where tokens go; a region around it carries the decisions."""
        parts = [part for unit in self.units.by_role("moe") for part in (unit.parts or (unit.path,))]
        return tuple(dict.fromkeys([*(unit.path for unit in self.units.by_role("router")), *parts]))

    @contextmanager
    def running(self) -> Generator[None]:
        """Where operations run on the fakes, with grad, whatever is set outside."""
        with torch.inference_mode(False), torch.enable_grad(), self.pretend:
            yield


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device | None = None,
    composed: str = "",
) -> CapturedCall:
    """Runs a fake copy of a model forward and notes the calls of its segments.

    Args:
        model: The model.
        args: The positional arguments of one call.
        kwargs: Its keyword arguments.
        device: Where the fakes lie; None for where the model's tensors do.
        composed: See `simulate_step`.

    Returns:
        The segments.

    Raises:
        ArgumentError: The model has no module that could be a segment.
    """
    fakes = FakeTensorMode()
    faker = Faker(fakes, device)
    copy: nn.Module = faker.copy(model)
    args, kwargs = faker.arguments(args, kwargs)
    units = find_units(model)
    found = CapturedCall(units, FakeMode(fakes, lambda: "", composed))
    modules = dict(copy.named_modules())
    kinds = composed.partition(" ")[0], (device or torch.device("cpu")).type
    seen = _SeenCalls({path: modules[path] for path in segments(units, copy)}, kinds)
    handle = apply(copy, Plan())  # which keeps a model from filling a cache in training
    with found.running(), seen:
        copy(*args, **kwargs)
    handle.remove()
    found.autocast = seen.autocast
    numbers: dict[Any, int] = {}
    times = Counter(path for path, _, _ in seen.calls)
    for path, call, ran in seen.calls:
        repeated = path if times[path] > 1 else ""
        key = (tuple(ran), _grads(call), call.modules[0].training, repeated)
        found.paths.append(path)
        found.calls.append(call)
        found.kinds.append(numbers.setdefault(key, len(numbers)))
        found.chained.append(path in seen.chained and not repeated)
    if not found.paths:
        raise errors.ArgumentError(
            f"{type(model).__name__} has no module that a plan could recompute: none that is called in a forward holds "
            "a product.\n"
            '  Name one by hand: from torch_recompute.plan.units import register; register("layer", MyBlock)'
        )
    return found


def _grads(call: SegmentCall) -> tuple[bool, ...]:
    """Which arguments and parameters require grad."""
    parameters = tuple(parameter.requires_grad for parameter in call.modules[0].parameters())
    return (*(isinstance(x, torch.Tensor) and x.requires_grad for x in call.leaves[0]), *parameters)


def _autocast(leaves: list[Any]) -> torch.autocast | None:
    """Autocast as it is now, of the device of the first tensor."""
    kind = next((leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)), "")
    if not kind or not torch.amp.is_autocast_available(kind):
        return None
    return torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind))


class _SeenCalls:
    """The calls of some modules and the operations that run in each."""

    def __init__(self, modules: dict[str, nn.Module], device_types: tuple[str, ...]) -> None:
        self._modules = modules
        self._device_types = device_types
        self.autocast = ""
        self.calls: list[tuple[str, SegmentCall, list[Op]]] = []
        self.chained: set[str] = set()
        self._result: Any = None
        self._open: list[list[Op]] = []
        self._stack = ExitStack()

    def __enter__(self) -> _SeenCalls:
        for path, module in self._modules.items():
            enter = module.register_forward_pre_hook(self._entering(path), prepend=False, with_kwargs=True)
            leave = module.register_forward_hook(lambda *seen: self._leave(seen[-1]), always_call=True)
            self._stack.callback(enter.remove)
            self._stack.callback(leave.remove)
        self._stack.enter_context(logging(self._ran))
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _entering(self, path: str) -> Any:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            leaves, spec = _torch.tree_flatten((args, kwargs))
            self._open.append([])
            if not self.calls:
                self.autocast = _torch.autocast_dtype(*self._device_types)
            if leaves and leaves[0] is self._result and isinstance(leaves[0], torch.Tensor):
                self.chained.add(path)
            noted = tuple(CacheSnapshot(leaf) if is_cache(leaf) else leaf for leaf in leaves)
            self.calls.append((path, SegmentCall((module,), (noted,), (spec,), _autocast(leaves)), self._open[-1]))

        return enter

    def _leave(self, result: Any) -> None:
        self._open.pop()
        self._result = result[0] if isinstance(result, tuple) and result else result

    def _ran(self, op: Op, arguments: Any, result: Any) -> None:
        if self._open:
            self._open[-1].append(op)


def segments(units: Units, model: nn.Module) -> list[str]:
    """The modules to plan: the outermost layers, else the largest modules with few products."""
    layers = [unit.path for unit in units.layers]
    if layers:
        return [path for path in layers if not any(inside(path, other) and path != other for other in layers)]
    products = {unit.path for unit in units.by_role("product")} or {
        path for path, module in model.named_modules() if any(p.ndim > 1 for p in module.parameters(recurse=False))
    }
    callable_ = set(units.modules)

    def split(path: str, module: nn.Module) -> Iterator[str]:
        held = sum(inside(product, path) for product in products)
        children = [(f"{path}.{name}".lstrip("."), child) for name, child in module.named_children()]
        if held == 0:
            return
        if path and path in callable_ and held <= PRODUCTS:
            yield path
            return
        for below, child in children:
            yield from split(below, child)

    seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    found: list[str] = []
    for path in split("", model):
        module = model.get_submodule(path)
        if module not in seen:
            seen.add(module)
            found.append(path)
    return found


# --- several layers under one region ---

TOGETHER = 2
LARGEST = 8
KEEPS = ((), (ATTENTION,), (ATTENTION, DOWN))


@dataclass(frozen=True)
class LayerGroup:
    """Layers to recompute together.

    Attributes:
        call: How they are called.
        paths: Where they are.
        choice: The region, its paths those of the trial.
    """

    call: SegmentCall
    paths: tuple[str, ...]
    choice: Choice

    @property
    def span(self) -> int:
        """How many there are."""
        return len(self.paths)


def groups(captured: CapturedCall, start: int, kinds: Sequence[str]) -> Iterator[LayerGroup]:
    """The groups of one kind that are worth a trial.

    Args:
        captured: The segments.
        start: The first of that kind.
        kinds: What kinds of calls it makes, such as "attention".
    """
    runs = _runs(captured, captured.kinds[start])
    if not runs:
        return
    start, longest = max(runs, key=lambda run: run[1])
    keeps = [keep for keep in KEEPS if all(kind in kinds for kind in keep)]
    span = TOGETHER
    while span <= min(longest, LARGEST) and (span == TOGETHER or span * span <= 2 * longest):
        calls = captured.calls[start : start + span]
        call = SegmentCall(
            tuple(call.modules[0] for call in calls),
            tuple(call.leaves[0] for call in calls),
            tuple(call.specs[0] for call in calls),
            calls[0].autocast,
        )
        inside = tuple(map(str, range(span)))
        for keep in keeps:
            kept = tuple(Target.of(calls=kind) for kind in keep)
            kept = tuple(Target.of(calls=kind) for kind in keep)
            for nested in (False, True) if span == TOGETHER else (True,):
                yield LayerGroup(
                    call,
                    tuple(captured.paths[start : start + span]),
                    Choice(inside, kept, nested=nested),
                )
        span *= 2


def _runs(captured: CapturedCall, kind: int) -> list[tuple[int, int]]:
    """Where segments of a kind take one another's results, and how many of them.

    A run of equal segments is one for the solvers, so where one of them takes something else there is no group at all.
    """
    runs: list[tuple[int, int]] = []
    for index, (other, chained) in enumerate(zip(captured.kinds, captured.chained, strict=True)):
        if other != kind:
            continue
        if runs and sum(runs[-1]) == index and not chained:
            return []
        if runs and sum(runs[-1]) == index:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((index, 1))
    return [run for run in runs if run[1] > 1]
