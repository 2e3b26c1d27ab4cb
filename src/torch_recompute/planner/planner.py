"""From a model and a batch to costs, and from a budget to a plan that keeps its promise.

Problem. A planner predicts from a model of memory; the step runs in memory as it is. Predictions that are good on the
average are of no use to somebody whose step dies of the one that was not.

Idea. Three steps, the last of which is the promise:

    profile    the step is simulated once without recomputation; each kind of segment is looked at alone
    (`candidates.py`) and
               tried under the choices worth it (`trials.py`); what else lives is taken from the simulation
               (`calibrate.py`)
    solve      `plan/solve.py` chooses one option per segment, on plain data
    check      the plan that was chosen is simulated as a whole. If its peak is another than predicted, the costs are
               taken again from that simulation, which makes them exact where it matters now, and solved again

A plan is handed out only if its own simulation fits into the budget. Usually the second simulation is the last.

Rejected: a margin on the budget. It is too small for one model and wasteful for all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from .. import errors
from ..memory.free import free_bytes
from ..memory.loop import COMMON, Loop
from ..plan.apply import apply
from ..plan.choice import Choice, joined
from ..plan.cost import Costs, Host, Kind, Option, Solution, kinds_for_all, simplicity
from ..plan.plan import Plan
from ..plan.profile import Profile
from ..plan.solve import bytes_of, choices_of, choose, decides, frontier, planned, smallest, untied
from ..plan.wrappers import described
from ..simulation import Simulation, simulate_step
from ..simulation.step import loss_of
from .calibrate import calibrate
from .candidates import Guess, SegmentTrace, guesses, trace
from .clock import Scale, clock, obstacle
from .hosts import HostApart, limit_of, link_of, waited
from .ops import Op, op_of
from .prices import Measured, Roofline, prices_for, where
from .segments import CapturedCall, capture, groups
from .stage_runs import StageRunner
from .trials import SegmentCall, Tried, attempt

ROUNDS = 8
TRIED = 20  # choices per kind of segment

Loss = Callable[[Any], torch.Tensor] | None
Checked = tuple[Solution, Simulation, Costs]  # a choice, the step with it, and costs that reproduce that step
MakeOptimizer = Callable[[Any], torch.optim.Optimizer] | torch.optim.Optimizer | None


class Planner:
    """A model, the step that it is trained with, and what is known of both.

    Args:
        model: See `profile`, as the next five.
        args: The positional arguments of one call.
        kwargs: Its keyword arguments.
        loss: From the model's output to a scalar.
        optimizer: From a list of parameters to an optimizer, or an optimizer.
        device: What the seconds are of.
        offload: Whether inputs of regions may be kept in host memory.
        loop: The training loop around the call.
        ran: Gets the operations of the step without recomputation, and how often each ran; of one of those accumulated.

    Attributes:
        costs: Taken from the step without recomputation.
        plain: That step, simulated.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        *,
        loss: Loss = None,
        optimizer: MakeOptimizer = None,
        device: torch.device | str | Roofline | None = None,
        offload: bool | int | str = False,
        loop: Loop = COMMON,
        ran: Counter[tuple[str, Op]] | None = None,
    ) -> None:
        self._model = model
        self._call = args, kwargs
        place = where(device, model)
        roofline, self._composed = place.roofline, place.composed
        limit = limit_of(offload) if offload is not False else None
        self._step: dict[str, Any] = {"loss": loss, "optimizer": optimizer, "loop": loop, **place.step}
        ran = Counter() if ran is None else ran
        self.plain = self._simulated(Plan(), ran)
        self._price = roofline or prices_for(model, self.plain.device)
        self._link = link_of(roofline, self.plain.device) if offload is not False else None
        self._host = None if self._link is None else Host(limit, self._link.to_host)
        captured = capture(model, args, kwargs or {}, self.plain.device, self._composed)
        self._paths = captured.paths
        self._kinds = [str(number) for number in captured.kinds]
        self._routers = captured.routers
        self._loop = replace(self.plain.loop, autocast=captured.autocast)
        self._ways = kinds_for_all(self._tried(captured), loop.accumulate)
        options = [self._ways[kind].options[0] for kind in self._kinds]
        prices = [(phase, self._price(op) * count) for (phase, op), count in ran.items()]
        self._optimizer_seconds = sum(seconds for phase, seconds in prices if phase == "optimizer")
        once = sum(seconds for _, seconds in prices) - self._optimizer_seconds
        self.costs = self._calibrated(self.plain, options, loop.accumulate * once + self._optimizer_seconds)
        self._timing = ""
        if isinstance(self._price, Measured):
            self._timing = self._price.timing
            self._price.keep()

    @cached_property
    def profile(self) -> Profile:
        """What is known, as data, in seconds of whole steps where one can be run."""
        return self._clocked(None)[0]

    @cached_property
    def _priced(self) -> Profile:
        """What is known, in prices of single operations."""
        return Profile(
            type(self._model).__name__,
            self._price.name,
            self.costs,
            self.plain.peak_bytes,
            tuple((path, described(self._model.get_submodule(path))) for path in dict.fromkeys(self._paths)),
            self._routers,
            untied(self.costs),
            self.plain.advice,
            self._timing,
            self._loop,
        )

    def plan(self, budget: int | float | str, solver: str = "auto") -> Plan:
        """The plan for a budget, checked by its own simulation."""
        free = partial(free_bytes, self._model, self.plain.device, self._step["optimizer"], self._call)
        wanted = bytes_of(budget, lambda: self.least[1].peak_bytes, self.plain.peak_bytes, free)
        best = (self._without, self.plain, self.costs) if self.plain.peak_bytes <= wanted else None
        for found in self._checked(lambda costs: choose(costs, wanted, solver)) if best is None else ():
            if found[1].peak_bytes <= wanted and (best is None or found[0].seconds < best[0].seconds):
                best = found
        solution, simulation, costs = best or self.least
        fits = simulation.peak_bytes <= wanted
        profile, scale = self._clocked((solution, simulation, costs)) if fits else (self._priced, None)
        if scale is not None:
            costs, solution = scale(costs), scale.solution(solution)
        plan = planned(profile, costs, solution, wanted, simulation.peak_bytes, simulation.advice)
        if not fits:
            text = errors.no_plan_fits(wanted, simulation.peak_bytes, self.plain.peak_bytes, simulation.advice)
            raise errors.BudgetError(text, simulation.peak_bytes, plan)
        return plan

    def curve(self, budget: int, most: int) -> list[Plan]:
        """Plans whose predicted peaks lie above a budget, from the one next to it to that without regions."""
        found = [solution for solution in frontier(self.costs) if solution.peak_bytes > budget]
        step = max(1, -(-len(found) // most))
        return [*(self._plan_of(solution) for solution in found[:-1:step]), Plan()]

    @cached_property
    def least(self) -> Checked:
        """The choice with the smallest peak, by its simulation."""
        best = self._without, self.plain, self.costs
        for found in self._checked(smallest):
            if found[1].peak_bytes >= best[1].peak_bytes:
                break
            best = found
        return best

    def _checked(self, solve: Callable[[Costs], Solution]) -> Iterator[Checked]:
        """Solutions, each from costs that were taken from the simulation before it; the last is exact or as before."""
        costs, known = self.costs, None
        for _ in range(ROUNDS):
            try:
                solution = solve(costs)
            except errors.BudgetError:
                return
            if solution.options == known:
                return
            known = solution.options
            simulation = self._simulated(self._plan_of(solution))
            exact = simulation.peak_bytes == solution.peak_bytes
            if not exact:
                costs = self._calibrated(simulation, known, costs.step_seconds)
            yield solution, simulation, costs
            if exact:
                return

    @cached_property
    def _without(self) -> Solution:
        """The choice without regions: costs that are taken too high may not see that it fits."""
        options = tuple(self._ways[kind].options[0] for kind in self._kinds)
        return Solution(options, self.plain.peak_bytes, 0.0, "no regions are needed")

    def simulated(self, options: Sequence[Option]) -> tuple[Simulation, Costs]:
        """The step with one option per segment, and the costs taken again from it."""
        simulation = self._simulated(self._plan_of(Solution(tuple(options), 0, 0.0)))
        return simulation, self._calibrated(simulation, options, self.costs.step_seconds)

    def price(self, op: Op) -> float:
        """Seconds of an operation."""
        return self._price(op)

    def stage_runner(self, stages: Sequence[tuple[int, int]], release: bool) -> StageRunner:
        """The model in stages, given the layers of each; see `StageRunner`."""
        args, kwargs = self._call
        return StageRunner(
            self._model,
            args,
            kwargs,
            loss=self._step["loss"] or loss_of,
            device=self.plain.device,
            rounding=self.plain.rounding,
            paths=self._paths,
            stages=stages,
            composed=self._composed,
            release=release,
        )

    def _clocked(self, chosen: Checked | None) -> tuple[Profile, Scale | None]:
        """The profile in seconds of whole steps: the one of a choice, or without one that with the smallest peak.

        With a choice the step without recomputation is not run, since its peak may be above what was asked for.
        """
        if not isinstance(self._price, Measured):
            return self._priced, None
        scale = self._scale(chosen)
        if isinstance(scale, str):
            return replace(self._priced, timing=f"{self._timing}, not scaled to a whole step: {scale}"), None
        return replace(self._priced, costs=scale(self.costs), timing=f"{self._timing}, {scale}"), scale

    def _scale(self, chosen: Checked | None) -> Scale | str:
        """The scale of prices by steps that are run here; or why none is, in words."""
        device, (args, kwargs) = self.plain.device, self._call
        why = obstacle(self._model, args, kwargs or {}, device)
        if why:
            return why
        try:
            held = (*self._model.buffers(), *(p.grad for p in self._model.parameters() if p.grad is not None))
            room = free_bytes(self._model, device) - sum(tensor.nbytes for tensor in held)
        except errors.ArgumentError as error:
            return str(error)
        solution, simulation, _ = chosen or self.least
        if simulation.peak_bytes > room:
            return "there is no memory for one"
        plan = self._plan_of(solution)
        run = partial(clock, self._model, args, kwargs or {}, self._step["loss"] or loss_of, device=device)
        alone = not plan.choices or (chosen is None and self.plain.peak_bytes <= room)
        try:
            times = self._loop.accumulate
            regions = run(plan).times(times) if plan.choices else None
            plain = run(Plan()).times(times) if alone else None
            return Scale.of(regions, plain, solution.seconds, self._optimizer_seconds)
        except Exception as error:  # whatever a model may raise: it is said in the plan
            return f"one raised {type(error).__name__}"

    def _plan_of(self, solution: Solution) -> Plan:
        return Plan(choices_of(self._priced, solution))

    def _simulated(self, plan: Plan, ran: Counter[tuple[str, Op]] | None = None) -> Simulation:
        """The step with a plan; adds what ran to a count, if there is one."""

        def count(phase: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            op = op_of(func, args, kwargs, out)
            if ran is not None and op is not None:
                ran[phase, op] += 1

        args, kwargs = self._call
        watch = None if ran is None else count
        stores = {"host": HostApart()} if any(choice.store for choice in plan) else {}
        return simulate_step(
            self._model, args, kwargs, prepare=lambda copy: apply(copy, plan, stores=stores), watch=watch, **self._step
        )

    def _tried(self, captured: CapturedCall) -> dict[str, Kind]:
        """The options of each kind of segment."""
        ways: dict[str, Kind] = {}
        several = {path for path, times in Counter(self._paths).items() if times > 1}
        guessed: dict[str, list[Guess]] = {}
        traces: dict[str, SegmentTrace] = {}
        firsts = {kind: i for i, kind in reversed(list(enumerate(self._kinds)))}
        for kind, first in firsts.items():
            path, call = self._paths[first], captured.calls[first]
            with captured.running():
                inputs = [x.detach().requires_grad_(x.requires_grad) for x in call.inputs]
                traces[kind] = trace(call.modules[0], lambda call=call, inputs=inputs: call.run(inputs), inputs)
            of = path if path in several else kind  # what is called several times has one choice for all its calls
            guessed.setdefault(of, []).extend(guesses(traces[kind], self._price, TRIED))
        for kind, first in firsts.items():
            path, call, found = self._paths[first], captured.calls[first], traces[kind]
            with captured.running():
                plain = attempt(call, [], captured.pretend)
                options = [_option((), plain, plain, self._price)]
                for regions in dict.fromkeys(guess.regions for guess in guessed[path if path in several else kind]):
                    choices = [self._alone(path, region) for region in regions]
                    try:
                        tried = attempt(call, choices, captured.pretend)
                    except errors.RecomputeError:  # such as keeping a call whose result the model changes in place
                        continue
                    options.append(_option(regions, tried, plain, self._price))
                graph = replace(found.graph(self._price), backward_bytes=plain.at_once_bytes)
                if self._link is not None:
                    forward = sum(node.seconds for node in graph.nodes)
                    options += self._offloaded(captured, path, call, undominated(options), plain, forward)
                options += self._grouped(captured, int(kind), plain, found.kinds)
            ways[kind] = Kind(tuple(options) if path in several else undominated(options), graph)
        return ways

    def _offloaded(
        self,
        captured: CapturedCall,
        path: str,
        call: SegmentCall,
        options: Sequence[Option],
        plain: Tried,
        forward: float,
    ) -> Iterator[Option]:
        """The options of one segment with the inputs of their regions in host memory."""
        assert self._link is not None
        step = sum(self._price(op) * count for op, count in plain.ops.items())
        for option in options[1:]:
            regions = tuple(replace(region, store="host") for region in option.regions)
            tried = attempt(call, [self._alone(path, region) for region in regions], captured.pretend)
            if tried.saved_bytes < option.saved_bytes:
                here = _option(regions, tried, plain, self._price)
                seconds = here.seconds + waited(tried.host_bytes, self._link, forward, step - forward + here.seconds)
                yield replace(here, seconds=seconds, host_bytes=tried.host_bytes)

    def _grouped(self, captured: CapturedCall, kind: int, plain: Tried, kinds: Sequence[str]) -> Iterator[Option]:
        """The options that take several segments of a kind at once."""
        for group in groups(captured, self._kinds.index(str(kind)), kinds):
            choice = replace(group.choice, carry=decides(group.paths, self._routers))
            try:
                tried = attempt(group.call, [choice], captured.pretend)
            except errors.RecomputeError:  # as above
                continue
            region = Choice(("",), choice.keep, nested=choice.nested)
            yield replace(_option((region,), tried, plain, self._price, group.span), span=group.span)

    def _alone(self, path: str, region: Choice) -> Choice:
        """A region in the segment at a path as it is in one that is tried alone."""
        carry = decides([joined(path, part) for part in region.paths], self._routers)
        return replace(region, paths=tuple(joined("0", part) for part in region.paths), carry=carry)

    def _calibrated(self, simulation: Simulation, options: Sequence[Option], step_seconds: float) -> Costs:
        known = getattr(self, "costs", None)
        costs = calibrate(simulation, self._paths, self._kinds, options, self._ways, step_seconds, known)
        return replace(costs, host=self._host)


def _option(
    regions: tuple[Choice, ...],
    tried: Tried,
    plain: Tried,
    price: Callable[[Op], float],
    times: int = 1,
) -> Option:
    seconds, flops = tried.extra(plain, price, times)
    return Option(regions, tried.saved_bytes, tried.forward_bytes, tried.backward_bytes, seconds, flops)


def undominated(options: Sequence[Option]) -> tuple[Option, ...]:
    """The options of which no other of as many segments is at least as good in everything; the first one stays."""

    def figures(option: Option) -> tuple[float, ...]:
        return option.saved_bytes, option.forward_bytes, option.backward_bytes, option.seconds

    kept = [options[0]]
    rest = sorted(options[1:], key=lambda option: (*figures(option)[::-1], simplicity(option)))
    for option in rest:
        rivals = [other for other in kept if other.span == option.span]
        if not any(all(a <= b for a, b in zip(figures(other), figures(option), strict=True)) for other in rivals):
            kept.append(option)
    return tuple(kept)
