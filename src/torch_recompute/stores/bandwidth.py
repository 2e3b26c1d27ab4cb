"""How fast a device and host memory copy to each other, measured.

A planner has to know what it costs to send a tensor away and call it back. The two ways differ (a GH200 reads from the
host more than twice as fast as it writes), and data sheets say what a link could do, so both are measured: pinned
memory, a copy that is long enough to hide its start, the median of several. That takes some milliseconds, but pinning
memory takes longer, so the figures are kept: in the process, and on disk by the name of the device, as JSON.

On the CPU it is the speed of a copy in memory, which is what `OnHost` does there.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from .. import errors

SIZE = 64 * 1024 * 1024
ROUNDS = 5
VARIABLE = "TORCH_RECOMPUTE_CACHE"
FILE = "bandwidth.json"


class Bandwidth(NamedTuple):
    """Bytes per second between a device and host memory.

    Attributes:
        to_host: From the device to the host.
        to_device: Back.
    """

    to_host: float
    to_device: float


_known: dict[str, Bandwidth] = {}
_measuring = threading.Lock()


def bandwidth(device: torch.device | str | None = None) -> Bandwidth:
    """How fast tensors travel between a device and host memory; measured once per kind of device.

    The figures are kept in `bandwidth.json` in the folder that the environment variable `TORCH_RECOMPUTE_CACHE` names,
    by default `torch-recompute` in the user's cache folder. Where it cannot be written, each process measures anew.
    Delete the file after changing the machine's memory or links.

    Args:
        device: A CUDA device of this machine, or "cpu"; by default the present CUDA device, or the CPU where there is
            none.

    Returns:
        Bytes per second each way.

    Raises:
        ArgumentError: `device` is something else.
    """
    target, name = _device(device)
    with _measuring:
        if name not in _known:
            found = _read().get(name)
            if found is None:
                found = _measure_cpu() if target.type == "cpu" else _measure_cuda(target)
                _write(name, found)
            _known[name] = found
        return _known[name]


def _not_a_device(device: object) -> str:
    """Text for a device whose copies cannot be timed."""
    return (
        f"bandwidth({device!r}): expected a CUDA device of this machine, or 'cpu'.\n"
        "  Write bandwidth() for the machine's accelerator, or for the CPU where there is none."
    )


def _device(device: Any) -> tuple[torch.device, str]:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError):
        raise errors.ArgumentError(_not_a_device(device)) from None
    if target.type == "cpu":
        return target, f"cpu: {platform.processor() or platform.machine()}"
    if target.type != "cuda" or (target.index or 0) >= torch.cuda.device_count():
        raise errors.ArgumentError(_not_a_device(device))
    return target, torch.cuda.get_device_name(target)


def _median(copy: Callable[[], float]) -> float:
    copy()
    return SIZE / statistics.median(copy() for _ in range(ROUNDS))


def _measure_cpu() -> Bandwidth:
    one, other = (torch.zeros(SIZE, dtype=torch.uint8, device="cpu") for _ in range(2))

    def copy(target: torch.Tensor, source: torch.Tensor) -> float:
        start = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - start

    return Bandwidth(_median(lambda: copy(one, other)), _median(lambda: copy(other, one)))


def _measure_cuda(device: torch.device) -> Bandwidth:
    with torch.cuda.device(device):
        host = torch.zeros(SIZE, dtype=torch.uint8, device="cpu", pin_memory=True)
        there = torch.zeros(SIZE, dtype=torch.uint8, device="cuda")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())

        def copy(target: torch.Tensor, source: torch.Tensor) -> float:
            with torch.cuda.stream(stream):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                target.copy_(source, non_blocking=True)
                end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1000

        return Bandwidth(_median(lambda: copy(host, there)), _median(lambda: copy(there, host)))


def _path() -> Path:
    folder = os.environ.get(VARIABLE)
    if folder:
        return Path(folder) / FILE
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch-recompute" / FILE


def _read() -> dict[str, Bandwidth]:
    try:
        data: Any = json.loads(_path().read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):  # not there, not JSON, no home
        return {}
    found: dict[str, Bandwidth] = {}
    for name, pair in cast("dict[str, Any]", data).items() if isinstance(data, dict) else ():
        if isinstance(pair, list) and len(cast("list[Any]", pair)) == 2:
            speeds = cast("list[Any]", pair)
            if all(isinstance(speed, (int, float)) and speed > 0 for speed in speeds):
                found[name] = Bandwidth(*map(float, speeds))
    return found


def _write(name: str, found: Bandwidth) -> None:
    with contextlib.suppress(OSError, RuntimeError):
        path = _path()
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**{known: list(pair) for known, pair in _read().items()}, name: list(found)}, indent=1)
        handle, part = tempfile.mkstemp(dir=path.parent, prefix=FILE)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text + "\n")
            os.replace(part, path)
        except BaseException:
            os.unlink(part)
            raise
