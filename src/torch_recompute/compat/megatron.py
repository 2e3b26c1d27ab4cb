"""Megatron-Core's `tensor_parallel.checkpoint` and `CheckpointWithoutOutput` on this engine.

    from torch_recompute.compat.megatron import CheckpointWithoutOutput, checkpoint

If Megatron-Core has been imported, its random streams (`get_cuda_rng_tracker()`) are restored for the replay, as its
own functions do. Megatron's first pass runs without grad, so code that must act only once tests
`torch.is_grad_enabled()`; here both passes run with grad, and such code tests `torch_recompute.doing_recompute()`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .. import errors
from ..state import Ambient
from ._calling import TrackerRng, as_region, check_callable, check_switch, no_sharded_inputs, tracked
from .olmo import OutputDiscardCheckpoint

__all__ = ["CheckpointWithoutOutput", "TrackerRng", "checkpoint"]


def checkpoint(
    function: Callable[..., Any], distribute_saved_activations: bool | None, *args: Any, **kwargs: Any
) -> Any:
    """Calls `function(*args, **kwargs)` as a region: Megatron-Core's `tensor_parallel.checkpoint`.

    Arguments may be of any kind, which Megatron's are not: it takes tensors and None, by position.

    Args:
        function: The function to call, and to call again in backward.
        distribute_saved_activations: False or None. True, which spreads the first argument over the tensor parallel
            ranks, is written with a store, which knows the group: `recompute(function, inputs=ShardedOver(group))`.
        *args: Its positional arguments.
        **kwargs: Its keyword arguments.

    Raises:
        ArgumentError: `function` is not callable, or `distribute_saved_activations` is neither False nor None.
    """
    check_callable("checkpoint", function)
    write = "Write checkpoint(function, False, *args): in Megatron's call the arguments come after this one."
    if distribute_saved_activations is not None:
        check_switch("checkpoint", "distribute_saved_activations", distribute_saved_activations, write)
    if distribute_saved_activations:
        write = "Write checkpoint(function, False, *args)"
        raise errors.ArgumentError(no_sharded_inputs("distribute_saved_activations=True", write))
    return as_region(function, args, kwargs, state=_streams)


def _streams() -> Sequence[Ambient]:
    return tracked("megatron.core.tensor_parallel.random")


class CheckpointWithoutOutput(OutputDiscardCheckpoint):
    """Megatron-Core's name and constructor for `OutputDiscardCheckpoint`.

    Args:
        fp8: Transformer Engine's recompute contexts; refused unless None or False.
        ckpt_manager: Megatron's manager for chains; refused, for there is nothing to manage.
        retain_input_tensors: Whether outputs that are in the memory of an input are left alone. They always are.

    Raises:
        ArgumentError: `fp8` or `ckpt_manager` is given, or `retain_input_tensors` is neither True nor False.
    """

    def __init__(self, fp8: Any = False, ckpt_manager: Any = None, retain_input_tensors: bool = False) -> None:
        super().__init__(fp8, ckpt_manager)
        write = "Leave it out: outputs that are in the memory of an input are always left alone."
        check_switch("CheckpointWithoutOutput", "retain_input_tensors", retain_input_tensors, write)

    def _state(self) -> Sequence[Ambient]:
        return _streams()
