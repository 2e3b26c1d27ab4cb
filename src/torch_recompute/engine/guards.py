"""The guards of a region call: what its function may depend on besides its arguments, one class for each.

    settle()         the forward is over: lets go of what it did not touch
    enter(exchange)  a replay begins: puts back what the forward found; returns what undoes that, None for nothing

One of them, `Modules`, is in `modules.py`. `World` holds them all, and runs the replay inside them.

Dispatch and function modes of the forward are entered again, if they are gone: but not those that do something when
they are entered and left. One that has closed a file when it was left cannot be entered again.

Generators belong to all threads. A replay sets those that its forward has drawn from to where that began, and back when
it ends. While another thread's replay does so, or where several threads call regions that draw, that would disturb the
other: then the replay draws from generators of its own (`OwnGenerators`), which begin where the forward did, and the
process's are left alone. No replay waits for another one: the two may have to meet in a collective.

Rejected: one lock around every replay that draws. Threads that met in a region waited for each other.
"""

from __future__ import annotations

import contextvars
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import _torch
from .._torch.modes import ends_silently
from ..state import CPU_RNG, GENERATORS, Ambient, GeneratorRng, InGraph, elsewhere, same, stand_in, undrawn
from ..state.tape import thread
from .exchange import CONTAINERS, OWNED, READING, WAITING, Exchange, woken
from .modules import Modules, OpenedContents
from .taken import PLAIN, Taking, forget, is_config, open_, written_in_c

Undo = Callable[[], None]


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


_turn = threading.RLock()  # of the replay that has set the process's generators; nobody waits for it
_drawing: dict[int, weakref.ref[threading.Thread]] = {}
"""The threads that have called regions which draw random numbers, by their identity."""
_undrawn = b""
"""The state in which a region last found the CPU's generator and left it: regions in a row hold this one object."""
_cpu_state, _set_cpu_state = torch.default_generator.get_state, torch.default_generator.set_state


class Generators:
    """Random generators and the user's `state=`, as they were when the forward began.

    One that stands where it did when the forward ends may have been drawn from all the same, and put back
    (`torch.random.fork_rng`). So its state stays noted too. A replay sets it if the generator stands elsewhere by then,
    unless other threads draw from it.

    Attributes:
        ambients: All of them.
    """

    __slots__ = ("_cpu", "_region", "_still", "_then", "_undrawn", "ambients")

    def __init__(self, region: str, ambients: tuple[Ambient, ...]) -> None:
        self._region, self.ambients = region, ambients
        self._cpu: torch.Tensor | None = None  # every region's first, taken without the detour
        if ambients and ambients[0] is CPU_RNG and stand_in.now is None:
            self._cpu, ambients = _cpu_state(), ambients[1:]
        self._undrawn: bytes | None = None  # its state, where the forward has left it as it was
        self._still: list[tuple[Ambient, Any]] = []
        self._then: list[tuple[Ambient, Any]] = []
        if ambients:
            self._then = [(ambient, ambient.capture()) for ambient in ambients]

    def add(self, generators: Iterable[torch.Generator]) -> None:
        """Adds generators that the region's function reaches, or a module that it has just called."""
        for generator in generators:
            if not any(getattr(ambient, "generator", None) is generator for ambient in self.ambients):
                ambient = GeneratorRng(generator)
                self.ambients = (*self.ambients, ambient)
                self._then.append((ambient, ambient.capture()))

    def settle(self) -> None:
        """After the forward: notes which of them stand where they did."""
        global _undrawn
        if self._cpu is not None and _torch.same_bytes(self._cpu, _cpu_state()):
            if not _torch.holds_bytes(self._cpu, _undrawn):
                _undrawn = _torch.bytes_of(self._cpu)
            self._cpu, self._undrawn = None, _undrawn
        if self._then:
            each, self._then = self._then, []
            for ambient, then in each:
                if type(ambient) not in GENERATORS or not same(then, ambient.capture()):
                    self._then.append((ambient, then))
                elif type(then) is not InGraph:
                    self._still.append((ambient, then))
        if (self._cpu is not None or self._then) and _torch.graph_task_id() == -1:
            me = threading.current_thread()
            if id(me) not in _drawing:
                _drawing[id(me)] = weakref.ref(me, partial(forget, _drawing, id(me)))

    @property
    def drawn(self) -> list[tuple[Ambient, Any]]:
        """Those that have moved, with the states in which a replay must find them."""
        return self._then if self._cpu is None else [(CPU_RNG, self._cpu), *self._then]

    def rewind(self) -> None:
        """Sets them to where the forward began."""
        for ambient, then in self.drawn:
            ambient.restore(then)

    def enter(self, exchange: Exchange) -> Undo | None:
        """Has the replay draw what the forward drew."""
        if not self._then and not self._still:
            cpu = self._moved() if self._cpu is None else self._cpu
            if cpu is None:
                return None
            several = len(_drawing) > 1 and _several_threads_draw()
            if stand_in.now is None and not several and _turn.acquire(blocking=False):  # as below, for most
                now = _cpu_state()
                _set_cpu_state(cpu)

                def undo() -> None:
                    _set_cpu_state(now)
                    _turn.release()

                return undo
        with ExitStack() as stack:
            elsewhere_, others = [], []
            for ambient, then in self.drawn:
                (elsewhere_ if elsewhere(ambient, then) else others).append((ambient, then))
            for ambient, _ in elsewhere_:
                stack.enter_context(undrawn(ambient, self._region))
            shared = [one for one in others if type(one[0]) in GENERATORS and _can_stand_in(one[1])]
            left = [one for one in self._still if not same(one[1], one[0].capture())]
            if (cpu := self._moved()) is not None:
                left.append((CPU_RNG, cpu))
            if (shared or left) and (_several_threads_draw() or not _take_turn(stack)):
                if shared:
                    from ..state.own_generators import OwnGenerators

                    stack.enter_context(OwnGenerators(shared))
                others, left = [one for one in others if one not in shared], []
            for ambient, then in (*others, *left):
                stack.callback(ambient.restore, ambient.capture())
                ambient.restore(then)
            return stack.pop_all().close
        return None

    def _moved(self) -> torch.Tensor | None:
        """The state that the forward found and left, if the CPU's generator stands elsewhere by now."""
        if self._undrawn is None:
            return None
        now = _cpu_state() if stand_in.now is None else CPU_RNG.capture()
        return None if _torch.holds_bytes(now, self._undrawn) else _torch.write_bytes(now, self._undrawn)


