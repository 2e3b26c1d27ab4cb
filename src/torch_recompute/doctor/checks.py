"""All checks of the doctor in one table, over evidence that is gathered once.

A check is one kind of finding and up to three functions: one reads a simulated step, one observed steps, one an audit.
Where none of the evidence that it reads can be had (a model on meta cannot be run, a plain model has no regions to
audit) it does not run, and the report says so. A finding has the place, what was seen with its figures, how it was
confirmed, and what to write, in which code is between backticks and runs as it is printed. Parts that are alike, as the
layers of a stack, are one finding, with `*` where the numbers in their names were.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .. import errors
from .._torch.compiler import CUT_REGION, NO_CUDA_GRAPH
from ..errors.text import counted, document, grouped, paragraph, shown, starred_path, times
from ..memory.budget import as_budget, read_budget
from ..plan.exhausted import against_fragmentation, fragmented
from ..plan.plan import Plan
from ..simulation import Simulation
from .audit import FAILS, Audit
from .simulated import Account, SimulatedSteps, merged
from .step_watcher import Observations

SCHEMA_VERSION = 1

FULL = 0.8  # of the device: memory is short
FILLED = 0.8  # of the budget: what lasts the whole step fills it
LOWERED = 0.1  # of the plain peak: regions that lower it by less have met something else
OF_LOSS = 0.4  # of the peak: tensors that the loss made
HELD = 0.02  # of the peak: what it falls by if the loop drops the output
PINNED = 0.5  # of what a region drops: what others hold
FUSED = 0.9  # of a region's FLOPs: fused attention
WORTH = 0.01  # of the peak: what an inner region has to lower it by, to be worth its third run
REPLAYED = 0.15  # of the step: whole layers cost a quarter of all products
SHOWN = 4  # places in one finding
TILES = "`recompute(head_and_loss, tiles=8)(hidden, labels)`, where head_and_loss returns a loss per token."
WALKED = "one simulated step: the graph was walked when the loss was there"
BY_REGION = "one simulated step, in which FLOPs were counted by region and the graph was walked for who holds what."
NEAR = 0.05  # of the step: a plan this close to its bound is as good as plans get


# --- what the doctor returns ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """One problem of a model or a training loop.

    Attributes:
        kind: A word of `KINDS`; each has a heading on the page about the doctor.
        where: The region, module, parameter or device; numbers in paths as `*` where several are alike.
        seen: The observation, with its figures.
        confirmed: How it was made sure of: what was run, simulated or counted.
        write: What to write; what is between backticks is code.
        figures: The figures as numbers, by name; bytes as integers, seconds and shares as floats.
    """

    kind: str
    where: str
    seen: str
    confirmed: str
    write: str
    figures: Mapping[str, float] = field(default_factory=dict[str, float])

    def __str__(self) -> str:
        lines = [f"{self.kind}  {self.where}".rstrip()]
        for text in (self.seen, f"Evidence: {self.confirmed}", f"Fix: {self.write}"):
            lines += paragraph(text, 4)
        return "\n".join(lines)


@shown
@dataclass(frozen=True, repr=False)
class Report:
    """The findings of an examination. True if there are none; `print` shows a text.

    Attributes:
        model: The name of the model's class.
        findings: What is wrong, in the order of `looked_for`.
        looked_for: The kinds that were looked for.
        not_looked_for: The kinds that were not, each with the reason.
        watched: What was compared in the steps after those that were watched closely; "" where there were none.
    """

    model: str
    findings: tuple[Finding, ...]
    looked_for: tuple[str, ...]
    not_looked_for: tuple[tuple[str, str], ...]
    watched: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def __bool__(self) -> bool:
        return self.ok

    def to_json(self) -> str:
        """Returns the report as JSON text, with `schema_version`."""
        data = {
            "model": self.model,
            "ok": self.ok,
            "findings": [asdict(finding) for finding in self.findings],
            "looked_for": self.looked_for,
            "not_looked_for": dict(self.not_looked_for),
            "watched": self.watched,
        }
        return document("doctor", SCHEMA_VERSION, data)

    def __str__(self) -> str:
        lines = [f"{self.model}: {self.summary()}"]
        for finding in self.findings:
            lines += ["", str(finding)]
        reasons = self.reasons()
        lines += [""] if reasons else []
        for reason in reasons:
            lines += paragraph(reason)
        return "\n".join(lines)

    def summary(self) -> str:
        """Returns the number of findings, in words."""
        found = counted(len(self.findings), "finding") if self.findings else "nothing found"
        return f"{found}; {len(self.looked_for)} kinds looked for"

    def reasons(self) -> list[str]:
        """Returns a line for each reason why something was not looked for, and one on how later steps were watched."""
        kinds = grouped(self.not_looked_for, lambda pair: pair[1])
        lines = [f"not looked for, because {why}: {', '.join(kind for kind, _ in of)}" for why, of in kinds.items()]
        return [*lines, *([f"compared after the first steps: {self.watched}"] if self.watched else [])]


# --- evidence ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evidence:
    """The facts about a model that checks read.

    Attributes:
        name: The name of the model's class.
        plan: The plan that is, or is to be, in the model.
        budget: Bytes that the step may take.
        simulated: Simulated steps.
        observed: Real steps, observed.
        audited: Each region run twice.
        missing: Why there is none of the above, by its name.
    """

    name: str = ""
    plan: Plan | None = None
    budget: int | None = None
    simulated: SimulatedSteps | None = None
    observed: Observations | None = None
    audited: Audit | None = None
    missing: Mapping[str, str] = field(default_factory=dict[str, str])

    def without(self, name: str) -> Simulation | None:
        """Simulates the step without the plan's regions of a name (numbers as `*`); None if the plan has none."""
        if self.plan is None or self.simulated is None:
            return None
        rest = tuple(one for one in self.plan.choices if not _is_named(one.paths[0], name))
        return None if len(rest) == len(self.plan.choices) else self.simulated.planned(Plan(rest))

    def without_it(self, name: str) -> str:
        """Returns what to write for a step without the regions of a name."""
        choices = () if self.plan is None else self.plan.all_choices
        planned = any(_is_named(path, name) for choice in choices for path in choice.paths)
        return f"a plan without {name}" if planned else f"the plain call instead of the region {name}"

    def compared(self, name: str) -> str:
        """Returns what a step keeps with the plan's regions of a name and without, in words; "" for other regions."""
        plain = self.without(name)
        if plain is None or self.simulated is None:
            return ""
        kept = self.simulated.step.saved_bytes
        return f"; a step keeps {_size(kept)} for backward with it and {_size(plain.saved_bytes)} without"


