"""Simulated steps with a plan and without; what each region drops, how much of that stays alive, what it runs again.

A region drops every reference it has, but what it drops may be held by others: the consumer of a fused attention saves
its output. So it is counted on the fake tensors of one simulated step. The engine says what each region drops
(`observer.py`); when the loss is there, the graph is walked (`memory/retainers.py`), and memory that was dropped and is
held by something else is *pinned*, memory that a region holds and nothing else does is *held*. The region frees dropped
- pinned - held, and that is, to the byte, how much less the step keeps with it. Regions inside others are counted with
the outermost; operations and their FLOPs by the region they run in, forward and replay apart.

The layers of a stack that are alike are one account, with `*` for the numbers in their names; the few that differ have
their own.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from .. import _torch
from .._text import grouped, starred_path
from .._torch.checkpoints import checkpoints_run_by
from ..compat.torch_utils import checkpoint
from ..engine.region_call import RegionCall
from ..memory.free import free_bytes
from ..memory.ledger import CountedOnce
from ..memory.loop import Loop
from ..memory.operations import Operation
from ..memory.retainers import Retainers
from ..observer import Observer, observing, running
from ..plan.apply import apply
from ..plan.budget import Limit
from ..plan.plan import Plan
from ..plan.solve import bytes_meant
from ..planner.hosts import stores_for
from ..planner.ops import op_of
from ..planner.planner import Loss, MakeOptimizer, Planner
from ..planner.prices import flops_of, where
from ..simulation import Simulation, simulate_step
from ..simulation.step import loss_of
from ..values import thread


@dataclass
class Account:
    """The regions of one name, or of several that are alike, with all their calls in one step.

    The name has `*` for its numbers where most of such a name are alike; fewer are each named.

    The bytes are 0 for regions inside others: what those drop is counted with the outermost.
    """

    name: str
    paths: list[str] = field(default_factory=list)  # the names themselves, in order of their calls
    calls: int = 0  # in forward
    inside: str = ""  # the name of the region that they are called in
    dropped_bytes: int = 0  # saved by autograd in them and not kept
    pinned_bytes: int = 0  # of these, held by something else
    pinned_by: list[str] = field(default_factory=list)  # nodes of the graph, as `MmBackward0 (self)`, and other regions
    held_bytes: int = 0  # kept by them, inputs mostly, and by nothing else
    forward_ops: int = 0
    replay_ops: int = 0  # also in replays of regions around them
    forward_flops: float = 0  # of products and attention
    replay_flops: float = 0
    attention_flops: float = 0  # of fused attention, in `forward_flops`
    attention_bytes: int = 0  # of its results
    attention_replays: float = 0  # FLOPs of fused attention, in `replay_flops`
    stashed_bytes: int = 0  # made in them and put on the `ctx` of a `Function`, where no region sees it
    stashed_by: list[str] = field(default_factory=list[str])  # as `ctx.y of FnBackward`
    tiled: bool = False  # they are tiles of something wider: run again so that it exists in parts

    @property
    def where(self) -> str:
        """The one region that there is of this name, with its number, or the name of several."""
        return self.paths[0] if len(set(self.paths)) == 1 else self.name

    @property
    def freed_bytes(self) -> int:
        """What the step keeps less for them; below 0 where it keeps more."""
        return self.dropped_bytes - self.pinned_bytes - self.held_bytes

    @property
    def look(self) -> tuple[Any, ...]:
        """What it has to have in common with another one to be told with it."""
        freed, pinned = self.freed_bytes, 2 * self.pinned_bytes >= self.dropped_bytes
        bytes_of_it = self.dropped_bytes > 0, freed > 0, freed < 0, pinned, self.stashed_bytes > 0
        return (*bytes_of_it, self.inside, self.replay_ops > self.forward_ops, self.attention_flops > 0, self.tiled)


def merged(accounts: Iterable[Account], look: Callable[[Account], Any]) -> list[Account]:
    """The accounts whose names are the same but for numbers, and that look alike, as one."""
    groups = grouped(accounts, lambda one: (starred_path(one.name), look(one)))
    names = Counter(name for (name, _), of in groups.items() for _ in of)
    found: list[Account] = []
    for (name, _), of in groups.items():
        total = Account(name if 2 * len(of) > names[name] else ", ".join(one.name for one in of))
        for each in fields(Account):
            values = [getattr(one, each.name) for one in of]
            if isinstance(values[0], list):
                setattr(total, each.name, list(dict.fromkeys(value for one in values for value in one)))
            elif each.name != "name":
                setattr(total, each.name, values[0] if isinstance(values[0], (str, bool)) else sum(values))
        found.append(total)
    return found


class Accounts(Observer):
    """The accounts of regions in one simulated step, by the name of each; FLOPs of products and attention by phase."""

    def __init__(self) -> None:
        self.by_name: dict[str, Account] = {}
        self.flops: dict[str, float] = dict.fromkeys(("forward", "replay", "backward"), 0.0)
        self._tops: weakref.WeakKeyDictionary[RegionCall, _Outermost] = weakref.WeakKeyDictionary()
        self._outermost: list[_Outermost] = []
        self._around: dict[str, str] = {}
        self._made: dict[int, weakref.ref[Any]] = {}
        self._inside: dict[int, str] = {}  # what forwards of regions made: the region's name

    def operation(self, _: str, ran: Operation) -> None:
        """Called with each operation of the step."""
        run, op, func = thread.run, op_of(ran), ran.func
        flops = 0 if op is None else flops_of(op)
        new = {id(storage): weakref.ref(storage) for _, storage in ran.made}
        self._made.update(new)
        for key in new:
            self._inside.pop(key, None)  # of one that is gone
        if run is None:
            self.flops["backward" if _torch.in_backward() else "forward"] += flops
            return
        account, work = self._account(run.name), int(str(func) != "aten.detach.default")  # the engine's own
        fused = any(name in str(func) for name in ("scaled_dot_product", "flash_attention", "flex_attention"))
        if run.replaying:
            self.flops["replay"] += flops
            account.replay_flops += flops
            account.replay_ops += work
            account.attention_replays += flops if fused else 0
            return
        self.flops["forward"] += flops
        if isinstance(run, RegionCall) and run not in self._tops:
            self._enter([at.run for at in running() if at.kind == "forward"])
        self._inside.update({id(storage): run.name for _, storage in ran.made})
        account.forward_ops += work
        account.forward_flops += flops
        if fused:
            account.attention_flops += flops
            account.attention_bytes += sum(int(storage.nbytes()) for _, storage in ran.made)

    def dropped(self, region_call: Any, tensor: torch.Tensor) -> None:
        """Counts the memory of a tensor that a region drops, once, with the outermost region around it."""
        top = self._tops.get(region_call)
        if top is not None:
            top.account.dropped_bytes += top.dropped.add(tensor)

    def close(self, value: object) -> None:
        """Called when the loss is there, with it: counts who holds what."""
        retainers = Retainers()
        retainers.start(value)
        retainers.walk()
        for one in self._outermost:
            account = one.account
            for key, nbytes in one.dropped.alive():
                hold = retainers.of.get(key)
                if hold is None:
                    continue
                others = [name for name in map(self._top, hold.regions) if name != one.name]
                if hold.plain or others:
                    account.pinned_bytes += nbytes
                    account.pinned_by += hold.savers if hold.plain else [f"the region {starred_path(others[0])}"]
            account.pinned_by = list(dict.fromkeys(account.pinned_by))
        for key, hold in retainers.of.items():
            ref = self._made.get(key)
            storage = None if ref is None else ref()
            if storage is not None and hold.regions and not hold.plain and not hold.in_region:
                self._account(self._top(hold.regions[0])).held_bytes += int(storage.nbytes())
            if storage is not None and hold.stashes and key in self._inside and not (hold.regions or hold.plain):
                account = self._account(self._top(self._inside[key]))
                account.stashed_bytes += int(storage.nbytes())
                account.stashed_by = list(dict.fromkeys([*account.stashed_by, *hold.stashes]))
        self._outermost.clear()
        self._made.clear()
        self._inside.clear()

    def _account(self, name: str) -> Account:
        return self.by_name.setdefault(name, Account(name))

    def _top(self, held_by: str) -> str:
        """The outermost region around the one of a name, or around a saved call in it, as `layer 3 / attention`."""
        name = held_by.partition(" / ")[0]
        return self._around.get(name, name)

    def _enter(self, frames: list[RegionCall]) -> None:
        """Notes the calls of regions that run now, the outermost first, at the first operation in the innermost."""
        top = None
        for around, frame in zip([None, *frames], frames, strict=False):
            account = self._account(frame.name)
            top = self._tops.get(frame, top)
            if top is None:
                top = _Outermost(frame.name, account)
                self._outermost.append(top)
            elif around is not None:
                account.inside = starred_path(around.name)
                self._around[frame.name] = top.name
            if frame not in self._tops:
                self._tops[frame] = top
                account.calls += 1
                account.tiled = frame.options.tile
                account.paths.append(frame.name)


@dataclass
class _Outermost:
    """One call of a region that is in no other, and the memory that it, or a region in it, drops."""

    name: str
    account: Account
    dropped: CountedOnce = field(default_factory=CountedOnce)


class SimulatedSteps:
    """Steps of a model on fake tensors, and the planner, made when they are asked for; `run` makes the first.

    Attributes:
        step: The step as it is to be: with the plan, and with the regions in the model's own code.
        plain: The step without the plan.
        regions: What each region of `step` drops and runs again; torch's checkpoints are counted as regions.
        foreign: How many calls of torch's checkpoint there were.
    """

    step: Simulation
    plain: Simulation

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        plan: Plan | None,
        loop: Loop,
        loss: Loss = None,
        optimizer: MakeOptimizer = None,
        device: torch.device | str | None = None,
    ) -> None:
        self._call, self._plan, self._loop = (model, args, kwargs), plan or Plan(), loop
        self._loss: Callable[[Any], torch.Tensor] = loss or loss_of
        self._optimizer, self._device = optimizer, device
        self.regions = Accounts()
        self.foreign = 0
        self._paths: dict[int, str] = {}

    def run(self) -> None:
        """Simulates the step with the plan and the one without."""

        def closing(output: Any) -> torch.Tensor:
            value = self._loss(output)
            self.regions.close(value)
            return value

        def counting(original: Callable[..., Any], function: Any = None, *args: Any, **options: Any) -> Any:
            self.foreign += 1
            return as_region(original, self._called_by_path(function), *args, **options)

        closing.__name__ = getattr(self._loss, "__name__", type(self._loss).__name__)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a real step says the same, and means it
            self.plain = self.planned(Plan())
            alone = replace(self._loop, accumulate=1, set_to_none=True)  # regions are counted in a step of one forward
            with observing(self.regions), checkpoints_run_by(counting):
                self.step = self.planned(self._plan, loop=alone, loss=closing, watch=self.regions.operation)
            if self._loop.keeps_gradients or self.foreign:
                self.step = self.planned(self._plan)

    def _called_by_path(self, function: Any) -> Any:
        """A module of the copy as a function of the name of its path; anything else as it is."""
        path = self._paths.get(id(function)) if isinstance(function, nn.Module) else None
        if not path:
            return function

        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        call.__qualname__ = path
        return call

    @cached_property
    def accounts(self) -> list[Account]:
        """The accounts of the regions that were called, those that are alike as one."""
        return merged((account for account in self.regions.by_name.values() if account.calls), lambda one: one.look)

    @property
    def outermost(self) -> list[Account]:
        """The accounts of regions that are in no other; all that is dropped is counted with these."""
        return [account for account in self.accounts if not account.inside]

    @property
    def gradient_bytes(self) -> int:
        """The bytes of the gradients of all trainable parameters."""
        return sum(p.numel() * p.element_size() for p in self._call[0].parameters() if p.requires_grad)

    def planned(self, plan: Plan, *, loop: Loop | None = None, loss: Any = None, watch: Any = None) -> Simulation:
        """The step with another plan."""
        stores = stores_for(plan, self._call[0], self._device)

        def prepare(copy: nn.Module) -> None:
            self._paths = {id(module): path for path, module in copy.named_modules()}
            if plan.all_choices:
                apply(copy, plan, stores=stores)

        how: dict[str, Any] = {"optimizer": self._optimizer, "loop": loop or self._loop}
        how.update(where(self._device, self._call[0]).step)
        return simulate_step(*self._call, prepare=prepare, watch=watch, loss=loss or self._loss, **how)

    def released(self) -> Simulation:
        """The step in a loop that holds no output."""
        return self.planned(self._plan, loop=replace(self._loop, hold_output=False))

    def without(self, name: str) -> Simulation:
        """The step in which the regions of a name, numbers as `*`, are plain calls."""
        with without_recomputation(regions=name):
            return self.planned(self._plan)

    @cached_property
    def _planner(self) -> Planner:
        how: dict[str, Any] = {"loss": self._loss, "optimizer": self._optimizer, "device": self._device}
        return Planner(*self._call, loop=self._loop, **how)

    def best(self, budget: int) -> Plan:
        """The plan that the planner makes for a number of bytes."""
        return self._planner.plan(budget)

    def best_without(self, budget: int) -> Plan:
        """The same, for the model without the regions and checkpoints in its code."""
        with without_recomputation(regions="*"):
            how: dict[str, Any] = {"loss": self._loss, "optimizer": self._optimizer, "device": self._device}
            return Planner(*self._call, loop=self._loop, **how).plan(budget)

    def bytes_meant(self, budget: int | float | str, *, simulated: bool) -> Limit:
        """What a budget comes to."""
        plain, free, model = 0, None, self._call[0]
        if simulated:
            plain = self.plain.peak_bytes
            free = partial(free_bytes, model, self.step.device, self._optimizer, self._call[1:])
        return bytes_meant(budget, lambda: self._planner.floor, plain, free)


# --- recomputation of others, and none --------------------------------------------------------------------------------


@contextlib.contextmanager
def without_recomputation(*, regions: str = "") -> Generator[None]:
    """Torch's checkpoints, or the regions of a name ("*": both), are plain calls for the time being."""

    def plain(original: Callable[..., Any], function: Any = None, *args: Any, **options: Any) -> Any:
        if function is None:  # a decorator, which calls this again
            return original(*args, **options)
        return function(*args, **{name: value for name, value in options.items() if name not in _OPTIONS})

    def run(self: RegionCall, fn: Callable[..., Any], args: Any, kwargs: Any, outer: Any) -> Any:
        if regions == "*" or not {self.name, starred_path(self.name)}.isdisjoint(regions.split(", ")):
            return fn(*args, **kwargs)
        return before(self, fn, args, kwargs, outer)

    before = RegionCall.forward
    try:
        if regions:
            RegionCall.forward = run
        with checkpoints_run_by(plain) if regions in ("", "*") else contextlib.nullcontext():
            yield
    finally:
        RegionCall.forward = before


def as_region(_: Callable[..., Any], *args: Any, use_reentrant: bool | None = None, **options: Any) -> Any:
    """Torch's checkpoint as a region, which can be audited."""
    return checkpoint(*args, **options)


_OPTIONS = frozenset(inspect.signature(checkpoint).parameters)
