"""What a region's function is given: its arguments, taken apart, and what its closure holds.

A region is called twice with "the same" arguments, the second time long after the first. Between the two the caller
may have emptied a list that was passed, popped a key from a dict or replaced an element. So a call is taken apart
into leaves when it is made and put together again for each replay: containers are rebuilt, tensors come from where
they were kept, everything else is passed on by identity. Flat calls (every argument a tensor or a plain value) are by
far the most common and skip the pytree machinery. Rejected: `tree_flatten((args, kwargs))` on every call, 5 us where
the loop below takes one.

The closure scan finds what the function captures besides its arguments, since a replay reads it again: a closure's
cells, the object of a bound method, the parts of a `functools.partial`, the globals that the function names. What
cannot be seen (attributes of plain objects below the first level, globals used by functions that the function calls) is
not guarded, and the manual says so.

Cells are special: `for layer in layers: x = recompute(lambda x: layer(x))(x)` rebinds one cell, so every replay would
run the last layer, and a tensor deleted by the caller would be missing. So a closure is taken apart: the contents its
cells had in forward are kept, its tensors like arguments of the region, and a replay runs the same code over fresh
cells; the caller's own cells are never written. A cell that the function itself writes (`nonlocal`) is its own state
and left alone. Looking never calls user code (no `getattr` on user objects beyond `__dict__`).

Geometry says where a view is in its memory, relative to another view of the same memory, so that it can be rebuilt
from that other one once it exists again.
"""

from __future__ import annotations

import collections
import contextlib
import difflib
import dis
import enum
import functools
import inspect
import itertools
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from . import _torch, errors

PLAIN = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size})


class Subtree(NamedTuple):
    """Stands for a container among the leaves of a call: its elements are `leaves[start:stop]`."""

    spec: Any
    start: int
    stop: int


