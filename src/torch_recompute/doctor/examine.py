"""The doctor: finds out why a model is still out of memory, slow, or wrong, although something is recomputed.

Recomputation that does not help fails in silence: a label matched a module that saves nothing; a fused attention's
result is held by the next layer; a checkpoint of another library updates a counter twice. So `examine` gathers
evidence, once, for all checks (`checks.py`). A step is simulated, with the plan and without: exact bytes and FLOPs by
region. Where the model has weights, one step is also run and observed, and each region is audited. `watch` observes the
steps of a training that runs anyway. Everything is counted, compared or run; rules over names and versions ("you use
flash attention, so ...") are right until the next release.

`examine` leaves the model, its gradients, buffers and all generators as they were; `watch` changes no step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .. import _torch, errors
from .._torch.checkpoints import checkpoints_run_by
from ..errors.text import at_work
from ..memory.batch import Batch
from ..memory.loop import COMMON, Loop
from ..plan.apply import apply, not_applicable
from ..plan.exhausted import planned_models
from ..plan.plan import Plan
from ..simulation.training_step import Loss, MakeOptimizer, TrainingStep, loss_of
from ..state.values import name_of
from .audit import Audit, audit
from .checks import CHECKS, Evidence, Report, look_for
from .compare import Difference, ModelCall, Noise, StepResult, differences
from .simulated import SimulatedSteps, as_region, without_recomputation
from .step_watcher import CLOSELY, Compiled, Observations, Raised, StepWatcher


def examine(
    model: nn.Module,
    args: Batch = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    plan: Plan | None = None,
    budget: int | float | str | None = None,
    loss: Loss = None,
    optimizer: MakeOptimizer = None,
    device: torch.device | str | None = None,
    run: bool | None = None,
    hold_output: bool = True,
    accumulate: int = 1,
    set_to_none: bool = True,
) -> Report:
    """Finds what keeps recomputation from helping: why a model is still out of memory, slow, or wrong.

        report = doctor.examine(model, batch, plan=plan, budget="24GiB", optimizer="adamw")
        print(report)
        assert report, report

    A step is simulated, with the plan and without. If the model has weights and the batch values, one step is also run
    (forward, loss, backward, no optimizer) and each region is run twice by `audit`; gradients, buffers and generators
    are put back, and so is a plan that was not in the model.

    Args:
        model: The model. Regions in its own code, and a plan that is in it already, are examined as well.
        args: A batch, see `make_plan`.
        kwargs: More keyword arguments of the call.
        plan: The plan to examine, for a model that has none in it.
        budget: The most bytes alive at any time of the step; see `make_plan`.
        loss: From the model's output to a scalar; see `simulate`.
        optimizer: See `simulate`.
        device: What seconds are of, and where the simulated step is to run; see `profile`.
        run: Whether to run steps: by default where nothing of the model and the batch is on meta.
        hold_output: Whether the loop holds the model's output through backward, see `simulate`, as the next two. Where
            nothing else is said, the loop is that of the plan.
        accumulate: How many forwards and backwards come before the optimizer's step.
        set_to_none: Whether gradients are gone when forward begins.

    Returns:
        The findings. True if there are none.

    Raises:
        ArgumentError: An argument is not of its kind; the plan does not fit the model; `run=True` for a model on meta.
    """
    if plan is not None and not isinstance(plan, Plan):
        raise errors.ArgumentError(not_applicable(model, plan))
    loop = Loop(hold_output, accumulate, set_to_none)
    if loop == COMMON and plan is not None:
        loop = plan.loop
    step = TrainingStep.of("doctor.examine", model, args, kwargs, loss, optimizer, device, loop)
    on_meta = any(t.is_meta for t in [*model.parameters(), *model.buffers(), *_torch.tensors_in(step.call)])
    if run and on_meta:
        raise errors.ArgumentError(
            f"run=True, but a part of {type(model).__name__} or of its batch is on the meta device, where "
            "nothing can be run.\n"
            "  Leave run out: then a step is simulated, and the report says what was not looked for."
        )
    reason = "the model is on meta" if on_meta else "run=False"
    not_run = f"no step was run ({reason})" if on_meta or run is False else ""
    with at_work(f"examining {type(model).__name__}"):
        return look_for(CHECKS, _evidence(step, plan, budget, not_run))


def _evidence(step: TrainingStep, plan: Plan | None, budget: int | float | str | None, not_run: str) -> Evidence:
    """Gathers the evidence for all checks; `not_run` is the reason not to run the model, if there is one."""
    parallel = isinstance(step.model, DistributedDataParallel)
    if parallel:  # its steps would wait for other ranks
        step = replace(step, model=cast("nn.Module", step.model.module))
    since, steps = Compiled(), SimulatedSteps(step, plan)
    simulated, observed, audited = steps, None, None
    missing = {"observed": not_run, "audited": not_run}
    try:
        steps.run()
    except Exception as error:  # of a model that the copy is not like: DDP's hooks, weights that come and go
        if not_run:
            raise
        simulated = None
        missing["simulated"] = f"the step cannot be simulated ({_first_line(error)})"
    if not not_run:
        with contextlib.ExitStack() as applied:
            if plan is not None:
                applied.callback(apply(step.model, plan).remove)
            observed, audited = _run(step, simulated, since, missing)
    if observed is not None:
        observed.parallel |= parallel
    limit = None if budget is None else steps.bytes_meant(budget, simulated=simulated is not None)
    return Evidence(type(step.model).__name__, plan, limit, simulated, observed, audited, missing)


def _run(
    step: TrainingStep, simulated: SimulatedSteps | None, since: Compiled, missing: dict[str, str]
) -> tuple[Observations | None, Audit | None]:
    """Observes a real step and audits its regions; where one of the two cannot be had, `missing` gets the reason."""
    observed = audited = None
    missing["audited"] = "the model calls no region"
    try:
        observed = _observe(ModelCall(step.model, *step.call), step.model, step.loss or _loss_of, since)
        if simulated is None or simulated.accounts or observed.checkpoints:
            with checkpoints_run_by(as_region):
                audited = audit(step.model, *step.call)
    except torch.OutOfMemoryError as error:
        missing["observed"] = missing["audited"] = f"memory ran out in the step ({_first_line(error)})"
    except Exception as error:
        if observed is None:
            raise
        missing["audited"] = f"the audit says: {_first_line(error)}"
    return observed, audited


def _loss_of(output: Any) -> torch.Tensor:
    """Returns the loss of an output, also where it needs no gradient, because a reentrant checkpoint has cut it off."""
    try:
        return loss_of(output)
    except errors.ArgumentError:
        with torch.no_grad(), contextlib.suppress(errors.ArgumentError):
            return loss_of(output)
        raise


def _observe(call: ModelCall, model: nn.Module, loss: Callable[[Any], torch.Tensor], since: Compiled) -> Observations:
    """Observes one real step, and compares it with one without recomputation where it may be wrong.

    Raises:
        Exception: The step without recomputation raises as well, so this is the model's own.
    """
    with contextlib.suppress(Exception):  # which the step below raises as well
        call.keep_weights(loss)
    watcher = StepWatcher(model, since=since)
    checkpoints: list[str] = []

    def counting(original: Callable[..., Any], function: Any = None, *args: Any, **kwargs: Any) -> Any:
        checkpoints.append(name_of(function))
        return original(function, *args, **kwargs)

    def step() -> StepResult:
        call.go_back()
        return call.step(loss, needs_grad=False)  # a loss that needs no gradient trains nothing: a finding

    result = raised = None
    try:
        try:
            with checkpoints_run_by(counting):
                result = call.step(loss, needs_grad=False)  # `go_back` would remove the watcher's hooks
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raised = Raised.by(error, model)
        observed = watcher.end()
        observed.checkpoints, observed.raised = len(checkpoints), raised
        if result is None or checkpoints or observed.untrained:
            _compare_without_recomputation(observed, result, step, model)
        return observed
    finally:
        watcher.end()
        call.go_back()


def _compare_without_recomputation(
    observed: Observations, result: StepResult | None, step: Callable[[], StepResult], model: nn.Module
) -> None:
    """Compares the gradients of a step, None if it raised, with those without recomputation and with those of regions.

    Where memory runs out without recomputation there is nothing to compare with.
    """
    try:
        with without_recomputation(regions="*" if result is None else ""):
            plain = step()
            noise = Noise(plain, step())
    except torch.OutOfMemoryError:
        return
    trained = plain.tensors["gradients"]
    observed.trained_plainly = frozenset(name.removeprefix("the gradient of ") for name in trained)
    observed.differ = () if result is None else _gradients(plain, result, noise)
    if observed.checkpoints and (result is None or observed.differ):
        try:
            with checkpoints_run_by(as_region):
                observed.right_with_regions = not _gradients(plain, step(), noise)
        except Exception as error:
            observed.raised = Raised.by(error, model)


def _gradients(plain: StepResult, other: StepResult, noise: Noise) -> tuple[Difference, ...]:
    return tuple(found for found in differences(plain, other, noise) if found.kind == "gradients")


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]


class Watching(contextlib.AbstractContextManager["Watching"]):
    """A model that is being watched; made by `watch`. Also a context manager, which removes it at the end."""

    def __init__(self, model: nn.Module, closely: int) -> None:
        self._model = model
        self._watcher = StepWatcher(model, closely)

    def report(self) -> Report:
        """Returns the findings in the steps so far. Watching goes on."""
        name, observed = type(self._model).__name__, self._watcher.observations
        if not observed.steps:
            raise errors.ArgumentError(
                f"doctor.watch has seen no step of {name} yet: it was not called with gradients since.\n"
                "  Ask for the report after a step: loss(model(batch)).backward(); watching.report(). Watch the model "
                "that the training calls, with its wrappers; a compiled one as torch.compile(model) returns it, for "
                "model.compile() calls no hook."
            )
        why = "doctor.examine(model, batch) looks for it"
        plan = planned_models.get(self._model)
        return look_for(CHECKS, Evidence(name, plan, observed=observed, missing={"simulated": why, "audited": why}))

    def remove(self) -> None:
        """Removes every hook; `report` can still be called. Calling it again does nothing."""
        self._watcher.end()

    def __exit__(self, *exception: object) -> None:
        self.remove()


def watch(model: nn.Module, *, closely: int = CLOSELY) -> Watching:
    """Watches the steps of a model that is being trained.

        with doctor.watch(model) as watching:
            for batch in batches:
                train(batch)
        print(watching.report())

    The first steps are watched closely: a hook on each module and parameter, and a copy of the buffers. After those
    only the time is taken, and two figures are compared with the first steps: the bytes alive, by the CUDA allocator
    or, on Linux, by this process's heap, and the number of outputs and graphs that outlive their step. Where one grows,
    steps are watched closely again. The report says which was compared. Bytes by region need a simulation; `examine`
    does that.

    Args:
        model: The model as the training calls it, with its wrappers.
        closely: How many steps to watch closely.

    Returns:
        A handle: `.report()` at any time, `.remove()` at the end.

    Raises:
        ArgumentError: `model` is no module, or `closely` no number of at least 1.
    """
    if not isinstance(model, nn.Module):
        raise errors.ArgumentError(
            "doctor.watch(model) needs a torch.nn.Module, whose steps it can see by hooks, but got "
            f"{errors.say(model)}\n"
            "  Pass the model that the training calls, with its wrappers."
        )
    if type(closely) is not int or closely < 1:
        raise errors.ArgumentError(
            f"closely={closely!r} is not a number of steps.\n"
            "  Write a whole number of at least 1, or leave it out: three steps are enough."
        )
    return Watching(model, closely)
