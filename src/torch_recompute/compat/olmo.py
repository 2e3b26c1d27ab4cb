"""OLMo-core's `OutputDiscardCheckpoint` on this engine (`engine/discard.py`): a region whose output is dropped."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import errors
from .._torch.modes import transforming
from ..engine.discard import Discard
from ..engine.region_call import Options
from ..region import call, trace
from ..state import DEFAULT, Ambient
from ..state.values import name_of


class OutputDiscardCheckpoint:
    """A region whose output is dropped once its consumer has run, written as two calls.

        norm = OutputDiscardCheckpoint()
        h = norm.checkpoint(self.norm, x)
        y = self.attention(h)
        norm.discard_output_and_register_recompute(y)

    OLMo-core's class of this name, and Megatron-Core's `CheckpointWithoutOutput`, on this engine. Dropout, autocast,
    inputs that need no grad, a second consumer, chains in any order, `retain_graph`, `autograd.grad` and DDP are right;
    chains need no manager.

    The output is freed when nothing but backward needs it any more: it is taken out of what the operations between it
    and the tensor named have saved. A variable that the caller keeps, and what a custom Function has put on `ctx`, stay
    as they are. An object may be used again after the discard, for one call at a time.

    The same in one call: `recompute(lambda x: no_recompute(attention)(norm(x)))(x)`.

    Args:
        fp8: Megatron's switch for Transformer Engine's own recompute contexts; refused unless None or False.
        ckpt_manager: Megatron's manager for chains; refused, for there is nothing to manage.

    Raises:
        ArgumentError: One of these is given.
    """

    def __init__(self, fp8: Any = None, ckpt_manager: Any = None) -> None:
        if fp8:
            raise errors.ArgumentError(
                f"{type(self).__name__}(fp8={fp8!r}): Transformer Engine's recompute contexts are not entered here.\n"
                "  Leave fp8 out, and let the function enter the contexts that it needs itself: they are entered "
                "again in the replay."
            )
        if ckpt_manager is not None:
            raise errors.ArgumentError(
                f"{type(self).__name__}(ckpt_manager=...): no manager is needed. Regions whose outputs feed one "
                "another find each other, in whatever order they are discarded.\n"
                "  Leave it out, and call discard_output_and_register_recompute(hook_tensor) on each of them."
            )
        self._call: Discard | None = None
        self._called = False

    def _state(self) -> Sequence[Ambient]:
        """Returns the state that a replay restores besides that of every region."""
        return ()

    def checkpoint(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls `fn(*args, **kwargs)` as a region.

        Args:
            fn: A function, bound method or module; it may return anything.
            *args: Its positional arguments.
            **kwargs: Its keyword arguments.

        Returns:
            What `fn` returned.

        Raises:
            ArgumentError: `fn` is not callable.
        """
        if not callable(fn):
            raise errors.ArgumentError(errors.not_callable("checkpoint", fn))
        self._called, self._call = True, None
        if not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        if torch.compiler.is_compiling():
            options = Options(name_of(fn), ambients=DEFAULT)
            return trace(options, fn, args, kwargs, region=functools.partial(self.checkpoint, fn))
        options = Options(name_of(fn), ambients=(*DEFAULT, *self._state()))
        if transforming():
            return call(options, fn, args, kwargs)
        self._call = Discard(options, fn, args, kwargs)
        return self._call.result

    def discard_output_and_register_recompute(self, hook_tensor: torch.Tensor) -> None:
        """Drops the output, to be rebuilt when backward needs it. Call it when the consumer has run.

        Without grad, and inside `torch.compile`, where the partitioner decides, it does nothing.

        Args:
            hook_tensor: A tensor computed from the output by all the operations that are to free it, such as the
                consumer's result.

        Raises:
            RecomputeError: `checkpoint` has not been called since the last discard.
            ArgumentError: `hook_tensor` is the output itself, or was not computed from it.
            ChangedError: The output has been changed in place since.
        """
        if not self._called:
            raise errors.RecomputeError(
                "discard_output_and_register_recompute() was called, but there is no output to discard: checkpoint() "
                "has not been called since the last discard.\n"
                "  Call them in turns:  h = odc.checkpoint(norm, x);  y = consumer(h);  "
                "odc.discard_output_and_register_recompute(y)"
            )
        call, self._call, self._called = self._call, None, False
        if call is not None:
            call.drop(hook_tensor)

    def clear(self) -> None:
        """Forgets a call whose output is not to be discarded after all; its region stays a plain region."""
        self._called, self._call = False, None
