"""The engine behind the signatures of other systems: change the import and nothing else.

    torch_utils   `torch.utils.checkpoint`: checkpoint, checkpoint_sequential
    olmo          OLMo-core: OutputDiscardCheckpoint
    megatron      Megatron-Core: tensor_parallel's checkpoint, CheckpointWithoutOutput
    deepspeed     `deepspeed.checkpointing`: configure, checkpoint, non_reentrant_checkpoint
    paddle        `paddle.distributed.fleet`: recompute, recompute_sequential

Each file translates arguments into a region's options, and has its system's names, order and defaults; an option that
cannot be honoured is refused with the reason. The system itself is not imported. The first two are in `torch_recompute`
under their own names; the others share names, so each is imported from its file:
`from torch_recompute.compat.paddle import recompute`.
"""

from . import deepspeed, megatron, paddle
from .olmo import OutputDiscardCheckpoint
from .torch_utils import checkpoint, checkpoint_sequential

__all__ = ["OutputDiscardCheckpoint", "checkpoint", "checkpoint_sequential", "deepspeed", "megatron", "paddle"]
