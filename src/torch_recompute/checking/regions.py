"""What each region of a simulated step drops, what of that stays alive all the same, and what it runs again.

Problem. "I turned it on and the memory hardly moved": a region drops every reference it has, but what it drops may be
held by others. The consumer of a fused attention saves its output; a softmax saves nothing but its output, and a region
around it keeps the input as well, which nothing kept before.

Idea. Count it where it happens, on the fake tensors of one simulated step. Each region is told to say what it drops;
when the loss is there, the graph is walked (`memory/holders.py`), and memory that was dropped and is held by somebody
else is *pinned*, memory that a region holds and nobody else is *held*. What the region frees is

    dropped - pinned - held

and that is, to the byte, what the step keeps less than without it. Regions inside others are booked with the outermost;
between a saved call of that one and a region inside it, what the latter is given counts as held, although the plain
call keeps it too. Operations and their FLOPs are counted by the region they run in, forward and replay apart, so that
work done a third time shows.

Names are those of regions with the numbers in them as `*`, as in all tables here: the layers of a stack are one row.

Invariants. The step is that of `simulate`: nothing runs, and nothing here keeps a tensor or a region alive.
"""

from __future__ import annotations

import re
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import _compat
from .._frame import Frame
from .._observer import Observer, running
from ..memory.holders import Holders
from ..memory.ledger import storages
from ..planning.ops import op_of
from ..planning.prices import flops_of
from ..values import thread


@dataclass
class Account:
    """The regions of one name, all their calls in one step together.

    Attributes:
        name: The name, numbers as `*`.
        paths: The names themselves, in order of their calls.
        calls: How often they were called in forward.
        inside: The name of the region that they are called in; "" for none.
        dropped_bytes: What autograd saved in them and they did not keep. This and the next three are 0 for regions
            inside others: what those drop is booked with the outermost.
        pinned_bytes: What of that something else holds.
        pinned_by: Who: nodes of the graph, as `MmBackward0 (self)`, and other regions.
        held_bytes: What they keep, inputs mostly, and nobody else does.
        forward_ops: Operations in their forwards.
        replay_ops: Operations in their replays, and in replays of regions around them.
        forward_flops: FLOPs of products and attention in their forwards.
        replay_flops: The same for replays.
        attention_flops: The FLOPs of fused attention in `forward_flops`.
    """

    name: str
    paths: list[str] = field(default_factory=list)
    calls: int = 0
    inside: str = ""
    dropped_bytes: int = 0
    pinned_bytes: int = 0
    pinned_by: list[str] = field(default_factory=list)
    held_bytes: int = 0
    forward_ops: int = 0
    replay_ops: int = 0
    forward_flops: float = 0
    replay_flops: float = 0
    attention_flops: float = 0

    @property
    def freed_bytes(self) -> int:
        """What the step keeps less for them; below 0 where it keeps more."""
        return self.dropped_bytes - self.pinned_bytes - self.held_bytes


class Accounts(Observer):
    """The books of the regions in one simulated step.

    Attributes:
        by_name: One entry per name.
        flops: FLOPs of products and attention by phase: "forward", "replay", "backward".
    """

    def __init__(self) -> None:
        self.by_name: dict[str, Account] = {}
        self.flops: dict[str, float] = dict.fromkeys(("forward", "replay", "backward"), 0.0)
        self._tops: weakref.WeakKeyDictionary[Frame, _Outermost] = weakref.WeakKeyDictionary()
        self._outermost: list[_Outermost] = []
        self._around: dict[str, str] = {}
        self._born: dict[int, weakref.ref[Any]] = {}

    def watch(self, _: str, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Called with each operation of the step."""
        run, op = thread.run, op_of(func, args, kwargs, out)
        flops = 0 if op is None else flops_of(op)
        given = {id(storage) for _, storage in storages((args, kwargs))}
        self._born.update({id(s): weakref.ref(s) for _, s in storages(out) if id(s) not in given})
        if run is None:
            self.flops["backward" if _compat.in_backward() else "forward"] += flops
            return
        account, work = self._account(run.name), int(str(func) != "aten.detach.default")  # the engine's own
        if run.replaying:
            self.flops["replay"] += flops
            account.replay_flops += flops
            account.replay_ops += work
            return
        self.flops["forward"] += flops
        if isinstance(run, Frame) and run not in self._tops:
            self._enter([at.run for at in running() if at.kind == "forward"])
        account.forward_ops += work
        account.forward_flops += flops
        if is_attention(func):
            account.attention_flops += flops

    def dropped(self, frame: Any, tensor: torch.Tensor) -> None:
        """Books a tensor that a region drops with the outermost one around it."""
        top = self._tops.get(frame)
        if top is not None:
            top.drop(tensor)

    def close(self, value: object) -> None:
        """Called when the loss is there, with it: books who holds what."""
        holders = Holders()
        holders.start(value)
        holders.walk()
        for one in self._outermost:
            for key, (ref, nbytes) in one.dropped.items():
                hold = holders.of.get(key)
                if hold is None or ref() is None:
                    continue
                others = [name for name in map(self._top, hold.regions) if name != one.name]
                if hold.plain or others:
                    one.account.pinned_bytes += nbytes
                    one.account.pinned_by += hold.savers if hold.plain else [f"the region {starred(others[0])}"]
            one.account.pinned_by = list(dict.fromkeys(one.account.pinned_by))
        for key, hold in holders.of.items():
            born = self._born.get(key)
            storage = None if born is None else born()
            if storage is not None and hold.regions and not hold.plain and not hold.in_region:
                self._account(self._top(hold.regions[0])).held_bytes += int(storage.nbytes())
        self._outermost.clear()
        self._born.clear()

    def _account(self, name: str) -> Account:
        key = starred(name)
        return self.by_name.setdefault(key, Account(key))

    def _top(self, held_by: str) -> str:
        """The outermost region around the one of a name, or around a saved call in it, as `layer 3 / attention`."""
        name = held_by.partition(" / ")[0]
        return self._around.get(name, name)

    def _enter(self, frames: list[Frame]) -> None:
        """Notes the calls of regions that run now, the outermost first, at the first operation in the innermost."""
        top = None
        for around, frame in zip([None, *frames], frames, strict=False):
            account = self._account(frame.name)
            top = self._tops.get(frame, top)
            if top is None:
                top = _Outermost(frame.name, account)
                self._outermost.append(top)
            elif around is not None:
                account.inside = starred(around.name)
                self._around[frame.name] = top.name
            if frame not in self._tops:
                self._tops[frame] = top
                account.calls += 1
                account.paths.append(frame.name)


class _Outermost:
    """One call of a region that is in no other."""

    def __init__(self, name: str, account: Account) -> None:
        self.name, self.account = name, account
        self.dropped: dict[int, tuple[weakref.ref[Any], int]] = {}

    def drop(self, tensor: torch.Tensor) -> None:
        """Books a tensor that it, or a region in it, drops: its storage, once."""
        for _, storage in storages(tensor):
            known = self.dropped.get(id(storage))
            if known is None or known[0]() is not storage:
                self.dropped[id(storage)] = weakref.ref(storage), int(storage.nbytes())
                self.account.dropped_bytes += int(storage.nbytes())


def starred(name: str) -> str:
    """A name with the numbers in it as `*`."""
    return re.sub(r"\d+", "*", name)


def is_attention(func: Any) -> bool:
    """Whether an operation is fused attention, forward or backward."""
    name = str(func)
    return "scaled_dot_product" in name or "flash_attention" in name or "flex_attention" in name
