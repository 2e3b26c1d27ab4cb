"""The peak of a stated configuration: no search, the step as it is with what someone has written down.

Before anyone asks which layers to recompute, they ask what *this* run takes. A configuration is a word that `plan_of`
reads ("none", "full", labels, a file), a plan or settings; the step is simulated under each, and what is alive at its
peak is split by what it is for.

    "none,full"                several configurations
    "core_attn,mlp"            the labels of one: those that only commas separate
    "none,core_attn,mlp,full"  three: a word that is no label ends the labels before it
    ["core_attn", "mlp"]       two of one label each

Seconds are sums of the prices of all operations, as those of a plan are, so the two can be compared. Rejected: making
a `Prediction` of it, whose bound and whose lines need the trials of a profile that nobody asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple, cast

from torch import nn

from .. import errors
from ..errors.text import close_to, counted, doing, listed, shown, table
from ..memory.ledger import Block, Place, largest
from ..memory.operations import Operation
from ..memory.reserved import EXPANDABLE, in_brief, in_words
from ..plan.apply import apply
from ..plan.config import FILES, Policy, RecomputeConfig, find, plan_of
from ..plan.labels import choices, matching, notes
from ..plan.plan import Plan
from ..plan.units import find_units
from ..simulation import Simulation, simulate_step, with_carried_state
from ..simulation.devices import Roofline
from ..simulation.recording import SHARDING
from ..simulation.training_step import TrainingStep, elements
from ..stores import Bandwidth
from .hosts import NO_OPTIONS, PlanOptions, stores_for, waited
from .ops import StepLog
from .prices import Measured, prices_for
from .segments import segment_paths
from .sent import Sent, parts_of, sent, unknown_network, update_seconds
from .tiling import tiled

PEAK_WORDS: Mapping[str, str] = {
    "most": "where it was looked for: the tokens in a sequence, or the items in a batch, that the budget holds",
    "peak": "the most bytes alive at one moment of the step; from weights to the seconds is what it is made of then",
    "reserved": "what PyTorch's CUDA allocator takes from the device: the peak, and what is free in its segments; with "
    "--budget fit within what the device has for it",
    "weights": "parameters and buffers",
    "gradients": "of the parameters; where they are gone when forward begins, those that backward has made by then",
    "states": "of the optimizer, which are there all the time",
    "kept by layers": "activations that the forward keeps for its backward, but for those of the loss",
    "loss": "what the loss makes, and what is as wide as the logits: these, copies in 32 bits, their gradients",
    "transient": "all else that passes: gradients of activations, what a replay or the optimizer's step makes, "
    "workspaces",
    "buffers of ranks": "weights that FSDP has gathered, whole gradients, and what it sends and receives; "
    "or the buckets in which DDP holds all gradients once more",
    "batch and output": "the call's tensors, and in forward the output that the step before has left",
    "step ms": "the time of the whole step",
    "replays ms": "what replays add to it",
}
"""The words of configurations, as they are printed."""
Configurations = Policy | Sequence[Policy]
_WORDS = ("none", "full", "selective")
NO_WAITS = "not in the seconds", "copies to host memory and back that take longer than what is computed meanwhile"


@shown
@dataclass(frozen=True, repr=False)
class ConfiguredStep:
    """A training step under one configuration.

    Attributes:
        name: The configuration, as it was written.
        plan: The regions that it means in the model.
        simulation: The step with them, simulated.
        step_seconds: Of all its operations; of those that are accumulated, of all.
        replay_seconds: What replays add to them.
        device: What the seconds are of.
        timing: Where they are from, in words; "" for a data sheet.
        host_bytes: The most that is kept in host memory.
        sent: What a rank sends; those seconds that FSDP hides behind what is computed are not in the step's.
        per_parameter: Bytes of weights per parameter, and of gradients and states per trained one, on all ranks.
        tiled: What is made in tiles of tokens and by how much results differ, or why nothing is; if tiles are allowed.
        waited_seconds: Of the step's, those that copies of regions' inputs take longer than what hides them; None
            where they are not counted, since how fast host memory is reached was not asked.
        most: The tokens in a sequence, or the items in a batch, where the most was looked for; else 0.
        limited: The most that PyTorch's CUDA allocator may reserve, where the most was looked for, and with "fit" the
            bytes that it reserves under that limit; as the fields of a `Prediction`.
    """

    name: str
    plan: Plan
    simulation: Simulation
    step_seconds: float
    replay_seconds: float
    device: str
    timing: str = ""
    host_bytes: int = 0
    sent: tuple[Sent, ...] = ()
    per_parameter: Mapping[str, float] = field(default_factory=dict[str, float])
    tiled: tuple[str, ...] = ()
    waited_seconds: float | None = None
    most: int = 0
    limited: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at any time of the step."""
        return self.simulation.peak_bytes

    @property
    def made_of(self) -> dict[str, int]:
        """The bytes of the peak by what they are for; they sum to it."""
        return made_of(self.simulation)

    @property
    def largest(self) -> tuple[Block, ...]:
        """The largest tensors that are alive at the peak, the largest first."""
        return largest_at_peak(self.simulation)

    @cached_property
    def reserved_bytes(self) -> dict[str, int]:
        """The bytes that PyTorch's CUDA allocator reserves, without and with expandable segments; none elsewhere."""
        return self.simulation.reserved_figures()

    @property
    def reserves(self) -> str:
        """The bytes that the allocator reserves, beside the most that it may, in brackets; "" without such a limit."""
        room, limited = (self.limited.get(name, 0) for name in ("room_bytes", "limited_bytes"))
        said = in_brief(self.reserved_bytes["reserved_bytes"], room, limited) if room else ""
        return f" ({said})" if said else ""

    def as_data(self) -> dict[str, Any]:
        """The figures as plain data, with the plan as `Plan.from_json` reads it from its JSON."""
        peak = self.simulation.peak
        return {
            "recompute": self.name,
            **({"most": self.most} if self.most else {}),
            "peak_bytes": self.peak_bytes,
            **self.reserved_bytes,
            **self.limited,
            "made_of": parts_as_data(self.made_of),
            "peak": {"phase": peak.phase, "module": peak.module, "op": peak.op},
            "largest": [*map(tensor_as_data, self.largest)],
            "step_seconds": self.step_seconds,
            "replay_seconds": self.replay_seconds,
            "replay_flops": self.simulation.flops["replay"],
            "host_bytes": self.host_bytes,
            **({} if self.waited_seconds is None else {"waited_seconds": self.waited_seconds}),
            "sent": [one.as_data() for one in self.sent],
            "bytes_per_parameter": {name.replace(" ", "_"): each for name, each in self.per_parameter.items()},
            **({"tiled": list(self.tiled)} if self.tiled else {}),
            "regions": len(self.plan),
            "advice": self.simulation.advice,
            "assumed": list(self.simulation.assumed),
        }

    def __str__(self) -> str:
        return "\n".join(_lines([self]))


