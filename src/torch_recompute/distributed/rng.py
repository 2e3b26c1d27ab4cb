"""Named random streams of parallel ranks.

Under tensor parallelism some dropout masks must agree between the ranks (those on what every rank holds whole: hidden
states, residuals) and others must differ (those on a rank's own part: attention heads, a part of the sequence). So
there are streams: `default`, PyTorch's own generators, seeded alike on the ranks of a group; `model-parallel`, another
on each tensor parallel rank; `expert`, another on each rank that holds other experts. `fork(name)` puts a stream's
state into PyTorch's generators for a while, and theirs back at the end.

A region draws in a replay what it drew from PyTorch's generators before. A fork inside a region stores its state in the
region's call record, and the fork at the same place in the replay reads it. So no stream is advanced by a replay.

A state is never written to: the CPU's is a tensor of 5,056 bytes that is replaced, and kept once while nothing is drawn
on the CPU; an accelerator's is a (seed, offset) pair. The default stream's state is in PyTorch's generators except
while another one is forked. Streams cover the CPU and CUDA and XPU devices; their names, seeds and offsets are
Megatron-Core's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .. import _torch, errors
from .._torch.devices import capturing
from ..state.tape import Entry, thread

DEFAULT, MODEL_PARALLEL, EXPERT = "default", "model-parallel", "expert"
_cpu = torch.default_generator


class _State(NamedTuple):
    """The state of a stream: on the CPU, and a (seed, offset) pair for each device that has been initialised."""

    seed: int
    cpu: torch.Tensor
    devices: tuple[tuple[int, int], ...] = ()


def _present(loaded: _State) -> _State:
    """Returns the state of the generators now, since `loaded` was put into them."""
    cpu = _cpu.get_state()
    if _torch.same_bytes(cpu, loaded.cpu):
        cpu = loaded.cpu
    return _State(loaded.seed, cpu, tuple((g.initial_seed(), g.get_offset()) for g in _torch.device_generators()))


def _load(state: _State) -> None:
    _cpu.set_state(state.cpu)
    for i, generator in enumerate(_torch.device_generators()):
        # A device that was not initialised has drawn nothing from the stream.
        seed, offset = state.devices[i] if i < len(state.devices) else (state.seed, 0)
        if generator.initial_seed() != seed:
            generator.manual_seed(seed)
        if generator.get_offset() != offset:
            generator.set_offset(offset)


@dataclass
class _Fork(Entry):
    """The record of a fork inside a region.

    Attributes:
        name: Its name for errors.
        state: The state of the stream; None where it was drawn from already.
        after: The state of the stream around at the end, if that was forked inside too; else None.
    """

    name: str
    state: _State | None
    after: _State | None = None


class RngStreams:
    """The random streams of this rank.

        streams = RngStreams(1234, tensor=mesh.get_group("tp"))
        h = dropout(h)                          # agrees on all tensor parallel ranks
        with streams.fork("model-parallel"):
            a = dropout(a)                      # differs

    The seeds: `seed` for "default", which PyTorch's generators of all devices are set to; `seed + 2718 + tensor` for
    "model-parallel"; `seed + 1024 + 100 * expert + expert_tensor` for "expert". So with equal `seed`, ranks with the
    same tensor parallel rank have the same model-parallel stream, whatever their data parallel rank. For streams that
    differ between pipeline stages or data parallel ranks too, give these another `seed`.

    In a region the replay draws what the forward drew, from each stream, with nothing to set. Also an `Ambient`:
    `capture()` and `restore(value)` take and put back all streams but the one in use, for a training checkpoint.

    Args:
        seed: Equal on the ranks whose default streams agree.
        tensor: The tensor parallel group, or this rank's number in it.
        expert: The expert parallel group, or this rank's number in it.
        expert_tensor: The group over which each expert is split, or this rank's number in it.

    Raises:
        ArgumentError: A number is negative or none, or this process is not in a group.

    Attributes:
        seeds: The seed of each stream, by its name.
    """

    def __init__(
        self,
        seed: int,
        *,
        tensor: dist.ProcessGroup | int = 0,
        expert: dist.ProcessGroup | int = 0,
        expert_tensor: dist.ProcessGroup | int = 0,
    ) -> None:
        seed = _number("seed", seed)
        parallel = seed + 2718 + _number("tensor", tensor)
        experts = seed + 1024 + 100 * _number("expert", expert) + _number("expert_tensor", expert_tensor)
        self.seeds: dict[str, int] = {}
        self._states: dict[str, _State] = {}
        self._current = DEFAULT
        for name, one in ((DEFAULT, seed), (MODEL_PARALLEL, parallel), (EXPERT, experts)):
            self.add(name, one)
        torch.manual_seed(seed)

    def add(self, name: str, seed: int) -> None:
        """Adds a stream.

        Raises:
            ArgumentError: There is one of that name or with that seed, which would draw the same numbers.
        """
        seed = _number("seed", seed)
        for known, other in self.seeds.items():
            if name == known:
                raise errors.ArgumentError(
                    f"add({name!r}, {seed}): there is a stream {known!r} already.\n  Use another name."
                )
            if seed == other:
                raise errors.ArgumentError(
                    f"add({name!r}, {seed}): the stream {known!r} has the seed {other} too, so both would draw the "
                    "same numbers.\n  Use another seed."
                )
        self.seeds[name] = seed
        self._states[name] = _State(seed, torch.Generator().manual_seed(seed).get_state())

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Generator[None]:
        """Draws from a stream inside of a `with` block; blocks may be nested.

        Args:
            name: "default", "model-parallel", "expert", or what was added.

        Raises:
            ArgumentError: There is no such stream, or a CUDA graph is captured and another stream is in use.
        """
        if name not in self._states:
            raise errors.ArgumentError(
                f"fork({name!r}): there is no such stream; known are {', '.join(map(repr, list(self._states)))}.\n"
                "  Write one of these, or make it first, on all ranks:  streams.add(name, seed)"
            )
        run = None if torch.compiler.is_compiling() else thread.run
        label = f"fork({name!r})"
        if name != self._current and capturing():
            raise errors.ArgumentError(
                f"fork({name!r}) was entered while a CUDA graph is captured. It would set the seed of the device's "
                "generator, which a capture does not allow.\n"
                "  Capture only parts of the model without a fork, or draw from a generator of your own that the "
                "graph knows: graph.register_generator_state(generator), then torch.rand(..., generator=generator)."
            )
        if run is not None and run.replaying:
            with _again(run.read(_Fork, label)):
                yield
            return
        record = _Fork(label, None if name == self._current else self._states[name])
        if run is not None:
            run.write(record)
        if record.state is None:
            yield
            return
        around = self._current
        entered = self._states[around] = _present(self._states[around])
        self._current = name
        _load(record.state)
        try:
            yield
        finally:
            self._states[name] = _present(record.state)
            self._current = around
            after = self._states[around]
            record.after = None if after is entered else after
            _load(after)

    def capture(self) -> tuple[str, dict[str, _State]]:
        """Returns the name of the stream in use, and the state of all others."""
        return self._current, dict(self._states)

    def restore(self, value: tuple[str, dict[str, _State]]) -> None:
        """Restores what `capture` returned. The stream in use is in PyTorch's generators, not touched here."""
        self._current, states = value
        self._states = dict(states)


@contextlib.contextmanager
def _again(record: _Fork) -> Generator[None]:
    """Draws in a replay what the forward drew, and advances no stream."""
    if record.state is None:
        yield
        return
    entered = _present(record.state)
    _load(record.state)
    try:
        yield
    finally:
        _load(record.after or entered)


def _number(what: str, value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if dist.is_available() and isinstance(value, dist.ProcessGroup):
        rank = dist.get_rank(value)
        if rank < 0:
            raise errors.ArgumentError(errors.not_a_member(f"RngStreams({what}=...)"))
        return rank
    kinds = "a whole number, 0 or more" if what == "seed" else "a process group or this rank's number in it"
    raise errors.ArgumentError(
        f"RngStreams: {what} is {errors.say(value)}, where {kinds} is expected.\n"
        '  Write  RngStreams(1234, tensor=device_mesh.get_group("tp")).'
    )
