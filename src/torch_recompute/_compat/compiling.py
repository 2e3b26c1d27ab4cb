"""What `torch.compile` could not compile, and what its CUDA graphs left out: dynamo's own counters.

They count from the start of the process, and are there only once something has been compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

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
