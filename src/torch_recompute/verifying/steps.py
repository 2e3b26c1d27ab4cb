"""One step of a model from a fixed start, and what it leaves.

The start is the moment at which the `Subject` was made. Arguments are copied for every step, so that a model that
writes into them, or a gradient that is left in them, is not seen by the next.

Invariants. After `step` everything is at the start again; only what is returned remembers the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .. import _compat
from .._compat.storages import set_versions, versions_of
from .._reach import Reach
from ..auditing.surroundings import Generators, Places
from ..memory.ledger import storages
from ..memory.saved import module_names


@dataclass
class Left:
    """What a step leaves.

    Attributes:
        outputs: The tensors of the output, and the loss.
        gradients: By the name of what they are of, in the order in which backward has made them.
        buffers: By their names.
        generators: The states of the generators that the model holds; the global ones are in `around`.
        around: Random states and attributes, to compare another step's with; None where that is not wanted.
    """

    outputs: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    gradients: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    buffers: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    generators: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    around: Around | None = None


class Around:
    """Global random states and attributes at one moment."""

    def __init__(self, modules: list[tuple[nn.Module, str]], functions: list[Any]) -> None:
        self._places, self._generators = Places(modules, functions), Generators()

    def changes(self) -> tuple[list[str], list[str]]:
        """The generators, and the attributes, that are not as they were."""
        return self._generators.advanced(), self._places.changes()

    def restore(self) -> None:
        """Puts all back."""
        self._places.restore()
        self._generators.restore()


class Subject:
    """A model and a call of it.

    Args:
        model: The model, or any callable.
        args: Positional arguments.
        kwargs: Keyword arguments.
        loss: From the output to a scalar.
    """

    def __init__(
        self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], loss: Callable[[Any], Any]
    ) -> None:
        self.model = model
        self._args, self._kwargs, self._loss = args, kwargs, loss
        reach = Reach(model, [value for value in (*args, *kwargs.values()) if isinstance(value, nn.Module)])
        names = module_names(model, reach)
        self._modules = [(module, names.get(id(module), "")) for module in reach.modules]
        self._generators = [*reach.generators, *(v for v in args if isinstance(v, torch.Generator))]
        self._leaves = self._named(reach)
        self._namespaces = [(held, dict(held)) for held in reach.buffers()]
        stored = {id(s): s for held, _ in self._namespaces for buffer in held.values() for _, s in storages(buffer)}
        self._contents = [(storage, storage.clone()) for storage in stored.values() if storage.device.type != "meta"]
        self._versions = versions_of(
            buffer for held, _ in self._namespaces for buffer in held.values() if buffer is not None
        )
        self._states = [(generator, generator.get_state()) for generator in self._generators]
        self._start = self._around()

    @property
    def device(self) -> torch.device:
        """Where the step runs."""
        tensors = [*self._leaves.values(), *_tensors(self._args), *_tensors(self._kwargs)]
        return next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))

    def step(self, *, keep: bool = False) -> Left:
        """Runs forward, loss and backward, and goes back to the start.

        Args:
            keep: Whether to keep what lies around, so that another step can be compared.
        """
        before = {name: leaf.grad for name, leaf in self._leaves.items()}
        handles: list[Any] = []
        order: dict[str, None] = {}
        try:
            with torch.inference_mode(False), torch.enable_grad():
                args, kwargs, inputs = self._copies()
                leaves = {**self._leaves, **inputs}
                for name, leaf in leaves.items():
                    leaf.grad = None
                    if leaf.is_leaf and leaf.requires_grad:
                        handles.append(leaf.register_post_accumulate_grad_hook(_noting(order, name)))
                output = self.model(*args, **kwargs)
                loss = self._loss(output)
                left = Left(outputs={name: one.detach() for name, one in _said(output)})
                left.outputs["the loss"] = loss.detach()
                del output
                loss.backward()
            for name in [*order, *(name for name in leaves if name not in order)]:
                gradient = leaves[name].grad
                if gradient is not None:
                    left.gradients[f"the gradient of {name}"] = gradient
            left.buffers = self._buffers()
            states = [generator.get_state() for generator in self._generators]
            left.generators = {f"generator {number} of the model": state for number, state in enumerate(states)}
            left.around = self._around() if keep else None
            return left
        finally:
            for handle in handles:
                handle.remove()
            for name, leaf in self._leaves.items():
                leaf.grad = before[name]

    def differing(self, first: Left) -> tuple[list[str], list[str]]:
        """The global generators and the attributes that are now not as after a step that was kept."""
        return ([], []) if first.around is None else first.around.changes()

    def go_back(self) -> None:
        """Makes everything as it was when this was made."""
        with torch.no_grad():
            for held, before in self._namespaces:
                held.clear()
                held.update(before)
            for storage, content in self._contents:
                storage.copy_(content)
            set_versions(self._versions)
        for generator, state in self._states:
            generator.set_state(state)
        self._start.restore()

    def _around(self) -> Around:
        return Around(self._modules, [self.model])

    def _named(self, reach: Reach) -> dict[str, torch.Tensor]:
        """All that gets a gradient, by name; of tensors that are in two places the first name counts."""
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for module, path in self._modules:
            for name, parameter in module.named_parameters(path, recurse=False):
                found.setdefault(id(parameter), (name, parameter))
        for seen in reach.parameters(cells=True):
            if seen.tensor.is_leaf:
                found.setdefault(id(seen.tensor), (seen.label(), seen.tensor))
        return {name: tensor for name, tensor in found.values() if tensor.requires_grad}

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {
            f"buffer {name}": buffer.detach().clone()
            for module, path in self._modules
            for name, buffer in module.named_buffers(path, recurse=False)
        }

    def _copies(self) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, torch.Tensor]]:
        """The call with copies of its tensors, and those of them that get a gradient."""
        leaves, spec = _compat.tree_flatten((self._args, self._kwargs))
        inputs: dict[str, torch.Tensor] = {}
        copies: list[Any] = []
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, nn.Parameter):
                leaf = leaf.detach().clone().requires_grad_(leaf.requires_grad)
                if leaf.requires_grad:
                    inputs[f"argument {number}"] = leaf
            copies.append(leaf)
        args, kwargs = _compat.tree_unflatten(copies, spec)
        return args, kwargs, inputs


def _noting(order: dict[str, None], name: str) -> Callable[[torch.Tensor], None]:
    def note(_: torch.Tensor) -> None:
        order.setdefault(name)

    return note


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _compat.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _said(output: Any) -> list[tuple[str, torch.Tensor]]:
    found = _tensors(output)
    return [(f"output {number}" if len(found) > 1 else "the output", one) for number, one in enumerate(found)]
