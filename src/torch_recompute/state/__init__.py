"""Random generators and other ambient state: what is read before a forward and put back for a replay.

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
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import random
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from .. import _torch, errors
from .._torch.devices import captured_state, capturing, set_captured_state
from .._torch.tensors import each_once, set_versions, versions_of


class CpuRng:
    """PyTorch's default CPU generator. The state is 5,056 bytes."""

    def capture(self) -> torch.Tensor:
        """The generator's state: uint8 [5056]."""
        return _own(torch.default_generator).get_state()

    def restore(self, value: torch.Tensor) -> None:
        """Sets the generator's state."""
        _own(torch.default_generator).set_state(value)


class _StandIn(threading.local):
    """This thread's generators that stand in for the process's (`own_generators.py`), while a replay has some."""

    now: Any = None


stand_in = _StandIn()


def _own(generator: torch.Generator) -> torch.Generator:
    """The generator that this thread draws from where code asks for another."""
    return generator if stand_in.now is None else stand_in.now.of(generator)


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
        return _own(self.generator).get_state()

    def restore(self, value: torch.Tensor | InGraph) -> None:
        """Sets the generator's state."""
        if self in _still.ambients:
            return
        if not isinstance(value, InGraph):
            _own(self.generator).set_state(value)
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
        generators = [*map(_own, _torch.device_generators())]
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
        for generator, pair in itertools.zip_longest(map(_own, _torch.device_generators()), value):
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
        *tensors: Tensors of any shape, dtype and device that do not require grad; no parameters, of which every change
            is an error.
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def capture(self) -> list[torch.Tensor]:
        """A copy of each tensor."""
        with torch.no_grad():
            return copies([*map(_writable, self.tensors)])

    def restore(self, value: list[torch.Tensor]) -> None:
        """Copies the values back; version counters do not move, so what autograd saved of them remains valid."""
        _put(_paired([*map(_writable, self.tensors)], value))


def left_to(ambients: Sequence[Ambient]) -> frozenset[int]:
    """The storages of the tensors that some states put back in place."""
    tensors = [tensor for one in ambients if isinstance(one, TensorState) for tensor in one.tensors]
    return frozenset(map(_torch.storage_id, tensors))


Alike = Sequence[tuple[list[torch.Tensor], Sequence[torch.Tensor]]]
"""Tensors that one operation can copy, with a value for each."""


def _paired(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> Alike:
    """The tensors, each with its value."""
    return [([tensors[i] for i in some], [values[i] for i in some]) for some in _alike(tensors)]


def copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A copy of each tensor. One operation copies all that are alike: BatchNorms have many."""
    found: dict[int, torch.Tensor] = {}
    for some in _alike(tensors):
        found.update(zip(some, _clones([tensors[i] for i in some]), strict=True))
    return [found[i] for i in range(len(tensors))]


def _clones(alike: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    return _torch.clone_each(alike) if len(alike) > 1 else [alike[0].clone()]


def _put(pairs: Alike) -> None:
    with _torch.versions_kept():
        for tensors, values in pairs:
            if len(tensors) > 1:
                _torch.copy_each(tensors, values)
            else:
                tensors[0].copy_(values[0])


def swap_in(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Writes values into tensors; what it returns writes back those that were there. Versions are as before then."""
    plain = torch.strided
    writable = [t if t.layout is plain and t.is_contiguous() else _writable(t) for t in tensors]
    groups = [*_alike(writable)]
    versions = versions_of(tensors)
    with torch.no_grad():
        before = [([writable[i] for i in some], _clones([writable[i] for i in some])) for some in groups]
    _put([([writable[i] for i in some], [values[i] for i in some]) for some in groups])

    def undo() -> None:
        _put(before)
        set_versions(versions)

    return undo


_CPU = torch.device("cpu")
_kind = operator.attrgetter("layout", "is_nested", "device", "dtype")


def _alike(tensors: Sequence[torch.Tensor]) -> Iterable[list[int]]:
    """The places of tensors that one operation can copy: of one device, and of one dtype if that is not the CPU."""
    groups: dict[Any, list[int]] = {}
    for i, (tensor, (layout, nested, device, dtype)) in enumerate(zip(tensors, map(_kind, tensors), strict=True)):
        kind: Any = device if device == _CPU else (device, dtype)
        if nested or layout is not torch.strided or type(tensor) is not torch.Tensor:
            kind = i
        if kind in groups:
            groups[kind].append(i)
        else:
            groups[kind] = [i]
    return groups.values()


def _writable(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the same memory that can be copied and written as a whole."""
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_contiguous():
        return tensor
    return each_once(tensor)


DEFAULT: tuple[Ambient, ...] = (CPU_RNG,) if _torch.ACCELERATOR is None else (CPU_RNG, DEVICE_RNG)
"""The generators that every region looks after."""


def advanced(ambients: Sequence[Ambient], before: Sequence[Any]) -> list[tuple[Ambient, Any]]:
    """The ambients whose state a saved call has changed, each with its state after the call."""
    after = [(ambient, ambient.capture()) for ambient in ambients]
    return [
        (ambient, now)
        for (ambient, now), old in zip(after, before, strict=True)
        if type(ambient) not in GENERATORS or not same(old, now)
    ]
