"""`make_plan`, `profile`, `peaks` and `auto`: each reads its arguments into a `TrainingStep` and asks one function.

There are four kinds of plans, each a function of a step: one size of calls (`Planner.plan`), several sizes
(`planner/sizes.py`), the stages of a pipeline (`planner/pipeline.py`), and a step that `torch.compile` compiles
(`compiling/step.py`). `make_plan` chooses among them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any, cast, overload

import torch
import torch.distributed as dist
from torch import nn

from . import errors
from .errors.text import at_work
from .memory.batch import Batch, ExampleCall, call_of
from .memory.budget import Budget, Limit, as_budget, bytes_meant, enough, limit_too_small, no_plan_fits, read_budget
from .memory.loop import COMMON, Loop
from .memory.saved import generators_as_before
from .plan.apply import Applied, apply
from .plan.first_steps import FirstSteps, shapes_of
from .plan.libraries import all_layers
from .plan.plan import Plan
from .plan.ranks import Ranks
from .plan.sizes import parameters
from .planner.configurations import Configurations, ConfiguredSteps, configurations, peaks_of
from .planner.hosts import NO_OPTIONS, HostBandwidth, PlanOptions
from .planner.plan_file import PlanFile, made_for
from .planner.planner import Planner
from .planner.profile import Profile, with_planner
from .planner.sizes import Lengths, calls_of, plan_sizes
from .region import checked_pool
from .simulation.devices import GivenHost, Host, Roofline, read_host, typical
from .simulation.recording import LedgerMeter
from .simulation.step import simulate_step
from .simulation.training_step import (
    ALONE,
    Loss,
    MakeOptimizer,
    TrainingStep,
    bytes_per_element,
    new_bytes_per_element,
    optimizer_of,
    with_labels,
)
from .state import Ambient


def profile(
    model: nn.Module,
    args: Batch = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Loss = None,
    optimizer: MakeOptimizer = None,
    device: torch.device | str | Roofline | None = None,
    offload: bool | int | str = False,
    host_bandwidth: HostBandwidth = None,
    tiles: bool = False,
    hold_output: bool = True,
    accumulate: int = 1,
    set_to_none: bool = True,
    ranks: Ranks | None = None,
    host: GivenHost = "typical",
) -> Profile:
    """Returns what a training step costs, segment by segment and choice by choice: plans for any number of budgets.

        costs = profile(model, batch, loss=loss, optimizer="adamw")
        plans = [costs.solve(budget=budget) for budget in ("24GiB", "16GiB")]  # each as make_plan would make it

    It is data, which `to_json` saves. As long as it is not copied it also keeps its planner, with the model and the
    batch: `solve` then simulates each plan, which another budget alone costs.

    Where the model's weights are on the device, single operations are timed, and then the forward and the backward of a
    copy over the same weights, so that the seconds are those of whole steps: with the regions that need the least
    memory and, if there is room, without. Nothing is changed, and the optimizer's step is not run. `Profile.timing`
    says what was run, or why nothing was.

    Args:
        model: The model; on the meta device if it is too large for this machine.
        args: A batch, see `make_plan`.
        kwargs: More keyword arguments of the call.
        loss: From the model's output to a scalar; see `simulate`.
        optimizer: See `simulate`.
        device: Where the step is to run: a device of this machine, or by its data sheet "a100", "h100", "h200", "b200"
            or "rtx4090". By default where the model is.
        offload: Whether inputs of regions, and what layers save without being recomputed, may be kept in host memory:
            True for as much as there is, or the most bytes of it, as a number or text as "64GiB".
        host_bandwidth: Bytes per second into the device and out of it, as "55GB,50GB" or one for both; by default what
            the data sheet says of the device, or what is measured here.
        tiles: Whether the head with its loss, and MLPs, may be computed in tiles of tokens. Results are then those of
            the model up to the order of sums; the plan says where, and by how much in a small run.
        hold_output: Whether the loop holds the model's output through backward, see `simulate`, as the next two.
        accumulate: How many forwards and backwards come before the optimizer's step. Seconds are those of all.
        set_to_none: Whether gradients are gone when forward begins.
        ranks: The ranks that train together, see `make_plan`; the costs are those of one of them.
        host: What launches the operations of the device, where that is no CPU: "typical", "slow" (the slowest that was
            seen), or a file that `torch-recompute calibrate FILE` has written on the machine of the device.

    Raises:
        ArgumentError: See `simulate`, also on `loss`; or the model has no part that could be recomputed.
    """
    loop = Loop(hold_output, accumulate, set_to_none)
    step = TrainingStep.of("profile", model, args, kwargs, loss, optimizer, device, loop, host)
    step = replace(step, model=_of_one_rank("profile", model, ranks), ranks=ranks or ALONE)
    with at_work(f"profiling {type(model).__name__}"):
        planner = Planner(step, plan_options=PlanOptions.of(offload, host_bandwidth, tiles))
        return with_planner(planner.profile, partial(_plan_or_tell, planner))


def auto(
    model: nn.Module,
    batch: Batch = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: int | float | str = "fit",
    loss: Loss = None,
    optimizer: MakeOptimizer = None,
    cache: str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
    offload: bool | int | str = False,
    host_bandwidth: HostBandwidth = None,
    tiles: bool = False,
    hold_output: bool = True,
    accumulate: int = 1,
    set_to_none: bool = True,
    replan: bool = True,
    elastic: bool | Elastic = False,
    sizes: Sequence[int] | str = (),
    host: GivenHost = "typical",
) -> Applied:
    """Plans for a budget, applies the plan, prints one sentence, and returns the handle.

        handle = auto(model, batch, optimizer=optimizer)                   # what the device has free
        handle = auto(model, batch, budget="24GiB", cache="plan.json")     # planned once, then read
        handle = auto(model, batch, optimizer=optimizer, elastic=True)     # recompute only where memory is short
        print(handle.plan)
        handle.remove()

    It is `apply(model, make_plan(model, batch, ...))`, before a trainer, `torch.compile` or a wrapper for several
    devices takes the model. In a process group every rank has to call it: each plans for itself, and those whose models
    have the same parameters then use one plan, that with the lowest peak. The first rank prints.

    The first three steps are then compared with the planned one: gradients that are alive when a forward begins,
    autocast, larger batches, layers that the planned step left out (LayerDrop), another optimizer than was named, a
    graph that is retained, and on CUDA the allocator's peak. Where one of these makes the peak another, the plan is
    made again before the next step, or it is said once what to write. Then nothing of this is left in the model.

    Args:
        model: The model, without a plan in it.
        batch: See `make_plan`, as all that follows but `cache`.
        kwargs: More keyword arguments of the call.
        budget: The most bytes alive at any time of the step; by default what is free on the device now.
        loss: From the model's output to a scalar.
        optimizer: The optimizer of the step, by name, class or instance.
        cache: A file to keep the plan in. The plan in it is used again as long as the same are: parameters, modules
            with their plain attributes, the source of their classes and of the loss, shapes of the batch, optimizer,
            budget, loop, settings, torch, device and host. Else the model is planned again, and the sentence says what
            changed; with "fit" also where less is free than the plan takes. What that source calls is not looked at.
        device: Where the step is to run.
        offload: Whether host memory may be used, as for `profile`.
        host_bandwidth: How fast that is, as for `profile`.
        tiles: Whether parts may be computed in tiles of tokens, as for `profile`.
        hold_output: Whether the loop holds the model's output through backward.
        accumulate: How many forwards and backwards come before the optimizer's step.
        set_to_none: Whether gradients are gone when forward begins.
        replan: Whether to plan again by itself where the first steps are not the planned one; else it is said only.
            Weights, gradients, optimizer and generators stay as they are; in a process group all ranks do it together.
        elastic: Whether regions keep their activations while memory lasts: True, or an `Elastic`. The plan is then that
            with the least peak for this batch, which is to be the largest; it is what a step falls back on. The budget
            is the limit of an `Elastic` of its own; one that is given has its limit already. What each region takes is
            simulated for this batch and learned in the steps, of which the first recomputes all.
        sizes: Lengths of sequences, as for `make_plan`; the batch is cut, or repeated, to each.
            With `elastic`, the plan is for the longest, and what regions take is simulated for each.
        host: What launches the operations of a device that is no CPU, as for `profile`.

    Returns:
        The handle of `apply`; its `plan` is the plan that is in the model now, `history` all of them.

    Raises:
        BudgetError: No plan fits; with `elastic`, under the limit, together with all else that is alive.
        ArgumentError: See `make_plan` and `apply`; or `elastic` was given with `offload`, or an `Elastic` with a
            budget; or sizes are no lengths; or the file holds something else; or another rank found no plan.
    """
    loop, asked, sizes = Loop(hold_output, accumulate, set_to_none), read_budget(budget), _sizes("auto", sizes)
    memory, plan_options = _memory(elastic, asked, offload, sizes), PlanOptions.of(offload, host_bandwidth, tiles)
    step = TrainingStep.of("auto", model, batch, kwargs, loss, optimizer, device, loop, host)
    apply(model, Plan()).remove()  # refuses what could not be applied afterwards
    planning = _Planning(model, asked, step.loss, step.optimizer, device, plan_options, loop, memory, sizes, step.host)
    if memory is not None:
        budget = 0  # what the plan in the file is for
    file = None if cache is None else PlanFile(cache, made_for(step, budget, plan_options, sizes))
    plan = None if file is None else _still_fits(file, step, budget)
    found = planning.found(step, plan)
    if file is not None and found is not plan and planning.speaks:
        file.write(found)
    handle = apply(model, found, elastic=memory)
    if planning.speaks:
        sys.stdout.write("; ".join(filter(None, [handle.plan.summary, file and file.said])) + "\n")
    shapes = shapes_of(model, *planning.calls(step)[-1])
    handle.looking = FirstSteps(handle, planning, shapes, replan=replan)
    handle.looking.put()
    return handle


def _memory(
    elastic: bool | Elastic, budget: Budget, offload: bool | int | str, sizes: Sequence[int] | str
) -> Elastic | None:
    """The memory that elastic regions share under a budget; None where they are not elastic."""
    if _are_batches(sizes):
        raise errors.ArgumentError(
            f"auto(sizes=) takes lengths of sequences, but got {errors.say(sizes)}.\n"
            "  Write sizes=[512, 2048]; for batches apply(model, make_plan(model, budget=..., sizes=[short, long]))."
        )
    if elastic is False:
        return None
    if isinstance(sizes, str):
        raise errors.ArgumentError(
            f"auto was given elastic and sizes={sizes!r}, which looks for the lengths at which a plan needs more "
            "regions; elastic regions find that out in each step.\n"
            "  Write the lengths that come:  auto(..., elastic=True, sizes=[512, 2048])"
        )
    if offload is not False:
        raise errors.ArgumentError(
            "auto was given elastic and offload: what a plan offloads is moved in every step, even if memory lasts.\n"
            "  Leave offload out; Elastic(..., to=OnHost()) moves what is evicted, where that is faster than a replay."
        )
    if elastic is True:
        from .memory.elastic import Elastic

        return Elastic(budget.bytes or "fit")
    if budget.said != "fit":
        raise errors.ArgumentError(
            f"auto was given budget={budget.said} and an Elastic, which has a limit of its own.\n"
            "  Write one of them:  auto(..., elastic=memory)   or   auto(..., budget=..., elastic=True)"
        )
    checked_pool(elastic)
    return elastic


def plan_first_call(model: nn.Module, budget: int | float | str, *, loss: Loss, optimizer: Any, loop: Loop) -> Applied:
    """Returns a handle whose plan is made when the model is first called in training, for that call.

    For trainers, which have the batch, the optimizer and autocast later than the model; see `auto`.
    """
    with_labels("auto", model, (), None, loss)  # the batch is known later, and its labels are in the model's call
    handle = apply(model, Plan())
    handle.history = ()
    planning = _Planning(model, read_budget(budget), loss, optimizer_of("auto", optimizer, model), loop=loop)
    handle.looking = FirstSteps(handle, planning, None)
    handle.looking.put()
    return handle


@dataclass
class _Planning:
    """The arguments of `auto`, to plan again with the differences that the first steps have shown."""

    model: nn.Module
    budget: Budget
    loss: Loss
    optimizer: Any
    device: torch.device | str | None = None
    plan_options: PlanOptions = NO_OPTIONS
    loop: Loop = COMMON
    memory: Elastic | None = None
    sizes: Sequence[int] | str = ()
    host: Host = field(default_factory=typical)
    _rehearsed: list[Applied] = field(default_factory=list[Applied])
    _others: int | None = None  # bytes that were alive beside the step when it was first planned
    _shared: int = 0  # the limit that a share was last taken to mean

    def __call__(self, call: ExampleCall, *, draws: Sequence[tuple[Ambient, Any]] = (), **options: Any) -> Plan:
        """The plan for a call.

        Args:
            call: Its arguments.
            draws: Generators, with the states from which its forward calls the most layers.
            options: What else differs, in the words of `auto`.
        """
        self.optimizer = options.pop("optimizer", self.optimizer)
        self.loop = replace(self.loop, **options)
        if self.sizes and not isinstance(self.sizes, str):
            length = Lengths(parameters(self.model), *call).length
            self.sizes = [*self.sizes, length] if length > max(self.sizes) else self.sizes
        if not draws:
            how = self.loss, self.optimizer, self.device, self.loop
            return self.found(TrainingStep(self.model, *call, *how, host=self.host))
        with generators_as_before(), all_layers(self.model):
            for ambient, state in draws:
                ambient.restore(state)
            return self(call)

    def found(self, step: TrainingStep, plan: Plan | None = None) -> Plan:
        """The plan of a step, or one that is known, as all ranks use it."""
        try:
            with at_work(f"planning {type(step.model).__name__}"):
                found = self._elastic(step, plan, self.memory) if self.memory else plan or self._planned(step)
        except Exception as error:  # whatever it is: the other ranks wait for this one
            if _in_ranks():
                _one_plan(step.model, str(error) if isinstance(error, errors.RecomputeError) else repr(error))
            raise
        return _one_plan(step.model, found) if _in_ranks() else found

    def _planned(self, step: TrainingStep) -> Plan:
        return _plan_one_device(step, self.budget, self.sizes, False, self.plan_options)

    def _elastic(self, step: TrainingStep, plan: Plan | None, memory: Elastic) -> Plan:
        """The plan with the least peak for the largest call, of which calls of all sizes are simulated."""
        steps = [replace(step, args=args, kwargs=kwargs) for args, kwargs in self.calls(step)]
        plan = plan or _plan_or_tell(Planner(steps[-1]), Budget(share=0.0, said="0"))
        if plan.choices:
            self._rehearsed = [_rehearsed(one, plan) for one in steps]
        self._limit(steps[-1], plan, memory)
        return plan

    def calls(self, step: TrainingStep) -> Sequence[ExampleCall]:
        """The call of a step at each size."""
        return [step.call] if isinstance(self.sizes, str) or not self.sizes else calls_of(self.sizes, step)

    def keeps_less_than(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the planned optimizer has smaller states than one that has stepped."""
        planned, weight = self.optimizer, next((one for one in optimizer.state if optimizer.state[one]), None)
        if planned is optimizer or weight is None:
            return False
        if isinstance(planned, torch.optim.Optimizer):
            if planned.state.get(weight):  # a wrapper of the other
                return False
            planned = partial(type(planned), **planned.defaults)
        try:
            least = new_bytes_per_element(planned, weight.dtype)
            return least is not None and bytes_per_element(optimizer, weight) > least
        except Exception:  # whatever it does with the weights that it is given
            return False

    def on_plan_applied(self, handle: Applied) -> None:
        """Tells the regions of a plan that is in the model now what they took in simulated steps."""
        for simulated in self._rehearsed:
            handle._expect(simulated)  # pyright: ignore[reportPrivateUsage]
        self._rehearsed = []

    def _limit(self, step: TrainingStep, floor: Plan, memory: Elastic) -> None:
        """Refuses a limit of elastic regions that is below what the plan takes; sets one that was given as a share."""
        prediction = floor.prediction
        assert prediction is not None
        least, own = prediction.peak_bytes, prediction.plain_peak_bytes
        most = own - (prediction.switched.saved_bytes if prediction.switched else 0)
        as_share = self.budget.share is not None and memory.limit == self._shared
        asked = self.budget if as_share else read_budget(memory.limit or "fit")
        limit = bytes_meant(asked, lambda: least, most, step.free_bytes)
        if least > limit and asked.bytes is None:
            raise errors.BudgetError(no_plan_fits(limit.said, least, own, prediction.advice), least, floor)
        if asked.said == "fit":
            return
        from .memory.elastic import alive_beside, limit_above

        others = alive_beside(memory, step.held_bytes(), step.runs_on)
        if self._others is None:
            self._others = others
        if asked.share is not None:
            self._others = min(others, _with_more(self._others))
            memory.limit = self._shared = limit_above(memory, limit, self._others)
        elif limit_above(memory, least, self._others) > limit:
            raise self._limit_too_small(floor, memory, limit)

    def _limit_too_small(self, floor: Plan, memory: Elastic, limit: Limit) -> errors.BudgetError:
        """The error for a limit of elastic regions that the plan, with what is alive beside it, is above."""
        from .memory.elastic import limit_above

        prediction, others = floor.prediction, self._others or 0
        assert prediction is not None
        least = prediction.peak_bytes
        needed = limit_above(memory, least, _with_more(others))
        if self.budget.bytes is None:
            given, write = f"Elastic({as_budget(limit)!r})", f'Elastic("{enough(needed)}")'
        else:
            given, write = f"budget={self.budget.said}", f'budget="{enough(needed)}"'
        if others:
            text = limit_too_small(given, least, others, write)
        else:
            text = no_plan_fits(limit.said, least, prediction.plain_peak_bytes, prediction.advice)
        return errors.BudgetError(text, needed, floor)

    @property
    def speaks(self) -> bool:
        """Whether this rank prints."""
        return not _in_ranks() or dist.get_rank() == 0

    def together(self, mine: Sequence[str]) -> set[str]:
        """The words of all ranks."""
        return {word for words in (_of_all_ranks(list(mine)) if _in_ranks() else [mine]) for word in words}