def _is_named(path: str, name: str) -> bool:
    """Returns whether a name, with `*` for numbers, or one of several, is that of a path."""
    return not {path, starred_path(path)}.isdisjoint(name.split(", "))


_Found = tuple[str, str, str, str, dict[str, Any]]


def _found(where: str, seen: str, confirmed: str, write: str, **figures: Any) -> _Found:
    return where, seen, confirmed, write, figures


def _of_regions(
    account: Account, seen: str, confirmed: str, write: str, figures: tuple[str, ...] = (), **more: Any
) -> _Found:
    """Returns a finding about the regions of an account; `seen` follows their number, `figures` names the account's."""
    numbers = {name: getattr(account, name) for name in figures}
    seen = f"{counted(account.calls, 'region')} {seen}"
    return _found(account.where, seen, confirmed, write, regions=account.calls, **numbers, **more)


@dataclass(frozen=True)
class Check:
    """Finds one kind of problem.

    Attributes:
        kind: The word for it.
        simulated: Finds it in simulated steps.
        observed: Finds it in real steps.
        audited: Finds it in an audit.
        unless: Why it cannot be looked for in some evidence; "" where it can.
    """

    kind: str
    simulated: Callable[[Evidence, SimulatedSteps], Iterable[_Found]] | None = None
    observed: Callable[[Evidence, Observations], Iterable[_Found]] | None = None
    audited: Callable[[Evidence, Audit], Iterable[_Found]] | None = None
    unless: Callable[[Evidence], str] | None = None

    @property
    def needs(self) -> list[str]:
        """The kinds of evidence that it reads."""
        return [name for name in ("simulated", "observed", "audited") if getattr(self, name) is not None]

    def why_not(self, evidence: Evidence) -> str:
        """Returns why this cannot be looked for; "" where it can."""
        if all(getattr(evidence, need) is None for need in self.needs):
            return "; ".join(
                dict.fromkeys(evidence.missing.get(need, f"there is no {need} step") for need in self.needs)
            )
        return self.unless(evidence) if self.unless is not None else ""

    def findings(self, evidence: Evidence) -> Iterator[Finding]:
        """Yields the findings."""
        for need in self.needs:
            if (source := getattr(evidence, need)) is not None:
                yield from (Finding(self.kind, *found) for found in getattr(self, need)(evidence, source))


def look_for(checks: Iterable[Check], evidence: Evidence) -> Report:
    """Runs checks on the evidence, and reports their findings."""
    why_not = {check: check.why_not(evidence) for check in checks}
    looked = [check for check, why in why_not.items() if not why]
    findings = tuple(finding for check in looked for finding in check.findings(evidence))
    missing = tuple((check.kind, why) for check, why in why_not.items() if why)
    watched = "" if evidence.observed is None else evidence.observed.watched
    return Report(evidence.name, findings, tuple(check.kind for check in looked), missing, watched)


def _audited(
    *kinds: str, confirmed: str = "each region was run twice, as a replay runs it, with every operation written down."
) -> Callable[[Evidence, Audit], Iterator[_Found]]:
    """Returns a check that reads rows of an audit, of these kinds; those alike except for numbers are one finding."""

    def look(_: Evidence, audit: Audit) -> Iterator[_Found]:
        rows = [row for row in audit.rows if row.kind in kinds]
        groups = grouped(
            rows, lambda row: (row.kind, starred_path(row.region), starred_path(row.module), row.op, row.line)
        )
        for group in groups.values():
            row = group[0]
            figures: dict[str, Any] = {"regions": len(group)}
            detail = row.detail
            if row.kind == "syncs":
                figures = {"waits": sum(one.times for one in group)}
                detail = f"the host waits for the device {figures['waits']} times in the replays of one step"
            place = " at ".join(filter(None, [row.op, row.line.rpartition("/")[2]]))
            seen = ": ".join(filter(None, [place, detail]))
            places = list(dict.fromkeys(one.module or one.region for one in group))
            where = places[0] if len(places) == 1 else starred_path(places[0])
            yield where, f"{seen.rstrip('.')}.", confirmed, row.advice, figures

    return look


# --- wrong results ----------------------------------------------------------------------------------------------------


