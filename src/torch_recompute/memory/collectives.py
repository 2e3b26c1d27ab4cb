"""Collectives in elastic regions: seen in a region's first call, and then refused, left alone, or agreed on.

Each rank evicts by its own memory. A rank that replays a region alone waits for ever in a collective that the others
do not make. So the calls of a region until its first backward, of which the first is never kept, run under a dispatch
mode on several ranks, in their forwards and replays. What it shows is taken to hold for the calls that follow:

- A collective in a saved call is not repeated. Such a saved call is not emptied.
- One that a replay repeats is refused, in the forward, at its line; among the ranks of a group that agree, it is left.
- The hooks of sharded modules gather weights. In a replay these are there, if the module's own hook before its
  backward has run by then. So such a region keeps nothing until its first replay has shown that it gathers nothing,
  which is refused too. In the first step every region is replayed, so what one gathers for another is seen.
- A forward with any collective is not run again after an allocation that failed.

The ranks of a group agree when the backward of a call begins that they have not agreed on: at the first tensor that it
reads, replayed or not, so at one place in the graph on every rank. One reduction tells each rank what the others have
evicted of this call and those whose forward was before, in that order: of all the regions of a microbatch, where its
last one comes first. It evicts the same, and these calls are not evicted any more. A call that was kept and is not now
is replayed at once, as on the ranks that had evicted it.

Rejected: to decide in the forward, when nobody knows yet what will be short; an agreement per call, with 32 messages in
the place of one for a model of 32 layers; to tell the hooks of sharding apart by what they gather, in the place of by
whose code it is.

Invariants: no mode is active once a region is known. The pool's lock is not held while ranks wait for each other. Not
seen: what other packages send without torch's operations.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .. import errors
from .._torch import TorchDispatchMode
from .._torch.ranks import dispatches, members
from ..engine.elastic import ElasticCall
from ..engine.region_call import Contexts, Phase
from ..state.tape import thread

_NAMESPACES = frozenset(
    {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"}
)
_LOCAL = frozenset({"wait_tensor", "_wrap_tensor_autograd", "mesh_get_process_group", "check_for_nan"})
_SHARDING = (
    os.path.join(os.path.dirname(torch.__file__), "distributed", "fsdp") + os.sep,
    os.path.join("deepspeed", "runtime", "zero") + os.sep,
)


@functools.cache
def _is_collective(func: Any) -> bool:
    namespace, _, name = func.name().partition("::")
    return namespace in _NAMESPACES and name.partition(".")[0] not in _LOCAL


def _in_sharding() -> bool:
    """Whether the running operation is one of a sharded module's hooks."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        if any(place in frame.f_code.co_filename for place in _SHARDING):
            return True
        frame = frame.f_back
    return False


def several_ranks() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class _CollectivesMode(TorchDispatchMode):
    """Calls `seen` with each collective before it runs. What is compiled stays compiled under it."""

    supports_higher_order_operators = True

    def __init__(self, seen: Callable[[str, frozenset[int] | None], None]) -> None:
        super().__init__()
        self._seen = seen

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Says to the compiler that the mode changes nothing."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _is_collective(func):
            among = members(args)
            if among is None or len(among) > 1:
                self._seen(func.name().replace("::", ".").removesuffix(".default"), among)
        elif any(map(dispatches, types)):
            return NotImplemented  # so that the subclass makes its collectives under this mode
        return func(*args, **(kwargs or {}))


class Collectives:
    """The collectives of one region.

    Args:
        region: The region's name.
        agreement: How ranks agree on what they replay, if they do.

    Attributes:
        saved: The names of the saved calls that make one.
        repeated: One that a replay repeats on all ranks or none, by PyTorch's name; "" for none.
    """

    def __init__(self, region: str, agreement: Agreement | None) -> None:
        self.saved: set[str] = set()
        self.repeated = ""
        self._region, self._agreement = region, agreement
        self._any = self._gathered = ""
        self._known = False

    @property
    def unclear(self) -> bool:
        """Whether only a replay can show that weights are not gathered again."""
        return bool(self._gathered) and not self._known

    def watch(self, call: ElasticCall) -> Contexts | None:
        """Returns what is entered around the forward and the replays of a call; None once the region is known."""
        if self._known or not several_ranks():
            return None
        forward = functools.partial(self._in_forward, weakref.ref(call))
        return lambda: (_CollectivesMode(forward), _CollectivesMode(self._repeats))

    def seen(self, replayed: bool) -> None:
        """Notes that a backward has begun, after forwards that were watched, or that a replay has ended."""
        self._known = self._known or (several_ranks() and (replayed or not self._gathered))

    def unrepeatable(self, replaying: bool) -> str:
        """A sentence on why a forward, or a replay, cannot be run again; "" where it can."""
        found = self.repeated if replaying else self._any
        return f"it makes a collective ({found}), which the other ranks would not make again" if found else ""

    def _in_forward(self, watched: weakref.ref[ElasticCall], operation: str, among: frozenset[int] | None) -> None:
        call = watched()
        if call is None or call.phase is not Phase.FORWARD:
            return  # a region inside is replayed under the modes of its forward
        self._any = self._any or operation
        saved = call.in_saved_call()
        if saved:
            self.saved.add(saved)
        elif thread.run is not None:  # else in a saved call of a region inside, or a choice
            self._repeats(operation, among, may=True)

    def _repeats(self, operation: str, among: frozenset[int] | None, may: bool = False) -> None:
        sharding = _in_sharding()
        if self._agreement is not None and self._agreement.covers(among):
            self.repeated = self.repeated or operation
        elif sharding and may:
            self._gathered = operation
        else:
            raise errors.ArgumentError(_refused(self._region, operation, among, sharding))


