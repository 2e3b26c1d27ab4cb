"""A profile: what the step of one model costs on one device, as plain data that can be saved and read.

It holds everything that `solve` needs and nothing of the model but paths, so a profile that was taken on one machine is
solved on another, for any number of budgets. That of `profile` also keeps its planner, which is no part of the data:
with it a plan for another budget is simulated as `make_plan` simulates its own.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from .. import errors
from ..errors.text import shown, starred, table
from ..memory.loop import Loop
from ..plan.plan import MIB, VERSION, Plan, Switched, made, read
from .cost import NOTHING, Costs, FixedChoices, Option, complaints


@shown
@dataclass(frozen=True, repr=False)
class Profile:
    """The costs of a step.

    Attributes:
        model: The name of the model's class.
        device: What the seconds are of.
        costs: The segments, their options, and what else lives.
        plain_peak_bytes: The peak of the step without recomputation, with what every plan switches.
        modules: What the segments are, in words, by path.
        carries: The paths of segments whose regions carry decisions (routing).
        left_out: Modules that are not planned, and why.
        advice: What else would lower `plain_peak_bytes`, in words; "" for nothing.
        timing: Where the seconds are from, in words.
        loop: The training loop that the bytes are of; None where the profile does not say.
        assumed: What was not known of the step and has been assumed, in words.
        uncounted: Which operations take something that is not known and could raise the peak by over 0.5 %, in words.
        always: What all plans hold besides, as a head with its loss in tiles.
        switched: What every plan switches in the model, where that alone changes the peak.
    """

    model: str
    device: str
    costs: Costs
    plain_peak_bytes: int
    modules: tuple[tuple[str, str], ...] = ()
    carries: tuple[str, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    advice: str = ""
    timing: str = ""
    loop: Loop | None = None
    assumed: tuple[str, ...] = ()
    uncounted: str = ""
    always: FixedChoices = NOTHING
    switched: Switched | None = None
    _planner: ClassVar[Callable[[Any], Plan] | None] = None  # no field, so that copies have none

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != _PLANNER}

    @property
    def own_peak_bytes(self) -> int:
        """The peak of the user's own step, without a plan."""
        return self.plain_peak_bytes + (self.switched.saved_bytes if self.switched else 0)

    @property
    def without_a_plan(self) -> str:
        """The same peak in words, after those of the step without recomputation; "" where that is the same."""
        return f"; without a plan {errors.brief(self.own_peak_bytes)}: {self.switched}" if self.switched else ""

    def __str__(self) -> str:
        step = f"{errors.brief(self.plain_peak_bytes)} at the peak, {_ms(self.costs.step_seconds)} ms per step"
        head = [f"{self.model} on {self.device}, without recomputation: {step}{self.without_a_plan}"]
        if self.loop is not None:
            head.append(f"counted: {self.loop}")
        rows = [("segments", *_FIGURES), *((name, *row) for name, row in _groups(self.costs).items())]
        return "\n".join([*head, *table(rows, right=0), *filter(None, [self.advice])])

    def to_json(self) -> str:
        """The profile as JSON text; `from_json` reads it."""
        data = dataclasses.asdict(self)
        for name, kind in self.costs.kinds.items():
            data["costs"]["kinds"][name]["options"] = [_option_data(option) for option in kind.options]
        return json.dumps({"version": VERSION, **data}, indent=1)

    @staticmethod
    def from_json(text: str) -> Profile:
        """A profile from what `to_json` wrote.

        Raises:
            ArgumentError: The text is no JSON, of another version, or holds something else, as costs that cannot be.
        """
        profile = read(text, _profile, _bad_profile)
        for complaint in complaints(profile.costs):
            raise errors.ArgumentError(_bad_profile(complaint))
        return profile

    def solve(self, *, budget: int | float | str) -> Plan:
        """Makes the plan for another budget, without profiling again; see `torch_recompute.solve`."""
        from .solve import by_costs  # which reads profiles

        return by_costs(self, budget) if self._planner is None else self._planner(budget)


_PLANNER = "_planner"


def with_planner(profile: Profile, planner: Callable[[Any], Plan]) -> Profile:
    """The profile with what makes the plan for a budget and simulates it, which copies of it do not have."""
    made = replace(profile)
    object.__setattr__(made, _PLANNER, planner)
    return made


def _bad_profile(why: str) -> str:
    return (
        f"this is not a profile: {why}.\n"
        "  A profile is made by torch_recompute.profile(model, args), or read by Profile.from_json(text) from what "
        "profile.to_json() wrote."
    )


def _profile(data: dict[str, Any]) -> Profile:
    for kind in data["costs"]["kinds"].values():
        for option in kind["options"]:
            words = {name: option.pop(name) for name in ("store", "nested", "offload") if name in option}
            tiles = option.pop("tiles", None) or [0] * len(option["regions"])
            regions = zip(option["regions"], tiles, strict=True)
            option["regions"] = [
                {"paths": path.split(" "), "keep": keep, **words, **({"store": "", "tiles": count} if count else {})}
                for (path, keep), count in regions
            ]
    return made(Profile, data)


def _option_data(option: Option) -> dict[str, Any]:
    """The option as JSON holds it: of each region its paths in one string and what it keeps, for all where and how."""
    data = {field.name: getattr(option, field.name) for field in dataclasses.fields(option)}
    regions = [(" ".join(choice.paths), choice.keep) for choice in option.regions]
    said = {"store": option.store, "nested": option.nested, **({"offload": True} if option.offload else {})}
    tiles = [choice.tiles for choice in option.regions]
    said |= {"tiles": tiles} if any(tiles) else {}
    work = dataclasses.asdict(option.work)
    return {**data, "regions": regions, **said, "host_bytes": data["host_bytes"], "work": work}


_FIGURES = ("how many", "keeps MiB", "least MiB", "backward MiB", "least costs ms", "ways")


def _groups(costs: Costs) -> dict[str, tuple[str, ...]]:
    """The figures of one of the segments of each pattern of paths and kind, and how many there are."""
    groups: dict[str, tuple[str, ...]] = {}
    for (pattern, kind), count in Counter((starred(s.path), s.kind) for s in costs.segments).items():
        options = costs.kinds[kind].options
        least = min(options, key=lambda option: (option.saved_bytes / option.span, option.seconds))
        alike = sum(name == pattern or name.startswith(f"{pattern} (") for name in groups)
        groups[f"{pattern} ({alike + 1})" if alike else pattern] = (
            str(count),
            _mib(options[0].saved_bytes),
            _mib(least.saved_bytes // least.span),
            _mib(options[0].backward_bytes),
            _ms(least.seconds / least.span),
            str(len(options)),
        )
    return groups


def _mib(count: float) -> str:
    return f"{count / MIB:,.2f}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.3f}"
