"""What Python code can change outside of its arguments: attributes of modules, closures, globals, generators.

A snapshot remembers what lies in each of these places, containers and plain objects included, and can say what has
come to lie there instead, and put it back. Rebinding a name to something equal is no change: a module that keeps its
last result keeps the same one. Tensors are compared by what they hold; what is written into a tensor is seen by the
recorder, not here.

Invariants. No user code is called: containers are copied by their base types, objects looked at through `__dict__`.
"""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from .. import _compat
from ..state import DEFAULT, NumpyRng, PythonRng
from .comparing import print_of

DEPTH = 4
"""How deep to look into objects that modules hold."""

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_PLAIN = (int, float, complex, bool, str, bytes, type(None))


class _Held(NamedTuple):
    """One place: what is there, by name, and how to write it."""

    label: str
    container: Any
    then: dict[Any, Any]


class Places:
    """What lies around a region.

    Args:
        modules: The modules, with what to call each.
        functions: Functions whose closures count.
        scopes: Code and globals of functions that run in the region.
    """

    def __init__(
        self,
        modules: Iterable[tuple[nn.Module, str]],
        functions: Iterable[Any] = (),
        scopes: Iterable[tuple[types.CodeType, dict[str, Any]]] = (),
    ) -> None:
        self._held: list[_Held] = []
        self._seen: dict[int, Any] = {}
        for module, name in modules:
            self._module(module, name)
        for function in functions:
            self._function(function)
        for code, scope in scopes:
            names = [name for name in code.co_names if name in scope and not isinstance(scope[name], _FIXED)]
            then = {name: scope[name] for name in names}
            self._held.append(_Held("global", scope, then))
            for name, value in then.items():
                self._look(f"global '{name}'", value, 1)

    def changes(self) -> list[str]:
        """What is not as it was: a label each."""
        found: dict[str, None] = {}
        for label, container, then in self._held:
            now = _contents(container)
            if label == "global":
                now = {name: now[name] for name in then if name in now}
            for key in [*then, *(key for key in now if key not in then)]:
                if key not in then or key not in now or not _same(then[key], now[key], DEPTH):
                    found[f"{label} '{key}'" if label == "global" else label.format(key=key)] = None
        return list(found)

    def restore(self) -> None:
        """Puts everything back."""
        for label, container, then in self._held:
            if label == "global":
                for name, value in then.items():
                    if container.get(name) is not value:
                        container[name] = value
            elif not _identical(_contents(container), then):
                _write(container, then)

    # --- looking --------------------------------------------------------------------------------------------------

    def _module(self, module: nn.Module, name: str) -> None:
        self._seen[id(module)] = module
        own = vars(module)
        where = f"of {name} ({type(module).__name__})" if name else f"of {type(module).__name__}"
        self._held.append(_Held("attribute '{key}' " + where, _Some(own), dict(_contents(_Some(own)))))
        for key, value in own.items():
            if key not in _OF_EVERY_MODULE:
                self._look(f"attribute '{key}' {where}", value, 1)

    def _function(self, function: Any) -> None:
        if id(function) in self._seen:
            return
        self._seen[id(function)] = function
        if isinstance(function, types.MethodType):
            self._look("the object of a bound method", function.__self__, 0)
            self._function(function.__func__)
        elif isinstance(function, types.FunctionType):
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                self._held.append(_Held(f"closure variable '{name}'", cell, dict(_contents(cell))))
                for value in _contents(cell).values():
                    self._look(f"closure variable '{name}'", value, 1)
        elif hasattr(function, "func"):
            self._function(function.func)
        elif not isinstance(function, nn.Module):
            self._look("the region's function", function, 0)

    def _look(self, label: str, value: Any, depth: int) -> None:
        if depth > DEPTH or id(value) in self._seen or isinstance(value, (*_PLAIN, torch.Tensor, nn.Module)):
            return
        if isinstance(value, (types.FunctionType, types.MethodType)):
            self._function(value)
            return
        container: Any = value
        if not isinstance(value, (list, dict, set, tuple)):
            if not _is_plain_object(value):
                return
            container = vars(value)
        self._seen[id(value)] = value
        then = _contents(container)
        if not isinstance(value, tuple):
            self._held.append(_Held(label.replace("{", "{{").replace("}", "}}"), container, dict(then)))
        for inner in then.values():
            self._look(label, inner, depth + 1)


