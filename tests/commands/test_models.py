"""The step that the options of a command line describe, as a planner is given it; nothing is planned."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.models import LLAMA
from support.training import mean_square
from torch_recompute.commands import cli
from torch_recompute.commands.models import AskedStep
from torch_recompute.errors import ArgumentError
from torch_recompute.memory.loop import Loop
from torch_recompute.plan.ranks import Ranks
from torch_recompute.planner.hosts import Bandwidth, PlanOptions
from torch_recompute.planner.states import OptimizerSpec
from torch_recompute.simulation.devices import DEVICES
from torch_recompute.simulation.fused import FusedLayers
from torch_recompute.simulation.training_step import OPTIMIZERS, USUAL

pytestmark = pytest.mark.usefixtures("this_test")


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        return self.up(x) + more


def pair() -> tuple[nn.Module, Any, Callable[[torch.Tensor], torch.Tensor]]:
    """A model with weights, its batch and its loss."""
    return Sum(), (torch.ones(4, 8), torch.ones(8)), mean_square


def named_pair() -> tuple[nn.Module, Any]:
    model, (x, more), _ = pair()
    return model, {"x": x, "more": more}


def asked(*argv: str) -> AskedStep:
    """The step of a command line."""
    return AskedStep.asked(cli.build_parser().parse_args(["plan", "--frontier", *argv]))


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., str]:
    """Writes a configuration and returns its path; without fields, that of a tiny Llama."""
    pytest.importorskip("transformers")

    def written(**fields: Any) -> str:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(fields or LLAMA))
        return str(path)

    return written


def test_the_batch_and_the_type_of_the_weights(config: Callable[..., str]) -> None:
    """A batch has the sequences and tokens asked for, or one of all positions; weights are on meta, in the type."""
    step = asked(config(), "--batch", "3", "--sequence", "16", "--dtype", "fp16")
    assert step.as_data()["inputs"] == {"input_ids": [3, 16], "labels": [3, 16]}
    assert step.kwargs["use_cache"] is False
    assert {(p.device.type, p.dtype) for p in step.model.parameters()} == {("meta", torch.float16)}
    usual = asked(config())
    assert (usual.as_data()["inputs"]["input_ids"], usual.as_data()["dtypes"]) == ([1, 512], ["float32"])
    assert (usual.device, usual.optimizer, usual.loop) == ("h100", OPTIMIZERS[USUAL], Loop())


def test_a_batch_of_sound(config: Callable[..., str]) -> None:
    """Whisper gets features of sound and the tokens of a text; no more tokens than its table of positions has."""
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 64, "num_mel_bins": 8}
    more = {"max_source_positions": 12, "max_target_positions": 20, "decoder_start_token_id": 2}
    ends = {f"{word}_token_id": 1 for word in ("pad", "bos", "eos")}
    head = {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]}
    path = config(**head, **sizes, **heads, **more, **ends)
    assert asked(path, "--batch", "3").as_data()["inputs"] == {"input_features": [3, 8, 24], "labels": [3, 20]}
    assert asked(path, "--sequence", "7").as_data()["inputs"]["labels"] == [1, 7]
    with pytest.raises(ArgumentError, match=r"has 20 positions, in a table \(model.decoder.embed_positions\)"):
        asked(path, "--sequence", "21")


def test_positions_that_are_computed_or_a_table(config: Callable[..., str]) -> None:
    """A sequence beyond the positions has a note where they are rotary, and is refused where they are a table."""
    beyond = 2 * LLAMA["max_position_embeddings"]
    step = asked(config(), "--sequence", str(beyond))
    assert step.as_data()["inputs"]["input_ids"] == [1, beyond]
    (note,) = step.notes
    assert f"{beyond:,} tokens are more than the {beyond // 2:,} positions" in note
    assert "rotary" in note
    assert asked(config(), "--sequence", str(beyond // 2)).notes == ()
    sizes = {"n_positions": 32, "max_position_embeddings": 32, "n_layer": 1, "num_hidden_layers": 1}
    for kind, name, table in (
        ("gpt2", "GPT2LMHeadModel", "transformer.wpe"),
        ("opt", "OPTForCausalLM", "model.decoder.embed_positions"),
    ):
        path = config(model_type=kind, architectures=[name], **sizes)
        assert asked(path, "--sequence", "32").notes == ()
        with pytest.raises(ArgumentError, match=rf"has 32 positions, in a table \({table}\)"):
            asked(path, "--sequence", "33")


def test_layers_without_their_kernel_are_named(config: Callable[..., str]) -> None:
    """Layers that are planned from reference code are named, with the package that has their kernel."""
    head = {"model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "M-*-M-"}
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    mamba = {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 16}
    (note,) = asked(config(**head, **sizes, **mamba, head_dim=8, vocab_size=64), "--sequence", "32").notes
    assert note.startswith("2 NemotronHMamba2Mixer are planned from the reference code of transformers")
    assert "mamba_ssm" in note


def test_a_function_of_the_user() -> None:
    """A batch is a tuple or a dict; the loss is the function's; the device is that of the weights, or the named one."""
    by_place, by_name = asked("this_test:pair"), asked("this_test:named_pair")
    assert by_place.as_data()["inputs"] == by_name.as_data()["inputs"] == {"x": [4, 8], "more": [8]}
    assert (len(by_place.args), [*by_name.kwargs]) == (2, ["x", "more"])
    assert (by_place.loss, by_name.loss) == (mean_square, None)
    assert (by_place.device, asked("this_test:pair", "--device", "A100").device) == (None, "a100")
    assert not by_place.built_here