def _with_more(others: int) -> int:
    """The bytes that may be alive beside a step when it runs: Python takes more than now until then."""
    return others + others // 16


def _rehearsed(step: TrainingStep, plan: Plan) -> Applied:
    """Returns the plan as it was in a simulated step in which its regions kept nothing, for the regions of a handle."""
    from .memory.elastic import Rehearsal

    memory, handles = Rehearsal(LedgerMeter()), list[Applied]()
    simulate_step(step, prepare=lambda model: handles.append(apply(model, plan, elastic=memory)))
    return handles[-1]


def _in_ranks() -> bool:
    return dist.is_available() and dist.is_initialized()


def _of_all_ranks(mine: Any) -> list[Any]:
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, mine)
    return held


def _still_fits(file: PlanFile, step: TrainingStep, budget: int | float | str) -> Plan | None:
    """The plan in a file, unless less memory is free than it takes."""
    if file.plan is not None and budget == "fit" and step.free_bytes() < (file.plan.predicted_peak_bytes or 0):
        file.said = "planned again: less memory is free"
        return None
    return file.plan


def _one_plan(model: nn.Module, mine: Plan | str) -> Plan:
    """Chooses the plan with the lowest peak of all ranks whose models have the same parameters.

    `mine` is this rank's plan, or its error message if it failed.

    Prices are measured and memory is free on each rank by itself, so ranks find different plans for one budget.
    """
    layers = [(name, tuple(weight.shape)) for name, weight in model.named_parameters()]
    held = _of_all_ranks((layers, mine if isinstance(mine, str) else mine.to_json(), isinstance(mine, str)))
    if isinstance(mine, str):
        return Plan()  # this rank raises its own error, and the others know of it
    rank, text = next(((rank, text) for rank, (_, text, is_error) in enumerate(held) if is_error), (0, ""))
    if text:
        raise errors.ArgumentError(
            f"auto found no plan on rank {rank}, so it gives none to the other ranks. There it said: {text}\n"
            "  Pass auto a budget that is enough on every rank; it is the memory of one rank, not of all."
        )
    plans = [Plan.from_json(text) for other, text, _ in held if other == layers]
    least = min(plans, key=lambda plan: plan.predicted_peak_bytes or 0)
    return mine if isinstance(mine, Plan) and least.to_json() == mine.to_json() else least


