"""`--states`, `--optimizer-in-backward`, `--optimizer-on-host`, `--lora` and `--base`: what they plan, and mistakes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from support.models import LLAMA
from torch_recompute import peaks
from torch_recompute.commands import cli
from torch_recompute.commands.models import batch_for, load

MIXTURE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
WIDE = {**LLAMA, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 512}  # whose weights have whole blocks

EACH = {"fp32-master": 12.0, "bf16": 4.0, "8bit": 2 + 8 / 256}  # bytes of states per parameter

pytestmark = pytest.mark.usefixtures("plain_terminal")


@pytest.fixture
def llama(tmp_path: Path) -> str:
    """The path of a tiny configuration."""
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**WIDE, "torch_dtype": "bfloat16"}))
    return str(path)


def document(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert cli.main(["plan", *argv, "--json"]) == cli.OK, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_bytes_per_parameter(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each kind of states takes its bytes per parameter, alone and on ranks of FSDP, and says so."""
    argv = llama, "--sequence", "64"
    for states, each in EACH.items():
        for ranks in ((), ("--fsdp", "2")):
            found = document(capsys, *argv, "--recompute", "none", "--states", states, *ranks)
            (one,) = found["configurations"]
            whole = 4 if ranks and states == "fp32-master" else 2  # its shards are the copies in 32 bits
            assert one["bytes_per_parameter"]["weights"] == whole
            assert one["bytes_per_parameter"]["states"] == pytest.approx(each - 4 * (whole == 4), abs=0.2)
            assert found["states"] == states
    assert cli.main(["plan", *argv, "--recompute", "none", "--states", "8bit"]) == cli.OK
    said = capsys.readouterr().out
    assert "optimizer adamw-fused, states 8bit" in said
    assert "bytes per parameter: 2.00 weights, 2.00 gradients, " in said


@pytest.mark.nightly
@pytest.mark.parametrize("states", EACH)
def test_bytes_per_parameter_on_ranks_of_a_pipeline(
    states: str, llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each kind of states takes its bytes per parameter on a rank of a pipeline, shared with its replica."""
    small = 10 * 512 * 4  # of norms, whose moments are in 16 bits, and of rounding
    argv = llama, "--sequence", "64", "--pp", "3", "--dp", "2", "--states", states, "--budget", "1GiB"
    first, *_ = document(capsys, *argv)["ranks"]
    assert abs(first["optimizer_bytes"] - EACH[states] * first["parameters"] / 2) <= 2 * small


def test_a_budget_below_the_states_names_what_holds_less(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each option that is named, the least first, holds the bytes beside it; those that hold too much are not named."""
    pytest.importorskip("peft")
    argv = llama, "--sequence", "64"
    held: dict[str, dict[str, float]] = {}
    for budget in (3 << 20, 8 << 20, 14 << 20):
        assert cli.main(["plan", *argv, "--budget", str(budget)]) == cli.TOO_SMALL
        said = capsys.readouterr().err
        words = re.findall(r"(--[^,(]*) \(([\d.]+) MiB( on a rank)?\)", said.partition("any of ")[2])
        held[str(budget)] = {option: float(size) for option, size, _ in words}
        assert [*held[str(budget)].values()] == sorted(held[str(budget)].values())
        assert all(size * 2**20 < budget for size in held[str(budget)].values())
    few, some, most = held.values()
    assert [*few] == ["--fsdp 16", "--lora 16 --base nf4"]
    assert {*some} - {*few} == {
        "--lora 16",
        "--optimizer-on-host",
        "--optimizer adafactor",
        "--optimizer sgd",
        "--fsdp 4",
    }
    assert {*most} - {*some} == {"--optimizer-in-backward", "--states 8bit"}
    for option, size in most.items():
        (one,) = document(capsys, *argv, "--recompute", "none", *option.split())["configurations"]
        made = one["made_of"]
        weights, states = made["weights_bytes"], made["states_bytes"]
        gradients = states / 2 if "lora" in option else 0 if "host" in option or "backward" in option else weights
        assert weights + gradients + states == pytest.approx(size * 2**20, rel=0.04), option


def test_a_budget_below_the_states_of_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks that share experts are refused before anything is simulated, with the bytes that the table then shows."""
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**MIXTURE, "torch_dtype": "bfloat16"}))
    argv = str(path), "--sequence", "64", "--batch", "4", "--mbs", "1", "--dp", "4", "--ep", "2"
    assert cli.main(["plan", *argv, "--budget", "1KiB"]) == cli.TOO_SMALL
    found = re.search(r"states are .* \((\d+) bytes\) on average", capsys.readouterr().err)
    assert found is not None
    (row,) = document(capsys, *argv, "--recompute", "full")["configurations"]
    (rank,) = row["ranks"]
    sums = sum(rank[f"{word}_bytes"] for word in ("weight", "gradient", "optimizer"))
    assert int(found[1]) == pytest.approx(sums, rel=0.01)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_they_are_the_users_own(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A step in backward is that of hooks, and adapters are PEFT's, with the same figures as in Python."""
    peft = pytest.importorskip("peft")
    argv = llama, "--sequence", "64", "--recompute", "none,full", "--optimizer", "sgd", "--dtype", "bf16"
    model = load(llama, torch.bfloat16).model
    own = {weight: torch.optim.SGD([weight]) for weight in model.parameters()}

    def step(weight: torch.Tensor) -> None:
        own[weight].step()
        own[weight].zero_grad()

    for weight in own:
        weight.register_post_accumulate_grad_hook(step)
    found = document(capsys, *argv, "--optimizer-in-backward")
    same = peaks(model, batch_for(model, "it", 1, 64), device="h100")
    assert [one["peak_bytes"] for one in found["configurations"]] == [one.peak_bytes for one in same]
    assert found["optimizer_in_backward"] is True

    found = document(capsys, *argv, "--lora", "4:v_proj,down_proj")
    model = load(llama, torch.bfloat16).model
    batch = batch_for(model, "it", 1, 64)
    lora = peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["v_proj", "down_proj"])
    same = peaks(peft.get_peft_model(model, lora), batch, device="h100", optimizer="sgd")
    assert found["configurations"] == [json.loads(json.dumps(one.as_data())) for one in same]
    assert (found["class"], found["lora"]) == ("PeftModelForCausalLM", "4:v_proj,down_proj")


