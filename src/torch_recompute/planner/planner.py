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

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from ..plan.roles import inside, relative
from ..plan.wrappers import described
from ..simulation import Simulation, simulate_step, with_carried_state
from ..simulation.devices import Work
from ..simulation.training_step import ALONE, TrainingStep, loss_of
from .alone import SegmentCall
from .calibrate import calibrate
from .candidates import offloads
from .clock import Clocked, Scale, clock, why_not_timed
from .cost import (
    NOTHING,
    Costs,
    FixedChoices,
    Graph,
    HostMemory,
    Kind,
    Option,
    Solution,
    for_all,
    kinds_for_all,
    without,
)
from .hosts import NO_OPTIONS, PlanOptions, limit_of, stores_for, waited
from .ops import StepLog
from .options import SegmentOptions, in_host_memory, undominated, worth_a_trial
from .prices import Measured, prices_for
from .profile import Profile
from .segments import CapturedCall, capture, segment_paths
from .sent import Sent, parts_of, sent, update_seconds
from .solve import choices_of, choose, frontier, planned, smallest, unplannable_repeated_modules
from .tiling import InTiles, in_tiles, mlps_in_words, mlps_of
from .trials import attempt

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
        refused: The kinds of segments that allow no region, each with the reason.
    """

    def __init__(self, step: TrainingStep, *, plan_options: PlanOptions = NO_OPTIONS) -> None:
        limit = limit_of(plan_options.offload) if plan_options.offload is not False else None
        self.whole = Planner(step, plan_options=replace(plan_options, tiles=False)) if plan_options.tiles else None
        self.step = step if self.whole is None else self.whole.step
        self.refused: dict[str, str] = {}
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
        self._ways = (
            self._options_in_tiles(self.whole) if self.whole else kinds_for_all(self._options(), step.loop.accumulate)
        )
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
            segment = self._of_kind(kind, self._kinds.index(kind)) if option.span == 1 else None
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

    # --- the options of each kind of segment ---

    def _options(self) -> dict[str, Kind]:
        firsts = {kind: self._kinds.index(kind) for kind in dict.fromkeys(self._kinds)}
        segments = self._by_kind(firsts)
        options = {kind: segment.evaluated() for kind, segment in segments.items()}
        several = {path for path, times in Counter(self.paths).items() if times > 1}
        for path in several:  # what is called several times has one choice for all its calls
            _for_all_calls({k: segments[k] for k in segments if segments[k].path == path}, options)
        ways = dict[str, Kind]()
        for kind, first in firsts.items():
            segment = segments.get(kind)
            if segment is None:
                ways[kind] = self._without_regions(self._captured.calls[first])
                continue
            graph = segment.priced.graph
            some = undominated(options[kind])
            if self._link is not None:
                some += tuple(self._offloaded(segment, some))
            if not self.step.ranks.fully_sharded:  # whose layers are gathered one by one
                some += tuple(segment.grouped())
            kept = options[kind] if segment.path in several else undominated(some)
            ways[kind] = Kind(tuple(kept), _ends_in_result(graph), segment.priced.work)
        return ways

    def _by_kind(self, firsts: Mapping[str, int]) -> dict[str, SegmentOptions]:
        """The kinds of segments that allow regions, by where the first of each is; at least one must."""
        found = {kind: one for kind, first in firsts.items() if (one := self._of_kind(kind, first)) is not None}
        if not found:
            raise errors.ArgumentError(next(iter(self.refused.values())))
        return found

    def _of_kind(self, kind: str, first: int) -> SegmentOptions | None:
        """The options of a kind of segment; None where it allows no region, and then the reason is kept."""
        doing(f"recording {self.paths[first]}")
        frees = self._loop.frees_gradients
        try:
            found = SegmentOptions(self._captured, first, self.price, self._launcher, frees=frees)
        except errors.ArgumentError as error:
            self.refused[kind] = str(error)
            return None
        if found.segment.tape.why_not:
            why = found.segment.tape.why_not
            self.refused[kind] = f"of {found.path} only the most promising choices are looked at: {why}"
        return found

    def _without_regions(self, call: SegmentCall) -> Kind:
        """The one option of a segment that allows no region."""
        with self._captured.running():
            found = attempt(call, [], self._captured.pretend, frees=self._loop.frees_gradients)
        work = Work(
            sum(self.price(op) * count for op, count in found.ops.items()),
            sum(count for op, count in found.ops.items() if not op.in_host_memory),
        )
        return Kind((Option((), found.saved_bytes, found.forward_bytes, found.backward_bytes, 0.0),), work=work)

    def _assumed(self, simulation: Simulation) -> tuple[str, ...]:
        """Returns the assumptions of a simulation, and why some layers allow no region."""
        refused = (self.whole or self).refused.values()
        return (*simulation.assumed, *dict.fromkeys(text.partition("\n")[0] for text in refused))

    def _forward_seconds(self, segment: SegmentOptions) -> float:
        """Seconds of a segment's forward."""
        return self._launcher.seconds(segment.priced.forward_work)

    def _options_in_tiles(self, whole: Planner) -> dict[str, Kind]:
        """The options of each kind of segment without tiles, and those with an MLP in tiles beside them."""
        ways = dict(whole._ways)
        for kind, own in whole._ways.items() if self._tiling.mlps else ():
            segment = self._of_kind(kind, self._kinds.index(kind))
            if segment is None:
                continue
            tried = self._in_tiles(segment, own.options)
            tiled = [for_all(option, self.step.loop.accumulate) for option in tried]
            graph = own.graph and replace(own.graph, backward_bytes=0)  # an operation in tiles takes less at once
            if tiled:
                options = (*own.options, *tiled)
                kept = options if self.paths.count(segment.path) > 1 else undominated(options)
                ways[kind] = Kind(kept, graph, own.work)
        return ways

    def _in_tiles(self, segment: SegmentOptions, options: Sequence[Option]) -> Iterator[Option]:
        """The options of one segment with an MLP in tiles: each of the others, with a region of its own for it."""
        path, layers = segment.path, self.paths.count(segment.path)
        some = [options[0], *worth_a_trial(options[1:], layers)]
        for mlp in (relative(mlp, path) for mlp in self._tiling.mlps if inside(mlp, path) and mlp != path):
            tile = Choice((mlp,), tiles=self._tiling.tiles)
            ways = (_around(option, mlp) for option in some)
            for others in dict.fromkeys(way for way in ways if way is not None):
                doing(f"trying tiles for {path}")
                here = segment.tried((*others, tile))
                if here is not None:
                    yield replace(here, seconds=here.seconds + self._waited(segment, here))

    def _waited(self, segment: SegmentOptions, here: Option) -> float:
        """Seconds for which a segment that keeps something in host memory waits for copies."""
        if self._link is None:
            return 0.0
        step, forward = self._launcher.seconds(segment.priced.work), self._forward_seconds(segment)
        return waited(here.host_bytes, self._link, forward, max(0.0, step - forward) + here.seconds)

    def _offloaded(self, segment: SegmentOptions, options: Sequence[Option]) -> Iterator[Option]:
        """The options of one segment that use host memory: its best ones with their inputs there, and parts of it."""
        layers = self.paths.count(segment.path)
        best = worth_a_trial((option for option in options[1:] if option.span == 1), layers)
        ways = [(option.saved_bytes, in_host_memory(option)) for option in best]
        ways += [(segment.plain.saved_bytes, way) for way in offloads(segment.candidates)]
        for saved_bytes, regions in ways:
            here = segment.tried(regions)
            if here is not None and here.saved_bytes < saved_bytes:
                wait = self._waited(segment, here)
                beside = here.host_bytes if here.offload else 0  # of its neighbour, which leaves or comes meanwhile
                levels = here.forward_bytes + beside, here.backward_bytes + beside
                seconds = here.seconds + wait
                yield replace(here, forward_bytes=levels[0], backward_bytes=levels[1], seconds=seconds)