def _frozen_input(evidence: Evidence, observed: Observations) -> Iterator[_Found]:
    """Finds parameters that are not trained, because a reentrant checkpoint is given inputs that need no gradient.

    So it is behind a frozen embedding, as with LoRA, or on the first stage of a pipeline.
    """
    plainly = observed.trained_plainly
    if not observed.backwards and plainly is None:
        return  # no gradient has been due yet
    for where, names in grouped(observed.cut_off, lambda name: starred_path(observed.owners[name])).items():
        confirmed = f"{observed.steps} real step{'s' if observed.steps > 1 else ''}, in which gradients were counted"
        if plainly is not None:
            confirmed += "; with plain calls instead of torch's reentrant checkpoints these parameters get one"
        yield _found(
            where,
            f"{counted(len(names), 'trainable parameter')} ({names[0]}) got no gradient: the "
            "module ran without grad, as in a reentrant checkpoint if none of its inputs needs a gradient.",
            f"{confirmed}.",
            "`torch_recompute.checkpoint` instead of the reentrant one, or `use_reentrant=False`.",
            parameters=len(names),
        )


def _buffers_updated_twice(evidence: Evidence, observed: Observations) -> Iterator[_Found]:
    """Finds buffers that are updated by the forward and again by the replay of another library's checkpoint."""
    changed = observed.changed_buffers
    for where, names in grouped(changed, starred_path).items():
        yield _found(
            where,
            f"{counted(len(names), 'buffer')} ({names[0]}): changed by the forward, and "
            f"again in {max(changed[name] for name in names)} of {counted(observed.backwards, 'backward')}.",
            "real steps: the buffers were compared when a backward had ended with what they were when it began.",
            "`torch_recompute.checkpoint` instead of `torch.utils.checkpoint.checkpoint` (the same "
            "arguments), or a plan: their replays put buffers back.",
            buffers=len(names),
        )


def _reentrant(evidence: Evidence, observed: Observations) -> Iterator[_Found]:
    """Finds checkpoints that run a backward inside backward: DDP ends with "marked as ready twice"."""
    around = "is around this model" if observed.parallel else "is not around this model, which trains without it"
    groups = grouped(observed.reentrant, lambda one: (one.function, starred_path(one.path), one.library))
    for (function, path, library), checkpoints in groups.items():
        calls = sum(one.calls for one in checkpoints)
        yield _found(
            path or function,
            f"{function} is checkpointed {times(calls)} by {library}, reentrant: each call runs a backward inside "
            "backward and marks its parameters as ready again, which DistributedDataParallel refuses. That "
            f"{around}.",
            "the graph of a real step was walked, and these nodes are in it.",
            "`torch_recompute.recompute(fn)(*args)`, or `torch_recompute.checkpoint`, or `use_reentrant=False`.",
            calls=calls,
            under_ddp=float(observed.parallel),
        )


def _replays_otherwise(evidence: Evidence, observed: Observations) -> Iterator[_Found]:
    """Finds a step that raises, or whose gradients differ, where the step without recomputation is right."""
    rows = () if evidence.audited is None else evidence.audited.rows
    if any(row.kind in ("differs", "flips", "fails", "mutates") for row in rows):
        return  # the audit names the operation
    ours = (
        "`torch_recompute.checkpoint` instead of `torch.utils.checkpoint.checkpoint` (the same arguments, but "
        "`use_reentrant=False`)"
    )
    raised = observed.raised
    if raised is not None:
        line = f" at {raised.line.rpartition('/')[2]}" if raised.line else ""
        mend = f"{ours}: with it the step was right." if observed.right_with_regions else raised.advice
        yield _found(
            starred_path(raised.module) or evidence.name,
            f"the step raised {raised.text}{line}; without recomputation it raises nothing.",
            "one real step as it is, and one in which each checkpoint and region is a plain call.",
            mend or f"{FAILS}.",
        )
    elif observed.differ and not observed.cut_off:
        worst = max(observed.differ, key=lambda one: one.distance)
        yield _found(
            starred_path(worst.name.removeprefix("the gradient of ").rpartition(".")[0]) or evidence.name,
            f"{counted(len(observed.differ), 'gradient')} are wrong: {worst.name} {worst.detail}.",
            "two real steps from the same state, one as it is and one in which torch's checkpoints are plain calls.",
            f"{ours}: with it the gradients were right."
            if observed.right_with_regions
            else "`audit(model, args)` with `torch_recompute.checkpoint`: it names the operation that differs.",
            gradients=len(observed.differ),
            distance=worst.distance,
        )


# --- memory -----------------------------------------------------------------------------------------------------------


def _kept_alive(evidence: Evidence, observed: Observations) -> Iterator[_Found]:
    """Finds memory of a step that is still there when the next one begins."""
    kinds = () if observed.raised else observed.kept.items()
    by_holder = grouped(kinds, lambda item: (item[1].backward, item[1].in_graph, _place(item[1].holder)))
    for (backward, in_graph, holder), of in by_holder.items():
        nbytes, steps = sum(kept.nbytes for _, kept in of), max(kept.steps for _, kept in of)
        modules = list(dict.fromkeys(starred_path(path) for path, _ in of))
        what = f"{_size(nbytes)} that {', '.join(modules[:SHOWN])} returned in {counted(steps, 'step')} are alive"
        refers = holder or "a variable"
        if not backward:
            seen = f"{what}: no backward went through them, and their losses are kept."
            write = "run forwards without a backward under `torch.no_grad()`; or write `total += loss.item()`."
        elif in_graph:
            seen = f"{what} after backward: a graph that was not freed holds them, and {refers} refers to it."
            write = f"`loss.backward()` without `retain_graph=True`; or a detached copy instead of {refers}."
        elif holder.startswith("ctx."):
            seen = f"{what} after backward: {holder} refers to its own result, until the garbage collector runs."
            write = "`ctx.save_for_backward` instead of the attribute: backward frees what it saves."
        else:
            seen = f"{what} after backward: {refers} refers to them."
            alone = "only what you need, such as `x.detach().mean().item()`"
            write = f"put {alone}, into {refers}; or empty it after each step."
        yield _found(
            "the training loop" if not backward or in_graph else refers,
            seen,
            "real steps: what modules returned was looked for when the step was over, and who refers to it.",
            write,
            nbytes=nbytes,
            steps=steps,
        )
    yield from _of_the_loop(observed)


