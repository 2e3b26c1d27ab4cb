"""A context that checks that a model, its gradients, hooks and generators are unchanged at its end."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
PLAIN = (int, float, str, list, dict)


@contextmanager
def unchanged(model: nn.Module, *tensors: torch.Tensor) -> Iterator[None]:
    """Weights, gradients, buffers, versions, attributes, hooks, forwards and random states are as before the block."""
    before = _everything(model, *tensors)
    yield
    after = _everything(model, *tensors)
    assert after.keys() == before.keys()
    for name, value in before.items():
        same = torch.equal(value, after[name]) if isinstance(value, torch.Tensor) else value == after[name]
        assert same, f"{name} was {value} and is {after[name]}"


def _everything(model: nn.Module, *tensors: torch.Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {"torch's generator": torch.get_rng_state(), "Python's generator": random.getstate()}
    if find_spec("numpy") is not None:
        import numpy

        found["NumPy's generator"] = str(numpy.random.get_state())
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found.update((f"the version of {name}", tensor._version) for name, tensor in named.items())
    for name, tensor in {**named, **{f"tensor {i}": tensor for i, tensor in enumerate(tensors)}}.items():
        grad = tensor.grad if tensor.is_leaf else None
        found[name], found[f"the gradient of {name}"] = tensor.detach().clone(), None if grad is None else grad.clone()
        found[f"hooks of {name}"] = bool(tensor._post_accumulate_grad_hooks)
    for path, module in model.named_modules():
        found[f"names in {path}"] = set(vars(module))
        found[f"hooks of {path}"] = [len(getattr(module, hooks)) for hooks in HOOKS]
        plain = {key: value for key, value in vars(module).items() if key[0] != "_" and isinstance(value, PLAIN)}
        found[f"attributes of {path}"] = copy.deepcopy(plain)
    return found
