"""The doctor: why a model is still out of memory, slow, or wrong, although something is recomputed.

Problem. Recomputation that does not help fails in silence. A label matched a module that saves nothing; a fused
attention's result is held by the next layer; a checkpoint of another library updates a counter twice, or trains
nothing behind a frozen embedding; the memory is there and lies in pieces. Each has been reported many times, and each
looks the same from outside: it was turned on, and nothing got better.

Idea. One kind of finding, one check, one file (`checks/`), over evidence that is gathered once: a simulated step in
which every region's bytes and FLOPs are booked (`regions.py`), a real step under observation (`observing.py`), an
audit, simulations with and without a part of the plan. A finding says where, what was seen with its figures, how it
was confirmed, and the line to write. What could not be looked for is said as well.

Rejected: rules over names and versions ("you use flash attention, so ..."). They are right until the next release, and
then say something wrong with confidence. Everything here is counted, compared or run.

Invariants. `examine` leaves the model, its gradients, buffers and all generators as they were; `watch` changes no step.
"""

from .check import Check, Evidence, Simulated
from .checks import CHECKS, KINDS
from .command import add_command
from .examining import examine
from .finding import Finding, Report
from .watching import Watching, watch

__all__ = [
    "CHECKS",
    "Check",
    "Evidence",
    "Finding",
    "KINDS",
    "Report",
    "Simulated",
    "Watching",
    "add_command",
    "examine",
    "watch",
]
