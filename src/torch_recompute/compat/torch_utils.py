"""`torch.utils.checkpoint`'s `checkpoint` and `checkpoint_sequential` on this engine.

Change the import and nothing else. The options keep torch's meanings, `set_checkpoint_early_stop` and
`set_checkpoint_debug_enabled` are obeyed, and errors are also `torch.utils.checkpoint.CheckpointError` with the phrases
that code may match. Two things differ on purpose: `use_reentrant=True` is refused, and leaving the option out means
False. What else PyTorch's own tests see differently is listed in `docs/compatibility.md`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.utils.checkpoint import checkpoint as _torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from .. import _compat, errors
from .._frame import Contexts, Options
from .._trace import traces
from ..region import call
from ..state import DEFAULT
from ..values import name_of

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
    region = functools.partial(checkpoint, preserve_rng_state=preserve_rng_state)
    return in_segments("checkpoint_sequential", functions, segments, input, region)


def in_segments(face: str, functions: Any, segments: Any, value: Any, region: Callable[..., Any]) -> Any:
    """Runs `functions` one after the other, in `segments` parts: `region(part, value)`, but the last as it is.

    Args:
        face: The function that was called, for the error.
        functions: Functions of one argument, by number.
        segments: How many parts to make; the last holds the remainder too.
        value: The argument of the first function.
        region: What calls a part with its argument.

    Raises:
        ArgumentError: `segments` is not between 1 and the number of functions.
    """
    parts = cast("list[Callable[[Any], Any]]", [functions[i] for i in range(len(functions))])
    if not isinstance(segments, int) or not 1 <= segments <= len(parts):
        raise errors.ArgumentError(errors.bad_segments(face, segments, len(parts)))
    size = len(parts) // segments
    for start in range(0, size * (segments - 1), size):
        value = region(_sequence(parts[start : start + size]), value)
    return _sequence(parts[size * (segments - 1) :])(value)


def _sequence(functions: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def run(value: Any) -> Any:
        for function in functions:
            value = function(value)
        return value

    return run
