"""Which modules of a rank's model communicate, read from the shapes of its weights, and how.

Idea. A rank's weight is the whole model's weight, or has one dimension that is shorter by the size of the group; which
one says what the rank has of it. Nothing else is needed to know where the collectives are: what goes into a part of a
layer that holds slices is entered, what comes out of it is a partial sum. The embedding gives a partial sum too (each
rank knows some words), the head takes all tokens and gives each rank its share of the vocabulary, which the loss then
works on.

Parts whose slices are all weights of `nn.Linear` keep promises (`wires.py`). A mixture of experts looks at its tokens
to route them, so it gathers them once and keeps them whole.

A wired module has its own forward in its instance dictionary; a plan's region goes around that, so a replay repeats the
collectives, as Megatron's does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .. import errors
from .wires import Enter, Gather, Leave, Promise, Scatter, gathered_linear, is_promise


def _not_divided(model: str, cls: str, name: str, ranks: int) -> str:
    """Text for a model that a smaller configuration does not make a slice of."""
    what = f"{name} is no slice of the model's" if name else "no weight is a slice of the model's"
    return f"--tp {ranks}: {model} is {cls}, and built from a configuration for one rank {what}. Use it without --tp."


def divided(whole: nn.Module, part: nn.Module, size: int, word: str) -> set[str]:
    """The parameters of which a rank holds a slice, by their names.

    Args:
        whole: The model.
        part: The model of one rank.
        size: Of the group.
        word: What the user called the model.

    Raises:
        ArgumentError: A weight is divided in a way that no layout has, or none is.
    """
    before = {name: parameter.shape for name, parameter in whole.named_parameters()}
    found: set[str] = set()
    for name, parameter in part.named_parameters():
        shorter = [(a, b) for a, b in zip(before[name], parameter.shape, strict=True) if a != b]
        if len(shorter) > 1 or any(-(-a // size) != b for a, b in shorter):
            raise errors.ArgumentError(_not_divided(word, type(whole).__name__, name, size))
        if shorter:
            found.add(name)
    if not found:
        raise errors.ArgumentError(_not_divided(word, type(whole).__name__, "", size))
    return found


def wire(model: nn.Module, layers: list[str], slices: set[str], size: int, sequence: bool) -> None:
    """Puts the collectives into a rank's model.

    Args:
        model: The rank's model.
        layers: The paths of its layers.
        slices: The names of the parameters of which it holds a slice.
        size: Of the group.
        sequence: Whether norms and residuals hold a share of the tokens.
    """
    inside = [path + "." for path in layers]
    for path in layers:
        for child, module in model.get_submodule(path).named_children():
            held = {name.removeprefix(f"{path}.{child}.") for name in slices if name.startswith(f"{path}.{child}.")}
            if held:
                _wire_part(module, held, size, sequence)
    for name in sorted(slices):
        if not any(name.startswith(prefix) for prefix in inside):
            module = model.get_submodule(name.rpartition(".")[0])
            if isinstance(module, nn.Embedding):
                _put(module, Part(module, size, None, Scatter if sequence else Leave))
            elif isinstance(module, nn.Linear):
                _put(module, Head(module, size, sequence))


def _wire_part(module: nn.Module, held: set[str], size: int, sequence: bool) -> None:
    linears = [child for child in module.modules() if isinstance(child, nn.Linear)]
    promised = sequence and all(isinstance(module.get_submodule(name.rpartition(".")[0]), nn.Linear) for name in held)
    if promised:
        for number, linear in enumerate(linears):
            _put(linear, Column(linear, size, number == 0))
    enter = (Promise if promised else Gather) if sequence else Enter
    _put(module, Part(module, size, enter, Scatter if sequence else Leave))


def _put(module: nn.Module, wired: Wired) -> None:
    module.__dict__["forward"] = wired


class Wired:
    """A module's forward with collectives around it.

    Args:
        module: The module.
        size: Of the group.
    """

    def __init__(self, module: nn.Module, size: int) -> None:
        self.module = module
        self.size = size

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the module's class."""
        return type(self.module).forward(self.module, *args, **kwargs)


class Part(Wired):
    """An attention, an MLP, an embedding.

    Args:
        module: The module.
        size: Of the group.
        enter: What its first tensor goes through; None for nothing.
        leave: What its result goes through.
    """

    def __init__(
        self,
        module: nn.Module,
        size: int,
        enter: type[torch.autograd.Function] | None,
        leave: type[torch.autograd.Function],
    ) -> None:
        super().__init__(module, size)
        self._enter = enter
        self._leave = leave

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own signature."""
        if self._enter is not None:
            if args:
                args = (self._enter.apply(args[0], self.size), *args[1:])
            else:
                kwargs = {**kwargs, "hidden_states": self._enter.apply(kwargs["hidden_states"], self.size)}
        result = self.plain(*args, **kwargs)
        if isinstance(result, tuple):
            return (self._leave.apply(result[0], self.size), *result[1:])
        return self._leave.apply(result, self.size)


class Column(Wired):
    """A product that may be given a promise.

    Args:
        module: The product.
        size: Of the group.
        first: Whether it pays for gathering what was promised.
    """

    def __init__(self, module: nn.Linear, size: int, first: bool) -> None:
        super().__init__(module, size)
        self._first = first

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The module's own signature."""
        module: Any = self.module
        if is_promise(x):
            return gathered_linear(x, module.weight, module.bias, self.size, self._first)
        return F.linear(x, module.weight, module.bias)


class Head(Wired):
    """The product that makes the logits, of which each rank has its share of the vocabulary.

    Args:
        module: The product.
        size: Of the group.
        sequence: Whether it is given a share of the tokens.
    """

    def __init__(self, module: nn.Linear, size: int, sequence: bool) -> None:
        super().__init__(module, size)
        self._sequence = sequence

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The module's own signature."""
        module: Any = self.module
        if self._sequence:
            entered: Any = Promise.apply(x, self.size)
            return gathered_linear(entered, module.weight, module.bias, self.size, True)
        entered = Enter.apply(x, self.size)
        return F.linear(entered, module.weight, module.bias)