@shown
class ConfiguredSteps(tuple[ConfiguredStep, ...]):
    """A training step under several configurations, in the order in which they were asked for."""

    __slots__ = ()

    def named(self, name: str) -> ConfiguredStep:
        """The step under the configuration of that name.

        Raises:
            KeyError: There is none.
        """
        return {one.name: one for one in self}[name]

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def peaks_of(
    step: TrainingStep, plans: Mapping[str, Plan], plan_options: PlanOptions = NO_OPTIONS, dashes: str = ""
) -> ConfiguredSteps:
    """Returns the step under each of some plans, by name; `peaks` is this with words.

    Raises:
        ArgumentError: None has a region whose inputs could be kept in host memory, as `plan_options` wants, or see
            `PlanOptions`.
    """
    link = plan_options.link(step.where.roofline, step.runs_on)
    plans = stated(plans, plan_options, dashes)
    price = prices_for(step, step.runs_on)
    found = ConfiguredSteps(_configured(step, name, plan, price, link) for name, plan in plans.items())
    if plan_options.tiles:
        found = ConfiguredSteps(_in_tiles(step, one, price, link) for one in found)
    if isinstance(price, Measured):
        price.keep()
    return found


def made_of(found: Simulation) -> dict[str, int]:
    """Returns the bytes of a simulated peak by what they are for; they sum to it."""
    by, use = found.by_category, found.activations_by_use
    states = min(by["optimizer"], found.live_by_category["optimizer"])  # besides, what its step makes meanwhile
    return {
        "weights": by["parameters"] + by["buffers"],
        "gradients": by["gradients"],
        "states": states,
        "kept by layers": use["saved"],
        "loss": use["loss"],
        "transient": use["transient"] + by["optimizer"] - states,
        "buffers of ranks": use.get(SHARDING, 0),
        "batch and output": by["other"],
    }


