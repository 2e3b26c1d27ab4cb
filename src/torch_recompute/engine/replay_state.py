"""The state that a replay finds as the forward found it: generators, settings, modules that the function reaches.

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
import itertools
import operator
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
from torch.nn.parameter import Parameter, UninitializedBuffer, UninitializedParameter
from torch.utils.weak import WeakIdKeyDictionary

from .. import _torch, errors
from .._torch import leads_to, version_of, version_of_dict
from .._torch.tensors import apart
from ..state import CPU_RNG, GENERATORS, Alike, Ambient, copied, elsewhere, exchange, paired, same, undrawn
from .arguments import CONTAINERS, PLAIN, Call, is_context, written_in_c
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


_Tables = dict[int, tuple[dict[Any, Any], dict[Any, Any]]]  # of hooks: by identity each table, and what it held


def _hooks_of(snapshots: Sequence[Snapshot]) -> _Tables:
    return {id(table): (table, dict(table)) for found in snapshots for table in found.hooks()}


def _put_hooks(snapshots: Sequence[Snapshot], held: _Tables) -> _Tables:
    """Gives modules the forward hooks that they had, and no others; returns those that they have now."""
    now = _hooks_of(snapshots)
    for key, (table, _) in {**now, **held}.items():
        then = held[key][1] if key in held else {}
        if table.keys() != then.keys():
            table.clear()
            table.update(then)
    return now


_is_there = functools.partial(operator.is_not, None)


_same, _is_large = operator.methodcaller("same"), operator.attrgetter("large")


def _held(seen: Captured) -> torch.Tensor:
    """Returns what may be held of a tensor: itself, where its module holds it anyway."""
    return seen.tensor if seen.kind else apart(seen.tensor)


def _changed_container(region: str, seen: Contents) -> str:
    """Text for a container that is too large to be put back."""
    return (
        f"{seen.label}, which {region} may read, has changed since the forward: {seen.then[0]} entries then, "
        f"{seen.now()[0]} now. Containers with more than {MANY} entries are not copied; of a list or dict that has "
        "grown the replay finds the old part, but what was removed, or put into a set, cannot be undone.\n"
        "  Change it after backward; or pass what the region reads of it as an argument."
    )


def _tidy(place: Snapshot | Contents) -> None:
    """Puts back what a replay has written that began with everything there as the forward found it."""
    if not place.same():
        with _exclusive:
            place.restore()


class _Reached:
    """The tensors and modules that a region's function reaches, as the forward found them.

    Attributes:
        weights: The modules' parameters. They are held as they are: the region's function holds them anyway.
        versions: Their versions.
        places: What the modules hold, and the containers and configs that are their attributes.
        unsettled: Whether the end of the forward has anything to forget or to take.
        dicts: The dictionaries of all modules.
        dict_versions: Their versions. Where there is nothing else to compare or to watch, they say whether anything has
            changed; else None.
        copies: The tensors that have other contents during a replay than outside of it, with copies of them.
    """

    __slots__ = (
        *("_doubtful", "_hooks", "_large", "_late", "_made_late", "_modules", "_ordinary", "_snapshots", "_watched"),
        *("_whole", "copies", "dict_versions", "dicts", "places", "unsettled", "versions", "weights"),
    )

    def __init__(self, reach: Captures, cells: bool) -> None:
        self._modules = reach.modules
        self._whole = reach.whole
        self._snapshots = reach.snapshots
        self.places: Sequence[Snapshot | Contents] = [*reach.snapshots, *reach.contents]
        self._large = [*filter(_is_large, reach.contents)]
        self._made_late = False  # whether the forward gives memory to parameters of a LazyModule
        self._hooks: _Tables = {}
        weights: list[Any] = []
        dicts: list[dict[Any, Any]] = []
        versions: list[int] = []
        buffers = hooked = unsettled = False
        for found in reach.snapshots:
            scan = found.scan
            weights += filter(_is_there, found.inside[: scan.weights])
            dicts += found.dicts
            versions += found.versions
            buffers, hooked = buffers or scan.buffers, hooked or found.hooked
            if found.own is not scan.seen[1]:
                inside = itertools.chain(*map(found.own.__getitem__, scan.tuples))
                unsettled = unsettled or bool(scan.tensors) or torch.Tensor in map(type, inside)
        if hooked:
            self._hooks = _hooks_of(reach.snapshots)
        self._ordinary = _ORDINARY.issuperset(map(type, weights))
        if not self._ordinary:
            lazy = [p for p in weights if type(p) in _LAZY]
            self._made_late = bool(lazy)
            weights = [p for p in weights if type(p) not in _LAZY]
        self.weights: list[torch.Tensor] = weights
        self.versions = [*map(version_of, weights)]
        self._watched: list[tuple[Captured, int]] = []
        self._late: list[torch.Tensor] = []  # buffers to which the first call gives memory, as of a LazyModule
        self.copies: Alike = ()
        self._doubtful = False  # whether the end of the forward decides about copies
        others = bool(reach.others) or (cells and bool(reach.tensors))
        if others or buffers:
            self._watch(reach, cells)
        for inside in reach.contents:
            unsettled = unsettled or torch.Tensor in map(type, inside.then)
        self.unsettled = others or buffers or hooked or unsettled or not self._ordinary
        self.dicts, self.dict_versions = dicts, None if self.unsettled or reach.contents else versions

    def _watch(self, reach: Captures, cells: bool) -> None:
        some: list[torch.Tensor] = []
        for seen in reach.beside_parameters(grad=False, cells=cells):
            if type(seen.tensor) in _LAZY or not seen.tensor.numel():
                self._late.append(seen.tensor)
                continue
            if seen.training and not seen.tensor.is_inference():
                small = _small(seen.tensor)
                if small or seen.tensor not in _quiet:
                    some.append(seen.tensor)
                    if small and seen.kind:
                        continue  # it may change as it likes
                    self._doubtful = True
            # One made in inference mode has no version, and outside of that mode nothing changes it.
            self._watched += [] if seen.tensor.is_inference() else [(seen, version_of(seen.tensor))]
        self._watched.extend(
            (seen._replace(tensor=_held(seen)), version_of(seen.tensor))
            for seen in reach.beside_parameters(grad=True, cells=cells)
            if type(seen.tensor) not in _LAZY
        )
        if some:
            self.copies = copied(some)

    def settle(self) -> None:
        # What is gone has removed itself, and is not to run again.
        self._hooks = {key: (t, {h: then[h] for h in then if h in t}) for key, (t, then) in self._hooks.items()}
        if self._doubtful:
            self._settle_copies()
        late, self._late = [tensor.detach() for tensor in self._late if tensor.numel()], []
        if late:  # they had no values before the forward; the replay may do to them what it likes
            self.copies = [*self.copies, *copied(late)]
        if self._watched and any(not seen.kind for seen, _ in self._watched):
            self._watched = [(seen._replace(tensor=_held(seen)), version) for seen, version in self._watched]
        if self._made_late:  # a LazyModule is not what it was before its first call
            again = [snapshot(found.modules[0]) for found in self._snapshots]
            self.places = [*again, *self.places[len(again) :]]
            self._snapshots = again
        loose = [place for place in self.places if isinstance(place, Contents) and place.is_apart()]
        for found in self._snapshots:
            if not (self._ordinary and found.own is found.scan.seen[1]):
                found.set_aside(not self._ordinary, {id(place.value) for place in loose})
        self.places = [place for place in self.places if place not in loose]
        if not self._ordinary:
            self.weights = [p if type(p) is Parameter else apart(p) for p in self.weights]

    def _settle_copies(self) -> None:
        watched = {id(seen.tensor): version for seen, version in self._watched}
        own = {id(held) for found in self._snapshots for held in found.inside[found.scan.weights : found.scan.children]}
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        restored: set[int] = set()
        for tensor, copy in itertools.chain.from_iterable(itertools.starmap(zip, self.copies)):
            if _small(tensor) or version_of(tensor) != watched.get(id(tensor)):
                kept.append((tensor if id(tensor) in own else tensor.detach(), copy))
                restored.add(id(tensor))
            else:
                _quiet[tensor] = None
        self.copies = paired([tensor for tensor, _ in kept], [copy for _, copy in kept])
        self._watched = [(seen, version) for seen, version in self._watched if id(seen.tensor) not in restored]

    def check(self, region: str) -> None:
        """Before a replay: raises if a weight, buffer or large container has been changed since."""
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
                    "  Change it after backward (optimizer.step() after loss.backward()). What changes it in the region"
                    " itself, as Embedding(max_norm=) does, goes before the region; or let it be a buffer."
                )

    def same(self) -> bool:
        """Whether the modules hold what they held, and neither hooks nor buffers have to be put back."""
        if self.copies or _hooks_of(self._snapshots) != self._hooks:
            return False
        return all(map(_same, self.places))

    def restore(self, stack: contextlib.ExitStack) -> None:
        """Makes the modules, their hooks and buffers as the forward found them, until the stack is left."""
        for place in self.places:
            if place.same():
                stack.callback(_tidy, place)
            else:
                stack.callback(undo, place.keep())
                place.restore()
        if self.copies:
            exchange(self.copies, stack)
        stack.callback(_put_hooks, self._snapshots, _put_hooks(self._snapshots, self._hooks))

    def changed(self) -> bool:
        """Whether a weight, or a buffer that nobody copied, has been changed in place."""
        some = {*map(id, self._copied())}
        watched = ((s.tensor, version) for s, version in self._watched if id(s.tensor) not in some)
        return [*map(version_of, self.weights)] != self.versions or any(version_of(t) != then for t, then in watched)

    def tidy(self) -> None:
        """Puts back what a replay has written, which began with everything as the forward found it."""
        for place in self.places:
            _tidy(place)

    def restored(self) -> frozenset[int]:
        return frozenset(map(_torch.storage_id, self._copied()))

    def _copied(self) -> Iterator[torch.Tensor]:
        return itertools.chain.from_iterable(tensors for tensors, _ in self.copies)


class ReplayState:
    """The state that a region call may depend on besides its arguments, captured when it is entered.

    Args:
        reach: What the region's function reaches.
        ambients: Consumables: random generators and the user's `state=`.
        cells: Whether to watch the tensors in closure cells; not where a store keeps copies of them.

    Attributes:
        reached: What was found of the modules and tensors that the function reaches; None without any.
        restored: The storages of the tensors that have other contents during a replay than outside of it.
    """

    __slots__ = ("_consumed", "_context", "_cpu", "_settings", "_variables", "reached", "restored")

    def __init__(self, reach: Captures | None, ambients: Sequence[Ambient], cells: bool) -> None:
        self._settings = _torch.settings()
        self._context = context = contextvars.copy_context()
        self._variables: tuple[Sequence[contextvars.ContextVar[Any]], Call] | None = None
        if not _atoms.issuperset(map(type, context.values())):
            apart = {variable: value for variable, value in context.items() if _is_collector(value)}
            if apart:
                self._variables = tuple(apart), Call(tuple(apart.values()), {})
                self._context = contextvars.Context()
                for variable in context.keys() - apart.keys():
                    self._context.run(variable.set, context[variable])
            else:
                _atoms.update(filter(_is_atom, map(type, context.values())))
        self._cpu: torch.Tensor | None = None  # every region's first ambient, taken without the detour
        if ambients and ambients[0] is CPU_RNG:
            self._cpu = _cpu_state()
            ambients = ambients[1:]
        self._consumed: Sequence[tuple[Ambient, Any]] = ()
        if ambients:
            self._consumed = [(ambient, ambient.capture()) for ambient in ambients]
        self.reached: _Reached | None = None
        self.restored = _NOTHING
        if reach is not None and (reach.modules or reach.others or (cells and reach.tensors)):
            self.reached = reached = _Reached(reach, cells)
            if reached.copies:
                self.restored = reached.restored()

    def settle(self) -> None:
        """After the forward: forgets what it did not touch, and takes the kernels that it chose for good."""
        try:
            for place, get in _torch.KERNEL_ORDERS:
                self._settings[place] = get()
            if self._cpu is not None and _torch.same_bytes(self._cpu, _cpu_state()):
                self._cpu = None
            if self._consumed:
                self._consumed = [
                    (ambient, before)
                    for ambient, before in self._consumed
                    if type(ambient) not in GENERATORS or not same(before, ambient.capture())
                ]
            if self.reached is not None and self.reached.unsettled:
                self.reached.settle()
                self.restored = self.reached.restored()
        except BaseException:  # no memory for a copy: what is held may lead back to the graph
            self.forget()
            raise

    def forget(self) -> None:
        """After a forward that has failed: drops everything."""
        self._cpu = None
        self._consumed = ()
        self.reached = None

    def changed(self) -> bool:
        """Whether a forward that has failed changed something in place that `undo` does not put back."""
        return self.reached is not None and self.reached.changed()

    def undo(self) -> None:
        """Makes generators, buffers and modules what they were before a forward that has failed and will run again."""
        with _exclusive, contextlib.ExitStack() as stack:
            for ambient, before in self._consumed if self._cpu is None else [(CPU_RNG, self._cpu), *self._consumed]:
                ambient.restore(before)
            if self.reached is not None:
                self.reached.restore(stack)
                stack.pop_all()

    def run(self, region: str, fn: Callable[..., Any], *args: Any) -> None:
        """Calls `fn(*args)` under the captured state, then restores the current one."""
        present = _torch.settings()
        reached = self.reached
        context = self._context.copy()  # a context cannot be entered twice, and replays may nest
        if self._variables is not None:
            variables, given = self._variables
            for variable, value in zip(variables, given.arguments(given.leaves)[0], strict=True):
                context.run(variable.set, value)
        consumed = self._consumed if self._cpu is None else [(CPU_RNG, self._cpu), *self._consumed]
        dicts, versions = ((), []) if reached is None else (reached.dicts, reached.dict_versions)
        same = reached is None or [*map(version_of_dict, dicts)] == versions or reached.same()
        if same and not consumed and present == self._settings:
            try:
                context.run(fn, *args)
            finally:
                if reached is not None and [*map(version_of_dict, dicts)] != versions:
                    reached.tidy()
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


MOST = 256
"""The most entries of a context variable that is taken apart: torch keeps its configuration in some."""


def _is_collector(value: Any) -> bool:
    """Whether a context variable holds what results may be left in: a container or a plain object of few entries."""
    nest = isinstance(value, CONTAINERS) and _torch.is_container(value)
    if type(value) in _atoms or not (nest or is_context(value)):
        return False
    left, open_ = MOST, [value if nest else vars(value)]
    while open_ and left >= 0:
        one = open_.pop()
        left -= len(one)
        entries = one.values() if isinstance(one, dict) else one
        open_ += [entry for entry in entries if isinstance(entry, (*CONTAINERS, tuple))] if left >= 0 else []
    return left >= 0


def _is_atom(kind: type[Any]) -> bool:
    return not issubclass(kind, CONTAINERS) and written_in_c(kind)


_atoms: set[type[Any]] = {*PLAIN}  # classes of context variables that nothing is taken out of
_exclusive = threading.RLock()
"""Held by a replay that puts something back which all threads share: generators, buffers, `training` flags."""


_NOTHING: frozenset[int] = frozenset()
