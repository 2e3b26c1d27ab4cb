"""Texts for the functions that look at one call of a model: `saved_activations` and its like."""

from __future__ import annotations

from ._say import say


def not_a_model(what: str, value: object) -> str:
    """Text for a model that cannot be called."""
    return (
        f"{what}(model, args) needs a module or another callable, but got {say(value)}\n"
        f"  It makes the call itself; pass the model, and the arguments as a tuple:\n"
        f"      {what}(model, (x,))     # not {what}(model(x))"
    )


def args_not_a_tuple(what: str, value: object) -> str:
    """Text for arguments of an example call that are not in a tuple."""
    return (
        f"{what}(model, args) takes the positional arguments of one call as a tuple, but args is {say(value)}\n"
        f"  Write {what}(model, (x,)) for the call model(x), {what}(model, (x, y)) for model(x, y)."
    )


def kwargs_not_a_dict(what: str, value: object) -> str:
    """Text for keyword arguments of an example call that are not in a dict."""
    return (
        f"{what}(model, args, kwargs) takes the keyword arguments of one call as a dict of names to values, but "
        f"kwargs is {say(value)}\n"
        f'  Write {what}(model, (x,), {{"mask": mask}}) for the call model(x, mask=mask).'
    )
