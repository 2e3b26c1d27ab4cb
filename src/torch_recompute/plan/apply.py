"""Puts a plan into a model, and takes it out again.

`apply` is the only function of the library that changes a model. It gives the instances that a plan names a `forward`
of their own (`wrappers.py`), and changes nothing else: no module path, no `state_dict` key, no class, no hook. Hooks
registered on a module stay outside of its region, so they run once.

From the inside out a module's `forward` is then its own, `CachesFromSnapshot` (`libraries.py`), the region; on a whole
model, `NoCacheInTraining` is outside of these, and `BySize` outermost. A plan with sizes places all that any of its
sets of choices asks for; each wrapper is the plain call unless the present call goes by such a set (`sizes.py`).
"""

from __future__ import annotations

import difflib
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager

from torch import nn

from .. import errors
from ..stores import OnHost, Store
from .choice import Choice, Target, joined
from .exhausted import planned_models
from .libraries import CachesFromSnapshot, CheckpointingSwitch, NoCacheInTraining, roots
from .observe import Figures, watching
from .plan import Plan
from .report import Report, Row
from .roles import inside
from .sizes import BySize, Sizes
from .wrappers import (
    Chain,
    ChainedRegion,
    ForwardWrapper,
    KeepCallsWithin,
    NamedCalls,
    Offloaded,
    Promised,
    Region,
    SavedModule,
    described,
    wrappers_on,
)


