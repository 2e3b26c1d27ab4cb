"""A CPU that runs out of memory where a test says so: an allocator that counts, has a limit, and fails on demand.

    with limited(40_000_000) as memory:
        step()                       # raises torch.OutOfMemoryError where it needs more
        memory.live(), memory.lap()  # the bytes alive, and the most alive since `memory.reset_lap()`
        memory.fail_at(3)            # the third allocation from now fails

`limited.cpp` is compiled once for each version of torch and of the source, beside the bytecode of this file. What is
counted is what tensors and kernels ask for from the beginning of the block on. Memory that tensors had before is not;
when it is resized they ask the allocator that it came from. What outlives the block stays valid. Blocks nest, and each
counts.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).with_suffix(".cpp")
_COMPILER = os.environ.get("CXX", "g++")


def missing() -> str:
    """Why there can be no such allocator on this machine; empty where there can."""
    found = shutil.which(_COMPILER)
    return "" if found else f"an allocator with a limit is compiled by {_COMPILER}, which is not on the path"


@functools.cache
def _library() -> ctypes.CDLL:
    """The compiled source."""
    home = Path(torch.__file__).parent
    abi = int(torch.compiled_with_cxx11_abi())
    options = ["-std=c++20", "-O1", "-shared", "-fPIC", "-w", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    command = [_COMPILER, *options, f"-I{home / 'include'}", str(SOURCE), f"-L{home / 'lib'}", "-lc10"]
    key = hashlib.sha256("\0".join([torch.__version__, SOURCE.read_text(), *command]).encode()).hexdigest()[:16]
    built = SOURCE.parent / "__pycache__" / f"limited-{key}.so"
    if not built.exists():
        built.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=built.parent) as folder:  # several processes may build it at once
            made = Path(folder) / built.name
            subprocess.run([*command, "-o", str(made)], check=True)
            os.replace(made, built)
    library = ctypes.CDLL(str(built))
    library.limited_begin.restype = ctypes.c_void_p
    library.limited_end.restype = ctypes.c_bool
    return library


class Limited:
    """The allocator in use; made by `limited`."""

    def __init__(self) -> None:
        self._library = _library()
        self._handle = ctypes.c_void_p(self._library.limited_begin())

    def _end(self) -> None:
        self.limit = None
        self.fail_at(None)
        assert self._library.limited_end(self._handle), "another allocator was set within, and is there still"

    def _read(self) -> Any:
        numbers = (ctypes.c_int64 * 4)()
        self._library.limited_read(self._handle, numbers)
        return numbers

    def live(self) -> int:
        """The bytes alive, exactly as they were asked for."""
        return self._read()[0]

    def lap(self) -> int:
        """The most bytes alive since `reset_lap`."""
        return self._read()[1]

    def reset_lap(self) -> None:
        """Begins a lap: the most alive is what is alive now."""
        self._library.limited_reset_lap(self._handle)

    @property
    def count(self) -> int:
        """The allocations so far that did not fail; those of no bytes do not count."""
        return self._read()[2]

    @property
    def limit(self) -> int | None:
        """The bytes that may be alive; None for any number."""
        found = self._read()[3]
        return None if found < 0 else found

    @limit.setter
    def limit(self, limit: int | None) -> None:
        self._library.limited_limit(self._handle, ctypes.c_int64(-1 if limit is None else limit))

    def fail_at(self, nth: int | None, *, forever: bool = False) -> None:
        """Makes one allocation fail.

        Args:
            nth: Which one, counted from now: 1 is the next. None: none does.
            forever: All after it fail as well, until told otherwise.
        """
        self._library.limited_fail(self._handle, ctypes.c_int64(nth or 0), ctypes.c_bool(forever))


@contextmanager
def limited(limit: int | None = None) -> Iterator[Limited]:
    """Tensors on the CPU are allocated by one that counts, and that raises `torch.OutOfMemoryError` beyond a limit."""
    memory = Limited()
    memory.limit = limit
    try:
        yield memory
    finally:
        memory._end()
