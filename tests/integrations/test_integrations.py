"""Packages that own the training loop, run as installed, with and without a plan.

An integration is a function that makes a model and what trains it for a few steps on the CPU, with random weights. The
law: the trained weights are those of training without a plan, to the last bit, and the peak is lower. What needs two
ranks is in `test_trainer_on_ranks.py` (the Trainer: DDP and FSDP2) and `distributed/test_integrations_on_ranks.py`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.training import assert_same
from support.zoo import LAYERS, VOCABULARY, build
from support.zoo_handmade import decoder
from torch_recompute import Choice, Plan, apply, auto, checkpoint, measure
from torch_recompute.integrations import lightning as integration_of_lightning
from torch_recompute.integrations.huggingface import RecomputeCallback
from torch_recompute.integrations.huggingface import apply as apply_policy

# Makes a model, with a plan if asked to, and what trains it; the folder is for what trainers write.
Opened = tuple[Any, Callable[[], Any]]
Integration = Callable[[bool, Path], Opened]
TOKENS = 48


def needs(package: str, reason: str = "its pin needs Python 3.11") -> Any:
    return pytest.importorskip(package, reason=f"{package} is not installed ({reason})")


def ids() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (8, TOKENS), generator=torch.Generator().manual_seed(0))


def steps(model: Any, call: Callable[[], torch.Tensor], backward: Any = torch.Tensor.backward) -> Callable[[], None]:
    """Two steps of a loop of one's own."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)

    def train() -> None:
        for _ in range(2):
            backward(call())
            optimizer.step()
            optimizer.zero_grad()

    return train


def of_trainer(folder: Path) -> dict[str, Any]:
    """What a Trainer of Hugging Face is told on any machine like this one."""
    return {
        "output_dir": str(folder), "max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2,
        "report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False,
        "bf16": False,
    }  # fmt: skip


def callbacks(ours: bool) -> list[Any]:
    return [RecomputeCallback("full", peak=False)] if ours else []


def trainer(ours: bool, folder: Path) -> Opened:
    needs("accelerate")
    import transformers

    model, _ = build("llama")
    arguments = transformers.TrainingArguments(**of_trainer(folder))
    data = [{"input_ids": x, "labels": x} for x in ids()]
    return model, transformers.Trainer(model, arguments, train_dataset=data, callbacks=callbacks(ours)).train


def tokenizer() -> Any:
    """A tokenizer of whole words, made here."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(VOCABULARY - 4))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, padding_side="left", **special)


def with_trl(kind: str, ours: bool, folder: Path, dropout: bool = True, **settings: Any) -> Opened:
    """A trainer of TRL, whose own checkpointing is on by default: the plan's switch then."""
    trl, datasets = needs("trl"), needs("datasets")
    model, _ = build("llama")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout *= dropout
    text = " ".join(f"w{i}" for i in range(TOKENS))
    rows: dict[str, Any]
    more: dict[str, Any] = {}
    if kind == "SFT":
        rows = {"text": [text] * 8}
    elif kind == "DPO":
        rows = {"prompt": ["w1 w2 w3"] * 8, "chosen": [text] * 8, "rejected": ["w5 w9 " * 20] * 8}
        more = {"ref_model": build("llama")[0]}
    else:
        rows = {"prompt": ["w1 w2 w3", "w4 w5"] * 4}
        more = {"reward_funcs": lambda completions, **_: [float(sum(map(ord, text))) for text in completions]}
        settings.update(num_generations=2, max_completion_length=3)
    if not ours:
        settings.setdefault("activation_checkpointing", False)
    made = getattr(trl, f"{kind}Trainer")(
        model=model, args=getattr(trl, f"{kind}Config")(**of_trainer(folder), **settings),
        processing_class=tokenizer(), train_dataset=datasets.Dataset.from_dict(rows), callbacks=callbacks(ours), **more,
    )  # fmt: skip
    return model, made.train


