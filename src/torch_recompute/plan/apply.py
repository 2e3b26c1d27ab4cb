"""Putting a plan into a model, and taking it out again.

`apply` is the only function of the library that changes a model. It gives the instances that a plan names a `forward`
of their own, an object that can be pickled and deep-copied, and changes nothing else: no module path, no `state_dict`
key, no class, no hook. Hooks registered on a module stay outside of its region, so they run once.

A region over several modules that the model calls one after the other (`uniform` with more than one layer) is a chain:
each is a region of its own, and hands its result over to the next, which then holds no input but rebuilds it
(`_discard.py`). The model's own loop is left as it is, whatever it passes to each of them; only the first one's input
is kept, and no layer runs more than once in forward and once in backward.

A model that has a checkpointing switch of its own gets, besides the regions, a switch that keeps the plan
(`switch.py`), and regions that can be given a cache (`caches.py`). From the inside out a module's `forward` is then:
its own, `Inside`, the region; on a whole model, `Root` is outermost.

Rejected: wrapper modules, which change paths under everybody's feet (`_checkpoint_wrapped_module.`); patching classes;
flags on modules. Each call finds its own state, so a module may have any number of live calls.
"""

from __future__ import annotations

import difflib
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from .. import _compat, errors
from .._discard import Discard
from .._frame import Frame, Options
from .._tree import copied
from ..region import no_recompute, recompute
from ..stores import OnHost, Store
from ..values import thread
from .anatomy import inside
from .caches import Inside, Root
from .calls import Carry, Compare, enter_keeping
from .named import Listed, module_of, name_in
from .observe import Figures
from .placed import Placed, described
from .plan import Choice, Plan, kind_in
from .report import Report, Row
from .switch import Switch, roots

_FREED = ("FULL_SHARD", "HYBRID_SHARD")


class Region(Placed):
    """A module that is recomputed.

    Attributes:
        store: Where its inputs lie; None for where they are.
        resting: Whether it is a plain call for now, because the model's own checkpointing switch was turned off.
        figures: What it frees and costs.
    """

    def __init__(self, module: nn.Module, path: str, choice: Choice, store: Store | None) -> None:
        super().__init__(module, path)
        self.store = store
        self._kinds = tuple(word for word in choice.keep if word.startswith("@"))
        self._carry = choice.carry
        self.resting = False
        self.figures = Figures()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module as a region."""
        if self.out or self.resting:
            return self.plain(*args, **kwargs)
        name = self.path or type(self.module).__name__
        return recompute(self.body, name=name, inputs=self.store)(*args, **kwargs)

    def body(self, *args: Any, **kwargs: Any) -> Any:
        """What is run in forward and again in a replay."""
        return self.run(self.plain, args, kwargs)

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function as the region does, in forward and in a replay."""
        run = thread.run
        with ExitStack() as stack:
            compare = not self._carry and run is not None and self.figures.compares(run)
            if isinstance(run, Frame):
                self.figures.forward(run)
            elif run is not None:
                stack.enter_context(self.figures.replay())
            enter_keeping(stack, self._kinds)
            if self._carry:
                stack.enter_context(Carry())
            elif compare:
                stack.enter_context(Compare(self.figures.decided))
            return fn(*args, **kwargs)


class NamedCalls(Region):
    """Calls of one name, made while a module runs, that are recomputed.

    Each is a region of its own, or a part of the region that it is made in, which runs it again anyway.
    """

    def __init__(self, module: nn.Module, path: str, choice: Choice, store: Store | None) -> None:
        super().__init__(module, path, choice, store)
        self._name = name_in(path)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module, and decides about calls in it."""
        if self.out or self.resting:
            return self.plain(*args, **kwargs)
        around = thread.names
        thread.names = Listed(self._name, self.region, around)
        try:
            return self.plain(*args, **kwargs)
        finally:
            thread.names = around

    def region(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """What is called in the place of a call with the name."""
        if thread.run is not None:
            return fn

        def body(*args: Any, **kwargs: Any) -> Any:
            return self.run(fn, args, kwargs)

        return recompute(body, name=self.path, inputs=self.store)


class Saved(Placed):
    """A module whose call is not repeated when a region around it is.

    The model gets a copy of the result, because models change results in place (`mlp_output += attention_output`), and
    what is handed out again by the replay must be what was returned.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module as a saved call."""
        if self.out or thread.run is None or torch.compiler.is_compiling():
            return self.plain(*args, **kwargs)
        result = no_recompute(self.plain, name=self.path)(*args, **kwargs)
        leaves, spec = _compat.tree_flatten(result)
        return _compat.tree_unflatten([copied(x) if isinstance(x, torch.Tensor) else x for x in leaves], spec)


class Scope(Placed):
    """A module in which the calls of some kinds are saved when a region around it runs."""

    def __init__(self, module: nn.Module, path: str, kinds: Iterable[str]) -> None:
        super().__init__(module, path)
        self._kinds = tuple(kinds)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module with these calls saved."""
        if self.out or thread.run is None or torch.compiler.is_compiling():
            return self.plain(*args, **kwargs)
        with ExitStack() as stack:
            enter_keeping(stack, self._kinds)
            return self.plain(*args, **kwargs)


