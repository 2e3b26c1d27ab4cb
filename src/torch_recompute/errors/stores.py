"""Texts about stores: host memory, and what it is asked to do."""

from __future__ import annotations


def bad_host_option(option: str, value: object, expected: str) -> str:
    """Text for an option of `OnHost`."""
    return f"OnHost({option}={value!r}): {option} must be {expected}."


def changed_on_its_way(then: int, now: int) -> str:
    """Text for a tensor that was changed while it was copied to the host."""
    return (
        "a tensor that OnHost was given has been changed in place while it was being copied to the host (version "
        f"{then} then, {now} now), so neither its old nor its new values are known to be there.\n"
        "  With ahead=1 it may be changed once two more regions have been called. Write x = x + y instead of x += "
        "y, or give the region a copy: region(x.clone())."
    )


def changed_on_device(then: int, now: int) -> str:
    """Text for a tensor that OnHost left on the device and that was changed there."""
    return (
        f"a tensor that OnHost left on the device has been changed in place since (version {then} then, {now} now). "
        "It was left there because of smallest=, at_most= or fraction=.\n"
        "  Write x = x + y instead of x += y, or give the region a copy: region(x.clone())."
    )


def not_a_device(device: object) -> str:
    """Text for a device whose copies cannot be timed."""
    return (
        f"bandwidth({device!r}): expected a CUDA device of this machine, or 'cpu'.\n"
        "  Write bandwidth() for the machine's accelerator, or for the CPU where there is none."
    )
