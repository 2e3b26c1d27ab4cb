"""Random generators: which states are read, and what is put back for a replay.

A generator's state is read before and after a forward, and set around the replay if it has moved. On the CPU it is
5,056 bytes; accelerator generators are a (seed, offset) pair, read without a device sync.

While a CUDA graph is captured there is no absolute offset: kernels add the one that the generator will have at each
launch. A region whose forward and replay are in one graph (a captured training step) is replayed from the relative
offset, and draws at every launch what its forward drew. Where the two are in different graphs, as
`torch.cuda.make_graphed_callables` makes them, each is launched from another offset, and no state that could be set
makes them draw the same. Then the generator is left alone, and the replay is an error if it draws: a region that only
draws inside saved calls does not.

That two captures are different ones shows in the offset: it starts at 0 in each, and a generator that moved during the
forward is behind what the forward saw only if another capture has begun.

Rejected: two generators that advance in step, one for each graph (what torch's compiler does). A forward that is
launched without its backward, as in evaluation, puts them out of step, and nothing would say so.

Modules are found as the forward found them (`_Reached`): what each holds is read when the region is entered and is
compared, object by object, when its replay begins. What differs is put back, and after the replay the present. Design
note 015 says what that costs and what is left alone.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import operator
import random
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch.nn.parameter import Parameter, UninitializedBuffer, UninitializedParameter
from torch.utils.weak import WeakIdKeyDictionary

from . import _torch, errors
from ._torch import leads_to, version_of
from ._torch.devices import captured_state, capturing, set_captured_state
from .arguments import (
    MANY,
    Captured,
    Captures,
    Contents,
    Snapshot,
    apart,
    each_once,
    parameters_of,
    snapshot,
    undo,
)


class CpuRng:
    """PyTorch's default CPU generator. The state is 5,056 bytes."""

    def capture(self) -> torch.Tensor:
        """The generator's state: uint8 [5056]."""
        return torch.default_generator.get_state()

    def restore(self, value: torch.Tensor) -> None:
        """Sets the generator's state."""
        torch.default_generator.set_state(value)


class InGraph(NamedTuple):
    """The state of device generators in a graph that is being captured: seed, and offset from where it is launched."""

    pairs: tuple[tuple[int, int], ...]


class GeneratorRng:
    """An explicit `torch.Generator`, of any device."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def capture(self) -> torch.Tensor | InGraph:
        """The generator's state: a uint8 tensor on the CPU."""
        if self.generator.device.type == "cuda" and capturing():
            try:
                return InGraph((captured_state(self.generator),))
            except RuntimeError:  # not registered with the graph: torch refuses to draw from it there
                return InGraph(())
        return self.generator.get_state()

    def restore(self, value: torch.Tensor | InGraph) -> None:
        """Sets the generator's state."""
        if self in _still.ambients:
            return
        if not isinstance(value, InGraph):
            self.generator.set_state(value)
        elif value.pairs:
            set_captured_state(self.generator, value.pairs[0])


class DeviceRng:
    """The default generators of all initialised accelerator devices, as (seed, offset) pairs.

    MPS, NPU, HPU and MTIA show no such pair; there it is what their device module returns, as bytes.
    """

    def capture(self) -> list[tuple[int, int]] | list[torch.Tensor] | InGraph:
        """One (seed, philox offset) pair, or state, per device; in a capture that of the present device."""
        if capturing():
            return InGraph((captured_state(_present()),))
        generators = _torch.device_generators()
        return [(g.initial_seed(), g.get_offset()) for g in generators] if generators else _torch.device_states()

    def restore(self, value: Any) -> None:
        """Sets the state of each generator, touching only those that differ.

        A device that was initialised after `capture` had drawn nothing then: its offset was 0.
        """
        if self in _still.ambients:
            return
        if isinstance(value, InGraph):
            set_captured_state(_present(), value.pairs[0])
            return
        states = _torch.device_states()
        for i, (state, then) in enumerate(zip(states, value, strict=False)):
            if not _torch.same_bytes(state, then):
                _torch.set_device_state(i, then)
        if states:
            return
        for generator, pair in itertools.zip_longest(_torch.device_generators(), value):
            seed, offset = pair or (generator.initial_seed(), 0)
            if generator.initial_seed() != seed:
                generator.manual_seed(seed)
            if generator.get_offset() != offset:
                generator.set_offset(offset)


class PythonRng:
    """The `random` module's generator, on request: `recompute(fn, state=[PythonRng()])`."""

    def capture(self) -> object:
        """The result of `random.getstate()`."""
        return random.getstate()

    def restore(self, value: Any) -> None:
        """Calls `random.setstate`."""
        random.setstate(value)


class NumpyRng:
    """NumPy's legacy global generator, or the `numpy.random.Generator` given, on request.

    Args:
        generator: A `numpy.random.Generator`; by default the global state behind `numpy.random.rand` and friends.
    """

    def __init__(self, generator: Any = None) -> None:
        self.generator = generator

    def capture(self) -> Any:
        """The bit generator's state."""
        if self.generator is not None:
            return self.generator.bit_generator.state
        return _numpy_random().get_state()

    def restore(self, value: Any) -> None:
        """Sets the bit generator's state."""
        if self.generator is not None:
            self.generator.bit_generator.state = value
        else:
            _numpy_random().set_state(value)


