"""The backward call that runs on this thread, and whether it is one of several halves.

Zero-bubble pipelines run backward in parts: one call for the gradients of a stage's inputs, which retains the graph,
and later one for each group of weights. A region is to be replayed once for all of them, so what the first call has
rebuilt must stay in the graph until the last one has read it. A call that merely retains its graph looks the same from
outside, and there the rebuilt tensors must go, or recomputation would save nothing.

The difference is in the graph: a half leaves out nodes that lead on from those it runs. PyTorch says of every node
whether the running call will run it, so a region asks that, when its replay begins, of its own nodes behind the
reading one, and of each reading node later. A branch that none of these leads to shows at the end, by slots that
were not read, if this call has been seen to be a half elsewhere.

Rejected: to ask only whether the call computes the gradients of the region's parameters. A scale, a bias or an
embedding is not saved where it is used, and a weight that is frozen has no gradient in any call. Rejected as well:
`torch.utils.checkpoint.GraphExecGroup` as the only way to say it (it is understood): PyTorch's schedules enter none.

Invariants: a call that does not retain its graph is not looked at; no node is kept afterwards.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from .. import _torch


class Ending(Protocol):
    """Receives the end of a backward call."""

    def end(self, kept: bool, split: bool) -> None:
        """Called with whether the call retained its graph, and whether it was seen to leave out a part of it."""
        ...


class Task:
    """A backward call, as one thread sees it.

    Attributes:
        id: PyTorch's number of the call.
        kept: Whether it was asked to retain its graph.
        region_calls: The region calls to notify when it ends.
        split: Whether it was seen to leave out a part of the graph that it was asked to retain.
    """

    split = False
    id: int
    kept: bool
    region_calls: list[weakref.ref[Ending]]


class _Running(threading.local):
    task: Task | None = None


_running = _Running()


def this_task() -> Task:
    """The running backward call. To be asked within one."""
    now, task = _torch.graph_task_id(), _running.task
    if task is None or task.id != now:
        started = task = _running.task = Task()
        task.id, task.kept, task.region_calls = now, _torch.keeps_graph(), []

        def end() -> None:
            last = _running.task  # another than the one started, if a backward inside this one came in between
            split = started.split or (last is not None and last.id == now and last.split)
            for ref in started.region_calls:  # on whichever thread the call ends: several devices have several
                if (region_call := ref()) is not None:
                    region_call.end(started.kept, split)

        _torch.after_backward(end)
    return task


def leaves_undone(first: int | None = None) -> bool:
    """Whether the running backward call leaves out nodes behind the one that runs now.

    Args:
        first: A sequence number. Nodes made since then are followed on; without it only the first edges are looked at.
    """
    node = _torch.current_node()
    todo = [] if node is None else [node]
    seen = set(todo)
    while todo:
        for after in {edge for edge, _ in todo.pop().next_functions if edge is not None} - seen:
            if not _torch.will_run(after):
                return True
            seen.add(after)
            if first is not None and _torch.sequence_of(after) >= first:
                todo.append(after)
    return False
