"""Integrations that need two ranks: DeepSpeed's ZeRO-3 with frozen weights, and the switch of NeMo AutoModel.

Both are run themselves, on the CPU, where they are installed; neither is a development dependency.
"""

import importlib.metadata
import os
import warnings
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from distributed import ranks as of_ranks
from support.zoo import LAYERS, build
from torch_recompute import measure
from torch_recompute.integrations.huggingface import apply

pytestmark = pytest.mark.nightly

TOKENS = 64
Found = tuple[dict[str, torch.Tensor], int]


def train(call: Any, model: Any, steps: Any) -> int:
    """The peak of two steps on this rank's own tokens."""
    ids = torch.randint(3, 64, (2, TOKENS), generator=torch.Generator().manual_seed(dist.get_rank()))
    torch.manual_seed(3)
    with measure(model) as memory:
        for _ in range(2):
            steps(call(input_ids=ids, labels=ids).loss)
    return memory.peak_bytes


def zero3(way: str) -> Found | str:
    """The adapters after training with all else frozen and partitioned, and the peak; or the class of the error."""
    with mock.patch.dict(os.environ, {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}):
        import deepspeed
        import peft
        from deepspeed.utils import safe_get_full_fp32_param

        targets = ["q_proj", "v_proj", "down_proj"]
        settings = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=targets, init_lora_weights=False)
        torch.manual_seed(1)
        model = peft.get_peft_model(build("llama")[0], settings).train()
        if way == "plan":
            apply(model, "full")
        elif way == "torch":
            model.base_model.model._set_gradient_checkpointing(True, partial(torch_checkpoint, use_reentrant=False))
            model.enable_input_require_grads()
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=[p for p in model.parameters() if p.requires_grad],
            config={
                "train_micro_batch_size_per_gpu": 2,
                "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
                "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
                "zero_allow_untested_optimizer": True,
            },
            dist_init_required=False,
        )
        try:
            peak = train(engine, None, lambda loss: (engine.backward(loss), engine.step()))
        except torch.utils.checkpoint.CheckpointError as error:
            return type(error).__name__
        trained = {n: p for n, p in engine.module.named_parameters() if p.requires_grad}
        return {n: safe_get_full_fp32_param(p).detach().clone() for n, p in trained.items()}, peak


def automodel(way: Any) -> Found:
    """The weights after training under AutoModel's FSDP2, with its own switch or a plan, and the peak."""
    from nemo_automodel.components.distributed.parallelizer import fsdp2_strategy_parallelize
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model, _ = build("llama")
    if way == "plan":
        apply(model, "full")
    sizes = (1, 1, dist.get_world_size(), 1, 1)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp_replicate", "dp_shard", "cp", "tp"))
    mesh["dp_replicate", "dp_shard"]._flatten("dp")
    mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    switch = way if way in (True, "selective") else False
    whole = MixedPrecisionPolicy(param_dtype=torch.float32)
    model = fsdp2_strategy_parallelize(model, mesh, mp_policy=whole, activation_checkpointing=switch)
    assert type(model).__name__.startswith("FSDP")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    peak = train(model, model, lambda loss: (loss.backward(), optimizer.step(), optimizer.zero_grad()))
    weights = {n.replace("_checkpoint_wrapped_module.", ""): p for n, p in model.named_parameters()}
    return {n: p.full_tensor().detach().clone() for n, p in weights.items()}, peak


def lower(ranks: Any, scenario: Any, *others: Any) -> list[Any]:
    """Asserts the law of an integration on every rank, and returns what the plan and other ways found on the first."""
    found = ranks.run(all_ways, scenario, (False, "plan", *others))
    for (expected, before), (weights, peak), *_ in found:
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
        assert peak < before
    return found[0][1:]


def all_ways(scenario: Any, ways: tuple[Any, ...]) -> list[Any]:
    """What a scenario finds in each way, in one process group; what packages warn of each other is not heard."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [scenario(way) for way in ways]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """These packages take long to import, and DeepSpeed compiles what it needs when it is first used."""
    monkeypatch.setattr(of_ranks, "LIMIT", 240.0)


def test_deepspeed_itself(ranks: Any) -> None:
    """Under ZeRO-3 with frozen weights: the adapters of training without a plan; torch's fails up to 0.19.2."""
    pytest.importorskip("deepspeed", reason="deepspeed is not installed (it is built for the machine it is on)")
    pytest.importorskip("peft", reason="peft is not installed (its pin needs Python 3.11)")
    (weights, _), torchs = lower(ranks, zero3, "torch")
    assert len(weights) == 2 * 3 * LAYERS
    version = tuple(int(part) for part in importlib.metadata.version("deepspeed").split("+")[0].split(".")[:3])
    assert torchs == "CheckpointError" or version > (0, 19, 2)


def test_nemo_automodel_itself(ranks: Any) -> None:
    """Where AutoModel shards with FSDP2 and its switch is off, a plan gives the weights that its switch gives."""
    pytest.importorskip("nemo_automodel", reason="nemo_automodel is not installed (it pins another transformers)")
    (weights, peak), *switched = lower(ranks, automodel, True, "selective")
    for theirs, other in switched:
        assert all(torch.equal(theirs[name], weights[name]) for name in weights)
        assert peak <= other
