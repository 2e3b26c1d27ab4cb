"""One training step, what it leaves, and whether a plan kept its promise in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from torch_recompute import Plan, Simulation, apply, measure
from torch_recompute.memory.ledger import CountedOnce


def step(model: nn.Module, call: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer | None = None) -> None:
    """Runs one step from fixed random numbers."""
    torch.manual_seed(1)
    call().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def gradients(
    model: Callable[..., Any],
    *args: Any,
    run: Callable[..., Any] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    **kwargs: Any,
) -> list[torch.Tensor]:
    """The output of one step, then its gradients: of the arguments that require one, and of the model's parameters.

    Args:
        model: The model, or a function; what has accumulated is forgotten, before and afterwards.
        args: The arguments of its call; random numbers are the same each time.
        run: What is called in the model's place, such as a region around it.
        loss: Of what the model returns; by default that itself, or the sum of its squares.
        kwargs: The keyword arguments.

    Returns:
        The loss in the place of the output, where that is no tensor.
    """
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    leaves = [value for value in (*given, *parameters) if value.requires_grad and value.is_leaf]
    for leaf in leaves:
        leaf.grad = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        out = (model if run is None else run)(*args, **kwargs)
        value = loss(out) if loss is not None else out if out.dim() == 0 else out.square().sum()
        value.backward()
    found = [leaf.grad for leaf in leaves if leaf.grad is not None]
    for leaf in leaves:
        leaf.grad = None
    return [(out if isinstance(out, torch.Tensor) else value).detach(), *found]


def assert_same(some: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> None:
    """Equal to the last bit, name by name: what two steps left."""
    assert some.keys() == others.keys()
    assert [name for name in some if not torch.equal(some[name], others[name])] == []


def mean_square(out: torch.Tensor) -> torch.Tensor:
    """A loss of any output."""
    return out.square().mean()


def kept_in(found: Simulation, path: str) -> int:
    """The bytes that a module keeps in a simulated step, with those of its modules."""
    return sum(n for name, n in found.saved_by_module.items() if name == path or name.startswith(f"{path}."))


def kept_by_compiled(layer: nn.Module, x: torch.Tensor, **kwargs: Any) -> int:
    """The bytes that a layer keeps which torch compiles as one graph, with its output, but for what it is given."""
    held: list[Any] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor)
        return tensor

    compiled = torch.compile(layer, backend="aot_eager_decomp_partition", fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = compiled(x, **kwargs)
    found = CountedOnce()
    found.add([*layer.parameters(), kwargs, x])
    others = found.nbytes
    found.add([held, out])
    return found.nbytes - others


def peak_on_ranks(model: nn.Module, plan: Plan, x: torch.Tensor) -> int:
    """The measured peak of the second of two steps under a plan, which all ranks of the group make together."""
    apply(model, plan)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        with measure(model, optimizer).track(x) as memory:
            mean_square(model(x)).backward()
            optimizer.step()
        dist.barrier()
    return memory.peak_bytes


def promise_is_kept(
    fresh: Callable[[], tuple[nn.Module, Callable[[], torch.Tensor]]],
    plan: Plan,
    batch: Any,
    optimizer: Any = None,
    exact: bool = True,
) -> None:
    """Runs the step plainly and with the plan, and compares; not `exact` if its sizes depend on the data."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    assert plan.prediction is not None
    counts: list[int] = []
    gradients: list[dict[str, torch.Tensor | None]] = []
    for used in (Plan(), plan):
        model, call = fresh()
        apply(model, used)
        with FlopCounterMode(display=False) as counter:
            step(model, call)
        counts.append(counter.get_total_flops())
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert not exact or counts[1] - counts[0] == plan.predicted_replay_flops
    for name, wanted in gradients[0].items():
        got = gradients[1][name]
        assert (got is None) == (wanted is None), name
        assert got is None or wanted is None or torch.equal(got, wanted), name

    model, call = fresh()
    apply(model, plan)
    made_optimizer = None if optimizer is None else optimizer(model.parameters())
    if made_optimizer is not None:
        step(model, call, made_optimizer)
    with measure(model, made_optimizer).track(*tensors) as m:
        step(model, call, made_optimizer)
    assert plan.prediction.peak_bytes <= plan.prediction.budget_bytes
    assert m.peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=0 if exact else 0.005, abs=0)
