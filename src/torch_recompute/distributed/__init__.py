"""Training on several ranks: what `torch.distributed` leaves to do around regions, on torch.distributed as it is.

The engine calls no backward inside backward and keeps no state per module, so DDP and `fully_shard` work with regions
as they do without, and nothing here is needed for them. This package holds what is: reducing the gradients of a step
that ran under `no_sync`, finding what else in a model calls backward inside backward, comparing the ranks' plans, and
for tensor parallelism the inputs of regions in parts on the ranks of a group, random streams, and which collectives a
replay repeats.

Rejected: a launcher, a wrapper around DDP, communication of our own.

Invariants: `import torch_recompute` does not load this package, and no file of it starts a process group or leaves one
behind. Whatever ranks must agree on is compared before the first collective that would hang without.
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
