"""Proof that a plan changes nothing: a step without it, a step with it, and all that they leave compared.

Problem. A plan saves memory and must change nothing else. Whether that holds for this model, with its router, its
cache and its counters, is known only by running it; and where it does not hold, a user needs the region, not a loss
curve that is off after a day.

Idea. The plain step runs twice, from the same weights, random states, buffers and attributes: what differs then is the
model's own noise (`comparing.py`), which is nothing on a CPU and some bits on a GPU whose sums come in any order. Then
the step with the plan runs, from the same again (`steps.py`). Outputs, gradients in the order in which backward made
them, buffers, random generators, attributes and decisions are compared; of gradients the first one that differs is
the one closest to the cause, because a wrong gradient goes on into all that come after it. Which region it is, is tried
and not guessed: with each of the likely ones alone (`suspects.py`).

Rejected: the audit's recorder around both steps, which would name the operation too. A dispatch mode chooses other
kernels for attention, so it compares another step than the one that trains. What is found here, `audit` explains.

Invariants. The model is left as it was: weights, gradients, buffers, attributes, random states, no plan. No optimizer
runs. Two sets of gradients are held at a time, and a third while it is made.
"""

from .result import Row, Verification
from .verify import compare_calls, verify

__all__ = ["Row", "Verification", "compare_calls", "verify"]
