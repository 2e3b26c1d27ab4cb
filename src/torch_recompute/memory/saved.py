"""`saved_activations`: what a forward keeps for backward, one row per storage, and the rows sum to the total.

Problem. "Why does this layer cost 300 MiB?" The answer lies in C++, under operation names, and what lies there is not
all: a region holds its inputs, a custom Function stashes on its `ctx`, a module caches what it computed last.

Idea. Run the model once, watching births (`births.py`). Then hold the graph alone and let the result go. What was
born in the forward and is alive now is what the forward keeps, whatever the reason: that is the total, and it is
exact before anything is explained. The explanation comes afterwards (`holders.py`) and gives each row its kind:

    saved     autograd saved it, for the nodes in `saved_by`
    region    a region holds it until its replay: an input, or what a saved call stores
    escaped   neither: it is alive because of a `ctx`, an attribute, a global, a closure; `held_by` says where. No
              recomputation frees it, because saved-tensor hooks do not see it

A storage that is more than one of these is the first. Parameters, buffers and inputs were there before: they cost
nothing, and are listed apart (`existing`), with 0 bytes.

Rejected: saved-tensor hooks around the model, which regions would take for their store; a sum over saved tensors,
which counts a view as if it were memory and cannot see what escapes.

Invariants. The model runs once, and no region replays. Generators, buffers and the attributes of modules are as before;
what else the model does to the world (arguments changed in place) stays done, as after any call. The result holds plain
data.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .. import _tree
from .._compat.storages import set_versions, versions_of
from .._reach import Reach
from .._tree import check_call
from ..state import DEFAULT, Ambient, GeneratorRng, TensorState
from .births import Birth, Watch
from .holders import Hold, Holders, name_referrers, python_tensors
from .ledger import storages
from .listing import Row, SavedActivations

_WHAT = "saved_activations"


def saved_activations(
    model: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> SavedActivations:
    """Lists what a forward keeps for backward: by module, by line, by storage.

        kept = saved_activations(model, (batch,))
        print(kept)
        kept.total_bytes, kept.by_module(), kept.by_line(), kept.by_kind()

    The model is called once, with grad, on its arguments as they are; fake and meta tensors will do, so a model of
    any size can be asked. Gradients, generators and the buffers of its modules are left as they were (the buffers are
    copied for the time of the call); caches of autocast are emptied.

    Args:
        model: A module or another callable.
        args: The positional arguments of the call.
        kwargs: Its keyword arguments.

    Returns:
        The rows, one per storage, and their sums.

    Raises:
        ArgumentError: `model` cannot be called, `args` is no tuple or `kwargs` no dict.
    """
    check_call(_WHAT, model, args, kwargs)
    values = [*args, *(kwargs or {}).values()]
    reach = Reach(model, [value for value in values if isinstance(value, nn.Module)])
    with attributes_as_before(reach.modules):
        return _look(model, args, kwargs or {}, reach)


def _look(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], reach: Reach) -> SavedActivations:
    values = [*args, *kwargs.values()]
    names = module_names(model, reach)
    holders = Holders()
    with as_before(reach, values):
        births, with_result = _run(Watch(names), holders, model, args, kwargs)
    alive = _alive(births)  # the graph alone holds these, and whatever escaped
    holders.start(values)  # a tensor changed in place has a history too
    holders.walk()
    cycles = _explain_the_rest(alive, holders, lambda module: names.get(id(module), type(module).__name__))
    rows = [_row(birth, nbytes, holders.of.get(key), key in cycles) for key, (birth, nbytes) in alive.items()]
    rows.sort(key=lambda row: -row.bytes)
    known = _names_of_storages(reach, names, args, kwargs)
    existing = [_existing(hold, *known.get(key, ("other", ""))) for key, hold in holders.of.items() if key not in alive]
    result_only = sum(nbytes for key, nbytes in with_result.items() if key not in alive)
    return SavedActivations(tuple(rows), result_only, tuple(existing))


def _run(
    watch: Watch, holders: Holders, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[int, Birth], dict[int, int]]:
    """Calls the model; leads `holders` to the graph and lets the result go.

    Returns:
        What was born, and the bytes of those born that were alive while the result was held.
    """
    with torch.inference_mode(False), torch.enable_grad():
        torch.clear_autocast_cache()  # a cast kept from before would not be seen, one kept from now is not the graph's
        result, births = watch.run(model, args, kwargs)
        torch.clear_autocast_cache()
    in_result = {id(storage) for tensor in holders.start(result) for _, storage in storages(tensor)}
    for key in in_result & births.keys():
        births[key].result = True
    return births, {key: nbytes for key, (_, nbytes) in _alive(births).items()}


def _alive(births: Mapping[int, Birth]) -> dict[int, tuple[Birth, int]]:
    """The storages that are still there and not empty, with their bytes."""
    alive: dict[int, tuple[Birth, int]] = {}
    for key, birth in births.items():
        storage = birth()
        if storage is not None and storage.nbytes():
            alive[key] = birth, int(storage.nbytes())
    return alive


def _explain_the_rest(
    alive: Mapping[int, tuple[Birth, int]], holders: Holders, name: Callable[[nn.Module], str]
) -> set[int]:
    """Finds out who keeps what no node and no region was found to keep; returns what was a cycle's garbage."""
    unknown = {key for key in alive if key not in holders.of}
    if not unknown:
        return unknown
    tensors = python_tensors(unknown)
    holders.start(tensors)  # the graph behind a tensor that a module has put aside is kept as well
    holders.walk()
    tensors[:] = [t for t in tensors if any(id(s) in unknown and id(s) not in holders.of for _, s in storages(t))]
    for tensor, holder in name_referrers(tensors, name):
        holders.stash(tensor, holder)
    del tensors[:]
    gc.collect()
    return {key for key in unknown if alive[key][0]() is None}


