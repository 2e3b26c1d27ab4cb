"""Plans for the ranks of a pipeline: each rank's stages, for the microbatches that the schedule has in flight there.

On a rank of a pipeline the bytes of a layer count as often as microbatches are in flight, which differs from stage to
stage and from action to action, and the chunks of one rank share its memory. The planner's own three steps, per rank:

    profile    the whole model is profiled once, for one microbatch; each stage is run on fake tensors
               (`stage_runs.py`), and what a rank holds at each action of its order is a sum (`rank_memory.py`)
    solve      at the action that holds the most, the options of each layer are priced as often as it is held then, and
               the solver of `plan/` chooses among them as for one model; where another action holds too much under its
               choice, it is asked for less, and then layers take back one after the other what still fits
    check      the stages are run with what was chosen, and the sum is taken over all actions; if it is more than was
               estimated, all is taken from that run, and solved again

It serves `make_plan(stages=...)`, whose stages torch's runtime runs, and the ranks of a command line (`layout.py`),
whose stages Megatron's runs. With prices of a data sheet each rank makes the same plans by itself. Rejected: one
profile per rank, since no rank could plan for itself; the most of each chunk, which the chunks of a rank do not hold at
the same time; prices per byte in flight in the place of the solver, on 1F1B up to 4 % of a step worse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch

from .. import errors
from ..memory.budget import Limit, bytes_meant, no_plan_fits, read_budget
from ..plan.choice import Choice, joined
from ..plan.plan import Plan
from ..plan.roles import inside, relative
from ..plan.stages import StagePlan, StagePlans, Stages
from ..simulation.training_step import TrainingStep
from .bound import bound
from .calibrate import calibrate
from .cost import Costs, Graph, Kind, Option, Point, Segment, Solution, begins, for_all, kinds_for_all
from .hosts import NO_OPTIONS, PlanOptions
from .ops import Op
from .planner import Planner
from .rank_memory import RankMemory, RankPeak, StageBytes
from .schedules import FORWARD, INPUTS, REDUCE, WEIGHTS, Pipeline, Schedule, ScheduleStep, in_flight, schedule_steps
from .sent import Price, parts_of
from .solve import Solver, choices_of, planned, smallest, waiting
from .stage_runs import StageRun, StageRunner

ROUNDS, BISECTIONS = 8, 10
LIFT = 1 << 50  # bytes that are added to those of one stage alone, so that differences to it are never below 0
Budget = int | float | str
Chosen = dict[int, tuple[Option, ...]]  # by stage, one per layer


@dataclass(frozen=True)
class TriedPlan:
    """The stages of a rank under some options: what was seen of each, and when the most bytes are alive."""

    chosen: Chosen
    runs: Mapping[int, StageRun]
    peak: RankPeak

    @property
    def bytes(self) -> dict[int, StageBytes]:
        """The bytes of each stage."""
        return {stage: run.bytes for stage, run in self.runs.items()}

    @property
    def seconds(self) -> float:
        """The seconds that replays add to one microbatch."""
        return sum(option.seconds / option.span for options in self.chosen.values() for option in options)


class PipelineStages:
    """The stages of a model that a pipeline trains, under plans that are stated.

    With `megatron` its runtime runs the stages: it releases what it sends, and has buffers for gradients.

    Attributes:
        step: A step with one microbatch.
        paths: The layers, in their order.
        pipeline: How they are cut, and the order of actions.
        optimizer: Makes one of a rank's parameters.
        price: Gives the seconds of an operation.
    """

    def __init__(
        self,
        step: TrainingStep,
        paths: Sequence[str],
        pipeline: Pipeline,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None,
        megatron: bool,
        price: Price,
    ) -> None:
        self.step, self.paths, self.pipeline, self.optimizer = step, paths, pipeline, optimizer
        self.megatron, self.price = megatron, price
        self._runs: dict[Any, StageRun] = {}

    @cached_property
    def runner(self) -> StageRunner:
        """Runs the stages that have not been run."""
        return StageRunner(self.step, self.paths, self.pipeline.bounds, self.megatron)

    def layers(self, stage: int) -> Sequence[str]:
        """The paths of a stage's layers."""
        return self.paths[slice(*self.pipeline.bounds[stage])]

    def _kinds(self, stage: int) -> list[Any]:
        """The keys of a stage's layers, which are equal for layers that are alike."""
        return [layer.kind for layer in self.runner.layers[slice(*self.pipeline.bounds[stage])]]

    @cached_property
    def alike(self) -> list[int]:
        """Of each stage the first that costs the same: with like layers, and with what the two ends do besides."""
        described = [self._described(stage) for stage in range(len(self.pipeline.bounds))]
        return [described.index(one) for one in described]

    def _described(self, stage: int) -> tuple[object, ...]:
        layers = [self.step.model.get_submodule(path) for path in self.layers(stage)]
        held = {id(tensor) for layer in layers for tensor in (*layer.parameters(), *layer.buffers())}
        end = stage if stage in (0, len(self.pipeline.bounds) - 1) else None
        names = (name for path in self.layers(stage) for name in self.runner.left if inside(name, path))
        return self._kinds(stage), len(held), end, len([*names])

    def _renamed(self, name: str, stage: int, to: int) -> str | None:
        """The name in another stage that is like it; None for a name in a layer of neither."""
        pairs = zip(self.layers(stage), self.layers(to), strict=True)
        found = next((joined(there, relative(name, here)) for here, there in pairs if inside(name, here)), None)
        return found or (None if any(inside(name, path) for path in self.paths) else name)

    def parameters(self, stage: int, run: StageRun) -> list[str]:
        """The names of what a stage reads, from the run of one that is like it."""
        return [self._renamed(name, self.alike[stage], stage) or name for name in run.parameters]

    def stated(self, stage: int, plan: Plan, kinds: frozenset[str]) -> StageRun:
        """Two microbatches of a stage, or of one that is like it, under a plan in the paths of the whole model."""
        there, choices = self.alike[stage], list[Choice]()
        for choice in plan:
            paths = tuple(filter(None, (self._renamed(path, stage, there) for path in choice.paths)))
            choices += [replace(choice, paths=paths)] if paths else []
        key = there, tuple(choices), kinds
        if key not in self._runs:
            self._runs[key] = self.runner.run(there, Plan(tuple(choices)), kinds)
        return self._runs[key]

    def plain(self, stage: int, kinds: frozenset[str]) -> StageRun:
        """Two microbatches of a stage without recomputation."""
        return self.stated(stage, Plan(), kinds)


