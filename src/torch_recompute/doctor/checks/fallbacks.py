"""What `torch.compile` and its CUDA graphs left to eager execution."""

from __future__ import annotations

from collections.abc import Iterator

from ..check import Check, Evidence
from ..finding import Finding
from ..words import times


class Fallbacks(Check):
    """Reads dynamo's counters before and after real steps."""

    kind = "fallbacks"
    needs = ("seen",)

    def look(self, evidence: Evidence) -> Iterator[Finding]:
        """One finding per reason."""
        assert evidence.seen is not None
        for reason, count in evidence.seen.fallbacks.items():
            graphs = reason.startswith("no CUDA graph")
            what = "what was compiled ran without a CUDA graph" if graphs else "the compiled graph was cut in two"
            yield self.found(
                evidence.name,
                f"{reason}: {times(count)}. There {what}, and no choice of what to save reaches across.",
                "the compiler's own counters, before and after the steps.",
                "the call that is not compiled outside of what is compiled, or torch.compile(..., fullgraph=True) to "
                "see where it is; for CUDA graphs see docs/cuda-graphs.md.",
                count=count,
            )
