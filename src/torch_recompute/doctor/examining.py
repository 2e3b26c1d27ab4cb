"""`examine`: everything that can be known of one model, one batch, a plan and a budget.

Two sorts of evidence. A step is simulated, with the plan and without: exact bytes and FLOPs, of a model of any size.
And where the model has weights, one step is run, observed, and each region run twice by an audit: gradients, buffers,
graph nodes, waits. Neither can stand for the other: a simulation knows no values, a run on a small batch no peak.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from .. import errors
from .._loop import COMMON, Loop
from .._observer import observing
from .._reach import Reach
from .._tree import check_call
from ..auditing import Audit, audit
from ..memory.free import free_bytes
from ..memory.saved import as_before, attributes_as_before
from ..plan.apply import apply
from ..plan.plan import Plan
from ..plan.planned import bytes_of
from ..planning.hosts import stores_for
from ..planning.planner import Loss, MakeOptimizer, Planner
from ..planning.prices import where
from ..simulation import Simulation, simulate_step
from ..simulation.step import loss_of
from .check import Check, Evidence, Simulated
from .checks import CHECKS
from .finding import Finding, Report
from .observing import Observer, Seen
from .regions import Accounts

_WHAT = "doctor.examine"


def examine(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
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

        report = doctor.examine(model, (batch,), plan=plan, budget="24GiB", optimizer=torch.optim.AdamW)
        print(report)
        assert report, report

    A step is simulated, with the plan and without. If the model has weights and the batch values, one step is also run
    (forward, loss, backward, no optimizer) and each region is run twice by `audit`; gradients, buffers and generators
    are put back, and so is a plan that was not in the model.

    Args:
        model: The model. Regions in its own code, and a plan that is in it already, are looked at as well.
        args: The positional arguments of one call.
        kwargs: Its keyword arguments.
        plan: The plan that is to be looked at, for a model that has none in it.
        budget: The most bytes alive at any time of the step; see `make_plan`.
        loss: From the model's output to a scalar; see `simulate`.
        optimizer: From a list of parameters to an optimizer, or an optimizer of the model's parameters.
        device: What seconds are of, and where the simulated step is to run; see `profile`.
        run: Whether to run steps: by default where nothing of the model and the batch lies on meta.
        hold_output: Whether the loop holds the model's output through backward, see `simulate`, as the next two. Where
            nothing else is said, the loop is that of the plan.
        accumulate: How many forwards and backwards come before the optimizer's step.
        set_to_none: Whether gradients are gone when forward begins.

    Returns:
        The findings. True if there are none.

    Raises:
        ArgumentError: An argument is not of its kind; the plan does not fit the model; `run=True` for a model on meta.
    """
    check_call(_WHAT, model, args, kwargs, a_module=True)
    if plan is not None and not isinstance(plan, Plan):
        raise errors.ArgumentError(errors.not_applicable(model, plan))
    loop = Loop(hold_output, accumulate, set_to_none)
    if loop == COMMON and plan is not None:
        loop = plan.loop
    return _Examination(model, args, kwargs or {}, plan, loss, optimizer, device, loop).report(budget, run)


def looked_at(checks: tuple[Check, ...], evidence: Evidence) -> Report:
    """What some checks find in some evidence."""
    findings: list[Finding] = []
    looked: list[str] = []
    missing: list[tuple[str, str]] = []
    for check in checks:
        why = check.why_not(evidence)
        if why:
            missing.append((check.kind, why))
        else:
            looked.append(check.kind)
            findings += check.look(evidence)
    return Report(evidence.name, tuple(findings), tuple(looked), tuple(missing))