def largest_parts(parts: Mapping[str, int], peak: int) -> str:
    """Returns parts of a peak in words, the largest first, without those below a hundredth of it."""
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    return listed([f"{errors.size(nbytes)} {name}" for name, nbytes in ordered if 100 * nbytes >= peak])


def parts_as_data(parts: Mapping[str, int]) -> dict[str, int]:
    """Returns the parts of a peak as they are named in JSON."""
    return {f"{name.replace(' ', '_')}_bytes": nbytes for name, nbytes in parts.items()}


def stated(plans: Mapping[str, Plan], plan_options: PlanOptions, dashes: str = "") -> Mapping[str, Plan]:
    """Returns plans that somebody has stated, with the means that `plan_options` names.

    Raises:
        ArgumentError: None has a region whose inputs could be kept in host memory; or see `PlanOptions.stated`.
    """
    if plan_options.offload is not False and not any(plan.choices for plan in plans.values()):
        raise errors.ArgumentError(
            f"{'--offload' if dashes else 'offload=True'} keeps the inputs of regions in host memory, and "
            f"{listed([*plans])} has no region.\n  Write a configuration with regions, such as full."
        )
    return {name: plan_options.stated(plan, dashes) for name, plan in plans.items()}


class _Ran(NamedTuple):
    """A simulated step, its operations, and the most that is in host memory."""

    simulation: Simulation
    log: StepLog
    most_hosted: int


def _simulated(step: TrainingStep, plan: Plan) -> _Ran:
    log = StepLog(segment_paths(step.model), plan, ordered=step.ranks.fully_sharded)
    stores, most_hosted = stores_for(plan, step), 0

    def count(place: Place, operation: Operation) -> None:
        nonlocal most_hosted
        most_hosted = max(most_hosted, sum(store.host_bytes for store in stores.values()))
        log.see(place, operation)

    found = simulate_step(step, prepare=lambda copy: apply(copy, plan, stores=stores), watch=count)
    later = with_carried_state(step, found)
    return _Ran(found, log, most_hosted) if later is None else _simulated(later, plan)


def _configured(
    step: TrainingStep, name: str, plan: Plan, price: Roofline | Measured, link: Bandwidth | None
) -> ConfiguredStep:
    doing(f"simulating the step with {name}")
    found, log, most_hosted = _simulated(step, plan)
    times = step.loop.accumulate
    parts, updating = parts_of(log, price), update_seconds(log, price)
    once = parts.seconds(price.host)
    step_seconds = times * once + updating
    replay_seconds = times * (once - parts_of(log, price, plain=True).seconds(price.host))
    waits = 0.0
    if link is not None:
        forward = sum(price(op) * number for op, number in log.ops("forward").items())
        waits = times * waited(most_hosted, link, forward, once - forward)
    timing = price.timing if isinstance(price, Measured) else ""
    sends = sent(log.ops(), price, parts.hidden, times)
    words = price.name, timing, most_hosted + found.host_bytes, sends, _each(step, found)
    waiting = waits if link is not None and most_hosted else None
    return ConfiguredStep(name, plan, found, step_seconds + waits, replay_seconds, *words, waited_seconds=waiting)


