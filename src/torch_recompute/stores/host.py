"""Host memory as a store: which tensors go there.

In which pieces tensors are sent, and when, is in `transfers.py`. This file decides which tensors stay: small ones
(`smallest`), what is beyond a budget (`at_most`), and all but a share of the bytes (`fraction`). Shares are made of
whole tensors, spread evenly over those that could go: each adds its share to a debt, and goes when the debt has reached
its size. A tensor cut in two would have to be put together again on the device, just when memory is needed.

The copies of a device are common to all `OnHost` objects; budget and share are each object's own.
"""

from __future__ import annotations

import functools
import math
import threading
import warnings
from typing import Any, NamedTuple, NoReturn

import torch

from .. import errors
from .._torch.devices import capturing
from .._torch.storages import is_fake
from .._torch.tensors import unexpanded
from .transfers import Cut, Direct, Group, HostCopy, Streams, TransferQueue, cut


class _Here(NamedTuple):
    """A tensor that stayed where it is."""

    tensor: torch.Tensor
    version: int


class _Away(NamedTuple):
    """A tensor in host memory."""

    queue: TransferQueue
    host_copy: HostCopy
    group: Group | None
    size: torch.Size
    piece: Cut


class _Copy(NamedTuple):
    """A tensor without strides (sparse, nested), copied as it is."""

    host: torch.Tensor
    device: torch.device


class _Parts(NamedTuple):
    """A tensor made of others (`DTensor`), taken apart."""

    kind: type
    parts: dict[str, Any]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]


_opening = threading.Lock()
_said: list[str] = []


def queue_of(tensor: torch.Tensor) -> TransferQueue:
    """Returns the copies of a tensor's device."""
    with _opening:
        return _queue(tensor.device, is_fake(tensor))


@functools.cache
def _queue(device: torch.device, fake: bool) -> TransferQueue:
    return TransferQueue(Streams(device) if device.type == "cuda" and not fake else Direct(device))


def _say_once() -> None:
    if _said:
        return
    _said.append("asked")  # once: each question goes to the driver
    if not torch.cuda.is_available():
        warnings.warn(
            "OnHost: torch sees no CUDA device here, so tensors are copied within host memory: it frees nothing, and "
            "nothing runs beside the copies. (Said once.)",
            RuntimeWarning,
            stacklevel=4,
        )


_BYTES, _REGIONS = "a number of bytes, 0 or more", "a number of regions, 0 or more"
_DEFAULTS: dict[str, Any] = {"smallest": 0, "at_most": None, "fraction": 1.0, "ahead": 1, "threads": 4}