def _for_all_calls(segments: Mapping[str, SegmentOptions], options: dict[str, list[Option]]) -> None:
    """Gives the calls of one module the same choices: those that are no worse than others for one of them."""
    best = [option.regions for kind in segments for option in undominated(options[kind])]
    every: dict[str, dict[tuple[Choice, ...], Option | None]] = {}
    for kind, segment in segments.items():
        own = {option.regions: option for option in options[kind]}
        every[kind] = {regions: own.get(regions) or segment.of(regions) for regions in dict.fromkeys(best)}
    for kind in segments:
        allowed = (regions for regions in every[kind] if all(found[regions] is not None for found in every.values()))
        options[kind] = [option for regions in allowed if (option := every[kind][regions]) is not None]


def _around(option: Option, mlp: str) -> tuple[Choice, ...] | None:
    """The regions of an option of one segment, without one of an MLP alone; None where others are a part of that."""
    regions = tuple(one for one in option.regions if not any(path and inside(path, mlp) for path in one.paths))
    named = [path for one in regions for path in (*one.paths, *(keep.module for keep in one.kept)) if path]
    apart = not any(inside(mlp, path) or inside(path, mlp) for path in named)
    return regions if apart and option.span == 1 and not option.offload else None


def untiled(plan: Plan, why: str) -> Plan:
    """A plan that says why it has no tiles where it might have."""
    return _promising(plan, tiled=(why,))


def _promising(plan: Plan, **figures: Any) -> Plan:
    """A plan whose prediction has other figures."""
    return replace(plan, prediction=plan.prediction and replace(plan.prediction, **figures))


def _seconds(plan: Plan) -> float:
    return plan.predicted_step_seconds or 0.0


def _ends_in_result(graph: Graph) -> Graph | None:
    """A graph, if it makes the result of its segment; one that returns what it was given, or nothing, has none."""
    return None if graph.output < 0 else graph
