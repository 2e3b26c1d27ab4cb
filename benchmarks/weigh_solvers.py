"""Ways to choose options for a budget, weighed: what each costs above `choose`, in percent of the step, and its time.

`prices` gives a byte a price and bisects it until the step fits, for each cap on what a replay makes at once; then
layers take back what still fits. `integer` is an integer program for HiGHS through scipy, within a thousandth, for at
most ten seconds. The costs are those of `solver.py` (by arithmetic) and `gap.py` (models on meta), at nine budgets.

    python benchmarks/weigh_solvers.py

Run at commit 28b20e6, `choose` is the search with labels that was there before; see docs/design/009.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gap
import numpy as np
import solver
from _measure import arguments, finish

from torch_recompute.planner.cost import Costs, Option
from torch_recompute.planner.solve import choose, smallest

Way = Callable[[Costs, int], Sequence[Option] | None]
STEPS = 40


def _transient(option: Option) -> int:
    return option.backward_bytes - option.saved_bytes


def _points(costs: Costs) -> list[int]:
    found = [0] * len(costs.segments) + [costs.turn_bytes]
    for point in costs.points:
        found[point.after] = max(found[point.after], point.bytes)
    return found


def _peak(costs: Costs, options: Sequence[Option]) -> int:
    """The most bytes alive, of options that each take one segment."""
    levels = [0, *itertools.accumulate(option.saved_bytes for option in options)]
    own = [
        max(segment.forward_bytes + option.forward_bytes, segment.backward_bytes + option.backward_bytes)
        for segment, option in zip(costs.segments, options, strict=True)
    ]
    return max(map(sum, (*zip(levels, own, strict=False), *zip(levels, _points(costs), strict=True))))


def prices(costs: Costs, budget: int) -> Sequence[Option] | None:
    """A price per byte with repair; no groups of layers."""
    kinds = {name: [option for option in kind.options if option.span == 1] for name, kind in costs.kinds.items()}

    def at(price: float, cap: int) -> list[Option]:
        best = {
            name: min(
                [option for option in own if _transient(option) <= cap] or [min(own, key=_transient)],
                key=lambda option: (option.seconds + price * option.saved_bytes, option.saved_bytes),
            )
            for name, own in kinds.items()
        }
        return [best[segment.kind] for segment in costs.segments]

    found = [at(0.0, max(map(_transient, itertools.chain(*kinds.values()))))]
    if _peak(costs, found[0]) <= budget:
        return found[0]
    found.clear()
    for cap in sorted({_transient(option) for own in kinds.values() for option in own}):
        low, high = 0.0, 1.0
        if _peak(costs, at(high, cap)) > budget:
            continue
        for _ in range(STEPS):  # prices differ by orders of magnitude
            if _peak(costs, at(low := high / 4, cap)) > budget:
                break
            high = low
        for _ in range(STEPS):
            middle = (low + high) / 2
            low, high = (low, middle) if _peak(costs, at(middle, cap)) <= budget else (middle, high)
        options = at(high, cap)
        for place in reversed(range(len(options))):
            before = options[place]
            for option in sorted(kinds[costs.segments[place].kind], key=lambda option: option.seconds):
                options[place] = option
                if option.seconds >= before.seconds or _peak(costs, options) <= budget:
                    break
            if options[place].seconds >= before.seconds:
                options[place] = before
        found.append(options)
    return min(found, key=lambda options: sum(option.seconds for option in options), default=None)


def integer(costs: Costs, budget: int) -> Sequence[Option] | None:
    """An integer program: one yes or no per segment and option."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import lil_array

    segments, points, size = costs.segments, _points(costs), len(costs.segments)
    moves = [
        (index, option)
        for index in range(size)
        for option in costs.kinds[segments[index].kind].options
        if index + option.span <= size and len({s.kind for s in segments[index : index + option.span]}) == 1
    ]
    rows = lil_array((2 * size + 1, len(moves)))
    low: Any = np.array([1.0] * size + [-np.inf] * (size + 1))
    high: Any = np.array([1.0] * size + [budget / 2**20] * size + [(budget - points[-1]) / 2**20])
    for column, (index, option) in enumerate(moves):
        stop = index + option.span
        for covered in range(index, stop):
            rows[covered, column] = 1.0
        own = max(
            segments[index].forward_bytes + option.forward_bytes,
            segments[stop - 1].backward_bytes + option.backward_bytes,
            points[index],
            max(points[index + 1 : stop], default=0) + option.saved_bytes,
        )
        rows[size + index, column] = own / 2**20
        for later in range(index + 1, size + 1):
            rows[size + later, column] = option.saved_bytes / 2**20
    unit = max(option.seconds for _, option in moves)
    result: Any = milp(
        [option.seconds / unit for _, option in moves],
        integrality=np.ones(len(moves)),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(rows.tocsc(), low, high),
        options={"time_limit": 10, "mip_rel_gap": 1e-3},
    )
    return None if result.x is None else [move[1] for move, x in zip(moves, result.x, strict=True) if x > 0.5]


def cases() -> Iterator[tuple[str, Costs]]:
    """Stacks by arithmetic, and models on meta."""
    for layers in (8, 32, 80, 126):
        yield f"{layers} equal layers", solver.model(layers, (4,))
    for layers in (12, 80):
        yield f"{layers} of two kinds", solver.model(layers, (4, 2))
    for name in gap.CASES:
        yield name, gap.planner(name).costs


def measured(name: str, costs: Costs) -> dict[str, Any]:
    """Nine budgets between the least, without groups of layers, and no recomputation."""
    single = gap.only(costs, lambda option: option.span == 1)
    least = smallest(single).peak_bytes
    most = _peak(costs, [costs.kinds[segment.kind].options[0] for segment in costs.segments])
    ways: dict[str, Way] = {"choose": lambda c, b: choose(c, b).options, "prices": prices, "integer": integer}
    row: dict[str, Any] = {"case": name}
    known: list[float] = []
    for word, way in ways.items():
        more, taken = [], []
        for tenth in range(1, 10):
            start = time.process_time()
            options = way(costs, least + (most - least) * tenth // 10)
            taken.append(time.process_time() - start)
            if word == "choose":
                assert options is not None
                known.append(sum(option.seconds / option.span for option in options))
            elif options is not None:
                seconds = sum(option.seconds for option in options)
                more.append(100 * (seconds - known[tenth - 1]) / (costs.step_seconds + known[tenth - 1]))
        row[f"{word}_seconds"] = round(max(taken), 2)
        if word != "choose":
            row[f"{word}_mean_percent"] = round(sum(more) / max(1, len(more)), 3)
            row[f"{word}_worst_percent"] = round(max(more, default=float("nan")), 3)
    return row


def main() -> None:
    """Weighs all cases."""
    options = arguments("Ways to choose options for a budget, weighed.")
    figures = []
    print("case                 choose s | prices: mean %  worst %      s | integer: mean %  worst %      s")
    for name, costs in cases():
        row = measured(name, costs)
        figures.append(row)
        print(
            f"{name:20} {row['choose_seconds']:8.2f} | {row['prices_mean_percent']:14.3f} "
            f"{row['prices_worst_percent']:8.3f} {row['prices_seconds']:6.2f} | {row['integer_mean_percent']:15.3f} "
            f"{row['integer_worst_percent']:8.3f} {row['integer_seconds']:6.2f}"
        )
    finish(options, figures, all(row["choose_seconds"] < 1 for row in figures))


if __name__ == "__main__":
    main()
