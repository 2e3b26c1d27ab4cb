"""A region that frees nothing, because nothing is saved in it that it could drop, or because it never runs.

The label that matched a module whose norm is fused into the next layer, the identity in the place of an activation, the
tower that runs in eval mode or without grad.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..check import Check, Evidence
from ..finding import Finding
from ..regions import Account, starred
from ..words import regions


class SavesNothing(Check):
    """Looks at what autograd saved in each region and the region dropped."""

    kind = "saves_nothing"
    needs = ("simulated",)

    def look(self, evidence: Evidence) -> Iterator[Finding]:
        """Regions with nothing to drop, and choices whose modules were not called."""
        assert evidence.simulated is not None
        for account in evidence.simulated.outermost:
            if not account.dropped_bytes:
                yield self._empty(account, evidence)
        called = {path for account in evidence.simulated.accounts for path in account.paths}
        idle: dict[str, list[str]] = {}
        for choice in () if evidence.plan is None else evidence.plan.choices:
            if not called & set(choice.paths):
                idle.setdefault(starred(choice.paths[0]), []).append(choice.paths[0])
        for name, paths in idle.items():
            yield self.found(
                name,
                f"{regions(len(paths))} of the plan never ran: {paths[0]} was not called with gradients.",
                "one simulated step, in which the calls of every region were counted.",
                f"a plan without {name}; or call the module: a model in eval mode may take another way.",
                regions=len(paths),
            )

    def _empty(self, account: Account, evidence: Evidence) -> Finding:
        return self.found(
            account.name,
            f"{regions(account.calls)} dropped 0 bytes: all that autograd saves in there are inputs and parameters, "
            "which are alive anyway.",
            "one simulated step, in which each tensor that autograd saved in a region was counted"
            f"{evidence.compared(account.name)}.",
            f"a plan without {account.name}, or a region that reaches further, to where its result is consumed.",
            regions=account.calls,
            dropped_bytes=0,
        )
