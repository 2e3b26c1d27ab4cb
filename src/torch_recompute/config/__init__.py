"""Megatron's recompute settings, for any model.

`config.py` is the settings as plain data; `rules.py` says which of them go together; `placing.py` finds the layers and
parts of a model that they mean, `offloading.py` those of them whose inputs lie in host memory; `reading.py` and
`flags.py` take them from files and command lines.
"""

from .config import RecomputeConfig

__all__ = ["RecomputeConfig"]
