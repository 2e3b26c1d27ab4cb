"""Trials in processes of their own: started, watched, and their ends understood.

A trial that runs out of memory may raise an error, be killed by the system, or die of a signal in code that cannot
raise. Whatever it is, this process lives on, and the trial has a record.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from .capacity import MESSAGES
from .record import FAILED, OUT, STOPPED, Record
from .trial import Task

if TYPE_CHECKING:
    from typing_extensions import Self

MODULE = __name__.rpartition(".")[0]
PACKAGES = Path(__file__).resolve().parents[3]
LOOK = 0.05  # seconds
TAIL = 2000  # characters of what a process wrote last


class Launcher:
    """Runs trials, one at a time; a context manager, which leaves no process behind."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="torch-recompute-")
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        self._folder.cleanup()

    def run(self, task: Task, given_up: Callable[[], bool] = lambda: False) -> Record:
        """The record of a trial.

        Args:
            task: What is to be done.
            given_up: Asked while it runs; a trial that is given up is killed.
        """
        folder = Path(self._folder.name)
        given, to, said = folder / "task.json", folder / "record.json", folder / "said"
        given.write_text(json.dumps(asdict(task), default=list), encoding="utf-8")
        to.unlink(missing_ok=True)
        if self._process is None or self._process.poll() is not None:
            self._start(said)
        begins = said.stat().st_size
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{given}\t{to}\n")
            self._process.stdin.flush()
        code = self._wait(given_up)
        if not task.forks:
            self._close()
        if code is None:
            return Record(STOPPED, "another rank had ended")
        if code == 0 and to.is_file():
            return Record(**json.loads(to.read_text(encoding="utf-8")))
        with said.open("rb") as file:
            file.seek(begins)
            text = file.read().decode(errors="replace")[-TAIL:].strip()
        return ended_badly(code, text)

    def _start(self, said: Path) -> None:
        self._close()
        # The same package as here, whatever is installed.
        paths = [str(PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
        with said.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,
            )
        self._lines = queue.Queue()
        self._reader = threading.Thread(target=_read, args=(self._process, self._lines), daemon=True)
        self._reader.start()

    def _wait(self, given_up: Callable[[], bool]) -> int | None:
        """The exit code; None if the trial was given up."""
        while True:
            try:
                line = self._lines.get(timeout=LOOK)
            except queue.Empty:
                if given_up():
                    self._close()
                    return None
                continue
            if line is None:
                assert self._process is not None
                return self._process.wait()
            return int(line)

    def _close(self) -> None:
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(BrokenPipeError), self._process:  # which waits, and closes its pipes
            self._reader.join()
        self._process = None


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def ended_badly(code: int, text: str) -> Record:
    """The record of a trial that could not write one.

    Args:
        code: Its exit code, negative for a signal.
        text: What it wrote last.
    """
    last = text.splitlines()[-1] if text else "it wrote nothing"
    if code >= 0:
        return Record(FAILED, f"exit code {code}: {last}")
    name = signal.Signals(-code).name
    if -code == signal.SIGKILL:
        return Record(OUT, f"killed by {name}, as the system does where memory runs out")
    if any(said in text.lower() for said in MESSAGES):
        return Record(OUT, f"died of {name}: {last}")
    return Record(FAILED, f"died of {name}: {last}")
