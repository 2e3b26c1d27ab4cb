"""Puts a plan into a model, and takes it out again.

`apply` is the only function of the library that changes a model. It gives the instances that a plan names a `forward`
of their own (`wrappers.py`), and changes nothing else: no module path, no `state_dict` key, no class, no hook. Hooks
registered on a module stay outside of its region, so they run once.

From the inside out a module's `forward` is then its own, `CachesFromSnapshot` (`libraries.py`), the region; on a whole
model, `NoCacheInTraining` is outside of these, and `BySize` outermost. A plan with sizes places all that any of its
sets of choices asks for; each wrapper is the plain call unless the present call goes by such a set (`sizes.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from .. import errors
from ..errors.text import close_to
from ..region import checked_pool, checked_store
from ..stores import OnHost, Store
from .choice import Choice, Target, joined
from .exhausted import planned_models
from .libraries import CachesFromSnapshot, CheckpointingSwitch, NoCacheInTraining, other_checkpointing_inside, roots
from .observe import Figures, watching
from .plan import Plan, made_elastic
from .report import Report, Row
from .roles import inside, relative
from .sizes import BySize, Sizes
from .units import find_units
from .wrappers import (
    Chain,
    ChainedRegion,
    FirstCalls,
    ForwardWrapper,
    HeadWithLoss,
    KeepCallsWithin,
    NamedCalls,
    Offloaded,
    Region,
    SavedModule,
    described,
    wrappers_on,
)

if TYPE_CHECKING:
    from ..memory.elastic import Elastic


class Applied:
    """A plan in a model.

    Attributes:
        model: The model.
        plan: The plan that is there now.
        history: All the plans that were there, the first one first; `auto` may plan again (`first_steps.py`).
        first: Looks at the first calls of the regions.
        looking: What looks at the first steps; None without.
        elastic: The memory that the plan's elastic regions share; None where no region is elastic.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        placed: list[ForwardWrapper | CheckpointingSwitch],
        first: FirstCalls,
        elastic: Elastic | None = None,
    ) -> None:
        self.model, self.elastic = model, elastic
        self.looking: ForwardWrapper | None = None
        self.history: tuple[Plan, ...] = ()
        self._figures: list[Figures] | None = None
        self._open: list[ExitStack] = []  # one for each watching
        self._has(plan, placed, first)

    def _has(self, plan: Plan, placed: list[ForwardWrapper | CheckpointingSwitch], first: FirstCalls) -> None:
        self.plan, self.first, self._placed = plan, first, placed
        self.history = (*self.history, plan)
        self._watched = [one for one in placed if isinstance(one, (Region, Offloaded))]

    def remove(self) -> None:
        """Gives everything back that the model had; does nothing the second time."""
        if self.looking is not None:
            self.looking.take_out()
            self.looking = None
        self._take_out()

    def _take_out(self) -> None:
        for placed in reversed(self._placed):
            placed.take_out()
        if self._placed:
            planned_models.pop(self.model, None)
        self._placed = []

    def _exchange(self, make: Callable[[], Plan]) -> None:
        """Puts another plan in the place of this one, which is gone while that is made, and comes back if it fails.

        Args:
            make: Makes the plan. What watches the handle goes on with the new regions.
        """
        for stack in self._open:
            stack.close()
        self._take_out()
        history, plan = self.history[:-1], self.plan
        try:
            plan = make()
            history = self.history
        finally:
            made = apply(self.model, plan, elastic=self.elastic if plan.choices else None)
            self.history = history
            self._has(made.plan, made._placed, made.first)
            self._figures = None
            for stack in self._open:
                self._figures = stack.enter_context(watching(self._watched))

    def _expect(self, simulated: Applied) -> None:
        """Tells elastic regions what the same regions took in a simulated step of some size."""
        makes = {one.name: one.makes for one in simulated._watched if isinstance(one, Region)}
        mine = (one for one in self._watched if isinstance(one, Region) and one.memory is not None)
        pairs = ((one.make(within), make) for one in mine for within, make in makes.get(one.name, {}).items())
        if self.elastic is not None:
            self.elastic.expect(pairs)

    def watch(self) -> AbstractContextManager[Applied]:
        """Takes the figures of the steps inside, for `report`.

            with handle.watch():
                train_step()
            print(handle.report())

        Bytes, FLOPs and decisions are those of the first call and replay of each region; every further replay is timed,
        so two steps have to be watched for seconds, or one with two microbatches.

        Raises:
            ArgumentError: The plan has been removed.
        """
        if not self._placed:
            raise errors.ArgumentError(
                "handle.watch() watches the regions of a plan, but this plan has been removed from "
                f"{type(self.model).__name__}.\n"
                "  Watch before handle.remove(), or apply the plan again:  handle = apply(model, handle.plan)"
            )
        return self._watch()

    @contextmanager
    def _watch(self) -> Generator[Applied]:
        with ExitStack() as stack:
            self._figures = stack.enter_context(watching(self._watched))
            self._open.append(stack)
            try:
                yield self
            finally:
                self._open.remove(stack)

    def report(self) -> Report:
        """Reports what each region drops and its replays cost, and what is offloaded, of the steps last watched."""
        figures = self._figures or [Figures() for _ in self._watched]
        rows: list[Row] = []
        for choice in self.plan.all_choices:
            mine = [number for number, one in enumerate(self._watched) if one.choice == choice]
            modules = [type(self._watched[number].module).__name__ for number in mine]
            rows.append(Row.of(choice, modules, [figures[number] for number in mine]))
        makes = [make for one in self._watched if isinstance(one, Region) for make in one.makes.values()]
        elastic = None if self.elastic is None else self.elastic.report_on(makes)
        return Report(tuple(rows), watched=self._figures is not None, elastic=elastic)

    def __repr__(self) -> str:
        regions = sum(not choice.offload for choice in self.plan.all_choices)
        state = f"{regions} regions" if self._placed or not regions else "removed"
        tops = [one.module for one in self._placed if isinstance(one, NoCacheInTraining)]
        uncached = any(getattr(getattr(top, "config", None), "use_cache", False) for top in tops)
        note = "; config.use_cache counts as False in training" if uncached else ""
        return f"<plan applied to {type(self.model).__name__}: {state}{note}>"


