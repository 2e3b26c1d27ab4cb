"""Texts for looking at what a model is made of."""

from __future__ import annotations

from collections.abc import Sequence

from ._say import kind, say


def not_made_of_modules(value: object) -> str:
    """Text for something whose units are asked for and that has none."""
    return f"find_units(model) needs a torch.nn.Module, but got {say(value)}."


def unknown_role(role: object, roles: Sequence[str]) -> str:
    """Text for a registered role that nothing knows."""
    return f"register: {role!r} is not a role of a module.\n  Write one of {', '.join(roles)}."


def bad_match(match: object) -> str:
    """Text for something that cannot be matched with modules."""
    return (
        f"register: {say(match)} says nothing about a module.\n"
        '  Pass a class (MyNorm), a glob over class names ("My*Norm"), or a function from a module to a bool.'
    )


_MODEL = "Write pkg.module:name, or the path of a Hugging Face config.json or of its folder."


def no_such_model(model: str, known: Sequence[str]) -> str:
    """Text for a word that names no model."""
    return (
        f"MODEL is {model!r}, which is no file, no folder and not of the form pkg.module:name. {_MODEL} Known by name "
        f"are {', '.join(known)}."
    )


def not_importable(model: str, why: Exception) -> str:
    """Text for a model whose module or name does not exist."""
    return f"MODEL is {model!r}: {_first_line(why)}. {_MODEL}"


def makes_no_module(model: str, made: object) -> str:
    """Text for a name that stands for something else than a model."""
    return (
        f"MODEL is {model!r}, which gives {say(made)}; expected a torch.nn.Module, or a function that returns one, "
        "or one and its batch (a tuple of arguments, or a dict of keyword arguments), and a function for its loss."
    )


def not_built(model: str, why: Exception) -> str:
    """Text for a model whose construction fails."""
    return f"MODEL is {model!r}, and building it raises {kind(why)}: {_first_line(why)}"


def not_a_model_config(path: str, why: Exception) -> str:
    """Text for a file that is no configuration of a model."""
    what = "it has no field model_type" if isinstance(why, KeyError) else f"{kind(why)}: {_first_line(why)}"
    return f"{path} is not the configuration of a Hugging Face model: {what}. {_MODEL}"


def needs_transformers(path: str) -> str:
    """Text for a configuration that only transformers can read."""
    return f"{path} is built with the package transformers, which is not installed. Write: pip install transformers"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [kind(error)])[0].rstrip(".")
