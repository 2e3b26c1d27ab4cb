"""Texts for plans, and for models that they do not fit."""

from __future__ import annotations

from collections.abc import Sequence

from ._say import say


def bad_plan(why: str) -> str:
    """Text for a plan that cannot be."""
    return (
        f"this is not a plan: {why}.\n"
        "  A plan is made by RecomputeConfig(...).plan(model), by hand as Plan((Choice(('layers.0',)), ...)), or read "
        "by Plan.from_json(text) from what plan.to_json() wrote."
    )


def not_applicable(model: object, plan: object) -> str:
    """Text for an `apply` of something that is no model or no plan."""
    return (
        f"apply(model, plan) needs a torch.nn.Module and a Plan, but got {say(model)} and {say(plan)}.\n"
        "  Write:  handle = apply(model, RecomputeConfig(...).plan(model))"
    )


def applied_twice(model: str, path: str) -> str:
    """Text for a second plan on one model."""
    return (
        f"{model} has a plan already: {path or 'the model itself'} is placed. Two plans on one model would nest their "
        "regions.\n"
        "  Take the first one out:  handle.remove()   (the handle is what apply returned)"
    )


def watched_after_removal(model: str) -> str:
    """Text for watching a plan that is no longer in its model."""
    return (
        f"handle.watch() watches the regions of a plan, but this plan has been removed from {model}.\n"
        "  Watch before handle.remove(), or apply the plan again:  handle = apply(model, handle.plan)"
    )


def no_such_module(model: str, path: str, near: Sequence[str]) -> str:
    """Text for a path that the model does not have."""
    hint = f" Close to it: {', '.join(map(repr, near))}." if near else ""
    return (
        f"{model} has no module {path!r}.{hint}\n"
        "  A plan names modules by the paths of model.named_modules(), of the module that apply is given; a plan made "
        "for another model, or for the whole of which this is a part, has other paths."
    )


def other_model(path: str, said: str, found: str) -> str:
    """Text for a model that is not the one that a plan was made for."""
    return (
        f"the plan was made for a model with {said} at {path!r}; this model has {found} there.\n"
        "  Make the plan anew for this model, as it is when the plan is applied:  make_plan(model, args, budget=...)"
    )


def one_module_twice(path: str, other: str) -> str:
    """Text for one module under two of a plan's paths."""
    return (
        f"{path!r} and {other!r} are one and the same module, which can be placed only once.\n"
        "  Leave one of the two paths out; the region is there whenever the module is called."
    )


def sharded_apart(count: int) -> str:
    """Text for a group of layers that `fully_shard` was given one by one."""
    return (
        f"the plan recomputes {count} layers together, but each of them was sharded on its own: in backward the "
        "earlier ones are replayed while only the last one's parameters are gathered.\n"
        "  Shard what is recomputed together as one unit:  fully_shard([layers[0], layers[1]])\n"
        "  or recompute them one by one:  recompute_num_layers=1"
    )


def store_missing(word: str) -> str:
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


def store_unused(word: str, wanted: Sequence[str]) -> str:
    """Text for a store that no region of the plan uses."""
    has = f"its regions name {', '.join(map(repr, wanted))}" if wanted else "no region of it names a store"
    return (
        f"stores has {word!r}, which nothing in the plan uses: {has}.\n"
        f"  Leave it out, or make the plan with it:  Choice(('layers.0',), store={word!r})"
    )


def wrapped_apart(count: int) -> str:
    """Text for a group of layers that FullyShardedDataParallel was put around one by one."""
    return (
        f"the plan recomputes {count} layers together, but FullyShardedDataParallel was put around each of them alone: "
        "in backward the earlier ones are replayed while only the last one's parameters are sure to be there.\n"
        "  Wrap a module that holds all of them, or keep parameters after forward (ShardingStrategy.SHARD_GRAD_OP),\n"
        "  or recompute them one by one:  recompute_num_layers=1"
    )
