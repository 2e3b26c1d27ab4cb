"""Plans for the ranks of a pipeline: each rank's stages, for the microbatches that the schedule has in flight there.

On a rank of a pipeline the bytes of a layer count as often as microbatches are in flight, which differs from stage to
stage and from action to action, and the chunks of one rank share its memory. The planner's own three steps, per rank:

    profile    the whole model is profiled once, for one microbatch; each stage is run on fake tensors
               (`stage_runs.py`), and what a rank holds at each action of its order is a sum (`rank_memory.py`)
    solve      at the action that holds the most, the options of each layer are priced as often as it is held then, and
               the solvers of `plan/` choose among them as for one model
    check      the stages are run with what was chosen, and the sum is taken over all actions. If another action holds
               too much, it is solved for that one; where two take turns, for less than the budget

The same planner serves `make_plan(stages=...)`, whose stages torch's runtime runs, and the ranks of a command line
(`layout.py`), whose stages Megatron's runs. Everything follows from the model, the shapes and the schedule, so with
prices of a data sheet (`device="h100"`) each rank makes the same plans by itself.

Rejected: one profile per rank, sent around: no rank could plan for itself. The most of each chunk, at whatever time:
the chunks of a rank do not hold the most at the same time, so this asks for memory that is never used; it is the last
resort. Prices per byte in flight, for all actions at once, in the place of the solver: up to 3 % of a step worse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from .. import errors
from ..plan.bound import bound
from ..plan.budget import read_budget
from ..plan.cost import Costs, Graph, Kind, Option, Point, Segment, Solution, for_all, kinds_for_all
from ..plan.plan import Plan
from ..plan.planned import bytes_of, choices_of, planned
from ..plan.solve import choose, smallest
from ..plan.stages import StagePlan, StagePlans, Stages
from .calibrate import calibrate
from .ops import Op
from .planner import Planner
from .rank_memory import RankMemory, RankPeak, Sends, StageBytes
from .schedules import INPUTS, Pipeline, Schedule, ScheduleStep, in_flight, schedule_steps
from .stage_runs import StageRun

ROUNDS = 8
Budget = int | float | str
Chosen = dict[int, tuple[Option, ...]]  # by stage, one per layer


@dataclass(frozen=True)
class Tried:
    """The stages of a rank under some options.

    Attributes:
        chosen: The options.
        runs: What was seen of each stage.
        peak: When the most bytes are alive.
    """

    chosen: Chosen
    runs: Mapping[int, StageRun]
    peak: RankPeak

    @property
    def bytes(self) -> dict[int, StageBytes]:
        """What each stage takes."""
        return {stage: run.bytes for stage, run in self.runs.items()}

    @property
    def seconds(self) -> float:
        """What the replays of one microbatch add."""
        return sum(option.seconds / option.span for options in self.chosen.values() for option in options)


class PipelinePlanner:
    """The stages of a model, and what is known of each; `ranks` are planned one by one.

    Args:
        planner: What is known of the whole model.
        pipeline: Its stages, and the schedule.
        optimizer: From a list of parameters to an optimizer, or None.
        solver: See `make_plan`.
        megatron: Whether Megatron's runtime runs the stages: it releases what it sends, and has buffers for gradients.
    """

    def __init__(
        self,
        planner: Planner,
        pipeline: Pipeline,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None,
        solver: str = "auto",
        megatron: bool = False,
    ) -> None:
        self.planner, self.pipeline, self.optimizer = planner, pipeline, optimizer
        self.solver, self.megatron = solver, megatron
        self.profile = planner.profile
        self.runner = planner.stage_runner(pipeline.bounds, megatron)
        self._runs: dict[Any, StageRun] = {}
        self._alike: dict[int, int] = {}
        self.ranks = [RankPlanner(self, number) for number in sorted(pipeline.orders)]

    def segments(self, stage: int) -> tuple[Segment, ...]:
        """The layers of a stage."""
        start, stop = self.pipeline.bounds[stage]
        return self.profile.costs.segments[start:stop]

    def first(self, stage: int) -> tuple[Option, ...]:
        """The options that recompute nothing."""
        return tuple(self.profile.costs.kinds[segment.kind].options[0] for segment in self.segments(stage))

    def alike(self, stage: int) -> int:
        """The first stage of the same kinds of layers that runs the same operations and takes as much."""
        return self._alike.get(stage, stage)

    def run(self, stage: int, options: tuple[Option, ...], kinds: frozenset[str]) -> StageRun:
        """Two microbatches of a stage, or of one that is like it."""
        plain = options == self.first(stage)
        key = stage if plain else self.alike(stage), options, kinds
        if key not in self._runs:
            costs = replace(self.profile.costs, segments=self.segments(key[0]))
            plan = Plan(choices_of(replace(self.profile, costs=costs), Solution(options, 0, 0.0)))
            self._runs[key] = self.runner.run(key[0], plan, kinds)
        found = self._runs[key]
        if plain and stage not in self._alike:
            others = [(number, self._runs.get((number, options, kinds))) for number in self._alike]
            same = [n for n, run in others if run and (run.bytes, run.ran) == (found.bytes, found.ran)]
            self._alike[stage] = self._alike[same[0]] if same else stage
        return found


class RankPlanner:
    """One rank of a pipeline.

    Args:
        of: The pipeline.
        number: The rank.

    Attributes:
        stages: The numbers of its stages.
        plain: These without recomputation.
        seconds: Of one microbatch, without recomputation.
        parameters: Those that its stages read, by name.
        ran: The operations of one microbatch, and those of the optimizer's step.
        state_bytes: Of the optimizer.
        memory: What its stages take together.
    """

    def __init__(self, of: PipelinePlanner, number: int) -> None:
        self._of = of
        self.number = number
        actions = of.pipeline.orders[number]
        steps = schedule_steps(actions)
        self._kinds = frozenset(action.kind for action in actions)
        self.stages = sorted(steps[0].forwards)
        chosen = {stage: of.first(stage) for stage in self.stages}
        runs = {stage: of.run(stage, options, self._kinds) for stage, options in chosen.items()}
        self.parameters = tuple(dict.fromkeys(name for run in runs.values() for name in run.parameters))
        taken, updating = (0, 0), Counter[Op]()
        if of.optimizer is not None:
            taken, updating = of.runner.optimizer(of.optimizer, self.parameters)
        self.ran = sum((run.ran for run in runs.values()), Counter[Op]()), updating
        self.seconds = sum(of.planner.price(op) * count for op, count in self.ran[0].items())
        self.state_bytes = taken[0]
        reserved = of.planner.plain.live_by_category["activations"] if of.megatron else 0  # what cuBLAS keeps
        sends = Sends.of(of.pipeline, number)
        self.memory = RankMemory(steps, of.pipeline.microbatches, sends, taken, of.megatron, reserved)
        self.plain = self._tried(chosen)

    def _tried(self, chosen: Chosen) -> Tried:
        runs = {stage: self._of.run(stage, options, self._kinds) for stage, options in chosen.items()}
        return Tried(chosen, runs, self.memory.peak({stage: run.bytes for stage, run in runs.items()}))

    def fitted(self, budget: Budget) -> tuple[Tried, int]:
        """The cheapest choice for a budget, or that of the least need where none fits; the budget in bytes."""
        wanted = bytes_of(budget, lambda: self.least.peak.bytes, self.plain.peak.bytes, None)
        if self.plain.peak.bytes <= wanted:
            return self.plain, wanted
        found = self._within(wanted)
        return found or self.least, wanted

    def _within(self, budget: int) -> Tried | None:
        """The cheapest that fits, of those that the rounds reach."""
        for most in (False, True):
            best: Tried | None = None
            current, step, target = self.plain, self._fullest(self.plain), budget
            over: list[tuple[Chosen, int]] = []  # what was tried, and by how much it exceeds the budget
            for _ in range(ROUNDS):
                try:
                    solution = choose(self._costs(current, step, most), target, self._of.solver)
                except errors.BudgetError:
                    break
                chosen = self._chosen(solution)
                excess = next((excess for tried, excess in over if tried == chosen), None)
                if excess is not None and excess <= 0:
                    break
                if excess is not None:
                    target -= excess
                    continue
                current = self._tried(chosen)
                over.append((chosen, current.peak.bytes - budget))
                if current.peak.bytes > budget:
                    step = self._fullest(current)
                elif best is None or current.seconds < best.seconds:
                    best = current
            if best is not None:
                return best
        return None

    @cached_property
    def least(self) -> Tried:
        """The smallest peak that the rounds reach."""
        best = self.plain
        for most in (False, True):
            current = self.plain
            for _ in range(ROUNDS):
                current = self._tried(self._chosen(smallest(self._costs(current, self._fullest(current), most))))
                if current.peak.bytes >= best.peak.bytes:
                    break
                best = current
            if best is not self.plain:
                break
        while best.peak.bytes > 1 and (found := self._within(best.peak.bytes - 1)) is not None:
            best = found
        return best

    def _fullest(self, tried: Tried) -> ScheduleStep:
        return self.memory.fullest(tried.bytes)

    def _chosen(self, solution: Solution) -> Chosen:
        """The options of a solution, as they are for one microbatch."""
        chosen: Chosen = {}
        rest = iter(solution.options)
        for stage in self._order:
            chosen[stage] = tuple(self._known[stage, s.kind][next(rest)] for s in self._of.segments(stage))
        return {stage: chosen[stage] for stage in self.stages}

    def _costs(self, tried: Tried, step: ScheduleStep, most: bool) -> Costs:
        """The costs that a solver is given for one action: each layer as often as it is held then.

        Args:
            tried: What the costs are taken from; for its options they are exact.
            step: The action.
            most: Whether each stage counts as often as it ever does, rather than at that action.
        """
        active = step.action.stage
        held = {stage: step.whole(stage) for stage in self.stages}
        costs = self._active(tried, step)
        if most:
            steps = [other for other in self.memory.steps if other.action.stage == active]
            held = {stage: max(other.whole(stage) for other in steps) for stage in self.stages}
        self._order = [*(stage for stage in self.stages if stage != active), active]
        self._known: dict[tuple[int, str], dict[Option, Option]] = {}
        kinds: dict[str, Kind] = {}
        before: list[Segment] = []
        for stage in self._order:
            for segment in self._of.segments(stage):
                kind = self._of.profile.costs.kinds[segment.kind]
                name = f"{segment.kind} of stage {stage}"
                times = held[stage]
                options = {o: _held(o, times, active=stage == active) for o in kind.options}
                self._known[stage, segment.kind] = {scaled: option for option, scaled in options.items()}
                graph = None if kind.graph is None else graph_held(kind.graph, times + (stage == active))
                kinds[name] = Kind(tuple(options.values()), graph)
                if stage != active:
                    before.append(Segment(segment.path, name, 0, 0))
        # In the backward of a layer the ones after it are released by this microbatch, not by those that wait. What
        # these hold of them is no constant; it is taken from what was tried, but not where that was everything.
        after = [0] * (len(costs.segments) + 1)
        if tried is not self.plain:
            for i, option in reversed(list(enumerate(tried.chosen[active]))):
                after[i] = after[i + 1] + option.saved_bytes // option.span
        more = [held[active] * nbytes for nbytes in after]
        own = [
            replace(
                segment,
                kind=f"{segment.kind} of stage {active}",
                forward_bytes=segment.forward_bytes + rest,
                backward_bytes=segment.backward_bytes + rest,
            )
            for segment, rest in zip(costs.segments, more[1:], strict=True)
        ]
        points = [
            Point(len(before) + point.after, point.bytes + more[point.after], point.where) for point in costs.points
        ]
        points += [Point(0, after.bytes, after.where) for after in self.memory.after(tried.bytes)]
        return Costs(kinds, (*before, *own), tuple(points), costs.step_seconds, costs.turn_bytes)

    def _active(self, tried: Tried, step: ScheduleStep) -> Costs:
        """The costs of one microbatch of the stage that runs, with all that is alive besides and is not chosen here."""
        stage, of = step.action.stage, self._of
        run = tried.runs[stage]
        waiting = sum(step.whole(s) * sum(o.saved_bytes // o.span for o in tried.chosen[s]) for s in self.stages)
        own = max(sample.live_bytes for sample in run.timeline)
        level = self.memory.at(tried.bytes, step) - own - waiting
        lifted = tuple(sample._replace(live_bytes=sample.live_bytes + level) for sample in run.timeline)
        segments, names = of.segments(stage), of.segments(of.alike(stage))
        plain = tried.chosen[stage] == of.first(stage)
        return calibrate(
            of.planner.plain._replace(timeline=lifted),
            [segment.path for segment in (segments if plain else names)],
            [segment.kind for segment in segments],
            tried.chosen[stage],
            of.profile.costs.kinds,
            self.seconds,
        )

    def planned(self, groups: Sequence[Sequence[int]], tried: Tried, wanted: int, times: int) -> list[Plan]:
        """A plan for each of some groups of stages, with what is promised of the whole rank.

        Args:
            groups: The stages that one plan is of.
            tried: What was chosen.
            wanted: The budget.
            times: How many microbatches the lines of the prediction are of.
        """
        of, microbatches = self._of, self._of.pipeline.microbatches
        kinds = {name: Kind(kind.options) for name, kind in of.profile.costs.kinds.items()}
        bound_seconds = self._bound(max(wanted, tried.peak.bytes))
        found: list[Plan] = []
        for stages in groups:
            segments = tuple(segment for stage in stages for segment in of.segments(stage))
            costs = Costs(kinds_for_all(kinds, times), segments)
            profile = replace(
                of.profile,
                costs=costs,
                plain_peak_bytes=self.plain.peak.bytes,
                modules=tuple(row for row in of.profile.modules if any(row[0] == s.path for s in segments)),
            )
            options = tuple(for_all(option, times) for stage in stages for option in tried.chosen[stage])
            plan = planned(profile, costs, Solution(options, 0, 0.0, of.solver), wanted, tried.peak.bytes)
            found.append(replace(plan, source=f"a budget of {wanted:,} bytes on rank {self.number}"))
        promises = [plan.prediction for plan in found if plan.prediction is not None]
        whole: dict[str, Any] = {
            "plain_step_seconds": microbatches * self.seconds,
            "step_seconds": microbatches * (self.seconds + tried.seconds),
            "bound_seconds": microbatches * (self.seconds + bound_seconds),
            "replay_flops": sum(promise.replay_flops for promise in promises) * microbatches // times,
            "loop": None,
        }
        return [
            replace(plan, prediction=replace(promise, **whole)) for plan, promise in zip(found, promises, strict=True)
        ]

    def _bound(self, budget: int) -> float:
        """Seconds that every plan adds to a microbatch; 0 where halves of backwards wait, which it knows nothing of."""
        if INPUTS in self._kinds:
            return 0.0
        return bound(self._costs(self.plain, self._fullest(self.plain), most=False), budget)


def _held(option: Option, times: int, *, active: bool) -> Option:
    """An option of which some more microbatches wait, besides the one that runs if its stage does."""
    waiting = times * option.saved_bytes
    own = (option.saved_bytes, option.forward_bytes, option.backward_bytes) if active else (0, 0, 0)
    saved, forward, backward = (waiting + nbytes for nbytes in own)
    return replace(option, saved_bytes=saved, forward_bytes=forward, backward_bytes=backward)


def graph_held(graph: Graph, times: int) -> Graph:
    """A graph whose results are held for some microbatches; which of them is in its backward is not known."""
    nodes = tuple(replace(node, bytes=node.bytes * times) for node in graph.nodes)
    return replace(graph, nodes=nodes, input_bytes=graph.input_bytes * times, backward_bytes=0)


def plan_stages(
    planner: Planner, stages: Stages | Schedule, budget: Budget | Sequence[Budget], solver: str, optimizer: Any
) -> StagePlans:
    """The plans of all stages.

    Args:
        planner: What is known of the whole model.
        stages: See `make_plan`, as the next three.
        budget: Of each rank, or one per rank.
        solver: The name of a solver.
        optimizer: From a list of parameters to an optimizer, or None.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        raise errors.ArgumentError(
            f"optimizer is a {type(optimizer).__name__} of the whole model, but each rank of a pipeline has one of its "
            "stages' parameters.\n"
            "  Pass what makes it: optimizer=torch.optim.AdamW, or a function from a list of parameters to an "
            "optimizer."
        )
    paths = paths_of_layers(planner)
    pipeline = Pipeline.of(stages, paths)
    budgets = _budgets(budget, len(pipeline.orders))
    held = in_flight(pipeline.orders)
    found: dict[int, StagePlan] = {}
    for rank, one in zip(PipelinePlanner(planner, pipeline, optimizer, solver).ranks, budgets, strict=True):
        tried, wanted = rank.fitted(one)
        alone = [[stage] for stage in rank.stages]
        plans = dict(zip(rank.stages, rank.planned(alone, tried, wanted, pipeline.microbatches), strict=True))
        if tried.peak.bytes > wanted:
            text = errors.no_plan_fits(wanted, tried.peak.bytes, rank.plain.peak.bytes, "")
            raise errors.BudgetError(f"rank {rank.number} of the pipeline: {text}", tried.peak.bytes, plans)
        for stage, plan in plans.items():
            start, stop = pipeline.bounds[stage]
            found[stage] = StagePlan(stage, rank.number, held[stage], tuple(paths[start:stop]), plan)
    made = f"{pipeline.name} with {pipeline.microbatches} microbatches on {len(pipeline.orders)} ranks"
    return StagePlans(tuple(found[stage] for stage in sorted(found)), made)


def paths_of_layers(planner: Planner) -> list[str]:
    """The layers of a model that is cut into stages, each of which is called once."""
    paths = [segment.path for segment in planner.profile.costs.segments]
    again = next((path for path, times in Counter(paths).items() if times > 1), None)
    if again is not None:
        raise errors.ArgumentError(
            f"{again} is called {paths.count(again)} times in one forward, and a pipeline cannot be cut between calls "
            "of one module: its parameters would lie on several stages.\n"
            "  Plan the model without stages=, or give each stage a module of its own."
        )
    return paths


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
