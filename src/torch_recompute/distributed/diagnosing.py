"""Finds the calls in a model's graph that call backward inside backward.

DDP's "Expected to mark a variable ready only once" blames the computation of a parameter's gradient, and not the cause:
a *reentrant* checkpoint, whose backward runs a backward of its own, which fires DDP's hooks. Regions of this library do
not, but a model may hold both. A reentrant checkpoint is one node of the graph, of a class that PyTorch, Megatron-LM,
DeepSpeed and fairscale all call `CheckpointFunction`, and it holds the function that it will run. The graph can be
walked before backward and after a backward that failed.

Not found: a checkpoint inside another (it has no node until backward), one whose inputs need no grad (it has no node at
all, and trains nothing; torch warns), and autograd Functions of other names that call backward themselves.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any, NamedTuple

from torch import nn

from .. import _torch, errors
from .._torch import graphs
from ..errors.text import times
from ..state.values import name_of


class Reentrant(NamedTuple):
    """One kind of reentrant checkpoint in a graph; `print` says what to write instead.

    Attributes:
        function: The name of the function that it runs again.
        path: The path of that function's module in the model; "" where that is not known.
        library: The module of the checkpoint, as `torch.utils.checkpoint`.
        calls: The number of its calls in the graph.
    """

    function: str
    path: str
    library: str
    calls: int

    def __str__(self) -> str:
        where = f"{self.function} ({self.path})" if self.path else self.function
        return (
            f"{where} is checkpointed {times(self.calls)} by {self.library}, reentrant: it calls backward inside "
            "backward, so each call marks its parameters as ready again. Write torch_recompute.recompute(fn)(*args) "
            "instead, or use_reentrant=False."
        )


def find_reentrant(output: Any, model: nn.Module | None = None) -> list[Reentrant]:
    """Finds the reentrant checkpoints in the graph of a model's output: the cause of DDP's "marked as ready twice".

        try:
            loss.backward()
        except RuntimeError:
            for culprit in find_reentrant(loss, model):
                print(culprit)
            raise

    Args:
        output: A loss or any nest of tensors that backward is, or was, called on.
        model: The model, for the paths of the modules; its wrapper will do.

    Returns:
        One entry per function and library, those nearest to the output first; empty if there is none.

    Raises:
        ArgumentError: No tensor of `output` has a graph.
    """
    roots = [tensor.grad_fn for tensor in _torch.tensors_in(output)]
    if not any(roots):
        raise errors.ArgumentError(
            "find_reentrant walks the autograd graph of a model's output or loss, but found no graph on "
            f"{errors.say(output)}.\n"
            "  Pass the tensor that backward is called on, before or after backward: find_reentrant(loss, model)"
        )
    paths = {} if model is None else {id(module): path for path, module in model.named_modules()}
    found: Counter[tuple[str, str, str]] = Counter()
    for node in _torch.nodes_from(roots):
        made_by = graphs.function_of(node)
        if made_by is not None and made_by.__name__ == "CheckpointFunction":
            function: Any = getattr(node, "run_function", None)
            module = _module_of(function)
            name = "a function" if function is None else name_of(function if module is None else module)
            found[name, paths.get(id(module), ""), made_by.__module__] += 1
    return [Reentrant(*key, calls) for key, calls in found.items()]


def _module_of(function: Any) -> nn.Module | None:
    """Returns the module that a checkpointed function runs: itself, or the one whose method it is, through partials."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, nn.Module):
        return function
    owner = getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None
