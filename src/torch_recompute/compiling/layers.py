"""Layers that are compiled one by one: what the minimum cut of a layer's graph keeps, in a step that is simulated.

Trainers compile a model layer by layer (`layer.compile()`, torchtune, torchtitan): AOTAutograd traces forward and
backward of a layer as one graph, torch's partitioner cuts it where few bytes cross, and inductor writes code for the
two halves. Here the same is done with layers on meta: each kind of layer is traced once, on tensors without data and
with the kernels of attention that its device has, and all layers of the kind run the code that inductor writes, without
its kernels (`_torch/inductor.py`). A kernel is one operation that moves the bytes of what it is given.

With context parallelism a layer is compiled with its own tokens, and attention is that of ranks when its code runs.

What is between layers, the head and the loss run as they are written. A layer is one call here, so a region can be
around layers, and around nothing in them. Inductor's code is that for a CPU: a GPU's joins operations a little
otherwise, which changes what passes within a layer and not what the layer keeps. Rejected: a choice of what is kept by
our own chooser, which nobody runs who only says `compile=True`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from .. import _torch, errors
from .._torch.fakes import FakeTensor, FakeTensorMode
from .._torch.inductor import graph_on_fakes
from .._torch.modes import function_modes
from ..plan.plan import Plan
from ..plan.ranks import Ranks
from ..plan.roles import inside
from ..plan.units import find_units
from ..simulation.context_parallel import ONE_GRAPH, SharedKernels
from ..simulation.fused import class_with, run_copy_kernel


@dataclass(frozen=True)
class CompiledLayers:
    """The layers of a model that are compiled one by one: their classes, and how many there are of each."""

    layers: dict[str, int]
    paths: frozenset[str]
    notes: tuple[str, ...] = ()

    def check(self, plans: Mapping[str, Plan]) -> None:
        """Refuses configurations, by name, with a region around something in a layer, which is not called there.

        Raises:
            ArgumentError: There is one.
        """
        for name, plan in plans.items():
            if any(choice.kept or not {*choice.paths} <= self.paths for choice in plan):
                raise errors.ArgumentError(
                    f"--layers compiled runs each layer as one graph, in which {name} can neither recompute nor keep a "
                    "part. Write none, full or block:3, or --layers eager or fused."
                )

    def as_data(self) -> dict[str, Any]:
        """The layers as plain data."""
        return {"run": "compiled", "compiled": self.layers}

    def __str__(self) -> str:
        return f"compiled ({', '.join(f'{count} {name}' for name, count in self.layers.items())})"


def compile_layers(model: nn.Module, ranks: Ranks) -> CompiledLayers:
    """Gives the layers of a model the forward of compiled ones, in place: their classes get another `forward`.

    Args:
        model: The model. What it computes means nothing afterwards: it is for simulation alone.
        ranks: The ranks that share it.

    Raises:
        ArgumentError: The model has no layers that are known, or ranks share one.
    """
    word = next((f"--{name} {getattr(ranks, name)}" for name in ("tp", "ep") if getattr(ranks, name) > 1), "")
    if word:
        raise errors.ArgumentError(
            f"--layers compiled does not go with {word}: how a compiler orders the collectives of a layer's products "
            "is not known. Write --layers eager or fused."
        )
    if ranks.cp > 1 and ranks.cp_kind == "ulysses":
        raise errors.ArgumentError(
            "--layers compiled does not go with --cp-kind ulysses: the graph of a layer has its own tokens, and not "
            "those that are exchanged for heads. Write --cp-kind all-gather or ring, or --layers eager or fused."
        )
    paths = [unit.path for unit in find_units(model).layers]
    outer = [path for path in paths if not any(inside(path, other) and path != other for other in paths)]
    if not any(outer):
        raise errors.ArgumentError(
            f"--layers compiled: {type(model).__name__} has no layers that are known, which would be compiled one by "
            'one. Leave it out, or name them: torch_recompute.register("layer", MyBlock).'
        )
    found: dict[str, int] = {}
    for path in filter(None, outer):
        layer = model.get_submodule(path)
        found[type(layer).__name__] = found.get(type(layer).__name__, 0) + 1
        layer.__class__ = _compiled(type(layer))
    return CompiledLayers(found, frozenset(outer))


@functools.cache
def _compiled(kind: type[nn.Module]) -> type[nn.Module]:
    known: dict[Any, Callable[..., Any]] = {}

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return kind.forward(self, *args, **kwargs)
        named = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        leaves, spec = _torch.tree_flatten((args, kwargs))
        fakes: Any = next((x.fake_mode for x in (*named.values(), *leaves) if isinstance(x, FakeTensor)), None)
        if fakes is None:
            return kind.forward(self, *args, **kwargs)
        tensors = [fake_on(fakes, x) for x in (*named.values(), *leaves) if isinstance(x, torch.Tensor)]
        others = tuple(None if isinstance(x, torch.Tensor) else x for x in leaves)
        device = tuple(mode.capability for mode in function_modes() if hasattr(mode, "capability"))
        shared = getattr(self, ONE_GRAPH)
        key = device, repr((others, spec)), tuple(map(_layout, tensors)), self.training, shared
        if key not in known:
            known[key] = _traced(self, kind, list(named), leaves, spec, tensors)
        if shared is None:
            return known[key](tensors)
        with SharedKernels(*shared) as kernels:  # which is there when backward runs, too
            result = known[key](tensors)
        if not kernels.met:
            raise errors.ArgumentError(
                f"--layers compiled: in the graph of {kind.__name__}, attention is no kernel that ranks of --cp could "
                "share. Write --layers eager or fused."
            )
        return result

    return class_with(kind, forward, **{ONE_GRAPH: None})


def fake_on(fakes: FakeTensorMode, x: torch.Tensor) -> torch.Tensor:
    """Returns the fake of a tensor; a fake as it is."""
    return x if isinstance(x, FakeTensor) else fakes.from_tensor(x)


def _layout(x: torch.Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.requires_grad


class _Written(nn.Module):
    """A layer as it is written, for `functional_call`."""

    def __init__(self, layer: nn.Module, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layer, self._kind = layer, kind

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the layer."""
        return self._kind.forward(self.layer, *args, **kwargs)