class PipelinePlanner(PipelineStages):
    """The stages of a model, and plans for its `ranks`."""

    def __init__(
        self,
        planner: Planner,
        pipeline: Pipeline,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None,
        megatron: bool = False,
    ) -> None:
        super().__init__(planner.step, planner.paths, pipeline, optimizer, megatron, planner.price)
        self.profile = planner.profile

    @cached_property
    def ranks(self) -> list[RankPlanner]:
        """The ranks, in order."""
        return [RankPlanner(self, number) for number in sorted(self.pipeline.orders)]

    def segments(self, stage: int) -> tuple[Segment, ...]:
        """The layers of a stage."""
        return self.profile.costs.segments[slice(*self.pipeline.bounds[stage])]

    def _kinds(self, stage: int) -> list[Any]:
        return [segment.kind for segment in self.segments(stage)]

    def plain(self, stage: int, kinds: frozenset[str]) -> StageRun:
        """Two microbatches of a stage without recomputation."""
        segments = self.segments(stage)
        return self.run(stage, tuple(self.profile.costs.kinds[one.kind].options[0] for one in segments), kinds)

    def run(self, stage: int, options: tuple[Option, ...], kinds: frozenset[str]) -> StageRun:
        """Two microbatches of a stage, or of one that is like it."""
        key = self.alike[stage], options, kinds
        if key not in self._runs:
            costs = replace(self.profile.costs, segments=self.segments(key[0]))
            plan = Plan(choices_of(replace(self.profile, costs=costs), Solution(options, 0, 0.0)))
            self._runs[key] = self.runner.run(key[0], plan, kinds)
        return self._runs[key]


