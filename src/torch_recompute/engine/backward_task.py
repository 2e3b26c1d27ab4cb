"""The backward call that runs on this thread, and which region calls are told when it ends.

What a replay has rebuilt is freed when the backward call ends that it ran for, also where that retains its graph and
reads a part of it only: else recomputation would save nothing. A backward that is split in two, as zero-bubble
pipelines split it, looks the same from outside as a second gradient through a retained graph, so it has to say what it
is:

    with torch.utils.checkpoint.GraphExecGroup():
        schedule.step(...)

Inside a group what a call rebuilds stays in the graph. Calls that do not retain it empty it node by node, as plain
autograd does, and the rest goes with the graph: with the second part of its microbatch, not with the group.

Rejected: to ask PyTorch of the nodes behind a reading one whether the running call will run them. A gradient with
respect to an input alone (saliency, penalties) leaves nodes out too, and kept everything until its graph died.

Invariant: no node and no region call is kept alive.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from .. import _torch


class Ending(Protocol):
    """Receives the end of a backward call."""

    def end(self) -> None:
        """Called when it has ended."""
        ...


class Task:
    """A backward call, as one thread sees it.

    Attributes:
        id: PyTorch's number of the call.
        retains: Whether it was asked to retain its graph.
        told: The region calls that are told when it ends, by their identity.
    """

    def __init__(self, number: int) -> None:
        self.id, self.retains = number, _torch.keeps_graph()
        self.told: dict[int, weakref.ref[Ending]] = {}
        _torch.after_backward(self._end)

    def _end(self) -> None:  # on whichever thread the call ends: several devices have several
        for ref in self.told.values():
            if (region_call := ref()) is not None:
                region_call.end()


class _Running(threading.local):
    task: Task | None = None


_running = _Running()


def this_task() -> Task:
    """The running backward call. To be asked within one."""
    now, task = _torch.graph_task_id(), _running.task
    if task is None or task.id != now:
        task = _running.task = Task(now)
    return task
