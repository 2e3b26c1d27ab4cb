"""How texts name a value that was passed."""

from __future__ import annotations


def kind(value: object) -> str:
    """The name of its type."""
    return type(value).__name__


def say(value: object) -> str:
    """Its type and, where it has one, its shape; else its beginning."""
    shape = getattr(value, "shape", None)
    return f"{kind(value)}: {repr(value)[:80]}" if shape is None else f"{kind(value)} of shape {tuple(shape)}"