if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    from .memory.elastic import Elastic
    from .plan.stages import StagePlans, Stages
    from .planner.schedules import Schedule

    class _OptionsOfPlans(TypedDict, total=False):
        """Options that do not decide on the kind of plan; see `make_plan`."""

        loss: Loss
        optimizer: MakeOptimizer
        device: torch.device | str | Roofline | None
        sizes: Sequence[Batch | int] | str
        longest: bool | str
        offload: bool | int | str
        host_bandwidth: HostBandwidth
        tiles: bool
        hold_output: bool
        accumulate: int
        set_to_none: bool
        compiled: bool
        ranks: Ranks
        host: GivenHost


def peaks(
    model: nn.Module,
    args: Batch = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    recompute: Configurations = "none,full",
    loss: Loss = None,
    optimizer: MakeOptimizer = None,
    device: torch.device | str | Roofline | None = None,
    hold_output: bool = True,
    accumulate: int = 1,
    set_to_none: bool = True,
    offload: bool = False,
    host_bandwidth: HostBandwidth = None,
    tiles: bool = False,
    budget: int | str | None = None,
    longest: bool | str = False,
    host: GivenHost = "typical",
) -> ConfiguredSteps:
    """Returns the peak of a training step under configurations that are stated, and what it is made of.

        found = peaks(model, batch, recompute="none,full", optimizer="adamw-fused", device="h100")
        print(found)
        found.named("full").peak_bytes, found.named("full").made_of, found.named("full").step_seconds
        peaks(model, batch, recompute="full", budget="80GB", longest=True, device="h100").named("full").most

    No plan is searched for: the step is simulated once for each, see `simulate`, which also says what a peak counts.

    Args:
        model: The model; on the meta device if it is too large for this machine.
        args: A batch, see `make_plan`.
        kwargs: More keyword arguments of the call.
        recompute: The configurations: one text, in which commas separate them, but labels with only commas between
            are one; or a sequence of texts, plans, `RecomputeConfig`s and mappings of its fields. Words are "none",
            "full" (each layer), "full:2" (two layers as one region), "block:3" (the first three), "selective"
            (Megatron's: the label `core_attn`), labels, paths of modules, and files of plans or settings.
        loss: From the model's output to a scalar; see `simulate`, as what follows.
        optimizer: As in `simulate`.
        device: Where the step is to run, and what the seconds are of.
        hold_output: Whether the loop holds the model's output through backward.
        accumulate: How many forwards and backwards come before the optimizer's step.
        set_to_none: Whether gradients are gone when forward begins.
        offload: Whether the inputs of all regions are kept in host memory.
        host_bandwidth: Bytes per second of copies into the device and out of it, see `make_plan`.
        tiles: Whether the head with its loss, and the MLPs of layers that are recomputed, are computed in tiles of
            tokens: as many as make what is wide in them small beside the rest, see `make_plan`.
        budget: With `longest`: bytes, as a number or text as "80GB", or "fit".
        longest: Whether each configuration is that of the longest sequence that the budget holds, as the call is made
            longer or shorter; or "batch", of the largest batch. Its `most` is that length, or number of items.
        host: What launches the operations, as for `profile`.

    Raises:
        ArgumentError: A configuration is none, or matches nothing in the model; or see `simulate`.
        BudgetError: Not one token, or not one item, fits into the budget.
    """
    loop = Loop(hold_output, accumulate, set_to_none)
    step = TrainingStep.of("peaks", model, args, kwargs, loss, optimizer, device, loop, host)
    plans, plan_options = configurations("recompute", recompute, step), PlanOptions.of(offload, host_bandwidth, tiles)
    if (budget is None) == bool(longest):
        raise errors.ArgumentError(errors.goes_with(*(("longest=", "budget=") if longest else ("budget=", "longest="))))
    with at_work(f"simulating {type(model).__name__}"):
        if not longest:
            return peaks_of(step, plans, plan_options)
        from .planner.longest import Longest

        return ConfiguredSteps(Longest(step, budget, plan_options, _in_batches("peaks", longest)).stated(plans))


