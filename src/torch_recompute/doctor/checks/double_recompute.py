"""Work that is done a third time: a region inside a region, or one around what recomputes by itself.

An inner region runs in the forward, in the replay of the outer one, and in its own. That may be meant, where it lowers
the peak; where it does not, it is paid for nothing. A fused attention keeps no scores and makes them again in its
backward; a region around it alone runs the whole kernel once more and frees little.

A checkpoint of another library inside a region, or around one, is found by counting the calls of the modules in it.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..check import Check, Evidence
from ..finding import Finding
from ..regions import Account, starred
from ..words import gflop, mib, regions, times
from .output_pins import is_fused_attention, is_pinned

WORTH = 0.01  # of the peak: what an inner region has to lower it by, to be worth its third run


class DoubleRecompute(Check):
    """Counts what runs in forward and in replays."""

    kind = "double_recompute"
    needs = ("simulated", "seen")

    def look(self, evidence: Evidence) -> Iterator[Finding]:
        """Regions whose operations are replayed more than once, and attention that is run again for little."""
        known = False
        for account in [] if evidence.simulated is None else evidence.simulated.accounts:
            if account.inside and account.replay_ops > account.forward_ops:
                known = True
                yield from self._nested(account, evidence)
            elif is_fused_attention(account) and is_pinned(account) and account.replay_flops:
                yield self._fused(account)
        if evidence.seen is not None and not known:
            yield from self._foreign(evidence)

    def _nested(self, account: Account, evidence: Evidence) -> Iterator[Finding]:
        assert evidence.simulated is not None
        outer, step = evidence.without(account.name), evidence.simulated.step
        confirmed = "one simulated step, in which operations were counted by the region they ran in"
        if outer is not None:
            if step.peak_bytes < (1 - WORTH) * outer.peak_bytes:
                return  # it pays: in the replay of the outer one, less is alive at once
            confirmed += f"; the peak is {mib(step.peak_bytes)} with it and {mib(outer.peak_bytes)} without"
        yield self.found(
            account.name,
            f"{regions(account.calls)} lie in {account.inside or 'the model'}, which is a region as well: "
            f"{account.forward_ops} operations in forward, {account.replay_ops} in replays "
            f"({gflop(account.replay_flops)} replayed, {gflop(account.forward_flops)} in one forward).",
            f"{confirmed}.",
            f"one of the two: a plan without {account.name}, or one without {account.inside or 'the model'}.",
            regions=account.calls,
            forward_ops=account.forward_ops,
            replay_ops=account.replay_ops,
        )

    def _fused(self, account: Account) -> Finding:
        return self.found(
            account.name,
            f"{regions(account.calls)} hold a fused attention, whose backward makes the scores again by itself; its "
            f"forward is run once more ({gflop(account.replay_flops)}) to free {mib(account.freed_bytes)}, since its "
            f"result is held by {', '.join(account.pinned_by)}.",
            "one simulated step, in which FLOPs were counted by region and the graph was walked for who holds what.",
            f'no region on {account.name}; in a region around the whole layer, keep it: keep=("@attention",).',
            regions=account.calls,
            replay_flops=account.replay_flops,
            freed_bytes=account.freed_bytes,
        )

    def _foreign(self, evidence: Evidence) -> Iterator[Finding]:
        assert evidence.seen is not None
        calls, again = evidence.seen.calls, evidence.seen.calls_in_backward
        third: dict[str, list[str]] = {}
        for path, count in again.items():
            if calls[path] and count >= 2 * calls[path]:
                third.setdefault(starred(path), []).append(path)
        for name in _outermost(third):
            path = third[name][0]
            yield self.found(
                name,
                f"{path or 'the model'} was called {times(calls[path])} in forward and {times(again[path])} in "
                "backward: two recomputations lie one in the other.",
                f"{evidence.seen.steps} real steps, in which each module's calls were counted.",
                "recompute in one place only: turn the model's own checkpointing off where a plan is in it "
                "(model.gradient_checkpointing_disable()), or leave the module out of the plan.",
                calls_in_forward=calls[path],
                calls_in_backward=again[path],
            )


def _outermost(names: dict[str, list[str]]) -> list[str]:
    return [n for n in names if not any(other != n and n.startswith(f"{other}.") for other in names)]