class _Examination:
    """One model, one batch."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        plan: Plan | None,
        loss: Loss,
        optimizer: MakeOptimizer,
        device: torch.device | str | None,
        loop: Loop,
    ) -> None:
        self._model, self._args, self._kwargs, self._plan, self._loop = model, args, kwargs, plan, loop
        self._loss: Callable[[Any], torch.Tensor] = loss or loss_of
        self._optimizer = optimizer
        self._device = device
        self._known: Planner | None = None
        self._missing: dict[str, str] = {}

    def report(self, budget: int | float | str | None, run: bool | None) -> Report:
        """Gathers the evidence and asks every check."""
        on_meta = any(t.is_meta for t in self._tensors())
        if run and on_meta:
            raise errors.ArgumentError(
                f"run=True, but a part of {type(self._model).__name__} or of its batch lies on the meta device, where "
                "nothing can be run.\n"
                "  Leave run out: then a step is simulated, and the report says what was not looked for."
            )
        running = not on_meta and run is not False
        simulated = self._simulated(required=not running)
        seen, audited = self._run(simulated) if running else (None, None)
        if not running:
            self._missing["seen"] = "no step was run" + (" (the model is on meta)" if on_meta else " (run=False)")
            self._missing["audit"] = self._missing["seen"]
        evidence = Evidence(
            type(self._model).__name__,
            self._plan,
            None if budget is None else self._bytes(budget, simulated),
            simulated,
            audited,
            seen,
            self._best,
            self._missing,
        )
        return looked_at(CHECKS, evidence)

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from self._model.parameters()
        yield from self._model.buffers()
        for value in (*self._args, *self._kwargs.values()):
            if isinstance(value, torch.Tensor):
                yield value

    # --- simulated ------------------------------------------------------------------------------------------------

    def _simulated(self, *, required: bool) -> Simulated | None:
        accounts = Accounts()

        def closing(output: Any) -> torch.Tensor:
            value = self._loss(output)
            accounts.close(value)
            return value

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a real step says the same, and means it
                plain = self._step(Plan(), self._loss)
                own = self._plan or Plan()
                alone = replace(self._loop, accumulate=1, set_to_none=True)
                with observing(accounts):
                    step = self._step(own, closing, accounts.watch, alone)
                if self._loop.keeps_gradients:  # regions are booked in a step of one forward
                    step = self._step(own, self._loss)
        except errors.RecomputeError as error:
            if required:
                raise
            self._missing["simulated"] = f"the step cannot be simulated ({str(error).splitlines()[0]})"
            return None
        gradients = sum(p.numel() * p.element_size() for p in self._model.parameters() if p.requires_grad)
        letting_go = replace(self._loop, hold_output=False)
        return Simulated(
            step,
            plain,
            accounts,
            gradients,
            lambda plan: self._step(plan, self._loss),
            lambda: self._step(own, self._loss, loop=letting_go),
        )

    def _step(
        self, plan: Plan, loss: Callable[[Any], torch.Tensor], watch: Any = None, loop: Loop | None = None
    ) -> Simulation:
        stores = stores_for(plan, self._model, self._device)
        prepare = (lambda copy: apply(copy, plan, stores=stores)) if plan.all_choices else None
        return simulate_step(
            self._model,
            self._args,
            self._kwargs,
            prepare=prepare,
            watch=watch,
            loss=loss,
            optimizer=self._optimizer,
            loop=loop or self._loop,
            **where(self._device, self._model).step,
        )

    def _planner(self) -> Planner:
        if self._known is None:
            how: dict[str, Any] = {"loss": self._loss, "optimizer": self._optimizer, "device": self._device}
            self._known = Planner(self._model, self._args, self._kwargs, loop=self._loop, **how)
        return self._known

    def _best(self, budget: int) -> Plan:
        return self._planner().plan(budget)

    def _bytes(self, budget: int | float | str, simulated: Simulated | None) -> int:
        """What a budget comes to."""
        if simulated is None:
            return bytes_of(budget, lambda: self._planner().least[1].peak_bytes, 0, None)
        free = partial(free_bytes, self._model, simulated.step.device, self._optimizer, (self._args, self._kwargs))
        return bytes_of(budget, lambda: self._planner().least[1].peak_bytes, simulated.plain.peak_bytes, free)

    # --- run ------------------------------------------------------------------------------------------------------

    def _run(self, simulated: Simulated | None) -> tuple[Seen, Audit | None]:
        """One real step, observed, and an audit of the model's regions."""
        applied = None if self._plan is None else apply(self._model, self._plan)
        try:
            seen = self._observed()
            if seen.untrained:
                with _plain_checkpoints():
                    again = self._observed()
                seen.trained_plainly = frozenset(again.gradients)
            if simulated is None or simulated.accounts:
                try:
                    return seen, audit(self._model, self._args, self._kwargs)
                except errors.ArgumentError as error:
                    self._missing["audit"] = f"the audit says: {str(error).splitlines()[0]}"
            else:
                self._missing["audit"] = "the model calls no region"
            return seen, None
        finally:
            if applied is not None:
                applied.remove()

    def _observed(self) -> Seen:
        model, values = self._model, [*self._args, *self._kwargs.values()]
        reach = Reach(model, [value for value in values if isinstance(value, nn.Module)])
        leaves = [*model.parameters(), *(v for v in values if isinstance(v, torch.Tensor) and v.is_leaf)]
        gradients = [(leaf, leaf.grad) for leaf in leaves]
        for leaf, _ in gradients:
            leaf.grad = None
        observer = Observer(model)
        try:
            before = attributes_as_before(reach.modules), as_before(reach, values)
            with before[0], before[1], torch.inference_mode(False), torch.enable_grad():
                value = self._loss(model(*self._args, **self._kwargs))
                if value.requires_grad:  # else nothing in it is trained, which is a finding and no failure
                    value.backward()
            return observer.end()
        finally:
            observer.end()
            for leaf, gradient in gradients:
                leaf.grad = gradient


class _Plain:
    """Stands for torch's reentrant checkpoint, and is the plain call."""

    @staticmethod
    def apply(function: Callable[..., Any], _preserve_rng_state: bool, *args: Any) -> Any:
        """Calls the function."""
        return function(*args)


@contextlib.contextmanager
def _plain_checkpoints() -> Generator[None]:
    """Torch's reentrant checkpoints are plain calls for the time being."""
    there: Any = torch.utils.checkpoint
    before = there.CheckpointFunction
    there.CheckpointFunction = _Plain
    try:
        yield
    finally:
        there.CheckpointFunction = before
