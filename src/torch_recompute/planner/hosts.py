"""Host memory as a plan sees it: a store apart from the fake tensors' device, and how fast copies to it are.

A plan for a device is made with fake tensors, often on a machine without one. There host memory is where the fakes are,
so a simulated `OnHost` would free nothing. `OnHost` decides what is sent, when memory on the device is free and when
the copy back starts, whatever makes the copies. The one here makes none: what has been sent is a size, what
comes back is fresh memory.

A copy is hidden behind what is computed meanwhile. A layer's input leaves while the layer runs and comes back while the
layer after it is replayed and run backward, which takes as long in a stack; what takes longer than that is waited for.
Where the neighbours of a layer send nothing, its copies have more time; that is not counted.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from .. import errors
from ..devices import DEVICES, Roofline
from ..memory.budget import read_budget
from ..plan.plan import Plan
from ..stores import Bandwidth, OnHost, bandwidth
from ..stores.transfers import Direct, TransferQueue
from ..training_step import TrainingStep

LINKS = {name: Bandwidth(sheet.host, sheet.host) for name, sheet in DEVICES.items() if sheet.host is not None}


def link_of(roofline: Roofline | None, device: torch.device) -> Bandwidth:
    """The bandwidth between a device and host memory: by its data sheet, or measured on this machine.

    Raises:
        ArgumentError: The device is the CPU, or one that nothing is known of.
    """
    if roofline is not None:
        if roofline.host is None:
            raise errors.ArgumentError(
                f"offload: how fast device {roofline.name!r} copies to and from host memory is not known.\n"
                f"  Known are {', '.join([*LINKS])}, and any CUDA device of this machine, which is measured."
            )
        return Bandwidth(roofline.host, roofline.host)
    if device.type == "cpu":
        raise errors.ArgumentError(
            "offload: the step is planned for the CPU, whose memory is host memory, so offloading would free nothing.\n"
            f'  To plan for a device that is not at hand, name it: device="h100" (known are {", ".join([*LINKS])}).'
        )
    return bandwidth(device)


def limit_of(offload: object) -> int | None:
    """The most bytes of host memory that `offload=` allows; None for no limit.

    Raises:
        ArgumentError: It is neither True nor a number of bytes.
    """
    if offload is True:
        return None
    found = None
    with contextlib.suppress(errors.ArgumentError):
        found = read_budget(offload).bytes
    if found is None:
        raise errors.ArgumentError(
            f"offload={offload!r} says neither whether nor how much of host memory may be used.\n"
            '  Write offload=True for as much as there is, or the most bytes of it: offload="64GiB".'
        )
    return found


def stores_for(plan: Plan, step: TrainingStep) -> dict[str, HostApart]:
    """The stores for a step that is simulated under a plan.

    Where choices name host memory and the step runs on a device that is no part of it, that is a store apart from it.
    """
    if all(choice.store != "host" for choice in plan.all_choices):
        return {}
    return {} if step.where.roofline is None and step.runs_on.type == "cpu" else {"host": HostApart()}


def waited(sent: int, link: Bandwidth, forward: float, backward: float) -> float:
    """Seconds that copies of so many bytes take longer than what hides them, both ways."""
    return max(0.0, sent / link.to_host - forward) + max(0.0, sent / link.to_device - backward)


@dataclass(frozen=True)
class _Sent:
    """A tensor in host memory: nothing but its size."""

    elements: int
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize

    def numel(self) -> int:
        return self.elements


class _NoCopies(Direct):
    """Copies of fake tensors, with the order of a device's copies."""

    direct = False

    def send(self, source: torch.Tensor) -> tuple[Any, None]:
        return _Sent(source.numel(), source.dtype, source.device), None

    def fetch(self, host: Any, after: None) -> tuple[torch.Tensor, None]:
        return torch.empty(host.elements, dtype=host.dtype, device=host.device), None


class HostApart(OnHost):
    """`OnHost` for the fake tensors of one step, on a device that host memory is no part of."""

    def __init__(self) -> None:
        super().__init__()
        self._apart = TransferQueue(_NoCopies())

    def _queue(self, tensor: torch.Tensor) -> TransferQueue:
        return self._apart

    def settle(self) -> None:
        """Two more regions begin: what has been sent is no longer on the device."""
        self._apart.settle()
