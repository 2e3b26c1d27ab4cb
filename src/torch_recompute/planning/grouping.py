"""Several layers under one region: which groups are worth a trial, and what they cost.

Problem. Where there are many layers, or long sequences, the inputs of recomputed layers do not fit, however little else
is kept. Then some inputs have to be rebuilt from others.

Idea. Layers in a row are recomputed together: of `g` layers one input is kept. Together they are rebuilt whole, so the
group holds `g` layers while its backward runs; where that is too much, each is a region of its own in the replay of
them all (`Choice.nested`), which holds `g` inputs and one layer, for one more forward of all but the last. With the
square root of the layers as `g`, the bytes grow with the square root of the layers.

Groups are powers of two, so a few of them fill any run of equal layers, and a search can take runs in blocks. They are
tried as single layers are, by doing it. In a group nothing is kept but attention, the call that costs most to repeat
for what it stores: where single layers fit, what is kept in them is chosen layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..plan.choice import ATTENTION, DOWN, Choice, Target
from .capture import Captured
from .trials import Call

TOGETHER = 2
LARGEST = 8
KEEPS = ((), (ATTENTION,), (ATTENTION, DOWN))


@dataclass(frozen=True)
class Group:
    """Layers to recompute together.

    Attributes:
        call: How they are called.
        paths: Where they are.
        choice: The region, its paths those of the trial.
    """

    call: Call
    paths: tuple[str, ...]
    choice: Choice

    @property
    def span(self) -> int:
        """How many there are."""
        return len(self.paths)


def groups(captured: Captured, start: int, kinds: Sequence[str]) -> Iterator[Group]:
    """The groups of one kind that are worth a trial.

    Args:
        captured: The segments.
        start: The first of that kind.
        kinds: What kinds of calls it makes, such as "attention".
    """
    runs = _runs(captured, captured.kinds[start])
    if not runs:
        return
    start, longest = max(runs, key=lambda run: run[1])
    keeps = [keep for keep in KEEPS if all(kind in kinds for kind in keep)]
    span = TOGETHER
    while span <= min(longest, LARGEST) and (span == TOGETHER or span * span <= 2 * longest):
        calls = captured.calls[start : start + span]
        call = Call(
            tuple(call.modules[0] for call in calls),
            tuple(call.leaves[0] for call in calls),
            tuple(call.specs[0] for call in calls),
            calls[0].autocast,
        )
        inside = tuple(map(str, range(span)))
        for keep in keeps:
            kept = tuple(Target.of(calls=kind) for kind in keep)
            kept = tuple(Target.of(calls=kind) for kind in keep)
            for nested in (False, True) if span == TOGETHER else (True,):
                yield Group(
                    call,
                    tuple(captured.paths[start : start + span]),
                    Choice(inside, kept, nested=nested),
                )
        span *= 2


def _runs(captured: Captured, kind: int) -> list[tuple[int, int]]:
    """Where segments of a kind take one another's results, and how many of them.

    A run of equal segments is one for the solvers, so where one of them takes something else there is no group at all.
    """
    runs: list[tuple[int, int]] = []
    for index, (other, chained) in enumerate(zip(captured.kinds, captured.chained, strict=True)):
        if other != kind:
            continue
        if runs and sum(runs[-1]) == index and not chained:
            return []
        if runs and sum(runs[-1]) == index:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((index, 1))
    return [run for run in runs if run[1] > 1]
