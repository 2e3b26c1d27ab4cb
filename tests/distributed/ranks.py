"""Ranks: a few processes in one gloo group on this machine, which run what a test asks them to.

    RANKS = 3                                                # how many the file's tests run on; 2 if it does not say

    def sums(wanted):                                        # a scenario: a function at the top level of a file
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item() == wanted

    def test_sums(ranks):
        assert ranks.run(sums, 3.0) == [True] * 3            # its result on each rank

Starting a process that imports torch takes seconds, so the processes of a `Pool` serve all files, and each scenario
gets a process group of its own (`dist.init_process_group` has been called when it starts, and is undone when it
ends), with the seed 0 and one thread. A scenario that fails on one rank therefore does not spoil the next.

- `run` returns the results, one per rank, and raises `RankError` with every rank's traceback if one has failed.
- `outcomes` raises nothing: one `Outcome` per rank, with `.value` or `.error` (the traceback as text). It is for
  scenarios that are to fail, or to kill a rank.
- Arguments and results are pickled: numbers, texts, containers, tensors, plans.
- A collective that waits longer than `PATIENCE` fails by itself. A rank that has said nothing within `LIMIT` writes
  all its stacks to stderr and is killed. For each rank that died another is started for the next scenario.

A scenario is found by its file and name, so it may stand in the test's own file; that file is then imported by the
ranks too. Ranks make no errors of warnings.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from support.files import module_at

PATIENCE = datetime.timedelta(seconds=30)  # for one collective
LIMIT = 60.0  # seconds for one scenario
STARTING = 180.0  # seconds until torch is imported, on a machine with much else to do


class RankError(AssertionError):
    """A scenario failed on some rank."""


@dataclass(frozen=True)
class Outcome:
    """What one rank made of a scenario: a value, or the text of an error."""

    value: Any = None
    error: str | None = None


class Pool:
    """Processes that wait for scenarios, as many as were ever asked for at once."""

    def __init__(self) -> None:
        self.folder: tempfile.TemporaryDirectory[str] | None = None  # of the files by which groups find themselves
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        self.scenarios = 0

    def grow(self, count: int) -> None:
        """Starts processes until there are `count`, and others for those that died."""
        self.folder = self.folder or tempfile.TemporaryDirectory()
        environment = {"OMP_NUM_THREADS": "1"}
        if sys.platform == "linux":
            environment["GLOO_SOCKET_IFNAME"] = "lo"  # a machine's own name need not be known to itself
        context = multiprocessing.get_context("spawn")
        dead = [rank for rank, process in enumerate(self.processes[:count]) if process.exitcode is not None]
        missing = [*dead, *range(len(self.processes), count)]
        with mock.patch.dict(os.environ, environment):
            for rank in missing:
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
                process.start()
                theirs.close()
                self.processes[rank : rank + 1] = [process]
                self.pipes[rank : rank + 1] = [ours]
        for pipe in (self.pipes[rank] for rank in missing):
            if not pipe.poll(STARTING):
                raise RankError(f"a rank has not started within {STARTING:.0f} s")
            pipe.recv_bytes()

    def close(self) -> None:
        """Ends the processes."""
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()
        if self.folder is not None:
            self.folder.cleanup()
        self.processes, self.pipes, self.folder = [], [], None


class Ranks:
    """`count` processes of a pool in one group."""

    def __init__(self, pool: Pool, count: int) -> None:
        self.count = count
        self._pool = pool

    def run(self, scenario: Callable[..., Any], *args: Any) -> list[Any]:
        """The results of `scenario(*args)`, one per rank; `RankError` if it fails anywhere."""
        outcomes = self.outcomes(scenario, *args)
        if any(outcome.error is not None for outcome in outcomes):
            texts = [f"-- rank {rank} --\n{outcome.error or 'done'}" for rank, outcome in enumerate(outcomes)]
            raise RankError("\n".join([scenario.__name__, *texts]))
        return [outcome.value for outcome in outcomes]

    def outcomes(self, scenario: Callable[..., Any], *args: Any) -> list[Outcome]:
        """What each rank made of `scenario(*args)`."""
        pool = self._pool
        pool.grow(self.count)
        assert pool.folder is not None
        pool.scenarios += 1
        store = str(Path(pool.folder.name) / str(pool.scenarios))
        task = pickle.dumps((scenario.__code__.co_filename, scenario.__name__, args, store, self.count))
        for pipe in pool.pipes[: self.count]:
            pipe.send_bytes(task)
        deadline = time.monotonic() + LIMIT + 5
        return [self._answer(rank, deadline) for rank in range(self.count)]

    def _answer(self, rank: int, deadline: float) -> Outcome:
        pipe, process = self._pool.pipes[rank], self._pool.processes[rank]
        try:
            if pipe.poll(max(0.0, deadline - time.monotonic())):
                return pickle.loads(pipe.recv_bytes())
            process.kill()
            process.join()
            return Outcome(error=f"killed: no answer within {LIMIT:.0f} s; its stacks are on stderr")
        except EOFError:
            process.join()
            return Outcome(error=f"ended with exit code {process.exitcode}")


def least_peak(run: Callable[[], int], promised: int, times: int = 3) -> int:
    """The least peak of at most so many runs, on each rank; none follows when no rank has more than promised.

    Gloo's thread may hold a buffer a moment after a collective has ended.
    """
    peak = run()
    for _ in range(times - 1):
        higher = torch.tensor(int(peak > promised))
        dist.all_reduce(higher, dist.ReduceOp.MAX)
        if not higher:
            break
        peak = min(peak, run())
    return peak


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(rank: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    pipe.send_bytes(b"started")
    while True:
        try:
            file, name, args, store, count = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        faulthandler.dump_traceback_later(LIMIT)
        try:
            scenario = getattr(_module(file), name)
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=PATIENCE
            )
            dist.barrier()  # a rank that is done at once hangs up on others that are still connecting
            torch.manual_seed(0)
            answer = pickle.dumps(Outcome(scenario(*args)))
        except BaseException:
            answer = pickle.dumps(Outcome(error=traceback.format_exc()))
        finally:
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()
        pipe.send_bytes(answer)


def _module(file: str) -> Any:
    """The module in a file, imported once, under the name that its folder and itself make (`distributed.test_ddp`)."""
    path = Path(file)
    name = f"{path.parent.name}.{path.stem}"
    return sys.modules.get(name) or module_at(path, name)
