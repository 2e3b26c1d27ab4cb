"""Texts for planning: profiles, devices, and models that no plan fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ._say import say, size


def no_plan_fits(budget: int, smallest: int, plain: int, advice: str) -> str:
    """Text for a budget that no plan fits into."""
    return (
        f"{_too_small(budget, smallest, plain)}\n"
        f'  Pass budget="{_enough(smallest)}" or more, or a smaller batch. That plan is '
        f".solution of this error, and its bytes are .smallest.{_more(advice)}"
    )


def no_plan_to_write(budget: int, smallest: int, plain: int, advice: str, out: str | None) -> str:
    """Text for a budget on a command line that no plan fits into."""
    unwritten = f" {out} has not been written; with --budget {smallest} it is that plan." if out else ""
    return (
        f"{_too_small(budget, smallest, plain)}\n"
        f"  Write --budget {_enough(smallest)} or more, or a smaller batch.{unwritten}{_more(advice)}"
    )


def _too_small(budget: int, smallest: int, plain: int) -> str:
    return (
        f"budget={size(budget)} is too small for a step of this model: with the plan that needs the least its peak is "
        f"{size(smallest, up=True)} ({smallest} bytes), with no region {size(plain)}."
    )


def _enough(smallest: int) -> str:
    return size(smallest, up=True).replace(" ", "")


def _more(advice: str) -> str:
    return f"\n  {advice}" if advice else ""


def size_does_not_fit(shape: str, why: str) -> str:
    """Text for one of several sizes that no plan fits into the budget for."""
    return f"sizes: for calls of {shape}, {why}"


def args_and_sizes(count: int) -> str:
    """Text for positional arguments beside examples of sizes."""
    return (
        f"make_plan was given {count} positional arguments of the model and sizes, which are examples of whole calls.\n"
        "  Write one or the other:  make_plan(model, budget=..., sizes=[(short,), (long,)])"
    )


def bad_example(example: object) -> str:
    """Text for an example of a size that is no call."""
    return (
        f"sizes holds {say(example)}, where an example of a call is expected.\n"
        "  Write a tuple of positional arguments or a dictionary of keyword arguments for each size, with tensors of "
        "that size:\n"
        "      sizes=[(batch[:, :length],) for length in (512, 2048, 8192)]"
    )


def nothing_to_plan(model: str, left_out: Mapping[str, str]) -> str:
    """Text for a model without a part that can be planned."""
    reasons = "".join(f"\n  {path} {why}" for path, why in left_out.items())
    return (
        f"{model} has no module that a plan could recompute: none holds a product and is called once in a forward."
        f"{reasons}\n"
        '  Name one by hand: from torch_recompute.plan.units import register; register("layer", MyBlock)'
    )


def unknown_device(name: object, known: Sequence[str]) -> str:
    """Text for a device of which no data sheet is known."""
    return (
        f"device={name!r} is neither a device of this machine nor one whose speeds are known.\n"
        f"  Known are {', '.join(known)}."
    )


def bad_profile(why: str) -> str:
    """Text for a profile that cannot be."""
    return (
        f"this is not a profile: {why}.\n"
        "  A profile is made by torch_recompute.profile(model, args), or read by Profile.from_json(text) from what "
        "profile.to_json() wrote."
    )


def nothing_to_fit_into() -> str:
    """Text for "fit" where no device is known."""
    return (
        'budget="fit" means what the device has free, and a profile knows no device.\n'
        '  Write make_plan(model, args, budget="fit") where the model is, or a number of bytes such as budget="24GiB".'
    )
