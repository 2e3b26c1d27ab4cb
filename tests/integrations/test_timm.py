"""timm: its checkpointing switch in a stand-in, and its own ViT and ConvNeXt where it is installed.

timm imports torchvision, whose published wheels are built for CUDA and do not register their operators beside a torch
for the CPU. Two names are all that its import asks for, and no model here calls them.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from plans import test_zoo_training as test_zoo
from support import zoo
from support.zoo_handmade import VisionTransformer
from support.zoo_rows import Row
from torch_recompute import apply
from torch_recompute.integrations.policies import plan_of
from torch_recompute.plan.units import find_units


class Switched(VisionTransformer):
    """The handmade ViT with the switch that timm's has."""

    grad_checkpointing = False

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable


def switched() -> zoo.Built:
    return Switched(zoo.WIDTH, zoo.HEADS, zoo.LAYERS), {"x": torch.randn(zoo.BATCH, 3, 16, 16)}


def follows_its_switch(model: Any, inputs: dict[str, Any]) -> None:
    """Asserts that the first layer runs twice while the switch is on and once while it is off, with equal gradients."""
    model.set_grad_checkpointing(True)
    handle = apply(model, plan_of("full", model))
    assert not any(getattr(module, "grad_checkpointing", False) for module in model.modules())
    runs = [0]
    layer = model.get_submodule(find_units(model).layers[0].path)
    norm = next(module for module in layer.modules() if isinstance(module, nn.LayerNorm))
    hook = norm.register_forward_pre_hook(lambda *_: runs.__setitem__(0, runs[0] + 1))
    found = []
    for enable in (None, False, True):
        if enable is not None:
            model.set_grad_checkpointing(enable)
        runs[0] = 0
        found.append((runs, test_zoo.step(model, inputs)))
        assert runs[0] == (1 if enable is False else 2)
    assert all(torch.equal(step[name], value) for _, step in found for name, value in found[0][1].items())
    hook.remove()
    handle.remove()
    assert "set_grad_checkpointing" not in model.__dict__
    assert any(getattr(module, "grad_checkpointing", False) for module in model.modules())


def test_its_switch_turns_the_plan() -> None:
    """`set_grad_checkpointing` turns the plan off and on, and what it had turned on itself rests meanwhile."""
    torch.manual_seed(0)
    follows_its_switch(*switched())


def timm_vit(timm: Any) -> zoo.Built:
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=16, depth=3, num_heads=2, num_classes=5,
        drop_rate=0.1, attn_drop_rate=0.1, proj_drop_rate=0.1, drop_path_rate=0.1, init_values=0.5,
    )  # fmt: skip
    return model, {"x": torch.randn(2, 3, 16, 16)}


def timm_convnext(timm: Any) -> zoo.Built:
    model = timm.create_model(
        "convnext_tiny", depths=(1, 3, 3, 1), dims=(8, 16, 16, 16), num_classes=5, drop_path_rate=0.1, ls_init_value=0.5
    )
    return model, {"x": torch.randn(2, 3, 32, 32)}


@pytest.mark.parametrize("make", [timm_vit, timm_convnext])
def test_its_own_models(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own models train bit for bit the same under every plan, keep less, and their switch turns the plan."""
    operators = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):  # it is there
            operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    reason = "timm is no development dependency (its torchvision breaks transformers beside torch for the CPU)"
    timm: Any = pytest.importorskip("timm", reason=reason)
    monkeypatch.setitem(zoo.ZOO, make.__name__, lambda: make(timm))
    test_zoo.test_training_is_the_same_under_every_plan(Row(make.__name__))
    torch.manual_seed(0)
    follows_its_switch(*zoo.build(make.__name__))
