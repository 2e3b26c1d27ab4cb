"""Texts for assertions in the tests of a user."""

from __future__ import annotations


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
