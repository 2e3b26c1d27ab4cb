"""`verify`: the plain step twice, the step with the plan, and the rows that come of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from .. import errors
from .._tree import check_call
from ..plan import Choice, Plan, apply
from ..plan.report import Report
from ..simulation.step import any_loss
from .comparing import KINDS, Noise, rows
from .result import Row, Verification
from .steps import Subject
from .suspects import likely

_WHAT = "verify"


def verify(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    plan: Plan,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> Verification:
    """Compares a step with a plan to the plain step: outputs, gradients, buffers, random states, attributes, routing.

        found = verify(model, (batch,), plan=plan)
        assert found, found

    The model runs as it is, in the mode that it is in, three times: twice without the plan, which shows how far two
    plain steps are apart (on a CPU they are the same to the bit), and once with it. If anything differs by more than
    that, up to eight regions are tried alone. Each step starts from the same weights, random states, buffers and
    attributes, which are put back at the end, as are gradients; no optimizer runs. The gradients of two steps are held
    at a time.

    Args:
        model: The model, without a plan in it.
        args: The positional arguments of the call. Tensors are copied; those that require grad are compared, too.
        kwargs: Its keyword arguments.
        plan: The plan.
        loss: From the model's output to a scalar; by default the output's `.loss`, else the mean of its first floating
            tensor. It is the same for both steps.

    Returns:
        What differs, the first to look at first, and the regions that it is likely to come from. True if nothing does.

    Raises:
        ArgumentError: An argument is not of its kind, or the plan does not fit the model.
    """
    if not isinstance(model, nn.Module) or not isinstance(plan, Plan):
        raise errors.ArgumentError(errors.not_applicable(model, plan))
    check_call(_WHAT, model, args, kwargs)
    apply(model, plan).remove()
    work = _Comparison(Subject(model, args, kwargs or {}, loss or any_loss))
    found, flipped = work.with_plan(model, plan)

    def differs(other: Plan) -> bool:
        return bool(work.with_plan(model, other)[0])

    regions = plan.all_choices
    # What raised has said where.
    suspects = likely(regions, found, flipped, differs) if found and found[0].kind != "error" else ((), False)
    return work.result(type(model).__name__, len(regions), found, *suspects)


def compare_calls(
    tested: Callable[..., Any],
    plain: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> Verification:
    """Compares the step of a callable with that of another one, as `verify` does with a plan.

    Args:
        tested: A module or function, with regions.
        plain: The same without; another object with the same names of parameters, or one that shares them.
        args: The positional arguments of the call.
        kwargs: Its keyword arguments.
        loss: From the output to a scalar.

    Returns:
        What differs.

    Raises:
        ArgumentError: An argument is not of its kind.
    """
    for one in (tested, plain):
        check_call("assert_same_gradients", one, args, kwargs)
    work = _Comparison(Subject(plain, args, kwargs or {}, loss or any_loss))
    found = work.of(Subject(tested, args, kwargs or {}, loss or any_loss))
    return work.result(getattr(tested, "__name__", type(tested).__name__), 0, found)


class _Comparison:
    """The plain step, its noise, and other steps beside it."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self.counts: dict[str, int] = {}
        try:
            self._plain = subject.step(keep=True)
            subject.go_back()
            again = subject.step()
            self.noise = Noise(self._plain, again, subject.differing(self._plain))
        finally:
            subject.go_back()
        self.counts = {kind: len(getattr(self._plain, kind)) for kind in KINDS}

    def with_plan(self, model: nn.Module, plan: Plan) -> tuple[list[Row], list[Choice]]:
        """What differs with a plan, and the choices whose replays decided otherwise."""
        reports: list[Report] = []
        handle = apply(model, plan)
        watched = ExitStack()
        watched.enter_context(handle.watch())

        def take_out() -> None:
            watched.close()
            reports.append(handle.report())
            handle.remove()

        found = self.of(self._subject, take_out)
        (report,) = reports
        flipped = [row for row in report.rows if row.flips]
        self.counts["routing"] = max(self.counts.get("routing", 0), report.decisions)
        found += [
            Row(
                "routing",
                f"the routing in {row.choice.paths[0] or 'the model'}",
                row.flips / row.decisions,
                detail=f"differs: {row.flips:,} of {row.decisions:,} decisions came out otherwise in the replay. "
                "Write Choice(..., carry=True) to make them once",
            )
            for row in flipped
        ]
        return found, [row.choice for row in flipped]

    def of(self, subject: Subject, after: Callable[[], object] = bool) -> list[Row]:
        """What differs in a step; `after` is called when it is over, and before attributes are looked at."""
        try:
            try:
                left = subject.step()
            finally:
                after()
            generators, attributes = self._subject.differing(self._plain)
        except Exception as error:  # the plain step has run, so it is the regions' doing
            detail = f"raises {type(error).__name__}: {error}"
            return [Row("error", "the step with regions", math.inf, detail=detail)]
        finally:
            subject.go_back()
        found = [row for row in rows(self._plain, left, self.noise) if row.detail]
        for name in generators:
            if name not in self.noise.generators:
                left_in = "is left in another state than by the plain step"
                found.append(Row("generators", f"the random state {name}", math.inf, detail=left_in))
        if subject is self._subject:  # another model has other attributes
            new = [name for name in attributes if name not in self.noise.attributes]
            found += [Row("attributes", name, math.inf, detail="is not as the plain step leaves it") for name in new]
        return found

    def result(
        self, model: str, regions: int, found: list[Row], suspects: tuple[str, ...] = (), tried: bool = False
    ) -> Verification:
        """All of it."""
        return Verification(
            model, str(self._subject.device), regions, self.counts, self.noise.largest, tuple(found), suspects, tried
        )