def _numpy_random() -> Any:
    import numpy

    return numpy.random


def _present() -> torch.Generator:
    return _torch.device_generators()[torch.cuda.current_device()]


CPU_RNG, DEVICE_RNG = CpuRng(), DeviceRng()
GENERATORS = frozenset({CpuRng, DeviceRng, GeneratorRng})
"""Those whose state says whether they were drawn from."""


class _Still(threading.local):
    ambients: tuple[Any, ...] = ()


_still = _Still()


def same(a: Any, b: Any) -> bool:
    """Whether two captured states of a generator are the same, decided without a device sync."""
    if type(a) is torch.Tensor:  # a generator's state: bytes, in host memory for every kind of device
        return _torch.same_bytes(a, b)
    if type(a) is list and a and type(a[0]) is torch.Tensor:
        return len(a) == len(b) and all(map(_torch.same_bytes, a, b))
    return bool(a == b)


def elsewhere(ambient: Any, value: Any) -> bool:
    """Whether a state of a generator that has moved since was read in another CUDA graph than the present one."""
    if type(ambient) is not DeviceRng and not (
        type(ambient) is GeneratorRng and ambient.generator.device.type != "cpu"
    ):
        return False
    if not isinstance(value, InGraph):
        return capturing()
    if not capturing():
        return True
    present: Any = ambient.capture()
    return any(now <= then for (_, now), (_, then) in zip(present.pairs, value.pairs, strict=False))


@contextlib.contextmanager
def undrawn(ambient: Any, region: str) -> Generator[None]:
    """Leaves a generator as it is, and raises if it is drawn from."""
    before, others = ambient.capture(), _still.ambients
    _still.ambients = (*others, ambient)
    try:
        yield
    finally:
        _still.ambients = others
    if not same(before, ambient.capture()):
        raise errors.MismatchError(
            f"the replay of {region} draws random numbers, but is not captured in the CUDA graph in which its forward "
            "was. Each graph is launched from the generator's offset at that moment, so the replay would draw other "
            "numbers than the forward, and the gradients would be wrong.\n"
            "  Capture forward and backward in one graph (torch.cuda.graph around the whole step); or keep what is "
            "drawn: no_recompute(F.dropout) is not repeated; or leave the region out of make_graphed_callables."
        )


SMALL = 64 * 1024
"""Buffers up to this many bytes are copied on every call; see the module's note."""


@runtime_checkable
class Ambient(Protocol):
    """Something outside a region's arguments that its function reads and changes.

    Pass objects of this kind as `recompute(fn, state=[...])`. `capture` is called before the forward, at each replay
    and after each saved call; `restore` gets one of its results back.
    """

    def capture(self) -> Any:
        """The present state, as a value that later changes do not touch."""
        ...

    def restore(self, value: Any) -> None:
        """Makes a captured state the present one."""
        ...


class TensorState:
    """Tensors that a region changes in place, to be updated once and not again by the replay.

    Buffers of modules are found without this; it is for tensors that the function reaches in other ways.

    Args:
        *tensors: Tensors of any shape, dtype and device that do not require grad.
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def capture(self) -> list[torch.Tensor]:
        """A copy of each tensor."""
        with torch.no_grad():
            return copies([*map(_writable, self.tensors)])

    def restore(self, value: list[torch.Tensor]) -> None:
        """Copies the values back; version counters do not move, so what autograd saved of them remains valid."""
        with _torch.versions_kept():
            targets = [*map(_writable, self.tensors)]
            for some in _alike(targets):
                if len(some) > 1:
                    _torch.copy_each([targets[i] for i in some], [value[i] for i in some])
                else:
                    targets[some[0]].copy_(value[some[0]])


def copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A copy of each tensor. One operation copies all that are alike: BatchNorms have many."""
    found: dict[int, torch.Tensor] = {}
    for some in _alike(tensors):
        each = [tensors[i] for i in some]
        found.update(zip(some, _torch.clone_each(each) if len(each) > 1 else [each[0].clone()], strict=True))
    return [found[i] for i in range(len(tensors))]


def _alike(tensors: Sequence[torch.Tensor]) -> Iterable[list[int]]:
    """The places of tensors that one operation can copy: of one device, and of one dtype if that is not the CPU."""
    groups: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested
        kind = "" if tensor.device.type == "cpu" else tensor.dtype
        groups.setdefault((kind, tensor.device) if plain else i, []).append(i)
    return groups.values()


def _writable(tensor: torch.Tensor) -> torch.Tensor:
    return each_once(tensor) if tensor.layout is torch.strided and not tensor.is_nested else tensor


DEFAULT: tuple[Ambient, ...] = (CPU_RNG,) if _torch.ACCELERATOR is None else (CPU_RNG, DEVICE_RNG)
"""The generators that every region looks after."""
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


def advanced(ambients: Sequence[Ambient], before: Sequence[Any]) -> list[tuple[Ambient, Any]]:
    """The consumables that a saved call has advanced, each with its state after the call."""
    after = [(ambient, ambient.capture()) for ambient in ambients]
    return [
        (ambient, now)
        for (ambient, now), old in zip(after, before, strict=True)
        if type(ambient) not in GENERATORS or not same(old, now)
    ]
