"""A region that takes more memory than the plain call: it keeps an input that nothing kept before, and frees less.

Operations that are differentiated by their result (softmax, sigmoid, tanh, exp) let go of their input. A region around
one keeps the input for its replay, while the result is kept by whoever consumes it.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..check import Check, Evidence
from ..finding import Finding
from ..regions import Account
from ..words import mib, regions


class MadeWorse(Check):
    """Adds up what a region drops, what of it stays, and what the region keeps itself."""

    kind = "made_worse"
    needs = ("simulated",)

    def look(self, evidence: Evidence) -> Iterator[Finding]:
        """Regions that keep more than they free."""
        assert evidence.simulated is not None
        for account in evidence.simulated.outermost:
            if account.freed_bytes >= 0 or not self._is_worse(account, evidence):
                continue
            yield self.found(
                account.name,
                f"{regions(account.calls)} keep {mib(account.held_bytes)} of inputs that nothing else keeps, and free "
                f"{mib(account.dropped_bytes - account.pinned_bytes)}: {mib(-account.freed_bytes)} more than the plain "
                "call.",
                f"one simulated step: the graph was walked when the loss was there{evidence.compared(account.name)}.",
                f"a plan without {account.name}: the result of such an operation is all that its backward needs.",
                regions=account.calls,
                held_bytes=account.held_bytes,
                freed_bytes=account.freed_bytes,
            )

    def _is_worse(self, account: Account, evidence: Evidence) -> bool:
        """Whether a step without the regions keeps less; where they are not a plan's, the books say so."""
        assert evidence.simulated is not None
        plain = evidence.without(account.name)
        return plain is None or plain.saved_bytes < evidence.simulated.step.saved_bytes