class Sending:
    """A store that sends tensors away and has them back: where to is said by `_queue`. The options are `OnHost`'s."""

    def __init__(
        self,
        *unnamed: NoReturn,
        smallest: int = 0,
        at_most: int | None = None,
        fraction: float = 1.0,
        ahead: int = 1,
    ) -> None:
        if unnamed:
            given = ", ".join(map(repr, unnamed))
            raise errors.ArgumentError(
                f"{errors.kind(self)}({given}): options are given by name, and sizes in bytes.\n"
                f"  Write {errors.kind(self)}(at_most=8 * 2**30) for at most 8 GiB of host memory."
            )
        for option, value, kinds, most, expected in (
            ("smallest", smallest, int, math.inf, _BYTES),
            ("ahead", ahead, int, math.inf, _REGIONS),
            ("at_most", 0 if at_most is None else at_most, int, math.inf, _BYTES),
            ("fraction", fraction, (int, float), 1, "a number from 0 to 1"),
        ):
            if isinstance(value, bool) or not isinstance(value, kinds) or not 0 <= value <= most:
                raise errors.ArgumentError(f"{errors.kind(self)}({option}={value!r}): {option} must be {expected}.")
        self.smallest = smallest
        self.at_most = at_most
        self.fraction = fraction
        self.ahead = ahead
        self._lock = threading.RLock()  # a copy may be dropped while it is held
        self._bytes = 0
        self._debt = 0.0

    def __repr__(self) -> str:
        given = (f"{name}={value!r}" for name, value in self._options().items() if value != _DEFAULTS.get(name))
        return f"{errors.kind(self)}({', '.join(given)})"

    def _options(self) -> dict[str, Any]:
        return {option: getattr(self, option) for option in ("smallest", "at_most", "fraction", "ahead")}

    def __getstate__(self) -> Any:
        return self._options()

    def __setstate__(self, options: dict[str, Any]) -> None:
        self.__init__(**options)

    def put(self, tensor: torch.Tensor) -> Any:
        """Sends the tensor on its way, or keeps it."""
        if capturing():
            raise errors.StoreError(
                f"{errors.kind(self)} was given a tensor while a CUDA graph is captured. What is copied in one graph "
                "could not be waited for in another, and pinned memory would be the same at every launch.\n"
                "  Keep the tensors of captured regions on the device: leave out inputs= and store= there, or capture "
                "only parts of the model that hold no such region."
            )
        with torch.no_grad():
            return self._put(tensor.detach())

    def _put(self, tensor: torch.Tensor) -> Any:
        take_apart = getattr(tensor, "__tensor_flatten__", None)
        if take_apart is not None and not tensor.is_nested:
            wait: Any = getattr(tensor, "trigger_wait", None)
            if wait is not None:  # the result of a collective that is under way
                return self._put(wait())
            names, context = take_apart()
            parts = {name: self._put(getattr(tensor, name)) for name in names}
            return _Parts(type(tensor), parts, context, tensor.shape, tensor.stride())
        if tensor.layout is not torch.strided or tensor.is_nested:
            return self._unstrided(tensor)
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        if tensor.numel() == 0:
            return self._stays(tensor)
        queue, piece = self._queue(tensor), cut(tensor)
        with queue.lock:
            host_copy = queue.find(tensor, piece)
            if host_copy is None:
                once = unexpanded(tensor)
                copied = (piece.stop - max(piece.first, 0)) * tensor.element_size()
                if not self._goes(min(once.numel() * tensor.element_size(), copied), copied):
                    return self._stays(tensor)
                try:
                    host_copy = queue.send(tensor, piece, self._freed)
                except BaseException:
                    self._freed(copied)
                    raise
            return _Away(queue, host_copy, queue.join(host_copy, self.ahead), tensor.shape, piece)

    def _queue(self, tensor: torch.Tensor) -> TransferQueue:
        """The copies of the tensor's device."""
        return queue_of(tensor)

    def _unstrided(self, tensor: torch.Tensor) -> Any:
        """Takes a tensor without strides."""
        return _Copy(tensor.to("cpu", copy=True), tensor.device)

    def _stays(self, tensor: torch.Tensor) -> _Here:
        return _Here(tensor, tensor._version)

    def _goes(self, size: int, copied: int) -> bool:
        """Whether a tensor is sent; counts its bytes if so."""
        if size < self.smallest:
            return False
        with self._lock:
            self._debt += self.fraction * copied
            if self._debt + 0.5 < copied or (self.at_most is not None and self._bytes + copied > self.at_most):
                self._debt = min(self._debt, float(copied))
                return False
            self._debt -= copied
            self._bytes += copied
        return True

    def _freed(self, copied: int) -> None:
        with self._lock:
            self._bytes -= copied
            if self._bytes == 0:  # the step is over; the next one chooses the same tensors
                self._debt = 0.0

    def get(self, handle: Any) -> torch.Tensor:
        """Returns the tensor, on the device it came from."""
        if type(handle) is _Away:
            with torch.no_grad():
                flat = handle.queue.open(handle.host_copy, handle.group, self.ahead)
                return handle.host_copy.view(flat, handle.size, handle.piece)
        if type(handle) is _Here:
            if handle.tensor._version != handle.version:
                raise errors.ChangedError(
                    f"a tensor that {errors.kind(self)} left on the device has been changed in place since (version "
                    f"{handle.version} then, {handle.tensor._version} now). It was left there because of smallest=, "
                    "at_most= or fraction=.\n"
                    "  Write x = x + y instead of x += y, or give the region a copy: region(x.clone())."
                )
            return handle.tensor
        if type(handle) is _Copy:
            return handle.host if handle.device.type == "cpu" else handle.host.to(handle.device)
        parts = {name: self.get(part) for name, part in handle.parts.items()}
        return handle.kind.__tensor_unflatten__(parts, handle.context, handle.size, handle.stride)


class OnHost(Sending):
    """Keeps tensors in pinned host memory.

        store = OnHost()
        y = recompute(layer, inputs=store)(x)                # the inputs of a region
        attend = no_recompute(attention, store=store)        # what a saved call keeps

    From a CUDA device tensors leave on a stream of their own while the next region is computed, and come back on
    another one, one region ahead of the replay that needs them. Tensors that share memory are copied once and come
    back as views of one tensor. Strides are kept, except for a view with gaps that is a small part of its memory, which
    comes back without them. One object may serve any number of regions, live microbatches and threads.

    A tensor may be changed in place once its copy is done, which is when `ahead` + 1 more regions have been called; a
    change before that is an error in backward. A tensor on the CPU is copied too, at once. Pinned memory comes from
    torch's caching allocator: it is used again from step to step, and rounded up to a power of two.

    Args:
        smallest: Tensors of fewer bytes stay on the device.
        at_most: Bytes of host memory for this object at any time; what is beyond stays on the device. None: no limit.
        fraction: The share of the bytes that is sent, in [0, 1]: whole tensors, chosen evenly.
        ahead: How many regions copies may lag behind in forward, and run ahead in backward. With 0 backward waits for
            each copy.

    Raises:
        ArgumentError: An option is none of the above.
        StoreError: A tensor is put while a CUDA graph is captured.
        ChangedError: In backward, a tensor that stayed, or whose copy was not done, has been changed in place.

    The scheme is that of Unsloth's offloaded checkpoints and Megatron-LM's fine-grained activation offloading.
    """

    @property
    def host_bytes(self) -> int:
        """Bytes now in host memory for this object."""
        return self._bytes

    def _queue(self, tensor: torch.Tensor) -> TransferQueue:
        _say_once()
        return super()._queue(tensor)

    def _unstrided(self, tensor: torch.Tensor) -> Any:
        _say_once()
        return super()._unstrided(tensor)
