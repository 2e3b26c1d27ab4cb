"""The audit: each region runs twice, and what differs, what syncs and what mutates is named.

Problem. A replay must do what the forward did. Where it does not, the gradients may be silently wrong: a router sends a
token to another expert, a counter counts twice, NumPy draws other numbers. `check="values"` finds a tensor that came
out differently; it does not say where it came from, and it costs a training step.

Idea. Run the model forward once, under a dispatch mode that writes down every operation inside a region with its
module, its line and a digest of its result (`recorder.py`). Then run each region's function again as a replay would,
under the state that the engine recorded, but to its end (`rerun.py`), and lay the two lists side by side
(`comparing.py`): the first operation with another result is where to look. What the second run has changed outside of
itself, seen by the operations that wrote (`recorder.py`) or in Python objects (`surroundings.py`), is what a replay
would change a second time. With `perturb=` there is a third run, over slightly other inputs, and the choices of experts
that come out differently are counted.

Rejected: two forwards of the whole model, which would find the same faults but blame dropout too; a backward with
`check="values"`, which stops early and compares saved tensors only.

Invariants. Nothing runs backward. Buffers, attributes, generators and tensors that operations wrote to are put back.
"""

from .audit import audit
from .listing import Audit, Row

__all__ = ["Audit", "Row", "audit"]