def _of_the_loop(observed: Observations) -> Iterator[_Found]:
    """Finds memory that another order, or another argument, in the training loop frees."""
    summed = observed.summed
    if summed is not None and summed.nbytes > summed.alone:
        yield _found(
            "the training loop",
            f"the losses of {summed.forwards} forwards are added up before one backward: {_size(summed.nbytes)} that "
            f"their modules returned are alive at once; the largest forward alone needs {_size(summed.alone)}.",
            "real steps: the sum was taken apart when backward began; the graphs of its parts share only parameters.",
            f"`(loss / {summed.forwards}).backward()` after each forward, or `loss.backward()` where the sum is meant.",
            forwards=summed.forwards,
            nbytes=summed.nbytes,
            alone_nbytes=summed.alone,
        )
    if observed.zeroed_bytes:
        yield _found(
            "the training loop",
            f"{_size(observed.zeroed_bytes)} of gradients are alive in forward, and all of them are zero.",
            "real steps: the gradients were looked at when a forward began.",
            "`optimizer.zero_grad()`, whose default it is to set them to None.",
            nbytes=observed.zeroed_bytes,
        )


def _over_budget(evidence: Evidence, simulated: SimulatedSteps) -> Iterator[_Found]:
    """Finds a step that does not fit into the budget, and the nearest plan that does."""
    step, budget = simulated.step, evidence.budget
    if budget is None or step.peak_bytes <= budget:
        return
    where = f" of {step.peak.module}" if step.peak.module else ""
    kinds = ", ".join(f"{name} {_size(count)}" for name, count in step.by_category.items() if count)
    yield _found(
        evidence.name,
        f"the peak is {_size(step.peak_bytes)}, {_size(step.peak_bytes - budget)} more than the budget, in "
        f"{step.peak.phase}{where}: {kinds}.",
        f"one simulated step, counted: {step.loop}.",
        _plan_within(simulated, budget),
        peak_bytes=step.peak_bytes,
        budget_bytes=budget,
    )


def _plan_within(simulated: SimulatedSteps, budget: int) -> str:
    try:
        plan = simulated.best(budget)
    except errors.BudgetError as error:
        if simulated.step.logits_bytes >= OF_LOSS * simulated.step.peak_bytes:
            return f"{TILES} No plan of regions takes less than {_size(error.smallest)}."
        return (
            f"a smaller batch, or an optimizer with less state, or shard the model: no plan takes less than "
            f"{_size(error.smallest)}."
        )
    except errors.ArgumentError as error:
        return f"`recompute(fn)` around its largest parts: the planner cannot plan it ({str(error).splitlines()[0]})"
    promise = plan.prediction
    assert promise is not None
    return (
        f"{_plan_for(budget)}: {len(plan)} regions, a peak of "
        f"{_size(promise.peak_bytes)}, a step that takes {promise.step_seconds / promise.plain_step_seconds - 1:+.1%}."
    )


def _fragmentation(evidence: Evidence, observed: Observations) -> Iterator[_Found]:
    """Finds memory that the allocator holds in pieces that fit nothing: fragmentation, which no recomputation helps."""
    stats = observed.allocator
    if stats is None:
        return
    unused = stats.reserved_bytes - stats.allocated_bytes
    limit = stats.total_bytes if evidence.budget is None else min(evidence.budget, stats.total_bytes)
    short = stats.retries > 0 or stats.reserved_bytes >= FULL * limit
    if not short or not fragmented(stats.allocated_bytes, stats.reserved_bytes):
        return
    yield _found(
        stats.device,
        f"{_size(stats.allocated_bytes)} were allocated at most and {_size(stats.reserved_bytes)} reserved, of "
        f"{_size(stats.total_bytes)}: {_size(unused)} were unused, in fragments. The allocator freed its cache and "
        f"retried {times(stats.retries)}.",
        "torch.cuda.memory_stats, the peaks of the steps that were watched.",
        against_fragmentation(),
        allocated_bytes=stats.allocated_bytes,
        reserved_bytes=stats.reserved_bytes,
        retries=stats.retries,
    )


def _loss_head(evidence: Evidence, simulated: SimulatedSteps) -> Iterator[_Found]:
    """Finds a peak in tensors as wide as the logits, where regions lower it by little or the budget is exceeded."""
    step, plain = simulated.step, simulated.plain
    over = evidence.budget is not None and step.peak_bytes > evidence.budget
    little = bool(evidence.plan) and step.peak_bytes > (1 - LOWERED) * plain.peak_bytes
    if step.logits_bytes < OF_LOSS * step.peak_bytes or not (over or little):
        return
    yield _found(
        evidence.name,
        f"the peak is {_size(step.peak_bytes)}, and {_size(plain.peak_bytes)} without the plan. "
        + step.advice.partition(" Compute ")[0],
        "two simulated steps, with the plan and without, and the tensors alive at the peak.",
        TILES,
        logits_bytes=step.logits_bytes,
        peak_bytes=step.peak_bytes,
        plain_peak_bytes=plain.peak_bytes,
    )


