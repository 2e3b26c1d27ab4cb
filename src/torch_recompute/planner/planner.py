"""From a model and a batch to costs, and from a budget to a plan that keeps its promise.

    profile    the step is simulated once without recomputation; each kind of segment is recorded alone (`record.py`),
               and what all choices take is read from that (`evaluate.py`); what else lives is taken from the
               simulation (`calibrate`)
    solve      `planner/solve.py` chooses one option per segment, on plain data
    check      the plan that was chosen is simulated as a whole. If its peak is another than predicted, the costs are
               taken again from that simulation, which makes them exact where it matters now, and solved again

Costs reproduce the simulation that they are taken from exactly, and assume of other options that the rest stays the
same. Where it does not, by the few bytes of a tensor that two segments share, `check` finds it. What two segments both
save (a skip connection) counts twice; the rest then comes out too small, never below 0, and the model is planned with
too little rather than too much room.

A plan is returned only if its own simulation fits into the budget; usually the second simulation is the last. Rejected:
a margin on the budget, which is too small for one model and wasteful for all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from .. import _torch, errors
from ..engine.shape_only import refusing
from ..errors.text import counted, doing
from ..memory.budget import FIT, Budget, Limit, bytes_meant, no_plan_fits, read_budget
from ..memory.free import free_bytes
from ..memory.ledger import Place, storages
from ..memory.operations import Operation
from ..memory.reserved import EXPANDABLE, expands
from ..plan.apply import Applied, apply
from ..plan.choice import Choice
from ..plan.libraries import switched
from ..plan.plan import Plan, Switched
from ..plan.wrappers import described
from ..simulation import Simulation, simulate_step, with_carried_state
from ..simulation.training_step import ALONE, TrainingStep, loss_of
from .calibrate import calibrate
from .clock import Clocked, Scale, clock, why_not_timed
from .cost import (
    NOTHING,
    Costs,
    FixedChoices,
    HostMemory,
    Option,
    Solution,
    without,
)
from .hosts import NO_OPTIONS, PlanOptions, limit_of, stores_for
from .ops import StepLog
from .prices import Measured, prices_for
from .profile import Profile
from .segments import CapturedCall, capture, segment_paths
from .sent import Sent, parts_of, sent, update_seconds
from .solve import choices_of, choose, frontier, planned, smallest, unplannable_repeated_modules
from .step_options import StepOptions
from .tiling import InTiles, in_tiles, mlps_in_words, mlps_of

ROUNDS = 8

Regions = tuple[Choice, ...]  # those of a plan
Checked = tuple[Solution, Simulation, Costs]  # a choice, the step with it, and costs that reproduce that step


class _Weights:
    """The weights of a copied model that its forward writes to in place, as a momentum encoder's.

    Attributes:
        written: Their names.
    """

    def __init__(self) -> None:
        self._held: list[torch.UntypedStorage] = []  # so that each has the same identity all the time
        self._names: dict[int, set[str]] = {}
        self.written: set[str] = set()

    def are_of(self, model: nn.Module) -> None:
        """Names the weights of a model, by their memory."""
        for name, weight in model.named_parameters():
            for _, storage in storages(weight):
                self._held.append(storage)
                self._names.setdefault(id(storage), set()).add(name)

    def see(self, ran: Operation) -> None:
        """Notes what an operation writes to."""
        for _, storage in storages(_torch.written_by(ran.func, ran.args, ran.kwargs)):
            self.written |= self._names.get(id(storage), set())


class Planner:
    """Costs of a training step, and plans for it.

    `plan_options` is what plans may use besides recomputation.

    Attributes:
        step: The step.
        plain: The step without recomputation, simulated.
        whole: Plans without tiles, where tiles are allowed; else None.
        always: What all plans hold besides what is chosen for segments.
        base: The step with that alone.
        costs: Taken from that step.
        paths: The segments, in the order of their calls.
        price: Gives the seconds of an operation.
        optimizer_seconds: Those of the optimizer's step.
        options: The ways to treat each kind of segment.
    """

    def __init__(self, step: TrainingStep, *, plan_options: PlanOptions = NO_OPTIONS) -> None:
        limit = limit_of(plan_options.offload) if plan_options.offload is not False else None
        self.whole = Planner(step, plan_options=replace(plan_options, tiles=False)) if plan_options.tiles else None
        self.step = step if self.whole is None else self.whole.step
        self._simulations: dict[Regions, Simulation] = {} if self.whole is None else self.whole._simulations
        self._timed: dict[Regions, Clocked] = {}
        self._plans: dict[tuple[int, str], Plan] = {}
        self._log: StepLog  # of `base`, as what follows; `simulated` sets them
        self._written: frozenset[str]
        self.always, self._tiling = NOTHING, InTiles(None, "", (), 1)
        self.plain = self.simulated(Plan()) if self.whole is None else self.whole.plain
        if self.whole is not None:
            self._allow_tiles(self.whole)
        self.base = self.simulated(Plan(self.always.choices)) if self.always.choices else self.plain
        self.price = prices_for(step, self.plain.device)
        self._launcher = self.price.host
        self._link = plan_options.link(step.where.roofline, self.plain.device)
        self._host_memory = None if self._link is None else HostMemory(limit, self._link.to_host)
        self.paths, self._kinds = self._captured.paths, self._captured.kinds
        self._routers = self._captured.routers
        self._loop = replace(self.base.loop, autocast=self._captured.autocast)
        gathers = step.ranks.fully_sharded
        self.options = StepOptions(self._captured, self.price, self._loop, link=self._link, gathers=gathers)
        self._ways = self.options.in_tiles(self.whole._ways, self._tiling) if self.whole else self.options.kinds()
        plain = tuple(self._ways[kind].options[0] for kind in self._kinds)
        # Costs that are taken too high may not see that it fits.
        self._without = Solution(plain, self.base.peak_bytes, 0.0, "no regions are needed")
        self.optimizer_seconds = update_seconds(self._log, self.price)
        self._parts = parts_of(self._log, self.price)
        seconds = step.loop.accumulate * self._parts.seconds(self._launcher) + self.optimizer_seconds
        if self.whole is not None:
            more = max(0.0, seconds - self.whole.costs.step_seconds)
            words = (*self.always.words, *self._tiling.refused)
            self.always = replace(self.always, seconds=more, flops=self.base.flops["replay"], words=words)
        self.costs = self._calibrated(self.base, plain, seconds, None)
        self._timing = self.price.timing_with_regions if isinstance(self.price, Measured) else ""
        if isinstance(self.price, Measured):
            self.price.keep()

    def _allow_tiles(self, whole: Planner) -> None:
        """Decides what is in tiles in all plans, and in how many tiles MLPs may be."""
        lean = whole.simulated(whole.leanest)
        self._tiling = in_tiles(self.step, whole.leanest, [lean, whole.plain], mlps_of(self.step))
        head = self._tiling.head
        self.always = FixedChoices(() if head is None else (head,), words=(self._tiling.words,))
        if head is None:
            self._log, self._written = whole._log, whole._written

    @property
    def sent(self) -> tuple[Sent, ...]:
        """The bytes that the rank sends in a step without recomputation."""
        return sent(self._log.ops(), self.price, self._parts.hidden, self.step.loop.accumulate)

    @cached_property
    def _captured(self) -> CapturedCall:
        """The calls of the segments."""
        return self.whole._captured if self.whole is not None else capture(self.step, self.plain.device)

    @cached_property
    def profile(self) -> Profile:
        """The profile, in seconds of whole steps where one can be run."""
        return self._clocked(None)[0]

    @cached_property
    def _priced(self) -> Profile:
        """The profile, in prices of single operations."""
        return Profile(
            type(self.step.model).__name__,
            self.price.name,
            self.costs,
            self.plain.peak_bytes,
            tuple((path, described(self.step.model.get_submodule(path))) for path in dict.fromkeys(("", *self.paths))),
            self._routers,
            unplannable_repeated_modules(self.costs),
            self.plain.advice,
            self._timing,
            self._loop,
            self._assumed(self.plain),
            self.plain.uncounted,
            self.always,
            self.switched,
        )

    @cached_property
    def switched(self) -> Switched | None:
        """The setting that every plan switches in the model, where the step without a plan has another peak for it."""
        what = switched(self.step.model, self.step.kwargs)
        if not what or self.whole is not None:
            return self.whole.switched if self.whole else None
        doing("simulating the step without a plan")
        try:
            saved = simulate_step(self.step).peak_bytes - self.plain.peak_bytes
        except Exception:  # whatever that raises which a plan switches off
            return Switched(what, 0)
        return Switched(what, saved) if saved else None

    def plan(self, budget: object, meant: Limit | None = None) -> Plan:
        """The plan for a budget; with "fit" it is one under which a CUDA device's allocator does not run out.

        Where the allocator runs out under the least plan, too, its advice says so. `meant` are the bytes that the
        budget is for a larger call, if this is one of several sizes.
        """
        asked = read_budget(budget)
        plan = self.plan_for(asked if meant is None else meant)
        if not self.plain.on_cuda or asked.share is not None:
            return plan
        if asked.bytes is not None:
            return _promising(plan, room_bytes=asked.bytes)
        free, spare = self.step.memory
        all_free = bytes_meant(FIT, lambda: 0, self.plain.peak_bytes, lambda: free)
        wanted, room, said = meant or all_free, free + spare, all_free.said.removesuffix(")")
        while (found := self.simulated(plan).reserved(expands(), limit=room)).ran_out:
            least = self.least[1].peak_bytes
            if wanted <= least:
                short = f"PyTorch's allocator runs out of {errors.brief(room)} under this plan."
                assert plan.prediction is not None
                write = "" if expands() else f"Set {EXPANDABLE}, by which it gives back what it does not use."
                plan = _promising(plan, advice=" ".join(filter(None, [short, write, plan.prediction.advice])))
                break
            less = max(least, min(wanted * room // found.reserved_bytes, wanted * 99 // 100))
            wanted = Limit(less, f"{said}; here {errors.brief(less)}, since the allocator leaves memory unused)")
            plan = self.plan_for(wanted)
        return _promising(plan, **found.within(room))

    def plan_for(self, budget: object) -> Plan:
        """The plan for a budget, checked by its own simulation."""
        asked = read_budget(budget)
        exact = asked.share == 0  # of which costs may know a little more or less than a simulation
        wanted = self._meant(asked, lambda: self.least[1].peak_bytes if exact else self.floor)
        if (wanted, wanted.said) in self._plans:
            return self._plans[wanted, wanted.said]
        whole = self._untiled(wanted)
        if whole is not None and not whole.choices:
            return untiled(whole, "nothing, since the step fits as it is")
        best = self._within(wanted)
        if best is None and asked.share is not None:  # the floor was too low
            wanted = self._meant(asked, lambda: self.least[1].peak_bytes)
            best = self._within(wanted)
        solution, simulation, costs = best or self.least
        fits = simulation.peak_bytes <= wanted
        profile, scale = self._clocked((solution, simulation, costs)) if fits else (self._priced, None)
        if scale is not None:
            costs, solution = scale(costs), scale.solution(solution)
        always = self._said(profile.always, solution, simulation)
        profile = replace(profile, assumed=self._assumed(simulation), uncounted=simulation.uncounted, always=always)
        advice = "" if self.always.choices else simulation.advice
        reserved = simulation.reserved_figures()
        plan = planned(profile, costs, solution, wanted, simulation.peak_bytes, advice, reserved)
        if whole is not None and (not fits or _seconds(whole) <= _seconds(plan)):
            longer = "nothing, since a plan without tiles fits and takes no longer"
            return untiled(whole, longer if self.always.choices else self._tiling.words)
        if not fits:
            text = no_plan_fits(wanted.said, simulation.peak_bytes, profile.own_peak_bytes, simulation.advice)
            raise errors.BudgetError(text, simulation.peak_bytes, plan)
        self._plans[wanted, wanted.said] = plan
        return plan

    def _untiled(self, wanted: Limit) -> Plan | None:
        """The plan without tiles, where these are allowed and it fits."""
        if self.whole is None:
            return None
        try:
            return self.whole.plan_for(wanted)
        except errors.BudgetError:
            return None

    def _said(self, always: FixedChoices, solution: Solution, simulation: Simulation) -> FixedChoices:
        """Adds words on the MLPs that a solution has in tiles to those on what all plans hold."""
        tiled = [
            path
            for path in self._tiling.mlps
            if any(path in choice.paths for choice in self._plan_of(solution) if choice.tiles)
        ]
        if not tiled:
            return always
        said = mlps_in_words(self.step, tiled, self._tiling.tiles, simulation)
        return replace(always, words=(*always.words, said))

    def _meant(self, budget: Budget, floor: Callable[[], int]) -> Limit:
        return bytes_meant(budget, floor, self.plain.peak_bytes, self.step.free_bytes)

    def _within(self, wanted: Limit) -> Checked | None:
        """The cheapest choice that fits into a budget, by its simulation."""
        best = (self._without, self.base, self.costs) if self.base.peak_bytes <= wanted else None
        for costs in self._kinds_of_costs() if best is None else ():
            for found in self._checked(lambda costs: choose(costs, wanted), costs):
                if found[1].peak_bytes <= wanted and (best is None or found[0].seconds < best[0].seconds):
                    best = found
        return best

    def _kinds_of_costs(self) -> list[Costs]:
        """The costs; where layers may be offloaded, those without, and where host memory may be used, those without.

        What is in flight of neighbours is a guess, and among more options the solver is less exact.
        """
        found = [
            self.costs,
            without(self.costs, lambda option: option.offload),
            without(self.costs, lambda option: bool(option.store)),
        ]
        return [costs for number, costs in enumerate(found) if costs.kinds not in [one.kinds for one in found[:number]]]

    @cached_property
    def floor(self) -> int:
        """The smallest peak by the costs, from which a share of the activation memory begins; `least` is simulated."""
        return min(smallest(self.costs).peak_bytes, self.base.peak_bytes)

    @property
    def least_plan(self) -> Plan:
        """The plan with the smallest peak, without a prediction."""
        return self._plan_of(self.least[0])

    @cached_property
    def leanest(self) -> Plan:
        """The plan that keeps the fewest bytes for backward, whatever else holds the peak; no layer is offloaded."""
        costs = without(self.costs, lambda option: option.offload)
        return self._plan_of(smallest(replace(costs, points=(), turn_bytes=10 * self.plain.peak_bytes)))

    def curve(self, budget: int, most: int) -> list[Plan]:
        """Plans whose predicted peaks are above a budget, from the one next to it to that without regions."""
        found = [solution for solution in frontier(self.costs) if solution.peak_bytes > budget]
        step = max(1, -(-len(found) // most))
        return [*(self._plan_of(solution) for solution in found[:-1:step]), Plan()]

    @cached_property
    def least(self) -> Checked:
        """The choice with the smallest peak, by its simulation."""
        best = self._without, self.base, self.costs
        for costs in self._kinds_of_costs():
            for found in self._checked(smallest, costs):
                if found[1].peak_bytes >= best[1].peak_bytes:
                    break
                best = found
            below = partial(choose, budget=best[1].peak_bytes - 1)  # by costs that are not exact
            best = min((best, *self._checked(below, costs)), key=lambda found: found[1].peak_bytes)
        return best

    def _checked(self, solve: Callable[[Costs], Solution], first: Costs) -> Iterator[Checked]:
        """Solutions, each from costs that were taken from the simulation before it; the last is exact or as before."""
        costs, kinds, known = first, first.kinds, None
        for _ in range(ROUNDS):
            try:
                solution = solve(costs)
            except errors.BudgetError:
                return
            if solution.options == known:
                return
            known = solution.options
            plan = self._plan_of(solution)
            try:
                with refusing():
                    simulation = self.simulated(plan)
            except errors.RecomputeError:
                if refused := self._refused(solution):
                    costs, known = without(costs, refused.__contains__), None
                    kinds = costs.kinds
                    continue
                simulation = self.simulated(plan)
            exact = simulation.peak_bytes == solution.peak_bytes
            if not exact:
                costs = replace(self._calibrated(simulation, known, costs.step_seconds, self.costs), kinds=kinds)
            yield solution, simulation, costs
            if exact:
                return

    def _refused(self, solution: Solution) -> set[Option]:
        """The options of a solution that the engine refuses, as to keep what a model changes in place; none is used."""
        ways = {(kind, option) for kind, option in zip(self._kinds, solution.options, strict=True) if option.regions}
        found = set[Option]()
        for kind, option in ways:
            segment = self.options.of_kind(kind) if option.span == 1 else None
            if segment is not None and segment.tried(option.regions) is None:
                found.add(option)
        if found:
            self.costs = without(self.costs, found.__contains__)
        return found

    def _clocked(self, chosen: Checked | None) -> tuple[Profile, Scale | None]:
        """The profile in seconds of whole steps: the one of a choice, or without one that with the smallest peak.

        With a choice the step without recomputation is not run, since its peak may be above what was asked for.
        """
        if not isinstance(self.price, Measured):
            return self._priced, None
        scale = self._scale(chosen)
        if isinstance(scale, str):
            return replace(self._priced, timing=f"{self._timing}, not scaled to a whole step: {scale}"), None
        always = replace(self.always, seconds=self.always.seconds * scale.replays)
        timing = f"{self._timing}, {scale}"
        return replace(self._priced, costs=scale(self.costs), timing=timing, always=always), scale

    def _scale(self, chosen: Checked | None) -> Scale | str:
        """The scale of prices by steps that are run here; or why none is, in words."""
        device = self.plain.device
        model, call = self.step.model, self.step.call
        why = "it is one of several ranks" if self.step.ranks != ALONE else why_not_timed(model, *call, device)
        if why:
            return why
        try:
            copied = (weight for name, weight in model.named_parameters() if name in self._written)
            held = (*model.buffers(), *copied, *(p.grad for p in model.parameters() if p.grad is not None))
            room = free_bytes(model, device) - sum(tensor.nbytes for tensor in held)
        except errors.ArgumentError as error:
            return str(error)
        solution, simulation, _ = chosen or self.least
        if simulation.peak_bytes > room:
            return "there is no memory for one"
        plan = self._plan_of(solution)

        def run(plan: Plan) -> Clocked:
            key = tuple(plan)
            if key not in self._timed:
                doing("running the step to time it")
                region = 0.0 if self._launcher.apart else self._launcher.region
                self._timed[key] = clock(model, *call, self.step.loss or loss_of, plan, device, region, self._written)
            return self._timed[key]

        base = Plan(self.always.choices)
        alone = plan == base or (chosen is None and self.base.peak_bytes <= room)
        try:
            times = self._loop.accumulate
            regions = run(plan).times(times) if plan != base else None
            plain = run(base).times(times) if alone else None
            return Scale.of(regions, plain, solution.seconds, self.optimizer_seconds)
        except Exception as error:  # whatever a model may raise: it is said in the plan
            return f"one raised {type(error).__name__}"

    def _plan_of(self, solution: Solution) -> Plan:
        return Plan(choices_of(self._priced, solution))

    def simulated(self, plan: Plan) -> Simulation:
        """The step with a plan; of that without recomputation, what ran is counted."""
        key = tuple(plan)
        if key in self._simulations:
            return self._simulations[key]
        log = StepLog(segment_paths(self.step.model), plan, ordered=self.step.ranks.fully_sharded)
        weights = _Weights()

        def count(place: Place, operation: Operation) -> None:
            if place.phase in ("forward", "loss"):
                weights.see(operation)
            log.see(place, operation)

        def prepare(copied: nn.Module) -> Applied:
            weights.are_of(copied)
            return apply(copied, plan, stores=stores_for(plan, self.step))

        doing(f"simulating the step with {counted(len(key), 'region')}" if key else "simulating the step")
        watch = count if key == self.always.choices else None
        found = simulate_step(self.step, prepare=prepare, watch=watch)
        later = with_carried_state(self.step, found)
        if later is not None:
            self.step = later
            return self.simulated(plan)
        self._simulations[key] = found
        if watch is not None:
            self._log, self._written = log, frozenset(weights.written)
        return found

    def _calibrated(
        self, simulation: Simulation, options: Sequence[Option], step_seconds: float, known: Costs | None
    ) -> Costs:
        costs = calibrate(simulation.timeline, self.paths, self._kinds, options, self._ways, step_seconds, known)
        parts = tuple(part.times(self.step.loop.accumulate) for part in self._parts.parts.values())
        return replace(costs, host_memory=self._host_memory, host=self._launcher, parts=parts)

    def _assumed(self, simulation: Simulation) -> tuple[str, ...]:
        """Returns the assumptions of a simulation, and why some layers allow no region."""
        refused = (self.whole or self).options.refused.values()
        return (*simulation.assumed, *dict.fromkeys(text.partition("\n")[0] for text in refused))


def untiled(plan: Plan, why: str) -> Plan:
    """A plan that says why it has no tiles where it might have."""
    return _promising(plan, tiled=(why,))


def _promising(plan: Plan, **figures: Any) -> Plan:
    """A plan whose prediction has other figures."""
    return replace(plan, prediction=plan.prediction and replace(plan.prediction, **figures))


def _seconds(plan: Plan) -> float:
    return plan.predicted_step_seconds or 0.0