class Applied:
    """A plan in a model.

    Attributes:
        model: The model.
        plan: The plan.
    """

    def __init__(self, model: nn.Module, plan: Plan, placed: list[ForwardWrapper | CheckpointingSwitch]) -> None:
        self.model = model
        self.plan = plan
        self._placed = placed
        self._watched = [one for one in placed if isinstance(one, (Region, Offloaded))]
        self._figures: list[Figures] | None = None

    def remove(self) -> None:
        """Gives everything back that the model had; does nothing the second time."""
        for placed in reversed(self._placed):
            placed.take_out()
        if self._placed:
            planned_models.pop(self.model, None)
        self._placed = []

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
        with watching(self._watched) as self._figures:
            yield self

    def report(self) -> Report:
        """Reports what each region drops and its replays cost, and what is offloaded, of the steps last watched."""
        figures = self._figures or [Figures() for _ in self._watched]
        rows: list[Row] = []
        for choice in self.plan.all_choices:
            mine = [number for number, one in enumerate(self._watched) if one.choice == choice]
            modules = [type(self._watched[number].module).__name__ for number in mine]
            rows.append(Row.of(choice, modules, [figures[number] for number in mine]))
        return Report(tuple(rows), watched=self._figures is not None)

    def __repr__(self) -> str:
        regions = sum(not choice.offload for choice in self.plan.all_choices)
        state = f"{regions} regions" if self._placed or not regions else "removed"
        tops = [one.module for one in self._placed if isinstance(one, NoCacheInTraining)]
        uncached = any(getattr(getattr(top, "config", None), "use_cache", False) for top in tops)
        note = "; config.use_cache counts as False in training" if uncached else ""
        return f"<plan applied to {type(self.model).__name__}: {state}{note}>"


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
        ArgumentError: The model lacks a module that the plan names, or has another one there; it has a plan already, or
            another checkpoint inside; one module is under two of the paths; a store is missing, or not used.
    """
    if not isinstance(model, nn.Module) or not isinstance(plan, Plan):
        raise errors.ArgumentError(errors.not_applicable(model, plan))
    if plan.graph_bytes is not None:
        raise errors.ArgumentError(
            "this plan is for the graph of torch.compile, and names no modules that could be regions.\n"
            "  Write torch_recompute.compiling.compile(model, plan), or make the plan without compiled=True."
        )
    placement = _Placement(model, plan)
    placement.check_model()
    placement.add_regions(_stores(plan, stores or {}))
    placement.add_kept_calls()
    placement.check_other_checkpoints()
    placed = placement.wrappers()
    for one in placed:
        one.put()
    planned_models[model] = plan
    return Applied(model, plan, placed)


class _Placement:
    """The wrappers of a plan for a model, before any of them is put into it."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._model, self._plan = model, plan
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._sizes, self._promised = Sizes(plan), Promised(plan)
        self._regions: list[Region] = []
        self._wanted: dict[tuple[int, int, str], str] = {}  # the path under which a module is placed
        self._others: dict[tuple[str, int, str], tuple[ForwardWrapper, list[Choice]]] = {}

    def check_model(self) -> None:
        """Refuses a model that has a plan, or that the plan was not made for."""
        for path, module in self._modules.items():
            if wrappers_on(module):
                raise errors.ArgumentError(
                    f"{type(self._model).__name__} has a plan already: {path or 'the model itself'} is placed. Two "
                    "plans on one model would nest their regions.\n"
                    "  Take the first one out:  handle.remove()   (the handle is what apply returned)"
                )
        for path, said in self._plan.modules:
            found = described(self._modules[path]) if path in self._modules else "nothing"
            if found != said:
                raise errors.ArgumentError(
                    f"the plan was made for a model with {said} at {path!r}; this model has {found} there.\n"
                    "  Make the plan again for this model, as it is when the plan is applied:  make_plan(model, args, "
                    "budget=...)"
                )

    def _find(self, path: str) -> nn.Module:
        if path not in self._modules:
            near = difflib.get_close_matches(path, self._modules, n=3)
            hint = f" Close to it: {', '.join(map(repr, near))}." if near else ""
            if "_orig_mod" in self._modules:
                hint = " torch.compile returned it: apply the plan to the model that was compiled, its ._orig_mod."
            raise errors.ArgumentError(
                f"{type(self._model).__name__} has no module {path!r}.{hint}\n"
                "  A plan names modules by the paths of model.named_modules(), of the module that apply is given; a "
                "plan made for another model, or for the whole of which this is a part, has other paths."
            )
        return self._modules[path]

    def _place(self, one: ForwardWrapper, kind: str, choice: Choice) -> None:
        self._others.setdefault((type(one).__name__, id(one.module), kind), (one, []))[1].append(choice)

    def _claim(self, path: str, module: nn.Module, choice: Choice) -> None:
        """Refuses a module that another path of the plan names as well."""
        for when in self._sizes.of(choice):
            before = self._wanted.setdefault((when, id(module), Target(path).calls), path)
            if before != path:
                raise errors.ArgumentError(
                    f"{path!r} and {before!r} are one and the same module, which can be placed only once.\n"
                    "  Leave one of the two paths out; the region is there whenever the module is called."
                )

    def add_regions(self, stores: Mapping[str, Store | None]) -> None:
        """Adds the regions, and what is offloaded."""
        for choice in self._plan.all_choices:
            chain = Chain([self._find(path) for path in choice.modules], self._model)
            for path, module in zip(choice.paths, chain.modules, strict=True):
                self._claim(path, module, choice)
                store = stores[choice.store]
                if choice.offload:
                    self._place(Offloaded(module, path, choice, store), path, choice)
                    continue
                if len(choice.paths) > 1:
                    region = ChainedRegion(module, path, choice, store, chain)
                else:
                    region = (NamedCalls if Target(path).calls else Region)(module, path, choice, store)
                region.when, region.promised = self._sizes.when([choice]), self._promised
                within = ((joined(path, keep.module) if keep.module else "", keep.calls) for keep in choice.kept)
                inside_it = [(at, kind) for at, kind in within if not at or at in self._modules]
                region.kept = [(self._modules[at] if at else None, kind) for at, kind in inside_it]
                self._regions.append(region)

    def add_kept_calls(self) -> None:
        """Adds the modules, and the calls within modules, that regions do not repeat."""
        for choice in self._plan.all_choices:
            for keep in choice.kept:
                kind = keep.calls
                every = [joined(path, keep.module) for path in choice.paths]
                there = [path for path in every if path in self._modules] or every[:1]
                for path in there if keep.module or not kind else ():
                    module = self._find(path)
                    one = KeepCallsWithin(module, path, kind) if kind else SavedModule(module, path)
                    self._place(one, kind, choice)

    def check_other_checkpoints(self) -> None:
        """Refuses another library's checkpoint around a region or inside one."""
        within = [Target(one.path).module for one in self._regions]
        for path in (path for path, module in self._modules.items() if type(module).__name__ == "CheckpointWrapper"):
            if any(inside(path, other) or inside(other, path) for other in within):
                raise errors.ArgumentError(errors.other_checkpointing_inside(path))

    def wrappers(self) -> list[ForwardWrapper | CheckpointingSwitch]:
        """Returns all wrappers, from the inside out."""
        tops = list(roots(self._model))
        for one in self._regions:
            if tops and one.module not in tops:
                self._place(CachesFromSnapshot(one.module, one.path), "", one.choice)
        for one, choices in self._others.values():
            one.when = self._sizes.when(choices)
        inner = [one for one, _ in self._others.values() if isinstance(one, CachesFromSnapshot)]
        kept = [one for one, _ in self._others.values() if not isinstance(one, CachesFromSnapshot)]
        by_size = [BySize(self._model, "", self._sizes)] if self._plan.sizes else []
        outer = [*(NoCacheInTraining(top, "") for top in tops), *by_size]
        return [*inner, *self._regions, *kept, *outer, CheckpointingSwitch(self._model, self._regions)]


def _stores(plan: Plan, given: Mapping[str, Store]) -> dict[str, Store | None]:
    """The store for each word of the plan; None where inputs stay where they are."""
    wanted = list(dict.fromkeys(choice.store for choice in plan.all_choices if choice.store))
    for word, store in given.items():
        if word not in wanted:
            has = f"its regions name {', '.join(map(repr, wanted))}" if wanted else "no region of it names a store"
            raise errors.ArgumentError(
                f"stores has {word!r}, which nothing in the plan uses: {has}.\n"
                f"  Leave it out, or make the plan with it:  Choice(('layers.0',), store={word!r})"
            )
        if not (hasattr(store, "put") and hasattr(store, "get")):
            raise errors.ArgumentError(errors.not_a_store(f"stores[{word!r}]", store))
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
