"""Memory that the allocator holds and cannot hand out: fragmentation rather than capacity.

The allocator keeps what is freed, in pieces. Where sizes change from step to step the pieces fit nothing any more, and
an allocation fails although enough is unused. No recomputation helps: what is missing is not bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from ..check import Check, Evidence
from ..finding import Finding
from ..words import mib, times

UNUSED = 0.2  # of what is reserved
FULL = 0.8  # of the device


class Fragmentation(Check):
    """Reads the CUDA allocator's books after real steps."""

    kind = "fragmentation"
    needs = ("seen",)

    def why_not(self, evidence: Evidence) -> str:
        """As of any check; and there must be a CUDA device."""
        why = super().why_not(evidence)
        no_cuda = evidence.seen is not None and evidence.seen.allocator is None
        return why or ("the model is not on a CUDA device, whose allocator it is about" if no_cuda else "")

    def look(self, evidence: Evidence) -> Iterator[Finding]:
        """One finding where much is reserved and not allocated, and memory is short."""
        assert evidence.seen is not None
        assert evidence.seen.allocator is not None
        books = evidence.seen.allocator
        unused = books.reserved_bytes - books.allocated_bytes
        limit = books.total_bytes if evidence.budget is None else min(evidence.budget, books.total_bytes)
        short = books.retries > 0 or books.reserved_bytes >= FULL * limit
        if unused < UNUSED * books.reserved_bytes or not short:
            return
        yield self.found(
            books.device,
            f"{mib(books.allocated_bytes)} were allocated at most and {mib(books.reserved_bytes)} reserved, of "
            f"{mib(books.total_bytes)}: {mib(unused)} lay unused in pieces. The allocator had to give memory back and "
            f"ask again {times(books.retries)}.",
            "torch.cuda.memory_stats, the peaks of the steps that were watched.",
            _write(),
            allocated_bytes=books.allocated_bytes,
            reserved_bytes=books.reserved_bytes,
            retries=books.retries,
        )


def _write() -> str:
    settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if "expandable_segments:true" in settings.lower().replace(" ", ""):
        return "batches of a few fixed lengths: expandable_segments is on already, and sizes that recur leave no holes."
    return "PYTORCH_ALLOC_CONF=expandable_segments:True in the environment, before the program starts."
