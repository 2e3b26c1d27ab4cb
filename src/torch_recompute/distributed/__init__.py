"""Tools for regions in training on several ranks, beside `torch.distributed`.

The engine calls no backward inside backward and keeps no state per module, so DDP and `fully_shard` work with regions
as without, and nothing here is needed for them. This package reduces the gradients of a step that ran under `no_sync`,
finds checkpoints of other libraries that call backward inside backward, and compares the ranks' plans. For tensor
parallelism it keeps the inputs of regions in parts on the ranks of a group, and has random streams, and collectives
that a replay does not repeat.

`import torch_recompute` does not load this package, and no file of it starts a process group. Arguments that must agree
between ranks are compared before the first collective that would hang otherwise.
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