def _output_held(evidence: Evidence, simulated: SimulatedSteps) -> Iterator[_Found]:
    """Finds an output that the training loop holds through backward, when backward needs the loss alone."""
    step = simulated.step
    if step.loop.output_bytes < HELD * step.peak_bytes:
        return
    released = simulated.released()
    if step.peak_bytes - released.peak_bytes < HELD * step.peak_bytes:
        return
    yield _found(
        "the training loop",
        f"`out` of `out = model(...)` keeps {_size(step.loop.output_bytes)} alive through backward, the optimizer's "
        f"step and the next forward, though only the loss is needed: the peak is {_size(step.peak_bytes)}, and "
        f"{_size(released.peak_bytes)} if you free the output.",
        "two simulated steps, with the output held and without.",
        "keep only the loss, or `del out` before `loss.backward()`; then plan with `hold_output=False`. Trainers of "
        "Hugging Face and Lightning free the output: pass `hold_output=False` there, too.",
        held_bytes=step.loop.output_bytes,
        peak_bytes=step.peak_bytes,
        released_peak_bytes=released.peak_bytes,
    )


def _optimizer_state(evidence: Evidence, simulated: SimulatedSteps) -> Iterator[_Found]:
    """Finds a budget filled by what no recomputation frees, or a peak in the optimizer's step."""
    step, budget, gradients = simulated.step, evidence.budget, simulated.gradient_bytes
    kept = {name: step.live_by_category[name] for name in ("parameters", "buffers", "optimizer")}
    lasting = sum(kept.values()) + gradients
    in_step = step.peak.phase == "optimizer" and bool(simulated.accounts)
    fills = budget is not None and lasting > FILLED * budget
    if not fills and not (in_step and (budget is None or step.peak_bytes > budget)):
        return
    of = f" of a budget of {_size(budget)}" if budget is not None else f" of a peak of {_size(step.peak_bytes)}"
    where = " The peak is in the optimizer's step, where no activation is alive." if in_step else ""
    yield _found(
        evidence.name,
        f"parameters and buffers {_size(kept['parameters'] + kept['buffers'])}, gradients {_size(gradients)}, "
        f"optimizer state {_size(kept['optimizer'])}: {_size(lasting)}{of}. No recomputation frees any of it.{where}",
        "one simulated step, with every storage counted by what it is for.",
        "weights and their gradients sharded over ranks (`torch.distributed.fsdp.fully_shard`), an optimizer with less "
        "state (8-bit, or factored as `torch.optim.Adafactor`), or gradients that are released in backward "
        "(`torch.Tensor.register_post_accumulate_grad_hook`).",
        lasting_bytes=lasting,
        optimizer_bytes=kept["optimizer"],
        peak_bytes=step.peak_bytes,
    )


def _never_again(evidence: Evidence, observed: Observations) -> Iterator[_Found]:
    """Finds checkpointing that is turned on but has no effect, because the module is in eval mode."""
    for where, paths in grouped(observed.never_again, starred_path).items():
        yield _found(
            where or evidence.name,
            "its checkpointing is on (gradient_checkpointing=True), but it is in eval mode: nothing was recomputed, "
            "and all activations were kept.",
            f"{observed.steps} real steps, in which calls of modules in backward were counted.",
            "`model.train()` before the training loop: models that from_pretrained returns are in eval mode.",
            modules=len(paths),
        )


def _saves_nothing(evidence: Evidence, simulated: SimulatedSteps) -> Iterator[_Found]:
    """Finds regions with nothing to drop or that keep as much as they free, and choices whose modules were not called.

    Also a single checkpoint of another library or written by hand, without which the peak is no higher.
    """
    for account in simulated.outermost:
        if account.dropped_bytes and not account.freed_bytes and account.held_bytes:
            yield _of_regions(
                account,
                f"dropped {_size(account.dropped_bytes)} and kept {_size(account.pinned_bytes + account.held_bytes)} "
                "that a plain call does not keep: they free nothing.",
                f"{WALKED}{evidence.compared(account.name)}.",
                f"{evidence.without_it(account.name)}, or a region that reaches back to where its input is made.",
                ("dropped_bytes",),
                freed_bytes=0,
            )
        if not account.dropped_bytes:
            yield _of_regions(
                account,
                "dropped 0 bytes: autograd saves only inputs and parameters there, which are alive anyway.",
                "one simulated step, in which each tensor that autograd saved in a region was "
                f"counted{evidence.compared(account.name)}.",
                f"{evidence.without_it(account.name)}, or a region that reaches to where its result is consumed.",
                dropped_bytes=0,
            )
        yield from _lowers_no_peak(evidence, simulated, account)
    called = {path for account in simulated.accounts for path in account.paths}
    choices = () if evidence.plan is None else evidence.plan.choices
    idle = [choice.paths[0] for choice in choices if not called & set(choice.paths)]
    for name, paths in grouped(idle, starred_path).items():
        yield _found(
            name if len(paths) > 1 else paths[0],
            f"{counted(len(paths), 'region')} of the plan never ran: {paths[0]} was not called with gradients.",
            "one simulated step, in which the calls of every region were counted.",
            f"a plan without {name}; or call the module: a model in eval mode may skip it.",
            regions=len(paths),
        )


def _lowers_no_peak(evidence: Evidence, simulated: SimulatedSteps, account: Account) -> Iterator[_Found]:
    """Finds a single checkpoint of another library, as around the last layer, without which the peak is no higher."""
    if account.calls > 1 or account.freed_bytes <= 0 or not simulated.foreign.issuperset(account.paths):
        return
    peak, without = simulated.counted.peak_bytes, simulated.without(account.where).peak_bytes
    if account.replay_ops and peak >= without:
        yield _found(
            account.where,
            f"one checkpoint drops {_size(account.freed_bytes)} and does not lower the peak: that is {_size(peak)} "
            f"with it and {_size(without)} without it, and {account.replay_ops} operations run again.",
            "two simulated steps, with the checkpoint as a region and without it.",
            f"{evidence.without_it(account.where)}: what the last layer drops, backward needs at once.",
            peak_bytes=peak,
            peak_without_bytes=without,
        )


