"""Which regions a difference is likely to come from.

A replay that does something else makes wrong the gradients of its own region, and through its input's gradient those of
everything before it; nothing after it. So the first gradient of the backward that is wrong belongs to the region, or
lies close before it. Regions are put in that order, those whose decisions were seen to flip first, and the first
`TRIALS` are tried: a step with this region alone.

If none differs alone, the order is all there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..plan.plan import Choice, Plan
from .result import Row

TRIALS = 8


def likely(
    choices: Sequence[Choice], rows: Sequence[Row], flipped: Iterable[Choice], differs: Callable[[Plan], bool]
) -> tuple[tuple[str, ...], bool]:
    """The regions, the most likely first, and whether each was tried alone and differs.

    Args:
        choices: The plan's.
        rows: What differs.
        flipped: The choices whose replays decided otherwise.
        differs: Whether a step with a plan differs.
    """
    gradients = [row.name for row in rows if row.kind == "gradients"]
    first = [*flipped]

    def place(choice: Choice) -> tuple[bool, int]:
        inside = (i for i, name in enumerate(gradients) if any(_is_of(name, path) for path in choice.paths))
        return choice not in first, next(inside, len(gradients))

    ordered = sorted(choices, key=place)
    alone = [choice for choice in ordered[:TRIALS] if differs(Plan((choice,), "one region of a plan"))]
    if alone:
        return tuple(_name(choice) for choice in alone), True
    close = [choice for choice in ordered if place(choice) < (True, len(gradients))] or ordered
    return tuple(_name(choice) for choice in close), False


def _is_of(name: str, path: str) -> bool:
    module = path.partition("@")[0]
    return not module or name.removeprefix("the gradient of ").startswith(f"{module}.")


def _name(choice: Choice) -> str:
    return " to ".join(dict.fromkeys((choice.paths[0] or "the model", choice.paths[-1] or "the model")))
