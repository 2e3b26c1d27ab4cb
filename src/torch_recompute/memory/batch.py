"""The arguments of one call of a model, from a batch as people have it: a tensor, a tuple, a mapping."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import types
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from .. import _torch, errors


def _not_a_model(what: str, value: object) -> str:
    """Text for a model that cannot be called."""
    kind = "a torch.nn.Module" if callable(value) else "a module or another callable"
    return (
        f"{what}(model, batch) needs {kind}, but got {errors.say(value)}\n"
        f"  It makes the call itself; pass the model, and the batch:\n"
        f"      {what}(model, x)     # not {what}(model(x))"
    )


Batch = torch.Tensor | Sequence[Any] | Mapping[str, Any]
"""The arguments of one call of a model, as a batch has them: see `call_of`."""


ExampleCall = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one call."""


def call_of(
    what: str, model: object, batch: object, kwargs: object = None, *, a_module: bool = False, loss: bool = True
) -> ExampleCall:
    """The arguments of one call of a model, from a batch as people have it.

    A tensor is the one argument, a tuple or a list (also an item of a dataloader) are positional arguments, a mapping
    (a dict, a `BatchEncoding`) is keyword arguments; `kwargs` come besides.

    Args:
        what: The public function that was called; the error's text names it.
        model: The model.
        batch: The batch.
        kwargs: More keyword arguments, or None.
        a_module: Whether only a module will do; else anything that can be called.
        loss: Whether the function takes `loss=`, which is where labels go that the forward does not take.

    Raises:
        ArgumentError: One of them is of another kind, or the forward does not take these arguments.
    """
    if not (isinstance(model, nn.Module) if a_module else callable(model)):
        raise errors.ArgumentError(_not_a_model(what, model))
    tensors = (*model.named_parameters(), *model.named_buffers()) if isinstance(model, nn.Module) and a_module else ()
    late = next((path for path, tensor in tensors if nn.parameter.is_lazy(tensor)), None)
    if late is not None:
        raise errors.ArgumentError(
            f"{what}: {late} of {type(model).__name__} has no shape until the model is first called, as in a "
            "LazyLinear, and nothing can be said of its memory before.\n"
            "  Call the model once, then plan:  with torch.no_grad(): model(*batch)"
        )
    if kwargs is not None and (not isinstance(kwargs, Mapping) or not _has_names(kwargs)):
        raise errors.ArgumentError(
            f"{what}(model, batch, kwargs) takes the keyword arguments of one call as a dict of names to values, but "
            f"kwargs is {errors.say(kwargs)}\n"
            f'  Write {what}(model, x, {{"mask": mask}}) for the call model(x, mask=mask).'
        )
    more = dict(cast("Mapping[str, Any]", kwargs or {}))
    if isinstance(batch, torch.Tensor) or type(batch).__name__ == "PackedSequence":
        args, named = (batch,), more
    elif isinstance(batch, (tuple, list)):
        args, named = tuple(cast("Sequence[Any]", batch)), more
    elif isinstance(batch, Mapping) and _has_names(cast("Mapping[Any, Any]", batch)):
        args, named = (), {**cast("Mapping[str, Any]", batch), **more}
    else:
        raise errors.ArgumentError(_not_a_batch(what, batch))
    lists = [name for name, value in named.items() if type(value) is list and value and type(value[0]) in (list, int)]
    if lists and not any(isinstance(value, torch.Tensor) for value in (*args, *named.values())):
        raise errors.ArgumentError(
            f"{what} was given lists of numbers, in {errors.listed(lists)}, and no tensor.\n"
            '  A tokenizer makes tensors with tokenizer(..., return_tensors="pt"), a data collator for a batch.'
        )
    _check_takes(what, model, args, named, loss)
    return args, named


def fresh(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy that requires grad as the tensor does, and is a leaf."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def tensors_of_call(given: Any) -> list[torch.Tensor]:
    """The tensors of a call, in order: those in containers, and those in attributes of other objects among them."""
    found: list[torch.Tensor] = []
    _look(given, found, {})
    return found


def _look(value: Any, found: list[torch.Tensor], seen: dict[int, Any]) -> None:
    """Adds to `found` the tensors that a value leads to; `seen` holds objects, so that no identity is used twice."""
    for leaf in _torch.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif id(leaf) not in seen and not isinstance(leaf, _CLOSED):
            seen[id(leaf)] = leaf
            if dataclasses.is_dataclass(leaf):
                _look([getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)], found, seen)
            else:
                _look([*getattr(leaf, "__dict__", {}).values()], found, seen)


_CLOSED = (nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType)  # lead to the whole program


def signature_of(function: Any) -> inspect.Signature | None:
    """The signature of a function or of a module's forward; None where it cannot be told."""
    try:
        return inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):
        return None


