"""Options of a step, besides recomputation, that lower its peak; each with the peak that it leads to.

A budget below the least peak of any plan is answered with what would do, in numbers: another optimizer, its states in 8
bits or in host memory, its step in backward, a loop that holds less, inputs in host memory, a smaller batch. Each is
tried by itself, by a simulation of the step with the plan that keeps the fewest activations: the plan with the least
peak may keep more, where the optimizer's step holds the peak and a better optimizer would not.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch

from .. import errors
from .._torch import tensors_in
from .._torch.tensors import each_tensor
from ..errors.text import doing
from ..memory.budget import Limit, no_plan_fits
from ..plan.plan import Plan
from ..plan.ranks import Ranks
from ..simulation import Simulation
from ..simulation.training_step import OPTIMIZERS, USUAL, TrainingStep
from .configurations import largest_parts, made_of
from .hosts import PlanOptions, simulate_under
from .layout import LayoutPlanner
from .planner import Planner
from .states import Make, OptimizerSpec
from .tiling import tiled

LEAN_OPTIMIZERS = ("adamw-fused", "adafactor", "sgd")  # which may take less memory than another
_WORTH = 0.99  # of the least peak: what lowers it by less is not worth a word


class Alternative(NamedTuple):
    """A changed step: how it is written on the command line and in Python, and the peak that it leads to."""

    option: str
    keyword: str
    peak_bytes: int


def alternatives(planner: Planner, budget: int | None = None) -> list[Alternative]:
    """Returns the options that lower the least peak of a planned step, the lowest peak first.

    Args:
        planner: Of the step.
        budget: How far a batch is halved; None for once.
    """
    found: list[Alternative] = []
    for option, keyword, step, plan in _changed(planner):
        found.append(Alternative(option, keyword, _peak(step, plan)))
    for option, keyword, step in () if planner.plain.loop.frees_gradients else with_other_states(planner.step):
        with contextlib.suppress(Exception):  # whatever an optimizer of the user's may raise that is made otherwise
            found.append(Alternative(option, keyword, _peak(step, planner.leanest)))
    found += [*_smaller_batches(planner, budget)][-1:]
    least = planner.least[1].peak_bytes
    return sorted((one for one in found if one.peak_bytes < _WORTH * least), key=lambda one: one.peak_bytes)


def _changed(planner: Planner) -> Iterator[tuple[str, str, TrainingStep, Plan]]:
    step, plan = planner.step, planner.leanest
    yield from ((*changed, plan) for changed in with_another_optimizer(step))
    for option, ranks in doubled(step.ranks):
        changed = _on_ranks(step, ranks)
        if changed is not None:
            yield f"--{option.replace('=', ' ')}", f"Ranks({option})", changed, plan
    loop = step.loop
    if loop.hold_output:
        yield "--no-hold-output", "hold_output=False", replace(step, loop=replace(loop, hold_output=False)), plan
    if not loop.set_to_none and loop.accumulate == 1:
        words = "gradients set to None (without --no-set-to-none)", "set_to_none=True"
        yield *words, replace(step, loop=replace(loop, set_to_none=True)), plan
    sheet = step.where.roofline
    if sheet is not None and sheet.host_link is not None and planner.costs.host_memory is None:
        yield "--offload", "offload=True", step, PlanOptions(True).stated(plan)
    if planner.whole is None:
        tiles, _ = tiled(step, plan, planner.simulated(plan))
        if tiles != plan:
            yield "--tiles", "tiles=True", step, tiles


def with_another_optimizer(step: TrainingStep) -> Iterator[tuple[str, str, TrainingStep]]:
    """Yields the step with an optimizer that may take less memory, as an option, as a keyword and itself."""
    own = step.optimizer if not isinstance(step.optimizer, torch.optim.Optimizer) else type(step.optimizer)
    for name in LEAN_OPTIMIZERS if own is not None else ():
        if OPTIMIZERS[name] is not own:
            yield f"--optimizer {name}", f'optimizer="{name}"', replace(step, optimizer=OPTIMIZERS[name])


def doubled(ranks: Ranks) -> Iterator[tuple[str, Ranks]]:
    """Yields the ranks with twice as many of each kind of which there are some, and what is changed, as "fsdp=8"."""
    for name in ("tp", "pp", "cp", "ep", "dp", "fsdp"):
        size = 2 * getattr(ranks, name)
        if size == 2:
            continue
        try:
            yield f"{name}={size}", replace(ranks, **{name: size})
        except errors.ArgumentError:  # experts that so many ranks cannot share
            continue


def _on_ranks(step: TrainingStep, ranks: Ranks) -> TrainingStep | None:
    """The step on other ranks; None where it would have to be built again and cannot be."""
    if (ranks.tp, ranks.cp) == (step.ranks.tp, step.ranks.cp):
        return replace(step, ranks=ranks)
    again: Any = getattr(step, "again", None)
    try:
        return None if again is None else again(ranks)
    except errors.ArgumentError:  # sizes that so many ranks cannot share
        return None


def on_more_ranks(planner: LayoutPlanner) -> list[Alternative]:
    """Returns what twice as many ranks of each kind need with the plan that needs the least, the lowest peak first."""
    layout, plan, found = planner.layout, planner.least_plan, list[Alternative]()
    for option, ranks in doubled(layout.ranks):
        doing(f"simulating {option}")
        times = ranks.batches // layout.ranks.batches
        batch = None if layout.batch is None else times * layout.batch
        try:
            fullest = max(
                rank.peak_bytes for rank in planner.spread(replace(layout, ranks=ranks, batch=batch)).under(plan)
            )
        except errors.ArgumentError:  # sizes that so many ranks cannot share
            continue
        found.append(Alternative(f"--{option.replace('=', ' ')}", f"Ranks({option})", fullest))
    least = max(rank.least.peak.bytes for rank in planner.pipeline.ranks)
    return sorted((one for one in found if one.peak_bytes < _WORTH * least), key=lambda one: one.peak_bytes)


def with_other_states(step: TrainingStep) -> Iterator[tuple[str, str, TrainingStep]]:
    """Yields the step with an optimizer whose states are smaller or elsewhere, or that steps in backward."""
    own = step.optimizer
    if own is None:
        return
    if not isinstance(own, OptimizerSpec):
        own = OptimizerSpec(cast("Make", type(own)) if isinstance(own, torch.optim.Optimizer) else own)
    adamw = own.make in (None, torch.optim.AdamW, torch.optim.Adam, OPTIMIZERS[USUAL])
    if adamw and own.states != "8bit":
        option = "--states 8bit" if own.make in (None, OPTIMIZERS[USUAL]) else f"--optimizer {USUAL} --states 8bit"
        changed = replace(own, make=None, states="8bit")
        yield option, "moments of 8 bits, as torchao.optim.AdamW8bit's", replace(step, optimizer=changed)
    if step.loop.accumulate == 1 and step.loop.set_to_none:
        words = "a step in backward, by register_post_accumulate_grad_hook"
        yield "--optimizer-in-backward", words, replace(step, optimizer=replace(own, in_backward=True))
    sheet = step.where.roofline
    if sheet is not None and sheet.host_link is not None:
        words = "states and step in host memory, as torchao.optim.CPUOffloadOptimizer's"
        yield "--optimizer-on-host", words, replace(step, optimizer=replace(own, on_host=True))


def _smaller_batches(planner: Planner, budget: int | None) -> Iterator[Alternative]:
    """Yields the step with half of its batch, and half of that again until it fits a budget.

    A batch of one broadcasts to whatever a loss holds; one that is larger by one does not, so that is tried before.
    """
    whole = size = next((tensor.shape[0] for tensor in tensors_in(planner.step.call) if tensor.ndim), 1)

    def peak_of(size: int) -> int:
        args, kwargs = each_tensor(planner.step.call, lambda tensor: _cut(tensor, whole, size))
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Using a target size")  # of a loss that holds the targets of all
            return _peak(replace(planner.step, args=args, kwargs=kwargs), planner.leanest)

    while size > 1:
        size //= 2
        try:
            if whole in (2, 3):  # whose half is one
                peak_of(whole + 1)
            peak = peak_of(size)
        except Exception:  # whatever a model, or a loss that holds all labels, may raise
            return
        yield Alternative(f"--batch {size}", f"a batch of {size}", peak)
        if budget is None or peak <= budget:
            return


def _cut(tensor: torch.Tensor, whole: int, size: int) -> torch.Tensor:
    """The first items of a tensor that has one for each of the whole batch; some twice where it has fewer."""
    if tensor.shape[:1] != (whole,):
        return tensor
    return tensor[:size] if size <= whole else torch.cat([tensor, tensor])[:size]


def _peak(step: TrainingStep, plan: Plan) -> int:
    doing("simulating what else would do")
    return simulate_under(step, plan).peak_bytes


def held_by(simulation: Simulation) -> str:
    """Returns what the peak of a step is made of, in words, the most first, without what is less than a hundredth."""
    phase = {"optimizer": "the optimizer's step"}.get(simulation.peak.phase, simulation.peak.phase)
    return f"{largest_parts(made_of(simulation), simulation.peak_bytes)}, in {phase}"


def in_words(found: Sequence[Alternative], budget: int | None, *, option: bool) -> list[str]:
    """Returns sentences on alternatives: those that fit a budget, then those that lower the peak and do not.

    Args:
        found: From `alternatives`.
        budget: In bytes; None where there is none.
        option: Whether they are written as on the command line, else as in Python.
    """

    def named(some: Sequence[Alternative]) -> str:
        words = ((one.option if option else one.keyword, errors.size(one.peak_bytes, up=True)) for one in some)
        return ", ".join(f"{word} ({peak})" for word, peak in words)

    if budget is None:
        return [f"Each of these lowers it: {named(found)}."] if found else []
    fitting, others = ([one for one in found if (one.peak_bytes <= budget) is fits] for fits in (True, False))
    said = [f"Each of these fits: {named(fitting)}."] if fitting else []
    return [*said, *([f"Each of these lowers the peak, but not enough alone: {named(others)}."] if others else [])]


def with_alternatives(planner: Planner, error: errors.BudgetError) -> errors.BudgetError:
    """The error of a budget that no plan fits into, which also says what holds the least peak and what would do."""
    least: Any = error.solution
    promise = least.prediction
    wanted = Limit(promise.budget_bytes, promise.budget)
    more = in_words(alternatives(planner, wanted), wanted, option=False)
    advice = "\n  ".join(filter(None, [f"That peak holds {held_by(planner.least[1])}.", *more, promise.advice]))
    text = no_plan_fits(wanted.said, error.smallest, promise.plain_peak_bytes, advice)
    return errors.BudgetError(text, error.smallest, least)