_Budget = int | float | str


@overload
def make_plan(
    model: nn.Module,
    args: Batch = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: _Budget,
    stages: None = None,
    **options: Unpack[_OptionsOfPlans],
) -> Plan: ...


@overload
def make_plan(
    model: nn.Module,
    args: Batch = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: _Budget | Sequence[_Budget],
    stages: Stages | Schedule,
    **options: Unpack[_OptionsOfPlans],
) -> StagePlans: ...


def make_plan(
    model: nn.Module,
    args: Batch = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: int | float | str | Sequence[int | float | str],
    loss: Loss = None,
    optimizer: MakeOptimizer = None,
    device: torch.device | str | Roofline | None = None,
    sizes: Sequence[Batch | int] | str = (),
    longest: bool | str = False,
    stages: Stages | Schedule | None = None,
    offload: bool | int | str = False,
    host_bandwidth: HostBandwidth = None,
    tiles: bool = False,
    hold_output: bool = True,
    accumulate: int = 1,
    set_to_none: bool = True,
    compiled: bool = False,
    ranks: Ranks | None = None,
    host: GivenHost = "typical",
) -> Plan | StagePlans:
    """Returns a plan for a budget of memory: what to keep, what to recompute, and what the step will take.

        plan = make_plan(model, batch, budget="24GiB", optimizer="adamw")
        plan = make_plan(model, batch, budget="24GiB", sizes=[512, 2048, 8192])  # batches of these lengths
        plan = make_plan(model, batch, budget="24GiB", sizes="all")  # of any length, up to that of the batch
        plan = make_plan(model, batch, budget="80GB", longest=True)  # of the longest sequence that the budget holds
        apply(model, plan)

    The plan that is returned has been simulated: its step fits into the budget. Where the model's weights are on the
    device, the forward and the backward of a copy over the same weights are then run with it, some four times, so that
    the predicted seconds are those of whole steps (`Prediction.timing`); the step without it is not run unless the plan
    has no region. With a device by name (`device="h100"`) nothing is run.

    Args:
        model: The model; on the meta device if it is too large for this machine.
        args: A batch, as the model is called with it: a tensor for `model(x)`, a tuple or a list for `model(x, y)`, a
            mapping (a dict, a `BatchEncoding`) for `model(**batch)`.
        kwargs: More keyword arguments of the call; with `sizes`, of every call.
        budget: The most bytes alive at any time of the step, parameters, gradients and optimizer included: a number,
            or text as "24GiB"; or a fraction, from 0 to below 1, of the way from the least feasible peak to that of the
            step without recomputation; or "fit": what is free on the device now, or what one by name has.
        loss: See `profile`, as the next two.
        optimizer: A name ("adamw", "sgd"), a class, a function from a list of parameters to an optimizer, or an
            optimizer of the model's parameters.
        device: Where the step is to run.
        sizes: Lengths of sequences, where the first tensor of the call that is given is tokens
            [batch, sequence] or embeddings [batch, sequence, width]; that call is cut, or repeated, to each of them.
            Or "all": the lengths at which a call begins to need more regions are found, so that every length up to that
            of the call pays for no more replays than its own bytes ask for, or nearly. Or batches, instead of `args`.
            The size of a call is the shape of its first tensor. Each is planned for the same budget, and a call of the
            model goes by the choices of the first that it exceeds in no dimension.
        longest: Whether to look for the longest sequence that the budget holds, as that call is made longer or
            shorter; or "batch" for the largest batch. The plan is of five sizes, the last of which is the most.
        stages: The pipeline that the model is split into: a `Stages`, or a schedule of
            `torch.distributed.pipelining`. Then the call is of one microbatch, each stage is planned for as many as
            the schedule holds there, `budget` is that of each rank, or a list with one per rank, and `optimizer` makes
            one of a list of parameters, and `offload` is of each rank. Not with `sizes` and the words of the loop.
        offload: See `profile`, as the next two and the three words of the loop.
        host_bandwidth: How fast host memory is reached.
        tiles: Whether parts may be computed in tiles of tokens. Not with `stages` and `compiled`.
        hold_output: Whether the loop holds the model's output through backward.
        accumulate: How many forwards and backwards come before the optimizer's step.
        set_to_none: Whether gradients are gone when forward begins.
        compiled: Whether the plan is for the model as `torch.compile` makes it, as one graph: what to save is then
            chosen of all operations of the graph, and the peak is counted in the code that inductor writes. Train with
            `compiling.compile(model, plan)`. Not with `stages`, `sizes`, `offload` and `tiles`.
        ranks: The ranks that train together (`Ranks`); the plan is that of each, `budget` is the memory of each, and
            `optimizer` makes one of a list of parameters. `model` is the whole model; the call is one that a rank
            makes. With `fsdp`, layers and what is left are sharded as by `fully_shard(layer)` and
            `fully_shard(model)`. Not with `stages`, `sizes` and `compiled`.
        host: What launches the operations of a device that is no CPU, as for `profile`. Not with `compiled`.

    Returns:
        The plan, with its prediction; with `stages`, the plans of all stages, the same on every rank if prices are
        those of a data sheet.

    Raises:
        BudgetError: No plan fits; it carries the least feasible budget and the plan that reaches it. With `sizes`,
            those of the size that does not fit.
        ArgumentError: See `profile`; or the budget is none; or the sizes do not rise, or `args` are given with
            examples, or it cannot be told where the sequence of a call is.
    """
    sizes, (args, kwargs, loss) = _sizes("make_plan", sizes), with_labels("make_plan", model, args, kwargs, loss)
    if isinstance(model, nn.Module) and _are_batches(sizes):
        call = cast("tuple[Any, ...]", args), dict(kwargs or {})
    else:
        call = call_of("make_plan", model, args, kwargs, a_module=True)
    loop = Loop(hold_output, accumulate, set_to_none)
    given = {"compiled": compiled, "stages": stages is not None, "sizes": bool(sizes or longest), "tiles": bool(tiles)}
    given |= {"host": host != "typical"}
    _refuse({**given, "offload": offload is not False, "loop": loop != COMMON, "ranks": ranks is not None})
    plan_options, launcher = PlanOptions.of(offload, host_bandwidth, tiles), read_host(host)
    update = optimizer_of("make_plan", optimizer, model)
    part = _of_one_rank("make_plan", model, ranks)
    step = TrainingStep(part, *call, loss, update, device, loop, ranks or ALONE, launcher)
    with at_work(f"planning {type(model).__name__}"):
        if stages is not None:
            from .planner.pipeline import plan_stages

            return plan_stages(step, stages, budget, plan_options)
        if compiled:
            return _plan_compiled(step, read_budget(budget))
        return _plan_one_device(step, read_budget(budget), sizes, longest, plan_options)


