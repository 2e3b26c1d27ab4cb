"""Everything that a function reaches: modules with all below them, generators, and tensors that belong to no module.

What looks at a whole model (`saved_activations`, `verify`, the doctor) calls it on its real weights and buffers and
leaves them as they were, so it has to know all of them. A region does not: it pays for what it runs
(`engine/modules.py`). Looking calls no user code.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from .._torch.tensors import wants_grad
from ..engine.exchange import CONTAINERS, entries_of, put
from ..engine.taken import ATOMS, EMPTY, MANY, content_of, globals_of, inside_of, is_config

_TABLES = ("_parameters", "_buffers", "_modules")
_NOT_ATTRIBUTES = frozenset(nn.Module().__dict__) - {"training"}


class Reached(NamedTuple):
    """A tensor that a function reaches.

    Attributes:
        kind: "parameter" or "buffer" of `owner`; "" for a tensor whose `name` says all.
        name: Its name there.
        owner: The class of the module that it belongs to.
        tensor: The tensor.
    """

    kind: str
    name: str
    owner: type
    tensor: torch.Tensor

    def label(self) -> str:
        """Returns its name, for errors."""
        return f"{self.kind} '{self.name}' of {self.owner.__name__}" if self.kind else self.name


class Reach:
    """Finds everything that a function and the modules passed to it reach.

    Attributes:
        modules: Every module, submodules included, each once.
        generators: The generators in closures and globals, and those that modules hold.
    """

    def __init__(self, fn: Callable[..., Any], modules: Sequence[nn.Module] = ()) -> None:
        self.modules: list[nn.Module] = []
        self.generators: list[torch.Generator] = []
        self._others: list[tuple[str, torch.Tensor]] = []
        self._containers: list[Any] = []
        self._seen: dict[int, Any] = {}
        self._look("", fn, called=True)
        for module in modules:
            self._look("", module)

    # --- what was found ---------------------------------------------------------------------------------------------

    def buffers(self) -> Iterator[dict[str, torch.Tensor | None]]:
        """The dictionaries in which the modules hold their buffers."""
        yield from filter(None, (vars(module)["_buffers"] for module in self.modules))

    def parameters(self) -> Iterator[Reached]:
        """Parameters, and other tensors that require grad: in buffers, in closures."""
        for module in self.modules:
            for name, parameter in vars(module)["_parameters"].items():
                if parameter is not None:
                    yield Reached("parameter", name, type(module), parameter)
        yield from self.beside_parameters(grad=True)

    def beside_parameters(self, *, grad: bool) -> Iterator[Reached]:
        """Tensors that are no parameters, and require grad or do not: in buffers, in closures."""
        for module in self.modules:
            for name, buffer in vars(module)["_buffers"].items():
                if buffer is not None and buffer.requires_grad == grad:
                    yield Reached("buffer", name, type(module), buffer)
        for name, tensor in self._others:
            if wants_grad(tensor) == grad:
                yield Reached("", name, type(None), tensor)

    def keep(self) -> list[tuple[Any, Any, bool]]:
        """Returns what the modules hold, and the containers that are their attributes, for `put_back`."""
        own = [vars(module) for module in self.modules]
        tables = [held[name] for held in own for name in _TABLES]
        small = [inside for inside in map(inside_of, self._containers) if len(inside) <= MANY]
        ordered = [(held, entries_of(held), True) for held in (*tables, *small)]
        return [*((held, entries_of(held), False) for held in own), *ordered]

    # --- looking ----------------------------------------------------------------------------------------------------

    def _look(self, name: str, value: Any, called: bool = False) -> None:
        kind = type(value)
        if (kind in ATOMS and kind is not types.FunctionType) or id(value) in self._seen:
            return
        if isinstance(value, nn.Module):
            self._module(value)
            return
        self._seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            self._others.append((name, value))
        elif isinstance(value, torch.Generator):
            self.generators.append(value)
        elif kind is types.FunctionType:
            self._function(name, value)
        elif isinstance(value, functools.partial):
            for i, one in enumerate((*value.args, *value.keywords.values())):
                self._look(name or f"argument {i} of a partial", one)
            self._look(name, value.func, called)
        elif kind is types.MethodType:
            self._look(name, value.__self__, called=True)
            self._look(name, value.__func__)
        elif isinstance(value, (list, tuple, dict)) and not called:
            for one in value.values() if isinstance(value, dict) else value:
                self._look(name, one)
        elif called:
            for attribute, one in getattr(value, "__dict__", {}).items():
                if type(one) not in ATOMS:
                    self._look(f"attribute '{attribute}'", one)

    def _function(self, name: str, fn: types.FunctionType) -> None:
        for key in globals_of(fn):
            value = fn.__globals__.get(key)
            if type(value) not in ATOMS:
                self._look(name or f"global '{key}'", value)
        for value in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()):
            self._look(name or f"a default of {fn.__name__}", value)
        for key, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            value = content_of(cell)
            if value is not EMPTY:
                self._look(name or f"closure variable '{key}'", value)

    def _module(self, root: nn.Module) -> None:
        new = [module for module in root.modules() if id(module) not in self._seen]
        self._seen.update(zip(map(id, new), new, strict=True))
        self.modules += new
        for module in new:
            for name, value in vars(module).items():
                if name not in _NOT_ATTRIBUTES and type(value) not in ATOMS:
                    self._attribute(f"attribute '{name}' of {type(module).__name__}", value)

    def _attribute(self, label: str, value: Any) -> None:
        if isinstance(value, (torch.Tensor, torch.Generator)):
            self._look(label, value)
        elif (isinstance(value, CONTAINERS) or is_config(value)) and id(value) not in self._seen:
            self._seen[id(value)] = value
            self._containers.append(value)
            inside = inside_of(value)
            for one in inside.values() if isinstance(inside, dict) else inside:
                if isinstance(one, (torch.Tensor, torch.Generator)) and type(one) is not nn.Parameter:
                    self._look(label, one)


def put_back(kept: Sequence[tuple[Any, Any, bool]]) -> None:
    """Has modules and containers hold what `Reach.keep` noted."""
    for held, then, ordered in kept:
        put(held, then, ordered)
