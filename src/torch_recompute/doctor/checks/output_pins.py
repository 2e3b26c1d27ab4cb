"""A region whose output pins what it saved: the tensor it drops is its own result, which the next operation saves.

So it is with fused attention, softmax, and every activation function that is differentiated by its result. Systems that
list "core attention" among what is recomputed free next to nothing there, and pay for a second forward of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..check import Check, Evidence
from ..finding import Finding
from ..regions import Account
from ..words import mib, regions

SHARE = 0.5
FUSED = 0.9  # of a region's FLOPs


def is_pinned(account: Account) -> bool:
    """Whether most of what a region drops stays alive all the same."""
    return account.dropped_bytes > 0 and account.pinned_bytes >= SHARE * account.dropped_bytes


def is_fused_attention(account: Account) -> bool:
    """Whether a region holds a fused attention and little else."""
    return account.attention_flops > 0 and account.attention_flops >= FUSED * account.forward_flops


class OutputPins(Check):
    """Looks at who holds what a region dropped, when the loss is there."""

    kind = "output_pins"
    needs = ("simulated",)

    def look(self, evidence: Evidence) -> Iterator[Finding]:
        """Regions most of whose bytes are held elsewhere."""
        assert evidence.simulated is not None
        for account in evidence.simulated.outermost:
            if not is_pinned(account) or account.freed_bytes < 0 or is_fused_attention(account):
                continue  # what is worse than this has a kind of its own
            yield self.found(
                account.name,
                f"{regions(account.calls)} dropped {mib(account.dropped_bytes)}, of which "
                f"{mib(account.pinned_bytes)} are held by {', '.join(account.pinned_by)}.",
                f"one simulated step: the graph was walked when the loss was there{evidence.compared(account.name)}.",
                "a region that reaches through the consumer, the consumer being a saved call: "
                "recompute(lambda x: no_recompute(consumer)(fn(x)))(x); or none here.",
                regions=account.calls,
                dropped_bytes=account.dropped_bytes,
                pinned_bytes=account.pinned_bytes,
                freed_bytes=account.freed_bytes,
            )