def _sizes(function: str, sizes: Any) -> Sequence[Any] | str:
    """Sizes as a list, whatever holds them; lengths as Python's numbers, also those of NumPy and of a tensor."""
    if sizes is None or isinstance(sizes, str):
        return sizes or ()
    if not isinstance(sizes, Iterable):
        raise errors.ArgumentError(f"{function}(sizes={sizes}) takes several lengths.\n  Write sizes=[{sizes}].")
    several: Any = sizes.tolist() if isinstance(sizes, torch.Tensor) and sizes.ndim == 1 else sizes
    return [int(one) if isinstance(one, Integral) and type(one) is not bool else one for one in several]


def _are_batches(sizes: Sequence[Any] | str) -> bool:
    return not isinstance(sizes, str) and not all(type(size) is int for size in sizes)


def _of_one_rank(function: str, model: nn.Module, ranks: Ranks | None) -> nn.Module:
    """The model that one of some ranks computes."""
    if ranks is not None and not isinstance(ranks, Ranks):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise errors.ArgumentError(
            f"{function}(ranks=) takes a description of the ranks, but got {errors.say(ranks)}\n"
            "  Write ranks=Ranks(fsdp=4), or tp=, ep=, cp= as the training has them."
        )
    if ranks is None:
        return model
    from .planner.tensor_parallel import of_one_rank

    return of_one_rank(model, ranks)


