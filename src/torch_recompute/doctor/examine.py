"""The doctor: why a model is still out of memory, slow, or wrong, although something is recomputed.

Recomputation that does not help fails in silence: a label matched a module that saves nothing; a fused attention's
result is held by the next layer; a checkpoint of another library updates a counter twice. So `examine` gathers
evidence, once, for all checks (`checks.py`). A step is simulated, with the plan and without: exact bytes and FLOPs by
region. Where the model has weights, one step is also run and observed, and each region is audited. `watch`
reads what a training that runs anyway shows. Everything is counted, compared or run; rules over names and versions
("you use flash attention, so ...") are right until the next release.

`examine` leaves the model, its gradients, buffers and all generators as they were; `watch` changes no step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .. import _torch, errors
from .._text import at_work
from .._torch.checkpoints import checkpoints_run_by
from ..memory.batch import Batch
from ..memory.loop import COMMON, Loop
from ..plan.apply import apply, not_applicable
from ..plan.exhausted import planned_models
from ..plan.plan import Plan
from ..training_step import Loss, MakeOptimizer, TrainingStep, loss_of
from ..values import name_of
from .audit import audit
from .checks import CHECKS, Evidence, Report, look_for
from .compare import Difference, ModelCall, Noise, StepResult, differences
from .simulated import SimulatedSteps, as_region, without_recomputation
from .step_watcher import CLOSELY, Compiled, Observations, Raised, StepWatcher

if TYPE_CHECKING:
    from typing_extensions import Self


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
    """Looks for what keeps recomputation from helping: why it is still out of memory, slow, or wrong.

        report = doctor.examine(model, batch, plan=plan, budget="24GiB", optimizer="adamw")
        print(report)
        assert report, report

    A step is simulated, with the plan and without. If the model has weights and the batch values, one step is also run
    (forward, loss, backward, no optimizer) and each region is run twice by `audit`; gradients, buffers and generators
    are put back, and so is a plan that was not in the model.

    Args:
        model: The model. Regions in its own code, and a plan that is in it already, are looked at as well.
        args: A batch, see `make_plan`.
        kwargs: More keyword arguments of the call.
        plan: The plan that is to be looked at, for a model that has none in it.
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
    running = not on_meta and run is not False
    with at_work(f"examining {type(model).__name__}"):
        parallel = plan is None and isinstance(model, DistributedDataParallel)
        if parallel:  # its steps would wait for other ranks
            step = replace(step, model=cast("nn.Module", model.module))
        since, steps = Compiled(), SimulatedSteps(step, plan)
        missing: dict[str, str] = {}
        simulated: SimulatedSteps | None = None
        try:
            steps.run()
            simulated = steps
        except Exception as error:  # of a model that the copy is not like: DDP's hooks, weights that come and go
            if not running:
                raise
            missing["simulated"] = f"the step cannot be simulated ({_first_line(error)})"
        observed = audited = None
        if running:
            missing["audited"] = "the model calls no region"
            with contextlib.ExitStack() as stack:
                if plan is not None:
                    stack.callback(apply(step.model, plan).remove)
                try:
                    observed = _observe(ModelCall(step.model, *step.call), step.model, loss or _loss_of, since)
                    observed.parallel |= parallel
                    if simulated is None or simulated.accounts or observed.checkpoints:
                        with checkpoints_run_by(as_region):
                            audited = audit(step.model, *step.call)
                except torch.OutOfMemoryError as error:
                    missing["observed"] = missing["audited"] = f"memory ran out in the step ({_first_line(error)})"
                except Exception as error:
                    if observed is None:
                        raise
                    missing["audited"] = f"the audit says: {_first_line(error)}"
        else:
            missing["observed"] = "no step was run" + (" (the model is on meta)" if on_meta else " (run=False)")
            missing["audited"] = missing["observed"]
        limit = None if budget is None else steps.bytes_meant(budget, simulated=simulated is not None)
        return look_for(CHECKS, Evidence(type(step.model).__name__, plan, limit, simulated, observed, audited, missing))


def _loss_of(output: Any) -> torch.Tensor:
    """The loss of an output, also where it needs no gradient, because a reentrant checkpoint has cut it off."""
    try:
        return loss_of(output)
    except errors.ArgumentError:
        with torch.no_grad(), contextlib.suppress(errors.ArgumentError):
            return loss_of(output)
        raise


def _observe(call: ModelCall, model: nn.Module, loss: Callable[[Any], torch.Tensor], since: Compiled) -> Observations:
    """One real step; a second one without recomputation where the first may be wrong, and what differs between them.

    Raises:
        Exception: The step without recomputation raises as well, so this is the model's own.
    """
    watcher = StepWatcher(model, since=since)
    checkpoints: list[str] = []

    def noting(original: Callable[..., Any], function: Any = None, *args: Any, **kwargs: Any) -> Any:
        checkpoints.append(name_of(function))
        return original(function, *args, **kwargs)

    def step() -> StepResult:
        call.go_back()
        return call.step(loss, needs_grad=False)  # a loss that needs no gradient trains nothing: a finding

    left = raised = None
    try:
        try:
            with checkpoints_run_by(noting):
                left = step()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raised = Raised.by(error, model)
        observed = watcher.end()
        observed.checkpoints, observed.raised = len(checkpoints), raised
        if left is not None and not checkpoints and not observed.untrained:
            return observed
        try:
            with without_recomputation(regions="*" if left is None else ""):
                plain = step()
                noise = Noise(plain, step())
        except torch.OutOfMemoryError:  # for which there is recomputation
            return observed
        given = plain.tensors["gradients"]
        observed.trained_plainly = frozenset(name.removeprefix("the gradient of ") for name in given)
        observed.differ = () if left is None else _gradients(plain, left, noise)
        if checkpoints and (left is None or observed.differ):
            try:
                with checkpoints_run_by(as_region):
                    observed.right_with_regions = not _gradients(plain, step(), noise)
            except Exception as error:
                observed.raised = Raised.by(error, model)
        return observed
    finally:
        watcher.end()
        call.go_back()


def _gradients(plain: StepResult, other: StepResult, noise: Noise) -> tuple[Difference, ...]:
    return tuple(found for found in differences(plain, other, noise) if found.kind == "gradients")


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]


class Watching:
    """A model that is being watched; made by `watch`. Also a context manager, which removes it at the end."""

    def __init__(self, model: nn.Module, closely: int) -> None:
        self._model = model
        self._watcher = StepWatcher(model, closely)

    def report(self) -> Report:
        """What the steps so far have shown. The watching goes on."""
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
        """Takes every hook away; `report` goes on to work. Calling it again does nothing."""
        self._watcher.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def watch(model: nn.Module, *, closely: int = CLOSELY) -> Watching:
    """Watches the steps of a model that is being trained.

        with doctor.watch(model) as watching:
            for batch in batches:
                train(batch)
        print(watching.report())

    The first steps are looked at closely: a hook on each module and parameter, and a copy of the buffers. After those
    the time is taken, and the bytes alive are compared, by the CUDA allocator or, on Linux, by this process's heap, and
    how many outputs and graphs outlive their step; where these grow it is looked closely again. The report says which
    was compared. Bytes by region need a simulation; `examine` does that.

    Args:
        model: The model as the training calls it, with its wrappers.
        closely: How many steps to look at closely.

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
