"""Devices by their makers' data sheets, the hosts that launch their operations, and the device that a step runs on.

A roofline says that an operation takes the longer of two times, that of its FLOPs and that of the bytes it moves, and a
launch besides; a collective that of the bytes that a ring sends and receives over the links. The figures of `DEVICES`
are those of the makers' data sheets (dense, without sparsity), less a share that well-written kernels do not reach.

A device runs what its host launches, so a step has a cost on both sides (`Work`), and `Host.seconds` is the one rule
that makes seconds of it, for options, bounds, plans and stated configurations alike:

    a part of a step takes      max(seconds of its operations on the device, seconds in which the host launches them)
    a step takes                the sum over its parts, and the optimizer's step

A part is one segment (a layer) with its forward, its backward and its replays, or all that is in no segment. An option
of a segment costs what it adds to its part. So costs add up over segments, as solver and bound need it.

Approximated: a host that is ahead of its device in one part is not ahead any more when the next one begins, so a step
whose parts differ is predicted too long, by at most what the device waits for in the others. The optimizer's step is
that of the device alone. A CPU launches for itself: there the two sides are added, not compared.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import errors
from .._torch.cuda import tf32
from ..errors.text import close_to, listed

REACHED_FLOPS, REACHED_BYTES = 0.7, 0.8
_FOUND, _CORRECTED = 0.9897, 0.92
_WITH_CORRECTION = frozenset({"t4", "a10", "a40", "l4", "l40", "l40s"})
UNKNOWN_NETWORK = "network of unknown speed"


@dataclass(frozen=True)
class Work:
    """The work of a device and its host in a part of a step.

    Attributes:
        device: Seconds of its operations on the device.
        launched: Operations of its forward and its backward.
        replayed: Operations that are run again.
        regions: Regions; of one around several segments each has its share.
        calls: Operations of calls that regions keep, and decisions that they carry.
        watched: Operations, in forward and in replays, of regions that look for such calls among them.
    """

    device: float = 0.0
    launched: float = 0
    replayed: float = 0
    regions: float = 0
    calls: float = 0
    watched: float = 0

    def plus(self, other: Work, times: float = 1) -> Work:
        """This and so many times another."""
        return Work(*(getattr(self, f.name) + times * getattr(other, f.name) for f in fields(Work)))

    def times(self, count: float) -> Work:
        """So much of this."""
        return NO_WORK.plus(self, count)


NO_WORK = Work()


@dataclass(frozen=True)
class Host:
    """A process that tells a device what to do, as the seconds that it takes for that.

    Attributes:
        name: As users name it, or the file that it was read from; "" for a device that launches for itself.
        operation: Of an operation of forward or backward: Python, dispatch, autograd, and the launch.
        replayed: Of an operation that a region runs again, with what the engine does for it in forward and backward.
        region: Of each region.
        call: Of an operation in a call that a region keeps, and of a decision that it carries.
        watched: Of an operation, in forward or in a replay, among which a region looks for such calls.
        apart: Whether the device computes meanwhile; a CPU does not.
    """

    name: str = ""
    operation: float = 0.0
    replayed: float = 0.0
    region: float = 0.0
    call: float = 0.0
    watched: float = 0.0
    apart: bool = False

    def launches(self, work: Work) -> float:
        """Its own seconds of some work."""
        plain = self.operation * work.launched + self.replayed * work.replayed
        return plain + self.region * work.regions + self.call * work.calls + self.watched * work.watched

    def seconds(self, work: Work) -> float:
        """The seconds of a part of a step; see the module's docstring."""
        own = self.launches(work)
        return max(work.device, own) if self.apart else work.device + own

    def added(self, plain: Work, more: Work) -> float:
        """The seconds that more work adds to a part of a step."""
        return self.seconds(plain.plus(more)) - self.seconds(plain)

    def waited(self, work: Work) -> float:
        """The seconds of a part of a step in which the device waits for its host."""
        return self.seconds(work) - work.device if self.apart else 0.0

    def __str__(self) -> str:
        each = [(self.operation, "operation"), (self.replayed, "replayed operation"), (self.region, "region")]
        return f"{self.name} ({', '.join(f'{1e6 * seconds:.0f} us per {word}' for seconds, word in each)})"