def labels_of(model: object, batch: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Finds the labels in a batch: what is called so, or the one item after those that the forward takes.

    Returns:
        The labels, or None, and the batch and the keywords without them, unless the forward takes them.
    """
    signature = signature_of(model)
    parameters = [] if signature is None else [*signature.parameters.values()]
    kinds, names = {p.kind for p in parameters}, [p.name for p in parameters]
    places = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    several = isinstance(batch, (tuple, list)) and type(batch).__name__ != "PackedSequence"
    items: list[Any] = [*cast("Sequence[Any]", batch)] if several else [batch]
    by_name = (
        dict(cast("Mapping[str, Any]", batch)) if isinstance(batch, Mapping) else dict(zip(places, items, strict=False))
    )
    found = {name: x for name, x in {**by_name, **kwargs}.items() if isinstance(x, torch.Tensor)}
    name = next((name for name in _CALLED_LABELS if name in found), None)
    if name is None:
        if several and len(items) == len(places) + 1 and inspect.Parameter.VAR_POSITIONAL not in kinds and places:
            return items[-1], tuple(items[:-1]), dict(kwargs)
        return None, batch, dict(kwargs)
    if name in names or inspect.Parameter.VAR_KEYWORD in kinds:
        return found[name], batch, dict(kwargs)
    rest = {key: value for key, value in by_name.items() if key != name} if isinstance(batch, Mapping) else batch
    return found[name], rest, {key: value for key, value in kwargs.items() if key != name}


def _has_names(mapping: Mapping[Any, Any]) -> bool:
    return all(isinstance(key, str) for key in mapping)


def _not_a_batch(what: str, batch: object) -> str:
    """Text for a batch that is none."""
    write = (
        f"  Write {what}(model, x) for the call model(x), {what}(model, (x, y)) for model(x, y), and {what}(model, "
        '{"ids": x}) for model(ids=x).'
    )
    if hasattr(batch, "__iter__") and hasattr(batch, "dataset"):
        write = f"  Write {what}(model, next(iter(loader))): one item of it."
    return (
        f"{what}(model, batch) takes the arguments of one call: a tensor, a tuple or a list of positional arguments, a "
        f"mapping of keyword arguments; but batch is {errors.say(batch)}\n{write}"
    )


def _check_takes(what: str, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], loss: bool) -> None:
    """Refuses arguments that the forward does not take, where its signature says so."""
    hooks = getattr(model, "_forward_pre_hooks", None)
    forward = model.forward if isinstance(model, nn.Module) else model
    signature = signature_of(model)
    if signature is None:
        return
    if hasattr(forward, "__wrapped__"):  # a decorator may take words of its own, which are no tensors
        kwargs = {name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor)}
    try:
        signature.bind(*args, **kwargs)
        return
    except TypeError as error:
        why = str(error)
    if hooks:  # which may change the arguments
        return
    parameters = signature.parameters.values()
    kinds = {kind: [p.name for p in parameters if p.kind is kind] for kind in inspect._ParameterKind}  # pyright: ignore[reportPrivateUsage]
    positional = kinds[inspect.Parameter.POSITIONAL_ONLY] + kinds[inspect.Parameter.POSITIONAL_OR_KEYWORD]
    takes = positional + kinds[inspect.Parameter.KEYWORD_ONLY]
    name = f"{type(model).__name__}.forward" if isinstance(model, nn.Module) else getattr(model, "__name__", "it")
    begin = f"{what}: {name} takes {errors.listed(takes)}"
    given = ", ".join([*map(errors.say, args), *(f"{key}={errors.say(value)}" for key, value in kwargs.items())])
    unknown = [key for key in kwargs if key not in takes]
    if not kinds[inspect.Parameter.VAR_POSITIONAL] and len(args) > len(positional):
        inputs = ", ".join(positional) or "nothing"
        beside = f", and the batch has {len(args)} items: {given}"
        ask = f"loss=lambda out: loss_fn(out, {_LABELS})" if loss else ""
        only = inputs if len(positional) == 1 else f"({inputs})"
        write = (
            f"  Pass what the forward takes{', and what the loss takes in loss=' if loss else ''}:\n"
            f"      {', '.join([*positional, _LABELS])} = batch\n"
            f"      {what}(model, {', '.join(filter(None, [only, ask]))})"
        )
    elif unknown and not kinds[inspect.Parameter.VAR_KEYWORD]:
        near = difflib.get_close_matches(unknown[0], takes, n=1)
        beside = f", and the batch has {errors.listed(unknown)}, which it does not take"
        beside += f" (close to it: {near[0]!r})" if near else ""
        write = (
            f"  Leave {'it' if len(unknown) == 1 else 'them'} out"
            + (f", and use what the loss takes in loss=: loss=lambda out: loss_fn(out, {unknown[0]})" if loss else "")
            + f". If the forward takes the mapping itself:  {what}(model, (batch,))"
        )
    else:
        beside = f", and cannot be called with {given or 'nothing'}: {why}"
        write = f"  Pass the arguments of one call:  {what}(model, batch)"
    raise errors.ArgumentError(f"{begin}{beside}.\n{write}")


_LABELS = "labels"
_CALLED_LABELS = ("labels", "targets", "target", "y")
