"""Plans: which parts of a model are recomputed, found, written down, and applied without editing the model.

`plan.py` is the plan as plain data; `units.py` says what a model is made of; `labels.py` turns words such as
`core_attn` into choices; `apply.py` puts a plan into a model and takes it out again, and `sizes.py` says which of its
choices a call goes by;
`simulating.py` tries it on a fake copy.
"""

from .apply import Applied, apply
from .plan import Choice, Plan, SizeClass
from .simulating import simulate

__all__ = ["Applied", "Choice", "Plan", "SizeClass", "apply", "simulate"]
