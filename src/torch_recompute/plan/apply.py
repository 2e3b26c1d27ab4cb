"""Putting a plan into a model, and taking it out again.

`apply` is the only function of the library that changes a model. It gives the instances that a plan names a `forward`
of their own (`wrappers.py`), and changes nothing else: no module path, no `state_dict` key, no class, no hook. Hooks
registered on a module stay outside of its region, so they run once.

A model that has a checkpointing switch of its own gets, besides the regions, a switch that keeps the plan, and regions
that can be given a cache (`libraries.py`). From the inside out a module's `forward` is then: its own,
`CachesFromSnapshot`, the region; on a whole model, `NoCacheInTraining` is outside of these, and `BySize` outermost.

A plan with sizes places all that any of its sets of choices asks for; each object is the plain call unless the present
call of the model goes by a set that asks for it (`sizes.py`).

Rejected: wrapper modules, which change paths under everybody's feet (`_checkpoint_wrapped_module.`); patching classes;
flags on modules. Each call finds its own state, so a module may have any number of live calls.
"""

from __future__ import annotations

import difflib
from collections.abc import Generator, Mapping, Sequence
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
    Promised,
    Region,
    SavedModule,
    described,
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
        self._regions = [one for one in placed if isinstance(one, Region)]
        self._figures: list[Figures] | None = None

    def remove(self) -> None:
        """Gives the model everything back that it had; calling it again does nothing."""
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

        A step that is not watched runs the regions and nothing else. In one that is, tensors that the first call of a
        region drops are counted, the first replay's FLOPs by a dispatch mode, and decisions compared; every further
        replay is timed, so two steps have to be watched for seconds, or one with two microbatches.

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
        with watching(self._regions) as self._figures:
            yield self

    def report(self) -> Report:
        """What each region frees and what its replays cost, of the steps that were last watched.

        Bytes, FLOPs and decisions are those of one call of each, seconds the mean of the replays after the first.
        Where no step was watched, the report says so.
        """
        figures = self._figures or [Figures() for _ in self._regions]
        rows: list[Row] = []
        for choice in self.plan.all_choices:
            mine = [(region, f) for region, f in zip(self._regions, figures, strict=True) if region.choice == choice]
            rows.append(Row.of(choice, [type(region.module).__name__ for region, _ in mine], [f for _, f in mine]))
        return Report(tuple(rows), watched=self._figures is not None)

    def __repr__(self) -> str:
        regions = len(self.plan.all_choices)
        state = f"{regions} regions" if self._placed or not regions else "removed"
        return f"<plan applied to {type(self.model).__name__}: {state}>"