@pytest.mark.parametrize(
    ("argv", "loop"),
    [
        ("--no-hold-output", Loop(hold_output=False)),
        ("--accumulate 4", Loop(accumulate=4)),
        ("--no-set-to-none", Loop(set_to_none=False)),
    ],
)
def test_the_loop(argv: str, loop: Loop) -> None:
    """Each option of the training loop is one of its fields."""
    assert asked("this_test:pair", *argv.split()).loop == loop


@pytest.mark.parametrize(
    ("argv", "plan_options"),
    [
        ("", PlanOptions()),
        ("--offload", PlanOptions(offload=True)),
        (
            "--offload 1GiB --host-bandwidth 55GB,50GB",
            PlanOptions("1GiB", Bandwidth(to_device=55 * 10**9, to_host=50 * 10**9)),
        ),
        ("--tiles", PlanOptions(tiles=True)),
    ],
)
def test_what_a_plan_may_use(argv: str, plan_options: PlanOptions) -> None:
    """Host memory, how fast it is reached, and tiles are allowed where they are asked for."""
    assert asked("this_test:pair", *argv.split()).plan_options == plan_options


@pytest.mark.parametrize(
    ("argv", "optimizer", "words"),
    [
        ("--optimizer SGD", OPTIMIZERS["sgd"], "optimizer sgd"),
        ("--states 8bit", OptimizerSpec(None, "8bit"), "optimizer adamw-fused, states 8bit"),
        (
            "--optimizer-in-backward --optimizer sgd",
            OptimizerSpec(OPTIMIZERS["sgd"], "", in_backward=True),
            "optimizer sgd, steps in backward",
        ),
        (
            "--states bf16 --optimizer-on-host --device h100",
            OptimizerSpec(None, "bf16", on_host=True),
            "optimizer adamw-fused, states bf16, on the host",
        ),
    ],
)
def test_the_optimizer(argv: str, optimizer: Any, words: str) -> None:
    """The optimizer, what it keeps, when it steps and where are those asked for; the step says them."""
    step = asked("this_test:pair", *argv.split())
    assert step.optimizer == optimizer
    assert str(step).endswith(words)


def test_links_of_a_device() -> None:
    """The speeds within a node and between nodes, and the devices of a node, replace those of the data sheet."""
    device: Any = asked("this_test:pair", "--device", "h100", "--network", "100,25", "--node", "4").device
    assert (device.link, device.network, device.node) == (100e9, 25e9, 4)
    assert device.name == DEVICES["h100"].name


