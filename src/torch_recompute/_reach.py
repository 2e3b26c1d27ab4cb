"""What a function reaches besides its arguments: closure cells, modules, tensors, generators.

A replay runs the function again, so whatever it reads besides its arguments has to be there and unchanged. Python
lets us see most of it: a closure's cells, the object of a bound method, the parts of a `functools.partial`, the
globals a function names. What cannot be seen (attributes of plain objects below the first level, globals used by
functions that the function calls) is not guarded, and the manual says so.

Cells are special: `for layer in layers: x = recompute(lambda x: layer(x))(x)` rebinds one cell, so every replay would
run the last layer, and a tensor deleted by the caller would be missing. So a closure is taken apart: the contents its
cells had in forward are kept, its tensors like arguments of the region, and a replay runs the same code over fresh
cells; the caller's own cells are never written. A cell that the function itself writes (`nonlocal`) is its own state
and left alone.

Invariant: looking never calls user code (no `getattr` on user objects beyond `__dict__`).
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ._tree import wants_grad


class _Code(NamedTuple):
    """What is asked of a code object, found once: the globals it names and the cells it writes."""

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


class Seen(NamedTuple):
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


class Reach:
    """Everything that a function was seen to reach at one moment.

    Attributes:
        modules: Every module reached, submodules included.
        generators: `torch.Generator`s in closures and globals.
        tensors: Tensors that closure cells hold, in order.
    """

    __slots__ = ("_names", "_others", "_whole", "generators", "modules", "tensors", "template")

    def __init__(self, fn: Callable[..., Any], modules: Sequence[torch.nn.Module] = ()) -> None:
        self.modules: list[torch.nn.Module] = []
        self.generators: list[torch.Generator] = []
        self.tensors: list[torch.Tensor] = []
        self._names: list[str] = []
        self._others: list[tuple[str, torch.Tensor]] = []
        self._whole = 0  # modules[:_whole] belong to fn itself, not merely to its closure
        seen: dict[int, Any] = {}
        self.template = self._function(fn, seen)
        for module in modules:
            self._module(module, seen)

    @property
    def empty(self) -> bool:
        """Whether nothing was found that a replay depends on."""
        return not (self.modules or self.generators or self._others or isinstance(self.template, (Held, _Partial)))

    def buffers(self) -> Iterator[dict[str, torch.Tensor | None]]:
        """The dictionaries in which the modules hold their buffers."""
        for module in self.modules:
            if module._buffers:  # pyright: ignore[reportPrivateUsage]
                yield module._buffers  # pyright: ignore[reportPrivateUsage]

    def idle(self, cells: bool) -> bool:
        """Whether there is no module or tensor to watch (`cells`: those in closure cells counted)."""
        return not (self.modules or self._others or (cells and self.tensors))

    def mutable(self, cells: bool) -> Iterator[Seen]:
        """Buffers, and tensors without grad in closures (`cells`)."""
        for i, module in enumerate(self.modules):
            if module._buffers:  # pyright: ignore[reportPrivateUsage]
                for name, buffer in module._buffers.items():  # pyright: ignore[reportPrivateUsage]
                    if buffer is not None and not buffer.requires_grad:
                        yield Seen("buffer", name, type(module), buffer, i < self._whole, module.training)
        for name, tensor in self._named(cells):
            if not wants_grad(tensor):
                yield Seen("", name, type(None), tensor, True, True)

    def parameters(self, cells: bool) -> Iterator[Seen]:
        """Parameters, and other tensors that require grad: in buffers, in closures (`cells`)."""
        for i, module in enumerate(self.modules):
            for name, parameter in module._parameters.items():  # pyright: ignore[reportPrivateUsage]
                if parameter is not None:
                    yield Seen("parameter", name, type(module), parameter, i < self._whole, module.training)
            if module._buffers:  # pyright: ignore[reportPrivateUsage]
                for name, buffer in module._buffers.items():  # pyright: ignore[reportPrivateUsage]
                    if buffer is not None and buffer.requires_grad:
                        yield Seen("buffer", name, type(module), buffer, i < self._whole, module.training)
        for name, tensor in self._named(cells):
            if wants_grad(tensor):
                yield Seen("", name, type(None), tensor, True, True)

    def _named(self, cells: bool) -> Iterator[tuple[str, torch.Tensor]]:
        if cells:
            yield from zip(self._names, self.tensors, strict=True)
        yield from self._others

    # --- looking --------------------------------------------------------------------------------------------------

    def _function(self, fn: Any, seen: dict[int, Any]) -> Any:
        """Looks at `fn`; returns what `rebuild` makes it from."""
        if isinstance(fn, types.FunctionType):
            return self._closure(fn, seen)
        if isinstance(fn, functools.partial):
            for i, value in enumerate((*fn.args, *fn.keywords.values())):
                self._value(f"argument {i} of a partial", value, seen)
            inner = self._function(fn.func, seen)
            return _Partial(inner, fn.args, fn.keywords) if isinstance(inner, Held) else fn
        if isinstance(fn, torch.nn.Module):
            self._module(fn, seen)
            self._whole = len(self.modules)
        elif isinstance(fn, types.MethodType) and isinstance(fn.__self__, torch.nn.Module):
            self._module(fn.__self__, seen)
            self._whole = len(self.modules)
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

    def _module(self, module: torch.nn.Module, seen: dict[int, Any]) -> None:
        if id(module) in seen:
            return
        seen[id(module)] = module
        self.modules.append(module)
        for name, value in module.__dict__.items():
            if type(value) is torch.Tensor:
                self._value(f"attribute '{name}' of {type(module).__name__}", value, seen)
        for child in module._modules.values():  # pyright: ignore[reportPrivateUsage]
            if child is not None:
                self._module(child, seen)


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
    """The function that `Reach.template` was made of, with `tensors` in the cells that held tensors."""
    if isinstance(template, Held):
        return template.function(tensors)
    if isinstance(template, _Partial):
        return functools.partial(template.inner.function(tensors), *template.args, **template.keywords)
    return template


def reach(fn: Callable[..., Any], modules: Sequence[torch.nn.Module] = ()) -> Reach | None:
    """What `fn` and the `modules` passed to it reach; None where that is nothing."""
    if not modules:
        if isinstance(fn, types.FunctionType):
            simple = not (fn.__closure__ or fn.__defaults__ or fn.__kwdefaults__)
            if simple and not _look(fn.__code__, fn.__globals__).names:
                return None
        elif isinstance(fn, _SIMPLE):
            return None
    found = Reach(fn, modules)
    return None if found.empty else found
