"""A training step on fake tensors: its memory and its FLOPs, without a device and without running anything.

`training_step.py` is what is asked about, on a device of `devices.py`. `step.py` is the step on fake tensors,
`recording.py` counts what it allocates, `copies.py` makes the copy of the model that it runs on, `fake_mode.py` the
mode under which it runs, with the results of `recipes.py` and the values of `made_up.py`; `cuda_decompositions.py` has
what PyTorch decomposes otherwise on CUDA, `result.py` the figures.
"""

from .result import Moment, Simulation
from .step import simulate, simulate_step, with_carried_state

__all__ = ["Moment", "Simulation", "simulate", "simulate_step", "with_carried_state"]