def test_how_layers_run(config: Callable[..., str]) -> None:
    """With `--layers fused` the parts of a model have fused kernels, which the step names; else they are as written."""
    eager, fused = asked(config()), asked(config(), "--layers", "fused")
    assert eager.layers is None
    assert eager.as_data()["layers"] == {"run": "eager"}
    assert isinstance(fused.layers, FusedLayers)
    assert (fused.as_data()["layers"]["run"], fused.as_data()["layers"]["eager"]) == ("fused", [])
    assert {*fused.as_data()["layers"]["fused"]} == {"LlamaAttention", "LlamaMLP", "LlamaRMSNorm"}
    assert "layers fused (3 LlamaAttention" in str(fused)


def test_adapters(config: Callable[..., str]) -> None:
    """`--lora` has adapters of a rank over frozen weights, which `--base nf4` keeps in 4 bits."""
    pytest.importorskip("peft")
    for base, types in (("bf16", {torch.bfloat16}), ("nf4", {torch.float32, torch.uint8})):
        step = asked(config(), "--lora", "4:v_proj,down_proj", "--base", base)
        trained = [name for name, weight in step.model.named_parameters() if weight.requires_grad]
        assert len(trained) == 2 * 2 * 3
        assert all("lora_" in name and ("v_proj" in name or "down_proj" in name) for name in trained)
        frozen = [weight for weight in step.model.parameters() if not weight.requires_grad]
        assert {weight.dtype for weight in frozen} == types
        assert step.asked_states == {"lora": "4:v_proj,down_proj", "base": base}


@pytest.mark.parametrize(
    ("argv", "ranks", "rows", "accumulate"),
    [
        ("--fsdp 4 --mbs 2 --batch 16", Ranks(fsdp=4, param_dtype="bfloat16", reduce_dtype="float32"), 2, 2),
        ("--fsdp 2 --dp 2 --batch 8", Ranks(fsdp=2, dp=2, param_dtype="bfloat16", reduce_dtype="float32"), 1, 2),
        ("--fsdp 2 --dtype fp32 --accumulate 3", Ranks(fsdp=2), 1, 3),
        (
            "--fsdp 2 --reshard-after-forward no --reduce-dtype bfloat16",
            Ranks(fsdp=2, zero=2, param_dtype="bfloat16", reduce_dtype="bfloat16"),
            1,
            1,
        ),
        (
            "--zero 3 --dp 2 --weights-on-host",
            Ranks(dp=2, zero=3, on_host=True, param_dtype="bfloat16", reduce_dtype="float32"),
            1,
            1,
        ),
    ],
)
def test_ranks_that_share_weights(
    config: Callable[..., str], argv: str, ranks: Ranks, rows: int, accumulate: int
) -> None:
    """A step of FSDP2 is that of one rank: a microbatch of it, its share of the batch one after the other, in FP32."""
    step = asked(config(**LLAMA, torch_dtype="bfloat16"), "--sequence", "8", *argv.split())
    assert step.ranks == ranks
    assert step.as_data()["inputs"]["input_ids"] == [rows, 8]
    assert step.loop.accumulate == accumulate
    assert {weight.dtype for weight in step.model.parameters()} == {torch.float32}


def test_a_sequence_that_ranks_share(config: Callable[..., str]) -> None:
    """With `--cp` a rank of FSDP2 has its part of each sequence, and another number of ranks may be asked for."""
    step = asked(config(), "--sequence", "64", "--fsdp", "2", "--cp", "2", "--cp-kind", "ring")
    assert (step.ranks.cp, step.ranks.cp_kind) == (2, "ring")
    assert step.as_data()["inputs"]["input_ids"] == [1, 32]
    assert step.again is not None
    assert step.again(Ranks(fsdp=2, cp=4)).as_data()["inputs"]["input_ids"] == [1, 16]