class Chain:
    """Modules recomputed together, and the calls of them that run on this thread.

    Attributes:
        modules: The modules, in the order of their calls.
    """

    def __init__(self, modules: Sequence[nn.Module], model: nn.Module | None = None) -> None:
        self.modules = list(modules)
        # Weak, and not in a copy: whoever copies one layer must not get the whole model with it.
        self._model = None if model is None else weakref.ref(model)
        self._local = threading.local()

    def __getstate__(self) -> Any:
        return self.modules  # a copy of the model has calls of its own

    def __setstate__(self, modules: list[nn.Module]) -> None:
        self.__init__(modules)

    def check(self) -> None:
        """Raises if the modules are sharded apart: one is replayed in the other's backward, without its parameters."""
        asked = (getattr(module, "_get_fsdp_state", None) for module in self.modules)
        states: list[Any] = [ask() for ask in asked if ask is not None]
        if any(state is not states[0] for state in states):
            raise errors.ArgumentError(errors.sharded_apart(len(self.modules)))
        model = None if self._model is None else self._model()
        if model is not None:
            around = [_wrapper_around(model, module) for module in self.modules]
            if any(wrapper is not around[0] for wrapper in around):
                raise errors.ArgumentError(errors.wrapped_apart(len(self.modules)))
            self._model = None  # a wrapper is found by looking for it, and stays: once is enough

    @property
    def waiting(self) -> Discard | None:
        """The call whose result the next member is about to take."""
        return getattr(self._local, "call", None)

    @waiting.setter
    def waiting(self, call: Discard | None) -> None:
        self._local.call = call