def _is_pinned(account: Account) -> bool:
    return 0 < account.dropped_bytes <= account.pinned_bytes / PINNED


def _is_fused_attention(account: Account) -> bool:
    return 0 < FUSED * account.forward_flops <= account.attention_flops


def _output_pins(evidence: Evidence, simulated: SimulatedSteps) -> Iterator[_Found]:
    """Finds regions most of whose bytes are held elsewhere: they drop their own result, which the next operation saves.

    So it is with fused attention, softmax, and every activation function that is differentiated by its result.
    """
    for account in simulated.outermost:
        if account.stashed_bytes > HELD * simulated.step.saved_bytes:
            yield _of_regions(
                account,
                f"keep {_size(account.stashed_bytes)} in {account.stashed_by[0]}: a region drops what is saved for "
                "backward, but not attributes of ctx.",
                f"{WALKED}.",
                "`ctx.save_for_backward` instead of the attribute.",
                ("stashed_bytes",),
            )
        if not _is_pinned(account) or account.freed_bytes < 0 or _is_fused_attention(account):
            continue  # what is worse than this has a kind of its own
        yield _of_regions(
            account,
            f"dropped {_size(account.dropped_bytes)}, of which {_size(account.pinned_bytes)} are held by "
            f"{', '.join(account.pinned_by)}.",
            f"{WALKED}{evidence.compared(account.name)}.",
            "extend the region through the consumer, as a saved call: `recompute(lambda x: "
            "no_recompute(consumer)(fn(x)))(x)`; or use no region here.",
            ("dropped_bytes", "pinned_bytes", "freed_bytes"),
        )


def _made_worse(evidence: Evidence, simulated: SimulatedSteps) -> Iterator[_Found]:
    """Finds regions that keep more than they free: the input of an operation that is differentiated by its result."""
    for account in simulated.outermost:
        plain = evidence.without(account.name) if account.freed_bytes < 0 else None
        if account.freed_bytes >= 0 or (plain is not None and plain.saved_bytes >= simulated.step.saved_bytes):
            continue
        yield _of_regions(
            account,
            f"keep {_size(account.held_bytes)} of inputs that nothing else keeps, and free only "
            f"{_size(account.dropped_bytes - account.pinned_bytes)}: {_size(-account.freed_bytes)} more is kept than "
            "by the plain call.",
            f"{WALKED}{evidence.compared(account.name)}.",
            f"{evidence.without_it(account.name)}: the result of such an operation is all that its backward needs.",
            ("held_bytes", "freed_bytes"),
        )


# --- time -------------------------------------------------------------------------------------------------------------


def _is_nested(account: Account) -> bool:
    return bool(account.inside) and account.replay_ops > account.forward_ops


def _is_for_attention_alone(account: Account) -> bool:
    """Returns whether its replays compute fused attention alone, and free no more than its results."""
    return 0 < FUSED * account.replay_flops <= account.attention_replays and (
        account.freed_bytes <= account.attention_bytes
    )


def _needless(evidence: Evidence, simulated: SimulatedSteps) -> dict[str, _Found]:
    """Finds regions around little but other regions that lower the peak by little, by name with `*` for numbers."""
    found: dict[str, _Found] = {}
    step = simulated.counted if simulated.foreign else simulated.step
    for account in simulated.outermost:
        inner = [one for one in simulated.accounts if _is_named(account.paths[0], one.inside)]
        own, ops = account.forward_ops, account.forward_ops + sum(one.forward_ops for one in inner)
        if not inner or account.forward_flops or own > (1 - FUSED) * ops:
            continue
        without = simulated.without(account.name)
        freed, replayed = without.peak_bytes - step.peak_bytes, step.flops["replay"] - without.flops["replay"]
        over = evidence.budget is not None and without.peak_bytes > evidence.budget
        if freed >= LOWERED * without.peak_bytes or over or replayed <= 0:
            continue
        found[starred_path(account.paths[0])] = _of_regions(
            account,
            f"around {', '.join(one.name for one in inner)}, which are regions too, and little else: the peak is "
            f"{_size(max(freed, 0))} lower, and {_gflop(replayed)} more are replayed "
            f"({_gflop(step.flops['replay'])} in all).",
            f"two simulated steps: the peak is {_size(step.peak_bytes)}, and {_size(without.peak_bytes)} without it.",
            f"{evidence.without_it(account.name)}; the regions in it stay.",
            freed_bytes=freed,
            replayed_flops=replayed,
        )
    return found


