"""A training step on fake tensors: its memory and its FLOPs, without a device and without running anything.

`step.py` is the step and its books, `fake_mode.py` the copy of the model and the mode under which it runs,
`cuda_decompositions.py` what PyTorch composes otherwise on CUDA, `result.py` what is known afterwards.
"""

from .result import Moment, Simulation
from .step import simulate_step

__all__ = ["Moment", "Simulation", "simulate_step"]
