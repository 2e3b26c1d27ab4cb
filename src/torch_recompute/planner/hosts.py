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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from .. import errors
from ..memory.budget import read_budget
from ..plan.apply import apply
from ..plan.plan import Plan
from ..simulation import Simulation, simulate_step
from ..simulation.devices import DEVICES, Roofline
from ..simulation.training_step import TrainingStep
from ..stores import Bandwidth, OnHost, bandwidth
from ..stores.transfers import Direct, TransferQueue


@dataclass(frozen=True)
class PlanOptions:
    """The means that a plan may use besides recomputation.

    Attributes:
        offload: Host memory: False for none, True for as much as there is, or the most bytes of it; of each rank.
        bandwidth: How fast it is reached; None for what the data sheet says, or is measured here.
        tiles: Whether parts may be computed in tiles of tokens, whose results differ by the order of sums.
    """

    offload: bool | int | str = False
    bandwidth: Bandwidth | None = None
    tiles: bool = False

    @staticmethod
    def of(
        offload: bool | int | str = False, bandwidth: HostBandwidth = None, tiles: object = False, dashes: str = ""
    ) -> PlanOptions:
        """Reads the arguments of a public function, or with `dashes` the options of a command.

        Raises:
            ArgumentError: One is none of these, or has no effect.
        """
        if type(tiles) is not bool:
            raise errors.ArgumentError(
                f"tiles={tiles!r} is neither True nor False; a plan finds out itself how many tiles of tokens lower "
                "the peak.\n  Write tiles=True, or for tiles of your own recompute(fn, tiles=8) or Choice(tiles=8)."
            )
        if offload is not False:
            limit_of(offload)
        elif bandwidth is not None:
            words = ("--host-bandwidth", "--offload") if dashes else ("host_bandwidth=", "offload=")
            raise errors.ArgumentError(errors.goes_with(*words))
        return PlanOptions(offload, None if bandwidth is None else _read_bandwidth(bandwidth, dashes), tiles)

    def link(self, roofline: Roofline | None, device: torch.device) -> Bandwidth | None:
        """The bandwidth to host memory; None where none may be used."""
        if self.offload is False:
            return None
        if self.bandwidth is not None and device.type == "cpu" and roofline is None:
            link_of(roofline, device)  # refuses it
        return self.bandwidth or link_of(roofline, device)

    def stated(self, plan: Plan, dashes: str = "") -> Plan:
        """Returns a plan that somebody has stated, with the inputs of its regions in host memory where that is allowed.

        Raises:
            ArgumentError: Host memory has a limit, and nothing to choose what stays below it.
        """
        if self.offload is False:
            return plan
        if self.offload is not True:
            option, other = ("--offload ", "--recompute") if dashes else ("offload=", "recompute=")
            raise errors.ArgumentError(
                f"{option}{self.offload} is the most that a plan may keep in host memory, and {other} states what is "
                "recomputed: then the inputs of all its regions are kept there, and the answer says how much that is.\n"
                f"  Write {option.strip()}{'' if dashes else 'True'}, or a budget, under which a plan chooses."
            )
        choices = (choice if choice.store else replace(choice, store="host") for choice in plan.choices)
        return replace(plan, choices=tuple(choices))


NO_OPTIONS = PlanOptions()
"""Nothing besides recomputation."""


def _read_bandwidth(given: HostBandwidth, dashes: str) -> Bandwidth:
    """Reads how fast copies to the device and from it are: "in,out", or one for both, in bytes per second.

    Raises:
        ArgumentError: It is none.
    """
    parts: Any = given.split(",") if isinstance(given, str) else given if isinstance(given, (tuple, list)) else [given]
    speeds: list[int] = []
    with contextlib.suppress(errors.ArgumentError):
        speeds = [found for part in parts if (found := read_budget(part).bytes)]
    if len(speeds) != len(parts) or len(speeds) not in (1, 2):
        raise errors.ArgumentError(
            f"{'--host-bandwidth is ' if dashes else 'host_bandwidth='}{given!r}, which says no speed of copies "
            "between a device and host memory.\n"
            '  Write bytes per second, into the device and out of it: "55GB,50GB"; or one for both: "50GB".'
        )
    return Bandwidth(to_host=speeds[-1], to_device=speeds[0])


HostBandwidth = int | float | str | Sequence[int | float | str] | None
LINKS = {
    name: Bandwidth(sheet.host_link, sheet.host_link) for name, sheet in DEVICES.items() if sheet.host_link is not None
}


def link_of(roofline: Roofline | None, device: torch.device) -> Bandwidth:
    """The bandwidth between a device and host memory: by its data sheet, or measured on this machine.

    Raises:
        ArgumentError: The device is the CPU, or one that nothing is known of.
    """
    if roofline is not None:
        if roofline.host_link is None:
            raise errors.ArgumentError(
                f"offload: how fast device {roofline.name!r} copies to and from host memory is not known.\n"
                f"  Known are {', '.join([*LINKS])}, and any CUDA device of this machine, which is measured."
            )
        return Bandwidth(roofline.host_link, roofline.host_link)
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


def stores_for(plan: Plan, step: TrainingStep) -> dict[str, SimulatedHostStore]:
    """The stores for a step that is simulated under a plan.

    Where choices name host memory and the step runs on a device that is no part of it, that is a store apart from it.
    """
    if all(choice.store != "host" for choice in plan.all_choices):
        return {}
    return {} if step.where.roofline is None and step.runs_on.type == "cpu" else {"host": SimulatedHostStore()}


def simulate_under(step: TrainingStep, plan: Plan) -> Simulation:
    """Simulates a step under a plan, with these stores."""
    return simulate_step(step, prepare=partial(apply, plan=plan, stores=stores_for(plan, step)))


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

    def same(self, held: Any, first: int, source: torch.Tensor) -> bool:
        """Whether a copy is that of a tensor as it is: always, since nothing is compared on a device."""
        return True


class SimulatedHostStore(OnHost):
    """`OnHost` for the fake tensors of one step, on a device that host memory is no part of."""

    def __init__(self) -> None:
        super().__init__()
        self._apart = TransferQueue(_NoCopies())

    def _queue(self, tensor: torch.Tensor) -> TransferQueue:
        return self._apart

    def settle(self) -> None:
        """Two more regions begin: what has been sent is no longer on the device."""
        self._apart.settle()
