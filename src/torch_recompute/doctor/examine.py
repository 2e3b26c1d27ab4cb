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
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch import nn

from .. import _torch, errors
from .._text import at_work
from ..arguments import Batch, call_of
from ..memory.loop import COMMON, Loop
from ..plan.apply import apply
from ..plan.exhausted import planned_models
from ..plan.plan import Plan
from ..planner.planner import Loss, MakeOptimizer
from ..simulation.step import loss_of, optimizer_of
from .audit import audit
from .checks import CHECKS, Evidence, Report, look_for
from .evidence import ModelCall
from .observed import CLOSELY, Observations, StepWatcher
from .simulated import SimulatedSteps

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
    args, kwargs = call_of("doctor.examine", model, args, kwargs, a_module=True)
    optimizer = optimizer_of("doctor.examine", optimizer, model)
    if plan is not None and not isinstance(plan, Plan):
        raise errors.ArgumentError(errors.not_applicable(model, plan))
    loop = Loop(hold_output, accumulate, set_to_none)
    if loop == COMMON and plan is not None:
        loop = plan.loop
    on_meta = any(t.is_meta for t in [*model.parameters(), *model.buffers(), *_torch.tensors_in((args, kwargs))])
    if run and on_meta:
        raise errors.ArgumentError(
            f"run=True, but a part of {type(model).__name__} or of its batch is on the meta device, where "
            "nothing can be run.\n"
            "  Leave run out: then a step is simulated, and the report says what was not looked for."
        )
    running = not on_meta and run is not False
    with at_work(f"examining {type(model).__name__}"):
        call = model, args, kwargs
        steps = SimulatedSteps(*call, plan=plan, loop=loop, loss=loss, optimizer=optimizer, device=device)
        missing: dict[str, str] = {}
        simulated: SimulatedSteps | None = None
        try:
            steps.run()
            simulated = steps
        except errors.RecomputeError as error:
            if not running:
                raise
            missing["simulated"] = f"the step cannot be simulated ({str(error).splitlines()[0]})"
        observed = audited = None
        if running:
            with contextlib.ExitStack() as stack:
                if plan is not None:
                    stack.callback(apply(model, plan).remove)
                observed = _observe(ModelCall(*call), model, loss or loss_of)
                missing["audited"] = "the model calls no region"
                if simulated is None or simulated.accounts:
                    try:
                        audited = audit(*call)
                    except errors.ArgumentError as error:
                        missing["audited"] = f"the audit says: {str(error).splitlines()[0]}"
        else:
            missing["observed"] = "no step was run" + (" (the model is on meta)" if on_meta else " (run=False)")
            missing["audited"] = missing["observed"]
        limit = None if budget is None else steps.bytes_meant(budget, simulated=simulated is not None)
        return look_for(CHECKS, Evidence(type(model).__name__, plan, limit, simulated, observed, audited, missing))


def _observe(call: ModelCall, model: nn.Module, loss: Callable[[Any], torch.Tensor]) -> Observations:
    """One real step; where parameters got no gradient, a second one with plain calls for torch's checkpoints."""
    watcher = StepWatcher(model)
    try:
        call.step(loss, needs_grad=False)  # a loss that needs none trains nothing: a finding and no failure
        observed = watcher.end()
        if observed.untrained:
            call.go_back()
            with _plain_checkpoints():
                again = call.step(loss, needs_grad=False).tensors["gradients"]
            observed.trained_plainly = frozenset(name.removeprefix("the gradient of ") for name in again)
        return observed
    finally:
        watcher.end()
        call.go_back()


@contextlib.contextmanager
def _plain_checkpoints() -> Generator[None]:
    """Torch's reentrant checkpoints are plain calls for the time being."""

    class Plain:
        @staticmethod
        def apply(function: Callable[..., Any], _preserve_rng_state: bool, *args: Any) -> Any:
            return function(*args)

    there: Any = torch.utils.checkpoint
    before = there.CheckpointFunction
    there.CheckpointFunction = Plain
    try:
        yield
    finally:
        there.CheckpointFunction = before


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
    one hook takes the time, and the allocator and the compiler count by themselves. Bytes by region need a simulation;
    `examine` does that.

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
