"""Texts for assertions in the tests of a user."""

from __future__ import annotations

from collections.abc import Mapping

from ._say import size


def same_as_what(both: bool) -> str:
    """Text for gradients that are to be the same as those of nothing, or of two things."""
    given = "both plan= and plain=" if both else "neither plan= nor plain="
    return (
        f"assert_same_gradients needs to know what to compare with, but got {given}.\n"
        "  Write assert_same_gradients(model, (x,), plan=plan) for a plan, or "
        "assert_same_gradients(with_regions, (x,), plain=without) for regions in the code."
    )


def not_one_limit(args: object, kwargs: object) -> str:
    """Text for a marker that says no number of bytes."""
    return (
        f"@pytest.mark.peak_below takes one number of bytes, but got {args!r}{f' and {kwargs!r}' if kwargs else ''}.\n"
        '  Write @pytest.mark.peak_below("200MiB"), with KB, MB, GB or KiB, MiB, GiB; or an int, which is bytes.'
    )


def above_limit(peak: int, limit: int, parts: Mapping[str, int], device: str, op: str) -> str:
    """Text for a test that has more bytes alive than it may."""
    listed = "".join(f"\n  {name:12} {size(count):>12}" for name, count in sorted(parts.items(), key=lambda p: -p[1]))
    if max(parts, key=parts.__getitem__) == "activations":
        write = "Most are activations: put recompute(fn) around what makes them, or apply make_plan(model, args, ...)."
    else:
        write = "Most are no activations, which alone recomputation can spare: a smaller model, or a higher limit."
    return (
        f"peak memory is {size(peak, up=True)} on {device}, and {size(limit)} are allowed: "
        f"{size(peak - limit, up=True)} too many, at {op or 'the start'}.{listed}\n  {write}"
    )