def apply(
    model: nn.Module, plan: Plan, *, stores: Mapping[str, Store] | None = None, elastic: Elastic | None = None
) -> Applied:
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
        elastic: An `Elastic`: the plan's regions keep their activations while its memory lasts, and are recomputed
            where it does not; the handle's plan says so. Without it the choices that are elastic in the plan share an
            `Elastic("fit")`. Not elastic are what is offloaded, and regions whose inputs are sharded over ranks, since
            all ranks gather them in one order. A copy of the model shares the memory; a pickle begins with a new one.

    Returns:
        A handle; its `remove()` undoes it.

    Raises:
        ArgumentError: The model lacks a module that the plan names, or has another one there; it has a plan already, or
            another checkpoint inside; one module is under two of the paths; a store is missing, or not used; or no
            region of the plan can be elastic.
    """
    if not isinstance(model, nn.Module) or not isinstance(plan, Plan):
        raise errors.ArgumentError(not_applicable(model, plan))
    if plan.graph_bytes is not None:
        raise errors.ArgumentError(
            "this plan is for the graph of torch.compile, and names no modules that could be regions.\n"
            "  Write torch_recompute.compiling.compile(model, plan), or make the plan without compiled=True."
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    _check_modules(model, modules, plan)
    places = _stores(plan, stores or {})
    plan, elastic = _elastic(plan, places, elastic)
    placement = _Placement(model, modules, plan, places, elastic)
    for choice in plan.all_choices:
        placement.add(choice)
    for choice in plan.all_choices:
        placement.add_kept(choice)
    placed = placement.wrappers()
    for one in placed:
        one.put()
    planned_models[model] = plan
    return Applied(model, plan, placed, placement.first, elastic)


def _elastic(plan: Plan, stores: Mapping[str, Store | None], memory: Elastic | None) -> tuple[Plan, Elastic | None]:
    """The plan with the regions that are elastic, and the memory that they share; None where none is."""
    gathered = {word for word, store in stores.items() if type(store).__name__ == "ShardedOver"}
    if memory is not None:
        checked_pool(memory)
        plan = made_elastic(plan, gathered)
    elastic = [choice for choice in plan.all_choices if choice.elastic]
    if memory is not None and plan.choices and not elastic:
        raise errors.ArgumentError(
            f"apply(elastic=) makes no region of this plan elastic: {plan.choices[0]}, and likewise the rest. What is "
            "offloaded is not recomputed, and inputs that are sharded are gathered by all ranks in one order.\n"
            "  Leave elastic out, or keep inputs where they are: Choice(paths), without store and offload."
        )
    wrong = next((choice for choice in elastic if choice.store in gathered), None)
    if wrong is not None:
        raise errors.ArgumentError(
            f"the plan says: {wrong}. Whether it is recomputed depends on the memory of one rank then, and all ranks "
            "have to gather its inputs, in one order.\n"
            "  Leave elastic=True out of this choice, or its store."
        )
    if elastic and memory is None:
        from ..memory.elastic import Elastic

        memory = Elastic("fit")
    return plan, memory if elastic else None


def _check_modules(model: nn.Module, modules: Mapping[str, nn.Module], plan: Plan) -> None:
    """Refuses a model that has a plan already, or other modules than those that the plan was made for."""
    for path, module in modules.items():
        if wrappers_on(module):
            others = (one for one in planned_models if one is not model and any(m is module for m in one.modules()))
            other = None if model in planned_models else next(others, None)
            if other is not None:
                raise errors.ArgumentError(
                    f"{path or 'the model itself'} of {type(model).__name__} is also a module of "
                    f"{type(other).__name__}, whose plan covers it. Two plans on one module would nest their regions.\n"
                    "  Make one plan, for a model that holds both, or take the first one out:  handle.remove()   (the "
                    "handle is what apply returned)"
                )
            write = "Take the first one out:  handle.remove()   (the handle is what apply returned)"
            if model not in planned_models:
                write = "No handle takes it out: this is a copy of a model, or that model is gone. Copy before apply."
            raise errors.ArgumentError(
                f"{type(model).__name__} has a plan already: {path or 'the model itself'} is placed. Two plans on one "
                f"model would nest their regions.\n  {write}"
            )
    placed = {path for choice in plan.all_choices for path in choice.modules}
    for path, expected in sorted(plan.modules, key=lambda row: not row[0]):  # the model itself last
        if path not in modules:
            raise errors.ArgumentError(_no_module(model, modules, path))
        found = described(modules[path])
        if found == expected:
            continue
        if path or path in placed:
            raise errors.ArgumentError(
                f"the plan was made for a model with {expected} at {path!r}; this model has {found} there.\n"
                "  Make the plan again for this model, as it is when the plan is applied:  make_plan(model, args, "
                "budget=...)"
            )
        warnings.warn(_of_another_model(plan, expected, found), RuntimeWarning, stacklevel=3)


def _check_called(choice: Choice, path: str, module: nn.Module) -> None:
    """Refuses a choice for what nothing calls, and for a head that has no weight to multiply with."""
    if type(module).forward is nn.Module.forward and "forward" not in vars(module):
        inner = ", ".join(repr(joined(Target(path).module, name)) for name, _ in [*module.named_children()][:2])
        raise errors.ArgumentError(
            f"{path!r} is a {errors.kind(module)}, which has no forward: its modules are called one by one, and the "
            "region would never run.\n"
            f"  Name these:  Choice(({inner}, ...))   as one region, or a Choice for each."
        )
    weight = getattr(module, "weight", None) if choice.with_loss else None  # it may be computed
    if choice.with_loss and not (isinstance(weight, torch.Tensor) and weight.dim() == 2):
        raise errors.ArgumentError(
            f"{path!r} is a {errors.kind(module)}, and with_loss=True is of the model's head: one linear layer, whose "
            "logits the loss is made of.\n"
            "  Name the head, Choice(('lm_head',), tiles=8, with_loss=True), or leave with_loss=True out."
        )


def _no_module(model: nn.Module, modules: Mapping[str, nn.Module], path: str) -> str:
    """Text for a path that a plan names and a model does not have."""
    hint = close_to(path, modules, 3, repr)
    within = getattr(model, "module", None)
    if isinstance(within, nn.Module) and path in dict(within.named_modules()):
        hint = f" The model is inside of {type(model).__name__}: apply(model.module, plan)."
    if "_orig_mod" in modules:
        hint = " torch.compile returned it: apply the plan to the model that was compiled, its ._orig_mod."
    if any(name.startswith(f"{path}@") for name in modules):
        hint = " A plan writes calls as path@calls, so it cannot name a module with an @ in its own name: rename it."
    return (
        f"{type(model).__name__} has no module {path!r}.{hint}\n"
        "  A plan names modules by the paths of model.named_modules(), of the module that apply is given; a "
        "plan made for another model, or for the whole of which this is a part, has other paths."
    )


def _of_another_model(plan: Plan, expected: str, found: str) -> str:
    """Text for a model whose planned layers are those of the plan, and which is another one besides."""
    promise = f" ({errors.brief(plan.prediction.peak_bytes)})" if plan.prediction is not None else ""
    return (
        f"the plan was made for {expected}; this is {found}. The layers that the plan names are the same, so they are "
        f"recomputed as it says, but the peak that it promises{promise} is not that of this model.\n"
        "  Make the plan again for this model, as it is when the plan is applied:  make_plan(model, args, budget=...)"
    )


class _Placement:
    """The wrappers that a plan puts around the modules of a model, collected before any of them is put there."""

    def __init__(
        self,
        model: nn.Module,
        modules: Mapping[str, nn.Module],
        plan: Plan,
        stores: Mapping[str, Store | None],
        memory: Elastic | None,
    ) -> None:
        self._model, self._modules, self._plan, self._stores = model, modules, plan, stores
        self._memory = memory
        self._sizes, self.first = Sizes(plan), FirstCalls(plan)
        self._regions: list[Region] = []
        self._paths: dict[tuple[int, int, str], str] = {}
        self._others: dict[tuple[str, int, str], tuple[ForwardWrapper, list[Choice]]] = {}

    def add(self, choice: Choice) -> None:
        """Adds the regions of a choice, or the modules that it offloads."""
        chain = Chain([self._module(path) for path in choice.modules], self._model)
        store = self._stores[choice.store]
        for path, module in zip(choice.paths, chain.modules, strict=True):
            self._check_once(choice, path, module)
            _check_called(choice, path, module)
            if choice.tiles and not choice.with_loss:
                self._check_tiles(path, module)
            if choice.offload:
                self._add_other(Offloaded(module, path, choice, store), path, choice)
                continue
            if len(choice.paths) > 1:
                region = ChainedRegion(module, path, choice, store, chain)
            else:
                kind = NamedCalls if Target(path).calls else HeadWithLoss if choice.with_loss else Region
                region = kind(module, path, choice, store)
            region.when, region.first = self._sizes.when([choice]), self.first
            region.memory = self._memory if choice.elastic else None
            within = ((joined(path, keep.module) if keep.module else "", keep.calls) for keep in choice.kept)
            there = self._modules
            region.kept = [(there[at] if at else None, kind) for at, kind in within if not at or at in there]
            self._regions.append(region)

    def _check_tiles(self, path: str, module: nn.Module) -> None:
        """Refuses tiles of a module that holds an attention, or what else is known to mix tokens."""
        from ..engine.tiles import TOKENS, refuse_mixing

        mixing = find_units(self._model).by_role("attention", "mixer", within=path)
        refuse_mixing(module, TOKENS, [relative(unit.path, path) for unit in mixing])

    def add_kept(self, choice: Choice) -> None:
        """Adds what the regions of a choice keep: modules, and kinds of calls in them."""
        for keep in choice.kept:
            kind = keep.calls
            if kind and not keep.module:
                continue
            every = [joined(path, keep.module) for path in choice.paths]
            for path in [path for path in every if path in self._modules] or every[:1]:
                module = self._module(path)
                one = KeepCallsWithin(module, path, kind) if kind else SavedModule(module, path)
                self._add_other(one, kind, choice)

    def wrappers(self) -> list[ForwardWrapper | CheckpointingSwitch]:
        """Returns all wrappers from the inside out, in the order in which they are put."""
        self._check_other_checkpoints()
        tops = list(roots(self._model))
        for one in self._regions:
            if tops and one.module not in tops:
                self._add_other(CachesFromSnapshot(one.module, one.path), "", one.choice)
        for one, choices in self._others.values():
            one.when = self._sizes.when(choices)
        inner = [one for one, _ in self._others.values() if isinstance(one, CachesFromSnapshot)]
        kept = [one for one, _ in self._others.values() if not isinstance(one, CachesFromSnapshot)]
        outer: list[ForwardWrapper] = [NoCacheInTraining(top, "") for top in tops]
        if self._plan.sizes:
            outer.append(BySize(self._model, "", self._sizes))
        return [*inner, *self._regions, *kept, *outer, CheckpointingSwitch(self._model, self._regions)]

    def _module(self, path: str) -> nn.Module:
        if path not in self._modules:
            raise errors.ArgumentError(_no_module(self._model, self._modules, path))
        return self._modules[path]

    def _add_other(self, one: ForwardWrapper, kind: str, choice: Choice) -> None:
        """Adds a wrapper that is not a region; a second one of its kind on a module adds its choice to the first."""
        self._others.setdefault((type(one).__name__, id(one.module), kind), (one, []))[1].append(choice)

    def _check_once(self, choice: Choice, path: str, module: nn.Module) -> None:
        for when in self._sizes.of(choice):
            first = self._paths.setdefault((when, id(module), Target(path).calls), path)
            if first != path:
                raise errors.ArgumentError(
                    f"{path!r} and {first!r} are one and the same module, which can be placed only once.\n"
                    "  Leave one of the two paths out; the region is there whenever the module is called."
                )

    def _check_other_checkpoints(self) -> None:
        for path in (path for path, module in self._modules.items() if type(module).__name__ == "CheckpointWrapper"):
            targets = (Target(one.path).module for one in self._regions)
            if any(inside(path, target) or inside(target, path) for target in targets):
                raise errors.ArgumentError(other_checkpointing_inside(path))


def _stores(plan: Plan, given: Mapping[str, Store]) -> dict[str, Store | None]:
    """The store for each word of the plan; None where inputs stay where they are."""
    if not isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise errors.ArgumentError(
            f"apply(stores=) takes a store for each word of the plan, but got {errors.say(given)}\n"
            '  Write stores={"host": OnHost()}.'
        )
    wanted = list(dict.fromkeys(choice.store for choice in plan.all_choices if choice.store))
    for word, store in given.items():
        if word not in wanted:
            has = f"its regions name {', '.join(map(repr, wanted))}" if wanted else "no region of it names a store"
            raise errors.ArgumentError(
                f"stores has {word!r}, which nothing in the plan uses: {has}.\n"
                f"  Leave it out, or make the plan with it:  Choice(('layers.0',), store={word!r})"
            )
        checked_store(f"stores[{word!r}]", store)
    for word in wanted:
        if word not in given and word != "host":
            write = f"      apply(model, plan, stores={{{word!r}: store}})"
            if word == "sharded":
                write = (
                    "      from torch_recompute.distributed import ShardedOver\n"
                    '      apply(model, plan, stores={"sharded": ShardedOver(group)})\n'
                    "  where group is the process group of the tensor parallel ranks, all of which hold the same "
                    "inputs."
                )
            elif word == "disk":
                write = (
                    "      from torch_recompute import OnDisk\n"
                    '      apply(model, plan, stores={"disk": OnDisk("/scratch")})\n'
                    "  where the folder exists, on a local disk with room for what the plan keeps there in one step."
                )
            raise errors.ArgumentError(
                f"the plan keeps tensors in {word!r}, and no store of that name was given.\n  Write:\n{write}"
            )
    return {"": None, **{word: given[word] if word in given else OnHost() for word in wanted}}


def not_applicable(model: object, plan: object) -> str:
    """Text for an `apply` of something that is no model or no plan."""
    got = errors.say(plan if isinstance(model, nn.Module) else model)
    return (
        f"a model is a torch.nn.Module and its plan is a Plan, but got {got}\n"
        "  Write plan = RecomputeConfig(...).plan(model), or make_plan(...), and pass model and plan."
    )
