"""Texts for what a function was called with and cannot use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ._say import kind, say


def not_callable(what: str, value: object, at_once: bool = False) -> str:
    """Text for a `fn` that cannot be called; `at_once` if it is passed together with its arguments."""
    if what == "checkpoint" or at_once:
        return (
            f"{what}(function, *args) needs a callable, but got {say(value)}\n"
            "  Pass the function itself, then its arguments:\n"
            f"      y = {what}(layer, x)     # not {what}(layer(x))"
        )
    return (
        f"{what}(fn) needs a callable, but got {say(value)}\n"
        f"  It returns a callable; pass the function itself, and the arguments to the result:\n"
        f"      y = {what}(layer)(x)     # not {what}(layer(x))"
    )


def unknown_check(value: object) -> str:
    """Text for an unknown `check=`."""
    return (
        f"check={value!r} is not known. It says what a replay is compared with:\n"
        '      check="metadata"   shape, dtype and device of every saved tensor (the default)\n'
        '      check="values"     stride and contents too: slower, finds what is not deterministic\n'
        '      check="none"       only how many there are'
    )


def not_a_store(option: str, value: object) -> str:
    """Text for an `inputs=` or `store=` that is no store."""
    return (
        f"{option}={value!r:.80} is not a store: {kind(value)} has no put(tensor) and get(handle).\n"
        f"  Write {option}=torch_recompute.OnHost(), or an object with these two methods."
    )


def not_an_ambient(value: object) -> str:
    """Text for an element of `state=` that is no ambient."""
    if hasattr(value, "capture") and hasattr(value, "restore"):
        return f"state= takes a sequence of states, but got {kind(value)} alone; write state=[{kind(value)}(...)]."
    return (
        f"state= holds {value!r:.80}, and {kind(value)} has no capture() and restore(value).\n"
        "  Write state=[torch_recompute.state.NumpyRng()], or objects with these two methods."
    )


def iterator_argument(region: str, label: str, value: object) -> str:
    """Text for an argument that can be used only once."""
    return (
        f"{label} of {region} is a {kind(value)}, which can be consumed only once: the forward would leave nothing "
        "for the replay.\n"
        "  Pass a list instead: list(...)."
    )


def reentrant(of_torch: bool = True) -> str:
    """Text for `use_reentrant=True`, with the words that code looks for in an error of torch's."""
    others = " (context_fn, debug and keyword arguments are only supported when use_reentrant=False.)"
    return (
        "use_reentrant=True is not supported: it calls backward inside backward, which breaks DDP, "
        "torch.autograd.grad, backward(inputs=...) and gradient hooks, and trains nothing when no input of the region "
        f"requires grad.{others if of_torch else ''}\n"
        "  Write use_reentrant=False, or leave it out: gradients are the same, and it is faster."
    )


def unknown_determinism_check(value: object, known: Sequence[str]) -> str:
    """Text for an unknown `determinism_check=`."""
    return (
        f"determinism_check={value!r} is not known; write one of {', '.join(map(repr, known))}. To compare the "
        'contents of saved tensors as well: recompute(fn, check="values").'
    )


def debug_with_contexts() -> str:
    """Text for `debug=True` together with a `context_fn`."""
    return (
        "debug=True is incompatible with non-default context_fn: both want to see every operation of the region.\n"
        "  Find the mismatch with debug=True and without context_fn, or enter your own logging mode in context_fn."
    )


def keywords_without_function(names: Iterable[str]) -> str:
    """Text for `checkpoint(option=...)` with keyword arguments that are no options, and no function to take them."""
    return (
        f"Unexpected keyword arguments: {', '.join(names)}. checkpoint without a function returns a decorator, which "
        "takes options alone\n"
        "  Pass them to the decorated function:\n"
        "      block = checkpoint(use_reentrant=False)(layer)\n"
        "      y = block(x, mask=mask)"
    )


def hooks_not_respected(version: str) -> str:
    """Text for `respect_saved_tensors_hooks=True` where torch's selective contexts know nothing of it."""
    return (
        "respect_saved_tensors_hooks=True needs torch 2.14 or later: the selective context_fn of torch "
        f"{version} stores what its policy saves where saved-tensor hooks (save_on_cpu) do not see it\n"
        "  Leave the option out, or mark the call to keep: no_recompute(fn, store=OnHost()) instead of a context_fn"
    )


def suppressed(context: object) -> str:
    """Text for a context of `context_fn` that swallows exceptions."""
    return (
        f"the context {kind(context)} provided by context_fn suppressed an exception raised during the checkpointed "
        "call, so there is no result to return.\n"
        "  Its __exit__ must return False or None."
    )


def bad_segments(face: str, segments: object, functions: int) -> str:
    """Text for a number of segments that cannot be made."""
    if not functions:
        return f"{face}: there are no functions to run."
    return f"{face}: segments={segments!r}, but {functions} functions make 1 to {functions} segments."


def not_a_flag(value: object) -> str:
    """Text for a `use_reentrant` that is not a bool."""
    return (
        f"use_reentrant is {say(value)}, where False, or nothing, is expected. (checkpoint_sequential takes "
        "one input: put several into a tuple that the functions take and return.)"
    )