def _can_stand_in(state: Any) -> bool:
    """Whether a generator of our own can begin with a state; not in a graph, nor where a device shows bytes alone."""
    return type(state) is not InGraph and not (type(state) is list and state and isinstance(state[0], torch.Tensor))


def _several_threads_draw() -> bool:
    threads = [ref() for ref in [*_drawing.values()]]  # a copy: others may begin to draw
    return sum(thread is not None and thread.is_alive() for thread in threads) > 1


def _take_turn(stack: ExitStack) -> bool:
    """Takes the turn at the process's generators, unless another thread has it."""
    if not _turn.acquire(blocking=False):
        return False
    stack.callback(_turn.release)
    return True


class Opened(NamedTuple):
    """The contents of the region's own modules that a replay finds, and its context variables."""

    contents: OpenedContents | None
    context: contextvars.Context


class World:
    """Holds the guards of a region call, and runs a replay in the world that they noted.

    Args:
        taking: What has taken the region's arguments and function.
        ambients: Generators, and the user's `state=`.
        owner: The module that the function belongs to; None for a function that calls modules, or none.
        passed: Whether modules are among the arguments.
        outer: The modules of the region around.
        rng: Whether generators in arguments, closures and modules are looked after.

    Attributes:
        generators: The random generators.
        modules: What the region's own modules held; None where it can have none.
        watches: Whether modules are noted as the function calls them.
    """

    __slots__ = ("_settings", "_variables", "generators", "modules", "watches")

    def __init__(
        self,
        taking: Taking,
        ambients: tuple[Ambient, ...],
        owner: nn.Module | None,
        passed: bool,
        outer: Modules | None,
        rng: bool,
    ) -> None:
        self._settings = Settings()
        self._variables = Variables(taking)
        self.generators = generators = Generators(taking.region, ambients)
        self.modules: Modules | None = None
        self.watches = passed or (owner is None and taking.may_call_modules)
        if owner is not None or self.watches:
            roots = [] if owner is None else [(owner, True)]
            roots += zip(taking.modules, itertools.repeat(thread.calls_hidden))
            self.modules = Modules(taking, outer, generators.add if rng else None, roots)
        if rng and taking.generators:
            generators.add(taking.generators)

    def settle(self) -> None:
        """After the forward: forgets what it did not touch."""
        for place, get in _torch.KERNEL_ORDERS:  # chosen for good
            self._settings.then[place] = get()
        self.generators.settle()
        if self.modules is not None:
            self.modules = self.modules.settled()

    def forget(self) -> None:
        """Drops everything: there will be no replay."""
        self.modules = None
        self.generators = Generators("", ())

    def rewind(self) -> None:
        """Makes generators, buffers and modules what they were before a forward that has failed and will run again."""
        self.generators.rewind()
        if self.modules is not None:
            self.modules.rewind()

    def open(self, exchange: Exchange) -> Opened:
        """Has an exchange put back modules and context variables; before arguments, which a module may hold as well."""
        contents = None if self.modules is None else self.modules.open(exchange)
        return Opened(contents, self._variables.open(exchange))

    def run(self, exchange: Exchange, opened: Opened, fn: Callable[..., Any], *args: Any) -> None:
        """Calls `fn(*args)` in the world of the forward, then makes it again what it is now."""
        modules, (contents, context) = self.modules, opened
        reading = READING.setdefault(threading.get_ident(), [])
        reading.append(exchange)
        try:
            with ExitStack() as stack:
                if modules is not None and OWNED:  # by now; what another thread has put into one is not ours to read
                    contents = modules.open(exchange)
                if exchange.wanted or exchange.values:
                    stack.callback(exchange.leave)
                    exchange.enter()
                if modules is not None and contents is not None:
                    stack.callback(modules.undo, contents, modules.versions() if exchange.wanted else None)
                for guard in (self._settings, self.generators):
                    if (undo := guard.enter(exchange)) is not None:
                        stack.callback(undo)
                context.run(fn, *args)
        finally:
            reading.remove(exchange)
            if WAITING:
                woken()
