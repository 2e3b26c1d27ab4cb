"""Texts for what the doctor is asked and cannot do."""

from __future__ import annotations

from ._say import say


def nothing_to_examine(model: str) -> str:
    """Text for a step that is to be run without weights or values."""
    return (
        f"run=True, but a part of {model} or of its batch lies on the meta device, where nothing can be run.\n"
        "  Leave run out: then a step is simulated, and the report says what was not looked for."
    )


def nothing_watched(model: str) -> str:
    """Text for a report before the first step."""
    return (
        f"doctor.watch has seen no step of {model} yet: it was not called with gradients since.\n"
        "  Ask for the report after a step: loss(model(batch)).backward(); watching.report(). Watch the model that "
        "the training calls, with its wrappers; a compiled one as torch.compile(model) returns it, for model.compile() "
        "calls no hook."
    )


def not_watchable(value: object) -> str:
    """Text for something that has no hooks."""
    return (
        f"doctor.watch(model) needs a torch.nn.Module, whose steps it can see by hooks, but got {say(value)}\n"
        "  Pass the model that the training calls, with its wrappers."
    )


def bad_closely(closely: object) -> str:
    """Text for a number of steps that is none."""
    return (
        f"closely={closely!r} is not a number of steps.\n"
        "  Write a whole number of at least 1, or leave it out: three steps are enough."
    )