ITSELF = Host()
"""The host of a device that launches for itself in no time."""
LAUNCH = 3e-6
"""Seconds in which a CUDA driver takes a kernel: "about 3 microseconds with recent hardware and software" for an empty
one, by https://forums.developer.nvidia.com/t/too-much-time-for-kernel-launch-latency/233645 (NVIDIA's forum, 2022)."""
TYPICAL = Host("typical", 12e-6 + LAUNCH, 30e-6 + LAUNCH, region=215e-6, call=40e-6, watched=1.3e-6, apart=True)
"""`torch-recompute calibrate host.json --device cpu`, the median of five runs on 28 Nov 2026: an AMD EPYC (family 25,
model 17), two cores of a virtual machine that others used, too; torch 2.13.0. No host of a GPU has been measured so."""
SLOW = Host("slow", operation=42e-6, replayed=42e-6, region=2.4e-3, call=150e-6, watched=6e-6, apart=True)
"""The host of an H100 on 26 Nov 2026, layers of transformers on tiny tensors: `docs/design/023`. Others are faster."""
HOSTS = {host.name: host for host in (TYPICAL, SLOW)}


GivenHost = Host | str | os.PathLike[str]
"""A host as users name it: a word of `HOSTS`, or a file that `torch-recompute calibrate` has written."""


def typical() -> Host:
    """The host of a device where none is named."""
    return HOSTS["typical"]


