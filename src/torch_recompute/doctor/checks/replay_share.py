"""Replays that take more than 15 % of the step, and from which unit.

Whole layers cost a quarter of all products. A plan that was made for a budget and whose own bound says that no schedule
is much better pays what the budget costs, and is not found.
"""

from __future__ import annotations

from collections.abc import Iterator

from ... import errors
from ..check import Check, Evidence
from ..finding import Finding
from ..regions import starred
from ..words import budget_word, gflop

SHARE = 0.15
NEAR = 0.05  # of the step: a plan this close to its bound is as good as plans get


class ReplayShare(Check):
    """Adds up FLOPs of a simulated step, or seconds of real ones."""

    kind = "replay_share"
    needs = ("simulated", "seen")

    def look(self, evidence: Evidence) -> Iterator[Finding]:
        """One finding, about the unit that is replayed most."""
        gap = None if evidence.plan is None else evidence.plan.gap
        if gap is not None and gap <= NEAR:
            return
        if evidence.simulated is not None:
            yield from self._by_flops(evidence)
        else:
            yield from self._by_seconds(evidence)

    def _by_flops(self, evidence: Evidence) -> Iterator[Finding]:
        assert evidence.simulated is not None
        flops = evidence.simulated.regions.flops
        total, replay = sum(flops.values()), flops["replay"]
        if not total or replay <= SHARE * total:
            return
        most = max(evidence.simulated.regions.by_name.values(), key=lambda account: account.replay_flops)
        yield self.found(
            most.name,
            f"replays are {replay / total:.0%} of the step's FLOPs ({gflop(replay)} of {gflop(total)}), "
            f"{most.replay_flops / replay:.0%} of them in {most.name or 'the model'}.",
            "one simulated step, in which FLOPs of products and attention were counted by phase and region.",
            self._instead(evidence, replay, most.name),
            share=replay / total,
            replay_flops=replay,
            step_flops=total,
        )

    def _instead(self, evidence: Evidence, replay: float, name: str) -> str:
        """A plan with the same peak that replays less, where there is one."""
        keep = f'keep=("@product",) for {name or "the model"}, which replays no products, for more memory'
        if evidence.best is None or evidence.simulated is None:
            return f"{keep}."
        budget = evidence.simulated.step.peak_bytes if evidence.budget is None else evidence.budget
        try:
            better = evidence.best(budget)
        except errors.ArgumentError:  # no budget that the planner can meet, or nothing that it could plan
            return f"{keep}."
        flops = better.predicted_replay_flops or 0
        if flops >= replay:
            return f"{keep}; at this peak no plan replays fewer FLOPs."
        word = budget_word(budget)
        return f'make_plan(..., budget="{word}"): with the same memory it replays {gflop(flops)}; or {keep}.'

    def _by_seconds(self, evidence: Evidence) -> Iterator[Finding]:
        seen = evidence.seen
        assert seen is not None
        units: dict[str, float] = {}
        for path, seconds in seen.replay_seconds.items():
            units[starred(path)] = units.get(starred(path), 0.0) + seconds
        total = sum(units.values())
        if not seen.seconds or total <= SHARE * seen.seconds:
            return
        most = max(units, key=lambda name: units[name])
        yield self.found(
            most,
            f"replays take {total / seen.seconds:.0%} of the step ({1000 * total:,.1f} of {1000 * seen.seconds:,.1f} "
            f"ms), {units[most] / total:.0%} of that in {most or 'the model'}.",
            f"{seen.steps} real steps, in which each replay and each step were timed.",
            'make_plan(..., budget=...) with what the device has: it replays what costs least; or keep=("@product",) '
            f"for {most or 'the model'}.",
            share=total / seen.seconds,
            replay_seconds=total,
            step_seconds=seen.seconds,
        )
