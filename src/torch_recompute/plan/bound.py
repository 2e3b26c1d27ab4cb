"""The certificate: seconds that no schedule of saving and recomputing can do without, whoever plans it.

Problem. "The best of our options" says nothing about the options. How far from the best that *any* planner could do,
with regions cut as it likes and tensors recomputed as often as it likes?

Idea. At any moment after the last segment's forward and before the first backward, the loss and its backward among
them, what is saved fits into the budget beside what else lives then. Whatever backward needs and is not saved is
computed again at least once, from what is saved. So each schedule pays at least for the cheapest
set of operations to run again, over the operations of the whole model, with so many bytes to save. With a price per
byte in the place of the limit that is a minimum cut; segments of one kind share theirs (`cut.py`), and meet only in
whether the output of one must be there for the next, so the whole is a dynamic program over two states per segment.
Any price gives a valid bound; the best price is found where two cuts balance, in a few steps, and the bound is then
the optimum of the linear program of the whole model.

Where host memory may be used, what can leave the device within the time of a step counts as room, and no byte is
worth more than the seconds in which one more leaves it.

It assumes that all of forward comes before all of backward, that what is saved is saved as it is, on the device, and
that the operations are those that were profiled. A segment without a graph counts nothing and gives its output for
free. The bound is blind to what else is alive during backward: it may lie below what any plan can reach.
"""

from __future__ import annotations

import math
from functools import partial

from .cost import Costs
from .cost_rules import check
from .cut import IMPOSSIBLE, Cut, cheapest

# More than the rounding of sums of floats; the bound is lowered by it.
ROUNDING = 1e-12
_NOTHING = Cut(0.0, 0)


def bound(costs: Costs, budget: int) -> float:
    """Seconds that every schedule adds to the step with no region, at the least; infinite if none fits.

    Args:
        costs: The segments; those with a `Graph` are counted.
        budget: The most bytes that may live at any time of the step.
    """
    check(costs)
    room = budget - between(costs)
    if room < 0:
        return math.inf
    highest = math.inf
    if costs.host is not None:
        moved = costs.host.to_host * costs.step_seconds
        room += math.floor(moved if costs.host.bytes is None else min(moved, costs.host.bytes))
        highest = 1 / costs.host.to_host
    whole = partial(_cheapest, costs)
    free = whole(0.0)
    if free.bytes <= room:
        return max(0.0, free.seconds * (1 - ROUNDING))
    tight = whole(1.0, weight=0.0)

    def at(price: float) -> float:
        value = whole(price).value(price)
        return value - price * room - ROUNDING * (value + price * room)

    if tight.bytes > room:
        return math.inf if highest == math.inf else max(0.0, at(highest))
    best = 0.0
    while True:
        # The price at which both cost the same. A cut that is cheaper at this price takes the place of one of them.
        price = (tight.seconds - free.seconds) / (free.bytes - tight.bytes)
        if price <= 0:
            return best
        if price > highest:
            return max(best, at(highest))
        middle = whole(price)
        value = middle.value(price)
        best = max(best, value - price * room - ROUNDING * (value + price * room))
        if value >= tight.value(price) * (1 - ROUNDING):
            return best
        if middle.bytes <= room:
            tight = middle
        else:
            free = middle


def between(costs: Costs) -> int:
    """The most that lives besides what segments saved after the last forward and before the first backward of any."""
    last = len(costs.segments)
    return max([costs.turn_bytes, *(point.bytes for point in costs.points if point.after == last)])


def _cheapest(costs: Costs, price: float, weight: float = 1.0) -> Cut:
    """The cheapest cut of the whole model."""
    made: dict[tuple[str, bool, bool], Cut] = {}

    def of(kind: str, output: bool, input: bool) -> Cut:
        key = kind, output, input
        if key not in made:
            graph = costs.kinds[kind].graph
            made[key] = _NOTHING if graph is None else cheapest(graph, price, output, input, weight)
        return made[key]

    # The cheapest for all that follows, by whether it needs what this place hands on to be there.
    free, demanded = _NOTHING, IMPOSSIBLE
    for segment in reversed(costs.segments):
        free, demanded = (
            min(
                (of(segment.kind, output, input) + rest for output, rest in ((False, free), (True, demanded))),
                key=lambda cut: cut.value(price, weight),
            )
            for input in (False, True)
        )
    return min(free, demanded, key=lambda cut: cut.value(price, weight))
