"""Reentrant checkpoints, and what they do under DDP.

A reentrant checkpoint runs a backward of its own inside backward. DDP counts the gradients of each parameter to know
when to reduce them, and ends with "marked as ready twice"; `torch.autograd.grad` refuses them.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..check import Check, Evidence
from ..finding import Finding
from ..regions import starred
from ..words import times


class ReentrantUnderDDP(Check):
    """Reads the nodes of a real step's graph."""

    kind = "reentrant"
    needs = ("seen",)

    def look(self, evidence: Evidence) -> Iterator[Finding]:
        """One finding per kind of checkpointed function."""
        seen = evidence.seen
        assert seen is not None
        groups: dict[tuple[str, str, str], int] = {}
        for one in seen.reentrant:
            key = one.function, starred(one.path), one.library
            groups[key] = groups.get(key, 0) + one.calls
        around = "is around this model" if seen.parallel else "is not around this model, which trains without it"
        for (function, path, library), calls in groups.items():
            yield self.found(
                path or function,
                f"{function} is checkpointed {times(calls)} by {library}, reentrant: each call runs a backward inside "
                "backward and marks its parameters as ready anew, which DistributedDataParallel refuses. That "
                f"{around}.",
                "the graph of a real step was walked, and these nodes are in it.",
                "torch_recompute.recompute(fn)(*args), or torch_recompute.checkpoint, or use_reentrant=False.",
                calls=calls,
                under_ddp=float(seen.parallel),
            )