class Call:
    """The arguments of one call as a flat list: positional ones, keyword ones, then the elements of containers.

    Attributes:
        leaves: The flat list; a container is replaced by a `Subtree`.
        tensors: Where in `leaves` the tensors are.
        others: Where in `leaves` there is something that is neither a tensor nor a plain value.
    """

    __slots__ = ("_nested", "keywords", "leaves", "others", "positional", "tensors")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.leaves = leaves = [*args, *kwargs.values()] if kwargs else list(args)
        self.positional = len(args)
        self.keywords = tuple(kwargs)
        self.tensors: list[int] = []
        self.others: Sequence[int] = ()
        self._nested = False
        for i, leaf in enumerate(leaves):  # grows while it is read: elements of containers come at the end
            kind = type(leaf)
            if kind is torch.Tensor:
                self.tensors.append(i)
            elif kind in PLAIN:
                continue
            elif isinstance(leaf, torch.Tensor):
                self.tensors.append(i)
            elif i < self.positional + len(self.keywords) and _torch.is_container(leaf):
                self._nested = True
                elements, spec = _torch.tree_flatten(leaf)
                leaves[i] = Subtree(spec, len(leaves), len(leaves) + len(elements))
                leaves.extend(elements)
            else:
                self.others = (*self.others, i)

    def arguments(self, leaves: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Puts `leaves` (as long as `self.leaves`) together into fresh `args, kwargs`."""
        if self._nested:
            top = self.positional + len(self.keywords)
            leaves, elements = list(leaves[:top]), leaves
            for i, value in enumerate(leaves):
                if type(value) is Subtree:
                    spec, start, stop = value
                    leaves[i] = _torch.tree_unflatten(list(elements[start:stop]), spec)
        if not self.keywords:
            return leaves, {}
        return leaves[: self.positional], dict(zip(self.keywords, leaves[self.positional :], strict=True))

    def label(self, index: int) -> str:
        """Names leaf `index` for an error: `argument 0`, `argument 'mask'`, `an element of argument 1`."""
        top = self.positional + len(self.keywords)
        if index < top:
            key = index if index < self.positional else repr(self.keywords[index - self.positional])
            return f"argument {key}"
        for i, value in enumerate(self.leaves[:top]):
            if type(value) is Subtree and value.start <= index < value.stop:
                return f"an element of {self.label(i)}"
        return "an argument"


class Geometry(NamedTuple):
    """A view of some memory, placed relative to `base`, another view of the same memory."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    shift: int
    base_stride: tuple[int, ...]
    whole: bool

    def of(self, base: torch.Tensor) -> torch.Tensor | None:
        """The view, over the memory of a new `base`; None where that cannot be had."""
        if self.whole:
            return base.detach()
        if base.stride() != self.base_stride:
            return self._laid_out(base)
        return base.detach().as_strided(self.size, self.stride, base.storage_offset() + self.shift)

    def _laid_out(self, base: torch.Tensor) -> torch.Tensor | None:
        """The view, over a copy of `base` with the strides that it had (a store may have returned it without gaps)."""
        try:
            copy = base.new_empty_strided(base.shape, self.base_stride).copy_(base.detach())
            return copy.as_strided(self.size, self.stride, self.shift)
        except RuntimeError:  # the elements of the old one overlapped, or the view reached beyond it
            return None


class SplitGeometry(NamedTuple):
    """Where a DTensor is relative to another: as its part on this rank is, if the two are split alike on a mesh."""

    part: Geometry
    layout: dict[str, Any]
    base_stride: tuple[int, ...]

    def of(self, base: torch.Tensor) -> torch.Tensor | None:
        """The view, over the memory of a new `base`; None where that cannot be had."""
        part = _part(base.detach())
        view = None if part is None else self.part.of(part)
        return None if view is None else cast("Any", type(base)).from_local(view, **self.layout)


WHOLE = Geometry((), (), 0, (), True)
"""That of a tensor relative to itself."""

AnyGeometry = Geometry | SplitGeometry


def _part(tensor: Any) -> torch.Tensor | None:
    """Returns this rank's part of a DTensor, once a collective has delivered it; None for other subclasses."""
    if not hasattr(tensor, "placements"):
        return None
    with torch.no_grad():
        local = tensor.to_local()
        return local.wait() if hasattr(local, "wait") else local


def _split_geometry(view: Any, base: Any) -> SplitGeometry | None:
    part, whole = _part(view.detach()), _part(base.detach())
    if part is None or whole is None or _torch.storage_id(part) != _torch.storage_id(whole):
        return None
    found = geometry(part, whole)
    if not isinstance(found, Geometry):
        return None
    layout = {"device_mesh": view.device_mesh, "placements": view.placements, "run_check": False}
    return SplitGeometry(found, {**layout, "shape": view.shape, "stride": view.stride()}, base.stride())


def geometry(view: torch.Tensor, base: torch.Tensor) -> AnyGeometry | None:
    """Where `view` is relative to `base`; None where strides cannot say it (other dtype, subclass, layout)."""
    plain = view.layout is torch.strided and base.layout is torch.strided
    if not plain or view.dtype != base.dtype or view.is_conj() != base.is_conj() or view.is_neg() != base.is_neg():
        return None
    if not _torch.is_plain(view) or not _torch.is_plain(base):
        return _split_geometry(view, base)
    shift = int(view.storage_offset() - base.storage_offset())
    whole = shift == 0 and view.shape == base.shape and view.stride() == base.stride()
    return Geometry(tuple(view.shape), view.stride(), shift, base.stride(), whole)


def wants_grad(tensor: torch.Tensor) -> bool:
    """Whether operations on the tensor are recorded.

    `requires_grad` says so too, but also of a view made under `no_grad` of something that requires grad, which is a
    constant; and it raises for a view whose base was changed under it, which counts as requiring grad here.
    """
    try:
        if not (tensor.requires_grad and tensor.is_leaf and tensor._is_view()):
            return tensor.requires_grad
        base: Any = tensor._base
        return base is None or not base.requires_grad
    except RuntimeError:
        return True


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory and version without a history, which might come to lead back to who holds it.

    A leaf that requires grad has none and is returned as it is, and so is a view that PyTorch refuses to detach
    because its base was changed under it; nothing can be computed with that one anyway.
    """
    try:
        return tensor if tensor.is_leaf and wants_grad(tensor) else tensor.detach()
    except RuntimeError:
        return tensor


Meta = tuple[Any, ...]


meta: Callable[[torch.Tensor], Meta] = operator.attrgetter("shape", "dtype", "device")
"""What the forward and the replay must agree on for a saved tensor.

Strides are compared with `check="values"` only: other strides give the same gradient, and reading them costs.
"""


def layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Stride, or the layout where there is no stride (sparse, nested)."""
    try:
        return tensor.stride()
    except (RuntimeError, NotImplementedError):
        return (tensor.layout,)


def say(value: Meta) -> str:
    """A `meta` in words."""
    shape, dtype, device = value
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}"