def read_host(given: GivenHost) -> Host:
    """Reads the host that launches operations, as users name it.

    Raises:
        ArgumentError: It is no word that is known and no file of a host.
    """
    if isinstance(given, Host):
        return given
    if not isinstance(given, (str, os.PathLike)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise errors.ArgumentError(f"host={given!r} is neither a word nor a file.\n{_WRITE_HOST}")
    if given in HOSTS:
        return HOSTS[str(given)]
    path = Path(given)
    if not path.is_file():
        close = close_to(str(given), HOSTS)
        raise errors.ArgumentError(
            f"host={str(given)!r} is neither {' nor '.join(HOSTS)} nor a file.{close}\n{_WRITE_HOST}"
        )
    try:
        return Host(str(path), **_figures_in(path.read_text(encoding="utf-8")), apart=True)
    except (OSError, ValueError) as error:
        raise errors.ArgumentError(f"host={str(given)!r} is a file that {error}.\n{_WRITE_HOST}") from None


_WRITE_HOST = (
    '  Write host="typical", host="slow", or the path of a file that  torch-recompute calibrate FILE  has written on '
    "the machine of the device."
)
HOST_FIGURES = "operation", "replayed", "region", "call", "watched"
"""The figures of a host; a file has each as a number of seconds, as `operation_seconds`."""


def _figures_in(text: str) -> dict[str, float]:
    """The figures in a file; a ValueError says what is wrong with it."""
    try:
        data: Any = json.loads(text)
    except ValueError as error:
        raise ValueError(f"is no JSON: {error}") from None
    keys = [f"{name}_seconds" for name in HOST_FIGURES]
    missing = [key for key in keys if not isinstance(data, dict) or key not in data]
    if missing:
        raise ValueError(f"has no {listed(missing)}")
    wrong = next((key for key in keys if type(data[key]) not in (int, float) or not 0 < data[key] < 1), None)
    if wrong is not None:
        raise ValueError(f"has {wrong} {data[wrong]!r} in place of a number of seconds above 0 and below 1")
    return {name: float(data[key]) for name, key in zip(HOST_FIGURES, keys, strict=True)}


@dataclass(frozen=True)
class Roofline:
    """A device as two speeds."""

    name: str
    flops: Mapping[int, float]  # per second of products, by bytes of what they read; the widest not above that
    bytes_per_second: float  # of its memory
    launch: float  # seconds that any operation takes at least
    link: float | None = None  # bytes per second to the next device of its group; None for as many as its memory
    kind: str = ""  # the type of device, as PyTorch calls it
    tf32: float | None = None  # FLOPs per second of products in 32 bits with TF32; None where it makes no difference
    host_link: float | None = None  # bytes per second to host memory and back
    capability: tuple[int, int] | None = None  # of a CUDA device, which decides on its kernels
    network: float | None = None  # bytes per second to devices of other nodes; None where that is not known
    node: int = 8  # devices of a node
    memory: int | None = None  # bytes that PyTorch finds; None where it has the memory of the host
    host: Host = ITSELF  # launches its operations

    @property
    def target(self) -> str:
        """Its type and capability, as in "cuda 9.0"."""
        return self.kind if self.capability is None else f"{self.kind} {'.'.join(map(str, self.capability))}"

    def __call__(self, op: Any) -> float:
        """Seconds of an operation, an `Op` of the planner."""
        if op.sent_bytes is not None:
            return op.sent_bytes / self.link_over(op.group.span)[1] + self.launch
        if op.in_host_memory:  # what is computed there is the host's
            return op.results[0].bytes / (self.host_link or self.bytes_per_second) if op.moved else 0.0
        return max(op.all_flops / self._speed(op), op.bytes / self.bytes_per_second) + self.launch

    def link_over(self, ranks: int) -> tuple[str, float]:
        """The slowest link between so many ranks in a row, and its bytes per second."""
        link = self.link or self.bytes_per_second
        if ranks <= self.node:
            return "link", link
        return (UNKNOWN_NETWORK, link) if self.network is None else ("network", self.network)

    def _speed(self, op: Any) -> float:
        # An attention in 16 bits has a log-sum-exp in 32 among its results, and a product of 8 bits its scales.
        size = min((meta.dtype.itemsize for meta in op.read if meta.dtype.is_floating_point), default=4)
        if size == 4 and self.tf32 is not None and tf32(str(op.func)):  # by default for convolutions alone
            return self.tf32
        return self.flops[max((known for known in self.flops if known <= size), default=min(self.flops))]


def _sheet(
    name: str, size: int, capability: tuple[int, int] | None, *speeds: float, fp8: float | None = None
) -> Roofline:
    """A device by its maker's data sheet, less the share that kernels do not reach.

    `size` are the gigabytes that it is sold with. PyTorch finds 79.18 GiB on an H100 of 80, and about as large a share
    on others; of GDDR6 on cards for servers a sixteenth is for error correction.

    `speeds` are TFLOP/s in 16 bits, in TF32 and in 32 bits (TF32's are those of 32 bits where a device has no TF32);
    then GB/s of its memory, to its neighbours and to host memory, one way. `fp8` are TFLOP/s in 8 bits with sums in 32;
    None where it has none. The words of the name are in the name that CUDA has for the device. Without a capability,
    as AMD's devices are, which PyTorch calls "cuda" too, kernels are those of 8.0: flash attention, and no cuDNN.
    """
    half, tf32, single = (speed * 1e12 * REACHED_FLOPS for speed in speeds[:3])
    memory, link, host = (speed * 1e9 * REACHED_BYTES for speed in speeds[3:])
    flops = {2: half, 4: single} if fp8 is None else {1: fp8 * 1e12 * REACHED_FLOPS, 2: half, 4: single}
    network = _NETWORKS.get(name)
    node = 72 if name in ("gb200", "gb300") else 8
    between = None if network is None else network * 1e9 * REACHED_BYTES
    found = int(size * (_CORRECTED if name in _WITH_CORRECTION else _FOUND) * 2**30)
    return Roofline(name, flops, memory, 5e-6, link, "cuda", tf32, host, capability, between, node, found)


# GB/s of a device's share of its system's ports to other nodes, by NVIDIA's data sheets of these systems. Of others it
# depends on who has built them, and is not known here.
_NETWORKS = {
    "v100": 6.25,  # DGX-1: four ports of EDR InfiniBand, 100 Gbit/s each, for eight devices
    **dict.fromkeys(("a100", "a100-40gb"), 25),  # DGX A100: eight of HDR, 200 Gbit/s
    **dict.fromkeys(("h100", "h100-96", "h200", "h800", "b200"), 50),  # DGX H100, H200, B200: eight of NDR, 400 Gbit/s
    "b300": 100,  # DGX B300: eight of XDR, 800 Gbit/s
    "gb200": 50,  # DGX GB200: 72 of NDR
    "gb300": 100,  # DGX GB300: 72 of XDR
}


# Sources: NVIDIA's data sheets of these names, and where none is said; AMD's of MI300X and MI355X. Where there is no
# NVLink, the link is PCI Express.
_SHEETS = (
    _sheet("v100", 32, (7, 0), 125, 15.7, 15.7, 900, 150, 16),
    _sheet("t4", 16, (7, 5), 65, 8.1, 8.1, 320, 16, 16),
    _sheet("a10", 24, (8, 6), 125, 62.5, 31.2, 600, 32, 32),
    _sheet("a30", 24, (8, 0), 165, 82, 10.3, 933, 100, 32),
    _sheet("a40", 48, (8, 6), 149.7, 74.8, 37.4, 696, 56, 32),
    _sheet("a100", 80, (8, 0), 312, 156, 19.5, 2039, 300, 32),
    _sheet("a100-40gb", 40, (8, 0), 312, 156, 19.5, 1555, 300, 32),
    _sheet("a100-pcie", 80, (8, 0), 312, 156, 19.5, 1935, 300, 32),
    _sheet("l4", 24, (8, 9), 121, 60, 30.3, 300, 32, 32, fp8=242),
    _sheet("l40", 48, (8, 9), 181, 90.5, 90.5, 864, 32, 32, fp8=362),
    _sheet("l40s", 48, (8, 9), 362, 183, 91.6, 864, 32, 32, fp8=733),
    _sheet("h20", 96, (9, 0), 148, 74, 44, 4000, 450, 64, fp8=296),
    _sheet("h100", 80, (9, 0), 989, 495, 67, 3350, 450, 64, fp8=1979),
    # With 96 GB of HBM2e, as in torchtitan's benchmarks (arXiv 2410.06511), whose utilization is of the 989 of SXM.
    _sheet("h100-96", 96, (9, 0), 989, 495, 67, 2400, 450, 64, fp8=1979),
    _sheet("h100-pcie", 80, (9, 0), 756, 378, 51, 2000, 300, 64, fp8=1513),
    _sheet("h100-nvl", 94, (9, 0), 835, 417, 60, 3900, 300, 64, fp8=1671),
    _sheet("h200", 141, (9, 0), 989, 495, 67, 4800, 450, 64, fp8=1979),
    _sheet("h200-nvl", 141, (9, 0), 835, 417, 60, 4800, 450, 64, fp8=1671),
    _sheet("h800", 80, (9, 0), 989, 495, 67, 3350, 200, 64, fp8=1979),
    _sheet("gh200", 96, (9, 0), 989, 495, 67, 4000, 450, 450, fp8=1979),
    _sheet("b200", 180, (10, 0), 2250, 1125, 75, 8000, 900, 64, fp8=4500),
    _sheet("b300", 270, (10, 3), 2250, 1125, 75, 8000, 900, 128, fp8=4500),  # HGX B300, an eighth
    # GB200 and GB300 NVL72, a seventy-second; two devices share the 450 GB/s to one Grace.
    _sheet("gb200", 186, (10, 0), 2500, 1250, 80, 8000, 900, 225, fp8=5000),
    _sheet("gb300", 279, (10, 3), 2500, 1250, 80, 8000, 900, 225, fp8=5000),
    _sheet("rtx-a6000", 48, (8, 6), 154.8, 77.4, 38.7, 768, 56, 32),
    _sheet("rtx3090", 24, (8, 6), 71, 35.6, 35.6, 936, 32, 32),
    _sheet("rtx4090", 24, (8, 9), 165, 83, 82.6, 1008, 32, 32, fp8=330),
    _sheet("rtx5090", 32, (12, 0), 209, 105, 104.8, 1792, 64, 64, fp8=419),
    _sheet("mi300x", 192, None, 1307.4, 653.7, 163.4, 5300, 448, 64, fp8=2614.9),  # seven links of Infinity Fabric
    _sheet("mi355x", 288, None, 2516.6, 157.3, 157.3, 8000, 537.6, 64, fp8=5033.2),
)
DEVICES = {sheet.name: sheet for sheet in _SHEETS}
DEVICES["a6000"] = DEVICES["rtx-a6000"]  # as it is mostly called
_OTHER = frozenset({"laptop", "max", "mobile", "super", "ti", "d"})  # which share a name and not its speeds


def connected(sheet: Roofline, link: float | None, network: float | None, node: int | None) -> Roofline:
    """Returns a device with other links: GB/s within a node and between nodes, and the devices of a node."""
    own = sheet.link, sheet.network, sheet.node
    given = None if link is None else link * 1e9, None if network is None else network * 1e9, node
    both = (old if new is None else new for old, new in zip(own, given, strict=True))
    return replace(sheet, **dict(zip(("link", "network", "node"), both, strict=True)))


def data_sheet_of(name: str) -> Roofline | None:
    """The data sheet of a device by the name that CUDA has for it; None where it is not known.

    All words of a sheet's name are words of the device's: an RTX A1000 is no A100. The most words count, so that an
    H100 PCIe is not an H100.
    """
    said = {*re.findall("[a-z0-9]+", name.lower())}
    words = {sheet: {*sheet.replace("rtx", "rtx-").replace("--", "-").split("-")} for sheet in DEVICES}
    fitting = [sheet for sheet in DEVICES if words[sheet] <= said and not said & _OTHER]
    return DEVICES[max(fitting, key=lambda sheet: len(words[sheet]))] if fitting else None


class Where(NamedTuple):
    """Where a step is to run.

    Attributes:
        roofline: Of a device that is named by its data sheet or given as such.
        device: A device of this machine; None for where the model is.
        target: The type and capability that a model's functions are simulated for, as "cuda 9.0"; "" for that of its
            tensors.
    """

    roofline: Roofline | None = None
    device: torch.device | None = None
    target: str = ""


Device = torch.device | str | Roofline | Where | None
"""A device as users name it: one of this machine, a data sheet by name or given as such, or None for the model's."""


def where(device: Device, model: object) -> Where:
    """Reads the device that the step of a model is to run on, as users name it.

    A model on meta that is planned for a device by its data sheet runs nowhere but there, so that device is its target.
    One with weights may run where these are, and is promised what it takes there.

    Raises:
        ArgumentError: The device is no data sheet's and no device.
    """
    if isinstance(device, Where):
        return device
    roofline = DEVICES.get(device.lower()) if isinstance(device, str) else device
    if isinstance(roofline, Roofline):
        module = model if isinstance(model, torch.nn.Module) else None  # other objects are refused by the simulation
        nowhere = module is not None and all(x.is_meta for x in (*module.parameters(), *module.buffers()))
        return Where(roofline, target=roofline.target if nowhere else "")
    try:
        return Where(device=None if device is None else torch.device(device))  # pyright: ignore[reportArgumentType]
    except (RuntimeError, TypeError):
        raise errors.ArgumentError(unknown_device("device", device)) from None


def unknown_device(what: str, device: object) -> str:
    """Text for a device that is not known, with names close to it; `what` is the argument or the option."""
    close = close_to(str(device).lower(), [*DEVICES, "cpu"])
    return (
        f"{what}={device!r} is neither a device of this machine nor one whose speeds are known.{close}\n"
        f"  Known are {', '.join([*DEVICES])}."
    )
