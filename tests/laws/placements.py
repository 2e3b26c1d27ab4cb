"""Placements of regions and saved calls around the three stages of a program.

Each placement takes the stages `a, b, c` and returns one callable with the signature of `a`. `PLACEMENTS` is what laws
are tried over; `runs` is how often each stage enters in one step: once in forward, once per replay of a region around
it that gets that far. `pieces` says whether some region sees only a part of the program.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from support.elastic import Script
from torch_recompute import OnDisk, no_recompute, recompute


def chain(*stages: Callable[..., Any]) -> Callable[..., Any]:
    """The stages one after the other."""

    def chained(*args, **kwargs):
        value = stages[0](*args, **kwargs)
        for stage in stages[1:]:
            value = stage(value)
        return value

    return chained


@dataclass(frozen=True)
class Placement:
    """One way to place regions and saved calls, and how often each stage then runs in a step."""

    name: str
    put: Callable[..., Callable[..., Any]]
    runs: tuple[int, int, int]
    pieces: bool = True
    later: tuple[int, int, int] | None = None

    def after(self, backwards: int) -> tuple[int, ...]:
        """How often each stage has run after some backward calls through one retained graph."""
        return tuple(
            n + (backwards - 1) * (more - 1) for n, more in zip(self.runs, self.later or self.runs, strict=True)
        )


DISK = OnDisk(tempfile.gettempdir())
R, S = recompute, no_recompute


def elastic(fn: Callable[..., Any], when: str = "never") -> Callable[..., Any]:
    """An elastic region that is kept, or evicted at some time; "emptied" takes what its saved calls keep, too."""
    return recompute(fn, elastic=Script("forward", saved=True) if when == "emptied" else Script(when))


def nested_elastic(a: Callable[..., Any], b: Callable[..., Any], c: Callable[..., Any]) -> Callable[..., Any]:
    """Elastic regions in an elastic one; whenever one begins or ends, all are evicted, also the one that still runs."""
    inside = Script("inside")
    return recompute(chain(recompute(a, elastic=inside), b, recompute(c, elastic=inside)), elastic=inside)


PLAIN = Placement("plain", chain, (1, 1, 1), pieces=False)

PLACEMENTS = [
    Placement("whole", lambda a, b, c: R(chain(a, b, c)), (2, 2, 2), pieces=False),
    Placement("parts", lambda a, b, c: chain(R(a), b, R(c)), (2, 1, 2)),
    Placement("each", lambda a, b, c: chain(R(a), R(b), R(c)), (2, 2, 2)),
    Placement("pair", lambda a, b, c: chain(a, R(chain(b, c))), (1, 2, 2)),
    # A replay ends at the input of the inner region when nothing after it is needed ...
    Placement("nested at the end", lambda a, b, c: R(chain(a, R(chain(b, R(c))))), (2, 2, 2)),
    # ... and runs the inner region as part of its own work when something is.
    Placement("nested at the start", lambda a, b, c: R(chain(R(chain(R(a), b)), c)), (4, 3, 2)),
    Placement("nested side by side", lambda a, b, c: R(chain(R(a), R(b), R(c))), (3, 3, 2)),
    Placement("saved first", lambda a, b, c: R(chain(S(a), b, c)), (1, 2, 2)),
    Placement("saved middle", lambda a, b, c: R(chain(a, S(b), c)), (2, 1, 2)),
    Placement("saved last", lambda a, b, c: R(chain(a, b, S(c))), (2, 2, 1)),
    Placement("saved everything", lambda a, b, c: R(chain(S(a), S(b), S(c))), (1, 1, 1)),
    Placement("saved around saved", lambda a, b, c: R(chain(a, S(chain(S(b), c)))), (2, 1, 1)),
    Placement("region in a saved call", lambda a, b, c: R(chain(a, S(chain(R(b), c)))), (2, 2, 1)),
    Placement("saved call in nested regions", lambda a, b, c: R(chain(R(chain(a, S(b))), c)), (3, 1, 2)),
    Placement("saved call three deep", lambda a, b, c: R(chain(R(chain(R(S(a)), b)), c)), (1, 3, 2)),
    Placement(
        "a region in a saved call in a region in a region", lambda a, b, c: R(R(chain(S(R(a)), b, c))), (2, 2, 2)
    ),
    Placement("inputs on the disk", lambda a, b, c: chain(R(a, inputs=DISK), b, R(c, inputs=DISK)), (2, 1, 2)),
    Placement("a saved call on the disk", lambda a, b, c: R(chain(a, S(b, store=DISK), c)), (2, 1, 2)),
    Placement(
        "stored outside of regions", lambda a, b, c: chain(S(a, store=DISK), S(chain(R(b), c), store=DISK)), (1, 2, 1)
    ),
    Placement("elastic and kept", lambda a, b, c: elastic(chain(a, S(b), c)), (1, 1, 1)),
    Placement("elastic and evicted", lambda a, b, c: elastic(chain(a, S(b), c), "forward"), (2, 1, 2)),
    Placement("elastic, evicted with its saved call", lambda a, b, c: elastic(chain(a, S(b), c), "emptied"), (2, 2, 2)),
    Placement(
        "elastic, evicted between two halves",
        lambda a, b, c: elastic(chain(a, S(b), c), "half"),
        (1, 1, 1),
        later=(2, 1, 2),
    ),
    Placement("elastic in elastic, evicted inside", nested_elastic, (3, 2, 2)),
]

NAMES = {placement.name: placement for placement in PLACEMENTS}
