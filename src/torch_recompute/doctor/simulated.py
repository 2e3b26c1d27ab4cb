"""Simulates steps with a plan and without, and counts what each region drops, frees and runs again.

A region drops every reference it has, but others may hold the same memory: the consumer of a fused attention saves its
output. So memory is counted on the fake tensors of one simulated step. The engine reports each tensor that a region
drops (`state/observer.py`). When the loss is there, the graph is walked (`memory/retainers.py`): memory that was
dropped and is held by something else is *pinned*, memory that a region holds and nothing else does is *held*. The
region frees dropped - pinned - held, and that is, to the byte, how much less the step keeps with it. Regions inside
others are counted with the outermost; operations and their FLOPs by the region they run in, forward and replay apart.

Checkpoints of other libraries are counted as regions. Torch's are known by their function. One that is written by hand
is an autograd Function whose forward's operations its backward runs again, with gradients, as the first simulated step
shows; its forward is then run as a region, without the `torch.no_grad()` in it.

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
from types import FunctionType
from typing import Any

import torch
from torch import nn

from .. import _torch
from .._torch.checkpoints import checkpoints_run_by, forward_with_grad, functions_run_by
from .._torch.graphs import function_of
from ..compat.torch_utils import checkpoint
from ..engine.region_call import Recording, RegionCall
from ..errors.text import grouped, starred_path
from ..memory.budget import Limit, bytes_meant
from ..memory.ledger import CountedOnce
from ..memory.loop import Loop
from ..memory.operations import Operation
from ..memory.retainers import Retainers
from ..plan.apply import apply
from ..plan.plan import Plan
from ..planner.hosts import stores_for
from ..planner.ops import op_of
from ..planner.planner import Planner
from ..simulation import Simulation, simulate_step, with_carried_state
from ..simulation.training_step import TrainingStep, loss_of
from ..state.observer import Observer, observing, running
from ..state.tape import thread
from ..state.values import name_of

AGAIN = 0.9  # share of a forward's operations that a checkpoint's backward runs: a last one may be left out


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
        """The name to print: with its number for a single region, with `*` for several."""
        return self.paths[0] if len(set(self.paths)) == 1 else self.name

    @property
    def freed_bytes(self) -> int:
        """The bytes that the step saves with these regions; below 0 where it keeps more."""
        return self.dropped_bytes - self.pinned_bytes - self.held_bytes

    @property
    def signature(self) -> tuple[Any, ...]:
        """The properties that accounts must share to be merged into one."""
        freed, pinned = self.freed_bytes, 2 * self.pinned_bytes >= self.dropped_bytes
        bytes_of_it = self.dropped_bytes > 0, freed > 0, freed < 0, pinned, self.stashed_bytes > 0
        return (*bytes_of_it, self.inside, self.replay_ops > self.forward_ops, self.attention_flops > 0, self.tiled)


def merged(accounts: Iterable[Account], signature: Callable[[Account], Any]) -> list[Account]:
    """Merges accounts whose names are the same but for numbers, and whose signatures are the same."""
    groups = grouped(accounts, lambda one: (starred_path(one.name), signature(one)))
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
        """Counts an operation of the step."""
        run, op, func = thread.run, op_of(ran), ran.func
        flops = 0 if op is None else op.all_flops
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
        if isinstance(run, Recording) and run.region_call not in self._tops:
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
        """Counts which nodes and regions hold what, when the loss is there."""
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
        """Returns the outermost region around one, or around a saved call in it, named as `layer 3 / attention`."""
        name = held_by.partition(" / ")[0]
        return self._around.get(name, name)

    def _enter(self, calls: list[RegionCall]) -> None:
        """Records the calls of regions that run now, the outermost first, at the first operation in the innermost."""
        top = None
        for around, call in zip([None, *calls], calls, strict=False):
            account = self._account(call.name)
            top = self._tops.get(call, top)
            if top is None:
                top = _Outermost(call.name, account)
                self._outermost.append(top)
            elif around is not None:
                account.inside = starred_path(around.name)
                self._around[call.name] = top.name
            if call not in self._tops:
                self._tops[call] = top
                account.calls += 1
                account.tiled = call.options.tile
                account.paths.append(call.name)


class Repeats:
    """Finds the autograd Functions that are checkpoints: their backward runs the operations of their forward again."""

    def __init__(self) -> None:
        self._first: dict[type, Counter[str]] = {}
        self._again: dict[type, Counter[str]] = {}
        self._running: list[type] = []

    def call(self, apply: Callable[..., Any], kind: type, *args: Any, **kwargs: Any) -> Any:
        """Calls a Function, whose class is `kind`."""
        self._running.append(kind)
        try:
            return apply(*args, **kwargs)
        finally:
            self._running.pop()

    def operation(self, _: str, ran: Operation) -> None:
        """Counts an operation of the step."""
        name = str(ran.func)
        if thread.run is not None or name == "aten.detach.default":
            return
        if not _torch.in_backward():
            for kind in self._running:
                self._first.setdefault(kind, Counter())[name] += 1
        elif torch.is_grad_enabled() or self._running:
            kind = function_of(_torch.current_node())
            if kind is not None:
                self._again.setdefault(kind, Counter())[name] += 1

    def has(self, kind: type) -> bool:
        """Returns whether a Function is a checkpoint."""
        first, again = self._first.get(kind, Counter()), self._again.get(kind, Counter())
        return 0 < first.total() * AGAIN <= (first & again).total()


@dataclass
class _Outermost:
    """One call of a region that is in no other, and the memory that it, or a region in it, drops."""

    name: str
    account: Account
    dropped: CountedOnce = field(default_factory=CountedOnce)


class SimulatedSteps:
    """Simulated steps of a model, and plans for it, made when they are first needed; `run` makes the first two.

    Attributes:
        step: The step with the plan, and with the regions in the model's own code.
        plain: The step without the plan.
        regions: The bytes and operations of each region of `step`; checkpoints of other libraries count as regions.
        counted: The step in which that was counted, of one forward.
        foreign: The names of these checkpoints of other libraries.
    """

    step: Simulation
    plain: Simulation
    counted: Simulation

    def __init__(self, step: TrainingStep, plan: Plan | None) -> None:
        self._step, self._plan = replace(step, loss=step.loss or loss_of), plan or Plan()
        self.regions = Accounts()
        self.foreign: set[str] = set()
        self._paths: dict[int, str] = {}
        self._repeats = Repeats()

    def run(self) -> None:
        """Simulates the step with the plan and the one without."""
        loss = self._step.loss or loss_of

        def closing(output: Any) -> torch.Tensor:
            value = loss(output)
            self.regions.close(value)
            return value

        closing.__name__ = getattr(loss, "__name__", type(loss).__name__)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a real step says the same, and means it
            with functions_run_by(self._repeats.call):
                self.plain = self.planned(Plan(), watch=self._repeats.operation)
            with observing(self.regions):
                self.step = self.counted = self._as_regions(loss=closing, watch=self.regions.operation)
            later = with_carried_state(self._step, self.step)
            if later is not None:
                self._step, self.plain = later, self.planned(Plan(), loop=later.loop)
            if self._step.loop.keeps_gradients or self.foreign or later is not None:
                self.step = self.planned(self._plan)

    def _as_regions(self, **how: Any) -> Simulation:
        """Simulates the step of one forward with the plan, with checkpoints of other libraries as regions."""

        def checkpointed(original: Callable[..., Any], function: Any = None, *args: Any, **options: Any) -> Any:
            return as_region(original, self._renamed(function, self._name_of(function)), *args, **options)

        def applied(original: Callable[..., Any], kind: type, *args: Any, **options: Any) -> Any:
            if options or not self._repeats.has(kind):
                return original(*args, **options)
            functions = (one for one in args if callable(one) and not isinstance(one, (torch.Tensor, type)))
            name = self._name_of(next(functions, kind))
            return as_region(original, self._renamed(partial(forward_with_grad, kind), name), *args)

        # Regions are counted in a step of one forward.
        alone = replace(self._step.loop, accumulate=1, set_to_none=True)
        with checkpoints_run_by(checkpointed), functions_run_by(applied):
            return self.planned(self._plan, loop=alone, **how)

    def _name_of(self, function: Any) -> str:
        """Returns the path of the module that a function is, or is a method of; else the function's own name."""
        module = getattr(function, "__self__", function)
        path = self._paths.get(id(module)) if isinstance(module, nn.Module) else None
        return path if path and function in (module, getattr(module, "forward", None)) else name_of(function)

    def _renamed(self, function: Any, name: str) -> Any:
        """Returns a function under another name, which is added to `foreign`."""
        self.foreign.add(name)
        if isinstance(function, FunctionType) and function.__qualname__ == name:
            return function

        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        call.__qualname__ = name
        return call

    @cached_property
    def accounts(self) -> list[Account]:
        """The accounts of the regions that were called, those that are alike as one."""
        return merged(
            (account for account in self.regions.by_name.values() if account.calls), lambda one: one.signature
        )

    @property
    def outermost(self) -> list[Account]:
        """The accounts of regions that are in no other; all that is dropped is counted with these."""
        return [account for account in self.accounts if not account.inside]

    @property
    def gradient_bytes(self) -> int:
        """The bytes of the gradients of all trainable parameters."""
        return sum(p.numel() * p.element_size() for p in self._step.model.parameters() if p.requires_grad)

    def planned(self, plan: Plan, *, loop: Loop | None = None, loss: Any = None, watch: Any = None) -> Simulation:
        """Simulates the step with another plan."""
        stores = stores_for(plan, self._step)

        def prepare(copy: nn.Module) -> None:
            self._paths = {id(module): path for path, module in copy.named_modules()}
            if plan.all_choices:
                apply(copy, plan, stores=stores)

        step = replace(self._step, loop=loop or self._step.loop, loss=loss or self._step.loss)
        return simulate_step(step, prepare=prepare, watch=watch)

    def released(self) -> Simulation:
        """Simulates the step in a loop that holds no output."""
        return self.planned(self._plan, loop=replace(self._step.loop, hold_output=False))

    def without(self, name: str) -> Simulation:
        """Simulates the step with the regions of a name, numbers as `*`, as plain calls."""
        with without_recomputation(regions=name):
            return self._as_regions() if self.foreign else self.planned(self._plan)

    @cached_property
    def _planner(self) -> Planner:
        return Planner(self._step)

    def best(self, budget: int) -> Plan:
        """Returns the plan that the planner makes for a number of bytes."""
        return self._planner.plan(budget)

    def best_without(self, budget: int) -> Plan:
        """Returns the plan for the model without the regions and checkpoints in its code."""
        with without_recomputation(regions="*"):
            return Planner(self._step).plan(budget)

    def bytes_meant(self, budget: int | float | str, *, simulated: bool) -> Limit:
        """Returns the bytes that a budget means for this step."""
        plain, free = 0, None
        if simulated:
            plain = self.plain.peak_bytes
            free = self._step.free_bytes
        return bytes_meant(budget, lambda: self._planner.floor, plain, free)


# --- other libraries' checkpoints, and none ---------------------------------------------------------------------------


@contextlib.contextmanager
def without_recomputation(*, regions: str = "") -> Generator[None]:
    """Makes torch's checkpoints, or the regions of a name ("*": both), plain calls inside the block."""

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
    """Calls the function of torch's checkpoint as a region, which can be audited."""
    return checkpoint(*args, **options)


_OPTIONS = frozenset(inspect.signature(checkpoint).parameters)
