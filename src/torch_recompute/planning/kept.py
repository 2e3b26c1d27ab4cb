"""Prices that were measured, kept from one process to the next.

A model is planned again each time its training is started, and its operations take what they took the last time. So
what was measured is kept in one file for each device, version of torch and (on the CPU) number of threads:

    $XDG_CACHE_HOME/torch-recompute/prices-NAME.json        by default below ~/.cache

`TORCH_RECOMPUTE_CACHE` names another folder than that of the first two parts.

Removing a file, or the folder, has everything measured anew, and that is all that it does. A file that cannot be read
is measured anew and said; a folder that cannot be written to is said. Files are replaced as a whole, so processes that
write at once do each other no harm: what both measured is there, or what the last one did.

Operations are known by a hash of their name and arguments. What could not be run is not kept, since another time there
may be more memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import warnings
from pathlib import Path
from typing import Any, cast

import torch

from .ops import Op

VERSION = 1
_said: set[str] = set()


def folder() -> Path:
    """Where the files are."""
    named = os.environ.get("TORCH_RECOMPUTE_CACHE")
    return (
        Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "torch-recompute"
    )


def key_of(op: Op) -> str:
    """What an operation is known by in a file."""
    return hashlib.sha256(repr((str(op.func), op.args, op.kwargs)).encode()).hexdigest()[:32]


def full_name(device: torch.device) -> str:
    """All of a device that prices depend on, and the version of torch."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    if device.type == "cpu":
        name = f"{_processor()}, {torch.get_num_threads()} threads"
    return f"{name}, torch {torch.__version__}"


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


class Kept:
    """The prices of one device.

    Args:
        name: What the prices depend on.

    Attributes:
        path: The file.
        seconds: What is known, by `key_of` an operation, or by a word.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.path = folder() / f"prices-{re.sub(r'[^A-Za-z0-9.]+', '-', name).strip('-')}.json"
        self.seconds = self._read()
        self._saved = len(self.seconds)

    def save(self) -> None:
        """Writes what was measured since, if anything was."""
        if len(self.seconds) == self._saved:
            return
        self.seconds = self._read() | self.seconds
        data = {"version": VERSION, "device": self._name, "seconds": self.seconds}
        passing = self.path.with_suffix(f".{os.getpid()}.passing")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            passing.write_text(json.dumps(data, indent=0), encoding="utf-8")
            passing.replace(self.path)
        except OSError as error:
            _say(f"Prices cannot be kept in {self.path.parent} ({error}); the next process measures them again. ")
        self._saved = len(self.seconds)

    def _read(self) -> dict[str, float]:
        try:
            data: Any = json.loads(self.path.read_text(encoding="utf-8"))
            seconds = cast("dict[str, float]", data["seconds"])
            if data["version"] != VERSION or data["device"] != self._name:
                raise ValueError("it is of another version of the library, or another device")
            if not all(isinstance(known, float) and known > 0 for known in seconds.values()):
                raise ValueError("a price is not a number of seconds above 0")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _say(f"{self.path} cannot be read ({error}); prices are measured anew and written there. ")
            return {}
        return seconds


def _say(text: str) -> None:
    if text not in _said:
        _said.add(text)
        warnings.warn(f"{text}(Said once.)", RuntimeWarning, stacklevel=3)
