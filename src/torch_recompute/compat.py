"""The engine behind the signatures of other systems.

`checkpoint` and `checkpoint_sequential` are `torch.utils.checkpoint`'s: change the import and nothing else. Their
options keep torch's meanings, `set_checkpoint_early_stop` and `set_checkpoint_debug_enabled` are obeyed, and errors
are also `torch.utils.checkpoint.CheckpointError` with the phrases that code may match. Two things differ on purpose:
`use_reentrant=True` is refused, and leaving the option out means False. What else PyTorch's own tests see differently
is listed in `docs/compatibility.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.utils.checkpoint import checkpoint as _torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from . import _compat, errors
from ._discard import Discard
from ._frame import Contexts, Options
from ._trace import traces
from .region import call
from .state import DEFAULT
from .values import name_of

_CHECKS = {"default": "metadata", "none": "none"}


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: Contexts = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> Any:
    """Calls `function(*args, **kwargs)` as a region: `torch.utils.checkpoint.checkpoint` on this engine.

    Args:
        function: What to call, and to call again in backward.
        *args: Its positional arguments.
        use_reentrant: False or None. True is refused.
        context_fn: Returns two context managers, one for the forward and one for the replays, such as
            `torch.utils.checkpoint.create_selective_checkpoint_contexts` makes.
        determinism_check: "default" compares shape, dtype and device of each saved tensor; "none" only
            their number.
        debug: On a mismatch, show the operations of forward and replay and the code that ran them.
        early_stop: End the replay at the last tensor that backward still needs.
        preserve_rng_state: Whether the replay draws the random numbers of the forward.
        **kwargs: Keyword arguments of `function`.

    Raises:
        ArgumentError: For `use_reentrant=True`, an unknown `determinism_check`, or `debug` with a `context_fn`.
    """
    if not callable(function):
        raise errors.ArgumentError(errors.not_callable("checkpoint", function))
    _refuse_reentrant(use_reentrant)
    if torch.compiler.is_compiling():
        if context_fn is not noop_context_fn:  # written out, Dynamo does not know torch's own default
            kwargs = {**kwargs, "context_fn": context_fn}
        return _torch_checkpoint(
            function,
            *args,
            use_reentrant=False,
            determinism_check=determinism_check,
            preserve_rng_state=preserve_rng_state,
            **kwargs,
        )
    if determinism_check not in _CHECKS:
        raise errors.ArgumentError(errors.unknown_determinism_check(determinism_check, tuple(_CHECKS)))
    contexts = None if context_fn is noop_context_fn else context_fn
    override = _compat.debug_override()
    if debug if override is None else override:
        if contexts is not None:
            raise errors.ArgumentError(errors.debug_with_contexts())
        contexts = traces
    if not torch.is_grad_enabled():
        if contexts is not None:
            contexts()
        return function(*args, **kwargs)
    stop = _compat.early_stop_override()
    options = Options(
        name_of(function),
        ambients=DEFAULT if preserve_rng_state else (),
        check=_CHECKS[determinism_check],
        early_stop=early_stop if stop is None else stop,
        rng=preserve_rng_state,
        contexts=contexts,
    )
    return call(options, function, args, kwargs)


def _refuse_reentrant(use_reentrant: Any) -> None:
    if use_reentrant is not None and not isinstance(use_reentrant, bool):
        raise errors.ArgumentError(errors.not_a_flag(use_reentrant))
    if use_reentrant:
        raise errors.ArgumentError(errors.reentrant())


def checkpoint_sequential(
    functions: Sequence[Callable[[Any], Any]] | torch.nn.Sequential,
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
) -> Any:
    """Runs `functions` one after the other, in `segments` regions of equal length, the last one left as it is.

    Args:
        functions: An `nn.Sequential`, or modules or functions of one argument.
        segments: How many parts to make; the last holds the remainder too and is not recomputed.
        input: The argument of the first function.
        use_reentrant: False or None. True is refused.
        preserve_rng_state: Whether replays draw the random numbers of the forward.

    Raises:
        ArgumentError: For `use_reentrant=True`, or `segments` not between 1 and the number of functions.
    """
    _refuse_reentrant(use_reentrant)
    parts = cast("list[Callable[[Any], Any]]", [functions[i] for i in range(len(functions))])
    if not isinstance(segments, int) or not 1 <= segments <= len(parts):
        raise errors.ArgumentError(errors.bad_segments(segments, len(parts)))
    size = len(parts) // segments
    for start in range(0, size * (segments - 1), size):
        segment = _sequence(parts[start : start + size])
        input = checkpoint(segment, input, preserve_rng_state=preserve_rng_state)
    return _sequence(parts[size * (segments - 1) :])(input)


def _sequence(functions: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def run(value: Any) -> Any:
        for function in functions:
            value = function(value)
        return value

    return run


class OutputDiscardCheckpoint:
    """A region whose output is dropped once its consumer has run, said in two calls.

        norm = OutputDiscardCheckpoint()
        h = norm.checkpoint(self.norm, x)
        y = self.attention(h)
        norm.discard_output_and_register_recompute(y)

    OLMo-core's class of this name, and Megatron-Core's `CheckpointWithoutOutput`, on this engine. Change the import and
    nothing else; what breaks in those is right here: dropout, autocast, inputs that need no grad, a second consumer,
    chains in any order, `retain_graph`, `autograd.grad`, DDP. Chains need no manager.

    The output is freed when nothing but backward needs it any more: it is taken out of what the operations between it
    and the tensor named have saved. A variable that the caller keeps, and what a custom Function has put on `ctx`, stay
    as they are, and right. An object may be used again after the discard, for one call at a time.

    The same in one call, where the code can be written so: `recompute(lambda x: no_recompute(attention)(norm(x)))(x)`.

    Args:
        fp8: Megatron's switch for Transformer Engine's own recompute contexts; refused unless None or False.
        ckpt_manager: Megatron's manager for chains; refused, for there is nothing to manage.

    Raises:
        ArgumentError: One of these is given.
    """

    def __init__(self, fp8: Any = None, ckpt_manager: Any = None) -> None:
        if fp8:
            raise errors.ArgumentError(errors.no_fp8(fp8))
        if ckpt_manager is not None:
            raise errors.ArgumentError(errors.no_manager())
        self._call: Discard | None = None
        self._called = False

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
            return _torch_checkpoint(fn, *args, use_reentrant=False, **kwargs)
        self._call = Discard(Options(name_of(fn)), fn, args, kwargs)
        return self._call.result

    def discard_output_and_register_recompute(self, hook_tensor: torch.Tensor) -> None:
        """Drops the output, to be rebuilt when backward needs it. Call it when the consumer has run.

        Without grad, and inside `torch.compile`, where the partitioner decides, it does nothing.

        Args:
            hook_tensor: A tensor computed from the output by all the operations that are to let go of it, such as the
                consumer's result.

        Raises:
            RecomputeError: `checkpoint` has not been called since the last discard.
            ArgumentError: `hook_tensor` is the output itself, or was not computed from it.
            ChangedError: The output has been changed in place since.
        """
        if not self._called:
            raise errors.RecomputeError(errors.nothing_to_discard())
        call, self._call, self._called = self._call, None, False
        if call is not None:
            call.drop(hook_tensor)

    def clear(self) -> None:
        """Forgets a call whose output is not to be discarded after all; its region stays a plain region."""
        self._called, self._call = False, None