def _each(step: TrainingStep, found: Simulation) -> dict[str, float]:
    """Bytes per parameter: of weights, and per trained one of gradients and states, here and in host memory."""
    weights = list(step.model.parameters())
    trained = [weight for weight in weights if weight.requires_grad]
    count, shards = sum(map(elements, trained)) or 1, step.ranks.shards
    each = {
        "weights": sum(weight.nbytes for weight in weights) / (sum(map(elements, weights)) or 1),
        "gradients": sum(weight.nbytes for weight in trained) / count,
        "states": found.live_by_category["optimizer"] * shards / count,
    }
    return {**each, **({"in host memory": found.host_bytes * shards / count} if found.host_bytes else {})}


def _in_tiles(
    step: TrainingStep, whole: ConfiguredStep, price: Roofline | Measured, link: Bandwidth | None
) -> ConfiguredStep:
    """A configuration with its head and its MLPs in tiles."""
    plan, words = tiled(step, whole.plan, whole.simulation)
    found = whole if plan == whole.plan else _configured(step, whole.name, plan, price, link)
    return replace(found, tiled=words)


# --- words ---


def configurations(what: str, recompute: object, step: TrainingStep) -> dict[str, Plan]:
    """Returns the plan of each configuration, by its name.

    Args:
        what: The option or the argument, for the texts of errors.
        recompute: See `peaks`.
        step: The step; a label that matches no module may name calls, which one call of the model shows.

    Raises:
        ArgumentError: One is no configuration, or matches nothing in this model.
    """
    several = [recompute] if isinstance(recompute, (str, Plan, RecomputeConfig, Mapping)) else recompute
    if not isinstance(several, Sequence) or not several:
        raise errors.ArgumentError(_no_configuration(what, recompute, step.model))
    found: dict[str, Plan] = {}
    for one in cast("Sequence[Any]", several):
        if isinstance(one, str):
            for words in _separated(what, one, step.model):
                found[words] = _plan_of_words(what, words, step)
        else:
            plan = plan_of(one, step.model)
            name = plan.source or "plan"
            found[name if name not in found else f"{name} ({len(found) + 1})"] = plan
    return found


def _is_label(word: str) -> bool:
    return word.partition(":")[0] not in ("full", "block", *_WORDS) and not word.endswith(FILES)


def _separated(what: str, text: str, model: nn.Module) -> list[str]:
    """The configurations in one text: labels that follow each other are one, every other word is one by itself."""
    if text.strip().startswith("--"):
        return [text]
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise errors.ArgumentError(_no_configuration(what, text, model))
    groups = ((labels, [*some]) for labels, some in groupby(words, _is_label))
    return [one for labels, some in groups for one in ([",".join(some)] if labels else some)]


def _plan_of_words(what: str, words: str, step: TrainingStep) -> Plan:
    if words.endswith(FILES):
        try:
            return plan_of(words, step.model)
        except OSError as error:
            raise errors.ArgumentError(
                f"{what} is {words!r}: {(error.strerror or str(error)).lower()}. Write the path of a file that holds a "
                "plan, from plan.to_json() or torch-recompute plan --out, or Megatron's fields in JSON or YAML."
            ) from error
    if not words.startswith("--") and (words == "selective" or _is_label(words)):
        labels = ["core_attn"] if words == "selective" else words.split(",")
        units = find_units(step.model)
        unknown = next((label for label in labels if not choices(units, label)), None)
        if unknown is not None:  # perhaps the name of calls, which a model with weights shows when it is called
            here = all(not weight.is_meta for weight in step.model.parameters())
            if not here or unknown not in find(step.model, *step.call).calls:
                raise errors.ArgumentError(_no_configuration(what, words, step.model, unknown))
            settings = RecomputeConfig(recompute_granularity="selective", recompute_modules=labels)
            return settings.plan(step.model, *step.call)
    return plan_of(words, step.model)