def unexpanded(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its expanded dimensions narrowed to one."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def each_once(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the same memory in which no element occurs twice.

    Unexpanded; where elements overlap in another way (`unfold`), all memory from the first to the last of them.
    """
    tensor = unexpanded(tensor)
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            whole = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            return tensor.as_strided((whole,), (1,), tensor.storage_offset())
        reach += (size - 1) * stride
    return tensor


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """A fingerprint of a tensor's bits (two int64, on its device; no host sync), for `check="values"`.

    Rows and columns of the bits are summed with weights in wrapping integer arithmetic, so a changed bit, a moved
    element and a NaN that is not the same NaN all show.
    """
    with torch.no_grad():
        data = tensor.detach()
        if data.layout is not torch.strided:
            data = data.to_dense() if not data.is_nested else data.values()
        flat = data.resolve_conj().resolve_neg().contiguous().reshape(-1)
        if flat.stride(0) != 1:  # one element, whose stride says nothing to anybody but `view`
            flat = flat.as_strided((flat.numel(),), (1,))
        bits = flat.view(torch.uint8)
        pad = -bits.numel() % 1024
        rows = torch.nn.functional.pad(bits, (0, pad)).view(-1, 1024)
        across, down = rows.sum(0, dtype=torch.int64), rows.sum(1, dtype=torch.int64)
        return torch.stack([_weighted(across), _weighted(down)])


def _weighted(sums: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(1, sums.numel() + 1, device=sums.device, dtype=torch.int64)
    return (sums * (weights * 2 - 1) * 0x9E3779B1).sum()


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, as `clone` makes it; but that of a DTensor has the same placements, where `clone` reduces a partial one.

    Duck typing keeps torch.distributed, which need not be there, out of `import torch_recompute`.
    """
    placements: Any = getattr(tensor, "placements", ())
    if not any(placement.is_partial() for placement in placements):
        return tensor.clone()
    from torch.distributed.tensor import Replicate

    d: Any = tensor
    local = d.to_local(grad_placements=[Replicate() if p.is_partial() else p for p in placements])
    layout = {"run_check": False, "shape": d.shape, "stride": d.stride()}
    return type(d).from_local(local.clone(), d.device_mesh, placements, **layout)


def mapped(value: Any, fn: Callable[[torch.Tensor], Any]) -> Any:
    """An operation's arguments or results, with `fn` of each tensor among them."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if type(value) in (list, tuple):
        return type(value)(mapped(item, fn) for item in value)
    if isinstance(value, dict):
        return {key: mapped(item, fn) for key, item in cast("dict[Any, Any]", value).items()}
    return value


def _not_a_model(what: str, value: object) -> str:
    """Text for a model that cannot be called."""
    return (
        f"{what}(model, batch) needs a module or another callable, but got {errors.say(value)}\n"
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
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):
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


class _Code(NamedTuple):
    """What a code object does, found once: the globals it names and the cells it writes."""

    names: tuple[str, ...]
    writes: frozenset[str]
    code: types.CodeType  # keeps the key of the cache alive


_codes: dict[int, _Code] = {}
_NO_STATE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)


def _look(code: types.CodeType, scope: dict[str, Any]) -> _Code:
    found = _codes.get(id(code))
    if found is None:
        writes = {str(i.argval) for i in dis.get_instructions(code) if i.opname in ("STORE_DEREF", "DELETE_DEREF")}
        names = {name for name in code.co_names if name in scope and not isinstance(scope[name], _NO_STATE)}
        for const in code.co_consts:
            if isinstance(const, types.CodeType):
                inner = _look(const, scope)
                names.update(inner.names)
                writes.update(inner.writes)
        found = _codes[id(code)] = _Code(tuple(sorted(names)), frozenset(writes), code)
    return found


class Held:
    """A function taken apart: its code, and what its closure cells held at one moment.

    The function object is not kept, since it would keep the tensors in its cells alive. `cells` holds, for each free
    variable, a `Held` (a function), a `Cell` (one that the function writes itself), an index into the closure's
    tensors wrapped in `Hole`, or the contents.
    """

    __slots__ = ("attributes", "cells", "code", "defaults", "kwdefaults", "name", "scope")

    def __init__(self, fn: types.FunctionType, cells: list[Any]) -> None:
        self.code = fn.__code__
        self.scope = fn.__globals__
        self.name = fn.__name__
        self.defaults = fn.__defaults__
        self.kwdefaults = fn.__kwdefaults__
        self.attributes = fn.__dict__
        self.cells = cells

    def function(self, tensors: Sequence[torch.Tensor]) -> types.FunctionType:
        """The function again, over fresh cells; `tensors` are the contents of the cells that held tensors."""
        cells = tuple([_cell(contents, tensors) for contents in self.cells])
        new = types.FunctionType(self.code, self.scope, self.name, self.defaults, cells)
        if self.kwdefaults:
            new.__kwdefaults__ = self.kwdefaults
        if self.attributes:
            new.__dict__.update(self.attributes)
        return new


class Hole(NamedTuple):
    """Stands for a tensor that a cell held: `tensors[number]`."""

    number: int


def _cell(contents: Any, tensors: Sequence[torch.Tensor]) -> types.CellType:
    kind = type(contents)
    if kind is types.CellType:
        return contents
    if kind is Held:
        return types.CellType(contents.function(tensors))
    if kind is Hole:
        return types.CellType(tensors[contents.number])
    return types.CellType() if contents is _EMPTY else types.CellType(contents)


_EMPTY = object()
_PLAIN = frozenset({int, float, bool, str, type(None), types.ModuleType, type})


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


class Captured(NamedTuple):
    """A tensor that a function reaches.

    Attributes:
        kind: "parameter" or "buffer" of `owner`; "" for a tensor whose `name` says all.
        name: Its name there.
        owner: The module it belongs to.
        tensor: The tensor.
        surely: Whether the function is known to read it; not so for what else belongs to a module in a closure,
            which may be the whole model.
        training: Whether its owner is in training mode.
    """

    kind: str
    name: str
    owner: type
    tensor: torch.Tensor
    surely: bool
    training: bool

    def label(self) -> str:
        """How errors call it."""
        return f"{self.kind} '{self.name}' of {self.owner.__name__}" if self.kind else self.name


_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)
_TABLES = ("_parameters", "_buffers", "_modules")
_READ = ("_parameters", "_buffers")
_NOT_READ = _OF_EVERY_MODULE - {"training"}  # which an OptimizedModule does not have
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)
_CONTAINERS = (list, dict, set, collections.deque)
_HOOKS = (
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
)
MANY = 1000
"""The most entries that a container may have to be put back; of a larger one only the number of entries is compared."""

_dict_of, values_of = operator.attrgetter("__dict__"), operator.methodcaller("values")
_parameters_in, _buffers_in, _children_in = map(operator.itemgetter, _TABLES)
_hooks_before, _hooks_after = map(operator.itemgetter, ("_forward_pre_hooks", "_forward_hooks"))
_flat = itertools.chain.from_iterable
_present: Callable[[Any], Any] = weakref.ref.__call__
_get: Any = operator.itemgetter.__call__
Values = list[Any]
"""What several dictionaries held at one moment, one after the other."""


def _is_config(value: Any, deep: int = 2) -> bool:
    """Whether an object holds plain data alone, as a config does. A handle or a trainer does not, and is left alone."""
    if isinstance(value, (nn.Module, torch.Tensor, *_FUNCTIONS)) or not deep:
        return False
    data: dict[str, Any] | None = getattr(value, "__dict__", None)
    plain = (enum.Enum, tuple, torch.Tensor, torch.Generator, *_CONTAINERS, *_FUNCTIONS)
    return bool(data) and all(
        type(one) in PLAIN or isinstance(one, plain) or _is_config(one, deep - 1) for one in data.values()
    )


Undo = tuple[Any, ...]
"""A function and its arguments."""


def undo(kept: Iterable[Undo]) -> None:
    """Calls each function."""
    for fn, *args in kept:
        fn(*args)


def _has_entries(value: Any) -> bool:
    return isinstance(value, _CONTAINERS) or _is_config(value)


class Aside(NamedTuple):
    """A tensor that a module held, without its history, which might come to lead back to the region."""

    was: weakref.ref[torch.Tensor]
    tensor: torch.Tensor
    grad: bool

    def there(self) -> Any:
        """The tensor that was held, if somebody else still holds it."""
        was = self.was()
        return self if was is None else was

    def open(self) -> torch.Tensor:
        """The tensor, for a replay."""
        return self.tensor.detach().requires_grad_(self.grad)


def _write(entries: dict[str, Any], then: dict[str, Any], whole: bool = True) -> None:
    """Has a dictionary hold what it held; if that is the whole, nothing else."""
    for key in [key for key in entries if key not in then] if whole else ():
        del entries[key]
    for key, value in then.items():
        now = entries.get(key, _EMPTY)
        if type(value) is Aside:
            if now is not value.there():
                entries[key] = value.open()
        elif now is not value:
            entries[key] = value


class Snapshot:
    """What the modules below one hold: their parameters, buffers, children and attributes, each by its identity.

    Attributes:
        modules: The modules, the root first.
        then: The values when this was made.
        hooked: Whether a module has forward hooks.

    Raises:
        LookupError: They have other names, kinds of attributes or children than the scan found.
    """

    __slots__ = ("_all", "_aside", "_dicts", "_full", "hooked", "modules", "scan", "then")

    def __init__(self, scan: _Scan) -> None:
        self.scan, self._aside = scan, False
        self.modules: list[Any] = [*map(_present, scan.refs)]
        if None in self.modules:
            raise LookupError
        self._dicts: list[dict[str, Any]] = [*map(_dict_of, self.modules)]
        dicts = self._dicts
        tables = [*map(_parameters_in, dicts), *map(_buffers_in, dicts), *map(_children_in, dicts)]
        self._all, self._full = [*dicts, *tables], [*filter(None, tables)]
        if [*map(len, self._all)] != scan.sizes or [*_flat(self._full)] != scan.names:
            raise LookupError
        self.then = then = [*_flat(map(_get, scan.getters, dicts)), *_flat(map(values_of, self._full))]
        self.hooked = any(map(_hooks_before, dicts)) or any(map(_hooks_after, dicts))
        if [*map(type, then[: scan.own])] != scan.kinds or [*map(id, then[scan.children :])] != scan.ids:
            raise LookupError

    def same(self) -> bool:
        """Whether the modules hold what they held. Not known, and so false, where tensors were set aside."""
        scan = self.scan
        if self._aside or [*map(len, self._all)] != scan.sizes:
            return False
        now = itertools.chain(_flat(map(_get, scan.getters, self._dicts)), _flat(map(values_of, self._full)))
        try:
            return all(map(operator.is_, now, self.then))
        except KeyError:
            return False

    def weights(self) -> list[Any]:
        """The parameters, and None where one is missing."""
        return self.then[self.scan.weights]

    def buffers(self) -> bool:
        """Whether there are any."""
        return self.scan.children > self.scan.weights.stop

    def hooks(self) -> list[dict[Any, Any]]:
        """The dictionaries that hold forward hooks, of the modules that have some."""
        some = [d for d in self._dicts if d["_forward_pre_hooks"] or d["_forward_hooks"]]
        return [own[name] for own in some for name in _HOOKS if name in own]

    def set_aside(self, weights: bool) -> None:
        """Holds what may get a history without it: after the forward, which knows tensors by their identity.

        Args:
            weights: Whether some parameter is no `Parameter`.
        """
        places = [*self.scan.tensors]
        if weights:
            places += range(self.scan.weights.start, self.scan.weights.stop)
        for place in places:
            held = self.then[place]
            if isinstance(held, torch.Tensor) and type(held) is not nn.Parameter:
                tensor = apart(held)
                if tensor is not held:
                    self.then[place] = Aside(weakref.ref(held), tensor, wants_grad(held))
                    self._aside = True

    def _pairs(self) -> Iterator[tuple[dict[str, Any], dict[str, Any], bool]]:
        """Each dictionary, what it held, and whether that is the whole; of what is left to a wrapper see `_Scan`."""
        scan, values, place, name = self.scan, self.then, 0, 0
        for entries, keys, managed in zip(self._dicts, scan.keys, scan.managed, strict=True):
            read = dict(zip(keys, values[place : place + len(keys)], strict=True))
            if managed:
                yield entries, {key: read[key] for key in ("training",) if key in read}, False
            else:
                yield entries, {key: one for key, one in entries.items() if key in _NOT_READ} | read, True
            place += len(keys)
        count = len(self._dicts)
        managed = [*scan.managed, *([False] * count), *scan.managed]  # buffers are not
        for table, size, left in zip(self._all[count:], scan.sizes[count:], managed, strict=True):
            if not left:
                yield table, dict(zip(scan.names[name : name + size], values[place : place + size], strict=True)), True
            place, name = place + size, name + size

    def restore(self) -> None:
        """Has the modules hold what they held."""
        for entries, then, whole in self._pairs():
            _write(entries, then, whole)

    def keep(self) -> list[Undo]:
        """What makes the modules hold again what they hold now."""
        return [
            (_write, entries, dict(entries) if whole else {key: entries[key] for key in then}, whole)
            for entries, then, whole in self._pairs()
        ]


class Contents:
    """What a container or a config holds, each entry by its identity; of a large one only the number of entries.

    A large list or dict that has grown loses what is new for a replay; other changes of large ones cannot be undone.

    Attributes:
        label: How errors call it.
        large: Whether it is a large one.
        then: What it held when this was made: keys, then values.
    """

    __slots__ = ("_inside", "label", "large", "then")

    def __init__(self, label: str, value: Any) -> None:
        self.label = label
        self._inside = value if isinstance(value, _CONTAINERS) else value.__dict__
        self.large = len(self._inside) > MANY
        self.then = self.now()

    def now(self) -> Values:
        """What it holds."""
        inside: Any = self._inside
        if self.large:
            return [len(inside)]
        return [*inside, *inside.values()] if isinstance(inside, dict) else [*inside]

    def same(self) -> bool:
        """Whether it holds what it held."""
        now = self.now()
        if self.large:
            return now == self.then
        return len(now) == len(self.then) and all(map(operator.is_, now, self.then))

    def lost(self) -> bool:
        """Whether it is a large one that has changed in a way that cannot be put back."""
        if not isinstance(self._inside, (list, dict)):
            return self.large and not self.same()
        return self.large and len(self._inside) < self.then[0]

    def _new(self) -> list[Any]:
        """What a large list or dict holds beyond what it held."""
        inside: Any = self._inside
        return [*itertools.islice(inside.items() if isinstance(inside, dict) else inside, self.then[0], None)]

    def _regrow(self, new: Sequence[Any]) -> None:
        """Has a large list or dict hold what it held, and what is new."""
        inside: Any = self._inside
        if isinstance(inside, dict):
            for key, _ in self._new():
                del inside[key]
            inside.update(new)
        elif isinstance(inside, list):
            inside[self.then[0] :] = new

    def restore(self) -> None:
        """Has it hold what it held."""
        if self.large:
            self._regrow(())
        else:
            self._put(self.then)

    def _put(self, values: Values) -> None:
        inside: Any = self._inside
        if isinstance(inside, dict):
            half = len(values) // 2
            _write(cast("dict[str, Any]", inside), dict(zip(values[:half], values[half:], strict=True)))
            return
        inside.clear()
        (inside.update if isinstance(inside, set) else inside.extend)(values)

    def keep(self) -> list[Undo]:
        """What makes it hold again what it holds now."""
        return [(self._regrow, self._new())] if self.large else [(self._put, self.now())]


class _Scan:
    """The modules below one and the names of what they hold, found once; a later call only reads the values.

    Modules are held weakly, so that a scan keeps nothing alive.

    Attributes:
        root: The module.
        keys: The names that are read of each module: two of its tables, whether it trains, its own attributes.
        kinds: The types of these.
        names: The names in all the tables: those of parameters, then of buffers, then of children.
        refs: The modules.
        getters: What reads `keys` of each module.
        sizes: How many attributes each module has, then how many names each table.
        ids: The identities of the children.
        own, children: Where among the values those of the tables, and the children, begin.
        weights: Where the parameters are.
        tensors: Where tensors are that are plain attributes.
        holds: Where tensors, generators, containers and configs are, and what errors call them.
        managed: Which modules belong to a wrapper of torch.distributed (FSDP), which tracks forward and backward by its
            own attributes and replaces parameters; they are left to it.
    """

    __slots__ = (
        *("children", "getters", "holds", "ids", "keys", "kinds", "managed", "names", "own", "refs", "root"),
        *("sizes", "tensors", "weights"),
    )

    def __init__(self, root: nn.Module) -> None:
        modules = list(root.modules())
        self.root = weakref.ref(root, functools.partial(_forget, id(root)))
        self.refs = [*map(weakref.ref, modules)]
        dicts: list[dict[str, Any]] = [*map(_dict_of, modules)]
        self.keys = [(*_READ, *(name for name in own if name not in _NOT_READ)) for own in dicts]
        self.getters = [operator.itemgetter(*keys) for keys in self.keys]
        tables = [own[name] for name in _TABLES for own in dicts]
        self.names = [*_flat(tables)]
        sizes = [*map(len, tables)]
        self.sizes = [*map(len, dicts), *sizes]
        values = [own[key] for own, keys in zip(dicts, self.keys, strict=True) for key in keys]
        self.kinds = [*map(type, values)]
        self.own = len(values)
        self.weights = slice(self.own, self.own + sum(sizes[: len(modules)]))
        self.children = self.own + sum(sizes[: 2 * len(modules)])
        self.ids = [*map(id, _flat(map(values_of, tables[2 * len(modules) :])))]
        inside = {id(m) for wrapper in modules if _tracks_phases(wrapper) for m in wrapper.modules()}
        self.managed = [id(module) in inside for module in modules]
        self.tensors: list[int] = []
        self.holds: list[tuple[int, str]] = []
        places = [(module, key) for module, keys in zip(modules, self.keys, strict=True) for key in keys]
        for place, ((module, key), value) in enumerate(zip(places, values, strict=True)):
            label = f"attribute '{key}' of {type(module).__name__}"
            if isinstance(value, torch.Tensor):
                self.tensors.append(place)
            inner = key not in _READ and id(module) not in inside and _has_entries(value)
            if inner or isinstance(value, (torch.Tensor, torch.Generator)):
                self.holds.append((place, label))


_WRAPPERS = ("torch.distributed.fsdp.", "torch.distributed._composable.", "torch.nn.parallel.")


def _tracks_phases(module: nn.Module) -> bool:
    return any(base.__module__.startswith(_WRAPPERS) for base in type(module).__mro__)


_scans: dict[int, _Scan] = {}


def _forget(key: int, ref: Any) -> None:
    scan = _scans.get(key)
    if scan is not None and scan.root is ref:
        del _scans[key]


def snapshot(root: nn.Module) -> Snapshot:
    """What the modules below `root` hold now, itself first."""
    scan = _scans.get(id(root))
    if scan is not None and scan.root() is root:
        with contextlib.suppress(LookupError):
            return Snapshot(scan)
    scan = _scans[id(root)] = _Scan(root)
    return Snapshot(scan)


class Captures:
    """Everything that a function was seen to reach at one moment.

    Attributes:
        modules: Every module reached, submodules included.
        snapshots: What they hold, for each module at which the search began.
        contents: What the containers and configs hold that are attributes of modules.
        generators: `torch.Generator`s in closures and globals, and held by modules.
        tensors: Tensors that closure cells hold, in order.
        whole: How many of the modules belong to the function itself, not merely to its closure; they come first.
    """

    whole = 0

    @classmethod
    def of(cls, module: nn.Module, whole: bool) -> Captures:
        """What one module reaches: the short way, since most regions are modules."""
        found = cls.__new__(cls)
        found.template = module
        seen = snapshot(module)
        found.modules, found.snapshots = seen.modules, [seen]
        found.generators, found.contents, found.tensors, found._names, found._others = [], [], [], [], []
        if seen.scan.holds:
            found._look_into(seen, {})
        if whole:
            found.whole = len(found.modules)
        return found

    def __init__(self, fn: Callable[..., Any], modules: Sequence[torch.nn.Module] = ()) -> None:
        self.modules: Sequence[torch.nn.Module] = ()
        self.snapshots: list[Snapshot] = []
        self.contents: list[Contents] = []
        self.generators: list[torch.Generator] = []
        self.tensors: list[torch.Tensor] = []
        self._names: list[str] = []
        self._others: list[tuple[str, torch.Tensor]] = []
        seen: dict[int, Any] = {}
        self.template = self._function(fn, seen)
        for module in modules:
            self._module(module, seen)

    @property
    def empty(self) -> bool:
        """Whether nothing was found that a replay depends on."""
        return not (self.modules or self.generators or self._others or isinstance(self.template, (Held, _Partial)))

    def keep(self) -> list[Undo]:
        """What makes the modules hold again what they hold now; for `undo`."""
        return [one for place in (*self.snapshots, *self.contents) for one in place.keep()]

    def buffers(self) -> Iterator[dict[str, torch.Tensor | None]]:
        """The dictionaries in which the modules hold their buffers."""
        for module in self.modules:
            if module._buffers:  # pyright: ignore[reportPrivateUsage]
                yield module._buffers  # pyright: ignore[reportPrivateUsage]

    def others(self, cells: bool) -> bool:
        """Whether there are tensors that belong to no module (`cells`: those in closure cells counted)."""
        return bool(self._others or (cells and self.tensors))

    def mutable(self, cells: bool) -> Iterator[Captured]:
        """Buffers, and tensors without grad in closures (`cells`)."""
        for i, module in enumerate(self.modules):
            if module._buffers:  # pyright: ignore[reportPrivateUsage]
                for name, buffer in module._buffers.items():  # pyright: ignore[reportPrivateUsage]
                    if buffer is not None and not buffer.requires_grad:
                        yield Captured("buffer", name, type(module), buffer, i < self.whole, module.training)
        for name, tensor in self._named(cells):
            if not wants_grad(tensor):
                yield Captured("", name, type(None), tensor, True, True)

    def parameters(self, cells: bool) -> Iterator[Captured]:
        """Parameters, and other tensors that require grad: in buffers, in closures (`cells`)."""
        yield from parameters_of(self.modules, self.whole)
        yield from self.with_grad(cells)

    def with_grad(self, cells: bool) -> Iterator[Captured]:
        """Tensors that require grad and are no parameters of a module: in buffers, in closures (`cells`)."""
        for i, module in enumerate(self.modules):
            if module._buffers:  # pyright: ignore[reportPrivateUsage]
                for name, buffer in module._buffers.items():  # pyright: ignore[reportPrivateUsage]
                    if buffer is not None and buffer.requires_grad:
                        yield Captured("buffer", name, type(module), buffer, i < self.whole, module.training)
        for name, tensor in self._named(cells):
            if wants_grad(tensor):
                yield Captured("", name, type(None), tensor, True, True)

    def _named(self, cells: bool) -> Iterator[tuple[str, torch.Tensor]]:
        if cells:
            yield from zip(self._names, self.tensors, strict=True)
        yield from self._others

    # --- looking --------------------------------------------------------------------------------------------------

    def _function(self, fn: Any, seen: dict[int, Any]) -> Any:
        """Looks at `fn`; returns what `rebuild` makes it from."""
        if isinstance(fn, torch.nn.Module):
            self._module(fn, seen)
            self.whole = len(self.modules)
            return fn
        if isinstance(fn, types.FunctionType):
            return self._closure(fn, seen)
        if isinstance(fn, functools.partial):
            for i, value in enumerate((*fn.args, *fn.keywords.values())):
                self._value(f"argument {i} of a partial", value, seen)
            inner = self._function(fn.func, seen)
            return _Partial(inner, fn.args, fn.keywords) if isinstance(inner, Held) else fn
        if isinstance(fn, types.MethodType) and isinstance(fn.__self__, torch.nn.Module):
            self._module(fn.__self__, seen)
            self.whole = len(self.modules)
        elif isinstance(fn, types.MethodType):
            self._object(fn.__self__, seen)
        elif not isinstance(fn, _SIMPLE):
            self._object(fn, seen)
        return fn

    def _closure(self, fn: types.FunctionType, seen: dict[int, Any]) -> Any:
        code = _look(fn.__code__, fn.__globals__)
        for name in code.names:
            self._value(f"global '{name}'", fn.__globals__.get(name), seen)
        if fn.__defaults__ or fn.__kwdefaults__:
            for value in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()):
                self._value(f"a default of {fn.__name__}", value, seen)
        if not fn.__closure__:
            return fn
        cells: list[Any] = []
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__, strict=True):
            value = _contents(cell)
            kind = type(value)
            if name in code.writes:
                cells.append(cell)
            elif kind in _PLAIN:
                cells.append(value)
            elif isinstance(value, torch.Tensor):
                cells.append(Hole(len(self.tensors)))
                self.tensors.append(value)
                self._names.append(f"closure variable '{name}'")
            elif kind is types.FunctionType and id(value) not in seen:
                seen[id(value)] = value
                cells.append(self._closure(value, seen))
            else:
                self._value(f"closure variable '{name}'", value, seen)
                cells.append(value)
        return Held(fn, cells)

    def _object(self, value: Any, seen: dict[int, Any]) -> None:
        for name, attribute in getattr(value, "__dict__", {}).items():
            self._value(f"attribute '{name}'", attribute, seen)

    def _value(self, name: str, value: Any, seen: dict[int, Any]) -> None:
        if isinstance(value, torch.nn.Module):
            self._module(value, seen)
        elif isinstance(value, torch.Tensor):
            if id(value) not in seen:
                seen[id(value)] = value
                self._others.append((name, value))
        elif type(value) is torch.Generator:
            self.generators.append(value)
        elif type(value) in _FOLLOWED and id(value) not in seen:
            seen[id(value)] = value
            if type(value) is types.MethodType and not isinstance(value.__self__, torch.nn.Module):
                self._object(value.__self__, seen)
            for element in _parts(value):
                if type(element) not in _PLAIN:
                    self._value(name, element, seen)

    def _module(self, root: torch.nn.Module, seen: dict[int, Any]) -> None:
        if id(root) in seen:
            return
        found = snapshot(root)
        self.snapshots.append(found)
        modules = found.modules
        if self.modules:
            modules = [*self.modules, *(module for module in modules if id(module) not in seen)]
        self.modules = modules
        seen.update(zip(map(id, modules), modules, strict=True))
        self._look_into(found, seen)

    def _look_into(self, found: Snapshot, seen: dict[int, Any]) -> None:
        """Looks at the attributes of modules: tensors, generators, and what containers and configs hold."""
        for place, name in found.scan.holds:
            value = found.then[place]
            if isinstance(value, (torch.Tensor, torch.Generator)):
                self._value(name, value, seen)
            elif id(value) not in seen:
                seen[id(value)] = value
                inside = Contents(name, value)
                self.contents.append(inside)
                for one in inside.then:
                    if isinstance(one, (torch.Tensor, torch.Generator)) and type(one) is not nn.Parameter:
                        self._value(name, one, seen)


def parameters_of(modules: Sequence[torch.nn.Module], whole: int) -> Iterator[Captured]:
    """The parameters of modules, of which the first `whole` belong to the function itself."""
    for i, module in enumerate(modules):
        for name, parameter in module._parameters.items():  # pyright: ignore[reportPrivateUsage]
            if parameter is not None:
                yield Captured("parameter", name, type(module), parameter, i < whole, module.training)


_FOLLOWED = frozenset({list, tuple, dict, types.FunctionType, types.MethodType, functools.partial})


def _parts(value: Any) -> Iterator[Any]:
    """What a container or function that a closure holds holds in turn."""
    if isinstance(value, types.FunctionType):
        yield from map(_contents, value.__closure__ or ())
    elif isinstance(value, types.MethodType):
        yield value.__self__
        yield value.__func__
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    else:
        yield from (value.values() if isinstance(value, dict) else value)


_SIMPLE = (types.BuiltinFunctionType, type)


class _Partial(NamedTuple):
    """A `functools.partial` around a function that was taken apart."""

    inner: Held
    args: tuple[Any, ...]
    keywords: dict[str, Any]


def rebuild(template: Any, tensors: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """The function that `Captures.template` was made of, with `tensors` in the cells that held tensors."""
    if isinstance(template, Held):
        return template.function(tensors)
    if isinstance(template, _Partial):
        return functools.partial(template.inner.function(tensors), *template.args, **template.keywords)
    return template


def reach(
    fn: Callable[..., Any], modules: Sequence[torch.nn.Module] = (), owner: nn.Module | None = None
) -> Captures | None:
    """What `fn` and the `modules` passed to it reach; None where that is nothing.

    Args:
        fn: The function.
        modules: Modules among its arguments.
        owner: The module that is known to be all that it reaches, though not all of it may be read.
    """
    if not modules:
        if owner is not None:
            return Captures.of(owner, whole=False)
        if isinstance(fn, nn.Module):
            return Captures.of(fn, whole=True)
        if isinstance(fn, types.FunctionType):
            simple = not (fn.__closure__ or fn.__defaults__ or fn.__kwdefaults__)
            if simple and not _look(fn.__code__, fn.__globals__).names:
                return None
        elif isinstance(fn, _SIMPLE):
            return None
    found = Captures(fn if owner is None else owner, modules)
    if owner is not None:
        found.whole = 0
    return None if found.empty else found
