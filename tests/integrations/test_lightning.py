"""The Lightning callback, in a stand-in for the Trainer's order of hooks; `test_integrations.py` runs Lightning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from support.models import Made
from support.zoo_handmade import decoder
from torch_recompute import ArgumentError
from torch_recompute.integrations.lightning import Recompute

LAYERS = 3


def runs_of(model: nn.Module, call: Any) -> int:
    """How often the layers' attentions are called while `call` runs."""
    count = [0]
    first = next(path for path, module in model.named_modules() if isinstance(module, nn.LayerNorm))
    hooks = [
        module.register_forward_pre_hook(lambda *_: count.__setitem__(0, count[0] + 1))
        for path, module in model.named_modules()
        if type(module) is type(model.get_submodule(first)) and path.rpartition(".")[2] == first.rpartition(".")[2]
    ]
    call()
    for hook in hooks:
        hook.remove()
    return count[0]


def wrapped(module: nn.Module) -> nn.Module:
    """What a strategy makes of the model: a module around it, as DistributedDataParallel is."""
    return Made(lambda m, *args: m.module(*args), module=module)


def fit(model: nn.Module, callback: Recompute | None) -> list[torch.Tensor]:
    """The gradients of a step in the order of Lightning's Trainer: setup, the strategy, a step, teardown."""
    if callback is not None:
        callback.setup(None, model, "fit")
    torch.manual_seed(1)
    wrapped(model)(torch.arange(16).view(2, 8)).square().mean().backward()
    if callback is not None:
        callback.teardown(None, model, "fit")
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("remove", [False, True])
def test_a_plan_is_there_while_fitting(remove: bool) -> None:
    """Gradients are the plain ones, the layers run twice, and the plan goes at the end if it was asked to."""
    plain, ours = decoder(), decoder()
    callback = Recompute("full", remove=remove)
    expected: list[torch.Tensor] = []
    found: list[torch.Tensor] = []
    once = runs_of(plain, lambda: expected.extend(fit(plain, None)))
    assert runs_of(ours, lambda: found.extend(fit(ours, callback))) == 2 * once > 0
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert any("forward" in module.__dict__ for module in ours.modules()) is not remove
    assert (callback.handle is None) is remove


def test_the_next_model_gets_the_plan_too() -> None:
    """A callback that has fitted one model makes regions in the next, and none again in the one that has them."""
    callback, models = Recompute("full"), [decoder(), decoder()]
    once = runs_of(models[0], lambda: fit(models[0], None))
    for model in (models[0], models[0], models[1]):
        assert runs_of(model, lambda model=model: fit(model, callback)) == 2 * once
        assert getattr(callback.handle, "model", None) is model


def test_two_batches_are_watched() -> None:
    """Figures of the first two batches are logged after the second, and no other batch is watched."""
    model = decoder()
    logged: list[dict[str, float]] = []
    model.log_dict = logged.append  # type: ignore[assignment]
    callback = Recompute("full")
    callback.setup(None, model, "fit")
    taken = []
    for index in range(4):
        callback.on_train_batch_start(None, model, None, index)
        model(torch.arange(16).view(2, 8)).square().mean().backward()
        callback.on_train_batch_end(None, model, None, None, index)
        taken.append(len(logged))
    callback.teardown(None, model, "fit")
    assert taken == [0, 1, 1, 1]
    assert logged[0] == callback.figures
    assert callback.figures["recompute_saved_bytes"] > 0
    assert 0 < callback.figures["recompute_replay_share"] < 1


def test_other_stages_are_left_alone() -> None:
    """Testing, predicting and validating apply nothing."""
    model = decoder()
    for stage in ("validate", "test", "predict"):
        Recompute("full").setup(None, model, stage)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_module_without_layers_yet_is_an_error() -> None:
    """A plan for layers that `configure_model` has still to make is refused in words."""
    with pytest.raises(ArgumentError, match="layers"):
        Recompute("full").setup(None, nn.Module(), "fit")
