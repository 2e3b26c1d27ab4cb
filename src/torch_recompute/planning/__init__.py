"""The planner: what a step of a model costs, and a plan that fits a budget of memory.

`capture.py` finds the segments of a model, `trace.py` and `trials.py` look at each kind of them, `prices.py` says what
operations take, `calibrate.py` makes `plan/cost.py`'s figures of all that, `planner.py` asks `plan/solve.py` and
checks what they answer, and `making.py` has what users call. Files here run models; what is planned on plain data is in
`plan/`.
"""

from .making import make_plan, profile

__all__ = ["make_plan", "profile"]