def _plan_compiled(step: TrainingStep, budget: Budget) -> Plan:
    """Plans a compiled step; this imports the compiler, which takes a second."""
    from .compiling.step import plan_compiled

    return plan_compiled(step, budget)


def _plan_one_device(
    step: TrainingStep,
    budget: Budget,
    sizes: Sequence[Batch | int] | str,
    longest: bool | str,
    plan_options: PlanOptions,
) -> Plan:
    """Plans calls of one size, of several, or of as many as a budget holds."""
    if longest:
        from .planner.longest import Longest

        return Longest(step, budget, plan_options, batch=_in_batches("make_plan", longest, sizes)).plan()
    if sizes:
        return plan_sizes(step, sizes, budget, plan_options)
    return _plan_or_tell(Planner(step, plan_options=plan_options), budget)


def _plan_or_tell(planner: Planner, budget: object) -> Plan:
    """The plan for a budget; where none fits, the error also says what holds the least peak and what would do."""
    with at_work(f"planning {type(planner.step.model).__name__}"):
        try:
            return planner.plan(budget)
        except errors.BudgetError as error:
            from .planner.alternatives import with_alternatives

            raise with_alternatives(planner, error) from None


def _in_batches(function: str, longest: object, sizes: object = ()) -> bool:
    """Whether the largest batch is looked for, and not the longest sequence."""
    if longest not in (True, "batch") or sizes:
        raise errors.ArgumentError(
            f"{function}(longest=...) is {errors.say(longest)}{' with sizes' if sizes else ''}; it looks for the most "
            "that a budget holds, and finds the sizes itself.\n"
            '  Write longest=True for the longest sequence, longest="batch" for the largest batch, and no sizes.'
        )
    return longest == "batch"


