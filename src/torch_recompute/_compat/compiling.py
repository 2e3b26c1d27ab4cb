"""What `torch.compile` is not to look into, and what it could not compile: dynamo's own counters.

The counters count from the start of the process, and are there only once something has been compiled.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

R = TypeVar("R")
_C: Any = torch._C
_compiler_at_work: Callable[[], Any] = _C._dynamo.eval_frame.get_eval_frame_callback


def eagerly(fn: Callable[..., R], *args: Any) -> R:
    """Calls `fn(*args)` so that torch.compile does not see it, as when compiled autograd opens what was saved."""
    if torch.compiler.is_dynamo_compiling() or _compiler_at_work() is not None:
        return _unseen(fn, *args)
    return fn(*args)


@torch._disable_dynamo
def _unseen(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(*args)


# The counter has no reasons; torch's log has them.
NO_CUDA_GRAPH = "no CUDA graph (cudagraph_skips)"


def fallbacks() -> dict[str, int]:
    """How often each thing was not compiled, or not captured, so far, by its reason."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return {}
    counters: Mapping[str, Mapping[str, int]] = utils.counters
    found = {f"graph break: {_first_line(why)}": count for why, count in counters["graph_break"].items()}
    inductor = counters["inductor"]
    if inductor.get("cudagraph_skips"):
        found[NO_CUDA_GRAPH] = inductor["cudagraph_skips"]
    return found


def _first_line(text: str) -> str:
    return next((line.strip() for line in str(text).splitlines() if line.strip()), "")
