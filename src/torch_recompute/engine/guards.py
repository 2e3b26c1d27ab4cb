"""The guards of a region call: what its function may depend on besides its arguments, one class for each.

    settle()         the forward is over: lets go of what it did not touch
    enter(exchange)  a replay begins: puts back what the forward found; returns what undoes that, None for nothing

`modules.py` and `generators.py` have two of them. `World` holds them all, and runs a replay among them.

Dispatch and function modes of the forward are entered again, if they are gone: but not those that do something when
they are entered and left. One that has closed its file is over.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import ExitStack
from threading import get_ident
from typing import Any

import torch

from .. import _torch
from .._torch.modes import ends_silently
from ..state import Ambient
from .exchange import CONTAINERS, OWNED, READING, Exchange, woken
from .generators import Generators, Undo
from .modules import Modules
from .taken import PLAIN, Taking, is_config, open_, written_in_c


class Settings:
    """Autocast, kernels, precision, default dtype, and the modes that are entered."""

    __slots__ = ("then",)

    def __init__(self) -> None:
        self.then = _torch.settings()

    def enter(self, exchange: Exchange) -> Undo | None:
        """Makes the settings of the forward the present ones."""
        present = _torch.settings()
        if present == self.then:
            return None
        flags, functions, dispatch = _torch.split_settings(self.then)
        old_flags, old_functions, old_dispatch = _torch.split_settings(present)
        missing = [m for m in dispatch if not any(m is other for other in old_dispatch) and ends_silently(m)]
        functions = tuple([m for m in functions if any(m is other for other in old_functions) or ends_silently(m)])
        torch.autocast_increment_nesting()
        _torch.set_flags(flags)
        _torch.set_function_modes(functions)
        for mode in missing:
            _torch.push_dispatch_mode(mode)

        def undo() -> None:
            for _ in missing:
                _torch.pop_dispatch_mode()
            _torch.set_function_modes(old_functions)
            _torch.set_flags(old_flags)
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()

        return undo


MOST = 256
"""The most entries of a context variable that is taken: torch keeps its configuration in some."""
_atoms: set[type[Any]] = {*PLAIN}  # classes of context variables in which nothing can be left


class Variables:
    """The context variables of the forward. A container or plain object in one is taken as an argument is."""

    __slots__ = ("_context", "_taken", "_taking")

    def __init__(self, taking: Taking) -> None:
        self._context = context = contextvars.copy_context()
        self._taken: dict[contextvars.ContextVar[Any], Any] = {}
        if not _atoms.issuperset(map(type, context.values())):
            self._take(context, taking)

    def _take(self, context: contextvars.Context, taking: Taking) -> None:
        for variable, value in context.items():
            if _is_collector(value):
                self._taken[variable] = taking.take(value, "a context variable")
        if self._taken:
            self._context = contextvars.Context()
            for variable in context.keys() - self._taken.keys():
                self._context.run(variable.set, context[variable])
        else:
            _atoms.update(filter(_is_atom, map(type, context.values())))

    def open(self, exchange: Exchange) -> contextvars.Context:
        """The context for a replay: one cannot be entered twice, and replays may nest."""
        context = self._context.copy()
        for variable, taken in self._taken.items():
            context.run(variable.set, open_(taken, exchange))
        return context


def _is_collector(value: Any) -> bool:
    """Whether a context variable holds what results may be left in: a container or a plain object of few entries."""
    nest = type(value) in CONTAINERS or (isinstance(value, CONTAINERS) and _torch.is_container(value))
    if type(value) in _atoms or not (nest or is_config(value)):
        return False
    left, todo = MOST, [value if isinstance(value, CONTAINERS) else vars(value)]
    while todo and left >= 0:
        one = todo.pop()
        left -= len(one)
        entries = one.values() if isinstance(one, dict) else one
        todo += [entry for entry in entries if isinstance(entry, (*CONTAINERS, tuple))] if left >= 0 else []
    return left >= 0


def _is_atom(kind: type[Any]) -> bool:
    return not issubclass(kind, CONTAINERS) and written_in_c(kind)


class World:
    """All that a call of a region may depend on besides its arguments, noted when it is entered.

    Attributes:
        variables: The context variables.
        modules: What the region's own modules held; None where it can have none.
        generators: The random generators.
    """

    __slots__ = ("_settings", "generators", "modules", "variables")

    def __init__(self, taking: Taking, ambients: tuple[Ambient, ...]) -> None:
        self._settings = Settings()
        self.variables = Variables(taking)
        self.generators = Generators(taking.region, ambients)
        self.modules: Modules | None = None

    def settle(self) -> None:
        """After the forward: forgets what it did not touch."""
        for place, get in _torch.KERNEL_ORDERS:  # chosen for good
            self._settings.then[place] = get()
        self.generators.settle()
        if self.modules is not None:
            self.modules.settle()

    def forget(self) -> None:
        """Drops everything: there will be no replay."""
        self.modules = None
        self.generators = Generators("", ())

    def rewind(self) -> None:
        """Makes generators, buffers and modules what they were before a forward that has failed and will run again."""
        self.generators.rewind()
        if self.modules is not None:
            self.modules.rewind()

    def run(self, exchange: Exchange, fn: Callable[..., Any], *args: Any) -> None:
        """Calls `fn(*args)` in the world of the forward, then makes it again what it is now."""
        assert exchange.context is not None
        modules = self.modules
        reading = READING.setdefault(get_ident(), [])
        reading.append(exchange)
        with ExitStack() as stack:
            stack.callback(woken)
            stack.callback(reading.remove, exchange)
            if modules is not None:
                exchange.modules = modules.seen
            if OWNED and modules is not None:  # by now; what another thread has put into a module is not ours to read
                exchange.places = modules.open(exchange)
            if exchange.wanted:
                stack.callback(exchange.leave)
                exchange.enter()
                exchange.versions = () if modules is None else modules.versions()
            if modules is not None:
                stack.callback(modules.undo, exchange.versions, exchange.places)
            for guard in (self._settings, self.generators):
                if (undo := guard.enter(exchange)) is not None:
                    stack.callback(undo)
            exchange.context.run(fn, *args)
