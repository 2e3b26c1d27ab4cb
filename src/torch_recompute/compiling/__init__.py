"""A budget in bytes for what `torch.compile` compiles.

Plans, regions and saved calls need nothing from here: they are traced (`plan/traced.py`). A `Partition` is for a model
without them. It is asked once for each graph, by inductor, and chooses what to save of all its operations.
"""

from .partition import Partition, Partitioned, compile

__all__ = ["Partition", "Partitioned", "compile"]
