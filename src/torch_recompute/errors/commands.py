"""Texts for what `torch-recompute plan` is asked and cannot do."""

from __future__ import annotations

from collections.abc import Sequence

from ._say import size

_OWN = (
    "a function pkg.module:name that returns (model, batch), or (model, batch, loss), the batch a tuple of arguments "
    "or a dict of keywords"
)


def no_plan_file(option: str, path: str, why: str) -> str:
    """Text for a file that holds no plan."""
    return (
        f"{option} is {path}: {why}. Write the path of a file that torch-recompute plan MODEL --budget ... --out "
        "plan.json has made, or that holds plan.to_json()."
    )


def no_device_to_run(word: str, cuda: bool) -> str:
    """Text for a device that is none, or is not here."""
    here = "" if cuda else "; torch sees no CUDA device here"
    return f"--device is {word}; expected cpu, cuda or cuda:N{here}. Leave it out for what is here."


def nothing_to_run(model: str) -> str:
    """Text for a model of the user without weights."""
    return (
        f"{model} makes a model on the meta device, which has no weights to run with. Have it make the model on a "
        "device that is here."
    )


def does_not_run(model: str, error: BaseException) -> str:
    """Text for a model whose step raises by itself."""
    first = (str(error) or "no message").splitlines()[0]
    return (
        f"a step of {model} raises {type(error).__name__}: {first}. That is without a plan. Mend it, or write a "
        "function pkg.module:name that returns (model, batch) and runs."
    )


def too_large_to_run(model: str, device: str, needed: int, free: int, at_least: bool) -> str:
    """Text for a model that is larger than the device that is to run it."""
    return (
        f"{model} is too large to run here: weights, two sets of gradients and a step without a plan need "
        f"{'at least ' * at_least}{size(needed, up=True)}, and {device} has {size(free)} free. Write a smaller "
        "--batch or --sequence, or a config.json with fewer layers: layers that are alike need to be verified once."
    )


def made_by_a_function(option: str, model: str) -> str:
    """Text for an option that describes what a function of the user makes."""
    return f"{option} is for models that are built here; {model} makes its own. Leave it out, and have it say so there."


def no_batch_known(model: str, cls: str) -> str:
    """Text for a model of which it is not known what it is called with."""
    return (
        f"MODEL is {model!r}, which is {cls}: no model of transformers that takes input_ids or pixel_values, so there "
        f"is no batch for it. Write {_OWN}."
    )


def no_such_sequence(model: str, length: int, positions: int | None) -> str:
    """Text for a number of tokens that a model cannot take; it has no positions if it takes pictures."""
    if positions is None:
        return f"--sequence is a number of tokens, and {model} takes pixel_values. Leave it out."
    return f"--sequence is {length}, and {model} has {positions} positions. Write --sequence {positions} or less."


def not_a_size(option: str, value: object, least: int = 1) -> str:
    """Text for a size that is none."""
    return f"{option} is {value}; expected a whole number of at least {least}. Write for example {option} {least}."


def goes_with(option: str, other: str) -> str:
    """Text for an option that means something only with another one."""
    return f"{option} goes with {other} and says nothing without it. Add {other}, or leave {option} out."


def cannot_write(option: str, path: str, why: str) -> str:
    """Text for a file that cannot be written."""
    return f"{option} is {path}: {why}. Write the path of a file in a folder that is there, and that may be written."


def not_a_picture(path: str, known: Sequence[str]) -> str:
    """Text for a file of no known kind of picture."""
    return f"--plot is {path}; expected a file name that ends in {', '.join(known)}. Write for example --plot plan.png"


def needs_matplotlib(path: str) -> str:
    """Text for a picture without what draws it."""
    return (
        f"--plot is {path}, but the package matplotlib, which draws it, is not installed. Write: "
        "pip install torch-recompute[plot]"
    )


def needs_rich() -> str:
    """Text for a table without what prints it."""
    return (
        "tables are printed by the package rich, which is not installed. Write: pip install torch-recompute[cli], or "
        "add --json"
    )
