"""Plans: which parts of a model are recomputed, found, written down, and applied without editing the model.

Data, without torch: `choice.py` is one region, `plan.py` a plan, `roles.py` what a model is made of, `labels.py` turns
words such as `core_attn` into choices, `settings.py` reads Megatron's settings. With a model: `units.py` finds its
roles, `config.py` turns Megatron's settings into choices for it, `apply.py` puts a plan into it and takes it out again;
it is made of `wrappers.py`, `calls.py`, `sizes.py` (calls of several sizes) and `libraries.py` (what models of
libraries bring along).
"""

from .apply import Applied, apply
from .choice import Choice
from .plan import Plan, SizeClass

__all__ = ["Applied", "Choice", "Plan", "SizeClass", "apply"]
