"""Which calls in a model's graph call backward inside backward.

Problem. DDP's "Expected to mark a variable ready only once ... has been marked as ready twice" blames whoever computed
the parameter's gradient, and not what caused it: somewhere in the model there is a *reentrant* checkpoint, whose
backward runs a backward of its own. Each of those fires DDP's hook on the parameters that it reaches. Regions of this
library do not, but a model may hold both, or get its checkpoints from a library.

Idea. A reentrant checkpoint is one node of the graph, of a class that PyTorch, Megatron-LM, DeepSpeed and fairscale
all call `CheckpointFunction`, and it holds the function that it will run. The graph can be walked before backward and
after a backward that failed.

Rejected: to parse DDP's message and add to it. It rises in the user's own `backward()`, where no code of ours runs.

Not found: a checkpoint inside another (it has no node until backward), one whose inputs need no grad (it has no node at
all, and trains nothing; torch warns), and autograd Functions of other names that call backward themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import _torch, errors
from ..values import name_of

__all__ = ["Reentrant", "find_reentrant"]


class Reentrant(NamedTuple):
    """One kind of reentrant checkpoint in a graph; `print` says what to write instead.

    Attributes:
        function: The name of the function that it runs again.
        path: The path of that function's module in the model; "" where that is not known.
        library: Where the checkpoint comes from, as `torch.utils.checkpoint`.
        calls: How often it stands in the graph.
    """

    function: str
    path: str
    library: str
    calls: int

    def __str__(self) -> str:
        where = f"{self.function} ({self.path})" if self.path else self.function
        times = "once" if self.calls == 1 else f"{self.calls} times"
        return (
            f"{where} is checkpointed {times} by {self.library}, reentrant: it calls backward inside backward, so each "
            "call marks its parameters as ready again. Write torch_recompute.recompute(fn)(*args) instead, or "
            "use_reentrant=False."
        )


def find_reentrant(output: Any, model: nn.Module | None = None) -> list[Reentrant]:
    """The reentrant checkpoints in the graph of a model's output: the cause of DDP's "marked as ready twice".

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
    roots = [leaf.grad_fn for leaf in _torch.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    if not any(roots):
        raise errors.ArgumentError(
            "find_reentrant walks the autograd graph of a model's output or loss, but found no graph on "
            f"{errors.say(output)}.\n"
            "  Pass the tensor that backward is called on, before or after backward: find_reentrant(loss, model)"
        )
    paths = {} if model is None else {id(module): path for path, module in model.named_modules()}
    found: dict[tuple[str, str, str], int] = {}
    for node in _nodes(roots):
        made_by = _torch.function_of(node)
        if made_by is not None and made_by.__name__ == "CheckpointFunction":
            function: Any = getattr(node, "run_function", None)
            module = _module_of(function)
            name = "a function" if function is None else name_of(function if module is None else module)
            key = (name, paths.get(id(module), ""), made_by.__module__)
            found[key] = found.get(key, 0) + 1
    return [Reentrant(*key, calls) for key, calls in found.items()]


def _nodes(roots: list[Any]) -> Iterator[Any]:
    """The nodes of a graph, each once, breadth first."""
    seen, level = set[Any](), [node for node in roots if node is not None]
    while level:
        below: list[Any] = []
        for node in level:
            if node not in seen:
                seen.add(node)
                yield node
                below += [parent for parent, _ in node.next_functions if parent is not None]
        level = below


def _module_of(function: Any) -> nn.Module | None:
    """The module that a checkpointed function runs: itself, or the one whose method it is, through partials."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, nn.Module):
        return function
    owner = getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None
