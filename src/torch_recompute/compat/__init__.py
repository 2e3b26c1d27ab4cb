"""The engine behind the signatures of other systems: change the import and nothing else.

The problem: training code is written against the call of the system that it grew up with. The calls differ in names,
in order of arguments and in where options are set; what they ask for is always a region, placed.

The idea: one small file per system, over the same engine. A face translates arguments into a region's options and
raises where it cannot; it holds no mechanism, so a law that holds for `recompute` holds for every face.

    torch_utils   `torch.utils.checkpoint`: checkpoint, checkpoint_sequential
    olmo          OLMo-core: OutputDiscardCheckpoint
    megatron      Megatron-Core: tensor_parallel's checkpoint, CheckpointWithoutOutput
    deepspeed     `deepspeed.checkpointing`: configure, checkpoint, non_reentrant_checkpoint
    paddle        `paddle.distributed.fleet`: recompute, recompute_sequential

The first two are in this module and in `torch_recompute` under their own names. The others share names with them, so
each is imported from its file: `from torch_recompute.compat.paddle import recompute`.

Rejected: one function that accepts the arguments of all of them. `checkpoint(f, False, x)` is Megatron's call with an
option, and torch's with an argument.

Invariants: a face has its system's names, order and defaults; an option that cannot be honoured is refused with the
reason, and none is dropped in silence; a face does not import the system that it stands for.
"""

from typing import TYPE_CHECKING

from .._lazy import lazily
from .olmo import OutputDiscardCheckpoint
from .torch_utils import checkpoint, checkpoint_sequential

if TYPE_CHECKING:
    from . import deepspeed, megatron, paddle
else:  # imported when they are first asked for
    __getattr__, __dir__ = lazily(globals(), {"deepspeed": (), "megatron": (), "paddle": ()})

__all__ = [
    "OutputDiscardCheckpoint",
    "checkpoint",
    "checkpoint_sequential",
    "deepspeed",
    "megatron",
    "paddle",
]
