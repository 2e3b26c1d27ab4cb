"""Texts for a region whose output is to be discarded."""

from __future__ import annotations

from ._say import say


def nothing_to_discard() -> str:
    """Text for a discard without a call before it."""
    return (
        "discard_output_and_register_recompute() was called, but there is no output to discard: checkpoint() has not "
        "been called since the last discard.\n"
        "  Call them in turns:  h = odc.checkpoint(norm, x);  y = consumer(h);  "
        "odc.discard_output_and_register_recompute(y)"
    )


def not_a_consumer(region: str, hook: object, itself: bool) -> str:
    """Text for a hook tensor that was not computed from the output."""
    what = "the output itself" if itself else f"{say(hook)}, which was not computed from the output"
    return (
        f"discard_output_and_register_recompute: the tensor given for {region} is {what}, so there is no operation "
        "that could let go of it.\n"
        "  Pass the result of what consumes the output:  y = consumer(h);  "
        "odc.discard_output_and_register_recompute(y)"
    )


def changed_result(region: str, was: int, now: int) -> str:
    """Text for an output changed in place before it was discarded."""
    return (
        f"the output of {region} has been changed in place since (version {was} then, {now} now), so what would be "
        "rebuilt is not what its consumers saved.\n"
        "  Change a copy (h = h * 2, not h.mul_(2)), or do it inside the function that is recomputed."
    )


def no_fp8(face: str, value: object) -> str:
    """Text for Transformer Engine's switch."""
    return (
        f"{face}(fp8={value!r}): Transformer Engine's recompute contexts are not entered here.\n"
        "  Leave fp8 out, and let the function enter the contexts that it needs itself: they are entered again in the "
        "replay."
    )


def no_manager(face: str) -> str:
    """Text for a manager of chains."""
    return (
        f"{face}(ckpt_manager=...): no manager is needed. Regions whose outputs feed one another find "
        "each other, in whatever order they are discarded.\n"
        "  Leave it out, and call discard_output_and_register_recompute(hook_tensor) on each of them."
    )