def _recomputed_twice(evidence: Evidence, simulated: SimulatedSteps) -> Iterator[_Found]:
    """Finds regions whose operations are replayed more than once, and attention that is run again for little.

    An inner region runs in the forward, in the replay of the outer one, and in its own, which may lower the peak. An
    outer one of which each part is a region already frees the inputs of these. A region around a fused attention alone
    runs the whole kernel once more and frees little.
    """
    needless = _needless(evidence, simulated)
    yield from needless.values()
    for account in simulated.accounts:
        if account.inside in needless:
            continue
        if _is_nested(account):
            yield from _nested_region(evidence, simulated.step, account)
        elif _is_fused_attention(account) and _is_pinned(account) and account.replay_flops:
            yield _of_regions(
                account,
                "hold a fused attention, whose backward recomputes the scores itself; its forward runs once "
                f"more ({_gflop(account.replay_flops)}) and frees only {_size(account.freed_bytes)}, since its result "
                f"is held by {', '.join(account.pinned_by)}.",
                BY_REGION,
                f'no region on {account.name}; in a region around the whole layer, keep it: `keep=("@attention",)`.',
                ("replay_flops", "freed_bytes"),
            )
        elif not account.inside and _is_for_attention_alone(account):
            yield _of_regions(
                account,
                f"run a fused attention again ({_gflop(account.attention_replays)}), and free "
                f"{_size(account.freed_bytes)}, no more than its results ({_size(account.attention_bytes)}): fused "
                "attention does not keep the scores.",
                BY_REGION,
                f"a plan without {account.name}; or a region around more than the attention that keeps it, as "
                '`keep=("@attention",)` says (attention_output among recompute_modules).',
                replay_flops=account.attention_replays,
                freed_bytes=account.freed_bytes,
            )


def _nested_region(evidence: Evidence, step: Simulation, account: Account) -> Iterator[_Found]:
    """Finds a region that runs in the replay of the region around it and again in its own, for little memory."""
    around = account.inside or "the model"
    outer = evidence.without(account.name)
    confirmed = "one simulated step, in which operations were counted by the region they ran in"
    if outer is not None:
        if step.peak_bytes < (1 - WORTH) * outer.peak_bytes:
            return  # it pays: in the replay of the outer one, less is alive at once
        confirmed += f"; the peak is {_size(step.peak_bytes)} with it and {_size(outer.peak_bytes)} without"
    yield _of_regions(
        account,
        f"are in {around}, which is a region too: {account.forward_ops} operations in forward, "
        f"{account.replay_ops} in replays ({_gflop(account.replay_flops)} replayed, {_gflop(account.forward_flops)} "
        "in one forward).",
        f"{confirmed}.",
        f"one of the two: {evidence.without_it(account.name)}, or {evidence.without_it(around)}.",
        ("forward_ops", "replay_ops"),
    )


def _called_twice(evidence: Evidence, observed: Observations) -> Iterator[_Found]:
    """Finds a checkpoint of another library inside a region, or around one, by the calls of the modules in it."""
    if evidence.simulated is not None and any(map(_is_nested, evidence.simulated.accounts)):
        return
    if observed.raised or observed.differ:
        return  # another function was called than in forward
    calls, again = observed.calls, observed.calls_in_backward
    third = grouped([path for path, count in again.items() if calls[path] and count >= 2 * calls[path]], starred_path)
    for name, paths in third.items():
        if any(other != name and name.startswith(f"{other}.") for other in third):
            continue
        path = paths[0]
        yield _found(
            name,
            f"{path or 'the model'} was called {times(calls[path])} in forward and {times(again[path])} in "
            "backward: one recomputation is inside another.",
            f"{observed.steps} real steps, in which each module's calls were counted.",
            "recompute in one place only: turn the model's own checkpointing off where a plan is in it (a model of "
            "transformers has gradient_checkpointing_disable for that), or leave the module out of the plan.",
            calls_in_forward=calls[path],
            calls_in_backward=again[path],
        )


def _is_near_its_bound(evidence: Evidence) -> bool:
    """Returns whether, by the plan's own bound, no schedule is much better."""
    gap = None if evidence.plan is None else evidence.plan.gap
    return gap is not None and gap <= NEAR


def _replayed_flops(evidence: Evidence, simulated: SimulatedSteps) -> Iterator[_Found]:
    """Finds replays that take much of the step's FLOPs, and the unit that is replayed most."""
    total = sum(simulated.regions.flops.values())
    by_name = merged(simulated.regions.by_name.values(), lambda one: one.tiled)
    accounts = [account for account in by_name if not account.tiled]
    replay = sum(account.replay_flops for account in accounts)
    if not total or replay <= REPLAYED * total or _is_near_its_bound(evidence) or simulated.foreign:
        return
    most = max(accounts, key=lambda account: account.replay_flops)
    budget = simulated.step.peak_bytes if evidence.budget is None else evidence.budget
    in_plan = bool(evidence.plan)
    try:
        better = simulated.best(budget) if in_plan else simulated.best_without(budget)
    except errors.ArgumentError:  # no budget that the planner can meet, or nothing that it could plan
        return
    flops = better.predicted_replay_flops or 0
    if flops > replay - NEAR * total:
        return
    mend = _plan_for(budget) + ("" if in_plan else " instead of the regions in the code")
    yield _found(
        most.where,
        f"replays are {replay / total:.0%} of the step's FLOPs ({_gflop(replay)} of {_gflop(total)}), "
        f"{most.replay_flops / replay:.0%} of them in {most.name or 'the model'}.",
        "one simulated step, in which FLOPs of products and attention were counted by phase and region; and a plan "
        "that was made for the same memory.",
        f"{mend}: it replays {_gflop(flops)} with the same memory.",
        share=replay / total,
        replay_flops=replay,
        better_replay_flops=flops,
        step_flops=total,
    )


def _replayed_seconds(evidence: Evidence, observed: Observations) -> Iterator[_Found]:
    """Finds replays that take much of the seconds of real steps."""
    if evidence.simulated is not None or _is_near_its_bound(evidence):
        return
    paths = grouped(observed.replay_seconds, starred_path)
    units = {name: sum(observed.replay_seconds[path] for path in of) for name, of in paths.items()}
    total, step = sum(units.values()), observed.seconds
    if not step or total <= REPLAYED * step:
        return
    most = max(units, key=lambda name: units[name])
    yield _found(
        most,
        f"replays take {total / step:.0%} of the step ({1000 * total:,.1f} of {1000 * step:,.1f} "
        f"ms), {units[most] / total:.0%} of that in {most or 'the model'}.",
        f"{observed.steps} real steps, in which each replay and each step were timed.",
        "a plan of `make_plan` for the memory that the device has: it replays what costs least; or "
        f'`keep=("@product",)` for {most or "the model"}.',
        share=total / step,
        replay_seconds=total,
        step_seconds=step,
    )


