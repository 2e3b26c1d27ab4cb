"""How texts name a value that was passed."""

from __future__ import annotations


def kind(value: object) -> str:
    """The name of its type; a simulated tensor stands for the real one."""
    return type(value).__name__.replace("FakeTensor", "Tensor")


def say(value: object) -> str:
    """Its type and, where it has one, its shape; else its beginning."""
    shape = getattr(value, "shape", None)
    return f"{kind(value)}: {repr(value)[:80]}" if shape is None else f"{kind(value)} of shape {tuple(shape)}"


_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def size(count: int, up: bool = False) -> str:
    """Bytes in units people read, to two places; upwards, so that the text read back is no less."""
    for unit, name in _UNITS:
        if count >= unit:
            hundredths = -(-count * 100 // unit) if up else round(count * 100 / unit)
            return f"{hundredths // 100}.{hundredths % 100:02} {name}"
    return f"{count} bytes"
