"""Generators that stand in for the process's, for one replay on one thread.

A process has one generator for each device, and all threads draw from it. A replay that set it while another thread
draws would give that thread the replay's numbers, and get its own from where that thread left off. So the replay draws
from generators of its own, which begin where its forward did. An operation that takes a generator is given one; around
the few that take none, the process's generator is lent the state for their length.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import torch

from .. import _torch
from .._torch import tracing
from .._torch.devices import generator_id
from .._torch.modes import LightDispatchMode
from . import CpuRng, DeviceRng, GeneratorRng, stand_in

_lending = threading.Lock()


class OwnGenerators(LightDispatchMode):
    """Has this thread draw from generators of its own.

    Args:
        drawn: The ambients that they stand in for, each with the state to begin with.
    """

    def __init__(self, drawn: Sequence[tuple[Any, Any]]) -> None:
        super().__init__()
        self._own: dict[int, tuple[torch.Generator, torch.Generator]] = {}
        for ambient, then in drawn:
            if type(ambient) is CpuRng:
                self._begin(torch.default_generator, then)
            elif type(ambient) is GeneratorRng:
                self._begin(ambient.generator, then)
            elif type(ambient) is DeviceRng:
                for generator, pair in zip(_torch.device_generators(), then, strict=False):
                    own = torch.Generator(generator.device)
                    own.manual_seed(pair[0])
                    own.set_offset(pair[1])
                    self._own[generator_id(generator)] = generator, own

    def _begin(self, generator: torch.Generator, then: torch.Tensor) -> None:
        own = torch.Generator(generator.device)
        own.set_state(then)
        self._own[generator_id(generator)] = generator, own

    def of(self, generator: torch.Generator) -> torch.Generator:
        """The generator that stands in for one."""
        found = self._own.get(generator_id(generator))
        return generator if found is None else found[1]

    def __enter__(self) -> Any:
        self._before, stand_in.now = stand_in.now, self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        stand_in.now = self._before
        super().__exit__(*error)

    @tracing.as_it_is
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        given = kwargs.get("generator")
        if given is not None:
            return func(*args, **{**kwargs, "generator": self.of(given)})
        process = _generator_for(args, kwargs)
        if process is None or (own := self.of(process)) is process:
            return func(*args, **kwargs)
        seeded = _with_generator(func)
        if seeded is not None:
            return seeded(*args, **{**kwargs, "generator": own})
        with _lending:
            before = process.get_state()
            process.set_state(own.get_state())
            try:
                return func(*args, **kwargs)
            finally:
                own.set_state(process.get_state())
                process.set_state(before)


def _generator_for(args: Any, kwargs: Any) -> torch.Generator | None:
    """The process's generator that an operation would draw from."""
    tensor = next(iter(_torch.tensors_in((args, kwargs))), None)
    device = torch.device(kwargs.get("device") or ("cpu" if tensor is None else tensor.device))
    if device.type == "cpu":
        return torch.default_generator
    generators = _torch.device_generators()
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    return generators[index] if generators else None


@functools.cache
def _with_generator(func: Any) -> Any:
    """The overload of an operation that takes a generator besides; None where there is none."""
    names = [argument.name for argument in func._schema.arguments]
    if "generator" in names:
        return func
    for overload in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, overload)
        if sorted(argument.name for argument in other._schema.arguments) == sorted([*names, "generator"]):
            return other
    return None
