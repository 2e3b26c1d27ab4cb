"""Training on several ranks: what `torch.distributed` leaves to do around regions.

The engine calls no backward inside backward and keeps no state per module, so DDP and `fully_shard` work with regions
as without, and nothing here is needed for them. This package reduces the gradients of a step that ran under `no_sync`,
finds what else in a model calls backward inside backward, compares the ranks' plans, and for tensor parallelism keeps
the inputs of regions in parts on the ranks of a group, and has random streams and collectives that are not repeated.

`import torch_recompute` does not load this package, and no file of it starts a process group. What ranks must agree on
is compared before the first collective that would hang without.
"""

from .agreement import agree_on
from .collectives import keep_collectives
from .diagnosing import Reentrant, find_reentrant
from .reducing import fused_allreduce_gradients
from .rng import RngStreams
from .sharded import ShardedOver

__all__ = [
    "Reentrant",
    "RngStreams",
    "ShardedOver",
    "agree_on",
    "find_reentrant",
    "fused_allreduce_gradients",
    "keep_collectives",
]
