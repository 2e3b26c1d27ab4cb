"""`verify`: compares everything that a step leaves with a plan and without it, to show that the plan changes nothing.

One forward finds the weights that it writes to, of which copies are kept. The plain step runs twice, from the same
weights, random states, buffers and attributes: what differs then is the model's own noise. Then the step with the plan
runs, from the same state. Of the gradients, the first one that differs is the closest to the cause, because a wrong
gradient makes wrong all that come after it in the backward. The likely regions are found by a step with each of them
alone. A recorder around both steps would name the operation too, but under a dispatch mode attention runs other
kernels; `audit` explains what is found here.

The model is left as it was: weights, gradients, buffers, attributes, random states, no plan. No optimizer runs.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .. import errors
from ..errors.text import at_work, counted, finite, paragraph, shown
from ..memory.batch import Batch, call_of
from ..plan import Choice, Plan, apply
from ..plan.apply import not_applicable
from ..plan.libraries import switched
from ..simulation.training_step import any_loss, with_labels
from .compare import KINDS, Difference, ModelCall, Noise, differences

TRIALS = 8
"""The number of regions that are tried alone."""
SHOWN = 8
_WORDS = {"generators": "random generators"}


@shown
@dataclass(frozen=True, repr=False)
class Verification:
    """The result of `verify`. True if nothing differs; `print` shows a text.

    Attributes:
        model: Its class.
        device: Where the steps ran.
        regions: The number of regions in the plan.
        counts: The number of things of each kind that were compared.
        noise: The largest distance between two plain steps; 0.0 if they are the same to the bit.
        differences: What differs, those nearest to the cause first.
        likely: The regions that it comes from, the most likely first; or the setting that every plan switches.
        tried: Whether each of `likely` was tried, and differs when it is the only region.
    """

    model: str
    device: str
    regions: int
    counts: Mapping[str, int]
    noise: float
    differences: tuple[Difference, ...] = ()
    likely: tuple[str, ...] = ()
    tried: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def __bool__(self) -> bool:
        return self.ok

    @property
    def first(self) -> Difference | None:
        """The difference nearest to its cause: an output, else the first gradient of the backward that differs."""
        return self.differences[0] if self.differences else None

    def as_data(self) -> dict[str, Any]:
        """Returns the result as plain data."""
        return {
            "model": self.model,
            "device": self.device,
            "regions": self.regions,
            "passed": self.ok,
            "counts": dict(self.counts),
            "noise": self.noise,
            "differences": [vars(row) for row in self.differences],
            "likely": list(self.likely),
            "tried": self.tried,
        }

    def to_json(self) -> str:
        """Returns the result as JSON text; a distance that is not finite is null."""
        return json.dumps(finite(self.as_data()))

    def __str__(self) -> str:
        compared = ", ".join(f"{count} {_WORDS.get(kind, kind)}" for kind, count in self.counts.items() if count)
        noise = (
            f"two steps without it differ by {self.noise:.2g}" if self.noise else "two steps without it are the same"
        )
        regions = counted(self.regions, "region")
        steps = f"{self.model} on {self.device}, a step with the plan ({regions}) beside one without"
        if self.ok:
            within = " within that noise" if self.noise else " to the last bit"
            return "\n".join(paragraph(f"the same{within}: {compared}. {steps}; {noise}", hanging=2))
        every = Counter(self.counts) | Counter(row.kind for row in self.differences)  # of a kind, whichever are more
        found = f"{len(self.differences)} of {every.total()} differ ({compared})"
        lines = paragraph(f"{found}. {steps}; {noise}", hanging=2)
        for row in self.differences[:SHOWN]:
            lines += paragraph(str(row), 2, hanging=2)
        if len(self.differences) > SHOWN:
            lines.append(f"  and {len(self.differences) - SHOWN} more")
        if self.likely:
            names = ", ".join(self.likely[:SHOWN]) + (" ..." if len(self.likely) > SHOWN else "")
            how = "the step differs with this alone" if self.tried else "by where the first difference is"
            lines += paragraph(f"Likely: {names} ({how}).", hanging=2)
            lines += ["Write, to see the operation: with the plan applied, print(audit(model, args))"]
        return "\n".join(lines)


def verify(
    model: nn.Module,
    args: Batch = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    plan: Plan,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> Verification:
    """Compares a step with a plan to the plain step: outputs, gradients, buffers, random states, attributes, routing.

        found = verify(model, batch, plan=plan)
        assert found, found

    The model runs as it is, in the mode that it is in, three times after a forward: twice without the plan, which shows
    how far two plain steps are apart (on a CPU they are the same to the bit), and once with it. If anything differs by
    more than that, up to eight regions are tried alone. Each step starts from the same weights, random states, buffers
    and attributes, which are put back at the end, as are gradients; no optimizer runs. The gradients of two steps are
    held at a time.

    Args:
        model: The model, without a plan in it. Of one in `DistributedDataParallel` the module inside is verified.
        args: A batch, see `make_plan`. Tensors are copied; those that require grad are compared, too.
        kwargs: More keyword arguments of the call.
        plan: The plan.
        loss: From the model's output to a scalar; by default the output's `.loss`, else the mean of its first floating
            tensor. It is the same for both steps.

    Returns:
        The differences, those nearest to the cause first, and the regions they are likely to come from. True if none.

    Raises:
        ArgumentError: An argument is not of its kind, or the plan does not fit the model.
    """
    if not isinstance(model, nn.Module) or not isinstance(plan, Plan):
        raise errors.ArgumentError(not_applicable(model, plan))
    args, kwargs, loss = with_labels("verify", model, args, kwargs, loss)
    if isinstance(model, DistributedDataParallel):  # its steps would wait for other ranks
        model = cast("nn.Module", model.module)
    call = call_of("verify", model, args, kwargs)
    apply(model, plan).remove()
    likely, tried = (), False
    with at_work(f"verifying {type(model).__name__}"):
        comparison = _Comparison(ModelCall(model, *call), loss or any_loss)
        found, flipped = comparison.with_plan(model, plan)
        if found and found[0].kind != "error":  # what raised has said where
            setting = switched(model, call[1])
            if setting and comparison.with_plan(model, Plan())[0]:
                likely, tried = (f"{setting}, which every plan sets in training",), True
            else:
                likely, tried = comparison.likely_regions(model, plan, found, flipped)
    return comparison.result(type(model).__name__, len(plan.all_choices), found, likely, tried)


def compare_calls(
    tested: Callable[..., Any],
    plain: Callable[..., Any],
    args: Batch = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> Verification:
    """Compares the step of a callable with regions with that of one without, as `verify` does with a plan.

    They have the same names of parameters, or share them.
    """
    call = call_of("assert_same_gradients", plain, args, kwargs)
    plainly = ModelCall(plain, *call)
    comparison = _Comparison(plainly, loss or any_loss)
    found = comparison.with_call(ModelCall(tested, *call, plainly.names))
    return comparison.result(getattr(tested, "__name__", type(tested).__name__), 0, found)


class _Comparison:
    """The plain step, its noise, and other steps compared with it."""

    def __init__(self, call: ModelCall, loss: Callable[[Any], torch.Tensor]) -> None:
        self._call, self._loss = call, loss
        if call.device.type == "meta":
            raise errors.ArgumentError(
                "a part of the model or of its batch is on the meta device, where no step can be run.\n"
                '  Write model.to_empty(device="cpu"), initialize its weights, and pass a batch with values.'
            )
        try:
            call.keep_weights(loss)
            self._plain = call.step(loss)
            call.go_back()
            self.noise = Noise(self._plain, call.step(loss))
            self._noisy = self._side_effects()
        finally:
            call.go_back()
        self.counts = {kind: len(self._plain.tensors[kind]) for kind in KINDS}

    def _side_effects(self) -> tuple[list[str], list[str]]:
        """Returns the global generators and the attributes that are now not as the plain step left them."""
        kept = self._plain.side_effects
        return kept.advanced_generators(), kept.changed_places()

    def with_plan(self, model: nn.Module, plan: Plan) -> tuple[list[Difference], list[Choice]]:
        """Returns the differences with a plan, and the choices whose replays decided otherwise."""
        with ExitStack() as applied:
            handle = apply(model, plan)
            applied.callback(handle.remove)
            applied.enter_context(handle.watch())
            found = self.with_call(self._call, applied.close)
            report = handle.report()
        flipped = [row for row in report.rows if row.flips]
        self.counts["routing"] = max(self.counts.get("routing", 0), report.decisions)
        for row in flipped:
            detail = (
                f"differs: {row.flips:,} of {row.decisions:,} decisions came out otherwise in the replay. "
                "Write Choice(..., carry=True) to make them once"
            )
            name = f"the routing in {row.choice.paths[0] or 'the model'}"
            found.append(Difference("routing", name, row.flips / row.decisions, detail=detail))
        return found, [row.choice for row in flipped]

    def with_call(self, call: ModelCall, after: Callable[[], object] = bool) -> list[Difference]:
        """Returns the differences of a step; `after` is called when it is over, before attributes are compared."""
        try:
            try:
                if call is not self._call:
                    call.keep_weights(self._loss)
                result = call.step(self._loss)
            finally:
                after()
            generators, attributes = self._side_effects()
        except Exception as error:  # the plain step has run, so it is the regions' doing
            detail = f"raises {type(error).__name__}: {error}"
            return [Difference("error", "the step with regions", math.inf, detail=detail)]
        finally:
            call.go_back()
        found = list(differences(self._plain, result, self.noise))
        for name in generators:
            if name not in self._noisy[0]:
                detail = "is left in another state than by the plain step"
                found.append(Difference("generators", f"the random state {name}", math.inf, detail=detail))
        if call is self._call:  # another model has other attributes
            new = [name for name in attributes if name not in self._noisy[1]]
            detail = "is not as the plain step leaves it"
            found += [Difference("attributes", name, math.inf, detail=detail) for name in new]
        return found

    def likely_regions(
        self, model: nn.Module, plan: Plan, found: Sequence[Difference], flipped: Sequence[Choice]
    ) -> tuple[tuple[str, ...], bool]:
        """Returns the likely causes of differences, the most likely first, and whether each differs when tried alone.

        A wrong replay makes wrong the gradients of its own region and of everything before it, nothing after it. So
        the first wrong gradient of the backward belongs to the region, or is close before it. Regions are put in that
        order, after those whose decisions were seen to flip, and the first ones are tried.
        """
        gradients = [row.name.removeprefix("the gradient of ") for row in found if row.kind == "gradients"]

        def place(choice: Choice) -> tuple[bool, int]:
            modules = choice.modules
            inside = (
                index
                for index, name in enumerate(gradients)
                if any(not module or name.startswith(f"{module}.") for module in modules)
            )
            return choice not in flipped, next(inside, len(gradients))

        ordered = sorted(plan.all_choices, key=place)
        alone = [one for one in ordered[:TRIALS] if self.with_plan(model, Plan((one,), "one region of a plan"))[0]]
        chosen = alone or [one for one in ordered if place(one) < (True, len(gradients))] or ordered
        ends = [(one.paths[0] or "the model", one.paths[-1] or "the model") for one in chosen]
        return tuple(" to ".join(dict.fromkeys(pair)) for pair in ends), bool(alone)

    def result(
        self, model: str, regions: int, found: list[Difference], likely: tuple[str, ...] = (), tried: bool = False
    ) -> Verification:
        """Returns the result for the user."""
        device, noise = str(self._call.device), self.noise.largest
        return Verification(model, device, regions, self.counts, noise, tuple(found), likely, tried)
