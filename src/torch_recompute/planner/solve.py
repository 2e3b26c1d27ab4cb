"""From a profile and a budget to a plan: an option for each segment, so that the step fits and is the fastest.

The inequalities of `cost.py` are read from the end of the model. Let the need at a place be the bytes that must be free
there, above what the segments before it have saved. For an option chosen at that place,

    need before = max(what the option itself takes, what it saves + need after)

so the end of a model under some choice is a pair (need, seconds) that knows no budget, and the need at the start is the
peak of the step. A dynamic program from the last segment to the first keeps the choices for the end that no other
equals or beats in both; at the start they are the whole curve of peak against seconds. Where more than `WIDTH` are left
at a place, one in each stretch of the curve is kept, the nearest to its lower convex hull. Until then the answer is
exact, and says so. Seconds are whole numbers in the program, so that ties are ties: among choices of equal cost the one
with fewer FLOPs is taken, then the one with the smaller peak, then the simpler one.

A module that is called several times, and a limit on host memory, give several such problems; the best of them is
taken. What else was tried is in docs/design/009.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .. import errors
from ..errors.text import starred
from ..memory.budget import Limit, bytes_meant
from ..plan.choice import Choice, joined, kept_in_words, stored_in
from ..plan.plan import NOT_RECOMPUTED, OFFLOADED, Line, Plan, Prediction
from ..plan.roles import inside
from ..simulation.devices import SLOW
from .bound import bound
from .cost import Costs, Kind, Option, Segment, Solution, begins, launched_by, peak, simplicity
from .profile import Profile

if TYPE_CHECKING:
    import numpy as np

    Ints = np.ndarray[Any, np.dtype[np.int64]]

WIDTH = 512  # choices for the end of a model that are kept at each place
PRICES = 64  # directions in which the distance to the convex hull is looked at
MOST = 64  # problems that modules which are called several times may give
# Of the 61 bits of a cost: so many for seconds, the others for FLOPs.
SECONDS_BITS, FLOPS_BITS = 40, 21


def solve(profile: Profile, *, budget: int | float | str) -> Plan:
    """Makes the plan for a budget from a profile.

        costs = profile(model, batch, loss=loss)
        plans = [solve(costs, budget=budget) for budget in ("24GiB", "16GiB", 0.3)]

    The plan is that of `make_plan`, and simulated as that is, where the profile comes from `profile` in this process:
    the model, the batch and the settings (autocast) are to be as they were then, and no plan in the model. Of a profile
    that was read from JSON, copied or changed the prediction follows from the costs alone.

    Args:
        profile: What the step costs.
        budget: The most bytes alive at any time of the step, parameters, gradients and optimizer included: a number,
            or text as "24GiB"; or a fraction between 0 and 1 of the way from the least feasible peak to that of the
            step without recomputation; or "fit", which costs alone do not know.

    Raises:
        BudgetError: No choice fits; it carries the least budget and the plan that reaches it.
        ArgumentError: The budget is invalid.
    """
    if not isinstance(profile, Profile):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise errors.ArgumentError(
            f"solve takes what a step costs, but got {errors.say(profile)}\n"
            '  Write solve(profile(model, batch, loss=...), budget="24GiB"); a plan has it as plan.profile.'
        )
    return profile.solve(budget=budget)


def by_costs(profile: Profile, budget: int | float | str) -> Plan:
    """The plan for a budget by the costs of a profile alone; see `solve`."""
    least = smallest(profile.costs)
    wanted = bytes_meant(budget, lambda: least.peak_bytes, profile.plain_peak_bytes, None)
    try:
        solution = choose(profile.costs, wanted)
    except errors.BudgetError as error:
        raise errors.BudgetError(str(error), error.smallest, planned(profile, profile.costs, least, wanted)) from None
    return planned(profile, profile.costs, solution, wanted)


def choices_of(profile: Profile, solution: Solution) -> tuple[Choice, ...]:
    """The regions that a solver chose."""
    found: dict[Choice, None] = {}  # that of a module which is called several times is one for all its calls
    names = [segment.path for segment in profile.costs.segments]
    for start in begins(solution.options):
        option = solution.options[start]
        together = tuple(names[start : start + option.span])
        for region in option.regions:
            paths = tuple(joined(path, part) for path in together for part in region.paths)
            carry = decides(paths, profile.carries) and not region.offload
            found[replace(region, paths=paths, carry=carry)] = None
    return (*found, *profile.always.choices)


def decides(paths: Iterable[str], routers: Sequence[str]) -> bool:
    """Returns whether one of some modules routes tokens, so that a region around it carries the decisions."""
    return any(inside(router, path) for path in paths for router in routers)


def planned(
    profile: Profile,
    costs: Costs,
    solution: Solution,
    budget: Limit,
    peak: int | None = None,
    advice: str = "",
    reserved: Mapping[str, int] = MappingProxyType({}),
) -> Plan:
    """The plan of a solution, with its prediction.

    Args:
        profile: What the plan is for.
        costs: What the solution was chosen from.
        solution: What was chosen.
        budget: In bytes, with how it was written.
        peak: Of the simulated step with this plan; None if it was not simulated.
        advice: What else would lower that peak.
        reserved: The bytes that an allocator reserves for it, as a prediction has them.
    """
    starts = begins(solution.options)
    of_host = costs.parts and not profile.timing  # steps that were run have the host in their seconds
    prediction = Prediction(
        budget_bytes=int(budget),
        peak_bytes=solution.peak_bytes if peak is None else peak,
        plain_peak_bytes=profile.own_peak_bytes,
        step_seconds=costs.step_seconds + solution.seconds,
        plain_step_seconds=costs.step_seconds - profile.always.seconds,
        replay_flops=sum(solution.options[i].flops for i in starts) + profile.always.flops,
        bound_seconds=costs.step_seconds + bound(costs, max(budget, solution.peak_bytes)),
        device=profile.device,
        solver=solution.solver,
        lines=_lines(costs, solution, starts),
        timing=profile.timing,
        host_bytes=sum(solution.options[i].host_bytes for i in starts),
        loop=profile.loop,
        advice=advice,
        budget=budget.said,
        assumed=profile.assumed,
        uncounted=profile.uncounted,
        tiled=profile.always.words,
        switched=profile.switched,
        host=costs.host.name,
        waiting_seconds=waiting(costs, solution.options) if of_host else 0.0,
        on_slow_host=_behind_full(costs, solution.options, budget) if of_host else "",
        **reserved,
    )
    source, asked_of = f"a budget of {budget.said}", replace(profile, costs=costs)
    return Plan(choices_of(profile, solution), source, prediction, profile.modules, profile=asked_of)


def waiting(costs: Costs, options: Sequence[Option]) -> float:
    """The seconds of the step, with one option per segment, in which the device waits for its host."""
    if not costs.host.apart:
        return 0.0
    found = sum(map(costs.host.waited, costs.parts))
    for start in begins(options):
        option = options[start]
        plain = costs.kinds[costs.segments[start].kind].work.times(option.span)
        found += costs.host.added(plain, option.work) - option.work.device
    return max(0.0, found)


def _behind_full(costs: Costs, options: Sequence[Option], budget: int) -> str:
    """Says how far a slow host would put options behind recomputing every layer, where that fits; "" if it would not.

    The host is compared with the slowest that was seen.
    """
    full = {
        name: next((i for i, one in enumerate(kind.options) if one.is_full), 0) for name, kind in costs.kinds.items()
    }
    every = tuple(costs.kinds[segment.kind].options[full[segment.kind]] for segment in costs.segments)
    if not costs.host.apart or costs.host == SLOW or not any(full.values()) or peak(costs, every).bytes > budget:
        return ""
    slow = launched_by(costs, SLOW)

    def slower(chosen: Sequence[Option]) -> float:
        kinds = ((costs.segments[start].kind, chosen[start]) for start in begins(chosen))
        seconds = (slow.kinds[kind].options[costs.kinds[kind].options.index(option)].seconds for kind, option in kinds)
        return sum(seconds) / slow.step_seconds

    mine, others = slower(options), slower(every)
    if mine <= others:
        return ""
    return f'on a slow one (host="slow") this plan would take {mine:+.0%}, and recomputing every layer {others:+.0%}'


def _lines(costs: Costs, solution: Solution, starts: Sequence[int]) -> tuple[Line, ...]:
    """Describes the segments, those treated alike together; `starts` is where an option begins."""
    groups: dict[Line, list[str]] = {}
    for start in starts:
        segment, option = costs.segments[start], solution.options[start]
        freed = max(0, costs.kinds[segment.kind].options[0].saved_bytes * option.span - option.saved_bytes)
        whole = any(path == "" for choice in option.regions for path in choice.paths) and not option.offload
        figures = option.saved_bytes, freed, option.seconds, option.host_bytes
        line = Line(starred(segment.path), 1, _what(option), *figures, option.span, whole)
        groups.setdefault(line, []).append(segment.path)
    return tuple(
        replace(line, where=line.where if len(set(paths)) > 1 else paths[0], count=len(paths))
        for line, paths in groups.items()
    )


def _what(option: Option) -> str:
    if not option.regions:
        return NOT_RECOMPUTED
    if option.offload:
        parts = [path for choice in option.regions for path in choice.paths if path]
        return f"{OFFLOADED} {stored_in(option.store)}" + (f": {', '.join(parts)}" if parts else "")
    whole = "recomputed" if option.span == 1 else f"{option.span} recomputed together"
    parts = [
        (f"{' with '.join(c.paths)} recomputed" if any(c.paths) else whole + ", then each again" * c.nested)
        + (f" in {c.tiles} tiles" if c.tiles else "")
        + (f", {kept_in_words(c.kept)}" if c.keep else "")
        for c in option.regions
    ]
    return "; ".join(parts) + (f"; inputs {stored_in(option.store)}" if option.store else "")


def choose(costs: Costs, budget: int) -> Solution:
    """The choice that fits into a budget and costs the fewest seconds; see `Solver`, which serves several budgets."""
    return Solver(costs).choose(budget)


def smallest(costs: Costs) -> Solution:
    """The choice with the least peak, and of those the one that costs the fewest seconds."""
    return Solver(costs).smallest


def frontier(costs: Costs, most: int = 200) -> list[Solution]:
    """The curve of budget against seconds: at most so many choices, by rising peak and falling seconds."""
    return Solver(costs).frontier(most)


class Solver:
    """The choices that some costs leave; their curves know no budget, and are made once.

    Args:
        costs: What there is to choose from.

    Raises:
        ArgumentError: Numpy is not installed.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs, self._curves = costs, _curves(costs)

    @property
    def smallest(self) -> Solution:
        """The choice with the least peak, and of those the one that costs the fewest seconds."""
        return min(
            (curve.at(0) for curve in self._curves), key=lambda solution: (solution.peak_bytes, *_by_cost(solution))
        )

    def choose(self, budget: int) -> Solution:
        """The choice that costs the fewest seconds; `Solution.solver` says how exact it is.

        Args:
            budget: The most bytes that may live at any time of the step.

        Raises:
            BudgetError: Nothing fits; it carries the least budget for which something does, and the choice that does.
        """
        fitting = [curve for curve in self._curves if curve.least <= budget]
        if fitting:
            return min((curve.within(budget) for curve in fitting), key=_by_cost)
        solution, said = self.smallest, budget.said if isinstance(budget, Limit) else Limit(budget).said
        moment = peak(self._costs, solution.options)
        exact = "" if moment.bytes < 2**10 else f" ({moment.bytes} bytes)"
        least = errors.size(moment.bytes, up=True)
        text = (
            f"budget={said} is too small: no choice of what to recompute needs less than "
            f"{least}{exact}.\n"
            f"  With that choice the peak is {moment.where}, where {errors.size(moment.fixed)} are not for a plan to "
            "change: parameters, gradients, optimizer state and what is between the planned modules.\n"
            f'  Pass budget="{least.replace(" ", "")}" or more, or a smaller batch. The choice that needs the least is '
            ".solution of this error, and its bytes are .smallest."
        )
        raise errors.BudgetError(text, moment.bytes, solution)

    def frontier(self, most: int) -> list[Solution]:
        """The curve of budget against seconds, see `frontier`."""
        points = [point for curve in self._curves for point in curve.points(most)]
        falling: list[Solution] = []
        for point in sorted(points, key=lambda point: (point.peak_bytes, *_by_cost(point))):
            if not falling or _by_cost(point)[:2] < _by_cost(falling[-1])[:2]:
                falling.append(point)
        return falling


