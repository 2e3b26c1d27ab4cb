"""Accelerators: which one torch was built for, its random numbers, and its streams.

Nothing here starts a driver. Which accelerator torch was built for is known without asking it; whether a device is
there is looked up only where one is needed (`accelerator`). A process that has imported this may still fork, and
`CUDA_VISIBLE_DEVICES` may still be set. What runs at each call of a region asks first whether the device is in use.

Invariants: `on_streams` puts streams and device back, whatever happens inside it.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, cast

import torch

_C: Any = torch._C
_accelerator = torch.accelerator.current_accelerator()
ACCELERATOR: str | None = None if _accelerator is None else _accelerator.type
"""The type of device, besides the CPU, that torch was built for; None for a build that has none."""


def accelerator() -> str | None:
    """The type of the accelerator of this machine; None where there is none. The question starts its driver."""
    return ACCELERATOR if torch.accelerator.is_available() else None


def _module() -> Any:
    """The device module of the accelerator, such as `torch.cuda`; None where torch was built for none."""
    return None if ACCELERATOR is None else vars(torch).get(ACCELERATOR)


def in_use() -> bool:
    """Whether this process has begun to use the accelerator. Asking does not begin it."""
    if ACCELERATOR is None:
        return False
    asked = getattr(_module(), "is_initialized", None)
    return asked is None or asked()  # MPS is there from the start


# --- random numbers -----------------------------------------------------------------------------------------------


def device_generators() -> Sequence[torch.Generator]:
    """The default generators of the CUDA or XPU devices; empty where none is in use."""
    for module in (torch.cuda, getattr(torch, "xpu", None)):
        if module is not None and module.is_initialized():
            return cast("Sequence[torch.Generator]", module.default_generators)
    return ()


def device_states() -> list[torch.Tensor]:
    """The random states of an accelerator that shows no generators (MPS, NPU, HPU, MTIA), one for each device."""
    if ACCELERATOR in (None, "cuda", "xpu") or not in_use():
        return []
    module = _module()
    return [module.get_rng_state(i) for i in range(module.device_count())]


def set_device_state(index: int, state: torch.Tensor) -> None:
    """Puts one of the `device_states` back."""
    _module().set_rng_state(state, index)


# --- streams ------------------------------------------------------------------------------------------------------

_present_device: Callable[[], int] = _C._accelerator_getDeviceIndex
_present_stream: Callable[[int], Any] = _C._accelerator_getStream


def streams_of(tensors: Iterable[torch.Tensor]) -> tuple[Any, ...]:
    """The present streams of the tensors' devices, then that of the present device; none where it has none (MPS)."""
    if not hasattr(_module(), "current_stream"):
        return ()
    here = _present_device()
    others = {tensor.device.index for tensor in tensors if tensor.device.type == ACCELERATOR} - {here, None}
    count = torch.accelerator.device_count() if others else 0
    return (*(_present_stream(index) for index in sorted(others) if index < count), _present_stream(here))


def stream_for(tensor: torch.Tensor) -> Any:
    """The present stream of a tensor's device; None for a tensor of another type of device."""
    device = tensor.device
    return _present_stream(device.index) if device.type == ACCELERATOR else None


def wait_for(stream: Any, tensor: torch.Tensor) -> None:
    """Makes the present stream of a tensor's device wait for the stream that computed it, if that is another."""
    here = _present_stream(tensor.device.index)
    if here != stream:
        here.wait_stream(stream)
        tensor.record_stream(here)


def on_streams(streams: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    """Runs the block on the streams that `streams_of` returned; they wait for the present ones, and those for them."""
    return _switched(streams) if streams else _nothing


_nothing = contextlib.nullcontext()


@contextlib.contextmanager
def _switched(streams: Sequence[Any]) -> Generator[None]:
    device = _present_device()
    before = [_present_stream(stream.device_index) for stream in streams]
    others = [(stream, present) for stream, present in zip(streams, before, strict=True) if stream != present]
    if not others and device == streams[-1].device_index:
        yield
        return
    try:
        for stream, present in others:
            stream.wait_stream(present)
            torch.accelerator.set_stream(stream)
        torch.accelerator.set_device_index(streams[-1].device_index)
        yield
    finally:
        for stream, present in others:
            present.wait_stream(stream)
            torch.accelerator.set_stream(present)
        torch.accelerator.set_device_index(device)


def capturing() -> bool:
    """Whether the present stream records a CUDA graph instead of running what it is given."""
    return ACCELERATOR == "cuda" and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def captured_state(generator: torch.Generator) -> tuple[int, int]:
    """Seed and relative offset of a generator of the device whose graph is being captured."""
    seed, offset = generator.get_state().view(torch.int64).tolist()
    return seed, offset


def set_captured_state(generator: torch.Generator, state: tuple[int, int]) -> None:
    """Puts the generator where `captured_state` found it, in the same capture."""
    generator.set_state(torch.tensor(state, dtype=torch.int64, device="cpu").view(torch.uint8))


def generator_id(generator: torch.Generator) -> int:
    """The identity of a generator; an operation that a dispatch mode sees is given another Python object for it."""
    return int(generator._cdata)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
