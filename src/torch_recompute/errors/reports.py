"""Texts for what `torch-recompute report` is asked and cannot do."""

from __future__ import annotations


def no_step_in_plan(path: str) -> str:
    """Text for a plan whose file does not say which step it is for."""
    return (
        f"{path} holds a plan and does not say for which model and batch; a file that torch-recompute plan --out wrote "
        "does. Add --model MODEL, and what else torch-recompute plan takes to describe a step."
    )


def bad_step_in_plan(path: str, word: str) -> str:
    """Text for a plan whose file says of its step what is no word for one."""
    return (
        f"{path} says {word} of its step, which no command line of torch-recompute plan says. Make the plan again, or "
        "add --model MODEL: then the command line alone says which step is meant."
    )


def too_few_points(points: int) -> str:
    """Text for a curve of too few points."""
    return f"--points is {points}; expected 0, for no curve, or at least 2. Write for example --points 10."
