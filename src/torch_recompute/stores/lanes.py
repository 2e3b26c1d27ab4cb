"""The copies between a device and host memory, and who waits for whom.

`Streams` is a CUDA device: two streams, one for each way, so that a tensor that leaves and one that comes back pass
each other while the device computes. Every edge between streams is an event:

    what wrote the tensor   before its copy to the host      `send`
    the copy to the host    before the tensor's memory       `let_go`
                            is used for something else
    the copy to the host    before the copy back             `fetch`, whose `after` is what `send` returned
    what used the memory    before the copy back into it     `fetch`; it is allocated on the stream that computes
    the copy back           before who reads it              `arrive`

Memory whose copy nobody has waited for is never just dropped (`abandon`): the allocator is told which stream still
uses it. Otherwise `record_stream` is avoided: blocks that it marks come back when the allocator gets round to asking,
so a program that runs ahead of its device takes as much memory as without offloading. Host memory needs none of this;
torch notes which stream a pinned block was copied on, and hands it out again only afterwards.

`Direct` is every other device: a plain copy, done when the call returns.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch


class Mark(NamedTuple):
    """A copy under way: the event at its end, and the stream on which it was asked for."""

    done: Any
    asked: Any


class Lane(Protocol):
    """The way between one device and the host. Tensors are dense and have one dimension.

    Attributes:
        direct: Whether copies are done when a call returns, so that there is nothing to wait for.
    """

    direct: bool

    def send(self, source: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Starts a copy to the host; returns it and a mark of its end."""
        ...

    def let_go(self, mark: Any) -> None:
        """What is computed from now on waits for a `send`: the source's memory may be used again."""
        ...

    def fetch(self, host: torch.Tensor, after: Any) -> tuple[torch.Tensor, Any]:
        """Starts a copy back, to begin after a `send`; returns it and a mark of its end."""
        ...

    def arrive(self, tensor: torch.Tensor, mark: Any) -> None:
        """What is computed from now on waits for a `fetch`."""
        ...

    def abandon(self, tensor: torch.Tensor, mark: Any) -> None:
        """The tensor on the device is about to be dropped, and nobody has waited for its copy."""
        ...


class Direct:
    """Copies that are done when the call returns. Memory on the CPU is its own copy back."""

    direct = True

    def send(self, source: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Copies to the host."""
        return torch.empty_like(source, device="cpu").copy_(source), None

    def let_go(self, mark: None) -> None:
        """Nothing to wait for."""

    def fetch(self, host: torch.Tensor, after: None) -> tuple[torch.Tensor, None]:
        """The copy itself."""
        return host, None

    def arrive(self, tensor: torch.Tensor, mark: None) -> None:
        """Nothing to wait for."""

    def abandon(self, tensor: torch.Tensor, mark: None) -> None:
        """Nothing to wait for."""


class DirectTo(Direct):
    """The same for a device other than the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def fetch(self, host: torch.Tensor, after: None) -> tuple[torch.Tensor, None]:
        """Copies back."""
        return host.to(self._device), None


class Streams:
    """A CUDA device: pinned host memory, and a stream each way.

    Args:
        device: The device, with its number.
    """

    direct = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._away = torch.cuda.Stream(device)
        self._back = torch.cuda.Stream(device)

    def send(self, source: torch.Tensor) -> tuple[torch.Tensor, Mark]:
        """Starts a copy to pinned memory, once what is queued now has written the tensor."""
        here = torch.cuda.current_stream(self._device)
        host = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
        self._away.wait_stream(here)
        with torch.cuda.stream(self._away):
            host.copy_(source, non_blocking=True)
            return host, Mark(self._away.record_event(), here)

    def let_go(self, mark: Mark) -> None:
        """The stream that asked for the copy waits for it; on that stream the memory was allocated."""
        mark.asked.wait_event(mark.done)

    def fetch(self, host: torch.Tensor, after: Mark) -> tuple[torch.Tensor, Mark]:
        """Starts a copy into memory of the stream that computes."""
        here = torch.cuda.current_stream(self._device)
        tensor = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        self._back.wait_stream(here)
        self._back.wait_event(after.done)
        with torch.cuda.stream(self._back):
            tensor.copy_(host, non_blocking=True)
            return tensor, Mark(self._back.record_event(), here)

    def arrive(self, tensor: torch.Tensor, mark: Mark) -> None:
        """The present stream waits for the copy."""
        here = torch.cuda.current_stream(self._device)
        here.wait_event(mark.done)
        if here != mark.asked:
            tensor.record_stream(here)

    def abandon(self, tensor: torch.Tensor, mark: Mark) -> None:
        """The memory is used again once both streams are past the copies now queued on them."""
        tensor.record_stream(self._away)
        tensor.record_stream(self._back)
