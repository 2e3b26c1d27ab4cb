"""What a replay finds as the forward found it: generators, settings, and the modules that the function reaches.

A `ReplayState` is taken when a region is entered. Modules are found as the forward found them (`_Reached`): what each
holds is read then and is compared, object by object, when the replay begins. What differs is put back, and after the
replay the present. Design note 015 says what that costs and what is left alone.

Invariants: what all threads share (generators, buffers, `training` flags) is put back under one lock, and the present
is restored whatever happens in the replay. What was not touched is not copied, but for buffers of up to `SMALL` bytes.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import operator
import threading
from collections.abc import Callable, Generator, Sequence
from itertools import chain
from typing import Any

import torch
from torch.nn.parameter import Parameter, UninitializedBuffer, UninitializedParameter
from torch.utils.weak import WeakIdKeyDictionary

from .. import _torch, errors
from .._torch import leads_to, version_of
from .._torch.tensors import apart
from ..state import CPU_RNG, GENERATORS, Ambient, TensorState, copies, elsewhere, same, undrawn
from .captures import MANY, Captured, Captures, Contents, Snapshot, parameters_of, snapshot, undo

SMALL = 64 * 1024
"""Buffers up to this many bytes are copied on every call, larger ones only where a call has changed them before."""


_cpu_state = torch.default_generator.get_state


@contextlib.contextmanager
def _under(target: list[Any], present: list[Any]) -> Generator[None]:
    """Makes `target` the present settings. Dispatch modes only grow: one that watches the backward goes on watching."""
    flags, functions, dispatch = _torch.split_settings(target)
    old_flags, old_functions, old_dispatch = _torch.split_settings(present)
    missing = [mode for mode in dispatch if not any(mode is other for other in old_dispatch)]
    torch.autocast_increment_nesting()
    try:
        _torch.set_flags(flags)
        _torch.set_function_modes(functions)
        for mode in missing:
            _torch.push_dispatch_mode(mode)
        yield
    finally:
        for _ in missing:
            _torch.pop_dispatch_mode()
        _torch.set_function_modes(old_functions)
        _torch.set_flags(old_flags)
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


def _is_waited_for(tensor: torch.Tensor) -> bool:
    """Whether the running backward has yet to compute the gradient of `tensor`, so that a region may have used it."""
    return tensor.requires_grad and tensor.is_leaf and leads_to(tensor)


def _small(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.nbytes <= SMALL


_LAZY = frozenset({UninitializedParameter, UninitializedBuffer})


_ORDINARY = frozenset({Parameter})


_quiet: Any = WeakIdKeyDictionary()  # large buffers that a call in training mode has left unchanged


class _Hooks:
    """The hooks of modules that a forward found and left; who registers one for a forward alone takes it away then."""

    def __init__(self, every: Sequence[dict[Any, Any]]) -> None:
        self._kept = [(hooks, dict(hooks)) for hooks in every]

    def settle(self) -> None:
        """After the forward: what is gone already has removed itself and is not to run again."""
        if self._kept:
            self._kept = [(hooks, {key: then[key] for key in then if key in hooks}) for hooks, then in self._kept]

    @property
    def differ(self) -> bool:
        """Whether one of them is gone."""
        return any(key not in hooks for hooks, then in self._kept for key in then)

    def restore(self, stack: contextlib.ExitStack) -> None:
        """Registers those again that are gone, in their order."""
        for hooks, then in self._kept:
            gone = [key for key in then if key not in hooks]
            if gone:
                every = {**then, **hooks}
                hooks.clear()
                hooks.update(every)
                stack.callback(_remove, hooks, gone)


def _remove(hooks: dict[Any, Any], keys: Sequence[Any]) -> None:
    for key in keys:
        hooks.pop(key, None)


_is_there = functools.partial(operator.is_not, None)


_same, _hooked, _is_large = operator.methodcaller("same"), operator.attrgetter("hooked"), operator.attrgetter("large")


_NOTHING_COPIED: tuple[TensorState, list[torch.Tensor]] = TensorState(), []


def _held(seen: Captured) -> torch.Tensor:
    """What may be held of a tensor: itself, where its module holds it anyway."""
    return seen.tensor if seen.kind else apart(seen.tensor)


def _changed_container(region: str, seen: Contents) -> str:
    """Text for a container that is too large to be put back."""
    return (
        f"{seen.label}, which {region} may read, has changed since the forward: {seen.then[0]} entries then, "
        f"{seen.now()[0]} now. Containers with more than {MANY} entries are not copied; of a list or dict that has "
        "grown the replay finds the old part, but what was removed, or put into a set, cannot be undone.\n"
        "  Change it after backward; or pass what the region reads of it as an argument."
    )


class _Reached:
    """The tensors and modules that a region's function reaches, as the forward found them.

    Attributes:
        weights: The modules' parameters. They are held as they are: the region's function holds them anyway.
        versions: Their versions.
    """

    __slots__ = (
        *("_copies", "_hooks", "_large", "_late", "_made_late", "_modules", "_ordinary", "_places", "_snapshots"),
        *("_state", "_watched", "_whole", "versions", "weights"),
    )

    def __init__(self, reach: Captures, cells: bool) -> None:
        self._modules = reach.modules
        self._whole = reach.whole
        self._snapshots = reach.snapshots
        self._places: Sequence[Snapshot | Contents] = [*reach.snapshots, *reach.contents]
        self._large = [*filter(_is_large, reach.contents)]
        self._made_late = False  # whether the forward gives memory to parameters of a LazyModule
        self._hooks: _Hooks | None = None
        if any(map(_hooked, reach.snapshots)):
            self._hooks = _Hooks([hooks for found in reach.snapshots for hooks in found.hooks()])
        weights: list[Any] = [*filter(_is_there, chain.from_iterable(map(Snapshot.weights, reach.snapshots)))]
        self._ordinary = _ORDINARY.issuperset(map(type, weights))
        if not self._ordinary:
            lazy = [p for p in weights if type(p) in _LAZY]
            self._made_late = bool(lazy)
            weights = [p for p in weights if type(p) not in _LAZY]
        self.weights: list[torch.Tensor] = weights
        self.versions = [*map(version_of, weights)]
        self._watched: list[tuple[Captured, int]] = []
        self._late: list[torch.Tensor] = []  # buffers of a LazyModule, to which its first call gives memory
        self._state, self._copies = _NOTHING_COPIED
        if reach.others(cells) or any(map(Snapshot.buffers, reach.snapshots)):
            self._watch(reach, cells)

    def _watch(self, reach: Captures, cells: bool) -> None:
        copied: list[torch.Tensor] = []
        for seen in reach.mutable(cells):
            if type(seen.tensor) in _LAZY:
                self._late.append(seen.tensor)
                continue
            if seen.training and (_small(seen.tensor) or seen.tensor not in _quiet):
                copied.append(seen.tensor)
            self._watched.append((seen, version_of(seen.tensor)))
        self._watched.extend(
            (seen._replace(tensor=_held(seen)), version_of(seen.tensor))
            for seen in reach.with_grad(cells)
            if type(seen.tensor) not in _LAZY
        )
        if copied:
            self._state = TensorState(*copied)
            self._copies = self._state.capture()

    def settle(self) -> None:
        if self._hooks is not None:
            self._hooks.settle()
        if self._copies:
            self._settle_copies()
        if self._late:  # they had no values before the forward; the replay may do to them what it likes
            self._state = TensorState(*self._state.tensors, *(tensor.detach() for tensor in self._late))
            self._copies = [*self._copies, *copies(self._state.tensors[len(self._copies) :])]
            self._late = []
        if self._watched and any(not seen.kind for seen, _ in self._watched):
            self._watched = [(seen._replace(tensor=_held(seen)), version) for seen, version in self._watched]
        if self._made_late:  # a LazyModule is not what it was before its first call
            again = [snapshot(found.modules[0]) for found in self._snapshots]
            self._places = [*again, *self._places[len(again) :]]
            self._snapshots = again
        for found in self._snapshots:
            if found.scan.tensors or not self._ordinary:
                found.set_aside(not self._ordinary)
        if not self._ordinary:
            self.weights = [p if type(p) is Parameter else apart(p) for p in self.weights]

    def _settle_copies(self) -> None:
        changed = {id(seen.tensor) for seen, version in self._watched if version_of(seen.tensor) != version}
        own = {id(seen.tensor) for seen, _ in self._watched if seen.kind}
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        restored: set[int] = set()
        for tensor, copy in zip(self._state.tensors, self._copies, strict=True):
            if _small(tensor) or id(tensor) in changed:
                kept.append((tensor if id(tensor) in own else tensor.detach(), copy))
                restored.add(id(tensor))
            else:
                _quiet[tensor] = None
        self._state, self._copies = TensorState(*[t for t, _ in kept]), [c for _, c in kept]
        self._watched = [(seen, version) for seen, version in self._watched if id(seen.tensor) not in restored]

    def check(self, region: str) -> None:
        for place in self._large:
            if place.lost():
                raise errors.ChangedError(_changed_container(region, place))
        watched = self._watched
        if [*map(version_of, self.weights)] != self.versions:
            places = {_torch.storage_id(seen.tensor): seen for seen in parameters_of(self._modules, self._whole)}
            some = zip(self.weights, self.versions, strict=True)
            found = ((places.get(_torch.storage_id(tensor)), tensor, version) for tensor, version in some)
            watched = [(seen._replace(tensor=tensor), version) for seen, tensor, version in found if seen] + watched
        for seen, version in watched:
            now = version_of(seen.tensor)
            if now != version and (seen.surely or _is_waited_for(seen.tensor)):
                raise errors.ChangedError(
                    f"{seen.label()}, which {region} reads, has been changed in place since the forward (version "
                    f"{version} then, {now} now): its replay would compute with other values than its forward.\n"
                    "  Change it after backward (optimizer.step() after loss.backward()). If the region itself "
                    "changes it, say so: recompute(fn, state=[torch_recompute.state.TensorState(tensor)])."
                )

    def same(self) -> bool:
        """Whether the modules hold what they held, and neither hooks nor buffers have to be put back."""
        if self._copies or (self._hooks is not None and self._hooks.differ):
            return False
        return all(map(_same, self._places))

    def undo(self) -> None:
        """After a replay for which nothing had to be put back: undoes what it wrote."""
        for place in self._places:
            if not place.same():
                with _exclusive:
                    place.restore()

    def restore(self, stack: contextlib.ExitStack) -> None:
        """Makes the modules, their hooks and buffers as the forward found them, until the stack is left."""
        for place in self._places:
            stack.callback(undo, place.keep())
            place.restore()
        if self._copies:
            stack.callback(self._state.restore, self._state.capture())
            self._state.restore(self._copies)
        if self._hooks is not None:
            self._hooks.restore(stack)

    def restored(self) -> frozenset[int]:
        return frozenset(map(_torch.storage_id, self._state.tensors))


class ReplayState:
    """What one call of a region may depend on besides its arguments, taken when it is entered.

    Args:
        reach: What the region's function reaches.
        ambients: Consumables: random generators and the user's `state=`.
        cells: Whether to watch the tensors in closure cells; not where a store keeps copies of them.
    """

    __slots__ = ("_consumed", "_context", "_cpu", "_reached", "_settings")

    def __init__(self, reach: Captures | None, ambients: Sequence[Ambient], cells: bool) -> None:
        self._settings = _torch.settings()
        self._context = contextvars.copy_context()
        self._cpu: torch.Tensor | None = None  # every region's first ambient, taken without the detour
        if ambients and ambients[0] is CPU_RNG:
            self._cpu = _cpu_state()
            ambients = ambients[1:]
        self._consumed: Sequence[tuple[Ambient, Any]] = ()
        if ambients:
            self._consumed = [(ambient, ambient.capture()) for ambient in ambients]
        self._reached = _Reached(reach, cells) if reach is not None and (reach.modules or reach.others(cells)) else None

    def settle(self) -> None:
        """After the forward: forgets what it did not touch, and takes the kernels that it chose for good."""
        _torch.update_kernels(self._settings)
        if self._cpu is not None and _torch.same_bytes(self._cpu, _cpu_state()):
            self._cpu = None
        if self._consumed:
            self._consumed = [
                (ambient, before)
                for ambient, before in self._consumed
                if type(ambient) not in GENERATORS or not same(before, ambient.capture())
            ]
        if self._reached is not None:
            self._reached.settle()

    def forget(self) -> None:
        """After a forward that has failed: lets go of everything."""
        self._cpu = None
        self._consumed = ()
        self._reached = None

    def versions(self) -> dict[int, int]:
        """The version of each parameter that the modules of the function hold, by its identity."""
        reached = self._reached
        return {} if reached is None else dict(zip(map(id, reached.weights), reached.versions, strict=True))

    def restored(self) -> frozenset[int]:
        """The storages of the tensors that have other contents during a replay than outside of it."""
        return _NOTHING if self._reached is None else self._reached.restored()

    def check(self, region: str) -> None:
        """Before a replay: raises if a weight or buffer that the function reaches has been changed since."""
        if self._reached is not None:
            self._reached.check(region)

    def run(self, region: str, fn: Callable[..., Any], *args: Any) -> None:
        """Calls `fn(*args)` with the world as it was taken, and puts the present one back afterwards."""
        present = _torch.settings()
        reached = self._reached
        context = self._context.copy()  # a context cannot be entered twice, and replays may nest
        consumed = self._consumed if self._cpu is None else [(CPU_RNG, self._cpu), *self._consumed]
        if not consumed and present == self._settings and (reached is None or reached.same()):
            try:
                context.run(fn, *args)
            finally:
                if reached is not None:
                    reached.undo()
            return
        with _exclusive, contextlib.ExitStack() as stack:
            for ambient, before in consumed:
                if elsewhere(ambient, before):
                    stack.enter_context(undrawn(ambient, region))
                    continue
                stack.callback(ambient.restore, ambient.capture())
                ambient.restore(before)
            if reached is not None:
                reached.restore(stack)
            if present != self._settings:
                stack.enter_context(_under(self._settings, present))
            context.run(fn, *args)


_exclusive = threading.RLock()
"""Held by a replay that puts something back which all threads share: generators, buffers, `training` flags."""


_NOTHING: frozenset[int] = frozenset()
