"""What `torch.compile` and its CUDA graphs left to eager execution."""

from __future__ import annotations

from collections.abc import Iterator

from ..._compat.compiling import NO_CUDA_GRAPH
from ..check import Check, Evidence
from ..finding import Finding
from ..words import times

_CUT = (
    "the compiled graph was cut in two",
    "the call that is not compiled outside of what is compiled, or torch.compile(..., fullgraph=True) to see where "
    "it is.",
)
_NOT_CAPTURED = (
    "what was compiled ran without a CUDA graph",
    "TORCH_LOGS=cudagraphs before the command: torch then says why, and at which line. What regions need in CUDA "
    "graphs is in docs/cuda-graphs.md.",
)


class Fallbacks(Check):
    """Reads dynamo's counters before and after real steps."""

    kind = "fallbacks"
    needs = ("seen",)

    def look(self, evidence: Evidence) -> Iterator[Finding]:
        """One finding per reason."""
        assert evidence.seen is not None
        for reason, count in evidence.seen.fallbacks.items():
            what, write = _NOT_CAPTURED if reason == NO_CUDA_GRAPH else _CUT
            yield self.found(
                evidence.name,
                f"{reason}: {times(count)}. There {what}, and no choice of what to save reaches across.",
                "the compiler's own counters, before and after the steps.",
                write,
                count=count,
            )