class Agreement:
    """The calls that the ranks of a group replay all or none.

    Args:
        group: The ranks, with a backend for the CPU.
        lock: The pool's.
    """

    def __init__(self, group: Any, lock: threading.RLock) -> None:
        _check_group(group)
        self._group, self._pool_lock = group, lock
        self._ranks = frozenset(dist.get_process_group_ranks(group))
        self._lock = threading.Lock()
        self._open: list[weakref.ref[ElasticCall]] = []
        self._settled: weakref.WeakSet[ElasticCall] = weakref.WeakSet()

    def covers(self, ranks: frozenset[int] | None) -> bool:
        """Whether all ranks of a collective agree; what is not known is taken to be so."""
        return ranks is None or ranks <= self._ranks

    def add(self, call: ElasticCall) -> None:
        """Adds a call whose forward has ended, on every rank."""
        self._open.append(weakref.ref(call))

    def settled(self, call: ElasticCall) -> bool:
        """Whether the ranks have agreed on a call, which therefore stays as it is."""
        return call in self._settled

    def agree(self, call: ElasticCall, evict: Callable[[ElasticCall, bool], object]) -> None:
        """Agrees on a call whose backward begins, and on those before it; returns at once where that is done.

        Args:
            call: The call.
            evict: Evicts a call, the second argument says whether with its saved calls.
        """
        with self._lock:
            place = next((place for place, ref in enumerate(self._open, 1) if ref() is call), 0)
            if not place:
                return
            with self._pool_lock:
                calls, self._open = [ref() for ref in self._open[:place]], self._open[place:]
                self._settled.update(call for call in calls if call is not None)
                levels = torch.tensor([_level(call) for call in calls], dtype=torch.uint8, device="cpu")
            dist.all_reduce(levels, dist.ReduceOp.MAX, self._group)
            for one, level in zip(calls, levels.tolist(), strict=True):
                if one is not None and level > _level(one):
                    evict(one, level > 1)


def _level(call: ElasticCall | None) -> int:
    """Grades what a call has lost: 0, nothing or all of it; 1, its slots; 2, what its saved calls kept, too."""
    return 0 if call is None or call.resident else 1 + call.emptied


def _check_group(group: Any) -> None:
    if not isinstance(group, dist.ProcessGroup) or "cpu:" not in dist.get_backend_config(group):
        found = f"a group of {dist.get_backend(group)}" if isinstance(group, dist.ProcessGroup) else errors.say(group)
        raise errors.ArgumentError(
            f"Elastic(group=...) takes a process group of this rank that reduces on the CPU, but got {found}: what was "
            "evicted is on the host, and the device is not waited for.\n"
            '  Write group=torch.distributed.new_group(ranks, backend="gloo"), with the ranks that the collectives in '
            "the regions are among."
        )


def _refused(region: str, operation: str, among: frozenset[int] | None, sharding: bool) -> str:
    """Text for a collective that a replay would repeat."""
    ranks = "" if among is None else f", among the ranks {', '.join(map(str, sorted(among)))}"
    found = f"a replay of it would make a collective again ({operation}{ranks})"
    instead = "Keep its result: no_recompute around the function that makes it"
    instead += "." if operation.startswith("c10d.") else ', keep_collectives(fn), or keep=("@collective",) in a plan.'
    if sharding:
        found = (
            f"a replay of it gathers the weights of a sharded module ({operation}{ranks}): it runs before the hook "
            "that gathers them for the module's backward"
        )
        instead = (
            "Let regions and sharded modules be the same: fully_shard(module) of what the region runs and of nothing "
            "below it; or a region of each sharded module, recompute(module, elastic=...) or a Choice of its path."
        )
    return (
        f"{region} is elastic, and {found}. Each rank evicts by its own memory, so one that replays the region alone "
        f"would wait for the others for ever.\n  {instead}\n"
        "  Or let all these ranks replay it or none: Elastic(group=group), a group of theirs on the CPU; they then "
        "agree before each microbatch's backward."
    )
