"""The planner: costs of a step of a model, and a plan that fits a budget of memory.

`segments.py` finds the segments of a model, `candidates.py` and `trials.py` look at each kind of them, `prices.py` says
what operations take and `clock.py` what a whole step does, `planner.py` makes the figures of `cost.py` of all that,
asks the solver (`solve.py`, with the bound of `bound.py`) and checks its answer, `plan_file.py` keeps a plan for the
next process, `sizes.py` plans calls of several sizes, `pipeline.py` and `layout.py` the ranks of a pipeline. A
`Profile` is all that the solver needs, as data. What users call is in `planning.py`.
"""