def with_adapters(ours: bool, folder: Path, **settings: Any) -> Opened:
    peft = needs("peft")
    common = {"r": 4, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    model = peft.get_peft_model(build("llama")[0], peft.LoraConfig(task_type="CAUSAL_LM", **common, **settings)).train()
    if ours:
        apply_policy(model, "full")
    tokens = ids()[:2]
    tokens[:, 20:22] = torch.tensor([5, 6])
    return model, steps(model, lambda: model(tokens, labels=tokens, attention_mask=torch.ones_like(tokens)).loss)


def accelerate(ours: bool, folder: Path) -> Opened:
    needs("accelerate")
    from accelerate import Accelerator

    model, _ = build("llama")
    if ours:
        apply_policy(model, "full")
    accelerator = Accelerator(cpu=True)
    prepared, tokens = accelerator.prepare(model), ids()[:2]
    return model, steps(model, lambda: prepared(input_ids=tokens, labels=tokens).loss, accelerator.backward)


def lightning(ours: bool, folder: Path, strategy: str = "auto", planned: bool | str = False) -> Opened:
    package = needs("lightning")

    class Module(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = decoder()

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.model(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    module = Module()
    callbacks = [integration_of_lightning.Recompute("full")] if ours and not planned else []
    if ours and planned == "inside":
        callbacks = [integration_of_lightning.Recompute(budget=0.01, loss=lambda out: out.square().mean())]
    elif ours and planned:
        call: dict[str, Any] = {"budget": 0.01, "loss": lambda out: out.square().mean(), "device": "h100"}
        auto(module.model, ids()[:2], hold_output=False, set_to_none=False, **call)
    fitting = package.Trainer(
        max_steps=2, accelerator="cpu", devices=1, strategy=strategy, logger=False, enable_checkpointing=False,
        callbacks=callbacks, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    batches = torch.utils.data.DataLoader(ids(), batch_size=2)
    return module, lambda: fitting.fit(module, batches)


def fabric(ours: bool, folder: Path) -> Opened:
    made = needs("lightning").Fabric(accelerator="cpu", devices=1)
    model = decoder()
    if ours:
        integration_of_lightning.apply(model, "full")
    prepared = made.setup_module(model)
    return model, steps(model, lambda: prepared(ids()[:2]).square().mean(), made.backward)


def diffusers(how: str, ours: bool, folder: Path) -> Opened:
    model = needs("diffusers").UNet2DConditionModel(
        sample_size=16, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(16, 32), dropout=0.1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16, attention_head_dim=8, norm_num_groups=8,
    ).train()  # fmt: skip
    if ours and how == "plan":
        apply_policy(model, "full")
    elif ours:
        model.enable_gradient_checkpointing(gradient_checkpointing_func=checkpoint)
    x, text = torch.randn(2, 4, 16, 16), torch.randn(2, 5, 16)
    return model, steps(model, lambda: model(x, torch.tensor([3, 7]), text, return_dict=False)[0].square().mean())


def torchtitan(ours: Any, folder: Path) -> Opened:
    """Its debug model through its own function of parallelism; `ours` may be another of its configurations."""
    needs("torchtitan", "it pins other versions of datasets and needs triton")
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry

    from torch_recompute.integrations.torchtitan import RecomputeAC

    parallel_dims.device_type = "cpu"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    spec, parallelism = model_registry("debugmodel"), ParallelismConfig()
    spec.model.update_from_config(config=SimpleNamespace(parallelism=parallelism, training=TrainingConfig()))
    for layer in spec.model.layers:  # the attention of its language models is for accelerators alone
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    with torch.device("meta"):
        model = spec.model.build()
    dims = ParallelDims(dp_shard=1, dp_replicate=1, cp=1, tp=1, pp=1, ep=1, world_size=1)
    model = spec.parallelize_fn(
        model, parallel_dims=dims, training=TrainingConfig(mixed_precision_param="float32"), parallelism=parallelism,
        compile_config=CompileConfig(), ac_config=RecomputeAC.Config(policy="full") if ours is True else ours or None,
        dump_folder=str(folder),
    )  # fmt: skip
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model.train(), steps(model, lambda: model(ids()).square().mean())


INTEGRATIONS: dict[str, Integration] = {
    "Trainer": trainer,
    **{f"TRL {kind}": functools.partial(with_trl, kind) for kind in ("SFT", "DPO", "GRPO")},
    "PEFT LoRA": with_adapters,
    "PEFT aLoRA": functools.partial(with_adapters, alora_invocation_tokens=[5, 6]),
    "Accelerate": accelerate,
    "Lightning": lightning,
    "Lightning DDP": functools.partial(lightning, strategy="ddp"),
    "Lightning, auto": functools.partial(lightning, planned=True),
    "Fabric": fabric,
    "diffusers": functools.partial(diffusers, "plan"),
    "diffusers, a function": functools.partial(diffusers, "function"),
    "torchtitan": torchtitan,
}


def trained(integration: Integration, ours: Any, folder: Path) -> tuple[dict[str, torch.Tensor], int]:
    """The weights after training through an integration, and the peak."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what packages say of each other, of workers and of tiny data
            torch.manual_seed(0)
            model, train = integration(ours, folder)
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            torch.manual_seed(1)
            with measure(model) as memory:
                train()
        after = {name: p.detach().clone() for name, p in model.named_parameters()}
        assert any(not torch.equal(before[name], after[name]) for name in after)
        whole = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in after.items()}
        return {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in whole.items()}, memory.peak_bytes
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_lightning_plans_for_a_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`Recompute(budget=...)` plans inside Lightning's Trainer, and the weights are those of training without it."""
    inside = functools.partial(lightning, planned="inside")
    (expected, _), (weights, _) = (trained(way, True, tmp_path) for way in (functools.partial(lightning), inside))
    assert_same(weights, expected)
    assert "recomputed; planned in " in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name == "Lightning, auto")) for name in INTEGRATIONS]
)
def test_training_through_an_integration(name: str, tmp_path: Path) -> None:
    """Through the package itself: the weights of training without a plan, to the last bit, for a lower peak."""
    (expected, plain), (weights, peak) = (trained(INTEGRATIONS[name], ours, tmp_path) for ours in (False, True))
    assert_same(weights, expected)
    assert peak < plain


def test_beside_the_selective_checkpointing_of_trl(tmp_path: Path) -> None:
    """TRL's `selective` keeps the results of fused attention; a plan that says so gives its weights and its peak."""
    integration = functools.partial(with_trl, "SFT", dropout=False)  # with dropout, attention on a CPU is not fused
    selective = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"selective": True}}
    keeps = Plan(tuple(Choice((f"model.layers.{i}",), keep=("@attention",)) for i in range(LAYERS)))

    def ours(_: bool, folder: Path) -> Opened:
        model, train = integration(False, folder)
        apply(model, keeps)
        return model, train

    ways = (integration, functools.partial(integration, **selective), ours)
    (expected, plain), (theirs, peak), (weights, same_peak) = (trained(way, False, tmp_path) for way in ways)
    assert_same(weights, expected)
    assert_same(theirs, expected)
    assert same_peak < 1.001 * peak < plain


def test_beside_the_classes_of_torchtitan(tmp_path: Path) -> None:
    """Beside torchtitan's own classes: equal weights, and no higher a peak."""
    needs("torchtitan", "it pins other versions of datasets and needs triton")
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

    weights, peak = trained(torchtitan, True, tmp_path)
    for config in (FullAC.Config(), SelectiveAC.Config()):
        theirs, other = trained(torchtitan, config, tmp_path)
        assert_same(weights, theirs)
        assert peak <= other
