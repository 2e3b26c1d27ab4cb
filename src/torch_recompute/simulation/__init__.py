"""A training step on fake tensors: its memory and its FLOPs, without a device and without running anything.

`pretending.py` is the mode under which the step runs; `faking.py` copies the model; `places.py` knows where the step
is; `recording.py` keeps the books; `step.py` is the step; `result.py` is what is known afterwards.
"""

from .result import Moment, Simulation
from .step import simulate_step

__all__ = ["Moment", "Simulation", "simulate_step"]
