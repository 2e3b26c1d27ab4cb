"""One choice for all calls of a module that a forward calls several times.

Problem. A layer that is shared (ALBERT, a weight-tied or looped transformer) is one module and many segments: each call
saves bytes of its own, at a place of its own in the step. A plan places regions on modules, so all calls get the same
choice, and solvers choose segment by segment.

Idea. Each choice for such a module gives costs in which its calls have that option alone; each is solved, and the best
is taken, as with limits on host memory (`hosting.py`). What is tied depends on the costs alone, so a larger budget
still never costs more.

Where several modules are shared the combinations multiply; then each keeps so many of its choices that at most `MOST`
combinations are left: that without regions, and those that save the fewest bytes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from .cost import Costs, Option

MOST = 64
Ways = list[dict[str, Option]]


def tied(costs: Costs) -> Iterator[Costs]:
    """Costs in which all calls of a module have one choice; the costs themselves if each is called once."""
    times = Counter(segment.path for segment in costs.segments)
    ways = [_ways(costs, path) for path, count in times.items() if count > 1]
    most = int(MOST ** (1 / max(1, len(ways))) + 1e-9)
    for chosen in itertools.product(*(_fewest(way, most) for way in ways)):
        options = {kind: option for way in chosen for kind, option in way.items()}
        kinds = {
            name: replace(kind, options=(options[name],)) if name in options else kind
            for name, kind in costs.kinds.items()
        }
        yield replace(costs, kinds=kinds)


def untied(costs: Costs) -> tuple[tuple[str, str], ...]:
    """The modules that are called several times and have no choice for all their calls but none, and why."""
    times = Counter(segment.path for segment in costs.segments)
    return tuple(
        (path, f"is called {count} times in one forward, and no region can be the same in all of them")
        for path, count in times.items()
        if count > 1 and len(_ways(costs, path)) == 1
    )


def _ways(costs: Costs, path: str) -> Ways:
    """The choices that there are for every call of a module, each as the option of each kind of call."""
    kinds = dict.fromkeys(segment.kind for segment in costs.segments if segment.path == path)
    options = [{(o.regions, o.store): o for o in costs.kinds[kind].options if o.span == 1} for kind in kinds]
    common = [choice for choice in options[0] if all(choice in others for others in options)]
    return [{kind: option[choice] for kind, option in zip(kinds, options, strict=True)} for choice in common]


def _fewest(ways: Ways, most: int) -> Ways:
    """At most so many of them: the first, and of the rest those that save the fewest bytes."""
    rest = sorted(ways[1:], key=lambda way: sum(option.saved_bytes for option in way.values()))
    return [ways[0], *rest[: max(1, most - 1)]]