def _wrapper_around(model: nn.Module, module: nn.Module) -> nn.Module | None:
    """The innermost FullyShardedDataParallel around a module that frees its parameters between forward and backward.

    That of the first generation is a module of its own, and the module inside knows nothing of it.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return None
    found: nn.Module | None = None
    for outer in model.modules():
        strategy: Any = outer.sharding_strategy if isinstance(outer, fsdp.FullyShardedDataParallel) else None
        if strategy is not None and strategy.name in _FREED:
            inside = outer is not module and any(inner is module for inner in outer.modules())
            found = outer if inside else found  # `modules()` names the outer ones first
    return found


class Member(Region):
    """One of several modules that are recomputed together. Only the first one's inputs are kept, and need a store."""

    def __init__(self, module: nn.Module, path: str, choice: Choice, store: Store | None, chain: Chain) -> None:
        self._first, self._last = path == choice.paths[0], path == choice.paths[-1]
        super().__init__(module, path, choice, store if self._first else None)
        self._chain = chain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module as a region whose result the next member rebuilds."""
        if self.out or self.resting or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)
        if self._first:
            self._chain.check()
        before, self._chain.waiting = None if self._first else self._chain.waiting, None
        if self._last:
            result = super().__call__(*args, **kwargs)
        else:
            call = Discard(Options(self.path, self.store), self.body, args, kwargs)
            result = call.result
            self._chain.waiting = call
        if before is not None:
            before.hand_over()
        return result


class Applied:
    """A plan in a model.

    Attributes:
        model: The model.
        plan: The plan.
    """

    def __init__(self, model: nn.Module, plan: Plan, placed: list[Placed | Switch]) -> None:
        self.model = model
        self.plan = plan
        self._placed = placed

    def remove(self) -> None:
        """Gives the model everything back that it had; calling it again does nothing."""
        for placed in reversed(self._placed):
            placed.take_out()
        self._placed = []

    def report(self) -> Report:
        """What each region frees and what its replays cost, measured since `apply` or the last report.

        Bytes and FLOPs are those of the first step since, seconds the mean of the replays after the first. Taking a
        report starts the measurement again.
        """
        rows: list[Row] = []
        for choice in self.plan:
            regions = [p for p in self._placed if isinstance(p, Region) and p.path in choice.paths]
            figures = [region.figures for region in regions]
            known = [f for f in figures if f.saved_bytes is not None]
            seconds = [f.seconds for f in figures]
            rows.append(
                Row(
                    choice,
                    tuple(type(region.module).__name__ for region in regions),
                    sum(f.saved_bytes or 0 for f in known) if known else None,
                    sum(f.flops or 0 for f in figures),
                    sum(s for s in seconds if s is not None) if None not in seconds else None,
                    sum(f.replays for f in figures),
                    sum(f.flips for f in figures),
                    sum(f.decisions for f in figures),
                )
            )
            for f in figures:
                f.start_again()
        return Report(tuple(rows))

    def __repr__(self) -> str:
        state = f"{len(self.plan)} regions" if self._placed or not len(self.plan) else "removed"
        return f"<plan applied to {type(self.model).__name__}: {state}>"


def apply(model: nn.Module, plan: Plan, *, stores: Mapping[str, Store] | None = None) -> Applied:
    """Makes the regions and saved calls of a plan in a model, in place.

        handle = apply(model, RecomputeConfig(recompute_granularity="full", ...).plan(model))
        ...
        handle.remove()

    Apply it before `torch.compile`, `fully_shard` and a trainer. Parameters, buffers, paths, `state_dict`, hooks,
    copies and pickles of the model are as before. A checkpointing switch that the model has of its own
    (`gradient_checkpointing_enable` and the like) turns the plan's regions on and off while the plan is there.

    Args:
        model: The model, or the part of it that is on this rank.
        plan: Paths in it are those of `model.named_modules()`.
        stores: The store for each word that the plan's choices name. "host" is an `OnHost()` unless it is given here.

    Returns:
        A handle; its `remove()` undoes it.

    Raises:
        ArgumentError: The model has no module of such a path, or has a plan already, or one module lies under two of
            the paths, or is checkpointed by a wrapper; the plan was made for
            another model; the plan names a store that is not given, or one is given that
            it does not name.
    """
    if not isinstance(model, nn.Module) or not isinstance(plan, Plan):
        raise errors.ArgumentError(errors.not_applicable(model, plan))
    modules = dict(model.named_modules(remove_duplicate=False))
    already = next(
        (path for path, module in modules.items() if isinstance(module.__dict__.get("forward"), Placed)), None
    )
    if already is not None:
        raise errors.ArgumentError(errors.applied_twice(type(model).__name__, already))
    for path, said in plan.modules:
        found = described(modules[path]) if path in modules else "nothing"
        if found != said:
            raise errors.ArgumentError(errors.other_model(path, said, found))
    by_word = _stores(plan, stores or {})
    placed: list[Placed] = []
    wanted: dict[tuple[int, str], str] = {}

    def find(path: str) -> nn.Module:
        if path not in modules:
            near = difflib.get_close_matches(path, modules, n=3)
            raise errors.ArgumentError(errors.no_such_module(type(model).__name__, path, near))
        return modules[path]

    for choice in plan:
        chain = Chain([find(module_of(path)) for path in choice.paths], model)
        for path, module in zip(choice.paths, chain.modules, strict=True):
            key = id(module), name_in(path)
            if wanted.setdefault(key, path) != path:
                raise errors.ArgumentError(errors.one_module_twice(path, wanted[key]))
            store = by_word[choice.store]
            if len(choice.paths) > 1:
                placed.append(Member(module, path, choice, store, chain))
            else:
                placed.append((NamedCalls if name_in(path) else Region)(module, path, choice, store))
    kept: dict[tuple[int, str], Placed] = {}
    for choice in plan:
        for word in choice.keep:
            kind = kind_in(word)
            path = f"{choice.paths[0]}.{word.removesuffix(kind)}".strip(".")
            if word != kind:
                module = find(path)
                kept.setdefault((id(module), kind), Scope(module, path, [kind]) if kind else Saved(module, path))
    placed.extend(kept.values())
    regions = [one for one in placed if isinstance(one, Region)]
    for path in (path for path, module in modules.items() if type(module).__name__ == "CheckpointWrapper"):
        if any(inside(path, module_of(one.path)) or inside(module_of(one.path), path) for one in regions):
            raise errors.ArgumentError(errors.other_checkpointing_inside(path))
    tops = list(roots(model))
    inner = [Inside(one.module, one.path) for one in regions if tops and one.module not in tops]
    outer = [Root(top, "") for top in tops]
    everything: list[Placed | Switch] = [*inner, *placed, *outer, Switch(model, regions)]
    for one in everything:
        one.put()
    return Applied(model, plan, everything)


def _stores(plan: Plan, given: Mapping[str, Store]) -> dict[str, Store | None]:
    """The store for each word of the plan; None where inputs stay where they are."""
    found: dict[str, Store | None] = {"": None}
    wanted = dict.fromkeys(choice.store for choice in plan if choice.store)
    for word, store in given.items():
        if word not in wanted:
            raise errors.ArgumentError(errors.store_unused(word, list(wanted)))
        if not (hasattr(store, "put") and hasattr(store, "get")):
            raise errors.ArgumentError(errors.not_a_store(f"stores[{word!r}]", store))
    for word in wanted:
        if word not in given and word != "host":
            raise errors.ArgumentError(errors.store_missing(word))
        found[word] = given[word] if word in given else OnHost()
    return found