NOT_WITH = (
    (
        "compiled",
        {"stages", "sizes", "offload", "tiles"},
        "make_plan(compiled=True) plans one graph with everything on its device, and was given stages, sizes, "
        "offload or tiles as well.\n"
        "  Leave these out, or make the plan without compiled=True: its regions hold in compiled models, too.",
    ),
    (
        "compiled",
        {"host"},
        "make_plan was given compiled=True and a host; a compiled graph is launched by code of its own, whose time is "
        "not counted.\n"
        "  Leave host out.",
    ),
    (
        "ranks",
        {"stages", "sizes", "compiled"},
        "make_plan was given ranks and stages, sizes or compiled as well; a step that ranks share is planned for one "
        "size of calls that are not compiled.\n"
        "  Leave one of them out. For a pipeline of transformers' models on ranks that share more than layers, see "
        "torch-recompute plan --pp.",
    ),
    (
        "stages",
        {"sizes"},
        "make_plan was given stages and sizes; the microbatches of a pipeline are of one size.\n"
        "  Pass as args one microbatch of the largest size.",
    ),
    (
        "stages",
        {"tiles"},
        "make_plan was given stages and tiles; plans for the stages of a pipeline have no tiles of tokens.\n"
        "  Leave tiles out, or write recompute(head_and_loss, tiles=8) in the last stage.",
    ),
    (
        "stages",
        {"loop"},
        "hold_output=, accumulate= and set_to_none= describe a loop over one model, and a pipeline's schedule says "
        "itself what a rank holds.\n"
        "  Leave them out with stages=; microbatches are those of the schedule.",
    ),
)
"""Options of `make_plan` that exclude others, and the text for them."""


def _refuse(given: Mapping[str, bool]) -> None:
    """Refuses options that exclude one another."""
    for option, others, text in NOT_WITH:
        if given[option] and any(given[other] for other in others):
            raise errors.ArgumentError(text)
