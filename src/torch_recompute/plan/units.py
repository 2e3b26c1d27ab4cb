"""What a model is made of: `find_units(model)` names the layers, attentions, norms, MLPs, experts ... of any model.

Problem. "Recompute the core attention of this model" needs to know where attention is. Libraries answer with a list of
class names per model, which grows by one with every model and breaks with every rename.

Idea. Two halves. This file looks at each module by itself: is it a product with a matrix, a norm, a list, and how wide.
`structure.py` sees only these facts and finds roles by how they lie together. What that cannot see, a user says in
three lines, and it comes before everything else:

    from torch_recompute.plan.units import register
    register("attention", MyAttention)
    register("norm", "MyScale*")

Rejected: tracing a forward pass to see what feeds what. It needs an input and time, and says nothing about names that a
user could write into a configuration; structure is known on the meta device before there are weights.

Invariants: nothing runs, nothing is changed, no value of a parameter is read. A weight that is computed when it is
asked for (a parametrization, a property) is not asked for.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from .. import errors
from .anatomy import Unit, Units
from .structure import Fact, Finder, Product

__all__ = ["Unit", "Units", "find_units", "register"]

Match = type[nn.Module] | str | Callable[[nn.Module], bool]
NOT_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# What a user may register. The other roles follow from these.
REGISTRABLE = ("layer", "attention", "mlp", "router", "experts", "norm", "product", "activation", "embedding")


class _Entry(NamedTuple):
    role: str
    match: Match

    def fits(self, module: nn.Module) -> bool:
        if isinstance(self.match, str):
            return any(fnmatch.fnmatchcase(name, self.match) for name in _class_names(module))
        if isinstance(self.match, type):
            return isinstance(module, self.match)
        return self.match(module)


def _class_names(module: nn.Module) -> list[str]:
    """Its class and the bases: FSDP2 replaces the class of a module by a subclass of its own."""
    return [base.__name__ for base in type(module).__mro__ if base not in (nn.Module, object)]


def _is_norm(module: nn.Module) -> bool:
    named = any("norm" in name.lower() for name in _class_names(module))
    vectors = all(parameter.ndim <= 1 for parameter in module.parameters())
    return named and vectors and not any(True for _ in module.children())


def _is_activation(module: nn.Module) -> bool:
    bare = not any(True for _ in module.children()) and not any(True for _ in module.parameters())
    names = ("gelu", "relu", "silu", "swish", "activation", "mish", "sigmoid", "tanh", "softplus")
    return bare and any(name in type(module).__name__.lower() for name in names)


_BUILT_IN = (
    _Entry("attention", nn.MultiheadAttention),
    _Entry("embedding", nn.Embedding),
    _Entry("embedding", nn.EmbeddingBag),
    _Entry("norm", nn.LayerNorm),
    _Entry("norm", nn.RMSNorm),
    _Entry("norm", _is_norm),
    _Entry("activation", nn.PReLU),
    _Entry("activation", _is_activation),
    _Entry("mlp", "LayerNormMLP"),  # Transformer Engine's: a norm, two products and the activation in one
)
_registered: list[_Entry] = []


def register(role: str, match: Match) -> Callable[[], None]:
    """Teaches `find_units` what a module is.

    Args:
        role: `layer`, `attention`, `mlp`, `router`, `experts`, `norm`, `product`, `activation` or `embedding`.
        match: A class (with its subclasses), a glob over class names (`"My*Attention"`), or a function from a module
            to a bool.

    Returns:
        A function that forgets this again.

    Raises:
        ArgumentError: The role is unknown, or `match` is none of these.
    """
    if role not in REGISTRABLE:
        raise errors.ArgumentError(
            f"register: {role!r} is not a role of a module.\n  Write one of {', '.join(REGISTRABLE)}."
        )
    if not isinstance(match, str) and not callable(match):
        raise errors.ArgumentError(
            f"register: {errors.say(match)} says nothing about a module.\n"
            '  Pass a class (MyNorm), a glob over class names ("My*Norm"), or a function from a module to a bool.'
        )
    entry = _Entry(role, match)
    _registered.insert(0, entry)

    def forget() -> None:
        _registered[:] = [other for other in _registered if other is not entry]

    return forget


def find_units(model: nn.Module) -> Units:
    """What the model is made of.

    Args:
        model: Any module, on any device, the meta device included.

    Returns:
        Its units, in the order in which the model defines them.

    Raises:
        ArgumentError: It is not a module.
    """
    if not isinstance(model, nn.Module):
        raise errors.ArgumentError(f"find_units(model) needs a torch.nn.Module, but got {errors.say(model)}.")
    facts = {path: _fact(module) for path, module in model.named_modules()}
    return Finder(facts).units(type(model).__name__)


def _fact(module: nn.Module) -> Fact:
    role = next((entry.role for entry in (*_registered, *_BUILT_IN) if entry.fits(module)), None)
    own = list(module.parameters(recurse=False))
    return Fact(
        cls=type(module).__name__,
        role=role,
        product=_product(module, registered=role == "product") if role in (None, "product") else None,
        container=isinstance(module, (*NOT_CALLED, nn.Sequential)),
        listed=isinstance(module, NOT_CALLED),
        called=not isinstance(module, NOT_CALLED) or type(module).forward is not nn.Module.forward,
        opaque=isinstance(module, nn.MultiheadAttention),
        heavy=any(True for _ in module.parameters()),
        stacked=tuple(parameter.shape[0] for parameter in own if parameter.ndim == 3),
        matrices=sum(parameter.ndim >= 2 for parameter in own),
    )


def _product(module: nn.Module, *, registered: bool = False) -> Product | None:
    base = getattr(module, "base_layer", None)  # PEFT: an adapter around a layer
    if isinstance(base, nn.Module):
        return _product(base)
    if isinstance(module, CONVOLUTIONS):
        pointwise = all(size == 1 for size in module.kernel_size)
        return Product(module.in_channels, module.out_channels, pointwise)
    if isinstance(module, nn.Linear):
        return Product(module.in_features, module.out_features, pointwise=True)
    for takes, gives in (("in_features", "out_features"), ("nx", "nf")):  # quantised layers; GPT-2's Conv1D
        widths = getattr(module, takes, None), getattr(module, gives, None)
        if isinstance(widths[0], int) and isinstance(widths[1], int):
            return Product(widths[0], widths[1], pointwise=True)
    weight = _weight(module)
    inner = [_weight(child) for child in module.modules() if child is not module]
    alone = not any(isinstance(other, Tensor) and other.ndim >= 2 for other in inner)
    named = "embed" not in type(module).__name__.lower()
    if alone and named and isinstance(weight, Tensor) and weight.ndim == 2:
        return Product(weight.shape[1], weight.shape[0], pointwise=True)
    return Product(0, 0, pointwise=True) if registered else None


def _weight(module: nn.Module) -> object:
    """A module's weight, or what one with a parametrization is made of: to ask for that one changes it."""
    made = dict(module.named_children()).get("parametrizations")
    if isinstance(made, nn.ModuleDict) and "weight" in made:
        return next(made["weight"].parameters(recurse=False), None)
    own = {**dict(module.named_buffers(recurse=False)), **dict(module.named_parameters(recurse=False))}
    return own.get("weight", vars(module).get("weight"))
