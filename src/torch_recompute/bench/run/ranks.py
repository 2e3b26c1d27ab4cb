"""The ranks of a job that torchrun started, each with trials in processes of its own.

Problem. A trial that dies must not end the job, and the other ranks' processes wait for it in a collective for ever.

Idea. The processes that torchrun started train nothing. They meet in a store only: each starts its rank's process of a
trial, tells the others when that has ended badly, so that they give theirs up, and reads what all of them say. So every
rank has all records and comes to the same result. The trials' own process groups meet in the same store, each under a
prefix of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace

from .launching import Launcher
from .meeting import meet
from .record import DONE, Record
from .trial import Task


class Ranks:
    """One rank alone.

    Attributes:
        rank: This one.
        count: How many there are.
    """

    rank = 0
    count = 1

    def run(self, launcher: Launcher, task: Task) -> list[Record]:
        """The records of a trial, one per rank."""
        return [launcher.run(task)]

    def shared(self, make: Callable[[], str]) -> str:
        """What rank 0 makes, on all ranks."""
        return make()

    def leave(self) -> None:
        """Called at the end."""


class Together(Ranks):
    """Several ranks.

    Args:
        environment: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as torchrun sets them.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.rank, self.count = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        self._local_rank = int(environment.get("LOCAL_RANK", "0"))
        self._address = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        there_already = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        hosts = self.rank == 0 and not there_already
        attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._prefix = f"torch-recompute/{environment.get('TORCHELASTIC_RUN_ID', '')}/{attempt}"
        self._store = meet(*self._address, self._prefix, hosts=hosts)
        self._turn = 0

    def run(self, launcher: Launcher, task: Task) -> list[Record]:
        """The records of a trial, one per rank."""
        turn = self._next()
        bad = f"{turn}/bad"
        task = replace(
            task,
            rank=self.rank,
            ranks=self.count,
            local_rank=self._local_rank,
            store=(*self._address, f"{self._prefix}/{turn}/group"),
        )
        record = launcher.run(task, lambda: self._store.add(bad, 0) > 0)
        if record.status != DONE:
            self._store.add(bad, 1)
        self._store.set(f"{turn}/{self.rank}", json.dumps(record.as_data()))
        said = [self._store.get(f"{turn}/{rank}") for rank in range(self.count)]
        return [Record(**json.loads(text)) for text in said]

    def shared(self, make: Callable[[], str]) -> str:
        """What rank 0 makes, on all ranks."""
        turn = self._next()
        if self.rank == 0:
            self._store.set(f"{turn}/shared", make())
        return self._store.get(f"{turn}/shared").decode()

    def leave(self) -> None:
        """Waits until nobody needs the store any more."""
        self._store.set(f"left/{self.rank}", "")
        if self.rank == 0:
            self._store.wait([f"left/{rank}" for rank in range(self.count)])

    def _next(self) -> int:
        self._turn += 1
        return self._turn


def of_environment() -> Ranks:
    """The ranks that this process is one of."""
    return Together(os.environ) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else Ranks()