def unplannable_repeated_modules(costs: Costs) -> tuple[tuple[str, str], ...]:
    """The modules that are called several times and have no region that fits all their calls, and why."""
    why = "is called {} times in one forward, and no region can be the same in all of them"
    return tuple((path, why.format(n)) for path, n in _repeated(costs).items() if len(_ways(costs, path)) == 1)


def _curves(costs: Costs) -> list[_Curve]:
    if find_spec("numpy") is None:
        raise errors.ArgumentError(
            "planning for a memory budget needs the package numpy, which is not installed.\n  Write: pip install numpy"
        )
    return [_Curve(one) for restricted in _hosted(costs) for one in _tied(restricted)]


def _options(costs: Costs) -> list[Option]:
    return [option for kind in costs.kinds.values() for option in kind.options]


def _by_cost(solution: Solution) -> tuple[float, int, int]:
    flops = sum(solution.options[start].flops for start in begins(solution.options))
    return solution.seconds, flops, solution.peak_bytes


@dataclass(frozen=True)
class _Moves:
    """The options of a kind that take the same number of segments, the simplest first, as columns."""

    span: int
    options: tuple[Option, ...]
    saved: Ints
    forward: Ints
    backward: Ints
    cost: Ints


@dataclass(frozen=True)
class _Ends:
    """Choices for the end of a model, by rising need and falling cost: the first move of each, and what follows it."""

    need: Ints
    cost: Ints
    move: Ints
    after: Ints

    def taken(self, which: Ints) -> _Ends:
        return _Ends(self.need[which], self.cost[which], self.move[which], self.after[which])