def _no_such_module(model: str, path: str, near: Sequence[str]) -> str:
    """Text for a path that the model does not have."""
    hint = f" Close to it: {', '.join(map(repr, near))}." if near else ""
    return (
        f"{model} has no module {path!r}.{hint}\n"
        "  A plan names modules by the paths of model.named_modules(), of the module that apply is given; a plan made "
        "for another model, or for the whole of which this is a part, has other paths."
    )


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
        (path for path, module in modules.items() if isinstance(module.__dict__.get("forward"), ForwardWrapper)), None
    )
    if already is not None:
        raise errors.ArgumentError(
            f"{type(model).__name__} has a plan already: {already or 'the model itself'} is placed. Two plans on one "
            "model would nest their regions.\n"
            "  Take the first one out:  handle.remove()   (the handle is what apply returned)"
        )
    for path, said in plan.modules:
        found = described(modules[path]) if path in modules else "nothing"
        if found != said:
            raise errors.ArgumentError(
                f"the plan was made for a model with {said} at {path!r}; this model has {found} there.\n"
                "  Make the plan again for this model, as it is when the plan is applied:  make_plan(model, args, "
                "budget=...)"
            )
    by_word = _stores(plan, stores or {})
    sizes, promised = Sizes(plan), Promised(plan)
    placed: list[ForwardWrapper] = []
    wanted: dict[tuple[int, int, str], str] = {}

    def find(path: str) -> nn.Module:
        if path not in modules:
            near = difflib.get_close_matches(path, modules, n=3)
            raise errors.ArgumentError(_no_such_module(type(model).__name__, path, near))
        return modules[path]

    for choice in plan.all_choices:
        chain = Chain([find(path) for path in choice.modules], model)
        for path, module in zip(choice.paths, chain.modules, strict=True):
            for when in sizes.of(choice):
                key = when, id(module), Target(path).calls
                if wanted.setdefault(key, path) != path:
                    raise errors.ArgumentError(
                        f"{path!r} and {wanted[key]!r} are one and the same module, which can be placed only once.\n"
                        "  Leave one of the two paths out; the region is there whenever the module is called."
                    )
            store = by_word[choice.store]
            if len(choice.paths) > 1:
                region = ChainedRegion(module, path, choice, store, chain)
            else:
                region = (NamedCalls if Target(path).calls else Region)(module, path, choice, store)
            region.when, region.promised = sizes.when([choice]), promised
            placed.append(region)
    kept: dict[tuple[int, str], tuple[ForwardWrapper, list[Choice]]] = {}
    for choice in plan.all_choices:
        for keep in choice.kept:
            kind = keep.calls
            every = [joined(path, keep.module) for path in choice.paths]
            for path in ([path for path in every if path in modules] or every[:1]) if keep.module or not kind else ():
                module = find(path)
                new = KeepCallsWithin(module, path, [kind]) if kind else SavedModule(module, path)
                kept.setdefault((id(module), kind), (new, []))[1].append(choice)
    regions = [one for one in placed if isinstance(one, Region)]
    for path in (path for path, module in modules.items() if type(module).__name__ == "CheckpointWrapper"):
        if any(inside(path, Target(one.path).module) or inside(Target(one.path).module, path) for one in regions):
            raise errors.ArgumentError(errors.other_checkpointing_inside(path))
    tops = list(roots(model))
    inner: dict[int, tuple[ForwardWrapper, list[Choice]]] = {}
    for one in regions:
        if tops and one.module not in tops:
            inner.setdefault(id(one.module), (CachesFromSnapshot(one.module, one.path), []))[1].append(one.choice)
    for one, choices in (*inner.values(), *kept.values()):
        one.when = sizes.when(choices)
    outer: list[ForwardWrapper] = [NoCacheInTraining(top, "") for top in tops]
    if plan.sizes:
        outer.append(BySize(model, "", sizes))
    innermost, saved = ([one for one, _ in some.values()] for some in (inner, kept))
    everything: list[ForwardWrapper | CheckpointingSwitch] = [
        *innermost,
        *placed,
        *saved,
        *outer,
        CheckpointingSwitch(model, regions),
    ]
    for one in everything:
        one.put()
    planned_models[model] = plan
    return Applied(model, plan, everything)


def _store_missing(word: str) -> str:
    """Text for a plan whose regions keep their inputs in a store that `apply` was not given."""
    if word == "sharded":
        write = (
            "      from torch_recompute.distributed import ShardedOver\n"
            '      apply(model, plan, stores={"sharded": ShardedOver(group)})\n'
            "  where group is the process group of the tensor parallel ranks, all of which hold the same inputs."
        )
    else:
        write = f"      apply(model, plan, stores={{{word!r}: store}})"
    return f"the plan keeps inputs of regions in {word!r}, and no store of that name was given.\n  Write:\n{write}"


def _store_unused(word: str, wanted: Sequence[str]) -> str:
    """Text for a store that no region of the plan uses."""
    has = f"its regions name {', '.join(map(repr, wanted))}" if wanted else "no region of it names a store"
    return (
        f"stores has {word!r}, which nothing in the plan uses: {has}.\n"
        f"  Leave it out, or make the plan with it:  Choice(('layers.0',), store={word!r})"
    )


def _stores(plan: Plan, given: Mapping[str, Store]) -> dict[str, Store | None]:
    """The store for each word of the plan; None where inputs stay where they are."""
    found: dict[str, Store | None] = {"": None}
    wanted = dict.fromkeys(choice.store for choice in plan.all_choices if choice.store)
    for word, store in given.items():
        if word not in wanted:
            raise errors.ArgumentError(_store_unused(word, list(wanted)))
        if not (hasattr(store, "put") and hasattr(store, "get")):
            raise errors.ArgumentError(errors.not_a_store(f"stores[{word!r}]", store))
    for word in wanted:
        if word not in given and word != "host":
            raise errors.ArgumentError(_store_missing(word))
        found[word] = given[word] if word in given else OnHost()
    return found
