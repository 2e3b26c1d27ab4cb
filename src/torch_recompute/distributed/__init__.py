"""Many devices, on torch.distributed as it is.

`sharded.py` keeps the inputs of regions in parts on the ranks of a group; `rng.py` holds the random streams of parallel
ranks; `collectives.py` says which collectives a replay repeats.
"""

from .collectives import keep_collectives
from .rng import RngStreams
from .sharded import ShardedOver

__all__ = ["RngStreams", "ShardedOver", "keep_collectives"]
