"""The guard of random generators: a replay draws what its forward drew.

Generators belong to all threads. A replay sets those that its forward has drawn from to where that began, and back when
it ends. While another thread's replay does so, or where several threads call regions that draw, that would disturb the
other: then the replay draws from generators of its own (`OwnGenerators`), which begin where the forward did, and the
process's are left alone. No replay waits for another one: the two may have to meet in a collective.

Rejected: one lock around every replay that draws. Threads that met in a region waited for each other.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch

from .. import _torch
from ..state import CPU_RNG, GENERATORS, Ambient, GeneratorRng, InGraph, elsewhere, same, stand_in, undrawn
from ..state.own_generators import OwnGenerators
from .exchange import Exchange

Undo = Callable[[], None]

_turn = threading.RLock()  # of the replay that has set the process's generators; nobody waits for it
_drawing: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""The threads that have called regions which draw random numbers."""
_cpu_state, _set_cpu_state = torch.default_generator.get_state, torch.default_generator.set_state


class Generators:
    """Random generators and the user's `state=`, as they were when the forward began.

    Attributes:
        ambients: All of them.
    """

    __slots__ = ("_cpu", "_region", "_then", "ambients")

    def __init__(self, region: str, ambients: tuple[Ambient, ...]) -> None:
        self._region, self.ambients = region, ambients
        self._cpu: torch.Tensor | None = None  # every region's first, taken without the detour
        if ambients and ambients[0] is CPU_RNG and stand_in.now is None:
            self._cpu, ambients = _cpu_state(), ambients[1:]
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
        """Forgets those that the forward has not drawn from."""
        if self._cpu is not None and _torch.same_bytes(self._cpu, _cpu_state()):
            self._cpu = None
        if self._then:
            self._then = [
                (ambient, then)
                for ambient, then in self._then
                if type(ambient) not in GENERATORS or not same(then, ambient.capture())
            ]
        if (self._cpu is not None or self._then) and _torch.graph_task_id() == -1:
            _drawing.add(threading.current_thread())

    @property
    def drawn(self) -> list[tuple[Ambient, Any]]:
        """Those that a replay sets, with their states."""
        return self._then if self._cpu is None else [(CPU_RNG, self._cpu), *self._then]

    def rewind(self) -> None:
        """Sets them to where the forward began."""
        for ambient, then in self.drawn:
            ambient.restore(then)

    def enter(self, exchange: Exchange) -> Undo | None:
        """Has the replay draw what the forward drew."""
        if not self._then:
            if self._cpu is None:
                return None
            several = len(_drawing) > 1 and _several_threads_draw()
            if stand_in.now is None and not several and _turn.acquire(blocking=False):  # as below, for most
                now = _cpu_state()
                _set_cpu_state(self._cpu)

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
            if shared and (_several_threads_draw() or not _take_turn(stack)):
                stack.enter_context(OwnGenerators(shared))
                others = [one for one in others if one not in shared]
            for ambient, then in others:
                stack.callback(ambient.restore, ambient.capture())
                ambient.restore(then)
            return stack.pop_all().close
        return None


def _can_stand_in(state: Any) -> bool:
    """Whether a generator of our own can begin with a state; not in a graph, nor where a device shows bytes alone."""
    return type(state) is not InGraph and not (type(state) is list and state and isinstance(state[0], torch.Tensor))


def _several_threads_draw() -> bool:
    return len(_drawing) > 1 and sum(thread.is_alive() for thread in _drawing) > 1


def _take_turn(stack: ExitStack) -> bool:
    """Takes the turn at the process's generators, unless another thread has it."""
    if not _turn.acquire(blocking=False):
        return False
    stack.callback(_turn.release)
    return True