def _fallbacks(evidence: Evidence, observed: Observations) -> Iterator[_Found]:
    """Finds graph breaks and other reasons for which `torch.compile` and its CUDA graphs ran something eagerly."""
    for reason, count in observed.fallbacks.items():
        if reason == NO_CUDA_GRAPH:
            what = "what was compiled ran without a CUDA graph"
            write = (
                "TORCH_LOGS=cudagraphs before the command: torch then says why, and at which line. What regions need "
                "in CUDA graphs is in docs/cuda-graphs.md."
            )
        elif reason.startswith(CUT_REGION):
            what = (
                "the region could not be traced whole, because of a graph break or because it assigns to something "
                "outside: it ran as it does without torch.compile, and what it calls was compiled in parts"
            )
            write = "`torch.compile(model, fullgraph=True)` to see the line, and that call outside of the region."
        else:
            what = "the compiled graph was cut in two"
            if observed.resumed:
                what += f" (it goes on in {', in '.join(observed.resumed[:SHOWN])})"
            write = (
                "move the call that is not compiled outside the compiled part; `torch.compile(model, fullgraph=True)` "
                "shows where it is."
            )
        yield _found(
            evidence.name,
            f"{reason}: {times(count)}. There {what}, and no plan reaches across the cut.",
            "the compiler's own counters, of all that was compiled since the process began: the model was before."
            if observed.compiled_before
            else "the compiler's own counters, before and after the steps.",
            write,
            count=count,
        )


def _masks_drawn_again(evidence: Evidence, observed: Observations) -> Iterator[_Found]:
    """Finds dropout in compiled code under a budget of the compiler's own."""
    for where, modules in grouped(observed.drawn_again, starred_path).items():
        yield _found(
            where,
            "Its dropout is compiled while torch._functorch.config.activation_memory_budget is below 1: what backward "
            "runs again may draw other masks than the forward, and gradients are then wrong (pytorch#190758).",
            "the setting and the modules, after the steps.",
            'the setting back to 1.0, and `torch.compile(model, options=Partition("40%").options)` with '
            "`torch_recompute.compiling.Partition`, which keeps the masks; or a plan.",
            modules=len(modules),
        )


def _no_cuda_allocator(evidence: Evidence) -> str:
    without = evidence.observed is not None and evidence.observed.allocator is None
    return "the model is not on a CUDA device, whose allocator it is about" if without else ""


def _no_output_held(evidence: Evidence) -> str:
    held = evidence.simulated is None or evidence.simulated.step.loop.hold_output
    return "" if held else "the training loop holds no output (hold_output=False)"


# Attributes and tensors that no module owns are not put back by a replay.
_CHANGED = _audited("mutates", confirmed="each region was run twice, and what was changed outside it was compared.")

# In the order in which findings are shown: what gives wrong results first, then memory, then time.
CHECKS = (
    Check("frozen_input", observed=_frozen_input),
    Check("not_deterministic", observed=_replays_otherwise, audited=_audited("differs", "flips", "fails")),
    Check("updated_twice", observed=_buffers_updated_twice, audited=_CHANGED),
    Check("reentrant", observed=_reentrant),
    Check("masks_drawn_again", observed=_masks_drawn_again),
    Check("over_budget", simulated=_over_budget, unless=lambda e: "no budget was given" if e.budget is None else ""),
    Check("fragmentation", observed=_fragmentation, unless=_no_cuda_allocator),
    Check("loss_head", simulated=_loss_head),
    Check("output_held", simulated=_output_held, unless=_no_output_held),
    Check("kept_alive", observed=_kept_alive),
    Check("optimizer_state", simulated=_optimizer_state),
    Check("saves_nothing", simulated=_saves_nothing, observed=_never_again),
    Check("output_pins", simulated=_output_pins),
    Check("made_worse", simulated=_made_worse),
    Check("double_recompute", simulated=_recomputed_twice, observed=_called_twice),
    Check("replay_share", simulated=_replayed_flops, observed=_replayed_seconds),
    Check("host_syncs", audited=_audited("syncs")),
    Check("fallbacks", observed=_fallbacks),
)
KINDS = tuple(check.kind for check in CHECKS)


# --- words and figures ------------------------------------------------------------------------------------------------


def _size(count: float) -> str:
    """Returns bytes in the unit that suits them, or exactly where they are few."""
    return errors.size(round(count)) if count >= 2**20 else f"{int(count):,} bytes"


def _place(holder: str) -> str:
    """Returns the name of what refers to a tensor, with a star for each index of a list and each layer."""
    return re.sub(r"\[\d+\]", "[*]", starred_path(holder))


def _budget(count: int) -> str:
    """Returns a number of bytes as `budget=` takes it: a text if it means exactly as many."""
    text = as_budget(count)
    return f'"{text}"' if read_budget(text).bytes == count else str(int(count))


def _plan_for(count: int) -> str:
    """Returns what to write for a plan within so many bytes, for the step that was examined."""
    return f"apply the plan of `make_plan` for this step and `budget={_budget(count)}`"


def _gflop(count: float) -> str:
    return f"{count / 1e9:,.3g} GFLOP"
