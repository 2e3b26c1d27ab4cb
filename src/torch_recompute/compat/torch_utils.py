"""`torch.utils.checkpoint`'s `checkpoint` and `checkpoint_sequential` on this engine.

The options keep torch's meanings, `set_checkpoint_early_stop` and `set_checkpoint_debug_enabled` are obeyed, and errors
are also `torch.utils.checkpoint.CheckpointError` with the phrases that code may match. There is one engine, which calls
no backward inside backward: `use_reentrant=True` runs on it and warns once, and leaving the option out means False.
What else PyTorch's own tests see differently is in `docs/compatibility.md`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.utils.checkpoint import noop_context_fn

from .. import errors
from .._torch import checkpoints
from ..engine.mismatch import traces
from ..engine.region_call import Contexts, Options
from ..region import call, trace
from ..state import DEFAULT
from ..state.values import name_of
from ._calling import take_reentrant

_CHECKS = {"default": "metadata", "none": "none"}


# context_fn, determinism_check, debug, early_stop, preserve_rng_state, respect_saved_tensors_hooks
_Settings = tuple[Contexts, str, bool, bool, bool, bool | None]


def checkpoint(
    function: Callable[..., Any] | None = None,
    *args: Any,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    context_fn: Contexts = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Calls `function(*args, **kwargs)` as a region: `torch.utils.checkpoint.checkpoint` on this engine.

    Without a function it returns a decorator for functions and methods, as torch's does since 2.14:

        @checkpoint(use_reentrant=False)
        def block(x): ...

    Args:
        function: The function to call, and to call again in backward.
        *args: Its positional arguments.
        use_reentrant: True, False and None are the same engine; True warns once per process.
        preserve_rng_state: Whether the replay draws the random numbers of the forward.
        context_fn: Returns two context managers, one for the forward and one for the replays, such as
            `torch.utils.checkpoint.create_selective_checkpoint_contexts` makes.
        determinism_check: "default" compares shape, dtype and device of each saved tensor; "none" only
            their number.
        debug: On a mismatch, show the operations of forward and replay and the code that ran them.
        early_stop: End the replay at the last tensor that backward still needs.
        respect_saved_tensors_hooks: Whether what a selective `context_fn` saves passes through the saved-tensor hooks
            around the region, such as `save_on_cpu`. None is False, with torch's warning where there are such hooks.
            True needs torch 2.14.
        **kwargs: Keyword arguments of `function`.

    Raises:
        ArgumentError: For `debug` or a `context_fn` with `use_reentrant=True` or with one another, an unknown
            `determinism_check`, keyword arguments of a function that is not there, or hooks that this torch cannot
            respect.
    """
    take_reentrant(use_reentrant, debug or context_fn is not noop_context_fn)
    settings = context_fn, determinism_check, debug, early_stop, preserve_rng_state, respect_saved_tensors_hooks
    if function is not None or args:
        return _call(function, args, kwargs, settings)
    if kwargs:
        raise errors.ArgumentError(
            f"Unexpected keyword arguments: {', '.join(kwargs)}. checkpoint without a function returns a decorator, "
            "which takes options alone\n"
            "  Pass them to the decorated function:\n"
            "      block = checkpoint(use_reentrant=False)(layer)\n"
            "      y = block(x, mask=mask)"
        )

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        if not callable(function):
            raise errors.ArgumentError(errors.not_callable("checkpoint", function))

        @functools.wraps(function, updated=())
        def region(*args: Any, **kwargs: Any) -> Any:
            return _call(function, args, kwargs, settings)

        return region

    return decorate


def _call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], settings: _Settings) -> Any:
    context_fn, check, debug, early_stop, rng, respect = settings
    contexts = None if context_fn is noop_context_fn else context_fn
    if torch.compiler.is_compiling():  # nothing is asked of the function: Dynamo can call super().forward, and no more
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)

        def region(*args: Any, **kwargs: Any) -> Any:
            return _call(function, args, kwargs, settings)

        return trace(Options("", ambients=DEFAULT), function, args, kwargs, contexts, region)
    if not callable(function):
        raise errors.ArgumentError(errors.not_callable("checkpoint", function))
    if check not in _CHECKS:
        raise errors.ArgumentError(
            f"determinism_check={check!r} is not known; write one of {', '.join(map(repr, _CHECKS))}. To compare the "
            'contents of saved tensors as well: recompute(fn, check="values").'
        )
    contexts = _recording(contexts, debug)
    if not torch.is_grad_enabled():
        if contexts is not None:
            contexts()
        return function(*args, **kwargs)
    if contexts is not None and respect is not None:
        contexts = functools.partial(_respecting, contexts, respect)
    stop = checkpoints.early_stop_override()
    options = Options(
        name_of(function),
        ambients=DEFAULT if rng else (),
        check=_CHECKS[check],
        early_stop=early_stop if stop is None else stop,
        rng=rng,
        contexts=contexts,
    )
    return call(options, function, args, kwargs)


def _recording(contexts: Contexts | None, debug: bool) -> Contexts | None:
    """Returns the contexts to use: those that record operations where `debug` is on, by the option or globally."""
    override = checkpoints.debug_override()
    if not (debug if override is None else override):
        return contexts
    if contexts is not None:
        raise errors.ArgumentError(
            "debug=True is incompatible with non-default context_fn: both want to see every operation of the "
            "region.\n"
            "  Find the mismatch with debug=True and without context_fn, or enter your own logging mode in "
            "context_fn."
        )
    return traces


def _respecting(contexts: Contexts, respect: bool) -> Any:
    forward, replay = contexts()
    if not checkpoints.respect_hooks(forward, respect):
        raise errors.ArgumentError(
            "respect_saved_tensors_hooks=True needs torch 2.14 or later: the selective context_fn of torch "
            f"{torch.__version__} stores what its policy saves where saved-tensor hooks (save_on_cpu) do not see it\n"
            "  Leave the option out, or mark the call to keep: no_recompute(fn, store=OnHost()) instead of a context_fn"
        )
    return forward, replay


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
        use_reentrant: True, False and None are the same engine; True warns once per process.
        preserve_rng_state: Whether replays draw the random numbers of the forward.

    Raises:
        ArgumentError: `segments` is not between 1 and the number of functions.
    """
    take_reentrant(use_reentrant)
    region = functools.partial(checkpoint, preserve_rng_state=preserve_rng_state)
    return in_segments("checkpoint_sequential", functions, segments, input, region)


def in_segments(face: str, functions: Any, segments: Any, value: Any, region: Callable[..., Any]) -> Any:
    """Runs functions in `segments` parts: `region(part, value)`, but the last, which holds the remainder, as it is.

    Args:
        face: The function that was called, for the error.
        functions: Functions of one argument, by number.
        segments: How many parts to make.
        value: The argument of the first function.
        region: Calls a part with its argument.

    Raises:
        ArgumentError: `segments` is not between 1 and the number of functions.
    """
    parts = cast("list[Callable[[Any], Any]]", [functions[i] for i in range(len(functions))])
    if not isinstance(segments, int) or not 1 <= segments <= len(parts):
        raise errors.ArgumentError(
            f"{face}: segments={segments!r}, but {len(parts)} functions make 1 to {len(parts)} segments."
            if parts
            else f"{face}: there are no functions to run."
        )
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