def _traced(
    layer: nn.Module, kind: type[nn.Module], names: Sequence[str], leaves: list[Any], spec: Any, tensors: Sequence[Any]
) -> Callable[[Sequence[torch.Tensor]], Any]:
    """A layer as a function of its weights and the tensors that it is given, compiled."""
    places = [place for place, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    rest = [None if isinstance(x, torch.Tensor) else x for x in leaves]
    shape: list[Any] = []

    def flat(*given: torch.Tensor) -> list[torch.Tensor]:
        filled = [*rest]
        for place, x in zip(places, given[len(names) :], strict=True):
            filled[place] = x
        args, kwargs = _torch.tree_unflatten(filled, spec)
        weights = {f"layer.{name}": x for name, x in zip(names, given, strict=False)}
        result = functional_call(_Written(layer, kind), weights, args, kwargs)
        results, out = _torch.tree_flatten(result)
        shape[:] = [out, [None if isinstance(x, torch.Tensor) else x for x in results]]
        return [x for x in results if isinstance(x, torch.Tensor)]

    try:
        run = graph_on_fakes(flat, tensors, run_copy_kernel)
    except Exception as error:
        said = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        raise errors.ArgumentError(
            f"--layers compiled: {kind.__name__} cannot be compiled as one graph: {type(error).__name__}: {said}. "
            "Write --layers eager or fused."
        ) from error

    def call(given: Sequence[torch.Tensor]) -> Any:
        made = iter(run(*given))
        out, results = shape
        return _torch.tree_unflatten([next(made) if x is None else x for x in results], out)

    return call
