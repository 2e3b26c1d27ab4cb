"""Whether what was asked for frees anything, found out by calling the model once per label.

Which bytes a forward keeps cannot be seen from structure: around a norm whose consumers are frozen nothing is saved
that a region could drop, and around a single product everything saved is its input. So where an example call is given,
each label is put into the model alone, the model is called once, and what its graph keeps is compared with what it
keeps without any plan. Nothing is replayed, and the model is as before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from .. import errors
from ..memory import saved_activations
from ..plan import Choice, Plan, apply
from ..plan.labels import choices, matching, merge
from ..plan.units import find_units


def _frees_nothing(label: str, model: str, plain: int, kept: int, freeing: Mapping[str, int]) -> str:
    """Text for a label under which as much is kept for backward as without recomputation."""
    known = "".join(f"\n      {word}   {freed:,} bytes" for word, freed in freeing.items())
    others = f"\n  These free something:{known}" if freeing else ""
    return (
        f"{label!r} would cost time and free nothing in {model}: in the call given, {kept:,} bytes are kept for "
        f"backward with it and {plain:,} without.{others}\n"
        "  Leave it out, or place it around more: what a region keeps is its input."
    )


def check(model: nn.Module, placed: Sequence[Choice], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> None:
    """Raises an `ArgumentError` for the first label that keeps as much as no recomputation does."""

    def kept(chosen: Sequence[Choice]) -> int:
        handle = apply(model, Plan(tuple(chosen)))
        try:
            return saved_activations(model, args, None if kwargs is None else dict(kwargs)).total_bytes
        finally:
            handle.remove()

    def of(label: str) -> tuple[Choice, ...]:
        return merge(units, choices(units, label)) or tuple(c for c in placed if label in c.labels)

    units = find_units(model)
    plain = kept(())
    for label in dict.fromkeys(label for choice in placed for label in choice.labels):
        bytes_kept = kept(of(label))
        if bytes_kept >= plain:
            others = {other: plain - kept(of(other)) for other in matching(units) if other != label}
            freeing = {other: freed for other, freed in others.items() if freed > 0}
            name = type(model).__name__
            raise errors.ArgumentError(_frees_nothing(label, name, plain, bytes_kept, freeing))