class PipelineRank:
    """One rank of a pipeline.

    Attributes:
        stages: The numbers of its stages.
        kinds: Of their actions.
        hidden: Of the seconds of one microbatch those of what is sent meanwhile, by purpose.
        runs: Those of its stages without recomputation.
        parts: The work of one microbatch, without recomputation.
        seconds: Of that.
        parameters: Those that its stages read, by name.
        ran: The operations of one microbatch, and those of the optimizer's step.
        state_bytes: Of the optimizer.
        memory: What its stages take together.
    """

    def __init__(self, of: PipelineStages, number: int) -> None:
        self.number = number
        actions = of.pipeline.orders[number]
        self.kinds = frozenset(action.kind for action in actions)
        self.stages = sorted({action.stage for action in actions})
        self.runs = runs = {stage: of.plain(stage, self.kinds) for stage in self.stages}
        self.parameters = tuple(dict.fromkeys(name for item in runs.items() for name in of.parameters(*item)))
        taken, updating = (0, 0), Counter[Op]()
        if of.optimizer is not None:
            taken, updating = of.runner.optimizer(of.optimizer, self.parameters)
        self.ran = sum((run.ran for run in runs.values()), Counter[Op]()), updating
        found = [parts_of(run.log, of.price) for run in runs.values()]
        self.parts = tuple(part for one in found for part in one.parts.values())
        self.seconds = sum(one.seconds(of.price.host) for one in found)
        self.hidden = dict(sum((Counter(one.hidden) for one in found), Counter[str]()))
        self.state_bytes = taken[0]
        self.memory = RankMemory(
            schedule_steps(actions),
            of.pipeline.microbatches,
            to_the_end=not of.megatron and of.pipeline.name.upper() != "1F1B",  # which waits for each send
            here=frozenset(stage for stage in self.stages if stage + 1 in self.stages),
            optimizer=taken,
            preallocated=of.megatron,
            reserved=of.runner.held if of.megatron or of.step.ranks.fully_sharded else 0,
            sharded=of.step.ranks.fully_sharded,
        )

    @property
    def once(self) -> Counter[Op]:
        """The collectives of ranks that share weights which are not of each microbatch, in a step."""
        found: Counter[Op] = Counter()
        times = {**self.memory.before(FORWARD), **{(stage, REDUCE): 1 for stage in self.stages}}
        for (stage, last), count in times.items():
            for op, number in self.runs[stage].more.get(last, Counter[Op]()).items():
                found[op] += number * count
        return found

    def peak(self, runs: Mapping[int, StageRun]) -> RankPeak:
        """When the most bytes are alive, given runs of its stages."""
        return self.memory.peak({stage: run.bytes for stage, run in runs.items()})

    def made_of(self, runs: Mapping[int, StageRun]) -> dict[str, int]:
        """The bytes of the peak by what they are for."""
        uses = {stage: run.uses for stage, run in runs.items()}
        return self.memory.made_of({stage: run.bytes for stage, run in runs.items()}, uses)


