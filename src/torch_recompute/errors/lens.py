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


def not_paths(value: object) -> str:
    """Text for `modules=` that is no list of paths."""
    return (
        f"audit(modules=...) takes a list of paths or globs, but got {say(value)}\n"
        '  Write audit(model, (x,), modules=["layers.*"]); paths are those of model.named_modules().'
    )


def modules_of_a_function(value: object) -> str:
    """Text for `modules=` of something that has none."""
    return (
        f"audit(model, modules=...) finds modules by their paths in a torch.nn.Module, but got {say(value)}\n"
        "  Pass the module, or a function that calls regions, without modules=."
    )


def no_module_to_audit(model: str, pattern: str) -> str:
    """Text for a path or glob that is nothing's."""
    return (
        f"audit(modules=[{pattern!r}]): {model} has no module of this path that is called.\n"
        "  Paths are those of model.named_modules(); a glob matches whole paths, dots included; a ModuleList is never "
        "called."
    )


def no_regions(model: str) -> str:
    """Text for an audit of a model that calls no region."""
    return (
        f"audit: {model} called no region that backward would replay, so there is nothing to run twice.\n"
        '  Name the modules to look at, audit(model, (x,), modules=["layers.*"]), or place regions first: '
        "recompute(fn), apply(model, plan). A region whose inputs and parameters require no grad is never replayed."
    )


def bad_perturbation(value: object) -> str:
    """Text for `perturb=` that is no share."""
    return (
        f"audit(perturb=...) is how much to change the inputs of each region relative to themselves, a number from "
        f"0 to 1, but got {say(value)}\n"
        "  Write perturb=0.002, half a step of bfloat16."
    )
