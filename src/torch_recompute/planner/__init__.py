"""The planner: costs of a step of a model, and a plan that fits a budget of memory.

`segments.py` finds the segments of a model, `record.py` runs each kind of them once, `evaluate.py` reads from that what
the choices of `candidates.py` take (`trials.py` tries what has no rule there), `options.py` prices them by `prices.py`,
`clock.py` says what a whole step takes, `planner.py` makes the figures of `cost.py` of all that,
asks the solver (`solve.py`, with the bound of `bound.py`) and checks its answer, `plan_file.py` keeps a plan for the
next process, `sizes.py` plans calls of several sizes, `pipeline.py` and `layout.py` the ranks of a pipeline. A
`Profile` is all that the solver needs, as data. What users call is in `planning.py`.
"""