class RankPlanner(PipelineRank):
    """One rank of a pipeline, and plans for it; `plain` is that without recomputation."""

    def __init__(self, of: PipelinePlanner, number: int) -> None:
        super().__init__(of, number)
        self._of, kinds = of, of.profile.costs.kinds
        first = {stage: tuple(kinds[one.kind].options[0] for one in of.segments(stage)) for stage in self.stages}
        self.plain = self._tried(first)

    def _tried(self, chosen: Chosen) -> TriedPlan:
        runs = {stage: self._of.run(stage, options, self.kinds) for stage, options in chosen.items()}
        return TriedPlan(chosen, runs, self.peak(runs))

    def fitted(self, budget: Budget) -> tuple[TriedPlan, Limit]:
        """The cheapest choice for a budget, or that of the least need where none fits; the budget in bytes."""
        step, plain = self._of.step, self.plain.peak.bytes
        wanted = bytes_meant(
            budget, lambda: self.least.peak.bytes, plain, lambda: step.free_bytes() + step.bucket_bytes[1]
        )
        if self.plain.peak.bytes <= wanted:
            return self.plain, wanted
        return self._within(wanted) or self.least, wanted

    def _within(self, budget: int) -> TriedPlan | None:
        """The cheapest that fits, of those that the rounds reach."""
        best: TriedPlan | None = None
        current, target = self.plain, budget
        over: list[tuple[Chosen, int]] = []  # what was tried, and by how much it exceeds the budget
        for _ in range(ROUNDS):
            chosen = self._choice(current, target)
            if chosen is None:
                break
            excess = next((excess for tried, excess in over if tried == chosen), None)
            if excess is None:
                current = self._tried(chosen)
                over.append((chosen, current.peak.bytes - budget))
                if current.peak.bytes <= budget and (best is None or current.seconds < best.seconds):
                    best = current
            elif excess > 0:
                target -= excess
            else:
                break
        return best

    def _choice(self, tried: TriedPlan, budget: int) -> Chosen | None:
        """The cheapest choice that fits, as far as what was tried tells; None where a solver finds none.

        A solver knows one action. Where others need more under its choice, it is asked for less; then layers take back
        one after the other what still fits.
        """
        step = self.memory.fullest(tried.bytes)
        costs = self._costs(tried, step)
        solver = Solver(costs)
        single = {stage: self._calibrated(tried, stage, LIFT) for stage in self.stages}
        room = budget + self._estimated(tried, tried.chosen, single).bytes - tried.peak.bytes
        fits: Chosen | None = None
        low, too_much = budget, budget + 1
        for _ in range(BISECTIONS):
            target = low if fits is None else (low + too_much) // 2
            try:
                chosen = self._chosen(costs, step, solver.choose(target))
            except errors.BudgetError:
                break
            excess = self._estimated(tried, chosen, single).bytes - room
            if excess <= 0:
                fits, low = chosen, target
                if target >= too_much - 1:
                    break
            else:
                too_much = target
                low = target - excess if fits is None else low
        if fits is None:
            fits = self._chosen(costs, step, solver.smallest)
            if self._estimated(tried, fits, single).bytes > room:
                return None
        kinds, level = self._of.profile.costs.kinds, self._estimated(tried, fits, single)
        for stage in reversed(self.stages):
            for place, segment in reversed(list(enumerate(self._of.segments(stage)))):
                before = fits[stage][place]
                cheaper = [o for o in kinds[segment.kind].options if o.span == 1 and o.seconds < before.seconds]
                for option in sorted(cheaper, key=lambda o: o.seconds) if before.span == 1 else ():
                    full = level.step
                    if full is not None and full.action.stage != stage:  # where it adds what waiting microbatches keep
                        added = full.whole(stage) * (option.saved_bytes - before.saved_bytes)
                        if level.bytes + added > room:
                            continue
                    other = {**fits, stage: (*fits[stage][:place], option, *fits[stage][place + 1 :])}
                    peak = self._estimated(tried, other, single)
                    if self._hosts(other) and peak.bytes <= room:
                        fits, level = other, peak
                        break
        return fits

    def _hosted(self, chosen: Chosen) -> dict[int, int]:
        """The bytes that a microbatch of each stage has in host memory."""
        return {stage: sum(options[i].host_bytes for i in begins(options)) for stage, options in chosen.items()}

    def _hosts(self, chosen: Chosen) -> bool:
        """Whether host memory holds what some options send there."""
        host = self._of.profile.costs.host_memory
        return host is None or host.bytes is None or self.memory.most_hosted(self._hosted(chosen)) <= host.bytes

    def _estimated(self, tried: TriedPlan, chosen: Chosen, single: Mapping[int, Costs]) -> RankPeak:
        """The peak of the rank under some options, from what was tried under others and the costs of its stages."""
        stages: dict[int, StageBytes] = {}
        for stage, found in tried.bytes.items():
            forward, backward, saved = _most(single[stage], chosen[stage])
            as_seen = (WEIGHTS, REDUCE)
            new = {kind: found.own[kind, True] if kind in as_seen else backward - LIFT for kind, _ in found.own}
            new[FORWARD] = forward - LIFT
            stages[stage] = replace(
                found,
                whole_bytes=found.whole_bytes + saved - sum(_saved(tried.chosen[stage])),
                own={(kind, g): nbytes - found.own[kind, True] + new[kind] for (kind, g), nbytes in found.own.items()},
                after={key: nbytes - found.own[key[0], True] + new[key[0]] for key, nbytes in found.after.items()},
            )
        return self.memory.peak(stages)

    @cached_property
    def least(self) -> TriedPlan:
        """The smallest peak that the rounds reach."""
        best = current = self.plain
        for _ in range(ROUNDS):
            step = self.memory.fullest(current.bytes)
            costs = self._costs(current, step)
            current = self._tried(self._chosen(costs, step, smallest(costs)))
            if current.peak.bytes >= best.peak.bytes:
                break
            best = current
        while (found := self._within(best.peak.bytes - 1)) is not None:
            best = found
        return best

    def _order(self, step: ScheduleStep) -> list[int]:
        """The stages as a solver is given them: the one that runs comes last."""
        return sorted(self.stages, key=lambda stage: stage == step.action.stage)

    def _chosen(self, costs: Costs, step: ScheduleStep, solution: Solution) -> Chosen:
        """The options of a solution for `_costs`, as they are for one microbatch."""
        kinds = self._of.profile.costs.kinds
        chosen: Chosen = dict.fromkeys(self.stages, tuple[Option, ...]())
        rest = zip(costs.segments, solution.options, strict=True)
        for stage in self._order(step):
            for own in self._of.segments(stage):
                segment, option = next(rest)
                place = costs.kinds[segment.kind].options.index(option)
                chosen[stage] = (*chosen[stage], kinds[own.kind].options[place])
        return chosen

    def _costs(self, tried: TriedPlan, step: ScheduleStep) -> Costs:
        """The costs that a solver is given for one action: each layer as often as it is held then.

        In the backward of one layer of the stage that runs, those after it are released by this microbatch, not by
        those that wait. What these hold is no constant; it is taken from what was tried, but not where that is
        everything.
        """
        active = step.action.stage
        waiting = sum(step.whole(s) * sum(_saved(tried.chosen[s])) for s in self.stages)
        own = max(sample.live_bytes for sample in tried.runs[active].timeline)
        costs = self._calibrated(tried, active, self.memory.at(tried.bytes, step) - own - waiting)
        saved = [0 if tried is self.plain else nbytes for nbytes in _saved(tried.chosen[active])]
        after = [step.whole(active) * sum(saved[i:]) for i in range(len(saved) + 1)]
        kinds: dict[str, Kind] = {}
        segments: list[Segment] = []
        points = [Point(0, peak.bytes, peak.where) for peak in self.memory.after(tried.bytes)]
        for stage in self._order(step):
            runs, times = stage == active, step.whole(stage)
            if runs:
                points += [Point(len(segments) + p.after, p.bytes + after[p.after], p.where) for p in costs.points]
            for i, segment in enumerate(self._of.segments(stage)):
                name, kind = f"{segment.kind} of stage {stage}", self._of.profile.costs.kinds[segment.kind]
                options = tuple(_held(option, times, runs, self.memory.most[stage]) for option in kind.options)
                kinds[name] = Kind(options, kind.graph and graph_held(kind.graph, times + runs), kind.work)
                forward = costs.segments[i].forward_bytes + after[i + 1] if runs else 0
                backward = costs.segments[i].backward_bytes + after[i + 1] if runs else 0
                segments.append(Segment(segment.path, name, forward, backward))
        return replace(costs, kinds=kinds, segments=tuple(segments), points=tuple(points))

    def _calibrated(self, tried: TriedPlan, stage: int, level: int) -> Costs:
        """The costs of one microbatch of a stage, above what else is alive."""
        of = self._of
        lifted = [sample._replace(live_bytes=sample.live_bytes + level) for sample in tried.runs[stage].timeline]
        costs = calibrate(
            lifted,
            [segment.path for segment in of.segments(of.alike[stage])],
            [segment.kind for segment in of.segments(stage)],
            tried.chosen[stage],
            of.profile.costs.kinds,
            self.seconds,
        )
        return replace(costs, host_memory=of.profile.costs.host_memory, host=of.profile.costs.host)

    def _waiting(self, tried: TriedPlan) -> float:
        """The seconds of a microbatch in which the device waits for its host."""
        whole, of = self._of.profile.costs, self._of
        segments = tuple(segment for stage in self.stages for segment in of.segments(stage))
        options = [option for stage in self.stages for option in tried.chosen[stage]]
        return waiting(replace(whole, segments=segments, parts=self.parts), options)

    def planned(self, groups: Sequence[Sequence[int]], tried: TriedPlan, wanted: Limit, times: int) -> list[Plan]:
        """A plan for each of some groups of stages, with what is promised of the whole rank.

        The lines of the predictions are of so many `times` a microbatch.
        """
        of, microbatches = self._of, self._of.pipeline.microbatches
        kinds = {name: Kind(kind.options, work=kind.work) for name, kind in of.profile.costs.kinds.items()}
        kinds = kinds_for_all(kinds, times)
        bound_seconds = 0.0
        if INPUTS not in self.kinds and of.profile.costs.host_memory is None:
            # The bound knows nothing of halves of backwards that wait, nor of copies of several microbatches.
            costs = self._costs(self.plain, self.memory.fullest(self.plain.bytes))
            bound_seconds = bound(costs, max(wanted, tried.peak.bytes))
        found: list[Plan] = []
        for stages in groups:
            segments = tuple(segment for stage in stages for segment in of.segments(stage))
            costs = Costs(kinds, segments, host=of.profile.costs.host)
            paths = {segment.path for segment in segments}
            modules = tuple(row for row in of.profile.modules if row[0] in paths)
            peak = self.plain.peak.bytes
            profile = replace(of.profile, costs=costs, plain_peak_bytes=peak, modules=modules, switched=None)
            options = tuple(for_all(option, times) for stage in stages for option in tried.chosen[stage])
            plan = planned(profile, costs, Solution(options, 0, 0.0, "auto"), wanted, tried.peak.bytes)
            found.append(replace(plan, source=f"a budget of {wanted.said} on rank {self.number}"))
        promises = [plan.prediction for plan in found if plan.prediction is not None]
        whole: dict[str, Any] = {
            "plain_step_seconds": microbatches * self.seconds,
            "step_seconds": microbatches * (self.seconds + tried.seconds),
            "bound_seconds": microbatches * (self.seconds + bound_seconds),
            "replay_flops": sum(promise.replay_flops for promise in promises) * microbatches // times,
            "loop": None,
            "host_bytes": self.memory.most_hosted(self._hosted(tried.chosen)),
            "waiting_seconds": microbatches * self._waiting(tried),
        }
        return [
            replace(plan, prediction=replace(promise, **whole)) for plan, promise in zip(found, promises, strict=True)
        ]