def _no_configuration(what: str, given: object, model: nn.Module, label: str = "") -> str:
    """Text for what says no configuration, or has a label that matches nothing in a model."""
    here = matching(find_units(model))
    known = listed([f"{word} ({counted(count, 'place')})" for word, count in here.items()]) or "none that match"
    found = f"of which {label!r} matches nothing in {type(model).__name__}" if label else "which says no configuration"
    close = close_to(label, [*_WORDS, *here], 1)
    return (
        f"{what} is {repr(given) if isinstance(given, str) else errors.say(given)}, {found}.{close}\n"
        "  Write none, full, full:2 (two layers as one region), block:3 (the first three layers), selective "
        "(Megatron's: core_attn), the path of a .json or .yaml file, or labels; here "
        f'{known}; paths of modules match too, and patterns such as "*.mlp".\n'
        "  Commas separate configurations, as in none,full; labels with only commas between, as in core_attn,mlp, are "
        "one."
    )


# --- text ---


def _lines(steps: Sequence[ConfiguredStep]) -> Iterator[str]:
    """The configurations as a table, and about each where its peak is and its largest tensors."""
    unit, name = errors.unit_of(max(one.peak_bytes for one in steps))
    yield "at the peak: " + ", ".join(f"{errors.size(one.peak_bytes)} with {one.name}{one.reserves}" for one in steps)

    def shown(nbytes: int) -> str:
        return f"{nbytes / unit:,.2f}"

    parts = [part for part in steps[0].made_of if any(round(one.made_of[part] / unit, 2) for one in steps)]
    hosted = ["in host memory"] if any(one.host_bytes for one in steps) else []
    most = ["most"] if any(one.most for one in steps) else []
    reserved = ["reserved"] if all(one.reserved_bytes for one in steps) else []
    titles = "", *most, f"peak {name}", *reserved, *parts, *hosted, "step ms", "replays ms", "GFLOP replayed"
    rows: list[tuple[str, ...]] = [titles]
    for one in steps:
        sizes = (
            one.peak_bytes,
            *([one.limited.get("limited_bytes") or one.reserved_bytes["reserved_bytes"]] if reserved else []),
            *(one.made_of[part] for part in parts),
            *([one.host_bytes] if hosted else []),
        )
        seconds = (f"{1000 * each:,.1f}" for each in (one.step_seconds, one.replay_seconds))
        found = [f"{one.most:,}"] if most else []
        rows.append((one.name, *found, *map(shown, sizes), *seconds, f"{one.simulation.flops['replay'] / 1e9:,.1f}"))
    wide = max(len(row[0]) for row in rows)
    yield from table([(row[0].ljust(wide), *row[1:]) for row in rows])
    for one in steps:
        if one.sent:
            yield f"{one.name}: sent in a step: {'; '.join(map(str, one.sent))}"
    for one in steps:
        peak = one.simulation.peak
        uncounted = f" ({one.simulation.uncounted})" if one.simulation.uncounted else ""
        yield f"{one.name}: the peak is in {_where(peak.phase, peak.module)}, by {name_of_op(peak.op)}{uncounted}"
        yield f"  largest: {'; '.join(map(tensor_in_words, one.largest))}"
    yield from dict.fromkeys(note.strip() for one in steps for note in notes(one.plan.choices))
    for word, said in _said(steps):
        yield f"{word}: {said}"