_FIXED = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type, nn.Module)


class _Some:
    """A module's namespace, but for what every module has."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.namespace = namespace


def _contents(container: Any) -> dict[Any, Any]:
    """What is in a container, by key or place."""
    if isinstance(container, _Some):
        return {key: value for key, value in container.namespace.items() if key not in _OF_EVERY_MODULE}
    if isinstance(container, types.CellType):
        try:
            return {"": container.cell_contents}
        except ValueError:
            return {}
    if isinstance(container, dict):
        return dict(dict.items(cast("dict[Any, Any]", container)))
    if isinstance(container, set):
        return {id(value): value for value in set.__iter__(cast("set[Any]", container))}
    kind: Any = list if isinstance(container, list) else tuple
    return dict(enumerate(kind.__iter__(container)))


def _write(container: Any, then: dict[Any, Any]) -> None:
    if isinstance(container, _Some):
        for key in _contents(container).keys() - then.keys():
            del container.namespace[key]
        container.namespace.update(then)
    elif isinstance(container, types.CellType):
        if then:
            container.cell_contents = then[""]
        else:
            del container.cell_contents
    elif isinstance(container, dict):
        dict.clear(container)
        dict.update(container, then)
    elif isinstance(container, list):
        container[:] = then.values()
    elif isinstance(container, set):
        set.clear(container)
        set.update(container, then.values())


def _identical(a: dict[Any, Any], b: dict[Any, Any]) -> bool:
    return a.keys() == b.keys() and all(a[key] is b[key] for key in a)


def _is_plain_object(value: Any) -> bool:
    """An object of the user's, or of a library that is neither torch nor Python's own."""
    top = type(value).__module__.partition(".")[0]
    known = top in ("torch", "torch_recompute", "builtins", "numpy") or top in sys.stdlib_module_names
    return not known and isinstance(getattr(value, "__dict__", None), dict)


def _same(then: Any, now: Any, depth: int) -> bool:
    """Whether two values are equal; True also where nothing can be said."""
    if then is now or depth == 0:
        return True
    if type(then) is not type(now):
        return False
    if isinstance(then, _PLAIN):
        return then == now or (then != then and now != now)
    if isinstance(then, torch.Tensor):
        if (then.shape, then.dtype, then.device) != (now.shape, now.dtype, now.device):
            return False
        a, b = print_of(then), print_of(now)
        return a is None or b is None or a.same(b)
    if isinstance(then, (list, tuple, dict)):
        a, b = _contents(then), _contents(now)
    elif isinstance(then, set):
        return then == now
    elif _is_plain_object(then):
        a, b = vars(then), vars(now)
    else:
        return True
    return a.keys() == b.keys() and all(_same(a[key], b[key], depth - 1) for key in a)


# --- generators ---------------------------------------------------------------------------------------------------


class Generators:
    """The states of all global generators: Python's, NumPy's where it is in use, PyTorch's.

    Args:
        others: `torch.Generator`s that the model is known to use.
    """

    def __init__(self, others: Iterable[torch.Generator] = ()) -> None:
        self._others = [(generator, generator.get_state()) for generator in others]
        self._states = [(name, put, get()) for name, get, put in _generators()]

    def advanced(self) -> list[str]:
        """Which are not in the state they were in."""
        present = {name: get() for name, get, _ in _generators()}
        return [name for name, _, then in self._states if not _same_state(then, present[name])]

    def restore(self) -> None:
        """Puts them back."""
        for _, put, then in self._states:
            put(then)
        for generator, then in self._others:
            generator.set_state(then)


def _generators() -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], Any]]]:
    yield "random", random.getstate, PythonRng().restore
    if "numpy.random" in sys.modules:
        yield "numpy", NumpyRng().capture, NumpyRng().restore
    for ambient in DEFAULT:
        yield type(ambient).__name__, ambient.capture, ambient.restore


def _same_state(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return _compat.same_bytes(a, b)
    if isinstance(a, tuple):
        return all(_same_state(x, y) for x, y in zip(cast("tuple[Any, ...]", a), b, strict=True))
    if hasattr(a, "tobytes"):
        return a.tobytes() == b.tobytes()
    return bool(a == b)
