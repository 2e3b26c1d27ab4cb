"""A plan as plain data: which modules of a model are regions, and which calls inside them are saved.

It knows neither torch nor the model it was made for, so it can be printed, saved, compared and sent to another rank. It
consists of choices (`choice.py`), one per region; a plan made for a budget also carries a `Prediction` of its step, and
the profile it was chosen from. Calls up to a size may have choices of their own (`SizeClass`), so that short batches
pay no replays that only long ones need.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Protocol, TypeVar, get_args, get_origin, get_type_hints

from .. import errors
from ..errors.text import counted, explained, listed, shown, table
from ..memory.loop import COMMON, Loop
from ..memory.reserved import in_brief, in_words
from .choice import KINDS, RECOMPUTED, SHORT, Choice, Target, written
from .labels import notes

VERSION = 1
MIB = 2**20
T = TypeVar("T")
NOT_RECOMPUTED = "not recomputed"
OFFLOADED = "offloaded"
WORDS: Mapping[str, str] = {
    "at the peak": "the most bytes alive at one moment of the step, with the plan and of your own step without it: "
    "parameters, gradients, optimizer state, batch, output and activations",
    "alone saves": "what every plan switches in this model besides regions, and by how much that lowers the peak",
    "alone takes": "what every plan switches in this model besides regions, and by how much that raises the peak",
    "slower": "what recomputation adds to the time of the step",
    SHORT: "a region that keeps its activations while memory lasts and is recomputed where it does not; peak and "
    "time are those of a step in which all of them are recomputed",
    "recomputed": "a region: its activations are dropped in forward and computed again in backward, when one is first "
    "needed. `mlp recomputed`: that part of each layer; `norm with mlp recomputed`: both parts as one region",
    "in host memory": "what leaves the device until backward needs it",
    "calls up to": "choices for calls whose first tensor is no larger than this in any dimension",
    "calls larger than": "choices for those that are larger than all before",
    "budget": "the most that the peak may be, as it was asked for. A share is of the activation memory: 0 is the least "
    "peak of any plan, 1 the peak without recomputation",
    "counted:": "the parts of a training loop that the peak contains; another loop has another peak (hold_output=, "
    "accumulate=, set_to_none=, loss=)",
    "not counted:": "what takes memory beside the tensors of the step; leave room for it in a budget of your own",
    "reserved:": "what PyTorch's CUDA allocator takes from the device: the peak, and what is free in its segments; "
    "with fit, of what the device has for it. To stay within it may empty its cache, for which the step waits",
    "step": "the predicted time of a training step: forward, backward and optimizer",
    "GFLOP replayed": "work of matrix products and convolutions that is done again",
    "of optimal": "a bound: no choice of what to keep and recompute within this budget makes the step faster by more",
    "about the": "why a plan may not reach the bound",
    "seconds:": "where the times are from",
    "host:": "the process that launches what the device computes (host=): a step takes no less than that",
    "assumed:": "what could not be known of the step, and is not in the peak or only guessed",
    "(not counted:": "operations that are not known to take nothing while they run, on a device that is not here to be "
    "asked; the share is that of a copy of their arguments and results",
    "count": "how many layers, or groups of layers, are treated alike and share a row",
    "kept": "what each keeps from its forward to its backward; `(matmuls kept)`, `matmuls in up kept`: results inside "
    "a region that stay, so that these calls do not run again",
    "not rerun": "the call is skipped in the replay, and its result is not kept: nothing there reads its values",
    "freed": "how much less that is than without recomputation",
    "replay ms": "what each adds to the time of the step; a replay is the second run, in backward",
    "per ms": "the rate by which layers are chosen: bytes freed for each millisecond",
    "no cost": "nothing runs again",
    "layers": "which modules, and what becomes of each",
    "*": "numbers in which the paths of a row differ",
    NOT_RECOMPUTED: "as without a plan: the budget does not ask for its bytes",
    "recomputed together": "so many layers in a row are one region: only the input of the first is kept",
    "then each again": "the layers are dropped together and rebuilt one by one, for one more forward of all but one",
    "in tiles:": "what is computed for some tokens at a time, so that what is wide inside never exists for all; each "
    "gradient is a sum in another order",
    OFFLOADED: "not recomputed: what the layers, or the parts of them that are named, save for backward waits there",
    "inputs in host memory": "what the regions keep waits in the host's memory",
    "inputs sharded": "what the regions keep waits in parts on the ranks of a group",
}
"""The words of a plan that was made for a budget, as it is printed."""
CHOICE_WORDS: Mapping[str, str] = {
    "plan of": "no budget was given, so nothing is predicted; `report` and `simulate` say what it frees and costs",
    "regions": "a region: the activations of a module are dropped in forward and computed again in backward, when one "
    "is first needed",
    "recompute": "the module that is a region; `a to b`: several that are recomputed together as one",
    SHORT: "a region that keeps its activations while memory lasts, and is recomputed where it does not",
    "then each again": WORDS["then each again"],
    "kept": "calls inside the region that do not run again, because their results are kept",
    "not rerun": WORDS["not rerun"],
    "decisions carried": "which experts tokens go to is taken from the forward, not decided again",
    "tiles": "the module is called for some tokens at a time, each call a region; results differ by the order of sums",
    "offload": "not recomputed: what the module, or the calls in it, save for backward waits in a store",
    "inputs": "where the inputs of the region wait until backward",
    "(": "the label or setting that asked for the region",
}
"""The words of any other plan."""
WIDE = 0.05  # a gap that a reader will ask about
WAITS = 0.1  # the share of a step in which a device waits for its host that a reader has to know
_OPTIONAL = ("prediction", "modules", "sizes", "graph_bytes")


@dataclass(frozen=True)
class Line:
    """Segments of one kind that were treated alike.

    Attributes:
        where: Their paths, numbers that differ written as `*`.
        count: How many.
        what: What becomes of each, in words.
        saved_bytes: What each keeps from its forward to its backward.
        freed_bytes: What each keeps less than without a region.
        seconds: What each adds to the step.
        host_bytes: What each keeps in host memory meanwhile.
        layers: How many layers each is: more than one where several are recomputed together.
        whole: Whether all of each is recomputed, or parts of it.
    """

    where: str
    count: int
    what: str
    saved_bytes: int
    freed_bytes: int
    seconds: float
    host_bytes: int = 0
    layers: int = 1
    whole: bool = False

    @property
    def why(self) -> str:
        """The reason, as an exchange rate."""
        if not self.freed_bytes:
            return "its bytes are not needed"
        if not self.seconds:
            return "costs nothing"
        return f"{self.freed_bytes / MIB / (1000 * self.seconds):,.1f} MiB per ms"


@dataclass(frozen=True)
class Switched:
    """A setting of a library's model that every plan switches, regions or not: its cache, or its own checkpointing.

    Attributes:
        what: In words, such as "use_cache=False".
        saved_bytes: By how much that alone lowers the peak, below 0 where it raises it; 0 where that is not known.
    """

    what: str
    saved_bytes: int

    def __str__(self) -> str:
        if not self.saved_bytes:
            return f"{self.what}, without which the step could not be simulated"
        much = errors.brief(abs(self.saved_bytes))
        return f"{self.what} alone {f'saves {much}' if self.saved_bytes > 0 else f'takes {much} more'}"


@shown
@dataclass(frozen=True, repr=False)
class Prediction:
    """The memory and time that a planned step takes.

    Attributes:
        budget_bytes: What was asked for; the peak is at most this.
        peak_bytes: The most bytes alive at any time of the step.
        plain_peak_bytes: The same of the user's own step, without the plan.
        step_seconds: Of the operations in the step, replays included.
        plain_step_seconds: The same without the plan.
        replay_flops: FLOPs of products in all replays.
        bound_seconds: No schedule that keeps or recomputes the same operations takes less within the budget.
        device: What the seconds are of.
        solver: Which solver chose, and how good it says its choice is.
        lines: The segments, those treated alike together.
        timing: Where the seconds are from, in words.
        host_bytes: The most that is kept in host memory.
        loop: The training loop that the peak is of; None if the plan does not say.
        advice: What else would lower this peak, in words.
        budget: What was asked for, as it was written and what it means.
        assumed: What was not known of the step and has been assumed, in words.
        uncounted: Which operations take something that is not known and could raise the peak by over 0.5 %, in words;
            "" for none.
        tiled: What is made in tiles of tokens and by how much results differ, or why nothing is, in words.
        switched: What every plan switches in the model, where that alone changes the peak.
        reserved_bytes: What PyTorch's CUDA allocator reserves: the peak, and what is free in its segments; 0 elsewhere.
        expandable_bytes: The same with expandable segments.
        room_bytes: The most that the allocator may reserve: what the device has for it with "fit", or a budget in
            bytes; 0 of a share, and elsewhere.
        limited_bytes: With "fit" the most that the allocator, as it is set where the plan was made, reserves under that
            limit; the step does not fit where this is above the limit.
        cache_flushes: With "fit" how often at most a later step empties its cache to stay within the limit; None
            elsewhere, and with expandable segments, where that is not known.
        host: What launches the operations; "" where a CPU does that itself, or the seconds are of single operations.
        waiting_seconds: Of the step, those in which the device waits for its host.
        on_slow_host: What a slow host would do to it, in words; "" where it would still be before recomputing every
            layer.
    """

    budget_bytes: int
    peak_bytes: int
    plain_peak_bytes: int
    step_seconds: float
    plain_step_seconds: float
    replay_flops: int
    bound_seconds: float
    device: str
    solver: str
    lines: tuple[Line, ...]
    timing: str = ""
    host_bytes: int = 0
    loop: Loop | None = None
    advice: str = ""
    budget: str = ""
    assumed: tuple[str, ...] = ()
    uncounted: str = ""
    tiled: tuple[str, ...] = ()
    switched: Switched | None = None
    reserved_bytes: int = 0
    expandable_bytes: int = 0
    room_bytes: int = 0
    limited_bytes: int = 0
    cache_flushes: int | None = None
    host: str = ""
    waiting_seconds: float = 0.0
    on_slow_host: str = ""

    @property
    def gap(self) -> float:
        """The most that the step can be above the bound, as a share of the step."""
        return max(0.0, self.step_seconds - self.bound_seconds) / self.step_seconds if self.step_seconds else 0.0

    @property
    def reserves(self) -> str:
        """The bytes that the allocator reserves, beside the most that it may, in words; "" without such a limit."""
        return in_brief(self.reserved_bytes, self.room_bytes, self.limited_bytes)

    @property
    def of_host(self) -> tuple[str, ...]:
        """The sentences about the host: how long the device waits for it, and what a slow one would do."""
        share = self.waiting_seconds / self.step_seconds if self.step_seconds else 0.0
        waits = f"the device waits for its host ({self.host}) for {share:.0%} of the step: torch.compile or CUDA graphs"
        waits += " would gain more than any plan"
        return tuple(filter(None, (waits if share > WAITS else "", self.on_slow_host)))

    def summary(self, choices: Sequence[Choice]) -> str:
        """One sentence on the step under some choices: its peak, its time, what is recomputed, and what is reserved."""
        return "; ".join(filter(None, [self._recomputed(choices), self.reserves]))

    def _recomputed(self, choices: Sequence[Choice]) -> str:
        elastic = any(choice.elastic for choice in choices)
        peak = f"{'at least ' * elastic}{errors.brief(self.peak_bytes, self.plain_peak_bytes)} at the peak"
        peak += "".join(f" ({words})" for words in (self.uncounted, self.switched) if words)
        if not choices and not self.replay_flops:
            return f"{peak}, and nothing is recomputed"
        hosted = f", {errors.brief(self.host_bytes)} in host memory" if self.host_bytes else ""
        more = self.step_seconds / self.plain_step_seconds - 1 if self.plain_step_seconds else 0.0
        slower = "up to " * elastic + f"{100 * abs(more):.1f} % {'faster' if more < 0 else 'slower'}"
        if not choices:
            return f"{peak}, {slower}, operations of the compiled graph recomputed"
        moved = [line for line in self.lines if line.what.startswith(OFFLOADED)]
        recomputed = [line for line in self.lines if line.what != NOT_RECOMPUTED and line not in moved]
        of, away, all_of = (sum(x.count * x.layers for x in lines) for lines in (recomputed, moved, self.lines))
        partially = "" if any(line.whole for line in recomputed) or not recomputed else "partially "
        kinds = {target.calls for choice in choices for target in choice.kept}
        words = [word for kind, (word, _) in KINDS.items() if kind in kinds and word]
        kept = listed(words + ["modules"] * ("" in kinds))
        layers = f"{of} of {all_of} layers" if all_of else counted(len(choices), "region")
        layers += f" {partially}{SHORT}" if elastic else f" {partially}{RECOMPUTED}" * bool(all_of)
        heads = [f"{c.paths[0]} with its loss in {c.tiles} tiles" for c in choices if c.with_loss]
        layers = "no layer recomputed" if heads and all_of and not of else layers
        said = f"{peak}{hosted}, {slower}, {layers}" + (f" ({kept} kept)" if kept else "")
        return ", ".join([said, *heads, *([f"{away} offloaded"] if away else [])])

    @property
    def _reserved(self) -> str:
        limited = self.limited_bytes, self.cache_flushes
        return in_words(self.reserved_bytes, self.expandable_bytes, self.room_bytes, *limited)

    def __str__(self) -> str:
        head = [
            f"budget {self.budget or errors.brief(self.budget_bytes)}",
            *([] if self.loop is None else [f"counted: {self.loop}", f"not counted: {self.loop.not_counted}"]),
            *([f"reserved: {self._reserved}"] if self.reserved_bytes else []),
            f"step {_ms(self.step_seconds)} on {self.device}, {_ms(self.plain_step_seconds)} without recomputation; "
            f"{self.replay_flops / 1e9:,.1f} GFLOP replayed; within {100 * self.gap:.1f} % of optimal",
        ]
        if self.gap >= WIDE:
            head.append(
                f"about the {100 * self.gap:.1f} %: the bound may drop any single tensor; a plan drops what whole "
                "modules keep, except for calls that it names, so it may already be the best plan"
            )
        if self.timing:
            head.append(f"seconds: {self.timing}")
        head += [f"host: {words}" for words in self.of_host]
        head += [f"in tiles: {words}" for words in self.tiled]
        head += [f"assumed: {words}" for words in self.assumed]
        unit, name = errors.unit_of(max((max(line.saved_bytes, line.freed_bytes) for line in self.lines), default=0))
        rows = [("count", f"kept {name}", f"freed {name}", "replay ms", f"freed {name} per ms", "layers")]
        for line in self.lines:
            freed = costs = rate = ""
            if line.what != NOT_RECOMPUTED:
                freed, costs = f"{line.freed_bytes / unit:,.2f}", f"{1000 * line.seconds:,.3f}"
                rate = _rate(line.freed_bytes / unit / (1000 * line.seconds)) if line.seconds else "no cost"
            kept = f"{line.saved_bytes / unit:,.2f}"
            rows.append((f"{line.count} x", kept, freed, costs, rate, f"{line.where}: {line.what}"))
        return "\n".join([*head, *(table(rows, right=5) if self.lines else []), *filter(None, [self.advice])])


def _rate(value: float) -> str:
    return f"{value:,.1f}" if value >= 1 else f"{value:.2g}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"


@shown
@dataclass(frozen=True, repr=False)
class SizeClass:
    """The regions of a model in calls up to a size.

    Attributes:
        shape: The largest shape of a call's first tensor for which this holds: no dimension of it is exceeded.
        choices: One per region, as in a plan.
        prediction: What the step is promised to take at this shape.
    """

    shape: tuple[int, ...]
    choices: tuple[Choice, ...] = ()
    prediction: Prediction | None = None

    def __str__(self) -> str:
        head = f"calls up to {shape_in_words(self.shape)}: "
        if self.prediction is None:
            return "\n".join([f"{head}{counted(len(self.choices), 'region')}", *(f"  {one}" for one in self.choices)])
        lines = str(self.prediction).split("\n")
        return "\n".join([head + self.prediction.summary(self.choices), *(f"  {line}" for line in lines)])


class Costed(Protocol):
    """Costs of a step that a plan was chosen from: a `Profile`."""

    def solve(self, *, budget: int | float | str) -> Plan:
        """Makes the plan for another budget."""
        ...


@shown
@dataclass(frozen=True, repr=False)
class Plan:
    """The regions of a model.

    Attributes:
        choices: One per region; no module is in two of them. With `sizes`, those of a call that is larger than all.
        source: What the plan was made from, in words.
        prediction: What the step is promised to take, if the plan was made for a budget; with `sizes`, at the largest.
        modules: Paths, and in words the modules there, that the plan was made for; `apply` refuses a model with others.
            Not compared.
        sizes: Choices for calls up to a size, smaller sizes first; a call goes by the first that it fits into.
        profile: What the plan was chosen from, to solve again. Not compared, and not written by `to_json`.
        graph_bytes: Of a plan for `torch.compile`, which has no choices: what the forward and the backward of the
            compiled graph may allocate, as `compiling.Partition` counts it in the graph.
    """

    choices: tuple[Choice, ...] = ()
    source: str = ""
    prediction: Prediction | None = None
    modules: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    sizes: tuple[SizeClass, ...] = ()
    profile: Costed | None = field(default=None, compare=False, repr=False)
    graph_bytes: int | None = None

    def __post_init__(self) -> None:
        wrong = (
            [self.choices] if isinstance(self.choices, Choice) else [c for c in self.choices if type(c) is not Choice]
        )
        if wrong:
            raise errors.ArgumentError(bad_plan(f"choices={errors.say(wrong[0])}, where a tuple of Choice is expected"))
        _check(self.choices)
        before: tuple[int, ...] | None = None
        for size in self.sizes:
            shape = size.shape
            if not shape or any(type(n) is not int or n < 1 for n in shape):
                raise errors.ArgumentError(bad_plan(f"{shape!r} is not the shape of a tensor with elements"))
            if before is not None and math.prod(shape) <= math.prod(before):
                why = f"sizes rise from one to the next, but {shape_in_words(shape)} comes after "
                raise errors.ArgumentError(bad_plan(why + shape_in_words(before)))
            before = shape
            _check(size.choices)

    @property
    def all_choices(self) -> tuple[Choice, ...]:
        """The choices of the plan and of its sizes, each once."""
        of_sizes = [choice for size in self.sizes for choice in size.choices]
        return tuple(dict.fromkeys([*self.choices, *of_sizes]))

    @property
    def loop(self) -> Loop:
        """The training loop that the plan was made for; the most common one where it does not say."""
        known = None if self.prediction is None else self.prediction.loop
        return COMMON if known is None else known.asked

    @property
    def summary(self) -> str:
        """One sentence: the peak, the time, what is recomputed and reserved; with `sizes`, of the largest calls.

        Of a plan that was not made for a budget it says how many regions there are.
        """
        if self.prediction is not None:
            return self.prediction.summary(self.choices)
        if self.graph_bytes is not None:
            return f"plan for torch.compile, whose graph may allocate {errors.brief(self.graph_bytes)}"
        away = sum(choice.offload for choice in self.choices)
        regions = counted(len(self.choices) - away, "region") + (f" and {counted(away, 'offload')}" if away else "")
        return f"plan of {regions}" + (f", from {self.source}" if self.source else "")

    def explain(self) -> str:
        """Says what each word and each column of the printed plan means."""
        printed = str(self)
        words = WORDS if self.prediction is not None or self.sizes else CHOICE_WORDS
        kept = {target.calls for choice in self.all_choices for target in choice.kept}
        kinds = {word: meaning for kind, (word, meaning) in KINDS.items() if word and kind in kept}
        return explained({word.strip(":"): said for word, said in words.items() if word in printed} | kinds)

    @property
    def predicted_peak_bytes(self) -> int | None:
        """The most bytes alive at any time of the step; None without a prediction, as with the others."""
        return None if self.prediction is None else self.prediction.peak_bytes

    @property
    def assumed(self) -> tuple[str, ...]:
        """The assumptions about the step, in words: such as the memory that an operation takes on another device."""
        return () if self.prediction is None else self.prediction.assumed

    @property
    def predicted_step_seconds(self) -> float | None:
        """Seconds of the step, replays included."""
        return None if self.prediction is None else self.prediction.step_seconds

    @property
    def predicted_replay_flops(self) -> int | None:
        """FLOPs of products in all replays of the step."""
        return None if self.prediction is None else self.prediction.replay_flops

    @property
    def lower_bound(self) -> float | None:
        """Seconds that a step takes at least within the budget, whatever is kept and recomputed."""
        return None if self.prediction is None else self.prediction.bound_seconds

    @property
    def gap(self) -> float | None:
        """The most that another schedule could save, as a share of the step."""
        return None if self.prediction is None else self.prediction.gap

    def __iter__(self) -> Iterator[Choice]:
        return iter(self.choices)

    def __len__(self) -> int:
        return len(self.choices)

    def __str__(self) -> str:
        made = f", from {self.source}" if self.source else ""
        if self.sizes:
            larger = SizeClass(self.sizes[-1].shape, self.choices)
            beyond = str(larger).replace("up to", "larger than", 1)
            last = [beyond] if self.choices != self.sizes[-1].choices else []
            return "\n".join([f"plan of {len(self.sizes)} sizes{made}", *map(str, self.sizes), *last])
        if self.prediction is not None:
            return f"{self.summary}\n{self.prediction}"
        return "\n".join([self.summary, *(f"  {choice}" for choice in self.choices), *notes(self.choices)])

    def digest(self) -> str:
        """A SHA-256 hash of the choices, as 64 hexadecimal digits: equal in every process for plans that choose alike.

        As in `diff`, the source does not count.
        """
        data: list[Any] = [VERSION, list(map(_written, self.choices))]
        data += [[size.shape, list(map(_written, size.choices))] for size in self.sizes]
        data += [self.graph_bytes] if self.graph_bytes is not None else []
        return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def to_json(self) -> str:
        """The plan as JSON text; `from_json` reads it."""
        data = {"version": VERSION, **_written(dataclasses.replace(self, profile=None))}
        names = ("version", "source", "choices", *(name for name in _OPTIONAL if data[name]))
        return json.dumps({name: data[name] for name in names}, indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """A plan from what `to_json` wrote.

        Raises:
            ArgumentError: The text is no JSON, of another version, or holds something else.
        """
        return read(text, _plan, bad_plan)

    def diff(self, other: Plan) -> str:
        """Shows what turns this plan into the other, line by line; empty if they choose the same."""
        if not isinstance(other, Plan):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise errors.ArgumentError(bad_plan(f"{errors.say(other)}, where diff compares with another"))
        mine, theirs = (
            [str(choice) for choice in plan.choices]
            + [f"compiled graph: {n:,} bytes" for n in (plan.graph_bytes,) if n is not None]
            + [f"up to {shape_in_words(size.shape)}: {line}" for size in plan.sizes for line in size.choices or ("-",)]
            for plan in (self, other)
        )
        lines = difflib.unified_diff(mine, theirs, self.source or "this", other.source or "other", lineterm="", n=0)
        return "\n".join(lines)


def _check(choices: tuple[Choice, ...]) -> None:
    """Raises if regions contradict themselves or each other."""

    def refuse(why: str) -> NoReturn:
        raise errors.ArgumentError(bad_plan(why))

    seen: set[str] = set()
    for choice in choices:
        twice = seen.intersection(choice.paths) or {p for p in choice.paths if choice.paths.count(p) > 1}
        if twice:
            refuse(f"{sorted(twice)[0]!r} is in two choices")
        if not choice.paths or (len(choice.paths) > 1 and not all(word.calls for word in choice.kept)):
            refuse(f"{choice!r} has no path, or keeps modules inside of several")
        unknown = [word for word in choice.kept if word != word.module and word.calls not in KINDS]
        if unknown:
            known = ", ".join(f"@{kind}" for kind in KINDS)
            refuse(f"keep={unknown[0]!r} is not a kind of call; known are {known}")
        if not isinstance(choice.store, str):
            refuse(f"store={choice.store!r} is no word; a store itself is passed as apply(..., stores={{word: store}})")
        if choice.nested and len(choice.paths) == 1:
            refuse(f"nested=True is for several modules, and {choice.paths[0]!r} is one")
        if choice.offload and (len(choice.paths) > 1 or choice.keep or choice.carry):
            refuse(f"{choice!r} offloads, which is said of one path, without keep= and carry=")
        if choice.offload and choice.elastic:
            refuse(f"{choice!r} offloads, so nothing is recomputed, and elastic=True is of what is")
        if type(choice.tiles) is not int or choice.tiles < 0 or (choice.with_loss and not choice.tiles):
            refuse(f"{choice!r} says no number of tiles: tiles= is a whole number above 0, as with_loss=True asks for")
        if choice.tiles and (len(choice.paths) > 1 or choice.offload or choice.elastic):
            refuse(f"{choice!r} is in tiles, which is said of one module, without offload= and elastic=")
        if choice.with_loss and (choice.keep or choice.carry or choice.store):
            refuse(f"{choice!r} is a head with its loss, of which nothing is kept: leave keep=, carry= and store= out")
        calls = next((path for path in choice.paths if Target(path).calls), None)
        if calls is not None and (len(choice.paths) > 1 or any(word.module or not word for word in choice.kept)):
            refuse(f"{calls!r} are calls, which cannot be grouped with others and hold no modules to keep")
        if calls is not None and choice.tiles:
            refuse(f"{calls!r} are calls; a module is called in tiles")
        seen.update(choice.paths)


_written = functools.partial(dataclasses.asdict, dict_factory=written)


def made_elastic(plan: Plan, but: Container[str] = ()) -> Plan:
    """The plan with elastic regions, but those whose inputs are in certain stores; what it says of layers, too."""

    def regions(choices: tuple[Choice, ...]) -> tuple[Choice, ...]:
        fixed = [choice.offload or choice.tiles > 0 or choice.store in but for choice in choices]
        return tuple(c if stays else replace(c, elastic=True) for c, stays in zip(choices, fixed, strict=True))

    def said(prediction: Prediction | None) -> Prediction | None:
        if prediction is None:
            return None
        lines = [replace(line, what=_short(line.what)) for line in prediction.lines]
        return replace(prediction, lines=tuple(lines))

    sizes = [SizeClass(size.shape, regions(size.choices), said(size.prediction)) for size in plan.sizes]
    return replace(plan, choices=regions(plan.choices), prediction=said(plan.prediction), sizes=tuple(sizes))


def _short(what: str) -> str:
    if what == NOT_RECOMPUTED or SHORT in what:
        return what
    return what.replace(RECOMPUTED, SHORT)


def fits(shape: tuple[int, ...], size: tuple[int, ...]) -> bool:
    """Returns whether a shape is no larger than another in any dimension."""
    return len(shape) == len(size) and all(a <= b for a, b in zip(shape, size, strict=True))


def shape_in_words(shape: tuple[int, ...]) -> str:
    """Such as `8 x 512`."""
    return " x ".join(map(str, shape)) or "no dimension"


def _plan(data: dict[str, Any]) -> Plan:
    """The plan in a JSON object, whose other keys are of the command that wrote it."""
    optional = {name: data[name] for name in _OPTIONAL if name in data}
    return made(Plan, {"choices": data["choices"], "source": data["source"], **optional})


# --- from JSON ---


def read(text: str, build: Callable[[dict[str, Any]], T], refuse: Callable[[str], str]) -> T:
    """Reads a versioned JSON object.

    Args:
        text: The JSON.
        build: Makes the result from the object, without its version.
        refuse: Makes the text of an error from the reason.

    Raises:
        ArgumentError: The text is no JSON, of another version, or holds something else.
    """
    try:
        data: Any = json.loads(text)
    except (json.JSONDecodeError, TypeError) as error:
        raise errors.ArgumentError(refuse(f"no JSON: {error}")) from None
    version: Any = data.pop("version", "none") if isinstance(data, dict) else "none"  # pyright: ignore[reportUnknownMemberType]
    if version != VERSION:
        raise errors.ArgumentError(refuse(f"its version is {version}, and this library reads version {VERSION}"))
    try:
        return build(data)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise errors.ArgumentError(refuse(f"a field is missing or unknown: {error}")) from None


_hints = functools.cache(get_type_hints)


def made(kind: Any, value: Any) -> Any:
    """Makes a value of an annotated type from what JSON holds: dataclasses from objects, tuples from lists."""
    inner = get_args(kind)
    if type(value) is kind:
        return value
    if dataclasses.is_dataclass(kind):
        fields = _hints(kind)
        return kind(**{name: made(fields[name], part) for name, part in value.items()})  # pyright: ignore[reportCallIssue]
    if get_origin(kind) is tuple:
        if not isinstance(value, (list, tuple)):
            raise TypeError(f"{value!r} is no list")
        several = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        return tuple(made(one, part) for one, part in zip(several, value, strict=True))
    if get_origin(kind) is Mapping:
        return {name: made(inner[1], part) for name, part in value.items()}
    if type(None) in inner:
        return None if value is None else made(inner[0], value)
    if kind in (bool, int, str) and type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def bad_plan(why: str) -> str:
    """Text for a plan that cannot be."""
    return (
        f"this is not a plan: {why}.\n"
        "  A plan is made by RecomputeConfig(...).plan(model), by hand as Plan((Choice(('layers.0',)), ...)), or read "
        "by Plan.from_json(text) from what plan.to_json() wrote."
    )
