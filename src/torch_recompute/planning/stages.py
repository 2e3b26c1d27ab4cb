"""Plans for a pipeline: each rank's stages for the microbatches that the schedule holds in flight there.

Problem. On a rank of a pipeline the bytes of a layer count as often as microbatches are in flight, which differs from
stage to stage and from moment to moment, and the chunks of one rank share its memory.

Idea. The planner's own three steps, for each rank:

    profile    the whole model is profiled once, for one microbatch; each stage is cut out of it and run on fake tensors
               (`pieces.py`), and what a rank holds at each action of its order is a sum (`plan/stage_memory.py`)
    solve      at the moment that holds the most, the options of each layer are priced as often as it is held then, and
               the solvers of `plan/` choose among them as for one model
    check      the stages are run with what was chosen, and the sum is taken over all moments. If it is another than was
               predicted, or another moment holds the most, the costs are taken anew from that, and solved again

Everything follows from the model, the shapes and the schedule, so with prices of a data sheet (`device="h100"`) each
rank comes to the same plans by itself.

Rejected: one profile per rank, sent around: no rank could plan for itself. The most of each chunk, at whatever time:
the chunks of a rank do not hold the most at the same time, so this asks for memory that is never used; it is the last
resort where the moments take turns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch

from .. import errors
from ..plan.bound import bound
from ..plan.budget import read_budget
from ..plan.cost import Costs, Kind, Option, Point, Segment, Solution
from ..plan.inflight import Moment, in_flight, moments
from ..plan.microbatches import behind_each, for_all, graph_held, held_times, kinds_for_all
from ..plan.plan import Plan
from ..plan.planned import bytes_of, choices_of, planned
from ..plan.profile import Profile
from ..plan.solve import choose, smallest
from ..plan.stage_memory import Rank, RankMoment, StageBytes
from ..plan.stages import StagePlan, StagePlans, Stages
from ..simulation import Simulation
from .actions import Piece
from .calibrate import calibrate
from .ops import Op
from .pieces import Pieces
from .pipeline import Pipeline, Schedule

ROUNDS = 8
Budget = int | float | str
Chosen = Mapping[int, tuple[Option, ...]]  # by stage, one per layer


class Planning(Protocol):
    """What is known of the whole model."""

    plain: Simulation
    profile: cached_property[Profile]

    def price(self, op: Op) -> float:
        """Seconds of an operation."""
        ...


@dataclass(frozen=True)
class _Tried:
    """The stages of a rank under some options.

    Attributes:
        chosen: The options.
        pieces: What was seen of each stage.
        peak: When the most bytes live.
    """

    chosen: Chosen
    pieces: Mapping[int, Piece]
    peak: RankMoment

    @property
    def bytes(self) -> dict[int, StageBytes]:
        """What each stage takes."""
        return {stage: piece.bytes for stage, piece in self.pieces.items()}

    @property
    def seconds(self) -> float:
        """What the replays of one microbatch add."""
        return sum(option.seconds / option.span for options in self.chosen.values() for option in options)


class _Rank:
    """The planner of one rank.

    Args:
        planner: What is known of the whole model.
        pieces: Its stages.
        pipeline: Where they lie.
        number: The rank.
        optimizer: From a list of parameters to an optimizer.
    """

    def __init__(self, planner: Planning, pieces: Pieces, pipeline: Pipeline, number: int, optimizer: Any) -> None:
        self._planner = planner
        self._profile = planner.profile
        self._pieces = pieces
        self._pipeline = pipeline
        self._number = number
        self._moments = moments(pipeline.orders[number])
        self._kinds = {action.kind for action in pipeline.orders[number]}
        self.stages = sorted(self._moments[0].forwards)
        costs = self._profile.costs
        self._first = {s: tuple(costs.kinds[seg.kind].options[0] for seg in self._segments(s)) for s in self.stages}
        self._memo: dict[tuple[int, tuple[Option, ...]], Piece] = {}
        ran = {stage: self._piece(stage, options) for stage, options in self._first.items()}
        names = dict.fromkeys(name for piece in ran.values() for name in piece.parameters)
        taken = (0, 0) if optimizer is None else pieces.optimizer(optimizer, names)
        self._rank = Rank(self._moments, pipeline.microbatches, pipeline.sends(number), taken)
        self.plain = self._tried(self._first)
        self._seconds = sum(planner.price(op) * count for piece in ran.values() for op, count in piece.ran.items())

    def _segments(self, stage: int) -> tuple[Segment, ...]:
        start, stop = self._pipeline.bounds[stage]
        return self._profile.costs.segments[start:stop]

    def _plan_of(self, stage: int, options: tuple[Option, ...]) -> Plan:
        costs = replace(self._profile.costs, segments=self._segments(stage))
        return Plan(choices_of(replace(self._profile, costs=costs), Solution(options, 0, 0.0)))

    def _tried(self, chosen: Chosen) -> _Tried:
        pieces = {s: self._piece(s, chosen[s]) for s in self.stages}
        return _Tried(chosen, pieces, self._rank.peak({stage: piece.bytes for stage, piece in pieces.items()}))

    def _piece(self, stage: int, options: tuple[Option, ...]) -> Piece:
        if (stage, options) not in self._memo:
            self._memo[stage, options] = self._pieces.run(stage, self._plan_of(stage, options), self._kinds)
        return self._memo[stage, options]

    def plan(self, budget: Budget, solver: str) -> dict[int, Plan]:
        """The plans of the rank's stages, by stage."""
        wanted = bytes_of(budget, lambda: self._least().peak.bytes, self.plain.peak.bytes, None)
        found = self.plain if self.plain.peak.bytes <= wanted else self._fitting(wanted, solver)
        if found is None:
            least = self._least()
            text = errors.no_plan_fits(wanted, least.peak.bytes, self.plain.peak.bytes, "")
            plans = self._plans(least, wanted, "the smallest peak")
            raise errors.BudgetError(f"rank {self._number} of the pipeline: {text}", least.peak.bytes, plans)
        return self._plans(found, wanted, solver)

    def _fitting(self, wanted: int, solver: str) -> _Tried | None:
        """The cheapest that fits, of those that the rounds come to."""
        for most in (False, True):
            best: _Tried | None = None
            current, known = self.plain, [self.plain.chosen]
            moment = self._fullest(current)
            for _ in range(ROUNDS):
                try:
                    solution = choose(self._costs(current, moment, most), wanted, solver)
                except errors.BudgetError:
                    break
                chosen = self._chosen(solution)
                if chosen in known:
                    break
                known.append(chosen)
                current = self._tried(chosen)
                if current.peak.bytes > wanted:
                    moment = self._fullest(current)
                elif best is None or current.seconds < best.seconds:
                    best = current
            if best is not None:
                return best
        least = self._least()
        return least if least.peak.bytes <= wanted else None

    def _least(self) -> _Tried:
        """The smallest peak that the rounds come to."""
        best = self.plain
        for most in (False, True):
            current = self.plain
            for _ in range(ROUNDS):
                costs = self._costs(current, self._fullest(current), most)
                current = self._tried(self._chosen(smallest(costs)))
                if current.peak.bytes >= best.peak.bytes:
                    break
                best = current
            if best is not self.plain:
                break
        return best

    def _chosen(self, solution: Solution) -> dict[int, tuple[Option, ...]]:
        """The options of a solution, as they are for one microbatch."""
        chosen: dict[int, tuple[Option, ...]] = {}
        rest = list(solution.options)
        for stage in self._order:
            segments = self._segments(stage)
            known = [self._known[stage, segment.kind] for segment in segments]
            chosen[stage] = tuple(by[option] for by, option in zip(known, rest, strict=False))
            rest = rest[len(segments) :]
        return {stage: chosen[stage] for stage in self.stages}

    def _fullest(self, tried: _Tried) -> Moment:
        """The action during which the most lives."""
        return max(self._moments, key=lambda moment: self._rank.at(tried.bytes, moment))

    def _costs(self, tried: _Tried, moment: Moment, most: bool) -> Costs:
        """What a solver is to know of one moment: each layer as often as it is held then.

        Args:
            tried: What the costs are taken from; for its options they are exact.
            moment: The moment.
            most: Whether each stage counts as often as it ever does, rather than at that moment, and what waits of the
                layers behind one is counted in its backward.
        """
        active = moment.action.stage
        held = {stage: moment.whole(stage) for stage in self.stages}
        costs = self._active(tried, moment)
        if most:
            held = {s: max(m.whole(s) for m in self._moments if m.action.stage == active) for s in self.stages}
        self._order = [*(stage for stage in self.stages if stage != active), active]
        self._known: dict[tuple[int, str], dict[Option, Option]] = {}
        kinds: dict[str, Kind] = {}
        before: list[Segment] = []
        for stage in self._order:
            for segment in self._segments(stage):
                kind = self._profile.costs.kinds[segment.kind]
                name = f"{segment.kind} of stage {stage}"
                times = held[stage]
                options = {o: held_times(o, times, active=stage == active) for o in kind.options}
                self._known[stage, segment.kind] = {scaled: option for option, scaled in options.items()}
                graph = None if kind.graph is None else graph_held(kind.graph, times + (stage == active))
                kinds[name] = Kind(tuple(options.values()), graph)
                if stage != active:
                    before.append(Segment(segment.path, name, 0, 0))
        # In the backward of a layer the ones behind it are let go of by this microbatch, not by those that wait. What
        # these hold of them is no constant; but they hold more where the backward begins, so it is left out at first.
        behind = behind_each(tried.chosen[active], counted=most)
        own = [
            Segment(
                segment.path,
                f"{segment.kind} of stage {active}",
                segment.forward_bytes + held[active] * behind[i + 1],
                segment.backward_bytes + held[active] * behind[i + 1],
            )
            for i, segment in enumerate(costs.segments)
        ]
        points = [
            Point(len(before) + point.after, point.bytes + held[active] * behind[point.after], point.where)
            for point in costs.points
        ]
        points += [Point(0, after.bytes, after.where) for after in self._rank.after(tried.bytes)]
        return Costs(kinds, (*before, *own), tuple(points), costs.step_seconds, costs.turn_bytes)

    def _active(self, tried: _Tried, moment: Moment) -> Costs:
        """The costs of one microbatch of the stage that runs, with all that lives besides and is not chosen here."""
        stage = moment.action.stage
        piece = tried.pieces[stage]
        whole = {s: sum(o.saved_bytes // o.span for o in tried.chosen[s]) for s in self.stages}
        lies = sum(moment.whole(s) * whole[s] for s in self.stages)
        own = max(sample.live_bytes for sample in piece.timeline)
        level = self._rank.at(tried.bytes, moment) - own - lies
        lifted = tuple(sample._replace(live_bytes=sample.live_bytes + level) for sample in piece.timeline)
        segments = self._segments(stage)
        return calibrate(
            self._planner.plain._replace(timeline=lifted),
            [segment.path for segment in segments],
            [segment.kind for segment in segments],
            tried.chosen[stage],
            self._profile.costs.kinds,
            self._seconds,
        )

    def _plans(self, found: _Tried, wanted: int, solver: str) -> dict[int, Plan]:
        """The plans of what was found, with what they promise."""
        times = self._pipeline.microbatches
        plain, flops = times * self._seconds, 0
        plans: dict[int, Plan] = {}
        for stage in self.stages:
            segments = self._segments(stage)
            kinds = {name: Kind(kind.options) for name, kind in self._profile.costs.kinds.items()}
            shown = Costs(kinds_for_all(kinds, times), segments, step_seconds=plain)
            options = tuple(for_all(option, times) for option in found.chosen[stage])
            profile = replace(
                self._profile,
                costs=shown,
                plain_peak_bytes=self.plain.peak.bytes,
                modules=tuple(row for row in self._profile.modules if any(row[0] == s.path for s in segments)),
            )
            plans[stage] = planned(profile, shown, Solution(options, 0, 0.0, solver), wanted, found.peak.bytes)
            flops += plans[stage].predicted_replay_flops or 0
        least = times * self._bound(max(wanted, found.peak.bytes))
        for stage, plan in plans.items():
            assert plan.prediction is not None
            promised = replace(
                plan.prediction,
                step_seconds=plain + times * found.seconds,
                replay_flops=flops,
                bound_seconds=plain + least,
                loop=None,
            )
            plans[stage] = replace(
                plan, prediction=promised, source=f"a budget of {wanted:,} bytes on rank {self._number}"
            )
        return plans

    def _bound(self, budget: int) -> float:
        """Seconds that every plan adds to a microbatch; 0 where halves of backwards wait, which it knows nothing of."""
        if "I" in self._kinds:
            return 0.0
        return bound(self._costs(self.plain, self._fullest(self.plain), most=False), budget)


def plan_stages(
    planner: Planning,
    stages: Stages | Schedule,
    budget: Budget | Sequence[Budget],
    solver: str,
    cut: Callable[[Sequence[str], Sequence[tuple[int, int]]], Pieces],
    optimizer: Any,
) -> StagePlans:
    """The plans of all stages.

    Args:
        planner: What is known of the whole model.
        stages: See `make_plan`.
        budget: See `make_plan`.
        solver: See `make_plan`.
        cut: Cuts the model into stages, given its layers and those of each stage.
        optimizer: From a list of parameters to an optimizer, or None.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        raise errors.ArgumentError(
            f"optimizer is a {type(optimizer).__name__} of the whole model, but each rank of a pipeline has one of its "
            "stages' parameters.\n"
            "  Pass what makes it: optimizer=torch.optim.AdamW, or a function from a list of parameters to an "
            "optimizer."
        )
    profile = planner.profile
    paths = [segment.path for segment in profile.costs.segments]
    again = next((path for path, times in Counter(paths).items() if times > 1), None)
    if again is not None:
        raise errors.ArgumentError(
            f"{again} is called {paths.count(again)} times in one forward, and a pipeline cannot be cut between calls "
            "of one module: its parameters would lie on several stages.\n"
            "  Plan the model without stages=, or give each stage a module of its own."
        )
    pipeline = Pipeline.of(stages, paths)
    budgets = _budgets(budget, len(pipeline.orders))
    pieces = cut(paths, pipeline.bounds)
    held = in_flight(pipeline.orders)
    found: dict[int, StagePlan] = {}
    for (number, _), wanted in zip(sorted(pipeline.orders.items()), budgets, strict=True):
        rank = _Rank(planner, pieces, pipeline, number, optimizer)
        for stage, plan in rank.plan(wanted, solver).items():
            start, stop = pipeline.bounds[stage]
            found[stage] = StagePlan(stage, number, held[stage], tuple(paths[start:stop]), plan)
    made = f"{pipeline.name} with {pipeline.microbatches} microbatches on {len(pipeline.orders)} ranks"
    return StagePlans(tuple(found[stage] for stage in sorted(found)), made)


def _budgets(budget: Budget | Sequence[Budget], ranks: int) -> list[Budget]:
    every: Iterable[Budget] = budget if isinstance(budget, (list, tuple)) else [budget] * ranks  # type: ignore[assignment]
    budgets = list(every)
    if len(budgets) != ranks:
        raise errors.ArgumentError(
            f"budget holds {len(budgets)} budgets, and the pipeline has {ranks} ranks.\n"
            "  Pass one for all, or a list with one per rank."
        )
    for one in budgets:
        meant = read_budget(one)
        if meant.bytes is None and meant.share is None:
            raise errors.ArgumentError(
                'budget="fit" means what a device has free now, which each rank of a pipeline knows only of its own.\n'
                '  Pass bytes, such as budget="70GiB", or a list with one budget per rank.'
            )
    return budgets