@pytest.mark.nightly
def test_they_compose(llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They go with budgets, curves, ranks and the report of a plan."""
    argv, out = (llama, "--sequence", "64"), tmp_path / "plan.json"
    states = "--states", "8bit", "--optimizer-in-backward", "--optimizer-on-host"
    plan = document(capsys, *argv, *states, "--budget", "0.5", "--out", str(out))["plan"]["prediction"]
    assert plan["loop"]["frees_gradients"] is True
    assert cli.main(["report", str(out), "--json", "--points", "0"]) == cli.OK
    chosen = json.loads(capsys.readouterr().out)
    assert chosen["steps"][chosen["chosen"]]["peak_bytes"] == plan["peak_bytes"]
    assert document(capsys, *argv, *states, "--frontier")["frontier"]
    found = document(capsys, *argv, *states, "--budget", "1GiB", "--fsdp", "2", "--cp", "2")
    assert found["ranks"]["fsdp"] == 2
    rows = document(
        capsys, *argv, "--lora", "4", "--base", "nf4", "--pp", "3", "--budget", "1GiB", "--optimizer-on-host"
    )["ranks"]
    assert all(row["optimizer_bytes"] == 0 < row["gradient_bytes"] < row["weight_bytes"] for row in rows)
    assert "weights from host memory" in [one["what"] for one in rows[0]["sent"]]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            ["--states", "8bit", "--optimizer", "sgd"],
            "does not go with --optimizer sgd: it is of adamw-fused",
        ),
        (["--optimizer-in-backward", "--optimizer", "none"], "--optimizer none: there is no optimizer"),
        (["--optimizer-in-backward", "--accumulate", "2"], "--accumulate 2: it steps in each backward"),
        (["--optimizer-in-backward", "--no-set-to-none"], "--no-set-to-none: gradients are freed in backward"),
        (["--optimizer-in-backward", "--pp", "2"], "--pp: gradients of its microbatches are added up"),
        (["--optimizer-in-backward", "--tp", "2"], "ranks without --fsdp: their optimizer is Megatron's"),
        (["--optimizer-in-backward", "--dp", "2"], "keeps gradients in buffers"),
        (["--optimizer-in-backward", "--fsdp", "2", "--batch", "4"], "--batch 4: that is several microbatches (--mbs)"),
        (["--optimizer-on-host", "--device", "cpu"], "--device cpu: its memory is host memory already"),
        (["--optimizer-on-host", "--pp", "2", "--optimizer", "sgd"], "--optimizer sgd: it has no states"),
        (["--lora", "0"], "--lora is '0'; expected the rank of the adapters, an integer from 1"),
        (["--lora", "8:"], "--lora is '8:'; expected the rank"),
        (["--lora", "8:q_prj"], "has none of that name. Close to it: q_proj"),
        (["--lora", "8", "--tp", "2"], "has collectives for its products, and none for adapters"),
        (["--tiles", "--pp", "2"], "--tiles with --pp: what is in tiles is not searched for on each rank"),
        (["--tiles", "--tp", "2"], "--tiles does not go with --tp: ranks that share a product"),
        (["--tiles", "--pp", "2", "--fsdp", "2"], "--tiles does not go with --fsdp with --pp: torch's pipeline makes"),
        (["--base", "nf4"], "--base nf4 goes with --lora"),
        (["--lora", "8", "--layers", "fused"], "--lora does not go with --layers fused: its kernels take"),
        (["--lora", "8", "--base", "nf4", "--layers", "compiled"], "--base nf4 does not go with --layers compiled"),
        (["--lora", "8", "--base", "bf16", "--dtype", "fp32"], "--dtype fp32: it is the type of the weights"),
    ],
)
def test_mistakes(llama: str, argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What does not go together is refused in one sentence, before anything is simulated."""
    assert cli.main(["plan", llama, "--budget", "0.5", *argv]) == cli.USAGE
    assert says in capsys.readouterr().err
