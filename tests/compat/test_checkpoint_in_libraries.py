"""`checkpoint` passed to libraries that take a checkpoint function, and plans under compile and `fully_shard`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.flop_counter import FlopCounterMode

from support.zoo import LAYERS, build, step
from support.zoo_handmade import DecoderOnly
from torch_recompute import RecomputeConfig, apply, checkpoint

Step = dict[str, torch.Tensor]
FULL = RecomputeConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


class Counted:
    """A checkpoint function that counts how often it is called."""

    def __init__(self, function: Any = checkpoint) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.function(*args, **kwargs)


def differing(a: Step, b: Step) -> list[str]:
    """The names under which two steps differ."""
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


def unwrapped(found: Step) -> Step:
    return {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in found.items()}


@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize("kwargs", [{}, {"use_reentrant": False, "determinism_check": "none"}])
def test_transformers_takes_our_checkpoint(name: str, kwargs: dict[str, Any]) -> None:
    """As transformers' checkpoint function, with or without `gradient_checkpointing_kwargs`: the plain gradients."""
    model, inputs = build(name)
    expected = step(build(name)[0], inputs)
    ours = Counted()
    model._set_gradient_checkpointing(True, functools.partial(ours, **kwargs))
    assert differing(step(model, inputs), expected) == []
    assert ours.calls == LAYERS


def test_a_function_may_be_a_module() -> None:
    """The call of diffusers, `func(module, *args)`, with keywords of the module too: the plain gradients."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    x, mask = torch.randn(2, 5, 16), torch.zeros(5, 5)

    def run(call: Any) -> Step:
        layer.zero_grad()
        torch.manual_seed(1)
        y = call(x.clone().requires_grad_(), src_mask=mask)
        y.square().sum().backward()
        return {"y": y.detach(), **{n: p.grad.clone() for n, p in layer.named_parameters()}}

    assert differing(run(functools.partial(checkpoint, layer)), run(layer)) == []


def wrap_layers(model: Any, **kwargs: Any) -> Any:
    """Each layer in torch's wrapper, as accelerate and Lightning do it."""
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = checkpoint_wrapper(layer, **kwargs)
    return model


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_the_wrapper_of_torch_takes_our_checkpoint(name: str) -> None:
    """`checkpoint_wrapper(layer, checkpoint_fn=checkpoint)` gives the plain gradients."""
    model, inputs = build(name)
    expected = step(build(name)[0], inputs)
    ours = Counted()
    assert differing(unwrapped(step(wrap_layers(model, checkpoint_fn=ours), inputs)), expected) == []
    assert ours.calls == LAYERS


def test_not_preserving_random_numbers_means_what_it_says() -> None:
    """`preserve_rng_state=False` replays with other dropout masks, with us as with torch; a plan has the same masks."""
    model, inputs = build("llama")
    expected = step(model, inputs)
    for function in ({}, {"checkpoint_fn": checkpoint}):
        wrapped = wrap_layers(build("llama")[0], preserve_rng_state=False, **function)
        assert differing(unwrapped(step(wrapped, inputs)), expected) != []
    apply(model, FULL.plan(model))
    assert differing(step(model, inputs), expected) == []


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def small() -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    return DecoderOnly(64, 32, 4, LAYERS), {"ids": torch.randint(3, 64, (2, 8))}


def layers_of(model: nn.Module) -> list[nn.Module]:
    path = FULL.plan(model).choices[0].paths[0].rpartition(".")[0]
    return list(model.get_submodule(path).children())


def whole(found: Step) -> Step:
    return {n.replace("_orig_mod.", ""): getattr(v, "full_tensor", lambda v=v: v)() for n, v in found.items()}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("compiled", [False, True])
def test_plan_then_compile_then_shard(compiled: bool) -> None:
    """Recompute, then compile, then `fully_shard`: the gradients of the model without a plan, and more FLOPs."""

    def run(planned: bool) -> tuple[Step, int]:
        model, inputs = small()
        if planned:
            apply(model, FULL.plan(model))
        for layer in layers_of(model):
            if compiled:
                layer.compile(backend="aot_eager")
        mesh = init_device_mesh("cpu", (1,))
        for layer in layers_of(model):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with FlopCounterMode(display=False) as flops:
            found = step(model, inputs)
        return whole(found), flops.get_total_flops()

    (plain, before), (ours, after) = run(False), run(True)
    assert differing(ours, plain) == []
    assert after > before
