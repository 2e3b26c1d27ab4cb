"""Seconds and bytes that were measured on this machine, kept for the next process; the speed of copies to host memory.

A model is planned again each time its training is started, and its operations and copies take what they took the last
time: seconds, and memory while they run. So there is one file for each device, version of torch and (on the
CPU) number of threads:

    $XDG_CACHE_HOME/torch-recompute/prices-NAME.json        by default below ~/.cache

`TORCH_RECOMPUTE_CACHE` names another folder than that of the first two parts. Removing a file has everything measured
again, and nothing else. A file that cannot be read is measured again and said; a folder that cannot be written to is
said. Files are replaced as a whole, so processes that write at once do each other no harm.

The two ways between a device and host memory differ (a GH200 reads from the host more than twice as fast as it writes),
so both are measured, in pinned memory; on the CPU it is the speed of a copy in memory, which is what `OnHost` does
there.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import statistics
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from .. import errors

VERSION = 2
SIZE = 64 * 1024 * 1024
ROUNDS = 5
_said: set[str] = set()


def folder() -> Path:
    """Returns where the files are."""
    if named := os.environ.get("TORCH_RECOMPUTE_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "torch-recompute"


def name_of_cpu() -> str:
    """Names the processor of this machine."""
    said = Path("/proc/cpuinfo")
    found = re.search(r"(?m)^model name\s*:\s*(.+)$", said.read_text(encoding="utf-8") if said.exists() else "")
    return found[1] if found else platform.processor() or platform.machine()


def full_name(device: torch.device) -> str:
    """Names all of a device that prices depend on, and the version of torch."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    if device.type == "cpu":
        name = f"{name_of_cpu()}, {torch.get_num_threads()} threads"
    return f"{name}, torch {torch.__version__}"


class PriceFile:
    """The prices of one device.

    Args:
        name: What the prices depend on.

    Attributes:
        path: The file.
        seconds: What is known, by the hash of an operation, or by a word.
        taken: The bytes that operations take while they run, by their hash; then, of each result, the bytes of its
            memory and its strides.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.path = folder() / f"prices-{re.sub(r'[^A-Za-z0-9.]+', '-', name).strip('-')}.json"
        self.seconds, self.taken = self._read()
        self._saved = self._known

    @property
    def _known(self) -> tuple[int, int]:
        return len(self.seconds), len(self.taken)

    def save(self) -> None:
        """Writes what was measured since, if anything was."""
        if self._known == self._saved:
            return
        seconds, taken = self._read()
        self.seconds, self.taken = seconds | self.seconds, taken | self.taken
        data = {"version": VERSION, "device": self._name, "seconds": self.seconds, "taken": self.taken}
        passing = self.path.with_suffix(f".{os.getpid()}.passing")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            passing.write_text(json.dumps(data, indent=0), encoding="utf-8")
            passing.replace(self.path)
        except OSError as error:
            _say(f"Prices cannot be kept in {self.path.parent} ({error}); the next process measures them again. ")
        self._saved = self._known

    def _read(self) -> tuple[dict[str, float], dict[str, list[list[int]]]]:
        try:
            data: Any = json.loads(self.path.read_text(encoding="utf-8"))
            seconds = cast("dict[str, float]", data["seconds"])
            taken = cast("dict[str, list[list[int]]]", data.get("taken", {}))
            if data["version"] != VERSION or data["device"] != self._name:
                raise ValueError("it is of another version of the library, or another device")
            if not all(isinstance(known, float) and known > 0 for known in seconds.values()):
                raise ValueError("a price is not a number of seconds above 0")
            if not all(len(taken[name][0]) == 1 for name in taken):
                raise ValueError("what an operation takes is not one number of bytes")
            if not all(type(n) is int and n >= 0 for known in taken.values() for part in known for n in part):
                raise ValueError("what an operation takes is not a number of bytes")
        except FileNotFoundError:
            return {}, {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _say(f"{self.path} cannot be read ({error}); prices are measured again and written there. ")
            return {}, {}
        return seconds, taken


def _say(text: str) -> None:
    if text not in _said:
        _said.add(text)
        warnings.warn(f"{text}(Said once.)", RuntimeWarning, stacklevel=3)


class Bandwidth(NamedTuple):
    """Bytes per second between a device and host memory.

    Attributes:
        to_host: From the device to the host.
        to_device: Back.
    """

    to_host: float
    to_device: float


_WAYS = {"GB to host", "GB to device"}
_known: dict[str, Bandwidth] = {}
_measuring = threading.Lock()


def bandwidth(device: torch.device | str | None = None) -> Bandwidth:
    """Measures how fast tensors travel between a device and host memory, once per kind of device.

    The figures are kept in the device's file of prices, in the folder that the environment variable
    `TORCH_RECOMPUTE_CACHE` names, by default `torch-recompute` in the user's cache folder. Where it cannot be written,
    each process measures again. Delete the file after changing the machine's memory or links.

    Args:
        device: A CUDA device of this machine, or "cpu"; by default the present CUDA device, or the CPU where there is
            none.

    Returns:
        Bytes per second each way.

    Raises:
        ArgumentError: `device` is something else.
    """
    target = _device(device)
    with _measuring:
        name = full_name(target)
        if name not in _known:
            file = PriceFile(name)
            if not file.seconds.keys() >= _WAYS:
                found = _measure_cpu() if target.type == "cpu" else _measure_cuda(target)
                file.seconds |= {"GB to host": 1e9 / found.to_host, "GB to device": 1e9 / found.to_device}
                file.save()
            _known[name] = Bandwidth(1e9 / file.seconds["GB to host"], 1e9 / file.seconds["GB to device"])
        return _known[name]


def _device(device: Any) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    with contextlib.suppress(RuntimeError, TypeError):
        target = torch.device(device)
        if target.type == "cpu" or (target.type == "cuda" and (target.index or 0) < torch.cuda.device_count()):
            return target
    raise errors.ArgumentError(
        f"bandwidth({device!r}): expected a CUDA device of this machine, or 'cpu'.\n"
        "  Write bandwidth() for the machine's accelerator, or for the CPU where there is none."
    )


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
