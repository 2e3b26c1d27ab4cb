"""Texts for planning: profiles, devices, and models that no plan fits."""

from __future__ import annotations

from collections.abc import Sequence

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


def bad_sizes(sizes: str) -> str:
    """Text for a word that says nothing of sizes."""
    return (
        f"sizes={sizes!r} is not a choice of sizes.\n"
        '  Write sizes="all" for every length up to that of the call that is given, or the lengths: sizes=[512, 2048].'
    )


def bad_length(length: object) -> str:
    """Text for something among lengths that is none."""
    return (
        f"sizes holds lengths of sequences and {say(length)}; lengths are whole numbers above 0, and are not mixed "
        "with examples of calls.\n"
        "  Write one or the other:  make_plan(model, (batch,), budget=..., sizes=[512, 2048])\n"
        "                           make_plan(model, budget=..., sizes=[(short,), (long,)])"
    )


def no_sequence(given: str) -> str:
    """Text for a call whose sequence cannot be found."""
    return (
        f"sizes are lengths, but the call has {given}, so it cannot be told where its sequence is: the first tensor is "
        "expected to be tokens [batch, sequence] or embeddings [batch, sequence, width], and no other dimension of it "
        "to be as long as the sequence.\n"
        "  Give an example of each size instead:  make_plan(model, budget=..., sizes=[(short,), (long,)])"
    )


def bad_example(example: object) -> str:
    """Text for an example of a size that is no call."""
    return (
        f"sizes holds {say(example)}, where an example of a call is expected.\n"
        "  Write a tuple of positional arguments or a dictionary of keyword arguments for each size, with tensors of "
        "that size:\n"
        "      sizes=[(batch[:, :length],) for length in (512, 2048, 8192)]"
    )


def nothing_to_plan(model: str) -> str:
    """Text for a model without a part that can be planned."""
    return (
        f"{model} has no module that a plan could recompute: none that is called in a forward holds a product.\n"
        '  Name one by hand: from torch_recompute.plan.units import register; register("layer", MyBlock)'
    )


def unknown_device(name: object, known: Sequence[str]) -> str:
    """Text for a device of which no data sheet is known."""
    return (
        f"device={name!r} is neither a device of this machine nor one whose speeds are known.\n"
        f"  Known are {', '.join(known)}."
    )


def bad_offload(offload: object) -> str:
    """Text for what says nothing of how much host memory may be used."""
    return (
        f"offload={offload!r} says neither whether nor how much of host memory may be used.\n"
        '  Write offload=True for as much as there is, or the most bytes of it: offload="64GiB".'
    )


def nowhere_to_offload(known: Sequence[str]) -> str:
    """Text for offloading from the CPU."""
    return (
        "offload: the step is planned for the CPU, whose memory is host memory, so offloading would free nothing.\n"
        f'  To plan for a device that is not at hand, name it: device="h100" (known are {", ".join(known)}).'
    )


def no_link(name: str, known: Sequence[str]) -> str:
    """Text for offloading from a device of which the speed of copies is not known."""
    return (
        f"offload: how fast device {name!r} copies to and from host memory is not known.\n"
        f"  Known are {', '.join(known)}, and any CUDA device of this machine, which is measured."
    )


def bad_profile(why: str) -> str:
    """Text for a profile that cannot be."""
    return (
        f"this is not a profile: {why}.\n"
        "  A profile is made by torch_recompute.profile(model, args), or read by Profile.from_json(text) from what "
        "profile.to_json() wrote."
    )


def bad_merge(what: str, one: object, other: object) -> str:
    """Text for profiles of different steps."""
    return (
        f"profiles of different steps cannot be merged: {what} is {one} in one and {other} in another.\n"
        "  Merge those of one model and one shape of batch: several measurements, or the ranks of a group. What two "
        "profiles differ in is shown by  print(one.diff(other))."
    )


def host_memory_unknown(system: str) -> str:
    """Text for a system that does not say how much memory it has."""
    return (
        f"what memory of this machine is free is not known: its system ({system}) says it to psutil, which is not "
        "installed. pip install psutil, or pass the budget in bytes."
    )


def device_memory_unknown(kind: str) -> str:
    """Text for an accelerator that does not say how much memory it has."""
    return (
        f'budget="fit": what a device of type {kind!r} has free is not known, since torch.{kind} does not say it.\n'
        '  Pass the most bytes that the step may take, such as budget="24GiB".'
    )


def nothing_to_fit_into() -> str:
    """Text for "fit" where no device is known."""
    return (
        'budget="fit" means what the device has free, and a profile knows no device.\n'
        '  Write make_plan(model, args, budget="fit") where the model is, or a number of bytes such as budget="24GiB".'
    )