def _said(steps: Sequence[ConfiguredStep]) -> Iterator[tuple[str, str]]:
    """Notes on all steps: the word that each begins with, and the note, once."""
    for each in dict.fromkeys(", ".join(f"{n:.2f} {name}" for name, n in one.per_parameter.items()) for one in steps):
        yield "bytes per parameter", f"{each} (of gradients and states, per trained one)"
    for loop in dict.fromkeys(one.simulation.loop for one in steps):
        yield "counted", str(loop)
    for words in dict.fromkeys(one.simulation.loop.not_counted for one in steps):
        yield "not counted", words
    if all("limited_bytes" in one.limited for one in steps):
        yield from ((f"reserved, with {one.name}", in_words(**one.reserved_bytes, **one.limited)) for one in steps)
    elif all(one.reserved_bytes for one in steps):
        each = [f"{errors.size(one.reserved_bytes['expandable_bytes'])} with {one.name}" for one in steps]
        yield "reserved", f"by PyTorch's CUDA allocator; {listed(each)} under {EXPANDABLE}"
    for device in dict.fromkeys(f"on {one.device}" + (f", {one.timing}" if one.timing else "") for one in steps):
        yield "seconds", device
    if any(each.hidden for one in steps for each in one.sent):
        yield "not in the seconds", "what FSDP sends while something is computed, which is said as hidden"
    for said in dict.fromkeys(filter(None, (unknown_network(one.sent, one.device) for one in steps))):
        yield "network", said
    if any(one.simulation.host_bytes for one in steps):
        yield "not in the seconds", "what the host computes in the optimizer's step"
    for one in steps:
        kept = one.host_bytes - one.simulation.host_bytes
        if kept:
            waits = f"; of the step {1000 * one.waited_seconds:,.1f} ms wait for copies" if one.waited_seconds else ""
            yield f"in host memory, with {one.name}", f"{errors.size(kept)} of regions' inputs{waits}"
    if any(one.waited_seconds is None and one.host_bytes > one.simulation.host_bytes for one in steps):
        yield NO_WAITS
    for one in steps:
        yield from ((f"in tiles, with {one.name}", words) for words in one.tiled)
    for words in dict.fromkeys(words for one in steps for words in one.simulation.assumed):
        yield "assumed", words
    least = min(steps, key=lambda one: one.peak_bytes)
    if least.simulation.advice:
        yield f"besides, with {least.name}", least.simulation.advice


def _where(phase: str, module: str) -> str:
    return {"optimizer": "the optimizer's step"}.get(phase, phase) + (f" of {module}" if module else "")


def name_of_op(op: str) -> str:
    """Returns the name of an operation, as people write it."""
    return op.removeprefix("aten.").removesuffix(".default") or "what is there when it begins"


_MADE: Mapping[str, Callable[[Block], str]] = {
    "parameters": lambda block: block.made.module,
    "optimizer": lambda block: f"a state of {block.made.module}",
    "gradients": lambda block: f"a gradient in {_where(block.made.phase, block.made.module)}",
}


def largest_at_peak(simulation: Simulation) -> tuple[Block, ...]:
    """Returns the largest tensors that are alive at the peak of a step, the largest first."""
    at = simulation.peak.event
    return largest(one for one in simulation.blocks if one.born <= at and (one.died is None or one.died > at))


def tensor_as_data(block: Block) -> dict[str, Any]:
    """Returns a tensor as plain data: its size, what it is for, and the operation that made it."""
    made = block.made
    of_it = {"tensor_bytes": block.nbytes, "category": block.category, "shape": list(made.shape)}
    return {**of_it, "module": made.module, "op": made.op, "phase": made.phase}


def tensor_in_words(block: Block) -> str:
    """Returns a tensor in words: its size, what it is, and its shape."""
    made = block.made
    what = _MADE[block.category](block) if block.category in _MADE and (made.module or made.op) else block.category
    if block.category not in _MADE and made.op:
        what = f"{name_of_op(made.op)} in {_where(made.phase, made.module)}"
    shape = f" ({' x '.join(map(str, made.shape))})" if made.shape else ""
    return f"{errors.size(block.nbytes)} {what}{shape}"