class _Curve:
    """The curve of peak against cost for one problem; `exact` if every choice was kept."""

    def __init__(self, costs: Costs) -> None:
        import numpy as np

        self.costs, self.exact = costs, True
        size = len(costs.segments)
        self.points_at = [0] * size + [costs.turn_bytes]
        for point in costs.points:
            self.points_at[point.after] = max(self.points_at[point.after], point.bytes)
        every = _options(costs)
        exponent = SECONDS_BITS - math.frexp(size * max(option.seconds for option in every))[1]
        shift = max(0, (size * max(option.flops for option in every)).bit_length() - FLOPS_BITS)

        def cost(option: Option) -> int:
            return (round(math.ldexp(option.seconds, exponent)) << FLOPS_BITS) + (option.flops >> shift)

        self._moves = {name: _columns(kind.options, cost) for name, kind in costs.kinds.items()}
        nothing = np.zeros(1, dtype=np.int64)
        self._places = [_Ends(nothing + self.points_at[size], nothing, nothing, nothing)]  # from the end
        for index in reversed(range(size)):
            ends = _undominated(self._ends(index))
            if len(ends.need) > WIDTH:
                ends, self.exact = ends.taken(_thinned(ends.need, ends.cost, WIDTH)), False
            self._places.append(ends)
        self._places.reverse()

    def moves(self, index: int) -> Iterator[tuple[_Moves, Ints]]:
        """The moves that may begin at a segment, and what each takes above what was saved before it."""
        import numpy as np

        segments = self.costs.segments
        for moves in self._moves[segments[index].kind]:
            taken = segments[index : index + moves.span]
            if len(taken) == moves.span and all(segment.kind == taken[0].kind for segment in taken):
                own = np.maximum(moves.forward + taken[0].forward_bytes, moves.backward + taken[-1].backward_bytes)
                inside = max(self.points_at[index + 1 : index + moves.span], default=0)
                yield moves, np.maximum(np.maximum(own, moves.saved + inside), self.points_at[index])

    def _ends(self, index: int) -> _Ends:
        """All choices for what begins at a segment."""
        import numpy as np

        parts: list[tuple[Ints, ...]] = []
        offset = 0
        for moves, own in self.moves(index):
            after = self._places[-moves.span]
            need = np.maximum(own[:, None], moves.saved[:, None] + after.need)
            cost = moves.cost[:, None] + after.cost
            move, follows = np.indices(need.shape, dtype=np.int64)
            parts.append((need.ravel(), cost.ravel(), move.ravel() + offset, follows.ravel()))
            offset += len(own)
        return _Ends(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    @property
    def least(self) -> int:
        """The least peak."""
        return int(self._places[0].need[0])

    def within(self, budget: int) -> Solution:
        """The cheapest choice with a peak of no more."""
        import numpy as np

        return self.at(int(np.searchsorted(self._places[0].need, budget, side="right")) - 1)

    def points(self, most: int) -> list[Solution]:
        """Picks at most so many points, spread along the curve."""
        ends = self._places[0]
        return [self.at(int(at)) for at in _thinned(ends.need, ends.cost, most)]

    def at(self, at: int) -> Solution:
        """The choice at a position of the curve."""
        index, chosen = 0, list[Option]()
        while index < len(self.costs.segments):
            ends = self._places[index]
            option = [option for moves, _ in self.moves(index) for option in moves.options][int(ends.move[at])]
            chosen += [option] * option.span
            at, index = int(ends.after[at]), index + option.span
        return self.solution(chosen, "exact" if self.exact else f"near the best: {WIDTH} choices kept per segment")

    def solution(self, chosen: Sequence[Option], solver: str) -> Solution:
        """The answer, its peak counted again from the exact bytes."""
        seconds = math.fsum(chosen[start].seconds for start in begins(chosen))
        return Solution(tuple(chosen), peak(self.costs, chosen).bytes, seconds, solver)


def _columns(options: Sequence[Option], cost: Callable[[Option], int]) -> list[_Moves]:
    import numpy as np

    found: list[_Moves] = []
    for span in sorted({option.span for option in options}):
        same = tuple(sorted((option for option in options if option.span == span), key=simplicity))
        rows = [(o.saved_bytes, o.forward_bytes, o.backward_bytes, cost(o)) for o in same]
        found.append(_Moves(span, same, *np.array(rows, dtype=np.int64).T))
    return found


def _undominated(ends: _Ends) -> _Ends:
    """Returns the options that no other is at least as good as; the first one among equals."""
    import numpy as np

    order = np.lexsort((ends.cost, ends.need))
    cost = ends.cost[order]
    return ends.taken(order[np.concatenate(([True], cost[1:] < np.minimum.accumulate(cost)[:-1]))])


def _thinned(need: Ints, cost: Ints, most: int) -> Ints:
    """Positions along a falling curve: in each of so many stretches the nearest to its convex hull, and both ends."""
    import numpy as np

    if len(need) <= most:
        return np.arange(len(need))
    right = (need - need[0]) / (need[-1] - need[0])
    up = (cost - cost[-1]) / (cost[0] - cost[-1])
    above = np.full(len(need), np.inf)
    for angle in np.linspace(0, np.pi / 2, PRICES):
        along = up * np.cos(angle) + right * np.sin(angle)
        np.minimum(above, along - along.min(), out=above)
    above[[0, -1]] = np.inf  # the ends are kept in any case, beside one of each stretch
    stretch = np.minimum(((1 + right - up) / 2 * (most - 2)).astype(np.int64), most - 3)
    order = np.lexsort((above, stretch))
    nearest = order[np.unique(stretch[order], return_index=True)[1]]
    return np.unique(np.concatenate(([0], nearest, [len(need) - 1])))


def _hosted(costs: Costs) -> Iterator[Costs]:
    """Costs in which no choice takes more host memory than there is; the costs themselves if none can.

    What the first layers keep counts at every later moment and has the longest time to come back, so host memory goes
    to the first that it has room for if each takes up to so many bytes: one problem for each size of an option.
    """
    sizes = sorted({option.host_bytes for option in _options(costs)} - {0})
    if costs.host_memory is None or costs.host_memory.bytes is None or not sizes:
        yield costs
        return
    seen: set[tuple[str, ...]] = set()
    for size in sizes:
        room, kinds, segments = costs.host_memory.bytes, dict[str, Kind](), list[Segment]()
        for segment in costs.segments:
            options = costs.kinds[segment.kind].options
            wanted = max((option.host_bytes for option in options if option.host_bytes <= size), default=0)
            allowed = wanted if wanted <= room else 0
            room -= allowed
            name = f"{segment.kind} with {allowed} bytes in host memory" if wanted else segment.kind
            kinds.setdefault(name, Kind(tuple(option for option in options if option.host_bytes <= allowed)))
            segments.append(replace(segment, kind=name))
        names = tuple(segment.kind for segment in segments)
        if names not in seen:
            seen.add(names)
            yield replace(costs, kinds=kinds, segments=tuple(segments))


def _repeated(costs: Costs) -> dict[str, int]:
    """The modules that are called several times (a shared layer of ALBERT, a looped transformer), and how often."""
    return {path: n for path, n in Counter(segment.path for segment in costs.segments).items() if n > 1}


def _tied(costs: Costs) -> Iterator[Costs]:
    """Costs in which all calls of a module have one choice, one problem for each.

    Where several modules are called again the combinations multiply; of each so many are kept that at most `MOST`
    problems are left: that without regions, and those that save the fewest bytes.
    """
    ways = [_ways(costs, path) for path in _repeated(costs)]
    most = max(1, int(MOST ** (1 / max(1, len(ways))) + 1e-9) - 1)

    def saved(way: dict[str, Option]) -> int:
        return sum(option.saved_bytes for option in way.values())

    for chosen in itertools.product(*([way[0], *sorted(way[1:], key=saved)[:most]] for way in ways)):
        kinds = {kind: Kind((option,)) for way in chosen for kind, option in way.items()}
        yield replace(costs, kinds={**costs.kinds, **kinds})


def _ways(costs: Costs, path: str) -> list[dict[str, Option]]:
    """The choices that there are for every call of a module, each as the option of each kind of call."""
    kinds = dict.fromkeys(segment.kind for segment in costs.segments if segment.path == path)
    options = [{o.regions: o for o in costs.kinds[kind].options if o.span == 1} for kind in kinds]
    common = [choice for choice in options[0] if all(choice in others for others in options)]
    return [{kind: option[choice] for kind, option in zip(kinds, options, strict=True)} for choice in common]