def _saved(options: Sequence[Option]) -> list[int]:
    """The bytes that each layer keeps."""
    return [option.saved_bytes // option.span for option in options]


def _most(costs: Costs, options: Sequence[Option]) -> tuple[int, int, int]:
    """The most that one microbatch of a stage takes in its forward and in its backward, and what it keeps."""
    forward = backward = 0
    saved = [0]
    for start in begins(options):
        option, stop = options[start], start + options[start].span
        forward = max(forward, saved[start] + costs.segments[start].forward_bytes + option.forward_bytes)
        backward = max(backward, saved[start] + costs.segments[stop - 1].backward_bytes + option.backward_bytes)
        saved += [saved[start] + option.saved_bytes] * option.span
    between = max([saved[-1] + costs.turn_bytes, *(saved[point.after] + point.bytes for point in costs.points)])
    return max(forward, between), max(backward, between), saved[-1]


def _held(option: Option, times: int, runs: bool, most: int) -> Option:
    """An option of which some microbatches wait, besides the one that runs if its stage does; `most` at some time."""
    waiting = times * option.saved_bytes
    own = (option.saved_bytes, option.forward_bytes, option.backward_bytes) if runs else (0, 0, 0)
    saved, forward, backward = (waiting + nbytes for nbytes in own)
    hosted = most * option.host_bytes
    return replace(option, saved_bytes=saved, forward_bytes=forward, backward_bytes=backward, host_bytes=hosted)


def graph_held(graph: Graph, times: int) -> Graph:
    """A graph whose results are held for some microbatches; which of them is in its backward is not known."""
    nodes = tuple(replace(node, bytes=node.bytes * times) for node in graph.nodes)
    return replace(graph, nodes=nodes, input_bytes=graph.input_bytes * times, backward_bytes=0)


def plan_stages(
    step: TrainingStep,
    stages: Stages | Schedule,
    budget: Budget | Sequence[Budget],
    plan_options: PlanOptions = NO_OPTIONS,
) -> StagePlans:
    """The plans of all stages of a model; see `make_plan`. The budget is that of each rank, or one per rank."""
    optimizer = step.optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        raise errors.ArgumentError(
            f"optimizer is a {type(optimizer).__name__} of the whole model, but each rank of a pipeline has one of its "
            "stages' parameters.\n"
            "  Pass what makes it: optimizer=torch.optim.AdamW, or a function from a list of parameters to an "
            "optimizer."
        )
    planner = Planner(step, plan_options=plan_options)
    paths = paths_of_layers(planner)
    pipeline = Pipeline.of(stages, paths)
    budgets = _budgets(budget, len(pipeline.orders))
    held = in_flight(pipeline.orders)
    found: dict[int, StagePlan] = {}
    for rank, one in zip(PipelinePlanner(planner, pipeline, optimizer).ranks, budgets, strict=True):
        tried, wanted = rank.fitted(one)
        alone = [[stage] for stage in rank.stages]
        plans = dict(zip(rank.stages, rank.planned(alone, tried, wanted, pipeline.microbatches), strict=True))
        if tried.peak.bytes > wanted:
            text = no_plan_fits(wanted.said, tried.peak.bytes, rank.plain.peak.bytes, "")
            raise errors.BudgetError(f"rank {rank.number} of the pipeline: {text}", tried.peak.bytes, plans)
        for stage, plan in plans.items():
            start, stop = pipeline.bounds[stage]
            found[stage] = StagePlan(stage, rank.number, held[stage], tuple(paths[start:stop]), plan)
    made = f"{pipeline.name} with {pipeline.microbatches} microbatches on {len(pipeline.orders)} ranks"
    if any(action.kind == INPUTS for order in pipeline.orders.values() for action in order):
        made += (
            "; each region is counted to replay once for both halves of a backward, as it does within\n"
            "with torch.utils.checkpoint.GraphExecGroup(): schedule.step(...)"
        )
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
    budgets = [*budget] if isinstance(budget, (list, tuple)) else [cast("Budget", budget)] * ranks
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
