"""A plan is plain data: which modules of a model are regions, and which calls inside them are saved.

It knows neither torch nor the model it was made for, so it can be printed, saved, compared and sent to another rank.
A choice names modules by their paths, as `named_modules()` does. Inside a region, `keep` names the calls that are not
repeated: modules by their paths relative to the region, or all calls of a kind by a word with an at sign, in the whole
region or, with a path before the sign, in one module of it:

    @product             products with a parameter: linear layers, convolutions, stacked experts
    @down                those of them with a matrix that make less than they read, as the last one of an MLP does
    @matmul              products without one: attention scores written by hand
    @attention           scaled dot product attention, and flex attention
    @unread              products of any kind whose values nothing that is rebuilt needs, such as the last one in front
                         of a dropout that ends a region: neither kept nor repeated (`no_recompute(fn, unread=True)`)
    @reduction           functional collectives, DTensor's among them, whose result is no larger than what goes in:
                         all-reduce, reduce-scatter, all-to-all, broadcast
    @collective          these, and all-gather
    mlp.up_proj@product  the products that run in this module; of several regions in those that have such a module

Where a region's inputs lie between forward and replay is said by a word, too: "host" is host memory, "sharded" one
part on each rank of a group, and any other word is one that the stores given to `apply` are called by.

A plan may hold other choices for calls up to a size than for larger ones (`SizeClass`), so that short batches pay no
replays that only long ones need.

A path may also mean calls rather than a module: `layers.0.attn@scores` are the calls that its author named "scores"
(`no_recompute(fn, name="scores")`), made while that module runs.

Everything that users say in other words (Megatron's labels, a budget) becomes these choices.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .. import errors
from .._loop import COMMON, Loop
from .prediction import Prediction
from .reading import read

if TYPE_CHECKING:
    from .profile import Profile

VERSION = 1
KINDS = ("@product", "@down", "@matmul", "@attention", "@unread", "@reduction", "@collective")
_WHERE = {"host": "in host memory", "sharded": "sharded over ranks"}


@dataclass(frozen=True)
class Choice:
    """One region.

    Attributes:
        paths: The module, or several that the model calls one after the other and that are recomputed together; or
            named calls in one.
        keep: Calls inside that are not repeated. Several modules take kinds of calls only, no modules to keep whole.
        carry: Whether decisions inside (`topk`, `argmax`, sizes read from the device) are carried from forward to the
            replay and not made again; for whatever routes tokens.
        labels: The words that asked for it.
        store: The store in which the region's inputs lie: "" for where they are, "host", "sharded", or another word
            for a store that `apply` is given.
        nested: Of several modules: whether each is a region of its own in the replay of them all. Then one of them at
            a time is whole, and of the others only the inputs, for which all but the last run once more.
    """

    paths: tuple[str, ...]
    keep: tuple[str, ...] = ()
    carry: bool = False
    labels: tuple[str, ...] = ()
    store: str = ""
    nested: bool = False

    def __str__(self) -> str:
        where = self.paths[0] if len(self.paths) == 1 else f"{self.paths[0]} to {self.paths[-1]}"
        again = ", then each again" if self.nested else ""
        kept = f", but not {', '.join(self.keep)}" if self.keep else ""
        carried = ", decisions carried" if self.carry else ""
        stored = f", inputs {stored_in(self.store)}" if self.store else ""
        asked = f"  ({' '.join(self.labels)})" if self.labels else ""
        return f"recompute {where or 'the model'}{again}{kept}{carried}{stored}{asked}"


@dataclass(frozen=True)
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
        head = f"calls up to {shape_in_words(self.shape)}: {len(self.choices)} regions"
        lines = str(self.prediction).split("\n") if self.prediction is not None else [*map(str, self.choices)]
        return "\n".join([head, *(f"  {line}" for line in lines)])


@dataclass(frozen=True)
class Plan:
    """The regions of a model.

    Attributes:
        choices: One per region; no module is in two of them. With `sizes`, those of a call that is larger than all.
        source: What the plan was made from, in words.
        prediction: What the step is promised to take, where the plan was made for a budget. With `sizes`, at the
            largest.
        modules: What the plan was made for: paths, and in words what is there; `apply` refuses a model with other
            modules in these places. It says nothing of what is chosen, so it does not count when plans are compared.
        sizes: Choices for calls up to a size, smaller sizes first; a call goes by the first that it fits into.
        profile: What the plan was chosen from, for whoever wants another one when this does not fit. It is not part of
            the plan: it is not compared, and not written by `to_json`.
    """

    choices: tuple[Choice, ...] = ()
    source: str = ""
    prediction: Prediction | None = None
    modules: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    sizes: tuple[SizeClass, ...] = ()
    profile: Profile | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        _check(self.choices)
        before: tuple[int, ...] | None = None
        for size in self.sizes:
            shape = size.shape
            if not shape or any(type(n) is not int or n < 1 for n in shape):
                raise errors.ArgumentError(errors.bad_plan(f"{shape!r} is not the shape of a tensor with elements"))
            if before is not None and math.prod(shape) <= math.prod(before):
                why = f"sizes rise from one to the next, but {shape_in_words(shape)} comes after "
                raise errors.ArgumentError(errors.bad_plan(why + shape_in_words(before)))
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
    def predicted_peak_bytes(self) -> int | None:
        """The most bytes alive at any time of the step; None without a prediction, as with the others."""
        return None if self.prediction is None else self.prediction.peak_bytes

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
        """How much of the step another schedule could save at most, as a share."""
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
        head = f"plan of {len(self.choices)} regions{made}"
        if self.prediction is not None:
            return f"{head}\n{self.prediction}"
        return "\n".join([head, *(f"  {choice}" for choice in self.choices)])

    def digest(self) -> str:
        """A SHA-256 hash of the choices, as 64 hexadecimal digits: equal in every process for plans that choose alike.

        As in `diff`, the source does not count.
        """
        data: list[Any] = [VERSION, [dataclasses.asdict(choice) for choice in self.choices]]
        data += [[size.shape, [dataclasses.asdict(choice) for choice in size.choices]] for size in self.sizes]
        return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def to_json(self) -> str:
        """The plan as JSON text; `from_json` reads it."""
        data: dict[str, Any] = {"version": VERSION, "source": self.source}
        data["choices"] = [dataclasses.asdict(choice) for choice in self.choices]
        if self.prediction is not None:
            data["prediction"] = dataclasses.asdict(self.prediction)
        if self.modules:
            data["modules"] = self.modules
        if self.sizes:
            data["sizes"] = [dataclasses.asdict(size) for size in self.sizes]
        return json.dumps(data, indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """A plan from what `to_json` wrote.

        Raises:
            ArgumentError: The text is no JSON, of another version, or holds something else.
        """
        return read(text, VERSION, _plan, errors.bad_plan)

    def diff(self, other: Plan) -> str:
        """What turns this plan into the other, line by line; empty where they choose the same."""
        mine, theirs = (
            [str(choice) for choice in plan.choices]
            + [f"up to {shape_in_words(size.shape)}: {line}" for size in plan.sizes for line in size.choices or ("-",)]
            for plan in (self, other)
        )
        lines = difflib.unified_diff(mine, theirs, self.source or "this", other.source or "other", lineterm="", n=0)
        return "\n".join(lines)


def _check(choices: tuple[Choice, ...]) -> None:
    """Raises if regions contradict themselves or each other."""
    seen: set[str] = set()
    for choice in choices:
        twice = seen.intersection(choice.paths) or {p for p in choice.paths if choice.paths.count(p) > 1}
        if twice:
            raise errors.ArgumentError(errors.bad_plan(f"{sorted(twice)[0]!r} is in two choices"))
        if not choice.paths or (len(choice.paths) > 1 and any("@" not in word for word in choice.keep)):
            raise errors.ArgumentError(errors.bad_plan(f"{choice!r} has no path, or keeps modules inside of several"))
        unknown = [word for word in choice.keep if kind_in(word) not in ("", *KINDS)]
        if unknown:
            raise errors.ArgumentError(
                errors.bad_plan(f"keep={unknown[0]!r} is not a kind of call; known are {', '.join(KINDS)}")
            )
        if not isinstance(choice.store, str):
            why = f"store={choice.store!r} is no word; a store itself is passed as apply(..., stores={{word: store}})"
            raise errors.ArgumentError(errors.bad_plan(why))
        if choice.nested and len(choice.paths) == 1:
            why = f"nested=True is for several modules, and {choice.paths[0]!r} is one"
            raise errors.ArgumentError(errors.bad_plan(why))
        calls = next((path for path in choice.paths if "@" in path), None)
        if calls is not None and (len(choice.paths) > 1 or any(not word.startswith("@") for word in choice.keep)):
            why = f"{calls!r} are calls, which cannot be grouped with others and hold no modules to keep"
            raise errors.ArgumentError(errors.bad_plan(why))
        seen.update(choice.paths)


def fits(shape: tuple[int, ...], size: tuple[int, ...]) -> bool:
    """Whether a shape is no larger than another in any dimension."""
    return len(shape) == len(size) and all(a <= b for a, b in zip(shape, size, strict=True))


def shape_in_words(shape: tuple[int, ...]) -> str:
    """Such as `8 x 512`."""
    return " x ".join(map(str, shape)) or "no dimension"


def stored_in(word: str) -> str:
    """Where the store of a word keeps things."""
    return _WHERE.get(word, f"in {word!r}")


def kind_in(word: str) -> str:
    """The kind that a word of `Choice.keep` names, such as `@product`; empty where it names a module."""
    return word[word.index("@") :] if "@" in word else ""


def _plan(data: dict[str, Any]) -> Plan:
    modules = tuple((str(path), str(said)) for path, said in data.get("modules", ()))
    choices = tuple(_choice(**choice) for choice in data["choices"])
    sizes = tuple(_size(**size) for size in data.get("sizes", ()))
    return Plan(choices, str(data["source"]), _prediction(data.get("prediction")), modules, sizes)


def _choice(paths: Any, keep: Any, carry: Any, labels: Any, store: Any = "", nested: Any = False) -> Choice:
    return Choice(tuple(paths), tuple(keep), bool(carry), tuple(labels), store, bool(nested))


def _prediction(data: Any) -> Prediction | None:
    return None if data is None else Prediction.from_data(**data)


def _size(shape: Any, choices: Any, prediction: Any) -> SizeClass:
    return SizeClass(tuple(shape), tuple(_choice(**choice) for choice in choices), _prediction(prediction))