@contextmanager
def as_before(reach: Reach, values: list[Any]) -> Generator[None]:
    """Puts generators and buffers back, and how often these have been changed: a graph around may have saved them."""
    generators = [*reach.generators, *(value for value in values if isinstance(value, torch.Generator))]
    ambients: list[Ambient] = [*DEFAULT, *map(GeneratorRng, generators)]
    states = [ambient.capture() for ambient in ambients]
    places = [(place, dict(place)) for place in reach.buffers()]
    buffers = [buffer for _, held in places for buffer in held.values() if buffer is not None]
    contents, versions = TensorState(*buffers).capture(), versions_of(buffers)
    try:
        yield
    finally:
        for place, held in places:
            place.clear()
            place.update(held)
        with torch.inference_mode():  # where buffers of either sort may be written to
            for buffer, content in zip(buffers, contents, strict=True):
                if 0 not in _tree.layout(buffer):  # an expanded one cannot have been changed, nor be copied to
                    TensorState(buffer).restore([content])
        set_versions(versions)
        for ambient, state in zip(ambients, states, strict=True):
            ambient.restore(state)


@contextmanager
def attributes_as_before(modules: list[nn.Module]) -> Generator[None]:
    """Puts back what modules hold as attributes, and what lists, dictionaries and sets among them hold."""
    held = [(vars(module), dict(vars(module))) for module in modules]
    found = {id(value): value for _, then in held for value in then.values() if type(value) in (list, dict, set)}
    contents: list[tuple[Any, Any]] = [(value, value.copy()) for value in found.values()]
    try:
        yield
    finally:
        for attributes, then in held:
            for name in attributes.keys() - then.keys():
                del attributes[name]
            attributes.update(then)
        for value, then in contents:
            if isinstance(value, list):
                value[:] = then
            else:
                value.clear()
                value.update(then)


def _row(birth: Birth, nbytes: int, hold: Hold | None, in_cycle: bool) -> Row:
    kind, savers, holders = "escaped", (), ()
    if hold is not None:
        regions = hold.regions or ([birth.region or "a region"] if hold.in_region else [])
        kind = "saved" if hold.plain else "region" if regions else "escaped"
        savers, holders = tuple(hold.savers), (*regions, *hold.stashes)
    if in_cycle:
        holders = (*holders, "a reference cycle, until the garbage collector runs")
    return Row(
        bytes=nbytes,
        kind=kind,
        op=birth.op,
        saved_by=savers,
        held_by=holders,
        module=birth.module,
        line=birth.line,
        shape=birth.shape,
        dtype=birth.dtype,
        device=birth.device,
        in_result=birth.result,
    )


def _existing(hold: Hold, kind: str, name: str) -> Row:
    shape, dtype, device = hold.about
    holders = (*hold.regions, *hold.stashes)
    return Row(0, kind, "", tuple(hold.savers), holders, name, "", shape, dtype, device, False)


def module_names(model: object, reach: Reach) -> dict[int, str]:
    """Paths by `id`: those of the model; of a function's modules, their own, or below their class if it has several."""
    inner = {id(child) for module in reach.modules for child in module.children()}
    tops = [module for module in reach.modules if id(module) not in inner]
    if isinstance(model, nn.Module):
        tops.insert(0, model)
    names: dict[int, str] = {}
    for top in tops:
        alone = top is model or len(tops) == 1
        for path, module in top.named_modules(prefix="" if alone else type(top).__name__):
            names.setdefault(id(module), path)
    return names


def _names_of_storages(
    reach: Reach, names: Mapping[int, str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[int, tuple[str, str]]:
    """Kind and name of what was there before the call, by `id` of its storage."""
    found: dict[int, tuple[str, str]] = {}
    for module in reach.modules:
        path = names.get(id(module), "")
        for kind, tensors in (
            ("parameter", module.named_parameters(recurse=False)),
            ("buffer", module.named_buffers(recurse=False)),
        ):
            for name, tensor in tensors:
                for _, storage in storages(tensor):
                    found.setdefault(id(storage), (kind, f"{path}.{name}".removeprefix(".")))
    call = _tree.Call(args, kwargs)
    for index in call.tensors:
        for _, storage in storages(call.leaves[index]):
            found.setdefault(id(storage), ("input", call.label(index)))
    return found
