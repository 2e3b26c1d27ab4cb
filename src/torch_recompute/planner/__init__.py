"""The planner: what a step of a model costs, and a plan that fits a budget of memory.

`segments.py` finds the segments of a model, `candidates.py` and `trials.py` look at each kind of them, `prices.py` says
what operations take and `clock.py` what a whole step does, `planner.py` makes `plan/cost.py`'s figures of all that,
asks the solver and checks its answer, `known.py` keeps what was found for the next call, `sizes.py` plans calls of
several sizes, `pipeline.py` and `layout.py` the ranks of a pipeline, and `making.py` has what users call. What is
planned on plain data is in `plan/`.
"""

from .making import auto, make_plan, profile, simulate

__all__ = ["auto", "make_plan", "profile", "simulate"]
