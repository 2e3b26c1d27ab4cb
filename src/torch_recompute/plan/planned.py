"""From a solver's choice to a plan; and `solve`: a profile and a budget in, a plan out, without the model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from .. import errors
from .bound import bound
from .budget import read_budget
from .choice import Choice, joined, stored_in
from .cost import Costs, Option, Solution, begins
from .plan import Line, Plan, Prediction
from .profile import Profile, starred
from .roles import inside
from .solve import choose, smallest


def solve(profile: Profile, *, budget: int | float | str, solver: str = "auto") -> Plan:
    """Makes the plan for a budget from a profile alone.

        plan = solve(profile(model, batch), budget="24GiB")

    Its prediction follows from the profile; `make_plan` also simulates the step with the plan.

    Args:
        profile: What the step costs.
        budget: The most bytes alive at any time of the step, parameters, gradients and optimizer included: a number,
            or text as "24GiB"; or a fraction between 0 and 1 of the way from the least feasible peak to that of the
            step without recomputation.
        solver: "auto", or "highs".

    Raises:
        BudgetError: No choice fits; it carries the least budget and the plan that reaches it.
        ArgumentError: The budget is invalid.
    """
    least = smallest(profile.costs)
    wanted = bytes_of(budget, lambda: least.peak_bytes, profile.plain_peak_bytes, None)
    try:
        solution = choose(profile.costs, wanted, solver)
    except errors.BudgetError as error:
        raise errors.BudgetError(str(error), error.smallest, planned(profile, profile.costs, least, wanted)) from None
    return planned(profile, profile.costs, solution, wanted)


def bytes_of(budget: object, least: Callable[[], int], most: int, free: Callable[[], int] | None) -> int:
    """The bytes that a budget means for one model.

    Args:
        budget: See `read_budget`.
        least: Returns the smallest peak of any plan; called only for a share.
        most: The peak without recomputation.
        free: Returns what the device has for this step; None if there is no device.

    Raises:
        ArgumentError: The budget is invalid, or "fit" without a device.
    """
    meant = read_budget(budget)
    if meant.bytes is not None:
        return meant.bytes
    if meant.share is not None:
        bottom = least()
        return bottom + math.floor(meant.share * (most - bottom))
    if free is None:
        raise errors.ArgumentError(
            'budget="fit" means what the device has free, and a profile knows no device.\n'
            '  Write make_plan(model, args, budget="fit") where the model is, or a number of bytes such as '
            'budget="24GiB".'
        )
    return free()


def choices_of(profile: Profile, solution: Solution) -> tuple[Choice, ...]:
    """The regions that a solver chose."""
    found: dict[Choice, None] = {}  # that of a module which is called several times is one for all its calls
    names = [segment.path for segment in profile.costs.segments]
    for start in begins(solution.options):
        option = solution.options[start]
        together = tuple(names[start : start + option.span])
        for region in option.regions:
            paths = tuple(joined(path, part) for path in together for part in region.paths)
            found[dataclasses.replace(region, paths=paths, carry=decides(paths, profile.carries))] = None
    return tuple(found)


def decides(paths: Iterable[str], routers: Sequence[str]) -> bool:
    """Returns whether one of some modules routes tokens, so that a region around it carries the decisions."""
    return any(inside(router, path) for path in paths for router in routers)


def planned(
    profile: Profile,
    costs: Costs,
    solution: Solution,
    budget: int,
    peak: int | None = None,
    advice: str = "",
) -> Plan:
    """The plan of a solution, with its prediction.

    Args:
        profile: What the plan is for.
        costs: What the solution was chosen from.
        solution: What was chosen.
        budget: In bytes.
        peak: Of the simulated step with this plan; None if it was not simulated.
        advice: What else would lower that peak.
    """
    starts = begins(solution.options)
    prediction = Prediction(
        budget_bytes=budget,
        peak_bytes=solution.peak_bytes if peak is None else peak,
        plain_peak_bytes=profile.plain_peak_bytes,
        step_seconds=costs.step_seconds + solution.seconds,
        plain_step_seconds=costs.step_seconds,
        replay_flops=sum(solution.options[i].flops for i in starts),
        bound_seconds=costs.step_seconds + bound(costs, max(budget, solution.peak_bytes)),
        device=profile.device,
        solver=solution.solver,
        lines=_lines(costs, solution, starts),
        timing=profile.timing,
        host_bytes=sum(solution.options[i].host_bytes for i in starts),
        loop=profile.loop,
        advice=advice,
    )
    source, asked_of = f"a budget of {budget:,} bytes", dataclasses.replace(profile, costs=costs)
    return Plan(choices_of(profile, solution), source, prediction, profile.modules, profile=asked_of)


def _lines(costs: Costs, solution: Solution, starts: Sequence[int]) -> tuple[Line, ...]:
    """Describes the segments, those treated alike together; `starts` is where an option begins."""
    groups: dict[tuple[str, str, Option], list[str]] = {}
    for start in starts:
        segment = costs.segments[start]
        groups.setdefault((starred(segment.path), segment.kind, solution.options[start]), []).append(segment.path)
    lines: list[Line] = []
    for (pattern, kind, option), paths in groups.items():
        where = pattern if len(set(paths)) > 1 else paths[0]
        freed = max(0, costs.kinds[kind].options[0].saved_bytes * option.span - option.saved_bytes)
        what, saved = _what(option), option.saved_bytes
        lines.append(Line(where, len(paths), what, saved, freed, option.seconds, option.host_bytes))
    return tuple(lines)


def _what(option: Option) -> str:
    if not option.regions:
        return "not recomputed"
    whole = "recomputed" if option.span == 1 else f"{option.span} recomputed together"
    parts = [
        (f"{' with '.join(c.paths)} recomputed" if any(c.paths) else whole + ", then each again" * c.nested)
        + (f" but not {', '.join(c.keep)}" if c.keep else "")
        for c in option.regions
    ]
    return "; ".join(parts) + (f"; inputs {stored_in(option.store)}" if option.store else "")
