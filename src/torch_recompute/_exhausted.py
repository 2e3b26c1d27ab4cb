"""What is said when memory runs out inside a region: which region, what was alive, and which plan would fit.

An out-of-memory error names the allocation that failed, which is hardly ever the one to blame. Where it passes through
a region, three lines are added to its text, once, by the innermost region. The error stays the same object of the same
class, so `except torch.OutOfMemoryError` and whatever looks at its text (batch-size finders do) work as before.

The engine calls `tell` for an error that is passing through anyway, so a step that has none pays nothing. What it says
of memory and plans is not the engine's to know: `plan/exhausted.py` puts itself into `witness`.

Rejected: `add_note`, which Python 3.10 does not have and which `str(error)`, and so many a log, leaves out; an error
class of our own, which nobody catches yet.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_TOLD = "torch_recompute_region"
_CPU = "DefaultCPUAllocator"  # on a CPU the allocator raises a plain RuntimeError that says who it is

witness: list[Callable[[str, str], str]] = []
"""From the name of a region and the error's text to the lines that are added; at most one."""


def is_exhaustion(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    return isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and _CPU in str(error))


def tell(error: BaseException, region: str, *, replaying: bool) -> None:
    """Adds to an error that memory ran out what is known here; leaves any other alone.

    Args:
        error: What is passing through.
        region: The region's name.
        replaying: Whether it ran again, in backward.
    """
    if not is_exhaustion(error) or hasattr(error, _TOLD):
        return
    setattr(error, _TOLD, region)
    text = "\n".join(map(str, error.args))
    where = f"Out of memory in the region {region}, in its {'replay' if replaying else 'forward'}."
    said = [where, *(_seen(look, region, text) for look in witness)]
    lines = [line for part in said for line in part.split("\n") if line]
    error.args = ("\n".join([text, *(f"  {line}" for line in lines)]),)


def _seen(look: Callable[[str, str], str], region: str, text: str) -> str:
    try:
        return look(region, text)
    except Exception as failure:  # looking must not hide what it looks at
        return f"What was alive could not be found out ({type(failure).__name__}: {failure})."
